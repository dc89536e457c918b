"""Instrumented models: inner tensors as additional outputs, including tensors inside If, Loop and Scan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import onnx
from onnx import GraphProto, NodeProto, TensorProto, ValueInfoProto, helper

from onnxq.errors import ModelError, did_you_mean
from onnxq.ir.elements import canonical_domain
from onnxq.ir.protos import subgraph_protos


def bodies(graph: GraphProto) -> Iterator[GraphProto]:
    """Yield the bodies in a graph, at any depth."""
    return islice(subgraph_protos(graph), 1, None)


def own_bodies(node: NodeProto) -> Iterator[GraphProto]:
    """Yield the bodies of a node, but not the bodies inside them."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def made_inside(graph: GraphProto) -> set[str]:
    """Return the names of the inputs and node outputs of all bodies, except names that the main graph has."""
    main = names_made(graph) | {tensor.name for tensor in graph.initializer}
    return {name for body in bodies(graph) for name in names_made(body)} - main


def names_made(graph: GraphProto) -> set[str]:
    """Return the names of the inputs and node outputs of a graph."""
    return {value.name for value in graph.input} | {name for node in graph.node for name in node.output if name}


def unused_mark(graph: GraphProto) -> str:
    """Return a suffix that is part of no name in the model."""
    scopes = list(subgraph_protos(graph))
    names = {name for scope in scopes for name in names_made(scope)}
    names |= {tensor.name for scope in scopes for tensor in scope.initializer}
    mark = "/tap"
    while any(mark in name for name in names):
        mark += "'"
    return mark


def known_dimensions(value: ValueInfoProto) -> list[int] | None:
    """Return the dimensions of a tensor; None if any is unknown."""
    kind = value.type.tensor_type
    known = value.type.HasField("tensor_type") and kind.HasField("shape")
    sizes = [dimension.dim_value for dimension in kind.shape.dim if dimension.HasField("dim_value")]
    return sizes if known and len(sizes) == len(kind.shape.dim) else None


# Tensors inside If, Loop and Scan, exposed as tensors of the main graph.

CARRYING = frozenset({"If", "Loop", "Scan"})
"""Operators whose bodies can expose tensors."""


def expose_body_tensors(model: onnx.ModelProto, names: Iterable[str], others: Iterable[str] = ()) -> onnx.ModelProto:
    """Return a model whose main graph has the named body tensors, each with all values of a run in one dimension.

    The tensors keep their names in the main graph and get new names in the bodies. A Loop gives the values of all
    iterations, a Scan those of all steps. An If branch that does not run gives none. All other results stay the same.

    Args:
        model: The model; not changed, and returned itself if no body has any of the tensors.
        names: Tensors of any graph with unique names; those of bodies are float32.
        others: Tensors that are computed as if they were named, but give no values.

    Raises:
        ModelError: A tensor cannot be exposed. It is in the body of another operator, or in an If or Loop inside a
            Scan. All steps of a Scan give the same number of values.
    """
    made = made_inside(model.graph)
    inside, counted = made.intersection(names), made.intersection(others)
    if not inside and not counted:
        return model
    instrumentation = _Instrumentation(
        frozenset(inside | counted), frozenset(counted - inside), unused_mark(model.graph)
    )
    instrumented, carried = instrumentation.applied(model)
    instrumented.graph.value_info.extend(_vector(name) for name in carried)
    return instrumented


