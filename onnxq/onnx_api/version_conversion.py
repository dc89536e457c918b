"""Opset upgrades and inlining by onnx's own C++ code, which gets the model without its weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from onnx import (
    AttributeProto,
    GraphProto,
    ModelProto,
    NodeProto,
    ValueInfoProto,
    defs,
    helper,
    numpy_helper,
    version_converter,
)

from onnxq.errors import ModelError
from onnxq.ir.declarations import forget_types
from onnxq.ir.elements import canonical_domain
from onnxq.ir.graph import Graph
from onnxq.ir.protos import copy_other_fields, node_protos, subgraph_protos
from onnxq.ir.queries import inner_variables
from onnxq.ir.versions import NEWEST_IR_VERSION, NEWEST_OPSET, minimum_ir_version
from onnxq.onnx_api.adapters import CONVERTED, adapt_operators
from onnxq.onnx_api.inlining import NATIVE_ERRORS, inline_proto_functions
from onnxq.onnx_api.shape_inference import infer_proto
from onnxq.onnx_api.weightless import WeightlessModel

_CONVERTED = {"node", "initializer", "sparse_initializer", "input", "output", "value_info"}
_NODE_TOPOLOGY = {"input", "output", "op_type", "domain", "attribute", "name"}


def upgrade_opset(graph: Graph, version: int) -> Graph:
    """Return the graph at a newer ONNX opset; a graph at that opset or a newer one is returned as it is.

    The given graph is not changed and shares its values with the new graph. Local functions are inlined first.
    Documentation, metadata and declarations are kept for everything that keeps its name.

    Raises:
        ModelError: onnxruntime does not load the version, or an operator of the model cannot be converted.
    """
    if graph.opset >= version:
        return graph
    if version > NEWEST_OPSET:
        raise ModelError(f"opset is {version}, expected at most {NEWEST_OPSET} for the installed onnxruntime; lower it")
    if not graph.opset:
        raise ModelError(f"the model imports no ONNX opset, so there is nothing to upgrade to opset {version}")
    if graph.functions:
        graph = inline_functions(graph)
    adapted = adapt_operators(graph, version)
    weightless = WeightlessModel.of(adapted)
    converted = _convert(weightless.model, graph.opset, version)
    _graft(weightless.model, converted, version)
    _mend(weightless.model, converted, version)
    upgraded = weightless.restore(converted)
    if adapted is not graph:
        forget_types(upgraded, {tensor.name for tensor in inner_variables(graph) if tensor.dtype is not None})
    return upgraded


def inline_functions(graph: Graph) -> Graph:
    """Return the graph with calls of model-local functions replaced by the bodies of these functions.

    A graph without functions is returned as it is.

    Raises:
        ModelError: a function cannot be inlined. For example it calls itself, or it has another opset and cannot be
            converted.
    """
    if not graph.functions:
        return graph
    weightless = WeightlessModel.of(graph)
    inlined = inline_proto_functions(weightless.model)
    if inlined.functions:
        names = ", ".join(repr(function.name) for function in inlined.functions)
        raise ModelError(
            f"the model-local functions cannot be inlined: {names} cannot be converted to opset {graph.opset}; upgrade "
            "the model's opset first"
        )
    return weightless.restore(inlined)


def _convert(model: ModelProto, before: int, version: int) -> ModelProto:
    try:
        return version_converter.convert_version(model, version)
    except NATIVE_ERRORS as error:
        # onnx's message names places in its own code.
        node = _refused_node(model, version)
        subject = f"node {node.name or _key(node)!r} ({node.op_type})" if node is not None else "the model"
        raise ModelError(
            f"{subject} cannot be converted from opset {before} to {version} by onnx; export the model at opset "
            f"{version} or later"
        ) from error


def _refused_node(model: ModelProto, version: int) -> NodeProto | None:
    """Return the first node that onnx does not convert alone either, one in a body before the node that holds it."""
    scopes = list(subgraph_protos(_inferred(model).graph))
    types: dict[str, ValueInfoProto] = {}
    for scope in scopes:
        types.update({info.name: info for info in (*scope.input, *scope.value_info, *scope.output)})
        for tensor in scope.initializer:
            types[tensor.name] = helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)

    def declared(names: Iterable[str]) -> list[ValueInfoProto]:
        return [types.get(name, ValueInfoProto(name=name)) for name in dict.fromkeys(names) if name]

    nodes: list[NodeProto] = [node for scope in reversed(scopes) for node in scope.node]
    for node in nodes:
        alone = helper.make_graph([node], "node", declared(node.input), declared(node.output))
        single = ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, graph=alone)
        try:
            version_converter.convert_version(single, version)
        except NATIVE_ERRORS:
            return node
    return None


def _mend(source: ModelProto, converted: ModelProto, version: int) -> None:
    """Correct the converter's errors: attributes that an operator no longer has, and constants of the wrong type."""
    types = _element_types(source)
    for graph in subgraph_protos(converted.graph):
        constants = [node for node in graph.node if node.op_type == "Constant" and len(node.attribute) == 1]
        invented = {node.output[0]: node for node in constants if node.output[0] not in types}
        for node in graph.node:
            if canonical_domain(node.domain) or not defs.has(node.op_type, version, ""):
                continue
            schema = defs.get_schema(node.op_type, version)
            if node.op_type == "Pad" and "value" not in schema.attributes:
                # The converter has made it an input in constant mode, and no other mode uses it.
                kept = [proto for proto in node.attribute if proto.name != "value"]
                del node.attribute[:]
                node.attribute.extend(kept)
            if unknown := next((proto.name for proto in node.attribute if proto.name not in schema.attributes), None):
                raise ModelError(
                    f"{node.op_type} node {node.name!r} has the attribute {unknown!r} once it is converted, which "
                    f"opset {version} does not know; keep the model's own opset"
                )
            _unify_types(node, schema, types, invented)


