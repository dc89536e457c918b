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


def decide(node: Node, spec: QuantSpec = INT4, mode: Mode = Mode.WEIGHT_ONLY, **options: Any) -> Decision:
    return decide_weights(node, mode, spec, "it was asked for", **{"in_body": False, **options})


# --- multiplied, looked up, stored, left ----------------------------------------------------------------------------

TABLE, PRODUCT = call("Gather", (50, 32), index=0), call("MatMul", (32, 16))
BLOCKED = "kernels take blocks of 16, 32, 64 and so on along the reduction axis, not "
RANK, ROWS = "only a second operand of rank 2 can stay quantized", "only rows of a rank-2 table are looked up quantized"
TWO_BITS = "onnxruntime multiplies 2-bit weights wrongly when their columns do not fill bytes"
WORDS = QuantSpec("int2", (32,), storage=Storage.WORDS)


def without_rank(node: Node) -> Node:
    node.inputs[1].shape = None
    return node


@pytest.mark.parametrize(
    ("node", "spec", "reason"),
    [
        (call("Conv", (16, 8, 3, 3)), INT4, "no kernel of Conv takes quantized weights"),
        (call("ConvTranspose", (16, 8, 3, 3)), INT4, "no kernel of ConvTranspose takes quantized weights"),
        (call("LSTM", (1, 64, 16)), INT4, "no kernel of LSTM takes quantized weights"),
        (call("MatMul", (4, 32, 16)), INT4, RANK),
        (call("MatMul", (32, 16), index=0), INT4, RANK),
        (call("Gemm", (32, 16), alpha=2.0), INT4,
         "no kernel of a Gemm with alpha, beta or transA takes quantized weights"),
        (call("Gemm", (32, 16), bias=constant("b", np.zeros((1, 16), np.float32))), INT4,
         "its bias is not a vector of 16 values"),
        (call("MatMul", (32, 16), dtype=ml_dtypes.bfloat16), INT4,
         "no kernel takes quantized weights with bfloat16 activations"),
        (call("Gather", (50, 32), index=0, axis=1), INT4, ROWS),
        (call("Gather", (50, 4, 8), index=0), INT4, ROWS),
        (without_rank(call("Gather", (50, 32), index=0)), INT4, "the rank of its indices is unknown"),
        (TABLE, QuantSpec("int4", (2, 16)), "blocks of several rows are not looked up quantized"),
        (PRODUCT, QuantSpec("float8e4m3fn", (32,)), "no kernel takes float8e4m3fn weights"),
        (PRODUCT, QuantSpec("int16", (32,)), "no kernel takes int16 weights"),
        (PRODUCT, QuantSpec("int4", (8,)), f"{BLOCKED}[8]"),
        (PRODUCT, QuantSpec("int4", (48,)), f"{BLOCKED}[48]"),
        (PRODUCT, QuantSpec("int4", (2, 16)), f"{BLOCKED}[2, 16]"),
        *((call("MatMul", (512, columns)), QuantSpec("int2", (32,)), TWO_BITS) for columns in (1, 6, 7)),
        (call("MatMul", (512, 64)), WORDS, "cannot multiply by 2-bit weights in words"),
        (call("MatMul", (512, 64)), replace(WORDS, format="uint2", symmetric=False),
         "cannot multiply by 2-bit weights in words"),
        # Scales that float16 may not hold.
        *((call("MatMul", (32, 16), dtype=np.float16), spec, "with float16 activations, weights need float16 scales")
          for spec in (QuantSpec("int4", (32,), scale="e8m0"),
                       QuantSpec("int4", (32,), scale="ue4m3", two_level=True))),
    ],
)  # fmt: skip
def test_weights_that_no_kernel_takes_are_decoded_when_the_model_is_loaded(
    node: Node, spec: QuantSpec, reason: str
) -> None:
    decision = decide(node, spec)
    assert decision.mode is Mode.STORAGE
    assert decision.reason.startswith(f"computes in float, {spec.format} weights dequantized at load: ")
    assert decision.reason.endswith(reason)
    assert decision.weights


