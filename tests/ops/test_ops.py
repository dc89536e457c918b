"""The operator table, channel maps and integer operators."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx
import pytest
from onnx import defs
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

from onnxq.errors import ModelError
from onnxq.ir import Node, Variable
from onnxq.ops import (
    ALREADY_QUANTIZED,
    INTEGER_OPERATORS,
    OPERATORS,
    IntegerOperator,
    Role,
    check_inputs,
    operator_of,
)
from onnxq.ops.channel_maps import (
    ChannelMapRule,
    aligned,
    concatenated,
    picked,
    reshaped,
    scaled,
    split,
    transposed,
)
from onnxq.runtime.targets import TARGETS

ROWS = INTEGER_OPERATORS.items()
# Those that the installed onnx knows.
STANDARD = {op: row for (domain, op), row in OPERATORS.items() if not domain and defs.has(op)}
OWN = {(schema.domain, schema.name): schema for schema in get_all_operator_schema()}


def call(op: str, **attributes: object) -> Node:
    return Node(op, "node", attributes, [Variable("x"), Variable("w")], [Variable("y")])


def test_a_row_names_inputs_that_the_operator_has() -> None:
    schemas = {("", op): defs.get_schema(op) for op in STANDARD} | OWN
    for key in schemas.keys() & OPERATORS.keys():
        row = OPERATORS[key]
        others = {*(row.data or ()), *row.weights}
        indices = others | ({row.bias} - {None})
        assert indices <= set(range(len(schemas[key].inputs))), key
        assert row.bias not in others, key


def test_all_inputs_are_data_where_the_operator_makes_no_difference() -> None:
    for op, row in STANDARD.items():
        first = defs.get_schema(op).inputs[:1]
        variadic = any(port.option == defs.OpSchema.FormalParameterOption.Variadic for port in first)
        assert (row.data is None) == (variadic or op in ("Add", "Div", "Mul", "Sub")), op


def test_weights_are_what_some_roles_have() -> None:
    for key, row in OPERATORS.items():
        assert bool(row.weights) == (row.role in (Role.COMPUTE, Role.WEIGHTED) or row.looks_up), key
        assert not (row.product or row.recurrent or row.transposed) or row.weights, key
        assert row.role is not Role.FLOAT or row.bias is None, key
        assert row.moves == (row.role is Role.PASS_THROUGH), key


def test_whatever_has_a_seed_is_random() -> None:
    assert {op for op, row in STANDARD.items() if row.random} == {
        op for op in STANDARD if "seed" in defs.get_schema(op).attributes
    }


def test_a_row_is_found_by_its_node() -> None:
    for (domain, op), row in OPERATORS.items():
        assert operator_of(Node(op, domain=domain)) is row
        assert operator_of(Node(op, domain="my.own")) is None
        assert domain or operator_of(Node(op, domain="ai.onnx")) is row


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
    rows = [row for (_, op), row in OPERATORS.items() if op in ALREADY_QUANTIZED]
    assert all(row.role is Role.FLOAT and not row.weights for row in rows)
    standard = {op for op in ALREADY_QUANTIZED if defs.has(op)}
    assert {schema.name for schema in onnx.defs.get_all_schemas() if "Quantize" in schema.name} <= standard
    assert {"ConvInteger", "MatMulInteger", "QLinearConv", "QLinearMatMul"} <= standard
    assert {"QLinearAveragePool", "QLinearConvTranspose", "QLinearWhere", "QGemm"} <= ALREADY_QUANTIZED


def test_every_target_fuses_known_operators() -> None:
    for target in TARGETS.values():
        assert all(("", op) in OPERATORS for op in target.kernels.fused.ops)
        assert {OPERATORS["", op].role for op in target.kernels.fused.clamps} <= {Role.CLAMP}


def node(op: str, inputs: list[list[int | None]], outputs: list[list[int | None]], **attributes: object) -> Node:
    given = [Variable(f"i{at}", np.dtype(np.float32), shape) for at, shape in enumerate(inputs)]
    made = [Variable(f"o{at}", np.dtype(np.float32), shape) for at, shape in enumerate(outputs)]
    return Node(op, "n", attributes, given, made)


@pytest.mark.parametrize(
    ("before", "after", "axis", "repeats"),
    [
        ([1, 3, 1, 1], [1, 3], 1, 1),
        ([1, 3, 2, 2], [1, 12], 1, 4),
        ([None, 3, 2, 2], [None, 3, 4], 1, 1),
        ([1, 3], [1, 3, 1, 1], 1, 1),
    ],
)
def test_a_reshape_is_followed(before: list[int | None], after: list[int | None], axis: int, repeats: int) -> None:
    (passage,) = reshaped(node("Reshape", [before], [after]), 0, axis)
    np.testing.assert_array_equal(passage.of, np.repeat(np.arange(3), repeats))  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("before", "after"), [([1, 6, 4], [1, 2, 3, 4]), ([1, 6, None], [1, 6, None, 1]), ([1, 6, 2], [12])]
)
def test_a_reshape_that_takes_channels_apart_or_mixes_samples(
    before: list[int | None], after: list[int | None]
) -> None:
    found = reshaped(node("Reshape", [before], [after]), 0, 1)
    assert isinstance(found, str) or len(found[0].of) == after[found[0].axis]


def test_concat_puts_channels_behind_each_other() -> None:
    one = node("Concat", [[1, 2, 4], [1, 3, 4]], [[1, 5, 4]], axis=1)
    (passage,) = concatenated(one, 1, 1)
    assert (passage.axis, passage.first, list(passage.of)) == (1, 2, [0, 1, 2])  # type: ignore[union-attr]


def test_split_gives_each_output_its_own() -> None:
    found = split(node("Split", [[1, 5]], [[1, 2], [1, 3]], axis=1), 0, 1)
    assert [list(passage.of) for passage in found] == [[0, 1], [2, 3, 4]]  # type: ignore[union-attr]


def test_the_larger_factor_of_a_product_keeps_its_channels() -> None:
    product = node("Mul", [[1, 4, 1, 1], [1, 4, 8, 8]], [[1, 4, 8, 8]])
    for tensor in product.inputs:
        tensor.inputs.append(Node("Conv", "c"))
    assert isinstance(scaled(product, 0, 1), str)
    assert not isinstance(scaled(product, 1, 1), str)


def test_transposed_picked_and_broadcast() -> None:
    assert transposed(node("Transpose", [[1, 3, 8]], [[1, 8, 3]], perm=[0, 2, 1]), 0, 1)[0].axis == 2  # type: ignore[union-attr]
    assert picked(node("Gather", [[1, 3, 8]], [[1, 3]], axis=2), 0, 1)[0].axis == 1  # type: ignore[union-attr]
    assert isinstance(picked(node("Gather", [[1, 3, 8]], [[1, 8]], axis=1), 0, 1), str)
    assert isinstance(aligned(node("Add", [[1, 1, 8], [1, 3, 8]], [[1, 3, 8]]), 0, 1), str)


@pytest.mark.parametrize(
    ("op", "rule"),
    [("Reshape", reshaped), ("Unsqueeze", reshaped), ("Transpose", transposed), ("Concat", concatenated)],
)
def test_channels_of_unknown_shapes_are_not_followed(op: str, rule: ChannelMapRule) -> None:
    unknown = Node(op, "n", {"axis": 1}, [Variable("x", np.float32)], [Variable("y", np.float32)])
    assert isinstance(rule(unknown, 0, 1), str)


def test_every_operator_of_onnx_has_a_row() -> None:
    """An operator without a row counts as unknown, in front of which nothing may round otherwise."""
    assert {schema.name for schema in defs.get_all_schemas() if not schema.domain} <= STANDARD.keys()


def test_operators_of_one_output_alone_are_elementwise() -> None:
    elementwise = {op: row for op, row in STANDARD.items() if row.elementwise}
    assert not [op for op, row in elementwise.items() if len(defs.get_schema(op).outputs) != 1 or row.weights]


@cache
def input_names(op: str) -> list[str]:
    """Names of an operator's inputs, in lower case."""
    if defs.has(op):
        return [port.name.lower() for port in defs.get_schema(op).inputs]
    # ConvTranspose has an integer form only in a domain of onnxruntime's own, with the inputs of Conv.
    schema = OWN.get(("com.microsoft", op))
    return input_names("QLinearConv") if schema is None else [port.name.lower() for port in schema.inputs]