def _unify_types(node: NodeProto, schema: defs.OpSchema, types: dict[str, int], invented: dict[str, NodeProto]) -> None:
    """Give constants that the converter added the type of the inputs that must have the same type."""
    wanted: dict[str, int] = {}
    for make in (False, True):
        for index, name in enumerate(node.input):
            formal = schema.inputs[min(index, len(schema.inputs) - 1)]
            if not formal.is_homogeneous or "(" in formal.type_str:
                continue
            if not make and types.get(name):
                wanted.setdefault(formal.type_str, types[name])
            elif make and name in invented and (data_type := wanted.get(formal.type_str)):
                tensor = invented[name].attribute[0].t
                if tensor.data_type != data_type:
                    dtype = helper.tensor_dtype_to_np_dtype(data_type)
                    # The bounds of float32 are infinite in float16.
                    with np.errstate(over="ignore"):
                        values = numpy_helper.to_array(tensor).astype(dtype)
                    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))


def _element_types(model: ModelProto) -> dict[str, int]:
    # By name; 0 if unknown.
    types: dict[str, int] = {}
    for graph in subgraph_protos(_inferred(model).graph):
        types.update((tensor.name, tensor.data_type) for tensor in graph.initializer)
        for info in (*graph.input, *graph.value_info, *graph.output):
            types.setdefault(info.name, info.type.tensor_type.elem_type)
        for node in graph.node:
            for name in node.output:
                types.setdefault(name, 0)
    return types


def _inferred(model: ModelProto) -> ModelProto:
    return infer_proto(model) or model


def _graft(source: ModelProto, converted: ModelProto, version: int) -> None:
    """Restore metadata, declarations and versions that the converter drops or changes."""
    upgraded = ModelProto()
    copy_other_fields(source, upgraded, {"graph"})
    upgraded.graph.CopyFrom(converted.graph)
    for entry in list(upgraded.opset_import):
        if not canonical_domain(entry.domain):
            entry.version = version
        elif entry.domain == CONVERTED:
            upgraded.opset_import.remove(entry)
    for node in node_protos(upgraded.graph.node):
        if node.domain == CONVERTED:
            node.ClearField("domain")
    upgraded.ir_version = max(source.ir_version, min(minimum_ir_version(version), NEWEST_IR_VERSION))
    for old, new in _paired_graphs(source.graph, upgraded.graph):
        _graft_graph(old, new)
    converted.CopyFrom(upgraded)


def _graft_graph(old: GraphProto, new: GraphProto) -> None:
    copy_other_fields(old, new, _CONVERTED | {"name", "doc_string"})
    stored = {proto.name: proto for proto in old.initializer}
    for proto in new.initializer:
        weight = stored.get(proto.name)
        if weight is not None and weight.data_type == proto.data_type and weight.dims == proto.dims:
            proto.CopyFrom(weight)
    for field in ("input", "output"):
        declared = {info.name: info for info in getattr(old, field)}
        for info in getattr(new, field):
            if info.name in declared:
                info.CopyFrom(declared[info.name])
    # The converter's own declarations come from shape inference, with invented dimension names.
    visible = {name for node in new.node for name in node.output} | set(stored) | {info.name for info in new.input}
    del new.value_info[:]
    new.value_info.extend(info for info in old.value_info if info.name in visible)
    by_output = {_key(node): node for node in old.node}
    by_name = {node.name: node for node in old.node if node.name}
    for node in new.node:
        # If the converter appends nodes, the last one takes over the output, and the node keeps only its name.
        original = by_name.get(node.name) or by_output.get(_key(node))
        if original is not None and original.op_type == node.op_type:
            for name in ("doc_string", "metadata_props", "device_configurations", "overload"):
                node.ClearField(name)
            copy_other_fields(original, node, _NODE_TOPOLOGY)


def _paired_graphs(old: GraphProto, new: GraphProto) -> Iterator[tuple[GraphProto, GraphProto]]:
    """Yield pairs of corresponding graphs: the main graphs, and bodies of nodes with the same first output."""
    pending = [(old, new)]
    while pending:
        pair = pending.pop()
        yield pair
        bodies = {_key(node): _bodies(node) for node in pair[0].node}
        for node in pair[1].node:
            old_bodies = bodies.get(_key(node), {})
            pending.extend((old_bodies[name], body) for name, body in _bodies(node).items() if name in old_bodies)


def _bodies(node: NodeProto) -> dict[str, GraphProto]:
    return {proto.name: proto.g for proto in node.attribute if proto.type == AttributeProto.GRAPH}


def _key(node: NodeProto) -> str:
    # The name of the first output is unique in a graph.
    return next((name for name in node.output if name), "")