BURN = QuantSpec("int8-narrow", method=Method.BURN)
FEW = "too small to be worth the error"


@pytest.mark.parametrize(
    ("node", "spec", "requested", "mode", "reason"),
    [
        # Kernels take the quantized values as they are.
        (PRODUCT, INT4, Mode.WEIGHT_ONLY, Mode.WEIGHT_ONLY, "multiplies by int4 weights"),
        (call("Gemm", (16, 32), transB=1), INT4, Mode.WEIGHT_ONLY, Mode.WEIGHT_ONLY, "multiplies by int4 weights"),
        (call("Gemm", (32, 16), bias=constant("b", np.zeros(16, np.float32))), INT4, Mode.WEIGHT_ONLY, Mode.WEIGHT_ONLY,
         "multiplies by int4 weights"),
        (TABLE, INT4, Mode.WEIGHT_ONLY, Mode.WEIGHT_ONLY, "looks up int4 rows"),
        (call("MatMul", (512, 4)), QuantSpec("int2", (32,)), Mode.WEIGHT_ONLY, Mode.WEIGHT_ONLY, "by int2 weights"),
        (call("MatMul", (512, 7)), INT4, Mode.WEIGHT_ONLY, Mode.WEIGHT_ONLY, "multiplies by int4 weights"),
        # Tables of few rows are not worth it, but for frameworks that quantize each, or where rows are long.
        *((call("Gather", (rows, 384), index=0), INT4, Mode.STORAGE, Mode.FLOAT, FEW) for rows in (2, 7)),
        *((call("Gather", (rows, 384), index=0), INT4, Mode.STORAGE, Mode.STORAGE, "") for rows in (8, 50)),
        (call("Gather", (2, 16384), index=0), INT4, Mode.STORAGE, Mode.STORAGE, ""),
        (call("Gather", (2, 384), index=0), BURN, Mode.STORAGE, Mode.STORAGE, ""),
        (call("Gather", (20, 32), index=0), INT4, Mode.WEIGHT_ONLY, Mode.FLOAT,
         "a table of 640 values, too small to save bytes"),
        (call("Gather", (20, 32), index=0), INT4, Mode.STORAGE, Mode.STORAGE, ""),
        (PRODUCT, QuantSpec("int4", (2, 4, 8)), Mode.STORAGE, Mode.FLOAT,
         "its weight has rank 2, too few for blocks of 3 axes"),
        (PRODUCT, QuantSpec("int4", (1, 4, 8)), Mode.STORAGE, Mode.STORAGE, ""),
        # No large float weight.
        *((node, INT4, Mode.WEIGHT_ONLY, Mode.FLOAT, "it was asked for") for node in (
            call("MatMul", (8, 8)), call("MatMul", Variable("w", FLOAT, [32, 16])), call("Add", (32, 16)),
            call("MatMul", (32, 16), dtype=np.float64), call("Gemm", (512,)))),
    ],
)  # fmt: skip
def test_each_weight_is_multiplied_stored_or_left(
    node: Node, spec: QuantSpec, requested: Mode, mode: Mode, reason: str
) -> None:
    decision = decide(node, spec, requested)
    assert decision.mode is mode
    assert decision.reason.endswith(reason)
    assert (FEW in decision.reason) == (reason == FEW)


def test_a_product_in_a_body_is_stored() -> None:
    assert decide(PRODUCT, in_body=True).mode is Mode.STORAGE
    assert decide(TABLE, in_body=True).mode is Mode.WEIGHT_ONLY


