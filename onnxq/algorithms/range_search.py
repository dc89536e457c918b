"""Range search: the method for each tensor by the error of the whole model, and limits where functions saturate.

What a GELU, a HardSwish or a Sigmoid reads may reach far to where the function is flat. A range that ends there leaves
finer steps for the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from onnxq.calibration.accumulators import Range
from onnxq.calibration.methods import CalibrationMethod, ends_of_data, find_range, required_kinds
from onnxq.calibration.statistics import CalibrationStatistics, TensorStatistics
from onnxq.ir import Graph, Node, Tensor, Variable, is_constant
from onnxq.numerics.affine import worst_ratio
from onnxq.numerics.spec import QuantSpec
from onnxq.planning.plan import Plan
from onnxq.rewrite.constant_folding import Step, evaluate_all

Method = TypeVar("Method")
Ends = tuple[float, float]
Noise = NDArray[np.float64]
"""Each sample's part of the noise-to-signal ratio of each output, float64 of shape (samples, outputs)."""

# Ranges whose ends are nearer than this share of the width make the same noise, or as good as.
_ALIKE = 0.02
# A method must take off this share of the noise; less is not worth a difference between tensors.
_WORTH = 0.02
# So many standard errors over the samples must the noise taken off be away from none. Of many tensors some gain more by
# luck.
_CERTAIN, _CERTAIN_OF_MANY = 1.0, 2.0


