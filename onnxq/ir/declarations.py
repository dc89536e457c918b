"""Declarations: what a model says about the type and shape of a tensor, read and written."""

from __future__ import annotations

from typing import Any

from onnx import TypeProto, ValueInfoProto

from onnxq.ir.data_types import data_type_of, numpy_dtype
from onnxq.ir.elements import Constant, Shape, Tensor, Variable
from onnxq.ir.model import Graph
from onnxq.ir.scopes import scopes
from onnxq.ir.shape_entries import is_symbol


def read_tensor_type(info: ValueInfoProto) -> tuple[Any, Shape | None]:
    """Return numpy dtype and shape of a tensor's declaration; None for what it leaves open.

    Negative dimensions, which some exporters write for unknown ones, count as unknown.
    """
    if info.type.WhichOneof("value") != "tensor_type":
        return None, None
    declared = info.type.tensor_type
    dtype = numpy_dtype(declared.elem_type)
    if not declared.HasField("shape"):
        return dtype, None
    shape: Shape = []
    for dimension in declared.shape.dim:
        kind = dimension.WhichOneof("value")
        known = dimension.dim_param if kind == "dim_param" else dimension.dim_value if kind else None
        shape.append(None if known == "" or (isinstance(known, int) and known < 0) else known)
    return dtype, shape


def write_tensor_type(info: ValueInfoProto, dtype: object, shape: Shape | tuple[int, ...] | None) -> None:
    """Set dtype and shape of a declaration, keeping the denotations of dimensions whose rank stays."""
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
    """Make dimensions unknown whose names are claims of an exporter.

    Equal names of the model's inputs stand for equal numbers, except placeholders and a name that one input has twice.
    Names of outputs, of tensors inside and in bodies are forgotten, unless they were inferred.

    Args:
        graph: the main graph.
    """
    for scope in scopes(graph):
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


def emit_info(
    target: ValueInfoProto,
    tensor: Tensor,
    declared: ValueInfoProto | None,
    *,
    complete: bool = True,
    names: bool = False,
) -> None:
    """Write the declaration of a tensor, as it was declared before unless the graph says something else.

    Args:
        target: is written.
        tensor: what is declared.
        declared: how it was declared before, or None.
        complete: whether a type or shape that the graph leaves unknown is taken from the declaration.
        names: whether names of dimensions that the graph leaves unknown are taken as well, placeholders aside.
    """
    if declared is None and isinstance(tensor, Variable):
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
    wanted = _told(tensor)
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


def _told(tensor: Variable) -> tuple[int, Shape | None]:
    return data_type_of(tensor.dtype), None if tensor.shape is None else list(tensor.shape)


def _is_as_read(tensor: Variable) -> bool:
    return tensor.source is not None and _told(tensor) == _known(tensor.source)


def is_told(tensor: Tensor) -> bool:
    """Return whether there is anything to declare about a tensor inside a graph."""
    return isinstance(tensor, Constant) or tensor.dtype is not None or _is_as_read(tensor)


def _known(info: ValueInfoProto) -> tuple[int, Shape | None]:
    dtype, shape = read_tensor_type(info)
    return data_type_of(dtype), shape


def _fits(tensor: Constant, declared: ValueInfoProto) -> bool:
    data_type, shape = _known(declared)
    if data_type != tensor.payload.onnx_dtype:
        return False
    return shape is None or (
        len(shape) == len(tensor.shape)
        and all(not isinstance(size, int) or size == actual for size, actual in zip(shape, tensor.shape, strict=True))
    )