def test_a_weight_of_two_products_is_stored() -> None:
    shared = constant("w", np.zeros((32, 16), np.float32))
    one, other = call("MatMul", shared), call("MatMul", shared)
    assert {decide(one).mode, decide(other).mode} == {Mode.STORAGE}


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
    check_weight_spec(QuantSpec("int8", Granularity.CHANNEL, method=Method.TORCH), Mode.STATIC, TARGET)


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
def test_parts_of_blocks_are_stored_where_they_are_not_read(rows: int, granularity: Any, whole: bool) -> None:
    found = decide(call("MatMul", (rows, 8)), QuantSpec("int4", granularity), whole_blocks=whole)
    is_stored = whole and (rows, granularity) == (120, (32,))
    assert found.mode is (Mode.STORAGE if is_stored else Mode.WEIGHT_ONLY)
    assert found.reason.endswith("dequantized at load: 120 values do not fill blocks of 32") == is_stored


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
    spec = QuantSpec(format, (32,), symmetric=format == "int4")
    found = decide(call("Gather", (512, columns), index=0), spec, emit=emit)
    assert found.mode is mode
    assert ("reads rows of whole bytes" in found.reason) == (mode is Mode.STORAGE)


# What becomes of weights where another toolkit's arithmetic is followed.

# --- every parameter, as Burn does --------------------------------------------------------------------------------


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


def reading(op: str, *inputs: NDArray[Any] | None, domain: str = "", **attributes: Any) -> Node:
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
        (reading("Attention", None, learned(8, 96), learned(96), domain=CONTRIB), {1: (-1, 0)}),
        (reading("FusedMatMul", None, learned(16, 32), domain=CONTRIB), {1: (-1, -2)}),
        (reading("FusedMatMul", None, learned(16, 32), domain=CONTRIB, transB=1), {1: (-2, -1)}),
        (
            reading("FusedGemm", None, learned(16, 32), learned(16), domain=CONTRIB, transB=1),
            {1: (0, 1)},
        ),
        (reading("FusedConv", None, learned(16, 3, 3, 3), domain=CONTRIB), {1: (0, 1)}),
        (
            reading(
                "EmbedLayerNormalization", None, None, learned(99, 8), learned(64, 8), learned(2, 8), domain=CONTRIB
            ),
            {2: (0, -1), 3: (0, -1)},
        ),
        (reading("Einsum", None, learned(64, 128), equation="bi,ij->bj"), {1: (1, 1)}),
        (reading("Add", None, learned(1, 197, 64)), {1: (1, 2)}),
        (reading("Add", learned(1, 4096), None), {0: (0, 1)}),
        (reading("Mystery", None, learned(128, 64), domain="my.own"), {1: (0, 1)}),
    ],
)
def test_learned_numbers_of_any_operator_are_stored(node: Node, expected: dict[int, tuple[int, int]]) -> None:
    assert axes(node) == expected


@pytest.mark.parametrize("spec", [INT8, QuantSpec("int4", (32,))])
@pytest.mark.parametrize(
    "node",
    [
        reading("LSTM", None, learned(64, 8), learned(64, 16)),
        reading("Conv", None, learned(512)),
        reading("Gather", learned(64, 8), None, axis=5),
    ],
    ids=lambda node: node.op,
)
def test_a_damaged_weight_that_lacks_an_axis_of_its_operator_is_not_stored(node: Node, spec: QuantSpec) -> None:
    assert not list(large_weights(node, spec))


HALVES = np.arange(8192, dtype=np.float32).reshape(128, 64) / 2


@pytest.mark.parametrize(
    "node",
    [
        reading("Add", None, learned(64, 63)),
        reading("Add", None, learned(8192)),
        reading("Add", None, learned(128, 64).astype(np.float64)),
        reading("Add", None, HALVES),
        reading("Add", None, np.triu(np.full((128, 128), np.finfo(np.float32).min))),
        reading("Add", None, np.where(HALVES > 7, -np.inf, learned(128, 64)).astype(np.float32)),
        reading("Greater", None, learned(128, 64)),
        reading("RotaryEmbedding", None, None, learned(128, 64), learned(128, 64), domain=CONTRIB),
        reading("Gemm", None, None, learned(1, 8192)),
    ],
)
def test_small_chosen_and_setting_numbers_are_not(node: Node) -> None:
    assert axes(node) == {}


