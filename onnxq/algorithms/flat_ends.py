"""Where values make no difference: activation functions that are flat from some value on, and ranges that end there.

What a GELU, a HardSwish or a Sigmoid reads may reach far to where they are flat. Codes for that are spent on nothing,
and those that are left are finer for the rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from onnxq.calibration.accumulators import Range
from onnxq.calibration.methods import RangeMethod, ends_of_data, kinds_read, range_by
from onnxq.calibration.statistics import Evidence, TensorEvidence
from onnxq.ir import Graph, Node, Tensor, Variable, is_fixed
from onnxq.numerics.spec import Spec
from onnxq.planning.plan import Plan
from onnxq.rewrite.constants import Step, evaluate_all

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
class Within:
    """The range of another method, no further than where values make a difference.

    Attributes:
        method: the other one.
        low: below which all values stand for each other; -inf where none do.
        high: above which they do.
        room: how many times as far the range may reach, for channels whose factors make their ends lie there.
    """

    method: RangeMethod
    low: float
    high: float
    room: float = 1.0

    @property
    def kinds(self) -> tuple[str, ...]:
        """The statistics that the other method reads."""
        return kinds_read([self.method])

    def __call__(self, seen: TensorEvidence, spec: Spec) -> tuple[float, float]:
        """Return (low, high) within those of the other method."""
        low, high = range_by(self.method, seen, spec)
        return min(max(low, self.room * self.low), high), max(min(high, self.room * self.high), low)

    def clip(self, ends: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return ends of channels, no further than where values make a difference."""
        return ends.clip(self.low, self.high)


def unlimited(method: RangeMethod) -> RangeMethod:
    """Return the method that another one may limit to where values make a difference."""
    return method.method if isinstance(method, Within) else method


def flat_ends(graph: Graph, plan: Plan, evidence: Evidence) -> dict[str, tuple[float, float]]:
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
    return function if not tensor.returned_by and set(function).issuperset(tensor.outputs) else []


def _is_small(tensor: Tensor) -> bool:
    return not tensor.name or (is_fixed(tensor) and tensor.values.size <= _LARGEST)


def _flat_ends(
    tensor: Variable, function: Sequence[Node], reached: tuple[float, float], opset: int
) -> tuple[float, float]:
    """Return from where on what a function gives is flat, to the left and to the right of zero."""
    low, high = min(reached[0], 0.0), max(reached[1], 0.0)
    # np.unique would load the masked arrays of numpy, which takes longer than all of this.
    points = np.sort(np.append(np.linspace(low, high, _POINTS), 0.0))
    points = points[np.diff(points, prepend=-math.inf) > 0].astype(np.float32)
    grid = points.reshape(-1, *(1,) * (len(tensor.shape or (0,)) - 1))
    left = [one for node in function for one in node.outputs if one.returned_by or not {*function} >= {*one.outputs}]
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