@dataclass(frozen=True)
class _Instrumentation:
    """The tensors to expose, and their names on the way out.

    Attributes:
        wanted: Names of the observed tensors, which tensors of the main graph get.
        emptied: Tensors whose values are dropped.
        mark: A suffix that no name of the model contains.
    """

    wanted: frozenset[str]
    emptied: frozenset[str]
    mark: str

    def applied(self, model: onnx.ModelProto) -> tuple[onnx.ModelProto, list[str]]:
        instrumented = onnx.ModelProto()
        instrumented.CopyFrom(model)
        for body in bodies(instrumented.graph):
            self.rename(body)
        carried = self.carry(instrumented.graph, ())
        instrumented.graph.initializer.extend(self.constants())
        return instrumented, carried

    def rename(self, body: GraphProto) -> None:
        """Rename the observed tensors in one body, but not in the bodies inside it."""
        for value in (*body.input, *body.output, *body.value_info):
            value.name = self._inner(value.name)
        for node in body.node:
            node.input[:] = [self._inner(name) for name in node.input]
            node.output[:] = [self._inner(name) for name in node.output]

    def constants(self) -> Iterator[TensorProto]:
        yield helper.make_tensor(f"{self.mark}shape", TensorProto.INT64, [1], [-1])
        yield helper.make_tensor(f"{self.mark}nothing", TensorProto.FLOAT, [0], [])
        yield helper.make_tensor(f"{self.mark}zero", TensorProto.INT64, [1], [0])

    def carry(self, graph: GraphProto, path: tuple[str, ...]) -> list[str]:
        """Add nodes for the flat values of the observed tensors in a graph inside the operators `path`; return them."""
        depth = len(path)
        found = sorted(name.removesuffix(self.mark) for name in names_made(graph) if name.endswith(self.mark))
        graph.node.extend(node for name in found for node in self._flat_values(name, depth))
        # In reverse, so that insertions do not shift the remaining indices.
        for index in reversed(range(len(graph.node))):
            node = graph.node[index]
            branches = [(body, self.carry(body, (*path, node.op_type))) for body in own_bodies(node)]
            names = sorted({name for _, observed in branches for name in observed})
            if not names:
                continue
            _check(node, path)
            if node.op_type == "If":
                self._open_if(node, branches, names, depth)
            elif node.op_type == "Loop":
                body = branches[0][0]
                alike = self._of_one_size(body)
                behind = self._open_scan(node, body, [name for name in names if name in alike], depth)
                before, joined = self._open_loop(node, body, [name for name in names if name not in alike], depth)
                _insert(graph, index, before, [*behind, *joined])
            else:
                _insert(graph, index, [], self._open_scan(node, branches[0][0], names, depth))
            found.extend(names)
        return found

    def _flat_values(self, name: str, depth: int) -> Iterator[NodeProto]:
        """Yield the nodes that flatten a tensor in its body, or drop its values."""
        flat, values, zero = self._carried(name, depth), self._between(name, depth, "values"), f"{self.mark}zero"
        if name not in self.emptied:
            yield self._reshape(self._inner(name), flat)
            return
        yield self._reshape(self._inner(name), values)
        yield helper.make_node("Slice", [values, zero, zero], [flat])

    def _open_if(
        self, node: NodeProto, branches: Sequence[tuple[GraphProto, list[str]]], names: Sequence[str], depth: int
    ) -> None:
        for branch, observed in branches:
            for name in names:
                flat = self._carried(name, depth + 1)
                if name not in observed:
                    branch.node.append(helper.make_node("Identity", [f"{self.mark}nothing"], [flat]))
                branch.output.append(_vector(flat))
        node.output.extend(self._carried(name, depth) for name in names)

    def _of_one_size(self, body: GraphProto) -> set[str]:
        """Return the tensors with the same number of values in all iterations of a Loop, which can be scan outputs.

        Tensors inside nested bodies are excluded: how often these run may change.
        """
        states = len(body.input) - 2
        # Shapes are inferred from the initial states, so they are wrong if a state grows.
        if any(
            known_dimensions(given) is not None and known_dimensions(given) != known_dimensions(made)
            for given, made in zip(body.input[2:], body.output[1 : 1 + states], strict=True)
        ):
            return set()
        known = {
            value.name.removesuffix(self.mark)
            for value in (*body.input, *body.output, *body.value_info)
            if value.name.endswith(self.mark) and known_dimensions(value) is not None
        }
        made = {name.removesuffix(self.mark) for name in names_made(body) if name.endswith(self.mark)}
        return made & (known | self.emptied)

    def _open_loop(
        self, node: NodeProto, body: GraphProto, names: Sequence[str], depth: int
    ) -> tuple[list[NodeProto], list[NodeProto]]:
        """Let a Loop carry sequences; return the nodes before it that create them and those behind it that join them.

        Scan outputs must have the same size in all iterations. A tensor that grows would be copied in each iteration,
        as the sequence is too: the cost is quadratic in the iterations.
        """
        if not names:
            return [], []
        states = len(body.input) - 2
        start = self._between(names[0], depth, "start")
        grown, given, joined = [], [], []
        for name in names:
            flat, parts = self._carried(name, depth + 1), self._between(name, depth, "parts")
            earlier, later = self._between(name, depth, "before"), self._between(name, depth, "behind")
            node.input.append(start)
            body.input.append(_sequence(earlier))
            body.node.append(helper.make_node("SequenceInsert", [earlier, flat], [later]))
            grown.append(_sequence(later))
            given.append(parts)
            joined.append(helper.make_node("ConcatFromSequence", [parts], [self._carried(name, depth)], axis=0))
        # The states of a Loop come before its scan outputs.
        scanned = list(body.output)[1 + states :]
        del body.output[1 + states :]
        body.output.extend([*grown, *scanned])
        node.output[states:states] = given
        # The sequence starts with an empty tensor, because an empty sequence cannot be joined.
        return [helper.make_node("SequenceConstruct", [f"{self.mark}nothing"], [start])], joined

    def _open_scan(self, node: NodeProto, body: GraphProto, names: Sequence[str], depth: int) -> list[NodeProto]:
        """Add scan outputs to a Scan or Loop, and return the nodes behind it that flatten them."""
        stacked = {name: self._between(name, depth, "stacked") for name in names}
        body.output.extend(_vector(self._carried(name, depth + 1)) for name in names)
        node.output.extend(stacked.values())
        for attribute in node.attribute:
            if attribute.name in ("scan_output_axes", "scan_output_directions"):
                attribute.ints.extend([0] * len(names))
        return [self._reshape(stacked[name], self._carried(name, depth)) for name in names]

    def _reshape(self, source: str, target: str) -> NodeProto:
        return helper.make_node("Reshape", [source, f"{self.mark}shape"], [target])

    def _inner(self, name: str) -> str:
        """Return the name of a tensor in the graph that computes it."""
        return f"{name}{self.mark}" if name in self.wanted else name

    def _carried(self, name: str, depth: int) -> str:
        """Return the name of the flat values of a tensor in a graph inside `depth` bodies."""
        return f"{name}{self.mark}{depth}" if depth else name

    def _between(self, name: str, depth: int, what: str) -> str:
        return f"{name}{self.mark}{depth}.{what}"


