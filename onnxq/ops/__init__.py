"""What is known of operators: one table, read by planner, dequantizer and passes alike."""

from __future__ import annotations

from onnxq.ops.intervals import Interval
from onnxq.ops.operator import IntegerOperator, Operator, Role, check_inputs
from onnxq.ops.table import ALREADY_QUANTIZED, INTEGER_OPERATORS, OPERATORS, operator_of

__all__ = [
    "ALREADY_QUANTIZED",
    "INTEGER_OPERATORS",
    "OPERATORS",
    "IntegerOperator",
    "Interval",
    "Operator",
    "Role",
    "check_inputs",
    "operator_of",
]
