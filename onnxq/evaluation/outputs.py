"""Data-dependent outputs: choices, their order, and sizes that depend on the data. Parts of concatenated outputs."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import onnx

from onnxq.data.inputs import is_floating
from onnxq.ir import Constant, Graph, Node, Tensor, Variable, all_graphs, producer
from onnxq.ir.order import tensors_read
from onnxq.ops import operator_of

_OF_SHAPES = frozenset({"Shape", "Size"})
# The tensors that hold a node's choice, if they hold all of it.
_CHOSEN: Mapping[str, Callable[[Node], Sequence[Tensor]]] = MappingProxyType(
    {
        "Compress": lambda node: node.inputs[1:2],
        "NonMaxSuppression": lambda node: node.outputs,
        "NonZero": lambda node: node.outputs,
        "TopK": lambda node: node.outputs[1:],
    }
)


@dataclass(frozen=True, eq=False)
class Choice:
    """A node of the main graph that chooses by floats that the model computes.

    Attributes:
        chosen: the integer or bool tensor that holds the choice.
        scores: the float tensors that the choice depends on.
    """

    node: Node
    chosen: Variable
    scores: tuple[Variable, ...]

    @property
    def given(self) -> str:
        """The name of the input for the choice. Other consumers of a condition keep reading their own."""
        return f"{self.chosen.name}.chosen" if self.node.op == "Compress" else self.chosen.name

    @property
    def named(self) -> NamedChoice:
        """The choice by names, without the graph."""
        return NamedChoice(self.node.op, self.chosen.name, tuple(score.name for score in self.scores))


class NamedChoice(NamedTuple):
    """A choice of the float model.

    Attributes:
        op: operator of the node that chooses.
        name: the tensor that holds the choice.
        scores: names of the float tensors that the choice depends on.
    """

    op: str
    name: str
    scores: tuple[str, ...]


class DataDependentOutputs:
    """The data-dependent tensors of a graph, such as the boxes that a detector keeps.

    - *Varying*: computed from floats, so another model may compute another value.
    - *Free*: varying, and not made of choices alone. Another model can be given the *choices* of the float model. Then
      everything behind a choice can be compared.
    - *Counted*: its number of elements depends on a free tensor, or it is computed from a counted tensor.
    - *Label*: names the largest or least of free values, or is computed from a label without becoming a float.

    Args:
        graph: with known types and nodes in order.
        only: names of choices that other models can be given; None stands for all.
    """

    def __init__(self, graph: Graph, only: Container[str] | None = None) -> None:
        self._graph = graph
        self._only = only
        self._fixed: set[Tensor] = set()
        self._varying: set[Tensor] = set()
        self._free: set[Tensor] = set()
        self._counted: set[Tensor] = set()
        self._labels: set[Tensor] = set()
        self._own: set[Tensor] = set()
        self._found: dict[Tensor, Choice] = {}
        self._behind: dict[Tensor, dict[Choice, None]] = {}
        for node in graph.nodes:
            self._visit(node)

    @property
    def choices(self) -> tuple[Choice, ...]:
        """All choices, in the order of the graph."""
        return tuple(self._found.values())

    @cached_property
    def chosen(self) -> Mapping[str, tuple[Choice, ...]]:
        """The choices before each output that has any."""
        outputs = (output for output in self._graph.outputs if output in self._varying)
        chosen = {output.name: tuple(self._behind.get(output, ())) for output in outputs}
        return {name: choices for name, choices in chosen.items() if choices}

    @cached_property
    def made_of_choices(self) -> tuple[str, ...]:
        """The outputs that are made of choices alone."""
        outputs = (output for output in self._graph.outputs if output in self._varying)
        return tuple(output.name for output in outputs if output not in self._free)

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """The outputs that scores decide without further arithmetic: labels, and outputs of choices alone."""
        of_choices = set(self.made_of_choices)
        outputs = (output for output in self._graph.outputs if output not in self._counted)
        return tuple(output.name for output in outputs if output in self._labels or output.name in of_choices)

    @cached_property
    def free_choices(self) -> tuple[str, ...]:
        """The outputs behind choices that each model makes for itself, such as those in bodies."""
        return tuple(output.name for output in self._graph.outputs if output in self._own)

    @cached_property
    def entering(self) -> Mapping[str, tuple[Variable, ...]]:
        """By output, the float tensors that decide labels and counted outputs of unknown shape."""
        counted = {output for output in self._graph.outputs if output in self._counted and not self._is_sized(output)}
        outputs = [output for output in self._graph.outputs if output in counted | self._labels]
        entering = {output.name: self._entering([output]) for output in outputs}
        return {name: tensors for name, tensors in entering.items() if tensors}

    @cached_property
    def weighted(self) -> tuple[str, ...]:
        """Names of the nodes with weights that compute counted tensors."""
        counting = [node for node in self._graph.nodes if any(tensor in self._counted for tensor in node.outputs)]
        inside = [inner for node in counting for inner in (node, *_inner_nodes(node))]
        return tuple(node.name or node.op for node in inside if _has_weights(node))

    def _visit(self, node: Node) -> None:
        read = [tensor for tensor in tensors_read(node) if tensor.name]
        outputs = [tensor for tensor in node.outputs if tensor.name]
        if all(isinstance(tensor, Constant) or tensor in self._fixed for tensor in read):
            self._fixed.update(outputs)
            return
        behind = {choice: None for tensor in read for choice in self._behind.get(tensor, ())}
        counted = any(tensor in self._counted for tensor in read)
        choice = None if counted else self._choice(node)
        if choice is not None:
            behind[choice] = None
            self._found[choice.chosen] = choice
            read = [tensor for tensor in read if tensor is not choice.chosen]
        if (choice is None and self._chooses(node)) or any(tensor in self._own for tensor in read):
            self._own.update(outputs)
        if counted or (choice is None and self._counts(node)):
            self._counted.update(outputs)
            self._varying.update(outputs)
            self._free.update(outputs)
        else:
            floats, inside = any(map(_is_float, read)), bool(node.subgraphs())
            floating = {tensor for tensor in outputs if floats and (inside or _is_float(tensor))}
            of_values = node.op not in _OF_SHAPES
            varying = choice is not None or (of_values and any(tensor in self._varying for tensor in read))
            # Shapes behind a choice vary too if the choice sets the number of elements.
            varying |= not of_values and any(counts_elements(before.node) for before in behind)
            self._varying.update(outputs if varying else floating)
            self._free.update(outputs if of_values and any(tensor in self._free for tensor in read) else floating)
        if choice is not None and choice.chosen in outputs:
            self._free.discard(choice.chosen)
        gives_labels = _gives_labels(node) and any(tensor in self._free for tensor in read)
        if gives_labels or any(tensor in self._labels for tensor in read):
            # Floats that are looked up by labels can be compared themselves, so they are no labels.
            self._labels.update(filter(_is_whole, outputs))
        if behind:
            self._behind.update(dict.fromkeys(outputs, behind))

    def _choice(self, node: Node) -> Choice | None:
        chosen = next(iter(_CHOSEN[node.op](node)), None) if _is_choosing(node) else None
        if not isinstance(chosen, Variable) or not chosen.name:
            return None
        if chosen in self._found:
            return self._found[chosen]
        if self._only is not None and chosen.name not in self._only:
            return None
        scores = self._entering([tensor for tensor in _chooses_by(node) if tensor in self._free])
        return Choice(node, chosen, scores) if scores else None

    def _chooses(self, node: Node) -> bool:
        """Whether free values decide a choice of a node, or of a node in its subgraphs."""
        if any(map(_is_choosing, _inner_nodes(node))):
            return any(tensor in self._free for tensor in tensors_read(node))
        return _is_choosing(node) and any(tensor in self._free for tensor in _chooses_by(node))

    def _counts(self, node: Node) -> bool:
        """Whether free values set the number of elements of a node's outputs, or of a node in its subgraphs."""
        inner = list(_inner_nodes(node))
        if any(tensor in self._free for tensor in _chooses_by(node)) and counts_elements(node):
            return True
        if not any(tensor in self._free for tensor in tensors_read(node)):
            return False
        return any(map(counts_elements, inner)) or any(
            self._ends_by_data(loop) for loop in (node, *inner) if loop.op == "Loop"
        )

    def _is_sized(self, tensor: Tensor) -> bool:
        """Whether the shape of a tensor follows from the shapes of the inputs."""
        sizes = {size for entry in self._graph.inputs for size in entry.shape or () if isinstance(size, str) and size}
        return tensor.shape is not None and all(isinstance(size, int) or size in sizes for size in tensor.shape)

    def _ends_by_data(self, loop: Node) -> bool:
        """Whether varying values set the number of iterations of a Loop."""
        (body,) = loop.subgraphs()
        carried = dict(zip(body.inputs[1:], zip(loop.inputs[1:], body.outputs, strict=False), strict=False))
        pending: list[Tensor] = [*loop.inputs[:2], *body.outputs[:1]]
        seen: set[Tensor] = set()
        while pending:
            tensor = pending.pop()
            if tensor in seen or isinstance(tensor, Constant) or tensor in self._fixed:
                continue
            seen.add(tensor)
            if tensor in self._free or self._is_computed(tensor):
                return True
            if tensor in self._varying:
                continue
            pending += carried.get(tensor, ())
            maker = producer(tensor)
            if maker is not None and maker.op not in _OF_SHAPES:
                pending += tensors_read(maker)
        return False

    def _is_computed(self, tensor: Tensor) -> bool:
        """Whether a tensor of a subgraph is a float that each iteration computes anew from floats."""
        if tensor in self._around or not _is_float(tensor):
            return False
        maker = producer(tensor)
        return maker is None or any(map(_is_float, tensors_read(maker)))

    @cached_property
    def _around(self) -> frozenset[Tensor]:
        """The tensors of the main graph."""
        return frozenset((*self._graph.inputs, *(tensor for node in self._graph.nodes for tensor in node.outputs)))

    def _entering(self, outputs: Sequence[Tensor]) -> tuple[Variable, ...]:
        """Return the nearest float tensors before `outputs` that are not counted."""
        entering: dict[Variable, None] = {}
        seen: set[Tensor] = set()
        pending = [*reversed(outputs)]
        while pending:
            tensor = pending.pop()
            if tensor in seen or tensor not in self._varying:
                continue
            seen.add(tensor)
            if tensor in self._found:
                entering.update(dict.fromkeys(self._found[tensor].scores))
                continue
            floats = None if tensor in self._counted else tensor if _is_float(tensor) else self._decoded(tensor)
            if isinstance(floats, Variable):
                entering[floats] = None
            else:
                maker = producer(tensor)
                pending += reversed(list(tensors_read(maker)) if maker is not None else [])
        return tuple(entering)

    def _decoded(self, quantized: Tensor) -> Tensor | None:
        """Return the dequantized tensor of quantized values, if the main graph has one."""
        readers = (node for node in quantized.outputs if node.op == "DequantizeLinear" and node.inputs[0] is quantized)
        # Consumers in subgraphs are not followed.
        decoded = (node.outputs[0] for node in readers)
        return next((tensor for tensor in decoded if tensor in self._varying and tensor not in self._counted), None)


