"""Types of what a new node makes, from onnx's own inference for one node."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

from onnx import TensorProto, TypeProto, checker, defs, helper, shape_inference

from onnxq.ir.data_types import numpy_dtype
from onnxq.ir.elements import Constant, Node, OpaqueAttribute, Shape, Tensor, Variable, onnx_dtype
from onnxq.ir.reading import is_fixed, nodes
from onnxq.ir.scopes import inner_variables

# Shapes, axes and repeats are short; inference reads nothing else.
_MOST_READ: Final = 1024
# At these opsets onnx infers wrong shapes, of what later versions of the operator take as well and infer rightly.
_LATER: Final = {"Slice": (range(10, 11), 11), "Squeeze": (range(11), 11), "Unsqueeze": (range(11), 11)}
# Before these opsets onnx infers wrong shapes of the outputs from this index on.
_WRONG: Final = {"If": (11, 0), "DFT": (20, 0), "Attention": (10**6, 3)}


def inferred_at(op: str, opset: int) -> int:
    """Return the opset at which onnx infers rightly what an operator of ONNX makes at a given one.

    >>> inferred_at("Slice", 10), inferred_at("Slice", 17)
    (11, 17)
    """
    opsets, later = _LATER.get(op, (range(0), 0))
    return later if opset in opsets else opset


def believed_outputs(op: str, opset: int) -> int | None:
    """Return how many outputs of an operator of ONNX have the shapes that onnx infers; None for all.

    >>> believed_outputs("If", 10), believed_outputs("If", 11)
    (0, None)
    """
    before, first = _WRONG.get(op, (0, 0))
    return first if opset < before else None


def einsum_terms(equation: str) -> tuple[list[str], str]:
    """Return the letters of the operands of an Einsum, and those of its result.

    >>> einsum_terms("bij, bjk -> bik"), einsum_terms("ij,jk")
    ((['bij', 'bjk'], 'bik'), (['ij', 'jk'], 'ik'))
    """
    given, arrow, result = equation.replace(" ", "").partition("->")
    once = (letter for letter in sorted(set(given)) if letter.isalpha() and given.count(letter) == 1)
    return given.split(","), result if arrow else "".join(once)


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
    believed = None if domain else believed_outputs(node.op, version)
    if not domain and (later := inferred_at(node.op, version)) != version:
        version, opset_imports = later, {**opset_imports, "": later}
    read = [tensor for tensor in node.inputs if tensor.name]
    if node.bodies() or not defs.has(node.op, version, domain) or not all(map(onnx_dtype, read)):
        return
    if node.op == "Einsum" and not domain and not _letters_agree(node):
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
    for tensor in node.outputs[:believed]:
        if isinstance(tensor, Variable) and (made := found.get(tensor.name)) is not None:
            tensor.dtype, tensor.shape = _read(made)


def _letters_agree(node: Node) -> bool:
    """Whether each letter of an Einsum stands for one length, where onnx takes that of the first operand."""
    equation = node.attrs.get("equation", "")
    terms, _ = einsum_terms(equation)
    shapes = [tensor.shape for tensor in node.inputs]
    if len(terms) == 1:
        return True
    if "." in equation or any(
        shape is None or len(shape) != len(term) for term, shape in zip(terms, shapes, strict=False)
    ):
        return False
    lengths: dict[str, set[Any]] = {}
    for term, shape in zip(terms, shapes, strict=True):
        for letter, size in zip(term, shape or (), strict=True):
            lengths.setdefault(letter, set()).add(size)
    return all(len(found) == 1 for found in lengths.values())


def _plain(value: Any) -> Any:
    if isinstance(value, Constant):
        return value.payload.to_proto(value.name)
    return None if isinstance(value, OpaqueAttribute) else value


def _type_proto(tensor: Tensor) -> TypeProto:
    return helper.make_tensor_type_proto(onnx_dtype(tensor), shape_of(tensor))


def shape_of(tensor: Tensor) -> Shape | None:
    """Return the shape that a tensor has in every run: a caller may override an initializer by one of another shape."""
    if not isinstance(tensor, Constant) or tensor.input_source is None:
        return None if tensor.shape is None else list(tensor.shape)
    declared = tensor.input_source.type.tensor_type
    if not declared.HasField("shape"):
        return None
    return [dimension.dim_value if dimension.dim_value > 0 else None for dimension in declared.shape.dim]


def _data(tensor: Tensor) -> TensorProto | None:
    small = is_fixed(tensor) and tensor.dtype.kind in "iu" and tensor.nbytes <= _MOST_READ
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
