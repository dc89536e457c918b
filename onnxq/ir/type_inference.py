"""Types and shapes of the outputs of single nodes, inferred by onnx."""

from __future__ import annotations

from typing import Any, Final

from onnx import TensorProto, checker, defs, helper, shape_inference

from onnxq.ir.declarations import read_tensor_type, shape_of
from onnxq.ir.elements import Constant, Node, OpaqueAttribute, Tensor, Variable, onnx_dtype
from onnxq.ir.queries import all_nodes, is_constant

# Inference needs only the values of shapes, axes and repeats, which are short.
_MOST_READ_BYTES: Final = 1024
# At these opsets onnx infers wrong shapes. A later version of the operator takes the same inputs and infers them right.
_LATER: Final = {"Slice": (range(10, 11), 11), "Squeeze": (range(11), 11), "Unsqueeze": (range(11), 11)}
# Operator to (opset, index): below this opset onnx infers wrong shapes for the outputs from this index on.
_WRONG: Final = {"If": (11, 0), "DFT": (20, 0), "Attention": (10**6, 3)}


def inferred_at(op: str, opset: int) -> int:
    """Return the opset to infer shapes at; onnx infers wrong shapes for some operators at their own opset.

    >>> inferred_at("Slice", 10), inferred_at("Slice", 17)
    (11, 17)
    """
    opsets, later = _LATER.get(op, (range(0), 0))
    return later if opset in opsets else opset


def believed_outputs(op: str, opset: int) -> int | None:
    """Return how many of an operator's outputs onnx infers right shapes for; None for all.

    >>> believed_outputs("If", 10), believed_outputs("If", 11)
    (0, None)
    """
    before, first = _WRONG.get(op, (0, 0))
    return first if opset < before else None


def einsum_terms(equation: str) -> tuple[list[str], str]:
    """Return the subscripts of an Einsum's operands, and the subscripts of its result.

    >>> einsum_terms("bij, bjk -> bik"), einsum_terms("ij,jk")
    ((['bij', 'bjk'], 'bik'), (['ij', 'jk'], 'ik'))
    """
    operands, arrow, result = equation.replace(" ", "").partition("->")
    once = (letter for letter in sorted(set(operands)) if letter.isalpha() and operands.count(letter) == 1)
    return operands.split(","), result if arrow else "".join(once)


def infer_types(node: Node, opset_imports: dict[str, int]) -> None:
    """Set dtype and shape of a node's outputs from the types of its inputs.

    Nothing changes for unknown operators, for operators with bodies, and if the type of an input is unknown.

    Raises:
        ValueError: onnx refuses the inputs or attributes of the node.
    """
    domain, version = node.domain, opset_imports.get(node.domain, 1)
    believed = None if domain else believed_outputs(node.op, version)
    if not domain and (later := inferred_at(node.op, version)) != version:
        version, opset_imports = later, {**opset_imports, "": later}
    read = [tensor for tensor in node.inputs if tensor.name]
    if node.subgraphs() or not defs.has(node.op, version, domain) or not all(map(onnx_dtype, read)):
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
    types = {tensor.name: helper.make_tensor_type_proto(onnx_dtype(tensor), shape_of(tensor)) for tensor in read}
    values = {tensor.name: data for tensor in read if (data := _data(tensor)) is not None}
    imports = [helper.make_opsetid(name, number) for name, number in opset_imports.items()]
    try:
        inferred = shape_inference.infer_node_outputs(schema, proto, types, values, opset_imports=imports)
    except (shape_inference.InferenceError, checker.ValidationError, RuntimeError) as error:
        raise ValueError(" ".join(str(error).split())) from error
    for tensor in node.outputs[:believed]:
        if isinstance(tensor, Variable) and (inferred_type := inferred.get(tensor.name)) is not None:
            tensor.dtype, tensor.shape = read_tensor_type(inferred_type)


def _letters_agree(node: Node) -> bool:
    # onnx takes a subscript's length from the first operand that has it, even if another operand broadcasts to more.
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
    return all(len(sizes) == 1 for sizes in lengths.values())


def _plain(value: Any) -> Any:
    if isinstance(value, Constant):
        return value.tensor_data.to_proto(value.name)
    return None if isinstance(value, OpaqueAttribute) else value


def _data(tensor: Tensor) -> TensorProto | None:
    small = is_constant(tensor) and tensor.dtype.kind in "iu" and tensor.nbytes <= _MOST_READ_BYTES
    return tensor.tensor_data.to_proto(tensor.name) if small else None


def types_to_declare(graph: Any) -> frozenset[str]:
    """Return the names of inner tensors whose types a runtime cannot infer, given a graph with inferred types.

    A Reshape that copies some dimensions and infers another loses their names. Its output must be declared, so that a
    runtime knows which dimensions are equal there and downstream.
    """
    return frozenset(tensor.name for _, node in all_nodes(graph) for tensor in _lost_names(node, graph.opset_imports))


def _lost_names(node: Node, opset_imports: dict[str, int]) -> list[Variable]:
    """Return the outputs whose named dimensions do not follow from the types of the inputs."""
    named = [tensor for tensor in node.outputs if any(isinstance(extent, str) for extent in tensor.shape or ())]
    if not named:
        return []
    twin = node.copy(node.inputs, [Variable(tensor.name) for tensor in node.outputs])
    try:
        infer_types(twin, opset_imports)
    except ValueError:
        # The model is damaged; the runtime reports the error in more detail.
        return []
    finally:
        twin.inputs.clear()
    inferred = {tensor.name: tensor.shape for tensor in twin.outputs}
    return [tensor for tensor in named if isinstance(tensor, Variable) and inferred[tensor.name] != tensor.shape]
