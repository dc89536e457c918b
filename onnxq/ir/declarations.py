"""Declarations: the types and shapes of tensors as a model states them, read, kept, forgotten and written."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from onnx import TypeProto, ValueInfoProto

from onnxq.ir.data_types import data_type_of, numpy_dtype
from onnxq.ir.elements import Constant, Shape, Tensor, Variable
from onnxq.ir.graph import Graph
from onnxq.ir.queries import all_graphs, inner_variables, is_composite
from onnxq.ir.symbolic_dims import is_symbol


def read_tensor_type(declared: TypeProto) -> tuple[Any, Shape | None]:
    """Return numpy dtype and shape of a tensor's type; None for an unknown dtype, rank or dimension.

    Negative dimensions, which some exporters write for unknown ones, count as unknown.
    """
    if declared.WhichOneof("value") != "tensor_type":
        return None, None
    dtype, dimensions = numpy_dtype(declared.tensor_type.elem_type), declared.tensor_type.shape.dim
    if not declared.tensor_type.HasField("shape"):
        return dtype, None
    sizes = [getattr(dimension, dimension.WhichOneof("value") or "dim_param") for dimension in dimensions]
    return dtype, [None if size == "" or (isinstance(size, int) and size < 0) else size for size in sizes]


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
                tensor.shape = [None if isinstance(size, str) else size for size in tensor.shape]


def _trusted(shape: Shape) -> Shape:
    return [
        None if isinstance(size, str) and (not is_symbol(size) or shape.count(size) > 1) else size for size in shape
    ]


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
    earlier = _read_type(declared) if declared is not None else (0, None)
    if complete:
        wanted = (wanted[0] or earlier[0], _completed(wanted[1], earlier[1], names=names))
    if wanted != earlier:
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
    return tensor.source is not None and _declared(tensor) == _read_type(tensor.source)


def is_declarable(tensor: Tensor) -> bool:
    """Return whether the type of an inner tensor is known, so that it can be declared."""
    return isinstance(tensor, Constant) or tensor.dtype is not None or _is_as_read(tensor)


def _read_type(info: ValueInfoProto) -> tuple[int, Shape | None]:
    dtype, shape = read_tensor_type(info.type)
    return data_type_of(dtype), shape


def _fits(tensor: Constant, declared: ValueInfoProto) -> bool:
    data_type, shape = _read_type(declared)
    if data_type != tensor.tensor_data.onnx_dtype:
        return False
    return shape is None or (
        len(shape) == len(tensor.shape)
        and all(not isinstance(size, int) or size == actual for size, actual in zip(shape, tensor.shape, strict=True))
    )


def declared_shape(tensor: Tensor) -> Shape | None:
    """Return the shape of a tensor; where the graph leaves a dimension open, with the name that the model gives it."""
    source = tensor.source if isinstance(tensor, Variable) else None
    declared = None if source is None else read_tensor_type(source.type)[1]
    return _completed(None if tensor.shape is None else list(tensor.shape), declared, names=True)


def shape_of(tensor: Tensor) -> Shape | None:
    """Return the shape that a tensor has in every run; a caller may replace an initializer by one of another shape."""
    if not isinstance(tensor, Constant) or tensor.overridable_input is None:
        return None if tensor.shape is None else list(tensor.shape)
    _, shape = read_tensor_type(tensor.overridable_input.type)
    return None if shape is None else [size if isinstance(size, int) and size > 0 else None for size in shape]


def forget_types(graph: Any, kept: Collection[str]) -> None:
    """Forget the types of inner tensors of a graph and its bodies, except tensors named in ``kept``."""
    for tensor in inner_variables(graph):
        if tensor.name not in kept:
            tensor.dtype = tensor.shape = tensor.source = None
