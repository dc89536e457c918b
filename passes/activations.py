"""Activation functions: spellings of one become one node, or the nodes that a runtime computes fastest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from onnxq.errors import ModelError
from onnxq.ir import Constant, Graph, Names, Node, Variable, all_nodes, replace_nodes
from onnxq.ir.elements import Tensor
from onnxq.onnx_api import infer_shapes
from onnxq.passes.cleanup import UpgradeOpset
from onnxq.rewrite import Call, Changes, Match, New, Operators, Pass, RewriteRule, RewriteRules
from onnxq.rewrite.soundness import may_widen


def is_gelu_before_halving(tensor: Tensor) -> bool:
    """Whether a tensor is ``x * (1 + erf(...))``, or with tanh, of which one half is Gelu."""
    return any(
        _made_by(added, "Add") and any(_made_by(inner, "Erf", "Tanh") for inner in added.inputs[0].inputs)
        for added in (tensor.inputs[0].inputs if _made_by(tensor, "Mul") else ())
    )


def _made_by(tensor: Tensor, *operators: str) -> bool:
    return bool(tensor.inputs) and tensor.inputs[0].op in operators and not tensor.inputs[0].domain


# Leaky rectifiers -----------------------------------------------------------------------------------------------------

FIRST_OPSET: Final = 8
"""The opset from which on Max and Min broadcast, and `rectified` can be written."""


def rectified(new: New, data: Tensor, slope: NDArray[np.floating[Any]]) -> Any:
    """Return data with a slope of its own in each channel below zero: PRelu, for which it takes onnxruntime longer.

    Args:
        new: makes the nodes.
        data: floats.
        slope: what data is multiplied by where it is negative.
    """
    if is_extreme_of_two(slope):
        choose = new.Max if (slope <= 1).all() else new.Min
        return choose(data, new.Mul(data, slope))
    return new.Add(new.Relu(data), new.Mul(new.Min(data, 0.0), slope))


def is_extreme_of_two(slope: NDArray[np.floating[Any]]) -> bool:
    """Return whether a rectifier is the greater or the lesser of its data and that times the slope.

    A slope of zero would make NaN of infinite data.

    >>> is_extreme_of_two(np.array([0.1, 0.2])), is_extreme_of_two(np.array([0.1, 2.0])), is_extreme_of_two(np.zeros(2))
    (True, False, False)
    """
    return bool((slope >= 1).all() or ((slope <= 1) & (slope != 0)).all())


# Limits of values -----------------------------------------------------------------------------------------------------

_Operand = Any


class MergeClamps(RewriteRule):
    """Max, Min, Clip and Relu by constants, and two of them in a row, are one Clip or Relu.

    A Clip that limits nothing goes. A Clip without a limit has the largest number of its type as one; Max, Min and Relu
    have none there, so that infinite values pass.
    """

    def pattern(self, op: Operators) -> tuple[Call, ...]:
        """Look for two in a row, and for each alone but Relu."""
        x = op.any("x")
        pairs = [outer for inner in _clamps(op, x, "inner") for outer in _clamps(op, inner, "outer")]
        return (*pairs, *_clamps(op, x, "outer")[1:])

    def obstacle(self, found: Match) -> str:
        """Return why they stay."""
        if found.opset < 6:
            return "operators of this opset have no such limits"
        if isinstance(found.x, Constant):
            return "its data is constant"
        dtype = np.dtype(found.x.dtype or "O")
        if dtype.kind != "f":
            return "its data is not known to be floating point"
        limits = _limits(found, dtype)
        if limits is None or not limits[0] <= limits[1]:
            return "its limits are computed, or cross"
        rank = 0 if found.x.shape is None else len(found.x.shape)
        if any(len(tensor.shape) > rank for node in found.nodes for tensor in _operands(node)):
            return "its limit may raise the rank"
        if len(found.nodes) == 1 and found.outer.op == "Clip" and limits not in _NO_CLIP:
            return "it is a Clip already"
        return ""

    def replacement(self, new: New, found: Match) -> Any:
        """Make the one operator, or none."""
        limits = _limits(found, np.dtype(found.x.dtype))
        assert limits is not None, "looked at before"
        if limits in _NO_CLIP:
            return found.x if limits[0] else new.Relu(found.x)
        most = float(np.finfo(found.x.dtype).max)
        lowest, highest = limits[0] if limits[0] != -most else None, limits[1] if limits[1] != most else None
        if found.opset < _LIMITS_ARE_INPUTS:
            return new.Clip(found.x, min=lowest, max=highest)
        return new.Clip(found.x, lowest, *([] if highest is None else [highest]))


_LIMITS_ARE_INPUTS = 11
_NO_CLIP = ((-np.inf, np.inf), (0.0, np.inf))


def _clamps(op: Operators, x: _Operand, name: str) -> list[Call]:
    limit = op.scalar(f"{name} limit")
    return [
        op.Relu(x, name=name),
        op.Clip(x, ..., name=name),
        op.Max(x, limit, name=name),
        op.Min(x, limit, name=name),
    ]


def _limits(found: Match, dtype: np.dtype[Any]) -> tuple[float, float] | None:
    """Return between what the values lie behind all nodes of a match, or None if that is not known."""
    most = float(np.finfo(dtype).max)
    outer = _limits_of(found.outer, most)
    inner = _limits_of(found.inner, most) if "inner" in found.values else (-np.inf, np.inf)
    if outer is None or inner is None or not outer[0] <= outer[1]:
        return None
    low, high = (float(min(max(limit, outer[0]), outer[1])) for limit in inner)
    return low, high


def _limits_of(node: Node, most: float) -> tuple[float, float] | None:
    if node.op == "Relu":
        return 0.0, np.inf
    if node.op == "Clip":
        low, high = (_limit(node, 1, "min", -most), _limit(node, 2, "max", most))
        return None if low is None or high is None else (low, high)
    value = float(_operands(node)[0].values.item())
    return (value, np.inf) if node.op == "Max" else (-np.inf, value)


def _limit(node: Node, index: int, name: str, default: float) -> float | None:
    tensor = node.inputs[index] if index < len(node.inputs) else None
    if tensor is None or not tensor.name:
        return float(node.attrs.get(name, default))
    fixed = (
        isinstance(tensor, Constant) and tensor.overridable_input is None and all(size == 1 for size in tensor.shape)
    )
    return float(tensor.values.item()) if fixed else None


def _operands(node: Node) -> list[Constant]:
    """Return the constant operand of a Max or Min."""
    return [tensor for tensor in node.inputs if isinstance(tensor, Constant)] if node.op in ("Max", "Min") else []


class UseLeakyRelu(RewriteRule):
    """Rectifiers with a slope below zero are LeakyRelu, or where each channel has its own, two or three nodes.

    These are faster than the one that PRelu would be. The formula with ``x - abs(x)`` stays: it makes NaN of infinity.
    """

    def pattern(self, op: Operators) -> tuple[Call, ...]:
        """Look for each form."""
        x, slope = op.any("x"), op.constant("slope")
        positive, turned = op.Relu(x), op.Relu(op.Neg(x))
        return (
            op.PRelu(x, slope),
            op.Add(positive, op.Mul(turned, slope, name="turned")),
            op.Sub(positive, op.Mul(turned, slope)),
            *(op.Add(positive, op.Mul(below, slope)) for below in _below_zero(op, x)),
            op.Max(x, op.Mul(x, op.scalar("slope"))),
        )

    def obstacle(self, found: Match) -> str:
        """Return why it stays."""
        dtype = np.dtype(found.x.dtype or "O")
        if found.opset < 7 or dtype.kind != "f" or found.x.shape is None:
            return "its data is not known to be floating point, or of unknown rank"
        slope = _slope(found)
        if may_widen(found.nodes, found.x):
            return "a constant may raise the rank"
        if not np.isfinite(slope).all():
            return "its slope is not finite"
        if found.root.op == "PRelu" and not _is_one(slope):
            return "each channel has a slope of its own"
        if found.root.op == "Max" and not 0 < slope.item() <= 1:
            return "its slope is not between 0 and 1"
        if _is_one(slope) and float(np.float32(slope.reshape(-1)[0])) != float(slope.reshape(-1)[0]):
            return "LeakyRelu has a slope of single precision"
        if not _is_one(slope) and (found.opset < FIRST_OPSET or not is_extreme_of_two(slope)):
            return "its slopes lie on both sides of 1, or its opset has nothing faster"
        fits = found.root.op == "PRelu" or _fits(slope.shape, found.x.shape)
        return "" if fits else "its slope is not known to fit its data"

    def rounds(self, found: Match) -> bool:
        """Return whether it rounds otherwise."""
        return True

    def replacement(self, new: New, found: Match) -> Any:
        """Make the LeakyRelu, or what chooses between data and product."""
        slope = _slope(found)
        if not _is_one(slope):
            return rectified(new, found.x, slope)
        return new.LeakyRelu(found.x, alpha=float(slope.reshape(-1)[0]))


def _below_zero(op: Operators, x: Any) -> tuple[Call, ...]:
    return op.Min(x, 0.0), op.Clip(x, -np.inf, 0.0), op.Clip(x, min=-np.inf, max=0.0)


def _slope(found: Match) -> npt.NDArray[Any]:
    values: npt.NDArray[Any] = found.slope.values
    return -values if "turned" in found.values else values


def _is_one(slope: npt.NDArray[Any]) -> bool:
    return bool(slope.size and (slope == slope.reshape(-1)[0]).all())


def _fits(slope: tuple[int, ...], data: Any) -> bool:
    """Whether a slope is broadcast to the data, and not the data to the slope."""
    return all(one in (1, size) for one, size in zip(slope[::-1], list(data)[::-1], strict=False))


class SplitPRelus(RewriteRule):
    """PRelu with constant slopes is the greater of its data and that times the slopes, or the lesser of steep slopes.

    For slopes on both sides of 1 it is ``relu(x) + min(x, 0) * slope``. These nodes take onnxruntime a third
    of the time, and are what other exporters write.
    """

    def pattern(self, op: Operators) -> Call:
        """Look for slopes that nobody computes."""
        return op.PRelu(op.any("x"), op.constant("slope"))

    def obstacle(self, found: Match) -> str:
        """Return why it stays."""
        if found.slope.dtype.kind != "f" or not np.isfinite(found.slope.values).all():
            return "its slopes are no finite floats"
        return "" if found.opset >= FIRST_OPSET else f"what it would become came with opset {FIRST_OPSET}"

    def replacement(self, new: New, found: Match) -> Any:
        """Make the product and what chooses."""
        return rectified(new, found.x, found.slope.values)


# HardSigmoid and HardSwish --------------------------------------------------------------------------------------------

# onnxruntime has no kernel for float64.
_WIDEST = 4


class UseHardSwish(RewriteRule):
    """A sixth of x + 3 between 0 and 6 is HardSigmoid, and x times that is HardSwish where the opset has it."""

    def pattern(self, op: Operators) -> tuple[Call, ...]:
        """Look for the formulas, and for HardSigmoid times its data."""
        x = op.any("x")
        moved = op.Add(x, 3.0)
        forms: list[Call] = [op.Mul(x, op.HardSigmoid(x, name="gate"))]
        by_sixth: Callable[[Any], Call] = lambda value: op.Mul(value, 1 / 6)  # noqa: E731
        by_six: Callable[[Any], Call] = lambda value: op.Div(value, 6.0)  # noqa: E731
        sixths = (by_sixth, by_six)
        for limited in (op.Clip(moved, 0.0, 6.0), op.Clip(moved, min=0.0, max=6.0)):
            for scaled in sixths:
                forms.append(scaled(limited))
                forms.append(scaled(op.Mul(x, limited)))
                forms.append(op.Mul(x, scaled(limited)))
                forms.append(op.Mul(scaled(x), limited))
        return tuple(forms)

    def obstacle(self, found: Match) -> str:
        """Return why it stays."""
        dtype = np.dtype(found.x.dtype or "O")
        if found.opset < 7 or dtype.kind != "f" or dtype.itemsize > _WIDEST:
            return "its data is not known to be floats of 32 bits or fewer"
        if may_widen(found.nodes, found.x):
            return "a constant may raise the rank"
        if "gate" not in found.values:
            return ""
        if found.opset < 14:
            return "HardSwish came with opset 14"
        return "" if has_slope_of_sixth(found.gate) else "its slope is not one sixth"

    def rounds(self, found: Match) -> bool:
        """Return whether it rounds otherwise."""
        return True

    def replacement(self, new: New, found: Match) -> Any:
        """Make the one node, or two where the opset has no HardSwish."""
        reads = [tensor for node in found.nodes for tensor in node.inputs if tensor is found.x]
        multiplied = len(reads) > 1
        if multiplied and found.opset >= 14:
            return new.HardSwish(found.x)
        gate = new.HardSigmoid(found.x, alpha=1 / 6, beta=0.5)
        return new.Mul(found.x, gate) if multiplied else gate


def has_slope_of_sixth(gate: Node) -> bool:
    """Return whether a HardSigmoid is the one that HardSwish multiplies its data with."""
    slope, middle = gate.attrs.get("alpha", 0.2), gate.attrs.get("beta", 0.5)
    return bool(abs(slope - 1 / 6) < 1e-6 and middle == 0.5)


_OPSET = 14


class JoinHardSwishes(Pass):
    """Bring a model to the opset of HardSwish that has it in two nodes, and use it.

    OpenVINO knows the one node, and the formula of older exporters, but not the two, of which it makes kernels of their
    own and changes of layout around them.
    """

    def apply(self, graph: Graph) -> Changes:
        """Join; ``changed`` holds the names of the nodes, ``left`` those of a model that cannot be converted."""
        gates = tuple(node.name for _, node in all_nodes(graph) if _is_gate(node))
        if not gates:
            return Changes()
        try:
            UpgradeOpset(_OPSET).apply(graph)
        except ModelError as error:
            return Changes(left=tuple((name, str(error)) for name in gates))
        infer_shapes(graph)
        return RewriteRules((UseHardSwish(),)).apply(graph)


def _is_gate(node: Node) -> bool:
    """Return whether a node is the HardSigmoid of HardSwish, which a product multiplies with its own data."""
    if node.op != "HardSigmoid" or node.domain or not has_slope_of_sixth(node):
        return False
    products = (reader for reader in node.outputs[0].outputs if reader.op == "Mul" and not reader.domain)
    return any(tensor is node.inputs[0] for reader in products for tensor in reader.inputs)


_HARD_SLOPE, _HARD_MIDDLE = 1 / 6, 0.5


class SplitHardSwishes(Pass):
    """Replace HardSwish by HardSigmoid and Mul, as onnxruntime does when it loads a model.

    Nothing is gained or lost in float, and each of the two can be planned as integers.
    """

    def apply(self, graph: Graph) -> Changes:
        """Replace; ``changed`` holds the names of the nodes, which the products keep."""
        names = Names(graph)
        instead: dict[Node, Sequence[Node]] = {}
        for _, node in all_nodes(graph):
            if node.op != "HardSwish" or node.domain or len(node.inputs) != 1 or len(node.outputs) != 1:
                continue
            data, output = node.inputs[0], node.outputs[0]
            share = Variable(names.unique(f"{output.name}.gate"), output.dtype, output.shape)
            settings = {"alpha": _HARD_SLOPE, "beta": _HARD_MIDDLE}
            gate = Node("HardSigmoid", names.unique(f"{node.name}.gate"), settings, [data], [share])
            node.outputs.clear()
            instead[node] = (gate, Node("Mul", node.name, {}, [data, share], [output]))
        changed = tuple(node.name for node in instead)
        replace_nodes(graph, instead)
        return Changes(changed)


# Swish ----------------------------------------------------------------------------------------------------------------


class SplitSwishes(RewriteRule):
    """Swish is x times the Sigmoid of x, or of x times its slope.

    Runtimes know the two by heart: they fuse them in float, and have integer kernels for each.
    """

    def pattern(self, op: Operators) -> Call:
        """Look for the operator of opset 24."""
        return op.Swish(op.any("x"))

    def obstacle(self, found: Match) -> str:
        """Refuse a slope whose type is not known."""
        return "the type of its data is not known" if _swish_slope(found) != 1 and found.x.dtype is None else ""

    def replacement(self, new: New, found: Match) -> Any:
        """Make the gate and the product."""
        slope = _swish_slope(found)
        steep = found.x if slope == 1 else new.Mul(found.x, slope)
        return new.Mul(found.x, new.Sigmoid(steep))


def _swish_slope(found: Match) -> float:
    return float(found.root.attrs.get("alpha", 1.0))


# GELU -----------------------------------------------------------------------------------------------------------------

_CUBIC = 0.044715
_SLOPE = math.sqrt(2 / math.pi)


class UnifyGeluArgument(RewriteRule):
    """What Erf and Tanh of GELU read is spelled ``x / sqrt(2)`` and ``sqrt(2 / pi) * (x + 0.044715 * x**3)``.

    With Div and Pow, as `FuseGelu` and runtimes look for them.
    """

    def pattern(self, op: Operators) -> tuple[Call, ...]:
        """Return the other spellings."""
        erf = op.Erf(op.Mul(op.any("x"), math.sqrt(0.5)))
        return (erf, *(op.Tanh(argument) for argument in _arguments(op)))

    def obstacle(self, found: Match) -> str:
        """Refuse constants that widen the data."""
        return "its constants may have more dimensions than its data" if may_widen(found.nodes, found.x) else ""

    def rounds(self, found: Match) -> bool:
        """Return whether it rounds otherwise."""
        return True

    def replacement(self, new: New, found: Match) -> Any:
        """Make the argument and the function."""
        x = found.x
        if found.root.op == "Erf":
            return new.like(found.root, new.Div(x, math.sqrt(2)))
        cubic = new.Add(x, new.Mul(new.Pow(x, 3.0), _CUBIC))
        return new.like(found.root, new.Mul(cubic, _SLOPE))


def _arguments(op: Operators) -> Iterator[Call]:
    """Yield the spellings with the cube or the square multiplied out, and with x or the slope factored out."""
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


_FIRST_OPSET = 20


class FuseGelu(RewriteRule):
    """GELU in any of its spellings becomes Gelu, or before opset 20 the spelling that runtimes know.

    Those are ``(x * 0.5) * (1 + erf(x / sqrt(2)))`` and
    ``(x * 0.5) * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))``
    with Div and Pow, of which `UnifyGeluArgument` takes care; other rules leave them as they are.
    """

    def pattern(self, op: Operators) -> tuple[Call, ...]:
        """Return every order of the factors, the rarest operator first."""
        return tuple(_forms(op))

    def obstacle(self, found: Match) -> str:
        """Refuse what is in its best form already, and constants that widen the data."""
        if found.opset < _FIRST_OPSET and "odd" not in found.values:
            return f"ONNX has Gelu from opset {_FIRST_OPSET} on"
        return "its constants may have more dimensions than its data" if may_widen(found.nodes, found.x) else ""

    def rounds(self, found: Match) -> bool:
        """Return whether it rounds otherwise."""
        return True

    def replacement(self, new: New, found: Match) -> Any:
        """Make one Gelu, or the known spelling of it."""
        x = found.x
        exact = any(node.op == "Erf" for node in found.nodes)
        if found.opset >= _FIRST_OPSET:
            return new.Gelu(x, approximate=None if exact else "tanh")
        if exact:
            # Halved first, for twice x may leave the range.
            return new.Mul(new.Mul(x, 0.5), new.Add(new.Erf(new.Div(x, math.sqrt(2))), 1.0))
        cubic = new.Add(x, new.Mul(new.Pow(x, 3.0), _CUBIC))
        return new.Mul(new.Mul(x, 0.5), new.Add(new.Tanh(new.Mul(cubic, _SLOPE)), 1.0))


def _forms(op: Operators) -> Iterator[Call]:
    """Yield every order of the factors; runtimes know two with Erf and one with Tanh."""
    x = op.any("x")
    cubic = op.Add(x, op.Mul(op.Pow(x, 3.0), _CUBIC))
    for inner, last in (
        (op.Erf(op.Div(x, math.sqrt(2))), ""),
        (op.Tanh(op.Mul(cubic, _SLOPE)), "odd"),
    ):
        one_and = op.Add(inner, 1.0)
        yield op.Mul(one_and, op.Mul(x, 0.5))
        yield op.Mul(op.Mul(one_and, x, name=last), 0.5)
        yield op.Mul(op.Mul(one_and, 0.5, name="odd"), x)
