"""Ranges: whether others lower the model's quantization error, and saturation limits.

A GELU, HardSwish or Sigmoid is flat far from zero. A range that ends where its reader becomes flat has a smaller scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxq.calibration.accumulators import Range
from onnxq.calibration.methods import CalibrationMethod, ends_of_data, find_range, required_kinds
from onnxq.calibration.statistics import CalibrationStatistics, TensorStatistics
from onnxq.ir import Graph, Node, Tensor, Variable, is_constant
from onnxq.numerics.affine import worst_ratio
from onnxq.numerics.spec import QuantSpec
from onnxq.ops import Rounding, facts_of
from onnxq.planning.plan import Plan
from onnxq.rewrite.constant_folding import Step, evaluate_all

NsrBySample = NDArray[np.float64]
"""Each sample's share of the noise-to-signal ratio of each output, float64 of shape (samples, outputs)."""

# A method must reduce the error by this share; less is not worth a different method.
_WORTH = 0.02
# The reduction must exceed this many standard errors over the samples.
_CERTAIN = 1.0


def is_significant_reduction(nsr: NsrBySample, found: NsrBySample) -> bool:
    """Return whether the error of the worst output fell by more than chance, on the same samples."""
    output = int(np.argmax(nsr.sum(0)))
    if not pooled(found) < (1 - _WORTH) * pooled(nsr):
        return False
    taken = nsr[:, output] - found[:, output]
    if len(taken) < 2 or not np.isfinite(taken).all():
        return True
    return float(taken.sum()) > _CERTAIN * float(taken.std(ddof=1)) * math.sqrt(len(taken))


def pooled(nsr: NsrBySample) -> float:
    """Return the noise-to-signal ratio of the worst output over all samples; infinite if one is not finite."""
    return worst_ratio(nsr.sum(0))


# --- saturation limits ----------------------------------------------------------------------------------------------

Array = NDArray[Any]

# Largest constant in a function, such as a bias with a value for each channel.
_LARGEST = 1 << 12
# Largest number of nodes of a function.
_NODES = 16
_POINTS = 257
# A change below this share of the function's range is lost in 8-bit values behind it. It stays lost if it adds up over
# a thousand elements, while rounding errors do not add up.
_FLAT = 2**-16


@dataclass(frozen=True)
class SaturatingRange:
    """The range of another calibration method, limited to the values that make a difference.

    Attributes:
        method: the other method.
        low: values below give the same result; -inf without a limit.
        high: values above give the same result; inf without a limit.
    """

    method: CalibrationMethod
    low: float
    high: float

    @property
    def kinds(self) -> tuple[str, ...]:
        """The statistics that the other method reads."""
        return required_kinds([self.method])

    def __call__(self, seen: TensorStatistics, spec: QuantSpec) -> tuple[float, float]:
        """Return (low, high) of the other method within the limits."""
        low, high = find_range(self.method, seen, spec)
        return min(max(low, self.low), high), max(min(high, self.high), low)


def without_limits(method: CalibrationMethod) -> CalibrationMethod:
    """Return the method without its saturation limits."""
    return method.method if isinstance(method, SaturatingRange) else method


def saturation_limits(graph: Graph, plan: Plan, statistics: CalibrationStatistics) -> dict[str, tuple[float, float]]:
    """Return the limits beyond which values make no difference, for quantized tensors that exceed them, by name.

    The limits come from evaluating the elementwise nodes behind a tensor over its range. All its readers must be such
    nodes.
    """
    quantized, found = plan.calibrated, dict[str, tuple[float, float]]()
    for tensor in (tensor for node in graph.nodes for tensor in node.outputs if tensor.name in quantized):
        function = _function_of(tensor)
        if function and statistics.of(tensor.name).need(Range).count:
            reached = ends_of_data(statistics.of(tensor.name))
            ends = _flat_ends(tensor, function, reached, graph.opset)
            if ends[0] > reached[0] or ends[1] < reached[1]:
                found[tensor.name] = ends
    return found


def _function_of(tensor: Variable) -> list[Node]:
    """Return the elementwise nodes behind a tensor, in order; none if another node reads the tensor too."""
    function: list[Node] = []
    made, waiting = {tensor}, [tensor]
    while waiting and len(function) < _NODES:
        for node in waiting.pop(0).outputs:
            is_inside = _is_function(node) and all(_is_small(tensor) or tensor in made for tensor in node.inputs)
            if is_inside and node not in function:
                function.append(node)
                made.update(node.outputs)
                waiting += node.outputs
    return function if not tensor.graph_output_of and set(function).issuperset(tensor.outputs) else []


def _is_function(node: Node) -> bool:
    """Whether each element of the output is a function of the same element of the inputs, without steps."""
    operator = facts_of(node)
    return (operator.elementwise and operator.rounding is Rounding.PASSED) or node.op in ("Squeeze", "Unsqueeze")


def _is_small(tensor: Tensor) -> bool:
    return not tensor.name or (is_constant(tensor) and tensor.values.size <= _LARGEST)


def _flat_ends(
    tensor: Variable, function: Sequence[Node], reached: tuple[float, float], opset: int
) -> tuple[float, float]:
    """Return the values left and right of zero beyond which the function is flat."""
    low, high = min(reached[0], 0.0), max(reached[1], 0.0)
    # np.unique would import numpy.ma, which takes longer than the whole function.
    points = np.sort(np.append(np.linspace(low, high, _POINTS), 0.0))
    points = points[np.diff(points, prepend=-math.inf) > 0].astype(np.float32)
    grid = points.reshape(-1, *(1,) * (len(tensor.shape or (0,)) - 1))
    left = [
        tensor
        for node in function
        for tensor in node.outputs
        if tensor.graph_output_of or not {*function} >= {*tensor.outputs}
    ]
    computed = evaluate_all([Step.of(node) for node in function], left, opset, {tensor: grid})
    curves = [computed.values[tensor].load() for tensor in left if tensor in computed.values]
    if len(curves) < len(left) or any(curve.shape[:1] != points.shape for curve in curves):
        return -math.inf, math.inf
    zero = int(np.searchsorted(points, 0.0))
    curve = np.concatenate([_in_parts(curve.reshape(len(points), -1)) for curve in curves], 1)
    left_of, right_of = _flat_from(curve[zero::-1]), _flat_from(curve[zero:])
    return (
        -math.inf if left_of is None else float(points[zero - left_of]),
        math.inf if right_of is None else float(points[zero + right_of]),
    )


def _in_parts(curve: Array) -> Array:
    width = float(curve.max()) - float(curve.min())
    return np.asarray(curve.astype(np.float64) / (width or 1.0))


def _flat_from(curve: Array) -> int | None:
    """Return the first row from which on the curve is flat; None if that is the last row."""
    backwards = curve[::-1]
    above = np.maximum.accumulate(backwards)[::-1] - curve
    below = curve - np.minimum.accumulate(backwards)[::-1]
    flat = (np.maximum(above, below) <= _FLAT).all(1)
    # A NaN is never flat.
    first = int(np.argmax(flat)) if flat.any() else len(flat) - 1
    return first if first < len(flat) - 1 else None
