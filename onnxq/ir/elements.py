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
from onnxq.ir.tensor_data import TensorData, as_tensor_data

Tensor: TypeAlias = "Variable | Constant"
Shape: TypeAlias = "list[int | str | None]"
Origins: TypeAlias = tuple[tuple[str, str], ...]


@dataclass(frozen=True, eq=False)
class OpaqueAttribute:
    """A node attribute that GraphSurgeon has no value for: a type, a sparse tensor or a list of tensors."""

    proto: AttributeProto


def canonical_domain(name: str | None) -> str:
    """Return a domain's canonical name; the domain of ONNX is ``""``, ``"ai.onnx"`` or missing in models.

    >>> canonical_domain(None), canonical_domain("ai.onnx"), canonical_domain("com.microsoft")
    ('', '', 'com.microsoft')
    """
    return "" if name in (None, "ai.onnx") else str(name)


def subgraphs_of(values: Iterable[Any]) -> list[Any]:
    """Return the control-flow bodies among attribute values, in order."""
    bodies: list[Any] = []
    for value in values:
        if isinstance(value, gs.Graph):
            bodies.append(value)
        elif isinstance(value, list) and value and isinstance(value[0], gs.Graph):
            bodies.extend(value)
    return bodies


def _links(owner: Any, field: str) -> SynchronizedList:
    """Return an empty list that registers ``owner`` in ``field`` of each entry."""
    links = SynchronizedList.__new__(SynchronizedList)
    links.parent_obj, links.field_name = owner, field
    return links


class Identity:
    """Equality by identity. GraphSurgeon compares names and is not hashable."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__


class Node(Identity, gs.Node):
    """An operator call.

    Attributes:
        source: the NodeProto it was read from, or None. Documentation and metadata are written from it.
        origins: names and operators of the given model's nodes that this node replaces; the first is the node whose
            work it does. Empty for a node of the given model.
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
        # Faster than setting attributes: GraphSurgeon's __setattr__ compares each name with those of its lists.
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
        """The domain of the operator, as `canonical_domain` writes it."""
        return canonical_domain(self.__dict__.get("domain"))

    @domain.setter
    def domain(self, domain: str | None) -> None:
        self.__dict__["domain"] = domain

    def subgraphs(self, recursive: bool = False) -> list[Any]:
        """Return the control-flow bodies of this node in attribute order.

        With ``recursive``, each body is followed by the bodies inside it.
        """
        bodies = subgraphs_of(self.attrs.values())
        if not recursive:
            return bodies
        return [inner for body in bodies for inner in (body, *body.subgraphs(recursive=True))]

    def copy(
        self,
        inputs: Sequence[Tensor] | None = None,
        outputs: Sequence[Tensor] | None = None,
        tensor_map: dict[str, Tensor] | None = None,
    ) -> Node:
        """Return a node with the same operator and attributes on other tensors; bodies are shared."""
        twin = Node(self.op, self.name, dict(self.attrs), list(inputs or ()), list(outputs or ()), self.domain)
        twin.source, twin.origins = self.source, self.origins
        return twin


class Variable(Identity, gs.Variable):
    """A tensor that a node computes or a caller feeds.

    Attributes:
        dtype: numpy dtype; None if it is unknown, or if this is not a tensor but a sequence, map or optional.
        shape: a number, a name or None for each dimension; None if the rank is unknown.
        source: the ValueInfoProto it was read with, or None.
        graph_output_of: the graphs that list it among their outputs.
    """

    name: str
    dtype: Any
    shape: Shape | None
    inputs: list[Any]
    outputs: list[Any]
    source: ValueInfoProto | None = None
    graph_output_of: Sequence[Any] = ()

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
        tensor_data = as_tensor_data(values, export_dtype)
        for name in ("dtype", "shape", "type", "source"):
            self.__dict__.pop(name, None)
        self.__class__ = Constant
        self.__dict__.update(_values=tensor_data, data_location=None, _export_dtype=None)
        return self

    def take_type(self, declared: Variable) -> None:
        """Take over the type and shape of another tensor, and the declaration that these were read from."""
        self.dtype, self.shape, self.source = declared.dtype, declared.shape, declared.source

    def copy(self) -> Variable:
        """Return a tensor with the same name, type and shape, without producers and consumers."""
        twin = Variable(self.name, self.dtype, None if self.shape is None else list(self.shape), self.type)
        twin.source = self.source
        return twin


