"""What constants alone decide, computed: the one evaluator of folding and of the way back from codes to floats."""

from __future__ import annotations

from onnxq.constants.evaluation import Evaluated, evaluate, evaluate_all
from onnxq.constants.linear import Array, dequantize_linear
from onnxq.constants.moves import VIEWS
from onnxq.constants.payloads import ComputedPayload, DerivedPayload, computed
from onnxq.constants.repeats import without_repeats
from onnxq.constants.steps import Step, is_small

__all__ = [
    "VIEWS",
    "Array",
    "ComputedPayload",
    "DerivedPayload",
    "Evaluated",
    "Step",
    "computed",
    "dequantize_linear",
    "evaluate",
    "evaluate_all",
    "is_small",
    "without_repeats",
]
