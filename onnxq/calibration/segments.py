"""Models cut between tensors into a chain of segments, so that few tensors are in memory at a time."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped,unused-ignore]

from onnxq.calibration.instrument import added_outputs, append_outputs, expose_body_tensors, tensor_types
from onnxq.errors import ModelError
from onnxq.ir.stored_tensors import is_large
from onnxq.runtime.sessions import Array, Memory, Session, open_session, run, serialized

SEGMENT_TENSORS = 8
"""A segment ends after this many observed tensors, as soon as only tensors that can cross are needed later."""
SEGMENT_BYTES = 1 << 26
"""A segment ends likewise after observed tensors of this many bytes, by their declared shapes."""

# Bytes of an element of nearly all observed tensors.
_WIDTH = 4


@dataclass(frozen=True)
class Segment:
    """A part of a model that runs by itself.

    Attributes:
        model: The serialized model; external data stays in its files.
        inputs: Inputs of the whole model and outputs of earlier segments.
        outputs: Observed tensors and tensors that later segments need.
        kept: Tensors that later segments need, from any source.
    """

    model: bytes
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    kept: frozenset[str]


@dataclass(frozen=True)
class Stage:
    """A segment with an open session; its attributes are those of the segment."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    kept: frozenset[str]
    session: Session

    @classmethod
    def of(
        cls, segment: Segment, folder: Path | None, *, mapped: bool, memory: Memory, threads: int | None = None
    ) -> Stage:
        """Open the session of a segment.

        Args:
            segment: The segment.
            folder: Folder of its external data.
            mapped: Whether external weights stay in their files, see `open_session`.
            memory: How the session allocates tensors.
            threads: Threads inside an operator; None leaves the choice to onnxruntime.

        Raises:
            ModelError: onnxruntime refuses the segment.
        """
        session = open_session(segment.model, threads=threads, memory=memory, external_folder=folder, mapped=mapped)
        return cls(segment.inputs, segment.outputs, segment.kept, session)

    def run(self, values: Mapping[str, Array], index: int | None = None) -> dict[str, Array]:
        """Run one sample, whose index is in error messages, and return the outputs by name.

        Raises:
            DataError: The run fails, for example because an input is missing.
        """
        feeds = {name: values[name] for name in self.inputs if name in values}
        return dict(zip(self.outputs, run(self.session, feeds, self.outputs, index=index), strict=True))


def stages(
    model: onnx.ModelProto | Path, cuts: Collection[str], *, observed: Collection[str] = ()
) -> tuple[Stage, ...]:
    """Return a model as stages in the order in which they run, each up to the next cut.

    The last stage, fed with the outputs of earlier ones, gives the outputs of the model. Bodies of control flow stay
    whole. onnxruntime's graph optimizations do not fuse across a cut.

    Args:
        model: The model; a path if its weights are in external files.
        cuts: Tensors whose nodes end a stage. If tensors of unknown type would cross there, the stage ends later.
            Tensors that no node of the main graph computes are ignored.
        observed: Additional outputs; body tensors as in `expose_body_tensors`.

    Raises:
        ModelError: The model cannot be read or loaded, or a name is not a tensor of it.
    """
    proto = read_without_data(model) if isinstance(model, Path) else model
    folder, mapped = model.parent if isinstance(model, Path) else None, is_large(proto)
    outputs = {*cuts, *observed, *(value.name for value in proto.graph.output)}
    parts = segments(proto, outputs, cuts=frozenset(cuts))
    return tuple(Stage.of(part, folder, mapped=mapped, memory=Memory.UNPLANNED) for part in parts)


