"""The rows of INTEGER_OPERATORS fit the schemas that onnxruntime itself gives out."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from onnx import defs
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

from onnxq.errors import ModelError
from onnxq.ir import Node, Variable
from onnxq.ops import INTEGER_OPERATORS, IntegerOperator, check_inputs

ROWS = INTEGER_OPERATORS.items()


@cache
def input_names(op: str) -> list[str]:
    """Names of an operator's inputs, in lower case."""
    if defs.has(op):
        return [port.name.lower() for port in defs.get_schema(op).inputs]
    known = {schema.name: schema for schema in get_all_operator_schema() if schema.domain == "com.microsoft"}
    # ConvTranspose has an integer form only in a domain of onnxruntime's own, with the inputs of Conv.
    schema: Any = known.get(op)
    return input_names("QLinearConv") if schema is None else [port.name.lower() for port in schema.inputs]


@pytest.mark.parametrize(("op", "row"), [(op, row) for op, row in ROWS if not row.repeats])
def test_operands_are_codes_with_a_scale_and_a_zero_point(op: str, row: IntegerOperator) -> None:
    names = input_names(op)
    for codes, scale, zero_point in row.operands:
        assert not names[codes].endswith(("scale", "point"))
        assert names[scale].startswith(names[codes][0])
        assert names[scale].endswith("scale")
        assert names[zero_point].startswith(names[codes][0])
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


@pytest.mark.parametrize(("op", "row"), ROWS)
def test_the_float_operator_exists(op: str, row: IntegerOperator) -> None:
    if not row.domain:
        assert defs.has(row.float_op)
    else:
        assert row.float_op in {schema.name for schema in get_all_operator_schema() if schema.domain == row.domain}
