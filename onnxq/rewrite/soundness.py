"""Conditions under which a rewrite changes nothing but rounding; rules and passes call them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from onnx import TensorProto

from onnxq.ir.elements import Constant, Node, Tensor, onnx_dtype
from onnxq.ir.queries import all_nodes, is_constant, numbers_of, optional_input, producer
from onnxq.ops import QUANTIZERS, Rounding, facts_of

Doubles = npt.NDArray[np.float64]

FIRST_OPSET: Final = 7
"""Opset of the oldest models that are rewritten.

Before it, operands lie along an axis, and Dropout and BatchNormalization train by default.
"""

# A factor may use a quarter of the exponents of a type. Only data far outside of the usual can then leave the range.
_SHARE_OF_EXPONENTS: Final = 4
# Largest error, relative to 1, that the rounding of a shift may add to the data beside it.
_MOST_ROUNDING: Final = 2.0**-8


def stored(values: npt.ArrayLike, dtype: npt.DTypeLike, *factors: npt.ArrayLike) -> npt.NDArray[Any] | None:
    """Return folded values in the type of the constant, or None if that type cannot hold them.

    It cannot hold a value that is not finite. It also cannot if a value is denormal or zero, and all its factors are
    normal.

    Args:
        values: computed in float64.
        dtype: the floating-point type of the constant.
        factors: the multiplied factors; they broadcast to the values. Sums have none.

    >>> stored([0.5], np.float16), stored([1e5], np.float16), stored([1e-6], np.float16, [1e-3], [1e-3])
    (array([0.5], dtype=float16), None, None)
    """
    exact = np.asarray(values, np.float64)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        rounded = exact.astype(dtype)
    if not np.isfinite(rounded).all():
        return None
    if factors:
        smallest = _limits(dtype).tiny
        lost = np.abs(rounded) < smallest
        if lost.any():
            for factor in factors:
                lost = lost & (np.abs(np.asarray(factor, np.float64)) >= smallest)
            if lost.any():
                return None
    return rounded


def stays_in_range(factors: npt.ArrayLike, dtype: npt.DTypeLike) -> bool:
    """Return whether factors may be applied earlier or later without leaving the range of a type.

    Each factor is zero or lies between 2^-k and 2^k. k is a quarter of the exponents: 32 for float32, 4 for float16.

    >>> stays_in_range([0.125, 0], np.float16), stays_in_range([1e-6], np.float16), stays_in_range(np.inf, np.float32)
    (True, False, False)
    """
    sizes = np.abs(np.asarray(factors, np.float64))
    most = 2.0 ** (int(_limits(dtype).maxexp) // _SHARE_OF_EXPONENTS)
    return bool(((sizes == 0) | ((sizes >= 1 / most) & (sizes <= most))).all())


def keeps_digits(shifts: npt.ArrayLike, dtype: npt.DTypeLike) -> bool:
    """Return whether data keeps its digits if a shift is added after the next product instead of to the data.

    The rounding of the shift, ``abs(shift) * eps``, may be 2^-8 at most.

    >>> keeps_digits([-127.5], np.float32), keeps_digits([1e8], np.float32)
    (True, False)
    """
    return bool((np.abs(np.asarray(shifts, np.float64)) * float(_limits(dtype).eps) <= _MOST_ROUNDING).all())


def affine_of(norm: Node) -> tuple[Doubles, Doubles] | str:
    """Return factor and shift of each channel of a BatchNormalization, or the reason why it has none.

    ``BatchNormalization(x) = x * factor + shift`` if its four parameters are constant vectors.
    """
    if norm.attrs.get("training_mode", 0) or any(output.name for output in norm.outputs[1:]):
        return "it is in training mode"
    if not norm.attrs.get("spatial", 1):
        return "it has a scale for each value"
    parameters = norm.inputs[1:5]
    if len(parameters) < 4 or not all(map(is_constant, parameters)):
        return "its parameters are not constant"
    if len({tensor.shape for tensor in parameters}) > 1 or len(parameters[0].shape) != 1:
        return "its parameters are no vectors of one length"
    scale, bias, mean, variance = (np.asarray(tensor.values, np.float64) for tensor in parameters)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        # Attributes are float32, and so is their default.
        factor = scale / np.sqrt(variance + float(np.float32(norm.attrs.get("epsilon", 1e-5))))
        return factor, bias - mean * factor


def _limits(dtype: npt.DTypeLike) -> Any:
    kind = np.dtype(dtype)
    return np.finfo(kind if kind.kind == "f" else np.float32)


# Kernels -------------------------------------------------------------------------------------------------------------
_INTEGERS: Final = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
# Types for which onnxruntime's CPU provider lacks a kernel that rules need.
_LACKING: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(("AveragePool", "Conv", "ConvTranspose", "Erf", "Gelu", "GlobalAveragePool"), ("float64",)),
    **dict.fromkeys(("HardSigmoid", "HardSwish", "LeakyRelu"), ("float64",)),
    "Gemm": _INTEGERS,
    "PRelu": ("float64", *_INTEGERS),
}
_CLIP_TAKES_ALL: Final = 12


def has_kernel(op_type: str, dtype: Any, opset: int) -> bool:
    """Return whether onnxruntime has a CPU kernel for an operator that rules make, in this type.

    >>> has_kernel("LeakyRelu", np.float64, 17), has_kernel("Clip", np.float64, 11), has_kernel("Clip", np.float64, 12)
    (False, False, True)
    """
    name = "" if dtype is None else np.dtype(dtype).name
    if op_type == "Clip" and opset < _CLIP_TAKES_ALL:
        return name not in ("float64", *_INTEGERS)
    return name not in _LACKING.get(op_type, ())


# Uses ----------------------------------------------------------------------------------------------------------------
_FLOATS: Final = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16)


class Uses:
    """Which tensors reach discrete or unknown operators, or lookup tables, in a graph and its subgraphs.

    The first query scans the graph in linear time. Tensors made later are followed to the tensors of that scan.
    """

    def __init__(self, graph: Any) -> None:
        self._graph = graph

    def decides(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether one of the tensors reaches a discrete or unknown operator, so that its last bit may decide.

        Chains of operators that move values or are piecewise monotone are followed, into subgraphs and out of them.
        """
        pending, seen = list(tensors), set()
        while pending:
            tensor = pending.pop()
            if tensor in self._deciding:
                return True
            if tensor in seen or tensor in self._scanned:
                continue
            seen.add(tensor)
            for reader in tensor.outputs:
                if any(read is tensor for read in decided_by(reader)):
                    return True
                if _passes(reader):
                    pending.extend(reader.outputs)
        return False

    def is_like_a_table(self, weight: Constant) -> bool:
        """Return whether a matrix has the shape of a table that a Gather reads, or its transpose; they may be tied."""
        return len(weight.shape) == 2 and tuple(sorted(weight.shape)) in self._tables

    @cached_property
    def _tables(self) -> set[tuple[int, ...]]:
        read = (node.inputs[0] for _, node in all_nodes(self._graph) if node.op == "Gather" and node.inputs)
        return {tuple(sorted(tensor.shape)) for tensor in read if isinstance(tensor, Constant)}

    @cached_property
    def _scanned(self) -> set[Tensor]:
        return {tensor for _, node in all_nodes(self._graph) for tensor in (*node.inputs, *node.outputs)}

    @cached_property
    def _deciding(self) -> set[Tensor]:
        deciding: set[Tensor] = set()
        pending: list[Tensor] = []
        behind: dict[Tensor, list[list[Tensor]]] = defaultdict(list)
        for _, node in all_nodes(self._graph):
            pending.extend(decided_by(node))
            for results, sources in _handed_on(node):
                for tensor in results:
                    behind[tensor].append(sources)
        while pending:
            tensor = pending.pop()
            if not tensor.name or tensor in deciding:
                continue
            deciding.add(tensor)
            for sources in behind.get(tensor, ()):
                pending.extend(sources)
                sources.clear()
            for maker in tensor.inputs:
                if _passes(maker):
                    pending.extend(maker.inputs)
        return deciding