def segments(
    model: onnx.ModelProto,
    observed: Iterable[str],
    others: Iterable[str] = (),
    *,
    cuts: Collection[str] | None = None,
) -> tuple[Segment, ...]:
    """Cut a model between observed tensors; the cuts depend on the model and these tensors alone, not on samples.

    Nodes between observed tensors stay together, so that onnxruntime fuses them as in the whole model. At a cut it may
    choose another kernel, which rounds differently. Statistics are bit-identical because the cuts are.

    Args:
        model: The model; its external data is not read.
        observed: Node outputs or initializers of the main graph, or body tensors, see `expose_body_tensors`. Inputs of
            the model are left out.
        others: Tensors that are computed as if they were observed.
        cuts: Tensors whose nodes end a segment; None cuts after every few observed tensors. Other tensors of known type
            that are needed later cross too.

    Raises:
        ModelError: A name is not a tensor of the model, a body tensor cannot be exposed, an element type cannot be
            inferred, or the model is too large for memory.
    """
    stored = {tensor.name for tensor in model.graph.initializer}
    fed = {value.name for value in model.graph.input} - stored
    fetched = frozenset(observed) - fed
    exposed = fetched | (set(others) - fed)
    model = expose_body_tensors(model, exposed)
    graph = model.graph
    own = {value.name: value for value in graph.output}
    types = own | {value.name: value for value in added_outputs(model, sorted(exposed))}
    if cuts is not None:
        types = tensor_types(model) | types
    needs = [_needs(node) for node in graph.node]
    last = {name: index for index, names in enumerate(needs) for name in names}
    ends, each = (exposed, SEGMENT_TENSORS) if cuts is None else (cuts, 1)
    sizes = {name: _declared_bytes(types[name]) if name in types else 0 for name in ends}
    parts, cut = _Parts(model), []
    live = [value.name for value in graph.input]
    # Observed initializers are outputs of the first segment.
    computed = sorted(fetched - {name for node in graph.node for name in node.output})
    for start, end in _bounds(graph, needs, last, sizes, types.keys(), each):
        nodes = graph.node[start:end]
        computed += [name for node in nodes for name in node.output if name in types]
        outputs = [name for name in computed if name in fetched or last.get(name, -1) >= end]
        needed = dict.fromkeys(chain.from_iterable(needs[start:end]))
        inputs = [name for name in live if name in needed]
        part = parts.of(
            nodes,
            [parts.inputs.get(name) or _bare(types[name]) for name in inputs],
            [own[name] for name in computed if name in own],
            [*needed, *outputs],
        )
        added = [types[name] for name in computed if name not in own and (name in exposed or last.get(name, -1) >= end)]
        live = [name for name in dict.fromkeys([*live, *outputs]) if last.get(name, -1) >= end]
        # In old models every initializer is an input as well, which no sample feeds.
        fed_inputs = tuple(name for name in inputs if name not in stored)
        data = append_outputs(serialized(part), added)
        cut.append(Segment(data, fed_inputs, tuple(outputs), frozenset(live) - stored))
        computed = []
    return tuple(cut)


class _Parts:
    """Extracts models of some nodes of a model."""

    def __init__(self, model: onnx.ModelProto) -> None:
        graph = model.graph
        self.inputs = {value.name: value for value in graph.input}
        self._model = model
        self._stored = {tensor.name: tensor for tensor in graph.initializer}
        self._sparse = {tensor.values.name: tensor for tensor in graph.sparse_initializer}
        self._declared = {value.name: value for value in graph.value_info}

    def of(
        self,
        nodes: Iterable[onnx.NodeProto],
        inputs: Iterable[onnx.ValueInfoProto],
        outputs: Iterable[onnx.ValueInfoProto],
        needed: Iterable[str],
    ) -> onnx.ModelProto:
        """Return a model of nodes, with those of the needed tensors that are stored."""
        whole, names = self._model, dict.fromkeys(needed)
        part = onnx.ModelProto(ir_version=whole.ir_version, opset_import=whole.opset_import, functions=whole.functions)
        graph = part.graph
        graph.name = whole.graph.name
        graph.node.extend(nodes)
        graph.input.extend(inputs)
        graph.output.extend(outputs)
        graph.initializer.extend(self._stored[name] for name in names if name in self._stored)
        graph.sparse_initializer.extend(self._sparse[name] for name in names if name in self._sparse)
        taken = {value.name for value in graph.output}
        outputs = (name for node in graph.node for name in node.output if name not in taken)
        graph.value_info.extend(self._declared[name] for name in outputs if name in self._declared)
        return part