def paired(wanted: Sequence[NamedChoice], candidates: Sequence[Choice]) -> dict[NamedChoice, Choice]:
    """Return which choice of a rewritten or quantized model corresponds to which choice of the float model.

    A choice corresponds if its tensor has the same name. Otherwise, the next unmatched choice of the same operator
    does, if both models have equally many. Choices whose scores do not match are left out.

    Args:
        wanted: of the float model.
        candidates: of the other model, in the same order as far as rewriting keeps it.
    """
    by_name = {choice.chosen.name: choice for choice in candidates}
    names = {choice.name for choice in wanted}
    pairs = {choice: by_name[choice.name] for choice in wanted if choice.name in by_name}
    for op in {choice.op for choice in wanted}:
        here = [choice for choice in wanted if choice.op == op and choice not in pairs]
        there = [choice for choice in candidates if choice.node.op == op and choice.chosen.name not in names]
        if len(here) == len(there):
            pairs.update(zip(here, there, strict=True))
    return {choice: twin for choice, twin in pairs.items() if matched(choice.scores, twin.scores) is not None}


def matched(wanted: Sequence[str], candidates: Sequence[Variable]) -> dict[str, str] | None:
    """Return which tensor of a rewritten or quantized model corresponds to which tensor of the float model, by name.

    A tensor corresponds if it has the same name before any Q/DQ. Otherwise, the next unmatched one does.

    Args:
        wanted: names of the float model's tensors.
        candidates: of the other model, in the same order as far as rewriting keeps it.

    Returns:
        None if there are too few.
    """
    by_name = {_uncoded(tensor).name: tensor.name for tensor in reversed(candidates)}
    others = iter([tensor.name for tensor in candidates if _uncoded(tensor).name not in wanted])
    names = {name: by_name[name] if name in by_name else next(others, "") for name in wanted}
    exact = len(candidates) == len(wanted) or all(name in by_name for name in wanted)
    return names if exact and all(names.values()) else None


