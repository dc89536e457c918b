"""Instrumented models: inner tensors as additional outputs, including tensors inside If, Loop and Scan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper

from onnxq.errors import ModelError, did_you_mean
from onnxq.ir import Graph, Names, Node, NodeBuilder, Variable, constant, insert_nodes, place_constants, read_model
from onnxq.ir.elements import Shape
from onnxq.ir.serialize import serialize_model
from onnxq.ir.tensor_data import ProtoTensor, TensorData
from onnxq.onnx_api import infer_proto

# Tensors inside If, Loop and Scan, exposed as tensors of the main graph.

CARRYING = frozenset({"If", "Loop", "Scan"})
"""Operators whose bodies can expose tensors."""

_FLOAT: Final = np.dtype(np.float32)
# What is known of the values of all iterations, steps or branches.
_VECTOR: Final[Shape] = [None]


class ChannelAxis(NamedTuple):
    """The channel axis of a tensor, counted from the front, its rank, and its number of channels."""

    axis: int
    rank: int
    channels: int


def expose_body_tensors(
    model: onnx.ModelProto,
    names: Iterable[str],
    channel_axes: Mapping[str, ChannelAxis] = MappingProxyType({}),
) -> onnx.ModelProto:
    """Return a model whose main graph has the named body tensors, each with all values of a run.

    The tensors keep their names in the main graph and get new names in the bodies. A Loop gives the values of all
    iterations, a Scan those of all steps. An If branch that does not run gives none. All other results stay the same.

    Args:
        model: The model; not changed, and returned itself if no body has any of the tensors.
        names: Tensors of any graph with unique names; those of bodies are float32.
        channel_axes: Tensors that become matrices [values, channels]; all others have one dimension.

    Raises:
        ModelError: A tensor cannot be exposed. It is in the body of another operator, or in an If or Loop inside a
            Scan. All steps of a Scan give the same number of values.
    """
    inside = set(names) - _tensors(model.graph)
    if not inside:
        return model
    graph = read_model(model)
    exposure = _Exposure(graph, inside, channel_axes)
    carried = exposure.carry(graph)
    if not carried:
        return model
    new = NodeBuilder("", exposure.names)
    for name in [name for name in channel_axes if name in carried]:
        channels = channel_axes[name].channels
        matrix = new.reshape(f"{name}.channels", carried[name], [-1, channels])
        matrix.dtype, matrix.shape = _FLOAT, [None, channels]
        carried[name] = matrix
    graph.nodes.extend(new.nodes)
    for tensor in exposure.exposed:
        tensor.name = exposure.names.unique(f"{tensor.name}.inner")
    for name, tensor in carried.items():
        tensor.name = name

    def store(proto: TensorProto, tensor_data: TensorData, name: str) -> None:
        # External data stays in its files.
        is_reference = isinstance(tensor_data, ProtoTensor) and tensor_data.external
        (tensor_data.fill_reference if is_reference else tensor_data.fill)(proto, name)

    return serialize_model(graph, place_constants(graph), store)


class _Exposure:
    """The tensors of bodies to expose in the main graph.

    Attributes:
        wanted: Their names.
        channel_axes: Channel axes that become the last ones, by tensor.
        names: Names of the whole model.
        exposed: The tensors in their bodies.
    """

    def __init__(self, graph: Graph, wanted: set[str], channel_axes: Mapping[str, ChannelAxis]) -> None:
        self.wanted, self.channel_axes = wanted, channel_axes
        self.names = Names(graph)
        self.exposed: list[Variable] = []
        self._shape = constant(self.names.unique("exposed.shape"), np.array([-1]))
        self._nothing = constant(self.names.unique("exposed.nothing"), np.zeros(0, np.float32))

    def carry(self, scope: Graph, path: tuple[str, ...] = ()) -> dict[str, Variable]:
        """Add nodes to a graph inside the operators `path`; return the flat values of the tensors in it, by name."""
        own = [*scope.inputs, *(tensor for node in scope.nodes for tensor in node.outputs)] if path else []
        inside = sorted((tensor for tensor in own if tensor.name in self.wanted), key=lambda tensor: str(tensor.name))
        new = NodeBuilder("", self.names)
        values = {tensor.name: self._flat(tensor, new) for tensor in inside}
        before: dict[Node, list[Node]] = {}
        after: dict[Node, list[Node]] = {}
        for node in scope.nodes:
            bodies = [(body, self.carry(body, (*path, node.op))) for body in node.subgraphs()]
            names = sorted({name for _, flat in bodies for name in flat})
            if not names:
                continue
            _check(node, path)
            ahead, behind = NodeBuilder("", self.names), NodeBuilder("", self.names)
            if node.op == "If":
                values |= self._open_if(node, bodies, names)
            else:
                [(body, flat)] = bodies
                alike = self._of_one_size(body) if node.op == "Loop" else set(names)
                values |= self._stacked(node, body, {name: flat[name] for name in names if name in alike}, behind)
                values |= self._joined(
                    node, body, {name: flat[name] for name in names if name not in alike}, ahead, behind
                )
            before[node], after[node] = ahead.nodes, behind.nodes
        insert_nodes(scope, before=before, after=after)
        scope.nodes.extend(new.nodes)
        self.exposed += inside
        return values

    def _flat(self, tensor: Variable, new: NodeBuilder) -> Variable:
        """Append the nodes that flatten a tensor in its body, with its channels last if they are told apart."""
        new, source = new.named_after(tensor.name), tensor
        if own := self.channel_axes.get(tensor.name):
            order = [*(axis for axis in range(own.rank) if axis != own.axis), own.axis]
            source = new.node("Transpose", "turn", [tensor], "turned", _FLOAT, perm=order)
        return new.node("Reshape", "flatten", [source, self._shape], "flat", _FLOAT, _VECTOR)

    def _open_if(
        self, node: Node, branches: Sequence[tuple[Graph, Mapping[str, Variable]]], names: Sequence[str]
    ) -> dict[str, Variable]:
        for branch, values in branches:
            for name in names:
                new = NodeBuilder(name, self.names)
                flat = values.get(name) or new.node("Identity", "skip", [self._nothing], "none", _FLOAT, _VECTOR)
                branch.nodes.extend(new.nodes)
                branch.outputs.append(flat)
        chosen = {name: NodeBuilder(name, self.names).variable("chosen", _FLOAT, _VECTOR) for name in names}
        node.outputs.extend(chosen.values())
        return chosen

    def _of_one_size(self, body: Graph) -> set[str]:
        """Return the tensors with the same number of values in all iterations of a Loop, which can be scan outputs.

        Tensors inside nested bodies are excluded: how often these run may change.
        """
        states = body.inputs[2:]
        # Shapes are inferred from the initial states, so they are wrong if a state grows.
        if any(
            _is_known(first) and first.shape != last.shape
            for first, last in zip(states, body.outputs[1 : 1 + len(states)], strict=True)
        ):
            return set()
        own = (*body.inputs, *(tensor for node in body.nodes for tensor in node.outputs))
        return {tensor.name for tensor in own if _is_known(tensor)}

    def _joined(
        self, node: Node, body: Graph, values: Mapping[str, Variable], ahead: NodeBuilder, behind: NodeBuilder
    ) -> dict[str, Variable]:
        """Let a Loop carry sequences, which nodes before it create and nodes behind it join.

        Scan outputs must have the same size in all iterations. A tensor that grows would be copied in each iteration,
        as the sequence is too: the cost is quadratic in the iterations.
        """
        if not values:
            return {}
        states = len(body.inputs) - 2
        # The sequence starts with an empty tensor, because an empty sequence cannot be joined.
        start = ahead.node("SequenceConstruct", "exposed.begin", [self._nothing], "exposed.start")
        grown, parts, joined = [], [], {}
        for name, flat in values.items():
            new = NodeBuilder(name, self.names)
            earlier, later = _sequence(new.named("before")), _sequence(new.named("behind"))
            node.inputs.append(start)
            body.inputs.append(earlier)
            grown.append(new.node("SequenceInsert", "insert", [earlier, flat], later))
            body.nodes.extend(new.nodes)
            parts.append(new.variable("parts"))
            join = behind.named_after(name)
            joined[name] = join.node("ConcatFromSequence", "join", parts[-1:], "joined", _FLOAT, _VECTOR, axis=0)
        # The states of a Loop come before its scan outputs.
        body.outputs = [*body.outputs[: 1 + states], *grown, *body.outputs[1 + states :]]
        node.outputs = [*node.outputs[:states], *parts, *node.outputs[states:]]
        return joined

    def _stacked(
        self, node: Node, body: Graph, values: Mapping[str, Variable], behind: NodeBuilder
    ) -> dict[str, Variable]:
        """Add scan outputs to a Scan or Loop, and nodes behind it that flatten them."""
        flattened = {}
        for name, flat in values.items():
            new = behind.named_after(name)
            body.outputs.append(flat)
            node.outputs.append(new.variable("stacked", _FLOAT))
            flattened[name] = new.node("Reshape", "flatten", [node.outputs[-1], self._shape], "flat", _FLOAT, _VECTOR)
        for attribute in node.attrs.keys() & {"scan_output_axes", "scan_output_directions"}:
            node.attrs[attribute] = [*node.attrs[attribute], *[0] * len(values)]
        return flattened


def _check(node: Node, path: Sequence[str]) -> None:
    if node.op not in CARRYING or node.domain:
        raise ModelError(
            f"Tensors in the body of {node.op} node {node.name!r} cannot be calibrated, expected a body of "
            f"{', '.join(sorted(CARRYING))}; leave them out"
        )
    if "Scan" in path and node.op != "Scan":
        raise ModelError(
            f"Tensors in {node.op} node {node.name!r} inside a Scan cannot be calibrated, expected as many values "
            "in each of its steps; leave them out"
        )


def _is_known(tensor: Variable) -> bool:
    return tensor.shape is not None and all(isinstance(size, int) for size in tensor.shape)


def _sequence(name: str) -> Variable:
    sequence = Variable(name)
    sequence.source = helper.make_tensor_sequence_value_info(name, TensorProto.FLOAT, [None])
    return sequence


# Tensors of the main graph as additional graph outputs.


def append_outputs(data: bytes, outputs: Sequence[onnx.ValueInfoProto]) -> bytes:
    """Return a serialized model with additional outputs, without parsing or copying its messages.

    Protobuf defines concatenated messages as merged: repeated fields such as the graph's outputs are appended.
    """
    return data + bytes(onnx.ModelProto(graph=onnx.GraphProto(output=outputs)).SerializeToString())


def tensor_types(model: onnx.ModelProto) -> dict[str, onnx.ValueInfoProto]:
    """Return the tensors of the main graph with known element types, except strings."""
    return {
        name: onnx.ValueInfoProto(name=name, type=value)
        for name, value in (_inferred_types(model) | _known_types(model.graph)).items()
        if value.tensor_type.elem_type not in (onnx.TensorProto.UNDEFINED, onnx.TensorProto.STRING)
    }


def added_outputs(model: onnx.ModelProto, names: Iterable[str]) -> list[onnx.ValueInfoProto]:
    """Return the outputs to add for the named tensors, in their order, without outputs of the model.

    Raises:
        ModelError: A name is not a tensor of the main graph, or its element type cannot be inferred.
    """
    known, tensors = _known_types(model.graph), _tensors(model.graph)
    existing = {value.name for value in model.graph.output}
    added = [name for name in dict.fromkeys(names) if name not in existing]
    for name in added:
        if name not in tensors:
            raise ModelError(
                f"Tensor {name!r} is not in the main graph, expected the output of a node, an input or an initializer"
                f"{did_you_mean(name, tensors)}"
            )
    if any(name not in known for name in added):
        known = _inferred_types(model) | known
    for name in added:
        if name not in known:
            raise ModelError(
                f"Tensor {name!r} has no element type and none can be inferred, expected one in value_info; "
                "run shape inference or leave the tensor out"
            )
    return [onnx.ValueInfoProto(name=name, type=known[name]) for name in added]


def _tensors(graph: onnx.GraphProto) -> set[str]:
    """Return the names of the inputs, initializers and node outputs of a graph."""
    stored = {value.name for values in (graph.input, graph.initializer) for value in values}
    return stored | {name for node in graph.node for name in node.output if name}


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
    skeleton = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions)
    skeleton.graph.name = graph.name
    skeleton.graph.node.extend(graph.node)
    skeleton.graph.value_info.extend(graph.value_info)
    skeleton.graph.input.extend(
        onnx.ValueInfoProto(name=name, type=value) for name, value in _known_types(graph).items()
    )
    inferred = infer_proto(skeleton)
    # `added_outputs` names a tensor without a type.
    return {} if inferred is None else {value.name: value.type for value in inferred.graph.value_info}
