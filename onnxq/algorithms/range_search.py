"""Range search: the calibration method of each tensor by the model's quantization error, and saturation limits.

A GELU, HardSwish or Sigmoid is flat far from zero. A range that ends where its reader becomes flat has a smaller scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

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

Method = TypeVar("Method")
Ends = tuple[float, float]
NsrBySample = NDArray[np.float64]
"""Each sample's share of the noise-to-signal ratio of each output, float64 of shape (samples, outputs)."""

# Ranges whose ends differ by less than this share of the width have practically the same error.
_ALIKE = 0.02
# A method must reduce the error by this share; less is not worth a different method.
_WORTH = 0.02
# The reduction must exceed this many standard errors over the samples. Single tensors need more, because of many
# tensors some improve by chance.
_CERTAIN, _CERTAIN_OF_MANY = 1.0, 2.0


@dataclass(frozen=True)
class RangeChoice(Generic[Method]):
    """The calibration method of each tensor.

    Attributes:
        default: method of every tensor without its own.
        own: methods by tensor.
    """

    default: Method
    own: Mapping[str, Method] = field(default_factory=dict)

    def of(self, tensor: str) -> Method:
        """Return the method of a tensor."""
        return self.own.get(tensor, self.default)

    def with_own(self, tensor: str, method: Method) -> RangeChoice[Method]:
        """Return this choice with another method for one tensor."""
        return RangeChoice(self.default, {**self.own, tensor: method})


def choose_ranges(
    ranges: Mapping[str, Mapping[Method, Ends]],
    measure: Callable[[RangeChoice[Method]], NsrBySample],
    *,
    most: int,
    methods: Sequence[Method],
    patience: int = 2,
) -> RangeChoice[Method]:
    """Return the calibration methods with which the model has the least quantization error.

    First, one method for all tensors is chosen. `methods` are tried in order, until `patience` in a row do not improve
    the error. Then each tensor, that of the highest error first, tries the other methods with a different range, with
    the same patience. A method is kept if it reduces the error of the worst output by at least 2 %. The reduction must
    also exceed one standard error over the samples, and two for a single tensor. A method that is lucky on one sample
    does not pass.

    Args:
        ranges: range of each method by tensor, tensors of the highest error first.
        measure: returns the error of the model for a choice.
        most: limit of measurements, including those of the first step.
        methods: candidates, ordered by how much they clip. The first is the default.
        patience: number of failures in a row that ends a series.

    >>> ranges = {"a": {"wide": (0.0, 9.0), "narrow": (0.0, 1.0)}, "b": {"wide": (0.0, 9.0), "narrow": (0.0, 1.0)}}
    >>> def measure(choice):
    ...     return np.full((2, 1), (choice.of("a") == "wide") + 3 * (choice.of("b") == "narrow"), float)
    >>> choose_ranges(ranges, measure, most=9, methods=["wide", "narrow"])
    RangeChoice(default='wide', own={'a': 'narrow'})
    """
    best, measured, no_better = RangeChoice(methods[0]), 1, 0
    first = nsr = measure(best)
    for method in methods[1:most]:
        found, measured = measure(RangeChoice(method)), measured + 1
        no_better = 0 if pooled(found) < pooled(nsr) else no_better + 1
        if no_better == patience:
            break
        if not no_better and is_significant_reduction(first, found):
            best, nsr = RangeChoice(method), found
    for tensor, known in ranges.items():
        no_better = 0
        for method in _unlike(known, best.of(tensor)):
            if measured >= most:
                return best
            other, measured = best.with_own(tensor, method), measured + 1
            found = measure(other)
            no_better = 0 if pooled(found) < pooled(nsr) else no_better + 1
            if is_significant_reduction(nsr, found, _CERTAIN_OF_MANY):
                best, nsr = other, found
            if no_better == patience:
                break
    return best


def is_significant_reduction(nsr: NsrBySample, found: NsrBySample, certain: float = _CERTAIN) -> bool:
    """Return whether the error of the worst output fell by more than chance, on the same samples.

    The reduction must exceed `certain` standard errors.
    """
    output = int(np.argmax(nsr.sum(0)))
    if not pooled(found) < (1 - _WORTH) * pooled(nsr):
        return False
    taken = nsr[:, output] - found[:, output]
    if len(taken) < 2 or not np.isfinite(taken).all():
        return True
    return float(taken.sum()) > certain * float(taken.std(ddof=1)) * math.sqrt(len(taken))


def pooled(nsr: NsrBySample) -> float:
    """Return the noise-to-signal ratio of the worst output over all samples; infinite if one is not finite."""
    return worst_ratio(nsr.sum(0))


def _unlike(known: Mapping[Method, Ends], now: Method) -> Iterator[Method]:
    """Yield the methods whose ranges differ from the current one and from those of earlier methods."""
    seen = [known[now]]
    width = max(known[now][1] - known[now][0], np.finfo(np.float64).tiny)
    for method, (low, high) in known.items():
        if all(max(abs(low - one[0]), abs(high - one[1])) >= _ALIKE * width for one in seen):
            seen.append((low, high))
            yield method


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
        room: factor by which the range may exceed the limits, for channels whose factors move their ends there.
    """

    method: CalibrationMethod
    low: float
    high: float
    room: float = 1.0

    @property
    def kinds(self) -> tuple[str, ...]:
        """The statistics that the other method reads."""
        return required_kinds([self.method])

    def __call__(self, seen: TensorStatistics, spec: QuantSpec) -> tuple[float, float]:
        """Return (low, high) of the other method within the limits."""
        low, high = find_range(self.method, seen, spec)
        return min(max(low, self.room * self.low), high), max(min(high, self.room * self.high), low)

    def clip(self, ends: NDArray[np.float64]) -> NDArray[np.float64]:
        """Clip the ends of channels to the limits."""
        return ends.clip(self.low, self.high)


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
            known = _is_function(node) and all(_is_small(one) or one in made for one in node.inputs)
            if known and node not in function:
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
        one for node in function for one in node.outputs if one.graph_output_of or not {*function} >= {*one.outputs}
    ]
    computed = evaluate_all([Step.of(node) for node in function], left, opset, {tensor: grid})
    curves = [computed.values[one].load() for one in left if one in computed.values]
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