def decided_by(node: Node) -> Iterator[Tensor]:
    """Yield the inputs of a discrete operator whose last bit may decide, and all inputs of an unknown one.

    >>> from onnxq.ir import Variable
    >>> [tensor.name for tensor in decided_by(Node("Round", inputs=[Variable("x")]))]
    ['x']
    """
    with_indices = node.op == "MaxPool" and any(tensor.name for tensor in node.outputs[1:])
    if facts_of(node).rounding is Rounding.DECISIVE or with_indices:
        yield from node.inputs
    elif node.op in ("Cast", "CastLike"):
        wanted = node.attrs.get("to") if node.op == "Cast" else onnx_dtype(node.inputs[1])
        yield from node.inputs[:1] if wanted not in _FLOATS else ()
    elif node.op in ("If", "Loop", "Where"):
        condition = optional_input(node, 1 if node.op == "Loop" else 0)
        yield from () if condition is None else (condition,)
    elif node.op == "GridSample":
        yield from node.inputs[1:2] if node.attrs.get("mode") == "nearest" else ()
    elif node.op in ("Resize", "Upsample"):
        # Scales also decide the size of the result; a region of interest moves the window.
        yield from node.inputs[1:]


_CONVERSIONS: Final = QUANTIZERS | {"DequantizeLinear"}


def is_pure(node: Node) -> bool:
    """Return whether a node may be merged with an equal one or computed ahead: it draws nothing and quantizes nothing.

    >>> is_pure(Node("Relu")), is_pure(Node("RandomNormal")), is_pure(Node("QuantizeLinear"))
    (True, False, False)
    """
    return not facts_of(node).random and node.op not in _CONVERSIONS