@pytest.mark.parametrize(("op", "row"), [(op, row) for op, row in ROWS if not row.repeats])
def test_operands_are_codes_with_a_scale_and_a_zero_point(op: str, row: IntegerOperator) -> None:
    names = input_names(op)
    for quantized, scale, zero_point in row.operands:
        assert not names[quantized].endswith(("scale", "point"))
        assert names[scale].startswith(names[quantized][0])
        assert names[scale].endswith("scale")
        assert names[zero_point].startswith(names[quantized][0])
        assert names[zero_point].endswith("zero_point")


@pytest.mark.parametrize(("op", "row"), ROWS)
def test_every_input_has_exactly_one_meaning(op: str, row: IntegerOperator) -> None:
    used = [index for operand in row.operands for index in operand]
    used += [*(row.result or ()), *row.first, *row.last, *([] if row.bias is None else [row.bias])]
    count = 5 if row.repeats else len(input_names(op))
    assert sorted(used) == list(range(count))


@pytest.mark.parametrize(("op", "row"), [(op, row) for op, row in ROWS if row.result is not None])
def test_results_have_a_scale_and_a_zero_point(op: str, row: IntegerOperator) -> None:
    assert row.result is not None
    scale, zero_point = (input_names(op)[index] for index in row.result)
    assert scale.endswith("scale")
    assert zero_point.endswith("zero_point")


def test_a_missing_input_is_named() -> None:
    node = Node("QLinearAdd", "sum", {}, [Variable("a"), Variable(""), Variable("c")])
    check_inputs(node, (0, 2))
    with pytest.raises(ModelError, match=r"node sum \(QLinearAdd\) lacks input 1; the model is damaged"):
        check_inputs(node, range(3))
    with pytest.raises(ModelError, match=r"lacks input 3"):
        check_inputs(node, (0, 3))


def test_the_float_operator_exists() -> None:
    for row in INTEGER_OPERATORS.values():
        assert defs.has(row.float_op) if not row.domain else (row.domain, row.float_op) in OWN
