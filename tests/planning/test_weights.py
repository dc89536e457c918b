"""How weights are planned: formats, blocks, kernels, pairs, layouts and large constants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from conftest import Build
from numpy.typing import NDArray
from onnx import ModelProto, numpy_helper
from packaged_encoders import installed_package

from onnxq.config.scheme import Granularity, Method, Mode, QuantSpec, Rule, Scheme, Storage
from onnxq.errors import SchemeError
from onnxq.ir import Node, Tensor, Variable, constant
from onnxq.lowering import AllowedOps
from onnxq.numerics.pairs import Pairs
from onnxq.pipeline.quantization import quantize
from onnxq.planning.plan import Decision, Plan, Weight
from onnxq.planning.weights import (
    check_weight_spec,
    decide_weights,
    every_weight,
    format_opset,
    large_weights,
    needed_opset,
    weight_at,
    weight_spec,
    with_pairs,
)
from onnxq.runtime.targets import TARGETS, Target

TARGET = TARGETS["onnxruntime-cpu"]
INT4 = QuantSpec("int4", (32,))
FLOAT = np.dtype(np.float32)


def call(op: str, weight: Any, *, index: int = 1, bias: Any = None, dtype: Any = FLOAT, **attributes: object) -> Node:
    """A node that reads ``x`` and a weight of this shape."""
    held = constant("w", np.zeros(weight, dtype)) if isinstance(weight, tuple) else weight
    data = Variable("x", FLOAT, [3, 4])
    inputs = [held, data] if index == 0 else [data, held]
    return Node(op, "node", attributes, inputs + ([] if bias is None else [bias]), [Variable("y", FLOAT)])


def decide(node: Node, spec: QuantSpec = INT4, mode: Mode = Mode.WEIGHT_ONLY, *, in_body: bool = False) -> Decision:
    return decide_weights(node, mode, spec, "it was asked for", in_body=in_body)


# --- multiplied, looked up, stored, left ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        (call("MatMul", (32, 16)), "multiplies by int4 weights"),
        (call("Gemm", (16, 32), transB=1), "multiplies by int4 weights"),
        (call("Gemm", (32, 16), bias=constant("b", np.zeros(16, np.float32))), "multiplies by int4 weights"),
        (call("Gather", (50, 32), index=0), "looks up int4 rows"),
    ],
)
def test_codes_are_used_as_they_are_where_the_runtime_can(node: Node, reason: str) -> None:
    decision = decide(node)
    assert (decision.mode, decision.reason) == (Mode.WEIGHT_ONLY, reason)


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        (call("Conv", (16, 8, 3, 3)), "no kernel of Conv takes quantized weights"),
        (call("ConvTranspose", (16, 8, 3, 3)), "no kernel of ConvTranspose takes quantized weights"),
        (call("LSTM", (1, 64, 16)), "no kernel of LSTM takes quantized weights"),
        (call("MatMul", (4, 32, 16)), "only a second operand of rank 2 can stay quantized"),
        (call("MatMul", (32, 16), index=0), "only a second operand of rank 2 can stay quantized"),
        (call("Gemm", (32, 16), alpha=2.0), "no kernel of a Gemm with alpha, beta or transA takes quantized weights"),
        (
            call("Gemm", (32, 16), bias=constant("b", np.zeros((1, 16), np.float32))),
            "its bias is not a vector of 16 values",
        ),
        (
            call("MatMul", (32, 16), dtype=ml_dtypes.bfloat16),
            "no kernel takes quantized weights with bfloat16 activations",
        ),
        (call("Gather", (50, 32), index=0, axis=1), "only rows of a rank-2 table are looked up quantized"),
        (call("Gather", (50, 4, 8), index=0), "only rows of a rank-2 table are looked up quantized"),
    ],
)
def test_other_weights_are_decoded_when_the_model_is_loaded(node: Node, reason: str) -> None:
    decision = decide(node)
    assert (decision.mode, decision.reason) == (
        Mode.STORAGE,
        f"computes in float, int4 weights dequantized at load: {reason}",
    )
    assert decision.weights


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (QuantSpec("float8e4m3fn", (32,)), "no kernel takes float8e4m3fn weights"),
        (QuantSpec("int16", (32,)), "no kernel takes int16 weights"),
        (QuantSpec("int4", (8,)), "kernels take blocks of 16, 32, 64 and so on along the reduction axis, not [8]"),
        (QuantSpec("int4", (48,)), "kernels take blocks of 16, 32, 64 and so on along the reduction axis, not [48]"),
        (
            QuantSpec("int4", (2, 16)),
            "kernels take blocks of 16, 32, 64 and so on along the reduction axis, not [2, 16]",
        ),
    ],
)
def test_formats_and_blocks_that_no_kernel_multiplies_are_stored(spec: QuantSpec, reason: str) -> None:
    decision = decide(call("MatMul", (64, 16)), spec)
    assert (decision.mode, decision.reason) == (
        Mode.STORAGE,
        f"computes in float, {spec.format} weights dequantized at load: {reason}",
    )


def test_rows_of_several_tokens_in_a_block_are_stored() -> None:
    decision = decide(call("Gather", (50, 32), index=0), QuantSpec("int4", (2, 16)))
    assert (decision.mode, decision.reason.split(": ")[1]) == (
        Mode.STORAGE,
        "blocks of several rows are not looked up quantized",
    )


@pytest.mark.parametrize(("rows", "mode"), [(2, Mode.FLOAT), (7, Mode.FLOAT), (8, Mode.STORAGE), (50, Mode.STORAGE)])
def test_a_table_of_few_rows_stays_float(rows: int, mode: Mode) -> None:
    decision = decide(call("Gather", (rows, 384), index=0), mode=Mode.STORAGE)
    assert decision.mode is mode
    assert ("too small to be worth the error" in decision.reason) is (mode is Mode.FLOAT)


def test_few_rows_of_many_values_are_stored_and_other_frameworks_followed() -> None:
    assert decide(call("Gather", (2, 16384), index=0), mode=Mode.STORAGE).mode is Mode.STORAGE
    burn = QuantSpec("int8-narrow", method=Method.BURN)
    assert decide(call("Gather", (2, 384), index=0), burn, Mode.STORAGE).mode is Mode.STORAGE


def test_indices_of_unknown_rank_are_no_obstacle_to_storage() -> None:
    node = call("Gather", (50, 32), index=0)
    node.inputs[1].shape = None
    assert decide(node).reason.endswith("the rank of its indices is unknown")


def test_a_product_in_a_body_is_stored() -> None:
    assert decide(call("MatMul", (32, 16)), in_body=True).mode is Mode.STORAGE
    assert decide(call("Gather", (50, 32), index=0), in_body=True).mode is Mode.WEIGHT_ONLY


def test_a_weight_of_two_products_is_stored() -> None:
    shared = constant("w", np.zeros((32, 16), np.float32))
    one, other = call("MatMul", shared), call("MatMul", shared)
    assert {decide(one).mode, decide(other).mode} == {Mode.STORAGE}


@pytest.mark.parametrize(
    "node",
    [
        call("MatMul", (8, 8)),
        call("MatMul", Variable("w", FLOAT, [32, 16])),
        call("MatMul", (32, 16), dtype=np.float64),
        call("Add", (32, 16)),
        call("Gemm", (512,)),
    ],
)
def test_nodes_without_large_float_weights_stay_float(node: Node) -> None:
    assert (decide(node).mode, decide(node).reason) == (Mode.FLOAT, "it was asked for")


def test_small_tables_stay_float() -> None:
    node = call("Gather", (20, 32), index=0)
    assert decide(node).reason == "a table of 640 values, too small to save bytes"
    assert decide(node, mode=Mode.STORAGE).mode is Mode.STORAGE


def test_blocks_of_more_axes_than_the_weight_leave_it_in_float() -> None:
    decision = decide(call("MatMul", (32, 16)), QuantSpec("int4", (2, 4, 8)), Mode.STORAGE)
    assert (decision.mode, decision.reason) == (Mode.FLOAT, "its weight has rank 2, too few for blocks of 3 axes")
    assert decide(call("MatMul", (32, 16)), QuantSpec("int4", (1, 4, 8)), Mode.STORAGE).mode is Mode.STORAGE


@pytest.mark.parametrize(
    ("shape", "granularity"),
    [
        ((64, 32, 3, 3), (32,)),
        ((64, 16, 3, 3), (32,)),
        ((64, 15, 3, 3), Granularity.CHANNEL),
        ((64, 1, 3, 3), Granularity.CHANNEL),
    ],
)
def test_kernels_that_sum_over_few_channels_have_a_scale_for_each_output(
    shape: tuple[int, ...], granularity: Any
) -> None:
    (weight,) = decide(call("Conv", shape)).weights
    assert weight.spec.granularity == granularity


def test_short_rows_of_matrices_keep_their_blocks() -> None:
    (weight,) = decide(call("MatMul", (8, 64))).weights
    assert weight.spec == INT4


# --- float16 --------------------------------------------------------------------------------------------------------


def test_multiplied_float16_weights_get_float16_scales() -> None:
    (weight,) = decide(call("MatMul", (32, 16), dtype=np.float16)).weights
    assert weight.spec == QuantSpec("int4", (32,), scale="float16")
    (weight,) = decide(call("Gather", (50, 32), index=0, dtype=np.float16)).weights
    assert weight.spec == INT4


@pytest.mark.parametrize(
    "spec", [QuantSpec("int4", (32,), scale="e8m0"), QuantSpec("int4", (32,), scale="ue4m3", two_level=True)]
)
def test_float16_data_is_not_multiplied_with_scales_that_float16_may_not_hold(spec: QuantSpec) -> None:
    decision = decide(call("MatMul", (32, 16), dtype=np.float16), spec)
    assert decision.mode is Mode.STORAGE
    assert decision.reason.endswith("with float16 activations, weights need float16 scales")


# --- specs ----------------------------------------------------------------------------------------------------------


def test_a_weight_knows_its_channels_and_what_is_summed_over() -> None:
    weight = weight_at(call("Gemm", (16, 32), transB=1), 1, INT4)
    assert (weight.tensor, weight.axis, weight.reduction_axis, weight.elements) == ("w", 0, 1, 512)


def test_a_rule_without_weights_takes_those_of_the_target() -> None:
    assert weight_spec(Rule(Mode.STORAGE), TARGET) == TARGET.weight
    assert weight_spec(Rule(Mode.STORAGE, weight=INT4), TARGET) is INT4


@pytest.mark.parametrize("mode", [Mode.STATIC, Mode.DYNAMIC])
@pytest.mark.parametrize(
    ("spec", "reported"),
    [
        (INT4, "symmetric int4 per block of [32]"),
        (QuantSpec("int8", scale="float16"), "symmetric int8 per tensor"),
        (QuantSpec("int8", Granularity.CHANNEL, symmetric=False), "affine int8 per channel"),
        (QuantSpec("uint8", symmetric=False), "affine uint8 per tensor"),
        (QuantSpec("int8", storage=Storage.WORDS), "symmetric int8 per tensor"),
    ],
)
def test_integer_kernels_multiply_plain_int8_only(mode: Mode, spec: QuantSpec, reported: str) -> None:
    with pytest.raises(SchemeError, match="fast integer kernel") as caught:
        check_weight_spec(spec, mode, TARGET)
    assert str(caught.value).startswith(f"weights as {reported} have no")
    check_weight_spec(spec, Mode.WEIGHT_ONLY, TARGET)


def test_codes_as_wide_as_floats_save_nothing() -> None:
    with pytest.raises(SchemeError, match=r"^weights as int32 are no smaller than floats; use int16 or fewer bits$"):
        check_weight_spec(QuantSpec("int32"), Mode.STORAGE, TARGET)


# --- opset ----------------------------------------------------------------------------------------------------------


def test_a_plan_asks_for_the_opset_of_its_newest_decoder() -> None:
    stored = decide(call("Conv", (16, 8, 3, 3)), QuantSpec("int8", Granularity.CHANNEL))
    multiplied = decide(call("MatMul", (32, 16)))
    assert format_opset(Plan((stored,), (), "", ""), AllowedOps.QDQ) == 7
    assert format_opset(Plan((stored, multiplied), (), "", ""), AllowedOps.QDQ) == 21
    assert format_opset(Plan((stored, multiplied), (), "", ""), AllowedOps.ORT) == 7
    assert format_opset(Plan((), (), "", ""), AllowedOps.QDQ) == 0


@pytest.mark.parametrize(
    ("op", "target", "emit", "sentence"),
    [
        ("LSTM", "onnxruntime-cpu", AllowedOps.QDQ,
         "LSTM has no dynamic integer kernel in standard ONNX; say --emit ort"),
        ("LSTM", "tensorrt", AllowedOps.ORT, "LSTM has no dynamic integer kernel in tensorrt; give it another mode"),
        ("GRU", "onnxruntime-cpu", AllowedOps.ORT,
         "GRU has no dynamic integer kernel in onnxruntime-cpu; give it another"),
    ],
)  # fmt: skip
def test_a_plan_whose_dynamic_nodes_cannot_be_written_is_refused(
    op: str, target: str, emit: AllowedOps, sentence: str
) -> None:
    plan = Plan((Decision("cell", op, Mode.DYNAMIC, ""),), (), "", target)
    with pytest.raises(SchemeError, match=f"node cell is dynamic, and {sentence}"):
        format_opset(plan, emit)


def test_dynamic_nodes_need_no_decoder() -> None:
    nodes = tuple(Decision(op, op, Mode.DYNAMIC, "") for op in ("Gemm", "LSTM", "MatMul"))
    assert format_opset(Plan(nodes, (), "", "onnxruntime-cpu"), AllowedOps.ORT) == 0


@pytest.mark.parametrize("columns", [1, 6, 7])
def test_two_bit_codes_are_stored_where_onnxruntime_would_take_them_apart_wrongly(columns: int) -> None:
    assert decide(call("MatMul", (512, columns)), QuantSpec("int2", (32,))).reason.endswith(
        "onnxruntime multiplies 2-bit weights wrongly when their columns do not fill bytes"
    )
    assert decide(call("MatMul", (512, columns)), QuantSpec("int4", (32,))).mode is Mode.WEIGHT_ONLY
    assert decide(call("MatMul", (512, 4 * columns)), QuantSpec("int2", (32,))).mode is Mode.WEIGHT_ONLY


def test_integer_kernels_take_weights_that_pytorch_would_make() -> None:
    spec = QuantSpec("int8", Granularity.CHANNEL, method=Method.TORCH)
    check_weight_spec(spec, Mode.STATIC, TARGET)


@pytest.mark.parametrize(
    ("target", "spec", "sentence"),
    [
        (
            "openvino",
            QuantSpec("int4", (32,), storage=Storage.WORDS),
            "uint32 words are decoded wrongly by openvino",
        ),
        ("openvino", QuantSpec("int2", (16,)), "openvino does not read weights as int2, expected 4 bits or more"),
        ("tensorrt", QuantSpec("int4", (32,)), "tensorrt reads no negative scales, .* of int4 have; use int4-narrow"),
    ],
)
def test_what_a_target_cannot_read_is_refused(target: str, spec: QuantSpec, sentence: str) -> None:
    with pytest.raises(SchemeError, match=sentence):
        check_weight_spec(spec, Mode.WEIGHT_ONLY, TARGETS[target])
    check_weight_spec(spec, Mode.WEIGHT_ONLY, TARGETS["onnxruntime-cpu"])


@pytest.mark.parametrize("target", ["onnxruntime-cpu", "qnn", "tensorrt"])
def test_scales_are_positive_where_a_target_reads_no_others(target: str, build: Build, tmp_path: Path) -> None:
    model = build("(float[4, 64] x) => (float[4, 32] y) { y = MatMul (x, w) }", w=(64, 32))
    quantize(model, None, tmp_path / "out.onnx", scheme="int4-block32", target=target, budget="off")
    kept = [numpy_helper.to_array(one) for one in onnx.load(tmp_path / "out.onnx").graph.initializer]
    [scales] = [one for one in kept if one.dtype == np.float32]
    assert scales.size == 64
    assert (scales > 0).all() == (target != "onnxruntime-cpu")


# Weights of 4 bits, and by encoders of packages, between data of 8 bits.

NARROW = QuantSpec("int4-narrow", Granularity.CHANNEL, method=Method.MSE)


def test_weights_of_four_bits_stand_between_data_where_the_target_reads_them() -> None:
    for mode, target in ((Mode.DYNAMIC, TARGET), (Mode.STATIC, TARGETS["tensorrt"])):
        with pytest.raises(SchemeError, match=r"^weights as symmetric int4-narrow per channel have no fast integer"):
            check_weight_spec(NARROW, mode, target)
    check_weight_spec(NARROW, Mode.STATIC, TARGET)


@pytest.mark.parametrize("emit", [AllowedOps.QDQ, AllowedOps.ORT])
def test_static_weights_of_four_bits_ask_for_the_opset_of_their_type(emit: AllowedOps) -> None:
    decisions = [
        Decision("n", "MatMul", Mode.STATIC, "", (Weight(1, "w", spec, 0, 8),)) for spec in (QuantSpec("int8"), NARROW)
    ]
    needed = [needed_opset(Plan((one,), (), "", TARGET.name), emit) for one in decisions]
    assert needed == [13, 21]


@pytest.mark.parametrize("mode", [Mode.STATIC, Mode.DYNAMIC, Mode.WEIGHT_ONLY, Mode.STORAGE])
def test_the_encoder_of_a_package_makes_codes_of_every_mode(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = QuantSpec("int8", Granularity.CHANNEL, method="halved")
    with installed_package(monkeypatch):
        check_weight_spec(spec, mode, TARGET)
        with pytest.raises(SchemeError, match="did you mean 'halved'"):
            check_weight_spec(replace(spec, method="halve"), mode, TARGET)


# Blocks of weights that are not whole, which some runtimes do not read.


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(("rows", "granularity"), [(64, (32,)), (120, Granularity.CHANNEL), (120, (32,))])
def test_parts_of_blocks_are_stored_where_they_are_not_read(
    rows: int, granularity: Granularity | tuple[int, ...], whole: bool
) -> None:
    weight, data = constant("w", np.zeros((rows, 8), np.float32)), Variable("x", np.dtype(np.float32), [3, rows])
    node = Node("MatMul", "node", {}, [data, weight], [Variable("y", np.dtype(np.float32))])
    found = decide_weights(
        node, Mode.WEIGHT_ONLY, QuantSpec("int4", granularity), "so", in_body=False, whole_blocks=whole
    )
    if whole and rows == 120 and isinstance(granularity, tuple):
        assert found.mode is Mode.STORAGE
        assert (
            found.reason == "computes in float, int4 weights dequantized at load: 120 values do not fill blocks of 32"
        )
    else:
        assert found.mode is Mode.WEIGHT_ONLY


# Weights that onnxruntime's own operators, or kernels that it makes itself, cannot read are stored.


def decide_of_weight_plan_blobs(
    op: str, shape: tuple[int, int], spec: QuantSpec, emit: AllowedOps = AllowedOps.QDQ
) -> Decision:
    weight, data = constant("w", np.zeros(shape, FLOAT)), Variable("x", FLOAT, [3, 4])
    inputs = [weight, data] if op == "Gather" else [data, weight]
    node = Node(op, "node", {}, inputs, [Variable("y", FLOAT)])
    return decide_weights(node, Mode.WEIGHT_ONLY, spec, "it was asked for", emit, in_body=False)


@pytest.mark.parametrize(
    ("columns", "format", "emit", "mode"),
    [
        (96, "uint4", AllowedOps.ORT, Mode.STORAGE),
        (96, "uint4", AllowedOps.QDQ, Mode.WEIGHT_ONLY),
        (96, "int4", AllowedOps.ORT, Mode.WEIGHT_ONLY),
        (128, "uint4", AllowedOps.ORT, Mode.WEIGHT_ONLY),
        (75, "int4", AllowedOps.ORT, Mode.STORAGE),
    ],
)
def test_rows_that_end_within_a_byte_are_looked_up_by_standard_operators_alone(
    columns: int, format: str, emit: AllowedOps, mode: Mode
) -> None:
    found = decide_of_weight_plan_blobs(
        "Gather", (512, columns), QuantSpec(format, (32,), symmetric=format == "int4"), emit
    )
    assert found.mode is mode
    assert ("reads rows of whole bytes" in found.reason) == (mode is Mode.STORAGE)


@pytest.mark.parametrize("format", ["int2", "uint2"])
def test_two_bits_in_words_are_not_multiplied(format: str) -> None:
    spec = QuantSpec(format, (32,), storage=Storage.WORDS, symmetric=format == "int2")
    found = decide_of_weight_plan_blobs("MatMul", (512, 64), spec)
    assert found.mode is Mode.STORAGE
    assert found.reason.endswith("cannot multiply by 2-bit weights in words")


# What becomes of weights where another toolkit's arithmetic is followed.

# --- every parameter, as Burn does --------------------------------------------------------------------------------

BURN = QuantSpec("int8-narrow", method=Method.BURN)


def burned(node: Node) -> list[tuple[int, str]]:
    decision = decide_weights(node, Mode.STORAGE, BURN, "so", in_body=False)
    assert decision.mode is (Mode.STORAGE if decision.weights else Mode.FLOAT)
    assert all((weight.spec, weight.axis, weight.reduction_axis) == (BURN, 0, -1) for weight in decision.weights)
    return [(weight.index, weight.tensor) for weight in decision.weights]


def operands(op: str, *arrays: NDArray[Any]) -> Node:
    data = Variable("x", np.dtype(np.float32), [2, 4])
    return Node(op, "n", {}, [data, *(constant(f"p{i}", array) for i, array in enumerate(arrays))], [Variable("y")])


def test_burn_takes_biases_norms_and_the_weights_of_operators_that_onnxq_does_not_know() -> None:
    weight, bias = np.ones((4, 4), np.float32), np.ones(4, np.float32)
    assert burned(operands("Gemm", weight, bias)) == [(1, "p0"), (2, "p1")]
    assert burned(operands("LayerNormalization", bias, bias)) == [(1, "p0"), (2, "p1")]
    assert burned(operands("Mystery", weight.astype(np.float16), np.ones((1, 1, 3)).astype(np.float32))) == [
        (1, "p0"),
        (2, "p1"),
    ]


def test_settings_numbers_masks_and_integers_are_no_parameters() -> None:
    sizes = np.array([1, 1, 2, 2], np.float32)
    assert burned(operands("Resize", np.zeros(0, np.float32), sizes)) == []
    assert burned(operands("Pow", np.array(2, np.float32))) == []
    assert burned(operands("Add", np.array([[0, -np.inf]], np.float32))) == []
    assert burned(operands("Gather", np.arange(4))) == []
    assert burned(operands("Mul", np.zeros((0, 4), np.float32))) == []


@pytest.mark.parametrize(
    ("mode", "spec", "message"),
    [
        (Mode.STATIC, BURN, 'method = "burn" has mode static, expected storage or float; set mode = "storage"'),
        (Mode.WEIGHT_ONLY, BURN, 'method = "burn" has mode weight-only, expected storage or float'),
        (Mode.STORAGE, QuantSpec("int8", Granularity.CHANNEL, method=Method.BURN), "Burn has no scales per channel"),
        (Mode.STORAGE, QuantSpec("int4", (256,), method=Method.BURN), "Burn has no blocks longer than 255"),
    ],
)
def test_what_burn_does_not_do_is_told(mode: Mode, spec: QuantSpec, message: str) -> None:
    with pytest.raises(SchemeError) as caught:
        check_weight_spec(spec, mode, TARGET)
    assert str(caught.value).startswith(message)


# Which constants of a node become quantized values when it computes in float.

INT8 = QuantSpec("int8-narrow", Granularity.CHANNEL)
CONTRIB = "com.microsoft"


def learned(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def call_of_large_constants(op: str, *inputs: NDArray[Any] | None, domain: str = "", **attributes: Any) -> Node:
    """A node that is fed where there is no array."""
    made: list[Tensor] = [
        Variable(f"x{index}", np.float32) if one is None else constant(f"w{index}", one)
        for index, one in enumerate(inputs)
    ]
    return Node(op, "n", attributes, made, [Variable("y")], domain)


def axes(node: Node) -> dict[int, tuple[int, int]]:
    return {weight.index: (weight.axis, weight.reduction_axis) for weight in large_weights(node, INT8)}


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (call_of_large_constants("Attention", None, learned(8, 96), learned(96), domain=CONTRIB), {1: (-1, 0)}),
        (call_of_large_constants("FusedMatMul", None, learned(16, 32), domain=CONTRIB), {1: (-1, -2)}),
        (call_of_large_constants("FusedMatMul", None, learned(16, 32), domain=CONTRIB, transB=1), {1: (-2, -1)}),
        (
            call_of_large_constants("FusedGemm", None, learned(16, 32), learned(16), domain=CONTRIB, transB=1),
            {1: (0, 1)},
        ),
        (call_of_large_constants("FusedConv", None, learned(16, 3, 3, 3), domain=CONTRIB), {1: (0, 1)}),
        (
            call_of_large_constants(
                "EmbedLayerNormalization", None, None, learned(99, 8), learned(64, 8), learned(2, 8), domain=CONTRIB
            ),
            {2: (0, -1), 3: (0, -1)},
        ),
        (call_of_large_constants("Einsum", None, learned(64, 128), equation="bi,ij->bj"), {1: (1, 1)}),
        (call_of_large_constants("Add", None, learned(1, 197, 64)), {1: (1, 2)}),
        (call_of_large_constants("Add", learned(1, 4096), None), {0: (0, 1)}),
        (call_of_large_constants("Mystery", None, learned(128, 64), domain="my.own"), {1: (0, 1)}),
    ],
)
def test_learned_numbers_of_any_operator_are_stored(node: Node, expected: dict[int, tuple[int, int]]) -> None:
    assert axes(node) == expected


@pytest.mark.parametrize("spec", [INT8, QuantSpec("int4", (32,))])
@pytest.mark.parametrize(
    "node",
    [
        call_of_large_constants("LSTM", None, learned(64, 8), learned(64, 16)),
        call_of_large_constants("Conv", None, learned(512)),
        call_of_large_constants("Gather", learned(64, 8), None, axis=5),
    ],
    ids=lambda node: node.op,
)
def test_a_damaged_weight_that_lacks_an_axis_of_its_operator_is_not_stored(node: Node, spec: QuantSpec) -> None:
    assert not list(large_weights(node, spec))


HALVES = np.arange(8192, dtype=np.float32).reshape(128, 64) / 2


@pytest.mark.parametrize(
    "node",
    [
        call_of_large_constants("Add", None, learned(64, 63)),
        call_of_large_constants("Add", None, learned(8192)),
        call_of_large_constants("Add", None, learned(128, 64).astype(np.float64)),
        call_of_large_constants("Add", None, HALVES),
        call_of_large_constants("Add", None, np.triu(np.full((128, 128), np.finfo(np.float32).min))),
        call_of_large_constants("Add", None, np.where(HALVES > 7, -np.inf, learned(128, 64)).astype(np.float32)),
        call_of_large_constants("Greater", None, learned(128, 64)),
        call_of_large_constants("RotaryEmbedding", None, None, learned(128, 64), learned(128, 64), domain=CONTRIB),
        call_of_large_constants("Gemm", None, None, learned(1, 8192)),
    ],
)
def test_small_chosen_and_setting_numbers_are_not(node: Node) -> None:
    assert axes(node) == {}


def test_every_weight_is_any_size() -> None:
    assert [weight.index for weight in every_weight(call_of_large_constants("Add", None, HALVES[:1]), INT8)] == [1]


BLOCKS = QuantSpec("int4-narrow", (32,), scale="float16")
NV = QuantSpec("float4e2m1", (16,), scale="ue4m3", two_level=True)


@pytest.mark.parametrize(
    ("shape", "spec", "expected"),
    [
        ((5000, 1), INT8, Granularity.TENSOR),
        ((5000, 2), INT8, Granularity.TENSOR),
        ((5000, 4), INT8, Granularity.TENSOR),
        ((5000, 5), INT8, Granularity.CHANNEL),
        ((5000, 16), INT8, Granularity.CHANNEL),
        ((5000, 1), replace(INT8, format="int16-narrow"), Granularity.TENSOR),
        ((5000, 3), replace(INT8, format="int16-narrow"), Granularity.CHANNEL),
        ((5000, 1), BLOCKS, (32,)),
        ((5000, 1), replace(BLOCKS, scale="float32"), Granularity.TENSOR),
        ((5000, 1), replace(BLOCKS, granularity=(1,)), (1,)),
        ((5000, 2), BLOCKS, (32,)),
        ((5000, 64), BLOCKS, (32,)),
        ((5000, 1), NV, (16,)),
        ((5000, 1), replace(NV, scale="float16", two_level=False), (16,)),
        ((5000, 1), replace(INT8, method=Method.TORCH, format="int8"), Granularity.CHANNEL),
        ((64, 1), INT8, Granularity.CHANNEL),
        ((300, 1), INT8, Granularity.TENSOR),
    ],
)
def test_scales_take_no_more_than_their_codes_and_less_than_codes_save(
    shape: tuple[int, ...], spec: QuantSpec, expected: Granularity | tuple[int, ...]
) -> None:
    table = call_of_large_constants("Gather", learned(*shape), None)
    assert weight_at(table, 0, spec).spec.granularity == expected
    stored = [weight.spec.granularity for weight in large_weights(table, spec)]
    assert stored == ([expected] if np.prod(shape) >= 256 else [])
    turned = call_of_large_constants("MatMul", None, learned(*shape[::-1]))
    assert weight_at(turned, 1, spec).spec.granularity == expected


def test_a_weight_that_no_codes_make_smaller_stays() -> None:
    half = call_of_large_constants("MatMul", None, learned(64, 64).astype(np.float16))
    assert not list(large_weights(half, QuantSpec("int16-narrow", Granularity.CHANNEL)))
    assert list(large_weights(half, INT8))


def test_one_scale_of_a_tensor_needs_no_second_level() -> None:
    spec = replace(NV, granularity=(1,))
    (weight,) = large_weights(call_of_large_constants("MatMul", None, learned(64, 64).astype(np.float16)), spec)
    assert weight.spec == spec
    (weight,) = large_weights(
        call_of_large_constants("Gather", learned(5000, 1).astype(np.float16), None),
        replace(spec, format="float8e4m3fn"),
    )
    assert (weight.spec.granularity, weight.spec.two_level, weight.spec.scale) == (Granularity.TENSOR, False, "float32")


# Integer kernels take weights in the pairs of their target's row, and whoever shares a weight reads the same quantized
# values.

CPU = TARGETS["onnxruntime-cpu"]
PER_CHANNEL = QuantSpec("int8-narrow", Granularity.CHANNEL)


def call_of_pairing(op: str, shape: tuple[int, ...], **attributes: Any) -> Node:
    """Return a node that multiplies a weight of this shape, or looks its rows up."""
    data, weight = Variable("x", FLOAT, [3, 4]), constant("w", np.zeros(shape, FLOAT))
    inputs = [weight, data] if op == "Gather" else [data, weight]
    return Node(op, op.lower(), attributes, inputs, [Variable("y", FLOAT)])


def pairs_of(*nodes: tuple[Node, Mode], target: Target = CPU, spec: QuantSpec = PER_CHANNEL) -> list[Pairs]:
    """Return the pairs of the weight of each node."""
    weights = (weight_at(node, 0 if node.op == "Gather" else 1, spec) for node, _ in nodes)
    decisions = [
        Decision(node.name, node.op, mode, "", (weight,)) for (node, mode), weight in zip(nodes, weights, strict=True)
    ]
    found = with_pairs((node for node, _ in nodes), decisions, target)
    return [one.weights[0].pairs for one in found]


@pytest.mark.parametrize("target", TARGETS.values(), ids=list(TARGETS))
def test_convolutions_have_the_pairs_of_the_target_and_matrices_begin_anew(target: Target) -> None:
    own, product = target.kernels.pairs, Pairs.TAP
    assert own is (Pairs.TAP if target.name == "openvino" else Pairs.ROW)
    static = [
        call_of_pairing("Conv", (16, 8, 3, 3)),
        call_of_pairing("Conv", (16, 1, 3, 3), group=8),
        call_of_pairing("Gemm", (16, 8)),
    ]
    assert pairs_of(*((node, Mode.STATIC) for node in static), target=target) == [own, own, product]
    assert pairs_of((call_of_pairing("LSTM", (1, 64, 16)), Mode.DYNAMIC), target=target) == [product]


@pytest.mark.parametrize(
    ("node", "spec", "mode"),
    [
        (call_of_pairing("Conv", (16, 1, 3, 3), group=16), PER_CHANNEL, Mode.STATIC),
        (call_of_pairing("Gemm", (16, 8)), PER_CHANNEL, Mode.STORAGE),
        (call_of_pairing("Gemm", (16, 8)), QuantSpec("int4-narrow", Granularity.CHANNEL), Mode.STATIC),
        (call_of_pairing("Gemm", (16, 8)), QuantSpec("int16", Granularity.CHANNEL), Mode.STATIC),
        (call_of_pairing("Gemm", (16, 8)), QuantSpec("uint8", Granularity.CHANNEL, symmetric=False), Mode.STATIC),
        (call_of_pairing("Gemm", (16, 8)), QuantSpec("int8", Granularity.CHANNEL, method=Method.TORCH), Mode.STATIC),
    ],
    ids=["depthwise", "multiplied as floats", "4 bits", "16 bits", "unsigned", "in the arithmetic of PyTorch"],
)
def test_no_pairs_are_what_no_kernel_adds_so_or_others_decide(node: Node, spec: QuantSpec, mode: Mode) -> None:
    assert pairs_of((node, mode), spec=spec) == [Pairs.NONE]


def test_a_table_that_is_multiplied_too_has_the_codes_of_the_product() -> None:
    rows, product = call_of_pairing("Gather", (16, 8)), call_of_pairing("Gemm", (16, 8), transB=1)
    assert pairs_of((rows, Mode.STORAGE), (product, Mode.STATIC)) == [Pairs.TAP, Pairs.TAP]
    assert pairs_of((rows, Mode.STORAGE), (product, Mode.STORAGE)) == [Pairs.NONE, Pairs.NONE]
    # Along other axes, quantized values cannot be shared.
    assert pairs_of((rows, Mode.STORAGE), (call_of_pairing("Gemm", (16, 8)), Mode.STATIC)) == [Pairs.NONE, Pairs.TAP]


# A weight whose quantized values serve only one of its readers is said to be stored a second time.

BODIES = {
    "by Gemm": ("a = Gemm(x, w)  t = Tanh(a)  y = Gemm <transB = 1> (t, w)", 2),
    "in one order": ("a = MatMul(x, w)  t = Tanh(a)  y = MatMul(t, w)", 1),
    "turned twice": (
        "v = Transpose <perm = [1, 0]> (w)  a = MatMul(x, v)  t = Tanh(a)  y = Gemm <transB = 1> (t, w)",
        1,
    ),
    "in a body": (
        """a = MatMul(x, w)  t = Tanh(a)  y, z = Scan <num_scan_inputs = 1, body = b (float[3,256] h, float[256] u) =>
            (float[3,256] k, float[3,256] o) { m = MatMul(h, w)  k = Add(m, u)  o = Identity(k) }> (t, s)""",
        1,
    ),
}

# With one scale the quantized values differ only because they are fitted in pairs along the axis that each node sums
# over.
PER_TENSOR = Scheme(rules=(Rule(Mode.STATIC, weight=QuantSpec("int8")),))


@pytest.mark.parametrize(("body", "copies"), BODIES.values(), ids=BODIES)
@pytest.mark.parametrize("scheme", ["int8", "int8 per tensor", "int8-storage"])
def test_a_weight_is_stored_once_or_the_plan_says_why(
    scheme: str,
    body: str,
    copies: int,
    build: Callable[..., ModelProto],
    quantize_to: Callable[..., Any],
    tmp_path: Path,
) -> None:
    more = {"s": np.zeros((2, 256), np.float32)} if "(t, s)" in body else {}
    weight = np.random.default_rng(0).normal(size=(256, 256)).astype(np.float32) / 16
    model = build(f"(float[3,256] x) => (float[3,256] y) {{ {body} }}", w=weight, **more)
    result = quantize_to(model, tmp_path / "small.onnx", scheme=PER_TENSOR if scheme == "int8 per tensor" else scheme)
    reported = [
        one for one in result.report.plan.decisions if "its weight is stored a second time, because" in one.reason
    ]
    assert len(reported) == copies - 1
    size = (tmp_path / "small.onnx").stat().st_size
    assert weight.size * copies < size < weight.size * copies + 5000
    onnx.checker.check_model(tmp_path / "small.onnx", full_check=True)