def _passes(node: Node) -> bool:
    return facts_of(node).rounding is Rounding.PASSED


def _handed_on(node: Node) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Yield pairs: tensors that a node with subgraphs makes, and the tensors that they come from."""
    for body in node.subgraphs() if node.attrs else ():
        if node.op == "If":
            yield from (([result], [source]) for source, result in zip(body.outputs, node.outputs, strict=False))
        else:
            # A Loop or Scan passes states on to the next iteration, so all of them count as one.
            yield [*node.outputs, *body.inputs], [*body.outputs, *node.inputs]


# Ranges ---------------------------------------------------------------------------------------------------------------
_MOST_FOLLOWED: Final = 16
_UNBOUNDED: Final = (-np.inf, np.inf)
# Larger constants have no known range.
_MOST_VALUES: Final = 1 << 16


def range_of(tensor: Tensor) -> tuple[float, float]:
    """Return a range around zero that the values of a tensor never leave, whatever the model is fed.

    It follows from the operator that makes the values, also if others move, average or add them.
    """
    return _range(tensor, {}, _MOST_FOLLOWED)


def _range(tensor: Tensor, ranges: dict[Tensor, tuple[float, float]], steps: int) -> tuple[float, float]:
    if tensor not in ranges:
        # A tensor that is met again on the way to itself has no range.
        ranges[tensor] = _UNBOUNDED
        ranges[tensor] = _result_range(tensor, ranges, steps) if steps else _UNBOUNDED
    return ranges[tensor]


def _result_range(tensor: Tensor, ranges: dict[Tensor, tuple[float, float]], steps: int) -> tuple[float, float]:
    if isinstance(tensor, Constant):
        values = tensor.values if math.prod(tensor.shape) <= _MOST_VALUES else np.empty(0)
        is_finite = values.size and values.dtype.kind in "fiu" and np.isfinite(values.astype(np.float32)).all()
        return (min(float(values.min()), 0.0), max(float(values.max()), 0.0)) if is_finite else _UNBOUNDED
    maker = producer(tensor)
    if maker is None or not maker.inputs:
        return _UNBOUNDED
    operator = facts_of(maker)
    low, high = operator.fixed_range or (0.0 if operator.never_negative else -np.inf, np.inf)
    if maker.op == "Clip" and not maker.domain:
        lowest, highest = numbers_of(maker, 1, "min", [low]), numbers_of(maker, 2, "max", [high])
        low, high = lowest[0] if lowest else low, highest[0] if highest else high
    if (low, high) != _UNBOUNDED:
        return min(float(low), 0.0), max(float(high), 0.0)
    if not operator.keeps_range and operator.highest is None:
        return _UNBOUNDED
    indices = range(len(maker.inputs)) if operator.data is None else operator.data
    sources = [maker.inputs[index] for index in indices if index < len(maker.inputs)]
    lows, highs = zip(*(_range(source, ranges, steps - 1) for source in sources), strict=True)
    if operator.highest is None:
        return min(lows), max(highs)
    return (0.0, np.inf if np.inf in highs else operator.highest(highs)) if min(lows) == 0 else _UNBOUNDED


# Types and shapes -----------------------------------------------------------------------------------------------------


def is_float(tensor: Tensor) -> bool:
    """Return whether a tensor is known to hold floats of 16, 32 or 64 bits."""
    return tensor.dtype is not None and np.dtype(tensor.dtype).kind == "f"


def rank(tensor: Tensor) -> int | None:
    """Return the number of dimensions of a tensor, or None if it is unknown."""
    return None if tensor.shape is None else len(tensor.shape)


def may_widen(nodes: Sequence[Node], data: Tensor) -> bool:
    """Return whether constants of a match may give its result more dimensions than the data by broadcasting."""
    most = rank(data) or 0
    operands = (tensor for node in nodes for tensor in node.inputs)
    return any(isinstance(tensor, Constant) and len(tensor.shape) > most for tensor in operands)


def reduces_last_axis(node: Node) -> bool:
    """Return whether a node reduces its data along the last axis alone, given by an attribute or a constant input."""
    axes = numbers_of(node, 1, "axes")
    return axes is not None and len(axes) == 1 and axes[0] in (-1, (rank(node.inputs[0]) or 0) - 1)


def same_extents(first: Sequence[int | str | None], second: Sequence[int | str | None]) -> bool:
    """Return whether two runs of dimensions are equal for certain. A name stands for one number everywhere in a model.

    >>> same_extents(["N", 3], ["N", 3]), same_extents([None], [None]), same_extents([2], ["N"])
    (True, False, False)
    """
    return len(first) == len(second) and all(
        left is not None and left == right for left, right in zip(first, second, strict=True)
    )