def _check(node: NodeProto, path: Sequence[str]) -> None:
    if node.op_type not in CARRYING or canonical_domain(node.domain):
        raise ModelError(
            f"Tensors in the body of {node.op_type} node {node.name!r} cannot be calibrated, expected a body of "
            f"{', '.join(sorted(CARRYING))}; leave them out"
        )
    if "Scan" in path and node.op_type != "Scan":
        raise ModelError(
            f"Tensors in {node.op_type} node {node.name!r} inside a Scan cannot be calibrated, expected as many values "
            "in each of its steps; leave them out"
        )


def _vector(name: str) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, [None])


def _sequence(name: str) -> ValueInfoProto:
    return helper.make_tensor_sequence_value_info(name, TensorProto.FLOAT, [None])


def _insert(graph: GraphProto, index: int, before: Sequence[NodeProto], behind: Sequence[NodeProto]) -> None:
    for node in reversed(behind):
        graph.node.insert(index + 1, node)
    for node in reversed(before):
        graph.node.insert(index, node)


# Tensors of the main graph as additional graph outputs.


def append_outputs(data: bytes, outputs: Sequence[onnx.ValueInfoProto], kept: Sequence[str] = ()) -> bytes:
    """Return a serialized model with additional outputs, without parsing or copying its messages.

    Protobuf defines concatenated messages as merged: repeated fields such as the graph's outputs are appended.

    Tensors in `kept` are computed as if they were outputs, but only give their size, as ``NAME/size``. Computed tensors
    decide what a runtime fuses, and so the last bits of every tensor.
    """
    nodes = [onnx.helper.make_node("Size", [name], [f"{name}/size"]) for name in kept]
    sizes = [onnx.helper.make_tensor_value_info(f"{name}/size", onnx.TensorProto.INT64, []) for name in kept]
    graph = onnx.GraphProto(node=nodes, output=[*outputs, *sizes])
    return data + bytes(onnx.ModelProto(graph=graph).SerializeToString())


def tensor_types(model: onnx.ModelProto) -> dict[str, onnx.ValueInfoProto]:
    """Return the tensors of the main graph with known element types, except strings."""
    known = _inferred_types(model) | _known_types(model.graph)
    return {
        name: onnx.ValueInfoProto(name=name, type=value)
        for name, value in known.items()
        if value.tensor_type.elem_type not in (onnx.TensorProto.UNDEFINED, onnx.TensorProto.STRING)
    }