class Constant(Identity, gs.Constant):
    """A tensor whose values are stored in the model.

    Attributes:
        overridable_input: the graph input that lets a caller override it, or None.
        declared_unused: whether nothing used it when read; it is then written although nothing uses it.
        graph_output_of: the graphs that list it among their outputs.
    """

    name: str
    inputs: list[Any]
    outputs: list[Any]
    graph_output_of: Sequence[Any] = ()
    overridable_input: ValueInfoProto | None = None
    declared_unused: bool = False

    def __init__(
        self,
        name: str,
        values: npt.NDArray[Any] | LazyValues,
        data_location: int | None = None,
        export_dtype: object = None,
    ) -> None:
        links = {"inputs": _links(self, "outputs"), "outputs": _links(self, "inputs")}
        self.__dict__.update(
            links, name=name, _values=as_tensor_data(values, export_dtype), data_location=None, _export_dtype=None
        )

    @property
    def tensor_data(self) -> TensorData:
        """The values in the form in which they are stored."""
        data = self._values
        assert isinstance(data, TensorData), "restore_classes() converts what stock GraphSurgeon code assigns"
        return data

    @property
    def values(self) -> npt.NDArray[Any]:
        """The values as an array, loaded anew each time. It is read-only unless an array was assigned."""
        return self.tensor_data.load()

    @values.setter
    def values(self, values: npt.NDArray[Any] | LazyValues) -> None:
        self._values = as_tensor_data(values)

    @property
    def shape(self) -> tuple[int, ...]:
        """The dimensions, without loading the values."""
        return self.tensor_data.shape

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The numpy dtype, without loading the values."""
        return self.tensor_data.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the stored values; 0 for strings."""
        return self.tensor_data.nbytes

    def to_variable(self, dtype: object = None, shape: Sequence[int | str] | None = None) -> Variable:
        """Turn this tensor into a Variable in place, as GraphSurgeon does."""
        known_dtype = self.dtype if dtype is None else dtype
        for name in ("_values", "_export_dtype", "data_location", "overridable_input", "declared_unused"):
            self.__dict__.pop(name, None)
        self.__class__ = Variable
        self.__dict__.update(dtype=known_dtype, shape=list(shape or ()), type="tensor_type")
        return self

    def copy(self) -> Constant:
        """Return a tensor with the same name and declaration that shares the data, without consumers."""
        twin = Constant(self.name, self.tensor_data)
        twin.overridable_input, twin.declared_unused = self.overridable_input, self.declared_unused
        return twin

    def __repr__(self) -> str:
        return f"Constant({self.name!r}, {self.tensor_data!r})"

    __str__ = __repr__


def constant(name: str, array: npt.ArrayLike) -> Constant:
    """Return a new Constant.

    >>> constant("scale", np.float32(0.5)).shape
    ()
    """
    return Constant(name, np.asarray(array))


def become_constant(variable: Variable, tensor_data: TensorData) -> Constant:
    """Turn a variable into a constant in place, so that all its consumers read the data.

    If a producer has other outputs, a new variable named ``x.unused`` takes the place of ``x`` among its outputs.
    """
    for producer in dict.fromkeys(variable.inputs):
        # Some kernels, such as Split's, crash if an output in the middle is omitted.
        others = any(output.name for output in producer.outputs if output is not variable)
        for index, output in enumerate(producer.outputs):
            if output is variable:
                blank = Variable(f"{variable.name}.unused" if others else "")
                list.__setitem__(producer.outputs, index, blank)
                list.append(blank.inputs, producer)
    list.clear(variable.inputs)
    return variable.to_constant(tensor_data)


def onnx_dtype(tensor: Tensor) -> int:
    """Return the ``TensorProto.DataType`` of a tensor; 0 if unknown.

    >>> onnx_dtype(Variable("x", np.float32)), onnx_dtype(Variable("y"))
    (1, 0)
    """
    return tensor.tensor_data.onnx_dtype if isinstance(tensor, Constant) else data_type_of(tensor.dtype)