def _bounds(
    graph: onnx.GraphProto,
    needs: Sequence[Collection[str]],
    last: Mapping[str, int],
    observed: Mapping[str, int],
    crossing: Collection[str],
    each: int,
) -> Iterator[tuple[int, int]]:
    """Yield start and end node of each segment, end excluded; a single segment if nodes are out of order."""
    place = {name: index for index, node in enumerate(graph.node) for name in node.output}
    ordered = all(place.get(name, -1) < index for index, names in enumerate(needs) for name in names)
    start, counted, size, blocking = 0, 0, 0, set[str]()
    for index, node in enumerate(graph.node):
        counted += sum(name in observed for name in node.output)
        size += sum(observed.get(name, 0) for name in node.output)
        blocking |= {name for name in node.output if last.get(name, -1) > index and name not in crossing}
        blocking -= {name for name in needs[index] if last[name] == index}
        enough = counted >= each or size >= SEGMENT_BYTES
        if ordered and enough and not blocking and index + 1 < len(graph.node):
            yield start, index + 1
            start, counted, size = index + 1, 0, 0
    yield start, len(graph.node)


def extract(model: onnx.ModelProto, inputs: Mapping[str, int], outputs: Iterable[str]) -> onnx.ModelProto:
    """Return the nodes of a model that compute some tensors from others.

    Args:
        model: The model, without functions.
        inputs: Tensors that are given, with their element types; those that no node needs are left out.
        outputs: Tensors to compute.
    """
    outputs = list(dict.fromkeys(outputs))
    makers = {name: node for node in model.graph.node for name in node.output if name not in inputs}
    pending, needed = list(outputs), dict[str, None]()
    while pending:
        if (name := pending.pop()) not in needed:
            needed[name] = None
            pending += _needs(makers[name]) if name in makers else ()
    fed = [onnx.helper.make_tensor_value_info(name, kind, None) for name, kind in inputs.items() if name in needed]
    return _Parts(model).of(
        [node for node in model.graph.node if any(name in needed and name in makers for name in node.output)],
        [*(value for value in model.graph.input if value.name in needed and value.name not in inputs), *fed],
        [onnx.ValueInfoProto(name=name) for name in outputs],
        needed,
    )


def _declared_bytes(value: onnx.ValueInfoProto) -> int:
    """Return the bytes of a float32 tensor by its declared shape; an unknown dimension counts as 1."""
    return _WIDTH * math.prod(max(int(dim.dim_value), 1) for dim in value.type.tensor_type.shape.dim)


def _needs(node: onnx.NodeProto) -> tuple[str, ...]:
    """Return the names that a node and its bodies read; names of a body's own tensors are included and harmless."""
    names = dict.fromkeys(node.input)
    for attribute in node.attribute:
        for body in (attribute.g, *attribute.graphs):
            names |= dict.fromkeys(chain.from_iterable(_needs(inner) for inner in body.node))
            names |= dict.fromkeys(value.name for value in body.output)
    names.pop("", None)
    return tuple(names)


def _bare(value: onnx.ValueInfoProto) -> onnx.ValueInfoProto:
    """Return a value with its element type and rank only, since declared inner dimensions may be wrong."""
    bare = onnx.ValueInfoProto()
    bare.CopyFrom(value)
    for dimension in bare.type.tensor_type.shape.dim:
        dimension.Clear()
    return bare


def read_without_data(path: Path) -> onnx.ModelProto:
    """Return the model in a file without its external data.

    Raises:
        ModelError: The file cannot be read, or is not a model.
    """
    try:
        return onnx.load(path, load_external_data=False)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}; expected an .onnx file") from error
    except DecodeError as error:
        raise ModelError(f"{path} is not an ONNX model: {error}; expected an .onnx file") from error