def added_outputs(model: onnx.ModelProto, names: Iterable[str]) -> list[onnx.ValueInfoProto]:
    """Return the outputs to add for the named tensors, in their order, without outputs of the model.

    Raises:
        ModelError: A name is not a tensor of the main graph, or its element type cannot be inferred.
    """
    graph = model.graph
    existing = {value.name for value in graph.output}
    known = _known_types(graph)
    produced = {name for node in graph.node for name in node.output if name}
    wanted = [name for name in dict.fromkeys(names) if name not in existing]
    for name in wanted:
        if name not in produced and name not in known:
            raise ModelError(
                f"Tensor {name!r} is not in the main graph, expected the output of a node, an input or an initializer"
                f"{did_you_mean(name, produced | set(known))}"
            )
    if any(name not in known for name in wanted):
        known = _inferred_types(model) | known
    for name in wanted:
        if name not in known:
            raise ModelError(
                f"Tensor {name!r} has no element type and none can be inferred, expected one in value_info; "
                "run shape inference or leave the tensor out"
            )
    return [onnx.ValueInfoProto(name=name, type=known[name]) for name in wanted]


def _known_types(graph: onnx.GraphProto) -> dict[str, onnx.TypeProto]:
    types = {
        tensor.name: onnx.helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))
        for tensor in graph.initializer
    }
    types |= {value.name: value.type for value in graph.value_info if value.type.WhichOneof("value")}
    return types | {value.name: value.type for value in graph.input}


def _inferred_types(model: onnx.ModelProto) -> dict[str, onnx.TypeProto]:
    """Infer types on a copy whose initializers are inputs, so that no weight is copied; empty if inference fails."""
    graph = model.graph
    inputs = {value.name for value in graph.input}
    skeleton = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions)
    skeleton.graph.name = graph.name
    skeleton.graph.input.extend(graph.input)
    skeleton.graph.node.extend(graph.node)
    skeleton.graph.value_info.extend(graph.value_info)
    skeleton.graph.input.extend(
        onnx.ValueInfoProto(name=name, type=value) for name, value in _known_types(graph).items() if name not in inputs
    )
    try:
        inferred = onnx.shape_inference.infer_shapes(skeleton)
    # The bindings turn any C++ error into one of these. `added_outputs` then names the tensor without a type.
    except (onnx.shape_inference.InferenceError, RuntimeError, ValueError):
        return {}
    return {value.name: value.type for value in inferred.graph.value_info}


# Tensors of bodies as matrices with one column for each channel.


class ChannelAxis(NamedTuple):
    """The channel axis of a tensor, counted from the front, its rank, and its number of channels."""

    axis: int
    rank: int
    channels: int


def expose_channels(
    model: onnx.ModelProto, channel_axes: Mapping[str, ChannelAxis]
) -> tuple[onnx.ModelProto, Mapping[str, str]]:
    """Return a model whose main graph has each body tensor of `channel_axes` as a matrix [values, channels].

    `expose_body_tensors` gives all values in one dimension, without channels.

    Args:
        model: The model; not changed.
        channel_axes: Channel axes by body tensor; float32, see `expose_body_tensors`.

    Returns:
        The model, and the name of the matrix by the name of the tensor.

    Raises:
        ModelError: A tensor cannot be exposed, see `expose_body_tensors`.
    """
    if not channel_axes:
        return model, {}
    turned = onnx.ModelProto()
    turned.CopyFrom(model)
    last = {name: f"{name}/last" for name in channel_axes}
    for body in bodies(turned.graph):
        for name in sorted(names_made(body) & channel_axes.keys()):
            channels = channel_axes[name]
            order = [*(place for place in range(channels.rank) if place != channels.axis), channels.axis]
            body.node.append(helper.make_node("Transpose", [name], [last[name]], perm=order))
    carried = expose_body_tensors(turned, last.values())
    matrices = {name: f"{name}/channels" for name in channel_axes}
    for name, channels in channel_axes.items():
        shape = helper.make_tensor(f"{name}/matrix", TensorProto.INT64, [2], [-1, channels.channels])
        carried.graph.initializer.append(shape)
        carried.graph.node.append(helper.make_node("Reshape", [last[name], shape.name], [matrices[name]]))
        carried.graph.value_info.append(
            helper.make_tensor_value_info(matrices[name], TensorProto.FLOAT, [None, channels.channels])
        )
    return carried, matrices
