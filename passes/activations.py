"""Activation functions: variants of one become one node, or the nodes that a runtime computes fastest."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from onnxq.ir import Constant, Node, numbers_of
from onnxq.ir.elements import Tensor
from onnxq.rewrite import Match, NodePattern, OpsetPatternBuilder, RewriteContext, RewriteRule, RoundingRule
from onnxq.rewrite.soundness import is_float, may_widen, rank


def is_gelu_before_halving(tensor: Tensor) -> bool:
    """Return whether a tensor is ``x * (1 + erf(...))``, or with tanh; half of it is Gelu."""
    return any(
        _made_by(added, "Add") and any(_made_by(inner, "Erf", "Tanh") for inner in added.inputs[0].inputs)
        for added in (tensor.inputs[0].inputs if _made_by(tensor, "Mul") else ())
    )


def _made_by(tensor: Tensor, *operators: str) -> bool:
    return bool(tensor.inputs) and tensor.inputs[0].op in operators and not tensor.inputs[0].domain


# Leaky rectifiers -----------------------------------------------------------------------------------------------------

MAX_BROADCASTS: Final = 8
"""First opset in which Max and Min broadcast, which `rectified` needs."""


def rectified(new: RewriteContext, data: Tensor, slope: NDArray[np.floating[Any]]) -> Any:
    """Return ``PRelu(data, slope)`` in nodes that onnxruntime computes faster than PRelu.

    Args:
        new: makes the nodes.
        data: floats.
        slope: factor of negative data, one for each channel.
    """
    if is_extreme_of_two(slope):
        choose = new.Max if (slope <= 1).all() else new.Min
        return choose(data, new.Mul(data, slope))
    return new.Add(new.Relu(data), new.Mul(new.Min(data, 0.0), slope))


def is_extreme_of_two(slope: NDArray[np.floating[Any]]) -> bool:
    """Return whether ``PRelu(x, slope)`` is the maximum or the minimum of ``x`` and ``x * slope``.

    Slopes must be all >= 1, or all <= 1 and not zero: infinity times zero is NaN.

    >>> is_extreme_of_two(np.array([0.1, 0.2])), is_extreme_of_two(np.array([0.1, 2.0])), is_extreme_of_two(np.zeros(2))
    (True, False, False)
    """
    return bool((slope >= 1).all() or ((slope <= 1) & (slope != 0)).all())


# Clamps ---------------------------------------------------------------------------------------------------------------

# Bytes of float32.
_WIDEST = 4


class MergeClamps(RewriteRule):
    """``Min(Max(x, a), b) -> Clip(x, a, b)``.

    Merge one or two of Max, Min, Clip and Relu with constant limits into one Clip or Relu.

    A Clip without limits goes. Max, Min and Relu pass infinity where they have no limit, a Clip does not: an absent
    limit of Clip is the largest number of its type. Not for limits that cross or may raise the rank.
    """

    def pattern(self, op: OpsetPatternBuilder) -> tuple[NodePattern, ...]:
        x = op.any("x")
        pairs = [outer for inner in _clamps(op, x, "inner") for outer in _clamps(op, inner, "outer")]
        return (*pairs, *_clamps(op, x, "outer")[1:])

    def check(self, match: Match) -> str:
        if isinstance(match.x, Constant) or not is_float(match.x):
            return "its data is constant, or not known to be floating point"
        if any(len(limit.shape) > (rank(match.x) or 0) for node in match.nodes for limit in _operands(node)):
            return "its limit may raise the rank"
        return ""

    def rounds(self, match: Match) -> bool:
        # Runtimes compute some 16-bit clamps in 32 bits, and then do not round their inputs.
        return bool(np.dtype(match.x.dtype).itemsize < _WIDEST)

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        # Limits that are attributes are float32, whatever the type of the data.
        attributes = match.opset < _LIMITS_ARE_INPUTS
        most = float(np.finfo(np.float32 if attributes else match.x.dtype).max)
        limits = _limits(match, most)
        if limits is None or not limits[0] <= limits[1]:
            return "its limits are computed, or cross"
        if limits in _NO_CLIP:
            return match.x if limits[0] else new.Relu(match.x)
        if len(match.nodes) == 1 and match.outer.op == "Clip":
            return "it is a Clip already"
        lowest, highest = limits[0] if limits[0] != -most else None, limits[1] if limits[1] != most else None
        if attributes:
            return new.Clip(match.x, min=lowest, max=highest)
        return new.Clip(match.x, lowest, *([] if highest is None else [highest]))


_LIMITS_ARE_INPUTS = 11
_NO_CLIP = ((-np.inf, np.inf), (0.0, np.inf))


def _clamps(op: OpsetPatternBuilder, x: Any, name: str) -> list[NodePattern]:
    limit = op.scalar(f"{name} limit")
    return [
        op.Relu(x, name=name),
        op.Clip(x, ..., name=name),
        op.Max(x, limit, name=name),
        op.Min(x, limit, name=name),
    ]


def _limits(match: Match, most: float) -> tuple[float, float] | None:
    outer = _limits_of(match.outer, most)
    inner = _limits_of(match.inner, most) if "inner" in match.values else (-np.inf, np.inf)
    if outer is None or inner is None or not outer[0] <= outer[1]:
        return None
    low, high = (float(min(max(limit, outer[0]), outer[1])) for limit in inner)
    return low, high


def _limits_of(node: Node, most: float) -> tuple[float, float] | None:
    if node.op == "Relu":
        return 0.0, np.inf
    if node.op == "Clip":
        low, high = (numbers_of(node, 1, "min", [-most]), numbers_of(node, 2, "max", [most]))
        return None if low is None or high is None or len(low) != 1 or len(high) != 1 else (low[0], high[0])
    value = float(_operands(node)[0].values.item())
    return (value, np.inf) if node.op == "Max" else (-np.inf, value)


def _operands(node: Node) -> list[Constant]:
    return [tensor for tensor in node.inputs if isinstance(tensor, Constant)] if node.op in ("Max", "Min") else []


class UseLeakyRelu(RoundingRule):
    """``Sub(Relu(x), Mul(Relu(Neg(x)), a)) -> LeakyRelu(x, alpha=a)``.

    Replace rectifiers with a slope below zero by LeakyRelu, or by two or three nodes if slopes differ per channel.

    These are faster than PRelu. Not for the formula with ``x - abs(x)``, which makes NaN of infinity.
    """

    def pattern(self, op: OpsetPatternBuilder) -> tuple[NodePattern, ...]:
        x, slope = op.any("x"), op.constant("slope")
        positive, turned = op.Relu(x), op.Relu(op.Neg(x))
        below_zero = op.Min(x, 0.0), op.Clip(x, -np.inf, 0.0), op.Clip(x, min=-np.inf, max=0.0)
        return (
            op.PRelu(x, slope),
            op.Add(positive, op.Mul(turned, slope, name="turned")),
            op.Sub(positive, op.Mul(turned, slope)),
            *(op.Add(positive, op.Mul(negative, slope)) for negative in below_zero),
            op.Max(x, op.Mul(x, op.scalar("slope"))),
        )

    def check(self, match: Match) -> str:
        if not is_float(match.x) or match.x.shape is None:
            return "its data is not known to be floating point, or of unknown rank"
        slope = _slope(match)
        if may_widen(match.nodes, match.x):
            return "a constant may raise the rank"
        if not np.isfinite(slope).all():
            return "its slope is not finite"
        if match.root.op == "PRelu" and not _is_one(slope):
            return "each channel has a slope of its own"
        if match.root.op == "Max" and not 0 < slope.item() <= 1:
            return "its slope is not between 0 and 1"
        if _is_one(slope) and not _fits_single(slope.reshape(-1)[0]):
            return "LeakyRelu has a slope of single precision"
        if not _is_one(slope) and (match.opset < MAX_BROADCASTS or not is_extreme_of_two(slope)):
            return "its slopes lie on both sides of 1, or its opset has nothing faster"
        fits = match.root.op == "PRelu" or _fits(slope.shape, match.x.shape)
        return "" if fits else "its slope is not known to fit its data"

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        slope = _slope(match)
        if not _is_one(slope):
            return rectified(new, match.x, slope)
        return new.LeakyRelu(match.x, alpha=float(slope.reshape(-1)[0]))


def _slope(match: Match) -> npt.NDArray[Any]:
    values: npt.NDArray[Any] = match.slope.values
    return -values if "turned" in match.values else values


def _fits_single(value: np.generic) -> bool:
    """Return whether a number is the same in single precision; one beyond its range is not, without a warning."""
    with np.errstate(over="ignore"):
        return float(np.float32(value)) == float(value)


def _is_one(slope: npt.NDArray[Any]) -> bool:
    return bool(slope.size and (slope == slope.reshape(-1)[0]).all())


def _fits(slope: tuple[int, ...], data: Any) -> bool:
    return all(extent in (1, size) for extent, size in zip(slope[::-1], list(data)[::-1], strict=False))


class SplitPRelus(RewriteRule):
    """``PRelu(x, a) -> Max(x, Mul(x, a))``.

    Replace PRelu with constant slopes by Max, by Min if the slopes are steep, or by Relu and Min.

    For slopes on both sides of 1 it is ``relu(x) + min(x, 0) * slope``. onnxruntime needs a third of the time for these
    nodes, and other exporters write them.
    """

    def pattern(self, op: OpsetPatternBuilder) -> NodePattern:
        return op.PRelu(op.any("x"), op.constant("slope"))

    def check(self, match: Match) -> str:
        if not is_float(match.slope) or not np.isfinite(match.slope.values).all():
            return "its slopes are no finite floats"
        return "" if match.opset >= MAX_BROADCASTS else f"its replacement needs opset {MAX_BROADCASTS}"

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        return rectified(new, match.x, match.slope.values)


# HardSigmoid and HardSwish --------------------------------------------------------------------------------------------


class UseHardSigmoid(RewriteRule):
    """``Mul(x, Div(Clip(Add(x, 3), 0, 6), 6)) -> Mul(x, HardSigmoid(x))``.

    Replace HardSwish, its formula and that of HardSigmoid by HardSigmoid, and Mul where there is one.

    onnxruntime splits HardSwish as well when it loads a model, and has an integer kernel for each of the two.
    """

    def pattern(self, op: OpsetPatternBuilder) -> tuple[NodePattern, ...]:
        x = op.any("x")
        moved = op.Add(x, 3.0)

        def sixths(value: Any) -> tuple[NodePattern, NodePattern]:
            return op.Mul(value, 1 / 6), op.Div(value, 6.0)

        variants = [op.HardSwish(x)]
        for limited in (op.Clip(moved, 0.0, 6.0), op.Clip(moved, min=0.0, max=6.0)):
            variants += [*sixths(limited), *sixths(op.Mul(x, limited))]
            variants += [op.Mul(x, gate) for gate in sixths(limited)]
            variants += [op.Mul(scaled, limited) for scaled in sixths(x)]
        return tuple(variants)

    def check(self, match: Match) -> str:
        if match.root.op == "HardSwish":
            return ""
        # onnxruntime has no kernels for float64.
        if not is_float(match.x) or np.dtype(match.x.dtype).itemsize > _WIDEST:
            return "its data is not known to be floats of 32 bits or fewer"
        return "a constant may raise the rank" if may_widen(match.nodes, match.x) else ""

    def rounds(self, match: Match) -> bool:
        return match.root.op != "HardSwish"

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        reads = [tensor for node in match.nodes for tensor in node.inputs if tensor is match.x]
        gate = new.HardSigmoid(match.x, alpha=1 / 6, beta=0.5)
        if match.root.op != "HardSwish" and len(reads) == 1:
            return gate
        return new.Mul(match.x, new.named("gate", gate))


class JoinHardSwishes(RoundingRule):
    """``Mul(x, HardSigmoid(x)) -> HardSwish(x)``.

    Join HardSigmoid and Mul to HardSwish, for models in which the two do not become integers.

    OpenVINO fuses HardSwish. For the pair it runs two kernels, and layout changes around them.
    """

    def pattern(self, op: OpsetPatternBuilder) -> NodePattern:
        x = op.any("x")
        return op.Mul(x, op.HardSigmoid(x, name="gate"))

    def check(self, match: Match) -> str:
        if match.opset < _HARD_SWISH_OPSET:
            return f"HardSwish came with opset {_HARD_SWISH_OPSET}"
        slope, middle = match.gate.attrs.get("alpha", 0.2), match.gate.attrs.get("beta", 0.5)
        return "" if abs(slope - 1 / 6) < 1e-6 and middle == 0.5 else "its slope is not one sixth"

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        return new.HardSwish(match.x)


_HARD_SWISH_OPSET = 14


# Swish ----------------------------------------------------------------------------------------------------------------


class SplitSwishes(RewriteRule):
    """``Swish(x, alpha) -> Mul(x, Sigmoid(Mul(x, alpha)))``.

    Replace Swish by Sigmoid and Mul.

    Runtimes fuse the two in float, and have integer kernels for each.
    """

    def pattern(self, op: OpsetPatternBuilder) -> NodePattern:
        return op.Swish(op.any("x"))

    def check(self, match: Match) -> str:
        return "the type of its data is not known" if _swish_slope(match) != 1 and match.x.dtype is None else ""

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        slope = _swish_slope(match)
        steep = match.x if slope == 1 else new.Mul(match.x, slope)
        return new.Mul(match.x, new.Sigmoid(steep))


def _swish_slope(match: Match) -> float:
    return float(match.root.attrs.get("alpha", 1.0))


# GELU -----------------------------------------------------------------------------------------------------------------

_CUBIC = 0.044715
_SLOPE = math.sqrt(2 / math.pi)


class UnifyGeluArgument(RoundingRule):
    """``Erf(Mul(x, sqrt(0.5))) -> Erf(Div(x, sqrt(2)))``.

    Rewrite the argument of Erf and Tanh in GELU as ``x / sqrt(2)`` and ``sqrt(2 / pi) * (x + 0.044715 * x**3)``.

    `FuseGelu` and runtimes match this variant, with Div and Pow.
    """

    def pattern(self, op: OpsetPatternBuilder) -> tuple[NodePattern, ...]:
        erf = op.Erf(op.Mul(op.any("x"), math.sqrt(0.5)))
        return (erf, *(op.Tanh(argument) for argument in _arguments(op)))

    def check(self, match: Match) -> str:
        return "its constants may have more dimensions than its data" if may_widen(match.nodes, match.x) else ""

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        x = match.x
        if match.root.op == "Erf":
            return new.like(match.root, new.Div(x, math.sqrt(2)))
        cubic = new.Add(x, new.Mul(new.Pow(x, 3.0), _CUBIC))
        return new.like(match.root, new.Mul(cubic, _SLOPE))


def _arguments(op: OpsetPatternBuilder) -> Iterator[NodePattern]:
    """Variants: the cube or the square multiplied out, and x or the slope factored out."""
    x = op.any("x")
    squares = (op.Mul(op.Mul(x, _CUBIC), x), op.Mul(op.Mul(x, x), _CUBIC), op.Mul(op.Pow(x, 2.0), _CUBIC))
    cubes = (
        op.Mul(op.Mul(op.Mul(x, x), x), _CUBIC),
        op.Mul(op.Mul(op.Pow(x, 2.0), x), _CUBIC),
        op.Mul(op.Mul(x, x), op.Mul(x, _CUBIC)),
        *(op.Mul(square, x) for square in squares),
    )
    for cube in cubes:
        yield op.Mul(op.Add(x, cube), _SLOPE)
    for square in squares:
        one_and = op.Add(square, 1.0)
        yield op.Mul(op.Mul(x, _SLOPE), one_and)
        yield op.Mul(x, op.Mul(one_and, _SLOPE))
        yield op.Mul(op.Mul(x, one_and), _SLOPE)


_GELU_OPSET = 20


class FuseGelu(RoundingRule):
    """``(x * 0.5) * (1 + erf(x / sqrt(2))) -> Gelu(x)``.

    Replace every variant of GELU by Gelu, or before opset 20 by the variant that runtimes match.

    ``(x * 0.5) * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))) -> Gelu(x, approximate="tanh")``

    `UnifyGeluArgument` prepares the arguments. Other rules keep the variants on the left.
    """

    def pattern(self, op: OpsetPatternBuilder) -> tuple[NodePattern, ...]:
        return tuple(_forms(op))

    def check(self, match: Match) -> str:
        if match.opset < _GELU_OPSET and "is_noncanonical" not in match.values:
            return f"ONNX has Gelu from opset {_GELU_OPSET} on"
        return "its constants may have more dimensions than its data" if may_widen(match.nodes, match.x) else ""

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        x = match.x
        exact = any(node.op == "Erf" for node in match.nodes)
        if match.opset >= _GELU_OPSET:
            return new.Gelu(x, approximate=None if exact else "tanh")
        if exact:
            # x is halved first, because 2 * x may leave the range.
            return new.Mul(new.Mul(x, 0.5), new.Add(new.Erf(new.Div(x, math.sqrt(2))), 1.0))
        cubic = new.Add(x, new.Mul(new.Pow(x, 3.0), _CUBIC))
        return new.Mul(new.Mul(x, 0.5), new.Add(new.Tanh(new.Mul(cubic, _SLOPE)), 1.0))


def _forms(op: OpsetPatternBuilder) -> Iterator[NodePattern]:
    """Every order of the factors; runtimes match two with Erf and one with Tanh."""
    x = op.any("x")
    cubic = op.Add(x, op.Mul(op.Pow(x, 3.0), _CUBIC))
    for inner, last in (
        (op.Erf(op.Div(x, math.sqrt(2))), ""),
        (op.Tanh(op.Mul(cubic, _SLOPE)), "is_noncanonical"),
    ):
        one_and = op.Add(inner, 1.0)
        yield op.Mul(one_and, op.Mul(x, 0.5))
        yield op.Mul(op.Mul(one_and, x, name=last), 0.5)
        yield op.Mul(op.Mul(one_and, 0.5, name="is_noncanonical"), x)
