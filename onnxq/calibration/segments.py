"""Models cut between tensors into a chain of segments, so that few tensors are in memory at a time."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Self

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped,unused-ignore]

from onnxq.calibration.instrument import added_outputs, append_outputs, expose_body_tensors, tensor_types
from onnxq.errors import DataError, ModelError
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
        observed: Node outputs or initializers of the main graph, or body tensors, see `expose_body_tensors`.
        others: Tensors that are computed as if they were observed.
        cuts: Tensors whose nodes end a segment; None cuts after every few observed tensors. Other tensors of known type
            that are needed later cross too.

    Raises:
        ModelError: A name is not a tensor of the model, a body tensor cannot be exposed, an element type cannot be
            inferred, or the model is too large for memory.
    """
    given, sized = frozenset(observed), frozenset(others)
    model = expose_body_tensors(model, given, sized)
    graph = model.graph
    own = {value.name: value for value in graph.output}
    types = own | {value.name: value for value in added_outputs(model, sorted(given | sized))}
    if cuts is not None:
        types = tensor_types(model) | types
    needs = [_needs(node) for node in graph.node]
    last = {name: index for index, names in enumerate(needs) for name in names}
    made_by_nodes = {name for node in graph.node for name in node.output}
    ends, each = (given | sized, SEGMENT_TENSORS) if cuts is None else (cuts, 1)
    sizes = {name: declared_bytes(types[name]) if name in types else 0 for name in ends}
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
        data = append_outputs(serialized(part), more, counted)
        found.append(Segment(data, tuple(inputs), tuple(outputs), frozenset(live)))
    return tuple(found)


class _Parts:
    """Extracts models of a few nodes."""

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
        model: without functions.
        inputs: tensors that are given, with their element types; those that no node needs are left out.
        outputs: tensors to compute.
    """
    graph, pending, needed = model.graph, list(outputs), set[str]()
    makers = {name: node for node in graph.node for name in node.output}
    while pending:
        if (name := pending.pop()) not in needed:
            needed.add(name)
            pending += _needs(makers[name]) if name in makers and name not in inputs else ()
    part = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    part.graph.name = graph.name
    part.graph.node.extend(
        node for node in graph.node if any(name in needed and name not in inputs for name in node.output)
    )
    part.graph.initializer.extend(tensor for tensor in graph.initializer if tensor.name in needed)
    part.graph.sparse_initializer.extend(tensor for tensor in graph.sparse_initializer if tensor.values.name in needed)
    part.graph.input.extend(value for value in graph.input if value.name in needed and value.name not in inputs)
    part.graph.input.extend(
        onnx.helper.make_tensor_value_info(name, kind, None) for name, kind in inputs.items() if name in needed
    )
    part.graph.output.extend(onnx.ValueInfoProto(name=name) for name in dict.fromkeys(outputs))
    return part


def declared_bytes(value: onnx.ValueInfoProto) -> int:
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


# Stages: parts of a model that run one after the other.


class Stage:
    """A part of a model between cuts.

    The first run opens the session, which takes memory until `close` or the end of a ``with`` block. A closed stage can
    be run again.

    Attributes:
        inputs: Inputs of the whole model and outputs of earlier stages.
        outputs: Requested tensors and tensors that later stages need.
        kept: Tensors that later stages need, from any source.
    """

    def __init__(
        self,
        segment: Segment,
        folder: Path | None = None,
        *,
        optimize: bool = True,
        mapped: bool = False,
        threads: int | None = None,
    ) -> None:
        """Take a segment.

        Args:
            segment: The part.
            folder: Folder of its external data.
            optimize: Whether onnxruntime's graph optimizations are on.
            mapped: Whether external weights stay in their files.
            threads: Threads inside an operator; None leaves the choice to onnxruntime.
        """
        self.inputs, self.outputs = segment.inputs, segment.outputs
        self.kept = segment.kept
        self._model = segment.model
        self._folder = folder
        self._optimize = optimize
        self._mapped = mapped
        self._threads = threads
        self._session: Session | None = None

    def run(self, values: Mapping[str, Array], outputs: Sequence[str] | None = None) -> dict[str, Array]:
        """Run one sample.

        Args:
            values: Arrays by tensor, at least `inputs`; others are ignored.
            outputs: Some of `outputs`; None gives all.

        Returns:
            Arrays by output.

        Raises:
            DataError: An input is missing, or the run fails.
            ModelError: onnxruntime rejects the part.
        """
        for name in self.inputs:
            if name not in values:
                raise DataError(
                    f"Tensor {name!r} is not among the values, expected it as an input of the stage; feed it"
                )
        if self._session is None:
            self._session = open_session(
                self._model,
                threads=self._threads,
                optimize=self._optimize,
                memory=Memory.UNPLANNED,
                external_folder=self._folder,
                mapped=self._mapped,
            )
        wanted = self.outputs if outputs is None else tuple(outputs)
        fed = {name: values[name] for name in self.inputs}
        return dict(zip(wanted, run(self._session, fed, wanted), strict=True))

    def close(self) -> None:
        """Free the memory of the session."""
        self._session = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def stages(
    model: onnx.ModelProto | Path,
    cuts: Collection[str],
    *,
    observed: Collection[str] = (),
    optimize: bool = True,
    threads: int | None = None,
) -> tuple[Stage, ...]:
    """Return a model as stages in the order in which they run, each up to the next cut.

    The last stage, fed with the outputs of earlier ones, gives the outputs of the model. Bodies of control flow stay
    whole.

    Args:
        model: The model; a path if its weights are in external files.
        cuts: Tensors whose nodes end a stage. If tensors of unknown type would cross there, the stage ends later.
            Tensors that no node of the main graph computes are ignored.
        observed: Additional outputs; body tensors as in `expose_body_tensors`.
        optimize: Whether onnxruntime's graph optimizations are on; they do not fuse across a cut.
        threads: Threads inside an operator; None leaves the choice to onnxruntime.

    Raises:
        ModelError: The model cannot be read, or a name is not a tensor of it.
    """
    proto = read_without_data(model) if isinstance(model, Path) else model
    stored = {tensor.name for tensor in proto.graph.initializer}
    fed = {value.name for value in proto.graph.input} - stored
    given = {*cuts, *observed, *(value.name for value in proto.graph.output)} - fed
    folder, mapped = model.parent if isinstance(model, Path) else None, is_large(proto)
    found = []
    for part in segments(proto, given, cuts=frozenset(cuts)):
        # In old models every initializer is an input as well.
        inputs = tuple(name for name in part.inputs if name not in stored)
        part = replace(part, inputs=inputs, kept=part.kept - stored)
        found.append(Stage(part, folder, optimize=optimize, mapped=mapped, threads=threads))
    return tuple(found)


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
