"""The table of operators: every row is an operator of ONNX, and its indices are inputs that the operator has."""

from __future__ import annotations

import onnx
import pytest
from onnx import defs

from onnxq.graph import Node, Variable
from onnxq.operators import ALREADY_QUANTIZED, OPERATORS, Role
from onnxq.targets import TARGETS

rows = pytest.mark.parametrize("op", list(OPERATORS))


def call(op: str, **attributes: object) -> Node:
    return Node(op, "node", attributes, [Variable("x"), Variable("w")], [Variable("y")])


@rows
def test_a_row_names_inputs_that_the_operator_has(op: str) -> None:
    schema, operator = defs.get_schema(op), OPERATORS[op]
    indices = [*(operator.data or ()), *operator.weights, *([] if operator.bias is None else [operator.bias])]
    assert all(index < schema.max_input for index in indices)
    variadic = schema.inputs[0].option == defs.OpSchema.FormalParameterOption.Variadic
    assert (operator.data is None) == (variadic or op in ("Add", "Mul"))


@rows
def test_a_bias_is_neither_data_nor_weight(op: str) -> None:
    operator = OPERATORS[op]
    assert operator.bias not in {*(operator.data or ()), *operator.weights}
    assert (operator.role in (Role.COMPUTE, Role.WEIGHTED)) == (bool(operator.weights) and op != "Gather")


@pytest.mark.parametrize(
    ("op", "attributes", "index", "axis"),
    [
        ("Conv", {}, 1, 0),
        ("ConvTranspose", {}, 1, 1),
        ("Gemm", {}, 1, 1),
        ("Gemm", {"transB": 1}, 1, 0),
        ("MatMul", {}, 1, -1),
        ("MatMul", {}, 0, -2),
        ("LSTM", {}, 2, 1),
        ("Gather", {}, 0, 0),
        ("Gather", {"axis": 1}, 0, 1),
    ],
)
def test_weights_have_one_scale_for_each_output_channel(
    op: str, attributes: dict[str, object], index: int, axis: int
) -> None:
    assert OPERATORS[op].weights[index](call(op, **attributes)) == axis


@rows
def test_every_weight_has_an_axis_that_is_summed_over(op: str) -> None:
    assert OPERATORS[op].reductions.keys() == OPERATORS[op].weights.keys()


@pytest.mark.parametrize(
    ("op", "attributes", "index", "axis"),
    [
        ("Conv", {}, 1, 1),
        ("ConvTranspose", {}, 1, 0),
        ("Gemm", {}, 1, 0),
        ("Gemm", {"transB": 1}, 1, 1),
        ("MatMul", {}, 1, -2),
        ("MatMul", {}, 0, -1),
        ("GRU", {}, 1, 2),
        ("Gather", {}, 0, -1),
        ("Gather", {"axis": 1}, 0, 0),
    ],
)
def test_blocks_lie_along_the_sum_or_the_row(op: str, attributes: dict[str, object], index: int, axis: int) -> None:
    assert OPERATORS[op].reductions[index](call(op, **attributes)) == axis


@pytest.mark.parametrize(
    ("op", "expected"),
    [("Sigmoid", (0, 1)), ("HardSigmoid", (0, 1)), ("Softmax", (0, 1)), ("Tanh", (-1, 1)), ("Relu", None)],
)
def test_ranges_are_fixed_where_the_operator_fixes_them(op: str, expected: tuple[float, float] | None) -> None:
    assert OPERATORS[op].fixed_range == expected


def test_operators_of_quantized_models_are_not_planned() -> None:
    assert not ALREADY_QUANTIZED & set(OPERATORS)
    standard = {op for op in ALREADY_QUANTIZED if defs.has(op)}
    assert {schema.name for schema in onnx.defs.get_all_schemas() if "Quantize" in schema.name} <= standard
    assert {"ConvInteger", "MatMulInteger", "QLinearConv", "QLinearMatMul"} <= standard
    assert {"QLinearAveragePool", "QLinearConvTranspose", "QLinearWhere", "QGemm"} <= ALREADY_QUANTIZED


def test_every_target_fuses_known_operators() -> None:
    for target in TARGETS.values():
        assert target.fused <= set(OPERATORS)
        assert {OPERATORS[op].role for op in target.clamps} <= {Role.CLAMP}
