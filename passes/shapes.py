"""Folding of shape arithmetic into constants, and into dimensions that Reshape copies or infers."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from contextlib import suppress
from functools import reduce
from typing import Any

import numpy as np

from onnxq.ir import (
    ArrayData,
    Constant,
    Graph,
    Names,
    Node,
    Tensor,
    Variable,
    all_graphs,
    become_constant,
    inner_variables,
    remove_nodes,
    remove_unused,
    replace_uses,
)
from onnxq.ir.declarations import forget_claims, shape_of
from onnxq.ir.symbolic_dims import SymbolicDim, plus
from onnxq.ir.type_inference import infer_types
from onnxq.rewrite import Changes, Pass
from onnxq.rewrite.shapes import (
    Value,
    broadcast,
    evaluate,
    expand_target,
    reshape_target,
    reshaped,
    sliced,
    value_of,
)

_LAST = np.iinfo(np.int64).max
_READS_SHAPES = frozenset({"Shape", "Size"})


class FoldShapes(Pass):
    """Replace shape arithmetic by constants, in every graph; dimensions may be numbers or names.

    ``Reshape(x, Concat(Shape(x)[0], [-1])) -> Reshape(x, [0, -1])``

    Small integer tensors are evaluated symbolically. A tensor of numbers becomes an initializer, and tensors of equal
    entries are computed once. Targets of Reshape and Expand, and ends of a Slice, become constant if their unknown
    entries are dimensions of the data: Reshape copies them (0), and infers one other (-1). Later shapes are inferred in
    the same walk, so a whole chain folds. A named dimension may be 0 at run time. Not for graph outputs.
    """

    def apply(self, graph: Graph) -> Changes:
        """Return the names of tensors that became initializers, and of nodes with a new target."""
        forget_claims(graph)
        folding = _Folding(graph)
        for scope in all_graphs(graph):
            folding.fold(scope)
        folding.forget_invented()
        if folding.changed:
            remove_unused(graph)
        return Changes(tuple(folding.changed))


class _Folding:
    """One walk over a graph and its subgraphs, in an order in which values are known before they are read."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.names = graph, Names(graph)
        self.values: dict[Tensor, Value | None] = {}
        self.improved: set[Tensor] = set()
        self.invented: list[tuple[Variable, int]] = []
        self.declared = _dimension_names(graph)
        self.changed: list[str] = []

    def fold(self, scope: Graph) -> None:
        gone = []
        first: dict[Hashable, Tensor] = {}
        for tensor in scope.inputs:
            self._name_dimensions(tensor)
        for node in scope.nodes:
            if node.domain or not node.outputs:
                continue
            if self._folds(scope, node, first):
                gone.append(node)
                continue
            if resolve := _RESOLVED.get(node.op):
                # Ill-formed nodes stay as they are.
                with suppress(ValueError, TypeError, IndexError):
                    resolve(self, node)
            self._infer(node)
            for tensor in node.outputs:
                self._name_dimensions(tensor)
        remove_nodes(scope, gone)

    def value(self, tensor: Tensor) -> Value | None:
        if tensor not in self.values:
            self.values[tensor] = value_of(tensor) if isinstance(tensor, Constant) else None
        return self.values[tensor]

    def shape(self, tensor: Tensor) -> list[Any] | None:
        value = self.values.get(tensor)
        return list(value.entries.shape) if value is not None else shape_of(tensor)

    def _evaluated(self, node: Node) -> Value | None:
        if len(node.outputs) != 1 or not node.outputs[0].name:
            return None
        inputs = [self.value(tensor) for tensor in node.inputs]
        value = evaluate(node, inputs, [self.shape(tensor) for tensor in node.inputs])
        self.values[node.outputs[0]] = value
        return value

    def _folds(self, scope: Graph, node: Node, first: dict[Hashable, Tensor]) -> bool:
        tensor, value = node.outputs[0], self._evaluated(node)
        if value is None or not value.named or tensor.graph_output_of:
            return False
        if value.known:
            scope.initializers.append(become_constant(tensor, ArrayData(value.array)))
            self.improved.add(tensor)
        elif (same := first.setdefault(value.content, tensor)) is not tensor:
            replace_uses(tensor, same)
        else:
            return False
        self.changed.append(tensor.name)
        return True

    def put(self, node: Node, index: int, entries: Sequence[int], name: str) -> None:
        target = self.names.store(f"{node.name or node.op}.{name}", np.asarray(entries, np.int64))
        node.inputs[index] = target
        self.improved.add(target)
        self.changed.append(node.name)

    def improve(self, tensor: Variable, shape: Iterable[Any]) -> None:
        new_shape = list(shape)
        before = tensor.shape
        if before is None or len(before) != len(new_shape):
            after = new_shape if before is None else before
        else:
            after = [_better(old, new) for old, new in zip(before, new_shape, strict=True)]
        if after != before:
            tensor.shape = after
            self.improved.add(tensor)
            self.invented.extend(
                (tensor, axis)
                for axis, extent in enumerate(after)
                if isinstance(extent, str) and extent not in self.declared
            )

    def _infer(self, node: Node) -> None:
        """Infer the output types again if more is known of the inputs."""
        incomplete = [tensor for tensor in node.outputs if _is_incomplete(tensor)]
        if not incomplete or not any(tensor in self.improved for tensor in node.inputs):
            return
        before = [(tensor, tensor.dtype, tensor.shape) for tensor in node.outputs]
        # Ill-typed nodes stay as they are.
        with suppress(ValueError, TypeError):
            infer_types(node, self.graph.opset_imports)
        for tensor, dtype, shape in before:
            inferred, tensor.shape = tensor.shape, shape
            if inferred is not None:
                self.improve(tensor, inferred)
            if dtype is not None:
                tensor.dtype = dtype

    def _name_dimensions(self, tensor: Tensor) -> None:
        """Temporarily name unknown dimensions whose size a node reads."""
        if not isinstance(tensor, Variable) or tensor.shape is None or None not in tensor.shape:
            return
        if any(reader.op in _READS_SHAPES for reader in tensor.outputs):
            # Tensors of two subgraphs may have one name.
            number = len(self.invented)
            self.improve(tensor, [f"{tensor.name}#{axis}#{number}" for axis in range(len(tensor.shape))])

    def forget_invented(self) -> None:
        for tensor, axis in self.invented:
            if tensor.shape is not None and not isinstance(tensor, Constant):
                tensor.shape[axis] = None


