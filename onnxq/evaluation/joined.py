"""Outputs that are joined of parts, such as the boxes and the scores of a detector, of which one may hide another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import onnx

from onnxq.ir import Graph, Node, Tensor, producer

# What leaves the entries along an axis together.
_MOVING = frozenset({"Identity", "Reshape", "Transpose"})


@dataclass(frozen=True)
class Part:
    """A part of an output.

    Attributes:
        axis: along which it was joined.
        start: its first entry there.
        stop: the one behind its last.
        made_by: the node that makes it, or the tensor where none does.
        sqnr: of a candidate beside the float model, in decibels, when they have been compared.
    """

    axis: int
    start: int
    stop: int
    made_by: str
    sqnr: float | None = None


def joins(model: onnx.GraphProto) -> bool:
    """Whether a Concat may make an output, told from names alone."""
    made = {name: node for node in model.node for name in node.output}
    pending = [made[output.name] for output in model.output if output.name in made]
    while pending:
        node = pending.pop()
        if node.op_type == "Concat":
            return True
        if node.op_type in _MOVING and node.input[0] in made:
            pending.append(made[node.input[0]])
    return False


def parts_of(graph: Graph) -> Mapping[str, tuple[Part, ...]]:
    """Return the parts that outputs of floats are joined of, by output; none of outputs that are made in one piece.

    Args:
        graph: of the float model, whose shapes are known.
    """
    found = {output.name: _parts(output) for output in graph.outputs}
    return {name: parts for name, parts in found.items() if len(parts) > 1}


def _parts(tensor: Tensor) -> tuple[Part, ...]:
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


def _joined(node: Node, axis: int) -> tuple[Part, ...]:
    """Return the parts of what a Concat makes: those that all it joins have alike, else what it joins."""
    inner = [_parts(tensor) for tensor in node.inputs]
    places = [[(part.axis, part.start, part.stop) for part in parts] for parts in inner]
    if inner[0] and inner[0][0].axis != axis and all(one == places[0] for one in places):
        return inner[0]
    shapes = [tensor.shape for tensor in node.inputs]
    sizes = [shape[axis] for shape in shapes if shape is not None and isinstance(shape[axis], int)]
    if len(sizes) < len(shapes):
        return ()
    ends = zip(sizes, accumulate(sizes), node.inputs, strict=True)
    return tuple(Part(axis, stop - size, stop, _maker(tensor)) for size, stop, tensor in ends)


def _axes(node: Node, source: Tensor, made: Tensor) -> Sequence[int | None]:
    """Return for each axis that a node makes which one of its input it is; None where it is a new one."""
    rank = len(source.shape or ())
    if node.op == "Transpose":
        return [int(axis) for axis in node.attrs.get("perm", reversed(range(rank)))]
    if node.op == "Identity":
        return range(rank)
    # Of a Reshape those in front that stay.
    kept: list[int | None] = []
    for axis, (before, after) in enumerate(zip(source.shape or (), made.shape or (), strict=False)):
        if before is None or before != after:
            break
        kept.append(axis)
    return [*kept, *[None] * (len(made.shape or ()) - len(kept))]


def _maker(tensor: Tensor) -> str:
    node = producer(tensor)
    return f"{node.op} {node.name}" if node is not None and node.name else tensor.name