@dataclass(frozen=True)
class RangeChoice(Generic[Method]):
    """The calibration method of each tensor.

    Attributes:
        default: of every tensor that has none of its own.
        own: by tensor.
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
    measure: Callable[[RangeChoice[Method]], Noise],
    *,
    most: int,
    methods: Sequence[Method],
    patience: int = 2,
) -> RangeChoice[Method]:
    """Return the calibration methods with which a model has the least noise, as far as that can be told from chance.

    First the one method that is best for all tensors: where some in a row are no better than one before them, those
    that clip yet more are not tried. Then one tensor after the other, the noisiest first, is given each other method
    that would give it another range, until as many in a row are no better as well. Kept is what takes off noise at the
    worst output: 2 % at least, and more than one standard error of the difference over the samples, for single tensors
    more than two. A method that is lucky on one sample does not pass.

    Args:
        ranges: of each method by tensor, tensors with the largest part in the noise first.
        measure: a choice to the noise of its model.
        most: measurements to make at most, those of single methods included.
        methods: to choose from, those that clip more behind others; the first is taken where nothing is better.
        patience: so many in a row that are no better leave none to be tried.

    >>> ranges = {"a": {"wide": (0.0, 9.0), "narrow": (0.0, 1.0)}, "b": {"wide": (0.0, 9.0), "narrow": (0.0, 1.0)}}
    >>> def measure(choice):
    ...     return np.full((2, 1), (choice.of("a") == "wide") + 3 * (choice.of("b") == "narrow"), float)
    >>> choose_ranges(ranges, measure, most=9, methods=["wide", "narrow"])
    RangeChoice(default='wide', own={'a': 'narrow'})
    """
    best, measured, no_better = RangeChoice(methods[0]), 1, 0
    first = noise = measure(best)
    for method in methods[1:most]:
        found, measured = measure(RangeChoice(method)), measured + 1
        no_better = 0 if pooled(found) < pooled(noise) else no_better + 1
        if no_better == patience:
            break
        if not no_better and is_significant_reduction(first, found):
            best, noise = RangeChoice(method), found
    for tensor, known in ranges.items():
        no_better = 0
        for method in _unlike(known, best.of(tensor)):
            if measured >= most:
                return best
            other, measured = best.with_own(tensor, method), measured + 1
            found = measure(other)
            no_better = 0 if pooled(found) < pooled(noise) else no_better + 1
            if is_significant_reduction(noise, found, _CERTAIN_OF_MANY):
                best, noise = other, found
            if no_better == patience:
                break
    return best


def is_significant_reduction(noise: Noise, found: Noise, certain: float = _CERTAIN) -> bool:
    """Return whether noise has become less at the worst output by more than chance, on the same samples.

    Args:
        noise: before.
        found: after.
        certain: by how many standard errors at least.
    """
    output = int(np.argmax(noise.sum(0)))
    if not pooled(found) < (1 - _WORTH) * pooled(noise):
        return False
    taken = noise[:, output] - found[:, output]
    if len(taken) < 2 or not np.isfinite(taken).all():
        return True
    return float(taken.sum()) > certain * float(taken.std(ddof=1)) * math.sqrt(len(taken))


def pooled(noise: Noise) -> float:
    """Return the noise-to-signal ratio of the worst output over all samples; infinite where one is not finite."""
    return worst_ratio(noise.sum(0))


def _unlike(known: Mapping[Method, Ends], now: Method) -> Iterator[Method]:
    """Yield the methods whose ranges are unlike the one of now and those of methods before them."""
    seen = [known[now]]
    width = max(known[now][1] - known[now][0], np.finfo(np.float64).tiny)
    for method, (low, high) in known.items():
        if all(max(abs(low - one[0]), abs(high - one[1])) >= _ALIKE * width for one in seen):
            seen.append((low, high))
            yield method


# --- saturation limits ----------------------------------------------------------------------------------------------

Array = NDArray[Any]

# What computes each element from that element and constants, or from several that stem from one, and moves none away.
_ELEMENTWISE: Final = frozenset(
    {"Add", "Clip", "Div", "Elu", "Erf", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Mul", "Neg", "Pow", "Relu"}
    | {"Sigmoid", "Softplus", "Sqrt", "Squeeze", "Sub", "Tanh", "Unsqueeze"}
)
# The largest constant that functions take, such as the bias of each channel.
_LARGEST = 1 << 12
# Nodes that a function is written in, at most.
_NODES = 16
_POINTS = 257
# What changes by less than this part of all that a function gives is lost in codes of 8 bits behind it, even where it
# adds up over a thousand elements, as their rounding does not.
_FLAT = 2**-16


@dataclass(frozen=True)
class SaturatingRange:
    """The range of another method, no further than where values make a difference.

    Attributes:
        method: the other one.
        low: below which all values stand for each other; -inf where none do.
        high: above which they do.
        room: how many times as far the range may reach, for channels whose factors make their ends lie there.
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
        """Return (low, high) within those of the other method."""
        low, high = find_range(self.method, seen, spec)
        return min(max(low, self.room * self.low), high), max(min(high, self.room * self.high), low)

    def clip(self, ends: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return ends of channels, no further than where values make a difference."""
        return ends.clip(self.low, self.high)


def without_limits(method: CalibrationMethod) -> CalibrationMethod:
    """Return the method that another one may limit to where values make a difference."""
    return method.method if isinstance(method, SaturatingRange) else method


def saturation_limits(graph: Graph, plan: Plan, evidence: CalibrationStatistics) -> dict[str, tuple[float, float]]:
    """Return from where on values of tensors make no difference, of those that reach beyond, by name.

    Told by computing what follows a tensor element by element over its range, up to where anything else reads it.

    Args:
        graph: the prepared graph.
        plan: which tensors become codes.
        evidence: of these.
    """
    coded, found = plan.calibrated, dict[str, tuple[float, float]]()
    for tensor in (tensor for node in graph.nodes for tensor in node.outputs if tensor.name in coded):
        function = _function_of(tensor)
        if function and evidence.of(tensor.name).need(Range).count:
            reached = ends_of_data(evidence.of(tensor.name))
            ends = _flat_ends(tensor, function, reached, graph.opset)
            if ends[0] > reached[0] or ends[1] < reached[1]:
                found[tensor.name] = ends
    return found


def _function_of(tensor: Variable) -> list[Node]:
    """Return the nodes that compute something of each element of a tensor, in order; none where others read it too."""
    function: list[Node] = []
    made, waiting = {tensor}, [tensor]
    while waiting and len(function) < _NODES:
        for node in waiting.pop(0).outputs:
            known = node.op in _ELEMENTWISE and all(_is_small(one) or one in made for one in node.inputs)
            if known and node not in function:
                function.append(node)
                made.update(node.outputs)
                waiting += node.outputs
    return function if not tensor.graph_output_of and set(function).issuperset(tensor.outputs) else []


def _is_small(tensor: Tensor) -> bool:
    return not tensor.name or (is_constant(tensor) and tensor.values.size <= _LARGEST)


def _flat_ends(
    tensor: Variable, function: Sequence[Node], reached: tuple[float, float], opset: int
) -> tuple[float, float]:
    """Return from where on what a function gives is flat, to the left and to the right of zero."""
    low, high = min(reached[0], 0.0), max(reached[1], 0.0)
    # np.unique would load the masked arrays of numpy, which takes longer than all of this.
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
    """Return a curve in parts of the width of what it gives."""
    width = float(curve.max() - curve.min())
    return np.asarray(curve.astype(np.float64) / (width or 1.0))


def _flat_from(curve: Array) -> int | None:
    """Return the first row from which on nothing changes; None where that is the last one."""
    backwards = curve[::-1]
    above = np.maximum.accumulate(backwards)[::-1] - curve
    below = curve - np.minimum.accumulate(backwards)[::-1]
    flat = (np.maximum(above, below) <= _FLAT).all(1)
    # No number is flat.
    first = int(np.argmax(flat)) if flat.any() else len(flat) - 1
    return first if first < len(flat) - 1 else None
