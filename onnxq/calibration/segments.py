"""Segments: a model with taps as a chain of smaller models, so that few taps are in memory at a time."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import onnx

from onnxq.calibration.body_taps import with_body_taps
from onnxq.calibration.taps import overridable_bytes, tap_outputs, tapped_bytes, tensor_types
from onnxq.runtime.sessions import serialized

TAPS = 8
"""A segment ends where so many tapped tensors have been computed in it and nothing else is needed later."""
TAPS_BYTES = 1 << 26
"""A segment ends where tapped tensors that are declared to take so many bytes have been computed in it likewise."""

# Bytes of an element of nearly all tensors that are tapped.
_WIDTH = 4


@dataclass(frozen=True)
class Segment:
    """A part of a model that runs by itself.

    Attributes:
        model: serialized; external data stays where it is.
        inputs: tensors that it is fed: inputs of the whole model, and outputs of earlier segments.
        outputs: tensors that it gives: those that are observed, and those that later segments are fed.
        kept: tensors that later segments are fed, wherever they come from.
        weights: initializers that it can be fed in place of those it has.
    """

    model: bytes
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    kept: frozenset[str]
    weights: tuple[str, ...] = ()


def segments(
    model: onnx.ModelProto,
    observed: Iterable[str],
    others: Iterable[str] = (),
    *,
    cuts: Collection[str] | None = None,
    free: Collection[str] = (),
) -> tuple[Segment, ...]:
    """Cut a model between tapped tensors; where depends on the model and all its taps alone, and not on samples.

    Nodes between tapped tensors stay together, so that onnxruntime fuses what it would fuse in the whole model; but it
    may choose another kernel at a cut, which rounds otherwise. Statistics are of equal bits because cuts are.

    Args:
        model: The model; its external data is not looked at.
        observed: Tensors that are given: outputs of nodes, or initializers of the main graph. Those of bodies are given
            as `with_body_taps` carries them out.
        others: Tensors that are computed as if they were observed.
        cuts: Tensors behind whose nodes segments end, instead of behind every few taps; whatever is needed later
            crosses as well, if it is a tensor whose type is known.
        free: Initializers of the main graph that each segment can be fed in place of its own.

    Raises:
        ModelError: A name is no tensor of the model or cannot be carried out of a body, its element type cannot be
            inferred, or the model is too large for memory.
    """
    given, sized = frozenset(observed), frozenset(others)
    model = with_body_taps(model, given, sized)
    graph = model.graph
    own = {value.name: value for value in graph.output}
    types = own | {value.name: value for value in tap_outputs(model, sorted(given | sized))}
    if cuts is not None:
        types = tensor_types(model) | types
    needs = [_needs(node) for node in graph.node]
    last = {name: index for index, names in enumerate(needs) for name in names}
    made_by_nodes = {name for node in graph.node for name in node.output}
    taps, each = (given | sized, TAPS) if cuts is None else (cuts, 1)
    sizes = {name: declared_bytes(types[name]) if name in types else 0 for name in taps}
    bounds = list(_bounds(graph, needs, last, sizes, types.keys(), each))
    cut = _Parts(model, types)
    live = [value.name for value in graph.input]
    found = []
    for start, end in bounds:
        made = [name for node in graph.node[start:end] for name in node.output if name in types]
        if start == 0:
            made += sorted(given - made_by_nodes)
        outputs = [name for name in made if name in given or last.get(name, -1) >= end]
        used = dict.fromkeys(chain.from_iterable(needs[start:end]))
        inputs = live if len(bounds) == 1 else [name for name in live if name in used]
        part = model if len(bounds) == 1 else cut.part(start, end, inputs, [*used, *outputs], made)
        more = [types[name] for name in outputs if name not in own]
        counted = [name for name in made if name in sized and name not in outputs and name not in own]
        live = [name for name in dict.fromkeys([*live, *outputs]) if last.get(name, -1) >= end]
        weights = tuple(name for name in used if name in free)
        data = overridable_bytes(tapped_bytes(serialized(part), more, counted), model, weights)
        found.append(Segment(data, tuple(inputs), tuple(outputs), frozenset(live), weights))
    return tuple(found)


class _Parts:
    """Cuts models of a few nodes out of one."""

    def __init__(self, model: onnx.ModelProto, types: Mapping[str, onnx.ValueInfoProto]) -> None:
        graph = model.graph
        self._model = model
        self._types = types
        self._outputs = {value.name: value for value in graph.output}
        self._inputs = {value.name: value for value in graph.input}
        self._initializers = {tensor.name: tensor for tensor in graph.initializer}
        self._sparse = {tensor.values.name: tensor for tensor in graph.sparse_initializer}
        self._inner = {value.name: value for value in graph.value_info}

    def part(
        self, start: int, end: int, inputs: Iterable[str], used: Iterable[str], made: Iterable[str]
    ) -> onnx.ModelProto:
        """Return a model of some nodes with the initializers that they use, and with what is an output of the whole."""
        whole = self._model
        part = onnx.ModelProto(ir_version=whole.ir_version, opset_import=whole.opset_import, functions=whole.functions)
        graph = part.graph
        graph.name = whole.graph.name
        graph.node.extend(whole.graph.node[start:end])
        graph.input.extend(self._inputs.get(name) or _bare(self._types[name]) for name in inputs)
        graph.output.extend(self._outputs[name] for name in made if name in self._outputs)
        names = list(dict.fromkeys(used))
        graph.initializer.extend(self._initializers[name] for name in names if name in self._initializers)
        graph.sparse_initializer.extend(self._sparse[name] for name in names if name in self._sparse)
        inner = (name for node in graph.node for name in node.output if name not in self._outputs)
        graph.value_info.extend(self._inner[name] for name in inner if name in self._inner)
        return part


def _bounds(
    graph: onnx.GraphProto,
    needs: Sequence[Collection[str]],
    last: dict[str, int],
    taps: Mapping[str, int],
    crossing: Collection[str],
    each: int,
) -> Iterator[tuple[int, int]]:
    """Yield first and last node, the latter excluded, of each segment; one segment where nodes are out of order."""
    place = {name: index for index, node in enumerate(graph.node) for name in node.output}
    ordered = all(place.get(name, -1) < index for index, names in enumerate(needs) for name in names)
    start, counted, size, blocking = 0, 0, 0, set[str]()
    for index, node in enumerate(graph.node):
        counted += sum(name in taps for name in node.output)
        size += sum(taps.get(name, 0) for name in node.output)
        blocking |= {name for name in node.output if last.get(name, -1) > index and name not in crossing}
        blocking -= {name for name in needs[index] if last[name] == index}
        enough = counted >= each or size >= TAPS_BYTES
        if ordered and enough and not blocking and index + 1 < len(graph.node):
            yield start, index + 1
            start, counted, size = index + 1, 0, 0
    yield start, len(graph.node)


def declared_bytes(value: onnx.ValueInfoProto) -> int:
    """Return the bytes of a tensor of float32 as a model declares it; a dimension that is not known counts as one."""
    return _WIDTH * math.prod(max(int(dim.dim_value), 1) for dim in value.type.tensor_type.shape.dim)


def _needs(node: onnx.NodeProto) -> tuple[str, ...]:
    """Return the names that a node and its bodies read; those of a body's own tensors do no harm."""
    names = dict.fromkeys(node.input)
    for attribute in node.attribute:
        for body in (*attribute.graphs, *([attribute.g] if attribute.type == onnx.AttributeProto.GRAPH else ())):
            names |= dict.fromkeys(chain.from_iterable(_needs(inner) for inner in body.node))
            names |= dict.fromkeys(value.name for value in body.output)
    names.pop("", None)
    return tuple(names)


def _bare(value: onnx.ValueInfoProto) -> onnx.ValueInfoProto:
    """Return a value with its element type and rank only: what a model says of its inner dimensions may be wrong."""
    bare = onnx.ValueInfoProto()
    bare.CopyFrom(value)
    for dimension in bare.type.tensor_type.shape.dim:
        dimension.Clear()
    return bare
