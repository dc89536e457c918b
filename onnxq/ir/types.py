"""Types and shapes of tensors: declarations in a model, and inference for single nodes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

from onnx import TensorProto, TypeProto, ValueInfoProto, checker, defs, helper, shape_inference

from onnxq.ir.data_types import data_type_of, numpy_dtype
from onnxq.ir.elements import Constant, Node, OpaqueAttribute, Shape, Tensor, Variable, onnx_dtype
from onnxq.ir.graph import Graph
from onnxq.ir.queries import all_graphs, all_nodes, inner_variables, is_composite, is_constant
from onnxq.ir.symbolic_dims import is_symbol


def read_tensor_type(declared: TypeProto) -> tuple[Any, Shape | None]:
    """Return numpy dtype and shape of a tensor's type; None for what it leaves open.

    Negative dimensions, which some exporters write for unknown ones, count as unknown.
    """
    if declared.WhichOneof("value") != "tensor_type":
        return None, None
    dtype, dimensions = numpy_dtype(declared.tensor_type.elem_type), declared.tensor_type.shape.dim
    if not declared.tensor_type.HasField("shape"):
        return dtype, None
    known = [getattr(one, one.WhichOneof("value") or "dim_param") for one in dimensions]
    return dtype, [None if size == "" or (isinstance(size, int) and size < 0) else size for size in known]


def write_tensor_type(info: ValueInfoProto, dtype: object, shape: Shape | tuple[int, ...] | None) -> None:
    """Set dtype and shape of a declaration. Denotations of dimensions are kept if the rank stays the same."""
    old = TypeProto()
    old.CopyFrom(info.type)
    info.ClearField("type")
    if old.denotation:
        info.type.denotation = old.denotation
    info.type.tensor_type.elem_type = data_type_of(dtype)
    if shape is None:
        return
    dimensions = info.type.tensor_type.shape
    dimensions.SetInParent()
    denotations = [dimension.denotation for dimension in old.tensor_type.shape.dim]
    for index, size in enumerate(shape):
        dimension = dimensions.dim.add()
        if isinstance(size, str):
            dimension.dim_param = size
        elif size is not None:
            dimension.dim_value = int(size)
        if len(denotations) == len(shape) and denotations[index]:
            dimension.denotation = denotations[index]


def forget_claims(graph: Graph) -> None:
    """Forget names of dimensions that only an exporter claims, in a main graph and its bodies.

    Equal names in the model's inputs mean equal numbers, except placeholders and a name that one input has twice.
    Names in outputs and inner tensors, and all names in bodies, are forgotten unless they were inferred.
    """
    for scope in all_graphs(graph):
        for tensor in scope.inputs:
            if scope.parent is None and tensor.shape is not None:
                tensor.shape = _trusted(tensor.shape)
        inner = [tensor for node in scope.nodes for tensor in node.outputs]
        for tensor in inner if scope.parent is None else (*scope.inputs, *inner):
            if isinstance(tensor, Variable) and tensor.shape is not None and _is_as_read(tensor):
                tensor.shape = _without_names(tensor.shape)


def _trusted(shape: Shape) -> Shape:
    return [
        None if isinstance(size, str) and (not is_symbol(size) or shape.count(size) > 1) else size for size in shape
    ]


def _without_names(shape: Shape) -> Shape:
    return [None if isinstance(size, str) else size for size in shape]


def serialize_declaration(
    target: ValueInfoProto,
    tensor: Tensor,
    declared: ValueInfoProto | None,
    *,
    complete: bool = True,
    names: bool = False,
) -> None:
    """Write the declaration of a tensor: the earlier one, unless the graph has another type or shape.

    Args:
        target: the empty declaration.
        tensor: the tensor.
        declared: its earlier declaration; None for the one that a Variable was read with.
        complete: whether the earlier declaration completes an unknown type or shape.
        names: whether it also names unknown dimensions. Placeholders are left out.
    """
    if isinstance(tensor, Variable) and (declared is None or is_composite(tensor)):
        # The type of a sequence, an optional or a map is that of its source alone.
        declared = tensor.source
    if declared is not None:
        target.CopyFrom(declared)
    if target.name != tensor.name:
        target.name = tensor.name
    if isinstance(tensor, Constant):
        if declared is None or not _fits(tensor, declared):
            write_tensor_type(target, tensor.dtype, tensor.shape)
        return
    if _is_as_read(tensor):
        return
    wanted = _declared(tensor)
    known = _known(declared) if declared is not None else (0, None)
    if complete:
        wanted = (wanted[0] or known[0], _completed(wanted[1], known[1], names=names))
    if wanted != known:
        write_tensor_type(target, wanted[0], wanted[1])


def _completed(shape: Shape | None, declared: Shape | None, *, names: bool) -> Shape | None:
    if shape is None:
        return declared
    if not names or declared is None or len(shape) != len(declared):
        return shape
    return [
        old if new is None and isinstance(old, str) and is_symbol(old) else new
        for new, old in zip(shape, declared, strict=True)
    ]


def _declared(tensor: Variable) -> tuple[int, Shape | None]:
    return data_type_of(tensor.dtype), None if tensor.shape is None else list(tensor.shape)


def _is_as_read(tensor: Variable) -> bool:
    return tensor.source is not None and _declared(tensor) == _known(tensor.source)


def is_declarable(tensor: Tensor) -> bool:
    """Return whether the type of an inner tensor is known, so that it can be declared."""
    return isinstance(tensor, Constant) or tensor.dtype is not None or _is_as_read(tensor)


def _known(info: ValueInfoProto) -> tuple[int, Shape | None]:
    dtype, shape = read_tensor_type(info.type)
    return data_type_of(dtype), shape


def _fits(tensor: Constant, declared: ValueInfoProto) -> bool:
    data_type, shape = _known(declared)
    if data_type != tensor.tensor_data.onnx_dtype:
        return False
    return shape is None or (
        len(shape) == len(tensor.shape)
        and all(not isinstance(size, int) or size == actual for size, actual in zip(shape, tensor.shape, strict=True))
    )


# Type inference for single nodes, by onnx

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
    given, arrow, result = equation.replace(" ", "").partition("->")
    once = (letter for letter in sorted(set(given)) if letter.isalpha() and given.count(letter) == 1)
    return given.split(","), result if arrow else "".join(once)


def infer_types(node: Node, opset_imports: dict[str, int]) -> None:
    """Set dtype and shape of a node's outputs from the types of its inputs.

    Nothing changes for unknown operators, for operators with bodies, and if the type of an input is unknown.

    Raises:
        ValueError: onnx refuses the inputs or attributes of the node.
    """
    domain, version = node.domain or "", opset_imports.get(node.domain or "", 1)
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
    types = {tensor.name: _type_proto(tensor) for tensor in read}
    known = {tensor.name: data for tensor in read if (data := _data(tensor)) is not None}
    imports = [helper.make_opsetid(name, number) for name, number in opset_imports.items()]
    try:
        found = shape_inference.infer_node_outputs(schema, proto, types, known, opset_imports=imports)
    except (shape_inference.InferenceError, checker.ValidationError, RuntimeError) as error:
        raise ValueError(" ".join(str(error).split())) from error
    for tensor in node.outputs[:believed]:
        if isinstance(tensor, Variable) and (made := found.get(tensor.name)) is not None:
            tensor.dtype, tensor.shape = read_tensor_type(made)


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
    return all(len(found) == 1 for found in lengths.values())


def _plain(value: Any) -> Any:
    if isinstance(value, Constant):
        return value.tensor_data.to_proto(value.name)
    return None if isinstance(value, OpaqueAttribute) else value


def _type_proto(tensor: Tensor) -> TypeProto:
    return helper.make_tensor_type_proto(onnx_dtype(tensor), shape_of(tensor))


def shape_of(tensor: Tensor) -> Shape | None:
    """Return the shape that a tensor has in every run; a caller may replace an initializer by one of another shape."""
    if not isinstance(tensor, Constant) or tensor.overridable_input is None:
        return None if tensor.shape is None else list(tensor.shape)
    _, shape = read_tensor_type(tensor.overridable_input.type)
    return None if shape is None else [size if isinstance(size, int) and size > 0 else None for size in shape]


def _data(tensor: Tensor) -> TensorProto | None:
    small = is_constant(tensor) and tensor.dtype.kind in "iu" and tensor.nbytes <= _MOST_READ_BYTES
    return tensor.tensor_data.to_proto(tensor.name) if small else None


def types_to_declare(graph: Any) -> frozenset[str]:
    """Return the names of inner tensors whose types a runtime cannot infer, given a graph with inferred types.

    A Reshape that copies some dimensions and infers another loses their names. Its output must be declared, so that a
    runtime knows which dimensions are equal there and downstream.
    """
    return frozenset(tensor.name for _, node in all_nodes(graph) for tensor in _lost_names(node, graph.opset_imports))


def forget_types(graph: Any, kept: Collection[str]) -> None:
    """Forget the types of inner tensors of a graph and its bodies, except tensors named in ``kept``."""
    for tensor in inner_variables(graph):
        if tensor.name not in kept:
            tensor.dtype = tensor.shape = tensor.source = None


def _lost_names(node: Node, opset_imports: dict[str, int]) -> list[Variable]:
    """Return the outputs whose named dimensions do not follow from the types of the inputs."""
    named = [one for one in node.outputs if any(isinstance(extent, str) for extent in one.shape or ())]
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
