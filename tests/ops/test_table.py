"""The table of operators: every row is an operator of ONNX, and its indices are inputs that the operator has."""

from __future__ import annotations

from functools import cache

import onnx
import pytest
from onnx import defs
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

from onnxq.ir import Node, OperatorKey, Variable
from onnxq.ops import (
    ALREADY_QUANTIZED,
    INTEGER_OPERATORS,
    OPERATORS,
    Interval,
    Operator,
    Role,
    operator_of,
)
from onnxq.runtime.targets import TARGETS

rows = pytest.mark.parametrize(
    ("key", "row"), OPERATORS.items(), ids=[".".join(filter(None, key)) for key in OPERATORS]
)


def call(op: str, **attributes: object) -> Node:
    return Node(op, "node", attributes, [Variable("x"), Variable("w")], [Variable("y")])


@cache
def ports(key: OperatorKey) -> list[str]:
    """Names of an operator's inputs, from onnx or from the runtime whose own operator it is."""
    domain, op = key
    if not domain and defs.has(op):
        return [port.name for port in defs.get_schema(op).inputs]
    return next(
        [port.name for port in one.inputs] for one in get_all_operator_schema() if (one.domain, one.name) == key
    )


@rows
def test_a_row_names_inputs_that_the_operator_has(key: OperatorKey, row: Operator) -> None:
    indices = {*(row.data or ()), *row.weights, *([] if row.bias is None else [row.bias])}
    assert indices <= set(range(len(ports(key))))
    assert row.bias not in {*(row.data or ()), *row.weights}


@rows
def test_all_inputs_are_data_where_the_operator_makes_no_difference(key: OperatorKey, row: Operator) -> None:
    if key[0] or not defs.has(key[1]):
        return
    first = defs.get_schema(key[1]).inputs[:1]
    variadic = any(port.option == defs.OpSchema.FormalParameterOption.Variadic for port in first)
    assert (row.data is None) == (variadic or key[1] in ("Add", "Div", "Mul", "Sub"))


@rows
def test_weights_are_what_some_roles_have(key: OperatorKey, row: Operator) -> None:
    assert bool(row.weights) == (row.role in (Role.COMPUTE, Role.WEIGHTED) or row.looks_up)
    assert not (row.product or row.recurrent or row.transposed) or row.weights
    assert row.role is not Role.FLOAT or row.bias is None
    assert row.moves == (row.role is Role.PASS_THROUGH)


@rows
def test_whatever_has_a_seed_is_random(key: OperatorKey, row: Operator) -> None:
    if not key[0] and defs.has(key[1]):
        assert row.random == ("seed" in defs.get_schema(key[1]).attributes)


def test_every_operator_of_onnx_with_a_seed_has_a_row() -> None:
    seeded = {one.name for one in defs.get_all_schemas() if "seed" in one.attributes and not one.domain}
    assert seeded <= {op for _, op in OPERATORS}


@rows
def test_a_fixed_range_is_the_interval(key: OperatorKey, row: Operator) -> None:
    node = Node(key[1], "n", {}, [Variable("x"), Variable("y")], [], key[0])
    if row.fixed_range is not None:
        assert row.interval is not None
        assert row.interval(node, [Interval(), Interval()]) == row.fixed_range


@rows
def test_a_row_is_found_by_its_node(key: OperatorKey, row: Operator) -> None:
    assert operator_of(Node(key[1], domain=key[0])) is row
    assert operator_of(Node(key[1], domain="my.own")) is None
    assert key[0] or operator_of(Node(key[1], domain="ai.onnx")) is row


def test_integer_twins_know_their_float_operator() -> None:
    assert {(twin.domain, twin.float_op) for twin in INTEGER_OPERATORS.values()} == {
        key for key, row in OPERATORS.items() if row.integer
    }


@pytest.mark.parametrize(("attributes", "expected"), [({}, False), ({"transB": 0}, False), ({"transB": 1}, True)])
def test_a_weight_lies_transposed_where_an_attribute_says_so(attributes: dict[str, object], expected: bool) -> None:
    assert OPERATORS["", "Gemm"].is_transposed(call("Gemm", **attributes)) is expected
    assert not OPERATORS["", "MatMul"].is_transposed(call("MatMul", **attributes))


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
    assert OPERATORS["", op].weights[index].channels(call(op, **attributes)) == axis


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
    assert OPERATORS["", op].weights[index].reduction(call(op, **attributes)) == axis


@pytest.mark.parametrize(
    ("op", "expected"),
    [("Sigmoid", (0, 1)), ("Softmax", (0, 1)), ("Tanh", (-1, 1)), ("Relu", None)],
)
def test_ranges_are_fixed_where_the_operator_fixes_them(op: str, expected: tuple[float, float] | None) -> None:
    assert OPERATORS["", op].fixed_range == expected


def test_operators_of_quantized_models_are_not_planned() -> None:
    assert not ALREADY_QUANTIZED & {op for _, op in OPERATORS}
    standard = {op for op in ALREADY_QUANTIZED if defs.has(op)}
    assert {schema.name for schema in onnx.defs.get_all_schemas() if "Quantize" in schema.name} <= standard
    assert {"ConvInteger", "MatMulInteger", "QLinearConv", "QLinearMatMul"} <= standard
    assert {"QLinearAveragePool", "QLinearConvTranspose", "QLinearWhere", "QGemm"} <= ALREADY_QUANTIZED


def test_every_target_fuses_known_operators() -> None:
    for target in TARGETS.values():
        assert all(("", op) in OPERATORS for op in target.kernels.fused.ops)
        assert {OPERATORS["", op].role for op in target.kernels.fused.clamps} <= {Role.CLAMP}
