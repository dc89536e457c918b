"""The operator table: facts about operators that the planner, the dequantizer and the passes read."""

from __future__ import annotations

from onnxq.ops.operator import IntegerOperator, Operator, Role, Rounding, check_inputs
from onnxq.ops.table import ALREADY_QUANTIZED, INTEGER_OPERATORS, OPERATORS, QUANTIZERS, facts_of, operator_of

__all__ = [
    "ALREADY_QUANTIZED",
    "INTEGER_OPERATORS",
    "OPERATORS",
    "QUANTIZERS",
    "IntegerOperator",
    "Operator",
    "Role",
    "Rounding",
    "check_inputs",
    "facts_of",
    "operator_of",
]