def _uncoded(tensor: Tensor) -> Tensor:
    """Return the tensor before Q/DQ, casts and identities."""
    maker = producer(tensor)
    while maker is not None and maker.op in ("QuantizeLinear", "DequantizeLinear", "Cast", "Identity"):
        tensor = maker.inputs[0]
        maker = producer(tensor)
    return tensor


def _inner_nodes(node: Node) -> Iterable[Node]:
    return (inner for body in node.subgraphs() for scope in all_graphs(body) for inner in scope.nodes)


def _has_weights(node: Node) -> bool:
    operator = operator_of(node)
    indices = operator.weights if operator is not None else ()
    return any(index < len(node.inputs) and isinstance(node.inputs[index], Constant) for index in indices)


def _is_choosing(node: Node) -> bool:
    return operator_of(node) is not None and node.op in _CHOSEN


def _chooses_by(node: Node) -> Sequence[Tensor]:
    return node.inputs[1:2] if node.op == "Compress" else node.inputs


def _gives_labels(node: Node) -> bool:
    operator = operator_of(node)
    return operator is not None and operator.labels


def _is_whole(tensor: Tensor) -> bool:
    """Whether a tensor is known to hold no floats."""
    return isinstance(tensor, Variable) and tensor.dtype is not None and not _is_float(tensor)


