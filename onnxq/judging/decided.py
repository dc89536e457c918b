"""What data decides in a model: how many elements outputs have, their order, or labels; and by what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import numpy as np

from onnxq.graph import Constant, Graph, Node, Tensor, Variable, producer, scopes
from onnxq.graph.order import tensors_read
from onnxq.operators import operator_of
from onnxq.samples.inputs import is_floating

_OF_SHAPES = frozenset({"Shape", "Size"})


class Decided:
    """The tensors of a graph that data decides on, such as the boxes that a detector keeps.

    A tensor *varies* when it is computed from floats, and so may be another in a model of other weights. It is
    *decided* when an operator that counts or orders its data made it of what varies, or anything behind one. It is a
    *label* when it tells which of what varies is the largest or least, or is made of that without becoming a float.
    """

    def __init__(self, graph: Graph) -> None:
        """Follow values through a graph whose types are known and whose nodes are in order."""
        self._graph = graph
        self._fixed: set[Tensor] = set()
        self._varying: set[Tensor] = set()
        self._decided: set[Tensor] = set()
        self._labels: set[Tensor] = set()
        for node in graph.nodes:
            self._visit(node)

    @cached_property
    def entering(self) -> Mapping[str, tuple[Variable, ...]]:
        """The float tensors that decided outputs and labels are decided by, by output."""
        decided = self._decided | self._labels
        entering = {output.name: self._entering(output) for output in self._graph.outputs if output in decided}
        return {name: tensors for name, tensors in entering.items() if tensors}

    @cached_property
    def weighted(self) -> tuple[str, ...]:
        """Names of the nodes with weights that compute with what was decided."""
        made = [node for node in self._graph.nodes if any(tensor in self._decided for tensor in node.outputs)]
        inside = [inner for node in made for inner in (node, *_inner_nodes(node))]
        return tuple(node.name or node.op for node in inside if _has_weights(node))

    def _visit(self, node: Node) -> None:
        read = [tensor for tensor in tensors_read(node) if tensor.name]
        outputs = [tensor for tensor in node.outputs if tensor.name]
        if all(isinstance(tensor, Constant) or tensor in self._fixed for tensor in read):
            self._fixed.update(outputs)
            return
        varying = any(tensor in self._varying for tensor in read) and node.op not in _OF_SHAPES
        decided = any(tensor in self._decided for tensor in read)
        if decided or (varying and self._decides(node)):
            self._decided.update(outputs)
            self._varying.update(outputs)
        elif varying:
            self._varying.update(outputs)
        elif any(map(_is_float, read)):
            inside = bool(node.bodies())
            self._varying.update(tensor for tensor in outputs if inside or _is_float(tensor))
        if varying and (_gives_labels(node) or any(tensor in self._labels for tensor in read)):
            # Floats that are looked up by labels can be compared themselves.
            self._labels.update(filter(_is_whole, outputs))

    def _decides(self, node: Node) -> bool:
        """Whether a node, or one in its bodies, counts or orders its data."""
        return any(
            operator.data_dependent and (one.op != "Loop" or self._ends_by_data(one))
            for one in (node, *_inner_nodes(node))
            if (operator := operator_of(one)) is not None
        )

    def _ends_by_data(self, loop: Node) -> bool:
        """Whether what varies says how often the body of a Loop runs."""
        (body,) = loop.bodies()
        carried = dict(zip(body.inputs[1:], zip(loop.inputs[1:], body.outputs, strict=False), strict=False))
        pending: list[Tensor] = [*loop.inputs[:2], *body.outputs[:1]]
        seen: set[Tensor] = set()
        while pending:
            tensor = pending.pop()
            if tensor in seen or isinstance(tensor, Constant) or tensor in self._fixed:
                continue
            seen.add(tensor)
            if tensor in self._varying or self._is_computed(tensor):
                return True
            pending += carried.get(tensor, ())
            maker = producer(tensor)
            if maker is not None and maker.op not in _OF_SHAPES:
                pending += tensors_read(maker)
        return False

    def _is_computed(self, tensor: Tensor) -> bool:
        """Whether a tensor of a body is a float that is computed from floats, anew in each iteration."""
        if tensor in self._around or not _is_float(tensor):
            return False
        maker = producer(tensor)
        return maker is None or any(map(_is_float, tensors_read(maker)))

    @cached_property
    def _around(self) -> frozenset[Tensor]:
        """The tensors of the main graph."""
        return frozenset((*self._graph.inputs, *(tensor for node in self._graph.nodes for tensor in node.outputs)))

    def _entering(self, output: Tensor) -> tuple[Variable, ...]:
        found: dict[Variable, None] = {}
        seen: set[Tensor] = set()
        pending = [output]
        while pending:
            tensor = pending.pop()
            if tensor in seen or tensor not in self._varying:
                continue
            seen.add(tensor)
            floats = None if tensor in self._decided else tensor if _is_float(tensor) else self._decoded(tensor)
            if isinstance(floats, Variable):
                found[floats] = None
            else:
                pending += reversed(_made_from(tensor))
        return tuple(found)

    def _decoded(self, codes: Tensor) -> Tensor | None:
        """Return the floats that codes stand for, where a node makes them."""
        readers = (node for node in codes.outputs if node.op == "DequantizeLinear" and node.inputs[0] is codes)
        # Those of bodies are followed by nobody.
        decoded = (node.outputs[0] for node in readers)
        return next((tensor for tensor in decoded if tensor in self._varying and tensor not in self._decided), None)


def matched(wanted: Sequence[str], found: Sequence[Variable]) -> dict[str, str] | None:
    """Return which tensor of a rewritten or quantized model stands where one of the float model does, both by name.

    Args:
        wanted: names of the float model's tensors.
        found: those of the other model, in the same order as far as rewriting leaves that.

    Returns:
        For each wanted name the one found: of the tensor of that name as it is after any codes of it, else the next
        that nothing is known of. None where too few are found.
    """
    known = {_uncoded(tensor).name: tensor.name for tensor in reversed(found)}
    others = iter([tensor.name for tensor in found if _uncoded(tensor).name not in wanted])
    names = {name: known[name] if name in known else next(others, "") for name in wanted}
    exact = len(found) == len(wanted) or all(name in known for name in wanted)
    return names if exact and all(names.values()) else None


def _uncoded(tensor: Tensor) -> Tensor:
    """Return the tensor that one stands for behind codes and casts."""
    maker = producer(tensor)
    while maker is not None and maker.op in ("QuantizeLinear", "DequantizeLinear", "Cast", "Identity"):
        tensor = maker.inputs[0]
        maker = producer(tensor)
    return tensor


def _made_from(tensor: Tensor) -> list[Tensor]:
    """Return what the node reads whose values make a tensor."""
    maker = producer(tensor)
    return list(tensors_read(maker)) if maker is not None else []


def _inner_nodes(node: Node) -> Iterable[Node]:
    return (inner for body in node.bodies() for scope in scopes(body) for inner in scope.nodes)


def _has_weights(node: Node) -> bool:
    operator = operator_of(node)
    indices = operator.weights if operator is not None else ()
    return any(index < len(node.inputs) and isinstance(node.inputs[index], Constant) for index in indices)


def _gives_labels(node: Node) -> bool:
    operator = operator_of(node)
    return operator is not None and operator.labels


def _is_whole(tensor: Tensor) -> bool:
    """Whether a tensor is known to hold no floats."""
    return isinstance(tensor, Variable) and tensor.dtype is not None and not _is_float(tensor)


def _is_float(tensor: Tensor) -> bool:
    if isinstance(tensor, Variable) and (tensor.type != "tensor_type" or tensor.dtype is None):
        return False
    return is_floating(np.dtype(tensor.dtype))
