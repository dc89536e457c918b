"""Nodes and tensors: GraphSurgeon's classes with identity equality and the protos they were read from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs
from onnx import AttributeProto, NodeProto, ValueInfoProto
from onnx_graphsurgeon.ir.tensor import LazyValues
from onnx_graphsurgeon.util.misc import SynchronizedList

from onnxq.ir.data_types import data_type_of
from onnxq.ir.payload import Payload
from onnxq.ir.stored import as_payload

Tensor: TypeAlias = "Variable | Constant"
Shape: TypeAlias = "list[int | str | None]"
Origins: TypeAlias = tuple[tuple[str, str], ...]


@dataclass(frozen=True, eq=False)
class OpaqueAttribute:
    """A node attribute of a kind that GraphSurgeon has no value for (types, sparse tensors, lists of tensors).

    Attributes:
        proto: the attribute, carried unchanged.
    """

    proto: AttributeProto


def domain_named(name: str | None) -> str:
    """Return the one name that a domain has here; that of ONNX itself is written in three ways.

    >>> domain_named(None), domain_named("ai.onnx"), domain_named("com.microsoft")
    ('', '', 'com.microsoft')
    """
    return "" if name in (None, "ai.onnx") else str(name)


def bodies_of(values: Iterable[Any]) -> list[Any]:
    """Return the control-flow bodies among the values of attributes, in order."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, gs.Graph):
            found.append(value)
        elif isinstance(value, list) and value and isinstance(value[0], gs.Graph):
            found.extend(value)
    return found


def _links(owner: Any, field: str) -> SynchronizedList:
    """Return an empty list of what reads or makes something, which keeps that field of its entries up to date."""
    links = SynchronizedList.__new__(SynchronizedList)
    links.parent_obj, links.field_name = owner, field
    return links