def counts_elements(node: Node) -> bool:
    """Whether the number of a node's output elements depends on the data; `_ends_by_data` decides for a Loop."""
    operator = operator_of(node)
    return operator is not None and operator.data_dependent and node.op not in ("Loop", "TopK")


def _is_float(tensor: Tensor) -> bool:
    if isinstance(tensor, Variable) and (tensor.type != "tensor_type" or tensor.dtype is None):
        return False
    return is_floating(np.dtype(tensor.dtype))


# Parts of concatenated outputs, such as the boxes and the scores of a detector. The SQNR of all may hide one part.

# Operators that keep the entries along an axis together.
_MOVING = frozenset({"Identity", "Reshape", "Transpose"})


@dataclass(frozen=True)
class OutputPart:
    """A part of a concatenated output.

    Attributes:
        axis: of the concatenation.
        start: its first index along the axis.
        stop: the index after its last.
        made_by: the node that outputs it, or the tensor if there is none.
        sqnr: of a candidate, in decibels; None before the comparison.
    """

    axis: int
    start: int
    stop: int
    made_by: str
    sqnr: float | None = None


def joins(model: onnx.GraphProto) -> bool:
    """Whether a Concat may make an output, as far as names show."""
    makers = {name: node for node in model.node for name in node.output}
    pending = [makers[output.name] for output in model.output if output.name in makers]
    while pending:
        node = pending.pop()
        if node.op_type == "Concat":
            return True
        if node.op_type in _MOVING and node.input[0] in makers:
            pending.append(makers[node.input[0]])
    return False


def parts_of(graph: Graph) -> Mapping[str, tuple[OutputPart, ...]]:
    """Return the parts of each concatenated float output.

    Args:
        graph: of the float model, with known shapes.
    """
    parts_by_name = {output.name: _parts(output) for output in graph.outputs}
    return {name: parts for name, parts in parts_by_name.items() if len(parts) > 1}


def _parts(tensor: Tensor) -> tuple[OutputPart, ...]:
    node = producer(tensor)
    if node is None or node.domain or tensor.shape is None:
        return ()
    if node.op == "Concat":
        return _joined(node, node.attrs["axis"] % len(tensor.shape))
    if node.op not in _MOVING:
        return ()
    source = node.inputs[0]
    moved = {axis: place for place, axis in enumerate(_axes(node, source, tensor)) if axis is not None}
    return tuple(replace(part, axis=moved[part.axis]) for part in _parts(source) if part.axis in moved)


def _joined(node: Node, axis: int) -> tuple[OutputPart, ...]:
    """Return the parts of a Concat: the parts that all its inputs have alike, else its inputs."""
    inner = [_parts(tensor) for tensor in node.inputs]
    places = [[(part.axis, part.start, part.stop) for part in parts] for parts in inner]
    if inner[0] and inner[0][0].axis != axis and all(own == places[0] for own in places):
        return inner[0]
    shapes = [tensor.shape for tensor in node.inputs]
    sizes = [shape[axis] for shape in shapes if shape is not None and isinstance(shape[axis], int)]
    if len(sizes) < len(shapes):
        return ()
    ends = zip(sizes, accumulate(sizes), node.inputs, strict=True)
    return tuple(OutputPart(axis, stop - size, stop, _maker(tensor)) for size, stop, tensor in ends)


def _axes(node: Node, source: Tensor, output: Tensor) -> Sequence[int | None]:
    """Return the input axis of each output axis of a node; None for a new axis."""
    rank = len(source.shape or ())
    if node.op == "Transpose":
        return [int(axis) for axis in node.attrs.get("perm", reversed(range(rank)))]
    if node.op == "Identity":
        return range(rank)
    # A Reshape keeps its unchanged leading axes.
    kept: list[int | None] = []
    for axis, (before, after) in enumerate(zip(source.shape or (), output.shape or (), strict=False)):
        if before is None or before != after:
            break
        kept.append(axis)
    return [*kept, *[None] * (len(output.shape or ()) - len(kept))]


def _maker(tensor: Tensor) -> str:
    node = producer(tensor)
    return f"{node.op} {node.name}" if node is not None and node.name else tensor.name