def test_every_weight_is_any_size() -> None:
    assert [weight.index for weight in every_weight(reading("Add", None, HALVES[:1]), INT8)] == [1]


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
    table = reading("Gather", learned(*shape), None)
    assert weight_at(table, 0, spec).spec.granularity == expected
    stored = [weight.spec.granularity for weight in large_weights(table, spec)]
    assert stored == ([expected] if np.prod(shape) >= 256 else [])
    turned = reading("MatMul", None, learned(*shape[::-1]))
    assert weight_at(turned, 1, spec).spec.granularity == expected


def test_a_weight_that_no_codes_make_smaller_stays() -> None:
    half = reading("MatMul", None, learned(64, 64).astype(np.float16))
    assert not list(large_weights(half, QuantSpec("int16-narrow", Granularity.CHANNEL)))
    assert list(large_weights(half, INT8))


def test_one_scale_of_a_tensor_needs_no_second_level() -> None:
    spec = replace(NV, granularity=(1,))
    (weight,) = large_weights(reading("MatMul", None, learned(64, 64).astype(np.float16)), spec)
    assert weight.spec == spec
    (weight,) = large_weights(
        reading("Gather", learned(5000, 1).astype(np.float16), None),
        replace(spec, format="float8e4m3fn"),
    )
    assert (weight.spec.granularity, weight.spec.two_level, weight.spec.scale) == (Granularity.TENSOR, False, "float32")


# Integer kernels take weights in the pairs of their target's row, and whoever shares a weight reads the same quantized
# values.

CPU = TARGETS["onnxruntime-cpu"]
PER_CHANNEL = QuantSpec("int8-narrow", Granularity.CHANNEL)


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
        call("Conv", (16, 8, 3, 3)),
        call("Conv", (16, 1, 3, 3), group=8),
        call("Gemm", (16, 8)),
    ]
    assert pairs_of(*((node, Mode.STATIC) for node in static), target=target) == [own, own, product]
    assert pairs_of((call("LSTM", (1, 64, 16)), Mode.DYNAMIC), target=target) == [product]


@pytest.mark.parametrize(
    ("node", "spec", "mode"),
    [
        (call("Conv", (16, 1, 3, 3), group=16), PER_CHANNEL, Mode.STATIC),
        (call("Gemm", (16, 8)), PER_CHANNEL, Mode.STORAGE),
        (call("Gemm", (16, 8)), QuantSpec("int4-narrow", Granularity.CHANNEL), Mode.STATIC),
        (call("Gemm", (16, 8)), QuantSpec("int16", Granularity.CHANNEL), Mode.STATIC),
        (call("Gemm", (16, 8)), QuantSpec("uint8", Granularity.CHANNEL, symmetric=False), Mode.STATIC),
        (call("Gemm", (16, 8)), QuantSpec("int8", Granularity.CHANNEL, method=Method.TORCH), Mode.STATIC),
    ],
    ids=["depthwise", "multiplied as floats", "4 bits", "16 bits", "unsigned", "in the arithmetic of PyTorch"],
)
def test_no_pairs_are_what_no_kernel_adds_so_or_others_decide(node: Node, spec: QuantSpec, mode: Mode) -> None:
    assert pairs_of((node, mode), spec=spec) == [Pairs.NONE]


def test_a_table_that_is_multiplied_too_has_the_codes_of_the_product() -> None:
    rows, product = call("Gather", (16, 8), index=0), call("Gemm", (16, 8), transB=1)
    assert pairs_of((rows, Mode.STORAGE), (product, Mode.STATIC)) == [Pairs.TAP, Pairs.TAP]
    assert pairs_of((rows, Mode.STORAGE), (product, Mode.STORAGE)) == [Pairs.NONE, Pairs.NONE]
    # Along other axes, quantized values cannot be shared.
    assert pairs_of((rows, Mode.STORAGE), (call("Gemm", (16, 8)), Mode.STATIC)) == [Pairs.NONE, Pairs.TAP]


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
