"""Models cut between tensors into a chain of smaller ones, so that few tensors are in memory at a time."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Self

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped,unused-ignore]

from onnxq.calibration.instrument import (
    added_outputs,
    append_outputs,
    expose_body_tensors,
    overridable_bytes,
    tensor_types,
)
from onnxq.errors import DataError, ModelError, did_you_mean
from onnxq.ir.protos import is_large
from onnxq.runtime.sessions import Array, Memory, Session, open_session, run, serialized

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
            as `expose_body_tensors` carries them out.
        others: Tensors that are computed as if they were observed.
        cuts: Tensors behind whose nodes segments end, instead of behind every few taps; whatever is needed later
            crosses as well, if it is a tensor whose type is known.
        free: Initializers of the main graph that each segment can be fed in place of its own.

    Raises:
        ModelError: A name is no tensor of the model or cannot be carried out of a body, its element type cannot be
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
        data = overridable_bytes(append_outputs(serialized(part), more, counted), model, weights)
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


# Stages: parts of a model as callables, whose weights can be others in each call.

_OWN: Mapping[str, Array] = MappingProxyType({})


class Stage:
    """A part of a model between cuts, run by itself.

    Its session is opened by the first run and takes memory until the stage is closed, which ``with`` does too; a closed
    stage can be run again.

    Attributes:
        inputs: tensors that it is fed: inputs of the whole model, and outputs of earlier stages.
        outputs: tensors that it gives: those asked for, and those that later stages are fed.
        kept: tensors that later stages are fed, wherever they come from.
        weights: initializers that it can be fed in place of its own.
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
        """Take a segment; see `stages` for the arguments.

        Args:
            segment: the part, with the tensors that it is fed and gives.
            folder: where its external data lies.
            optimize: whether onnxruntime's graph optimisations are on.
            mapped: whether external weights stay in their files.
            threads: threads inside an operator; None leaves the choice to onnxruntime.
        """
        self.inputs, self.outputs = segment.inputs, segment.outputs
        self.kept, self.weights = segment.kept, segment.weights
        self._model = segment.model
        self._folder = folder
        self._optimize = optimize
        self._mapped = mapped
        self._threads = threads
        self._session: Session | None = None

    def run(
        self,
        values: Mapping[str, Array],
        weights: Mapping[str, Array] = _OWN,
        outputs: Sequence[str] | None = None,
    ) -> dict[str, Array]:
        """Run one sample.

        Args:
            values: arrays by tensor, `inputs` at least; what else is there is not looked at, so that everything that is
                known of a sample can be given.
            weights: arrays for some of `weights`, in the shape and type of those they stand for.
            outputs: those of `outputs` that are wanted; None wants all.

        Returns:
            Arrays by output.

        Raises:
            DataError: an input is missing, a weight is not free here, or the run fails.
            ModelError: onnxruntime refuses the part.
        """
        for name in self.inputs:
            if name not in values:
                raise DataError(
                    f"Tensor {name!r} is not among the values, expected it as an input of the stage; feed it"
                )
        for name in weights:
            if name not in self.weights:
                raise DataError(
                    f"Weight {name!r} is not free in the stage, expected one of "
                    f"{', '.join(self.weights) or 'none'}{did_you_mean(name, self.weights)}"
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
        fed = {name: values[name] for name in self.inputs} | dict(weights)
        return dict(zip(wanted, run(self._session, fed, wanted), strict=True))

    def close(self) -> None:
        """Give back the memory of the session."""
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
    free: Collection[str] = (),
    optimize: bool = True,
    threads: int | None = None,
) -> tuple[Stage, ...]:
    """Return a model as stages in the order in which they run, each up to the next cut.

    Fed with what the stages before it gave, the last one gives what the model gives. Bodies of control flow stay whole.

    Args:
        model: the model; a path for models whose weights are in external files.
        cuts: tensors behind whose nodes a stage ends, or as soon behind as nothing else crosses than tensors of a known
            type; those that no node of the main graph makes cut nothing.
        observed: further tensors that are given; those of bodies as `expose_body_tensors` carries them out.
        free: initializers of the main graph that can be fed.
        optimize: whether onnxruntime's graph optimisations are on; they fuse nothing across a cut and fold no free
            weight.
        threads: threads inside an operator; None leaves the choice to onnxruntime.

    Raises:
        ModelError: the model cannot be read, a name is no tensor of it, or a free weight is no initializer.
    """
    proto = read_without_data(model) if isinstance(model, Path) else model
    stored = {tensor.name for tensor in proto.graph.initializer}
    for name in free:
        if name not in stored:
            raise ModelError(
                f"Weight {name!r} is not in the main graph, expected an initializer's name{did_you_mean(name, stored)}"
            )
    fed = {value.name for value in proto.graph.input} - stored
    given = {*cuts, *observed, *(value.name for value in proto.graph.output)} - fed
    folder, mapped = model.parent if isinstance(model, Path) else None, is_large(proto)
    found = []
    for part in segments(proto, given, cuts=frozenset(cuts), free=frozenset(free)):
        # Of old models every initializer is an input as well.
        inputs = tuple(name for name in part.inputs if name not in stored)
        part = replace(part, inputs=inputs, kept=part.kept - stored)
        found.append(Stage(part, folder, optimize=optimize, mapped=mapped, threads=threads))
    return tuple(found)


def read_without_data(path: Path) -> onnx.ModelProto:
    """Return the model of a file, its external data left where it is.

    Raises:
        ModelError: The file cannot be read, or is no model.
    """
    try:
        return onnx.load(path, load_external_data=False)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}; expected an .onnx file") from error
    except DecodeError as error:
        raise ModelError(f"{path} is no ONNX model: {error}; expected an .onnx file") from error
