"""What constants alone decide, computed: the one evaluator of folding and of the way back from codes to floats."""

from __future__ import annotations

from onnxq.rewrite.constants.evaluation import Evaluated, evaluate, evaluate_all
from onnxq.rewrite.constants.linear import Array, dequantize_linear
from onnxq.rewrite.constants.moves import VIEWS
from onnxq.rewrite.constants.payloads import ComputedPayload, DerivedPayload, computed
from onnxq.rewrite.constants.repeats import without_repeats
from onnxq.rewrite.constants.steps import Step, is_small

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
