"""Types of what a new node makes, from onnx's own inference for one node."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

from onnx import TensorProto, TypeProto, checker, defs, helper, shape_inference

from onnxq.graph.data_types import numpy_dtype
from onnxq.graph.elements import Constant, Node, OpaqueAttribute, Shape, Tensor, Variable, onnx_dtype
from onnxq.graph.reading import nodes
from onnxq.graph.scopes import inner_variables

# Shapes, axes and repeats are short; inference reads nothing else.
_MOST_READ: Final = 1024


def infer_types(node: Node, opset_imports: dict[str, int]) -> None:
    """Write dtype and shape of a node's outputs into them, as far as the types of its inputs tell.

    Operators that onnx does not know, and those with bodies, leave their outputs as they are.

    Args:
        node: a node whose inputs have types where they are known.
        opset_imports: version by domain.

    Raises:
        ValueError: the node is ill-typed: onnx says that its inputs or attributes are not what the operator takes.
    """
    domain, version = node.domain or "", opset_imports.get(node.domain or "", 1)
    read = [tensor for tensor in node.inputs if tensor.name]
    if node.bodies() or not defs.has(node.op, version, domain) or not all(map(onnx_dtype, read)):
        return
    schema = defs.get_schema(node.op, version, domain)
    if not schema.min_input <= len(node.inputs) <= schema.max_input:
        raise ValueError(f"it has {len(node.inputs)} inputs, expected {schema.min_input} to {schema.max_input}")
    attributes = {name: _plain(value) for name, value in node.attrs.items()}
    proto = helper.make_node(
        node.op,
        [tensor.name for tensor in node.inputs],
        [tensor.name for tensor in node.outputs],
        domain=domain,
        **{name: value for name, value in attributes.items() if value is not None},
    )
    types = {tensor.name: _type_proto(tensor) for tensor in read}
    known = {tensor.name: data for tensor in read if (data := _data(tensor)) is not None}
    imports = [helper.make_opsetid(name, number) for name, number in opset_imports.items()]
    try:
        found = shape_inference.infer_node_outputs(schema, proto, types, known, opset_imports=imports)
    except (shape_inference.InferenceError, checker.ValidationError, RuntimeError) as error:
        raise ValueError(" ".join(str(error).split())) from error
    for tensor in node.outputs:
        if isinstance(tensor, Variable) and (made := found.get(tensor.name)) is not None:
            tensor.dtype, tensor.shape = _read(made)


def _plain(value: Any) -> Any:
    if isinstance(value, Constant):
        return value.payload.to_proto(value.name)
    return None if isinstance(value, OpaqueAttribute) else value


def _type_proto(tensor: Tensor) -> TypeProto:
    return helper.make_tensor_type_proto(onnx_dtype(tensor), None if tensor.shape is None else list(tensor.shape))


def _data(tensor: Tensor) -> TensorProto | None:
    small = isinstance(tensor, Constant) and tensor.dtype.kind in "iu" and tensor.nbytes <= _MOST_READ
    return tensor.payload.to_proto(tensor.name) if small else None


def _read(made: TypeProto) -> tuple[Any, Shape | None]:
    if made.WhichOneof("value") != "tensor_type":
        return None, None
    declared = made.tensor_type
    dtype = numpy_dtype(declared.elem_type)
    if not declared.HasField("shape"):
        return dtype, None
    return dtype, [
        dimension.dim_value if dimension.HasField("dim_value") else dimension.dim_param or None
        for dimension in declared.shape.dim
    ]


def types_to_declare(graph: Any) -> frozenset[str]:
    """Return the names of tensors inside a graph and its bodies whose types a runtime does not find out by itself.

    Inference loses the names of dimensions behind a Reshape that copies some and infers another; what loses them is to
    be declared, so that the runtime sees which dimensions are equal, and everything behind follows.

    Args:
        graph: a Graph with inferred types.
    """
    return frozenset(tensor.name for _, node in nodes(graph) for tensor in _lost_names(node, graph.opset_imports))


def forget_types(graph: Any, kept: Collection[str]) -> None:
    """Forget what is known of the tensors inside a graph and its bodies, but for those of these names."""
    for tensor in inner_variables(graph):
        if tensor.name not in kept:
            tensor.dtype = tensor.shape = tensor.source = None


def _lost_names(node: Node, opset_imports: dict[str, int]) -> list[Variable]:
    """Return the outputs that have names of dimensions which do not follow from the types of the inputs."""
    named = [one for one in node.outputs if any(isinstance(extent, str) for extent in one.shape or ())]
    if not named:
        return []
    twin = node.copy(node.inputs, [Variable(tensor.name) for tensor in node.outputs])
    try:
        infer_types(twin, opset_imports)
    except ValueError:
        # A damaged model; the runtime says so better.
        return []
    finally:
        twin.inputs.clear()
    inferred = {tensor.name: tensor.shape for tensor in twin.outputs}
    return [tensor for tensor in named if isinstance(tensor, Variable) and inferred[tensor.name] != tensor.shape]
