"""Taps: tensors of the main graph as additional graph outputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx

from onnxq.errors import ModelError, did_you_mean

_OVERRIDABLE = 4


def with_taps(model: onnx.ModelProto, names: Iterable[str]) -> onnx.ModelProto:
    """Return a copy of the model with the named tensors as further outputs; the weights are copied once.

    Raises:
        ModelError: A name is no tensor of the main graph, or its element type cannot be inferred.
    """
    tapped = onnx.ModelProto()
    tapped.CopyFrom(model)
    tapped.graph.output.extend(tap_outputs(model, names))
    return tapped


def tapped_bytes(data: bytes, outputs: Sequence[onnx.ValueInfoProto], kept: Sequence[str] = ()) -> bytes:
    """Return a serialized model with further outputs, without parsing or copying it message by message.

    Protobuf defines concatenated messages as merged ones: repeated fields such as the graph's outputs are appended.

    Args:
        data: The serialized model.
        outputs: The outputs to add.
        kept: Tensors that are computed as if they were outputs too, but only their size is given, as ``NAME/size``.
            What a runtime fuses, and so the last bits of every tensor, depends on which ones are computed.
    """
    nodes = [onnx.helper.make_node("Size", [name], [f"{name}/size"]) for name in kept]
    sizes = [onnx.helper.make_tensor_value_info(f"{name}/size", onnx.TensorProto.INT64, []) for name in kept]
    graph = onnx.GraphProto(node=nodes, output=[*outputs, *sizes])
    return data + bytes(onnx.ModelProto(graph=graph).SerializeToString())


def overridable_bytes(data: bytes, model: onnx.ModelProto, names: Sequence[str]) -> bytes:
    """Return a serialized part of a model whose named initializers can be fed, and need not be.

    An initializer that is an input as well is its default, and no runtime folds it into others.

    Args:
        data: The serialized part.
        model: The model, which has these initializers.
        names: Initializers that the part has too.
    """
    if not names:
        return data
    declared = {value.name for value in model.graph.input}
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    inputs = [
        onnx.helper.make_tensor_value_info(name, tensors[name].data_type, list(tensors[name].dims))
        for name in names
        if name not in declared
    ]
    # Before this version every initializer had to be an input, and was a constant.
    version = max(model.ir_version, _OVERRIDABLE)
    return data + bytes(onnx.ModelProto(ir_version=version, graph=onnx.GraphProto(input=inputs)).SerializeToString())


def tensor_types(model: onnx.ModelProto) -> dict[str, onnx.ValueInfoProto]:
    """Return the tensors of the main graph whose element types are known, texts left out."""
    known = _inferred_types(model) | _known_types(model.graph)
    return {
        name: onnx.ValueInfoProto(name=name, type=value)
        for name, value in known.items()
        if value.tensor_type.elem_type not in (onnx.TensorProto.UNDEFINED, onnx.TensorProto.STRING)
    }


def tap_outputs(model: onnx.ModelProto, names: Iterable[str]) -> list[onnx.ValueInfoProto]:
    """Return the outputs to add for the named tensors, in their order, leaving out outputs of the model.

    Raises:
        ModelError: A name is no tensor of the main graph, or its element type cannot be inferred.
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
    """Infer element types on a copy whose initializers are inputs, so that no weight is copied; none when it fails."""
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
    # The bindings turn any C++ error into one of these; what is then not known is told by name.
    except (onnx.shape_inference.InferenceError, RuntimeError, ValueError):
        return {}
    return {value.name: value.type for value in inferred.graph.value_info}