class Identity:
    """Two objects are equal when they are the same one; GraphSurgeon compares names and cannot hash."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__


class Node(Identity, gs.Node):
    """An operator call.

    Attributes:
        source: the NodeProto it was read from, or None; documentation and metadata are written back from it.
        origins: names and operators of the model's own nodes that this one stands for, first the one whose work it does
            or shares; empty for a node that stands for itself.
    """

    op: str
    name: str
    attrs: dict[str, Any]
    inputs: list[Any]
    outputs: list[Any]
    source: NodeProto | None = None
    origins: Origins = ()

    def __init__(
        self,
        op: str,
        name: str | None = None,
        attrs: dict[str, Any] | None = None,
        inputs: Iterable[Any] | None = None,
        outputs: Iterable[Any] | None = None,
        domain: str | None = None,
    ) -> None:
        # GraphSurgeon compares each attribute that is set with the names of its lists.
        self.__dict__.update(
            op=op,
            name=name or "",
            attrs={} if attrs is None else attrs,
            inputs=_links(self, "outputs"),
            outputs=_links(self, "inputs"),
            domain=domain,
        )
        self.inputs.extend(list(inputs or ()))
        self.outputs.extend(list(outputs or ()))

    @property
    def domain(self) -> str:
        """The domain of the operator; that of ONNX itself is ``""``, however it was written."""
        return domain_named(self.__dict__.get("domain"))

    @domain.setter
    def domain(self, domain: str | None) -> None:
        self.__dict__["domain"] = domain

    def bodies(self) -> list[Any]:
        """Return the control-flow bodies of this node, in attribute order."""
        return bodies_of(self.attrs.values())

    def copy(
        self,
        inputs: Sequence[Tensor] | None = None,
        outputs: Sequence[Tensor] | None = None,
        tensor_map: dict[str, Tensor] | None = None,
    ) -> Node:
        """Return a node of the same operator and attributes on other tensors; bodies are shared."""
        twin = Node(self.op, self.name, dict(self.attrs), list(inputs or ()), list(outputs or ()), self.domain)
        twin.source, twin.origins = self.source, self.origins
        return twin


class Variable(Identity, gs.Variable):
    """A tensor that is computed or fed.

    Attributes:
        dtype: numpy dtype, or None while unknown or when it is no tensor (sequence, map, optional).
        shape: list of numbers, names and None for unknown dimensions; None while the rank is unknown.
        source: the ValueInfoProto it was read with, or None.
        returned_by: the graphs that list it among their outputs.
    """

    name: str
    dtype: Any
    shape: Shape | None
    inputs: list[Any]
    outputs: list[Any]
    source: ValueInfoProto | None = None
    returned_by: Sequence[Any] = ()

    def __init__(
        self,
        name: str,
        dtype: Any = None,
        shape: Sequence[int | str | None] | None = None,
        type: str = "tensor_type",  # noqa: A002 - as GraphSurgeon calls it
    ) -> None:
        links = {"inputs": _links(self, "outputs"), "outputs": _links(self, "inputs")}
        self.__dict__.update(links, name=name, dtype=dtype, shape=shape, type=type)

    def to_constant(self, values: npt.NDArray[Any] | LazyValues, export_dtype: object = None) -> Constant:
        """Turn this tensor into a Constant in place, as GraphSurgeon does; its producer stays attached."""
        payload = as_payload(values, export_dtype)
        for name in ("dtype", "shape", "type", "source"):
            self.__dict__.pop(name, None)
        self.__class__ = Constant
        self.__dict__.update(_values=payload, data_location=None, _export_dtype=None)
        return self

    def copy(self) -> Variable:
        """Return a tensor of the same name, type and shape without producers and consumers."""
        twin = Variable(self.name, self.dtype, None if self.shape is None else list(self.shape), self.type)
        twin.source = self.source
        return twin


class Constant(Identity, gs.Constant):
    """A tensor whose values are stored in the model.

    Attributes:
        input_source: the graph input that lets a caller override it, or None.
        kept: whether it is written although nothing uses it, because it was read so.
        returned_by: the graphs that list it among their outputs.
    """

    name: str
    inputs: list[Any]
    outputs: list[Any]
    returned_by: Sequence[Any] = ()
    input_source: ValueInfoProto | None = None
    kept: bool = False

    def __init__(
        self,
        name: str,
        values: npt.NDArray[Any] | LazyValues,
        data_location: int | None = None,
        export_dtype: object = None,
    ) -> None:
        links = {"inputs": _links(self, "outputs"), "outputs": _links(self, "inputs")}
        self.__dict__.update(
            links, name=name, _values=as_payload(values, export_dtype), data_location=None, _export_dtype=None
        )

    @property
    def payload(self) -> Payload:
        """The values in the form in which they are kept and written."""
        payload = self._values
        assert isinstance(payload, Payload), "restore_classes() converts what stock GraphSurgeon code assigns"
        return payload

    @property
    def values(self) -> npt.NDArray[Any]:
        """The values as an array: read anew each time, and read-only unless an array was assigned."""
        return self.payload.load()

    @values.setter
    def values(self, values: npt.NDArray[Any] | LazyValues) -> None:
        self._values = as_payload(values)

    @property
    def shape(self) -> tuple[int, ...]:
        """The dimensions, without loading the values."""
        return self.payload.shape

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The numpy dtype, without loading the values."""
        return self.payload.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the stored values, without loading them; 0 for strings."""
        return self.payload.nbytes

    def to_variable(self, dtype: object = None, shape: Sequence[int | str] | None = None) -> Variable:
        """Turn this tensor into a Variable in place, as GraphSurgeon does."""
        known_dtype = self.dtype if dtype is None else dtype
        for name in ("_values", "_export_dtype", "data_location", "input_source", "kept"):
            self.__dict__.pop(name, None)
        self.__class__ = Variable
        self.__dict__.update(dtype=known_dtype, shape=list(shape or ()), type="tensor_type")
        return self

    def copy(self) -> Constant:
        """Return a tensor of the same name that shares the payload, without consumers."""
        return Constant(self.name, self.payload)

    def __repr__(self) -> str:
        return f"Constant({self.name!r}, {self.payload!r})"

    __str__ = __repr__


def constant(name: str, array: npt.ArrayLike) -> Constant:
    """Return a new Constant.

    >>> constant("scale", np.float32(0.5)).shape
    ()
    """
    return Constant(name, np.asarray(array))


def become_constant(variable: Variable, payload: Payload) -> Constant:
    """Turn a variable into a constant in place, so that all its consumers read the payload.

    A producer with other outputs keeps them at their positions, and makes this one under the name ``x.unused``.
    """
    for producer in dict.fromkeys(variable.inputs):
        # Kernels such as Split's crash where an output in the middle is omitted.
        others = any(output.name for output in producer.outputs if output is not variable)
        for index, output in enumerate(producer.outputs):
            if output is variable:
                blank = Variable(f"{variable.name}.unused" if others else "")
                list.__setitem__(producer.outputs, index, blank)
                list.append(blank.inputs, producer)
    list.clear(variable.inputs)
    return variable.to_constant(payload)


def onnx_dtype(tensor: Tensor) -> int:
    """Return the ``TensorProto.DataType`` of a tensor; 0 when unknown.

    >>> onnx_dtype(Variable("x", np.float32)), onnx_dtype(Variable("y"))
    (1, 0)
    """
    return tensor.payload.onnx_dtype if isinstance(tensor, Constant) else data_type_of(tensor.dtype)