def _dimension_names(graph: Graph) -> set[str]:
    declared = [tensor for scope in all_graphs(graph) for tensor in (*scope.inputs, *scope.outputs)]
    shapes = [tensor.shape or () for tensor in (*declared, *inner_variables(graph))]
    return {extent for shape in shapes for extent in shape if isinstance(extent, str)}


def _better(old: SymbolicDim, new: SymbolicDim) -> SymbolicDim:
    return new if old is None or (isinstance(old, str) and isinstance(new, int)) else old


def _is_incomplete(tensor: Tensor) -> bool:
    has_type = tensor.dtype is not None and tensor.shape is not None
    return bool(tensor.name) and not (has_type and all(isinstance(extent, int) for extent in tensor.shape or ()))


def _resolve_reshape(folding: _Folding, node: Node) -> None:
    target = folding.value(node.inputs[1]) if len(node.inputs) == 2 else None
    if target is None or target.entries.ndim != 1:
        return
    data, entries = folding.shape(node.inputs[0]), list(target.entries)
    literal = bool(node.attrs.get("allowzero", 0))
    folding.improve(node.outputs[0], reshaped(data, entries, literal=literal))
    if not isinstance(node.inputs[1], Variable):
        return
    if (numbers := reshape_target(data, entries, literal=literal)) is not None:
        if 0 not in entries:
            node.attrs.pop("allowzero", None)
        folding.put(node, 1, numbers, "shape")


