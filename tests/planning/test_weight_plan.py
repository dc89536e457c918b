"""What becomes of the weights of one node, and why."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from onnxq.config.scheme import Granularity, Method, Mode, QuantSpec, Rule, Storage
from onnxq.errors import SchemeError
from onnxq.ir import Node, Variable, constant
from onnxq.lowering import AllowedOps
from onnxq.planning.plan import Decision, Plan
from onnxq.planning.weights import check_weight_spec, decide_weights, weight_at, weight_opset, weight_spec
from onnxq.runtime.targets import TARGETS

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
        (call("MatMul", (32, 16)), "multiplies int4 codes"),
        (call("Gemm", (16, 32), transB=1), "multiplies int4 codes"),
        (call("Gemm", (32, 16), bias=constant("b", np.zeros(16, np.float32))), "multiplies int4 codes"),
        (call("Gather", (50, 32), index=0), "looks up int4 codes"),
    ],
)
def test_codes_are_used_as_they_are_where_the_runtime_can(node: Node, reason: str) -> None:
    decision = decide(node)
    assert (decision.mode, decision.reason) == (Mode.WEIGHT_ONLY, reason)


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        (call("Conv", (16, 8, 3, 3)), "no kernel multiplies quantized weights in Conv"),
        (call("ConvTranspose", (16, 8, 3, 3)), "no kernel multiplies quantized weights in ConvTranspose"),
        (call("LSTM", (1, 64, 16)), "no kernel multiplies quantized weights in LSTM"),
        (call("MatMul", (4, 32, 16)), "quantized weights are multiplied only as a second factor of rank 2"),
        (call("MatMul", (32, 16), index=0), "quantized weights are multiplied only as a second factor of rank 2"),
        (call("Gemm", (32, 16), alpha=2.0), "no Gemm with alpha, beta or transA multiplies quantized weights"),
        (
            call("Gemm", (32, 16), bias=constant("b", np.zeros((1, 16), np.float32))),
            "its bias is not a vector of 16 values",
        ),
        (
            call("MatMul", (32, 16), dtype=ml_dtypes.bfloat16),
            "no kernel multiplies quantized weights with bfloat16 activations",
        ),
        (call("Gather", (50, 32), index=0, axis=1), "only rows of a table of rank 2 are looked up quantized"),
        (call("Gather", (50, 4, 8), index=0), "only rows of a table of rank 2 are looked up quantized"),
    ],
)
def test_other_weights_are_decoded_when_the_model_is_loaded(node: Node, reason: str) -> None:
    decision = decide(node)
    assert (decision.mode, decision.reason) == (Mode.STORAGE, f"computes in float from int4 weights: {reason}")
    assert decision.weights


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (QuantSpec("float8e4m3fn", (32,)), "no kernel multiplies float8e4m3fn weights"),
        (QuantSpec("int16", (32,)), "no kernel multiplies int16 weights"),
        (QuantSpec("int4", (8,)), "only blocks of 16, 32, 64 and so on along the sum are multiplied, not [8]"),
        (QuantSpec("int4", (48,)), "only blocks of 16, 32, 64 and so on along the sum are multiplied, not [48]"),
        (QuantSpec("int4", (2, 16)), "only blocks of 16, 32, 64 and so on along the sum are multiplied, not [2, 16]"),
    ],
)
def test_formats_and_blocks_that_no_kernel_multiplies_are_stored(spec: QuantSpec, reason: str) -> None:
    decision = decide(call("MatMul", (64, 16)), spec)
    assert (decision.mode, decision.reason) == (
        Mode.STORAGE,
        f"computes in float from {spec.format} weights: {reason}",
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
    assert ("errors would stand everywhere" in decision.reason) is (mode is Mode.FLOAT)


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
    assert decide(node).reason == "a table of 640 values saves nothing when it is quantized"
    assert decide(node, mode=Mode.STORAGE).mode is Mode.STORAGE


def test_blocks_of_more_axes_than_the_weight_leave_it_in_float() -> None:
    decision = decide(call("MatMul", (32, 16)), QuantSpec("int4", (2, 4, 8)), Mode.STORAGE)
    assert (decision.mode, decision.reason) == (Mode.FLOAT, "its weight of rank 2 has no blocks of 3 axes")
    assert decide(call("MatMul", (32, 16)), QuantSpec("int4", (1, 4, 8)), Mode.STORAGE).mode is Mode.STORAGE


@pytest.mark.parametrize(
    ("shape", "per"),
    [
        ((64, 32, 3, 3), (32,)),
        ((64, 16, 3, 3), (32,)),
        ((64, 15, 3, 3), Granularity.CHANNEL),
        ((64, 1, 3, 3), Granularity.CHANNEL),
    ],
)
def test_kernels_that_sum_over_few_channels_have_a_scale_for_each_output(shape: tuple[int, ...], per: Any) -> None:
    (weight,) = decide(call("Conv", shape)).weights
    assert weight.spec.per == per


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
    assert decision.reason.endswith("float16 activations are multiplied by weights with float16 scales only")


# --- specs ----------------------------------------------------------------------------------------------------------


def test_a_weight_knows_its_channels_and_what_is_summed_over() -> None:
    weight = weight_at(call("Gemm", (16, 32), transB=1), 1, INT4)
    assert (weight.tensor, weight.axis, weight.reduction_axis, weight.elements) == ("w", 0, 1, 512)


def test_a_rule_without_weights_takes_those_of_the_target() -> None:
    assert weight_spec(Rule(Mode.STORAGE), TARGET) == TARGET.weight
    assert weight_spec(Rule(Mode.STORAGE, weight=INT4), TARGET) is INT4


@pytest.mark.parametrize("mode", [Mode.STATIC, Mode.DYNAMIC])
@pytest.mark.parametrize(
    ("spec", "told"),
    [
        (INT4, "symmetric int4 per block of [32]"),
        (QuantSpec("int8", scale="float16"), "symmetric int8 per tensor"),
        (QuantSpec("int8", Granularity.CHANNEL, symmetric=False), "affine int8 per channel"),
        (QuantSpec("uint8", symmetric=False), "affine uint8 per tensor"),
        (QuantSpec("int8", storage=Storage.WORDS), "symmetric int8 per tensor"),
    ],
)
def test_integer_kernels_multiply_plain_int8_only(mode: Mode, spec: QuantSpec, told: str) -> None:
    with pytest.raises(SchemeError, match="fast integer kernel") as caught:
        check_weight_spec(spec, mode, TARGET)
    assert str(caught.value).startswith(f"weights as {told} have no")
    check_weight_spec(spec, Mode.WEIGHT_ONLY, TARGET)


def test_codes_as_wide_as_floats_save_nothing() -> None:
    with pytest.raises(SchemeError, match=r"^weights as int32 are no smaller than floats; use int16 or fewer bits$"):
        check_weight_spec(QuantSpec("int32"), Mode.STORAGE, TARGET)


# --- opset ----------------------------------------------------------------------------------------------------------


def test_a_plan_asks_for_the_opset_of_its_newest_decoder() -> None:
    stored = decide(call("Conv", (16, 8, 3, 3)), QuantSpec("int8", Granularity.CHANNEL))
    multiplied = decide(call("MatMul", (32, 16)))
    assert weight_opset(Plan((stored,), (), "", ""), AllowedOps.QDQ) == 7
    assert weight_opset(Plan((stored, multiplied), (), "", ""), AllowedOps.QDQ) == 21
    assert weight_opset(Plan((stored, multiplied), (), "", ""), AllowedOps.ORT) == 7
    assert weight_opset(Plan((), (), "", ""), AllowedOps.QDQ) == 0


@pytest.mark.parametrize(
    ("op", "target", "emit", "sentence"),
    [
        (
            "LSTM",
            "onnxruntime-cpu",
            AllowedOps.QDQ,
            "LSTM has no dynamic integer kernel in standard ONNX; say --emit ort",
        ),
        (
            "LSTM",
            "onnxruntime-cpu",
            AllowedOps.STRICT,
            "LSTM has no dynamic integer kernel in standard ONNX; say --emit ort",
        ),
        ("LSTM", "tensorrt", AllowedOps.ORT, "LSTM has no dynamic integer kernel in tensorrt; give it another mode"),
        (
            "GRU",
            "onnxruntime-cpu",
            AllowedOps.ORT,
            "GRU has no dynamic integer kernel in onnxruntime-cpu; give it another",
        ),
    ],
)
def test_a_plan_whose_dynamic_nodes_cannot_be_written_is_refused(
    op: str, target: str, emit: AllowedOps, sentence: str
) -> None:
    plan = Plan((Decision("cell", op, Mode.DYNAMIC, ""),), (), "", target)
    with pytest.raises(SchemeError, match=f"node cell is dynamic, and {sentence}"):
        weight_opset(plan, emit)


def test_dynamic_nodes_need_no_decoder() -> None:
    nodes = tuple(Decision(op, op, Mode.DYNAMIC, "") for op in ("Gemm", "LSTM", "MatMul"))
    assert weight_opset(Plan(nodes, (), "", "onnxruntime-cpu"), AllowedOps.ORT) == 0


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
    ("spec", "sentence"),
    [
        (QuantSpec("int4", (32,), storage=Storage.WORDS), "weights in uint32 words are decoded wrongly by openvino"),
        (QuantSpec("int2", (16,)), "openvino does not read weights as int2, expected 4 bits or more"),
    ],
)
def test_what_a_target_cannot_read_is_refused(spec: QuantSpec, sentence: str) -> None:
    with pytest.raises(SchemeError, match=sentence):
        check_weight_spec(spec, Mode.WEIGHT_ONLY, TARGETS["openvino"])
    check_weight_spec(spec, Mode.WEIGHT_ONLY, TARGETS["onnxruntime-cpu"])