def _resolve_expand(folding: _Folding, node: Node) -> None:
    target = folding.value(node.inputs[1]) if len(node.inputs) == 2 else None
    data = folding.shape(node.inputs[0])
    if target is None or target.entries.ndim != 1 or data is None:
        return
    folding.improve(node.outputs[0], broadcast([data, list(target.entries)]))
    if isinstance(node.inputs[1], Variable) and (numbers := expand_target(data, list(target.entries))) is not None:
        folding.put(node, 1, numbers, "shape")


def _resolve_slice(folding: _Folding, node: Node) -> None:
    """An end that equals the extent of its axis becomes the largest integer."""
    data = folding.shape(node.inputs[0])
    limits = folding.value(node.inputs[2]) if len(node.inputs) > 2 and node.inputs[2].name else None
    if limits is None or data is None:
        return
    count = limits.entries.size

    def entries(index: int, default: list[int]) -> list[Any]:
        if index >= len(node.inputs) or not node.inputs[index].name:
            return default
        value = folding.value(node.inputs[index])
        return [None] * count if value is None else list(value.entries.flat)

    starts, ends, axes, steps = entries(1, []), entries(2, []), entries(3, list(range(count))), entries(4, [1] * count)
    places = [axis for axis in axes if isinstance(axis, int) and -len(data) <= axis < len(data)]
    if not len(starts) == len(ends) == len(places) == len(steps) == count:
        return
    shape = list(data)
    for start, end, axis, step in zip(starts, ends, places, steps, strict=True):
        shape[axis] = sliced(data[axis], start, end, step)
    folding.improve(node.outputs[0], shape)
    new_ends = [_LAST if end == data[axis] and end is not None else end for end, axis in zip(ends, places, strict=True)]
    computed = isinstance(node.inputs[2], Variable) and all(isinstance(step, int) and step > 0 for step in steps)
    if computed and all(isinstance(end, int) for end in new_ends):
        folding.put(node, 2, new_ends, "ends")


def _resolve_broadcast(folding: _Folding, node: Node) -> None:
    if folding.improved.isdisjoint(node.inputs) or not _is_incomplete(node.outputs[0]):
        return
    shapes = [shape for tensor in node.inputs if (shape := folding.shape(tensor)) is not None]
    if len(shapes) == len(node.inputs):
        folding.improve(node.outputs[0], broadcast(shapes))


def _resolve_constant_of_shape(folding: _Folding, node: Node) -> None:
    target = folding.value(node.inputs[0])
    if target is not None and target.entries.ndim == 1:
        folding.improve(node.outputs[0], target.entries)


def _resolve_range(folding: _Folding, node: Node) -> None:
    start, limit, delta = (folding.value(tensor) for tensor in node.inputs)
    if start is None or limit is None or delta is None:
        return
    if (*start.numbers, *delta.numbers) == (0, 1):
        folding.improve(node.outputs[0], [max(end, 0) if isinstance(end, int) else end for end in limit.entries.flat])


def _resolve_concat(folding: _Folding, node: Node) -> None:
    """Name the sum of named dimensions, which inference does not do."""
    shapes = [folding.shape(tensor) for tensor in node.inputs]
    axis, result = node.attrs.get("axis"), node.outputs[0].shape
    if result is None or axis is None or not -len(result) <= axis < len(result) or result[axis] is not None:
        return
    known_shapes = [shape for shape in shapes if shape is not None and len(shape) == len(result)]
    if len(known_shapes) == len(shapes):
        total = reduce(plus, (shape[axis] for shape in known_shapes))
        joined: list[SymbolicDim] = [None] * len(result)
        joined[axis] = total
        folding.improve(node.outputs[0], joined)


_RESOLVED = {
    "Concat": _resolve_concat,
    "ConstantOfShape": _resolve_constant_of_shape,
    "Expand": _resolve_expand,
    "Range": _resolve_range,
    "Reshape": _resolve_reshape,
    "Slice": _resolve_slice,
    **dict.fromkeys(("Add", "Div", "Equal", "Less", "Max", "Min", "Mul", "Pow", "Sub", "Where"), _resolve_broadcast),
}
