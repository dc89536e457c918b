"""Constant folding: single operators in numpy or onnxruntime, many steps together, and values computed on load."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, helper

from onnxq.errors import ModelError, OnnxqError
from onnxq.ir import ArrayData, Graph, Node, Tensor, TensorData, Variable, to_model
from onnxq.ir.data_types import data_type_of, numpy_dtype
from onnxq.numerics.formats import FORMATS
from onnxq.runtime.sessions import open_session, run

Array = npt.NDArray[Any]


def dequantize_linear(
    quantized: Array,
    scale: Array,
    zero_point: Array | None = None,
    axis: int = 1,
    block_size: int = 0,
    dtype: npt.DTypeLike | None = None,
) -> Array:
    """Return what ONNX's DequantizeLinear gives, computed in float32 and rounded last, as onnxruntime does.

    Args:
        quantized: quantized values of any integer or small float type.
        scale: a number, a vector along ``axis``, blocks along it, or a shape that broadcasts against ``quantized``.
        zero_point: of the scale's shape or one number; None for zero.
        axis: axis of a vector or of blocks of scales.
        block_size: entries along ``axis`` that share a scale; 0 if each index has its own.
        dtype: type of the result; None for the scale's.

    >>> dequantize_linear(np.array([[1, 3], [5, 7]], np.uint8), np.float32([0.5, 2]), np.uint8([1, 3]))
    array([[0., 0.],
           [2., 8.]], dtype=float32)
    """
    wanted = np.dtype(scale.dtype if dtype is None else dtype)
    spread = partial(_spread, shape=quantized.shape, axis=axis, block_size=block_size)
    if zero_point is not None and quantized.dtype.kind in "iu" and quantized.dtype.itemsize > 2:
        # float32 cannot represent every difference of 32-bit integers.
        quantized, zero_point = np.subtract(quantized, spread(zero_point), dtype=np.int64), None
    # A copy as an array: numpy returns scalars for differences of 0-d arrays.
    values = np.array(quantized, np.float32)
    if zero_point is not None:
        np.subtract(values, spread(zero_point.astype(np.float32)), out=values)
    with np.errstate(all="ignore"):
        np.multiply(values, spread(scale.astype(np.float32)), out=values)
        return values.astype(wanted, copy=False)


def _spread(parameter: Array, *, shape: tuple[int, ...], axis: int, block_size: int) -> Array:
    if parameter.size == 1:
        return parameter.reshape(())
    along = axis % len(shape) if axis < len(shape) else 0
    if block_size:
        return np.repeat(parameter, block_size, axis=along)[(slice(None),) * along + (slice(shape[along]),)]
    if parameter.ndim == 1:
        return parameter.reshape([-1 if index == along else 1 for index in range(len(shape))])
    return parameter


# Values computed on load ----------------------------------------------------------------------------------------------

# Results below this many bytes are computed at once and kept.
_COMPUTED_AT_ONCE = 1 << 16


@dataclass(frozen=True, eq=False, repr=False)
class LazyTensor(TensorData):
    """Values that each load computes again, so that a model of them need not fit into memory.

    Attributes:
        compute: returns the values.
    """

    onnx_dtype: int
    shape: tuple[int, ...]
    compute: Callable[[], Array]

    def load(self) -> Array:
        """Return the values, computed again.

        Raises:
            ModelError: The computation fails, or gives another type or shape than declared.
        """
        found = ArrayData(_sound(self.compute))
        if (found.onnx_dtype, found.shape) != (self.onnx_dtype, self.shape):
            raise ModelError(
                f"a dequantized weight is {found}, expected {self} as the model declares; correct its type or shape"
            )
        return found.array

    def chunks(self) -> Iterator[memoryview]:
        """Yield the raw data in order."""
        yield from ArrayData(self.load()).chunks()


def computed(compute: Callable[[], Array], onnx_type: int = 0, shape: Sequence[object] | None = None) -> TensorData:
    """Return tensor data that ``compute`` gives.

    A result of 64 KiB or more is not kept. If ``onnx_type`` and ``shape`` are given, it is not even computed now.
    """
    sizes = tuple(size for size in shape or () if isinstance(size, int))
    if onnx_type and shape is not None and len(sizes) == len(shape):
        tensor_data = LazyTensor(onnx_type, sizes, compute)
        return tensor_data if tensor_data.nbytes >= _COMPUTED_AT_ONCE else ArrayData(tensor_data.load())
    found = ArrayData(_sound(compute))
    return LazyTensor(found.onnx_dtype, found.shape, compute) if found.nbytes >= _COMPUTED_AT_ONCE else found


def _sound(compute: Callable[[], Array]) -> Array:
    """Report invalid shapes and types of the model, at which numpy raises."""
    try:
        return compute()
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"quantized values, scale and zero point of a weight do not fit together: {error}; check the model"
        ) from error


@dataclass(frozen=True, eq=False, repr=False)
class DerivedTensor(TensorData):
    """Values of another tensor in another layout or type, derived on each load.

    Attributes:
        source: the other tensor.
        derive: makes these values of the values of ``source``.
    """

    onnx_dtype: int
    shape: tuple[int, ...]
    source: TensorData
    derive: Callable[[Array], Array]

    def load(self) -> Array:
        """Return the values as a contiguous array."""
        # A loop, not recursion: a chain is as long as the chain of nodes behind it.
        derivations, source = [self.derive], self.source
        while isinstance(source, DerivedTensor):
            derivations.append(source.derive)
            source = source.source
        values = source.load()
        for derive in reversed(derivations):
            values = derive(values)
        return np.ascontiguousarray(values).reshape(self.shape)

    def chunks(self) -> Iterator[memoryview]:
        """Yield the raw data in order."""
        yield from ArrayData(self.load()).chunks()


def derived(source: TensorData, derive: Callable[[Array], Array], dtype: np.dtype[Any] | None = None) -> TensorData:
    """Return tensor data that ``derive`` makes of ``source``; results of less than 64 KiB are computed at once.

    Args:
        source: kept instead of a large result.
        derive: makes a view of any array of that shape and type, or casts each element.
        dtype: the type of a cast; None for views.

    Raises:
        ValueError: ``derive`` fails for this shape.
    """
    if source.nbytes < _COMPUTED_AT_ONCE:
        return ArrayData(np.asarray(derive(source.load())))
    if dtype is not None:
        return DerivedTensor(data_type_of(dtype), source.shape, source, derive)
    # A broadcast single element gives the shape without loading values.
    shape = derive(np.broadcast_to(np.zeros((), source.dtype), source.shape)).shape
    return DerivedTensor(source.onnx_dtype, shape, source, derive)


# Operators that are views ---------------------------------------------------------------------------------------------

View = Callable[[Array], Array]
"""Function from an array to a view of it."""

_OPEN_ENDS: Final = (np.iinfo(np.int32).max, np.iinfo(np.int64).max)
"""Ends of a Slice that mean "to the end": in ONNX for positive steps only, in onnxruntime for all."""


def view_of(op: str, attributes: Mapping[str, Any], parameters: Sequence[Array | None]) -> View | None:
    """Return the view that an operator of the default domain makes of its first input, or None for other operators.

    Args:
        op: its op type.
        attributes: its attributes.
        parameters: its other inputs; None for an absent one.

    >>> view = view_of("Transpose", {"perm": [1, 0]}, [])
    >>> view(np.array([[1, 2], [3, 4]])).tolist()
    [[1, 3], [2, 4]]
    """
    return (lambda array: _VIEWS[op](array, attributes, parameters)) if op in _VIEWS else None


def _identity(array: Array, _: Mapping[str, Any], __: Sequence[Array | None]) -> Array:
    return array


def _transpose(array: Array, attributes: Mapping[str, Any], _: Sequence[Array | None]) -> Array:
    return array.transpose(attributes.get("perm"))


def _flatten(array: Array, attributes: Mapping[str, Any], _: Sequence[Array | None]) -> Array:
    axis = attributes.get("axis", 1)
    if not -array.ndim <= axis <= array.ndim:
        raise ValueError(f"there is no axis {axis}")
    axis = axis + array.ndim if axis < 0 else axis
    return array.reshape(math.prod(array.shape[:axis]), math.prod(array.shape[axis:]))


def _reshape(array: Array, attributes: Mapping[str, Any], parameters: Sequence[Array | None]) -> Array:
    wanted = _parameter(attributes, "shape", parameters, 0)
    if wanted is None:
        raise ValueError("it has no shape")
    if attributes.get("allowzero", 0):
        return array.reshape(wanted)
    return array.reshape([array.shape[axis] if extent == 0 else extent for axis, extent in enumerate(wanted)])


def _squeeze(array: Array, attributes: Mapping[str, Any], parameters: Sequence[Array | None]) -> Array:
    axes = _parameter(attributes, "axes", parameters, 0)
    return array.squeeze() if axes is None else array.squeeze(tuple(axes))


def _unsqueeze(array: Array, attributes: Mapping[str, Any], parameters: Sequence[Array | None]) -> Array:
    axes = _parameter(attributes, "axes", parameters, 0)
    if axes is None:
        raise ValueError("it has no axes")
    return np.expand_dims(array, tuple(axes))


def _slice(array: Array, attributes: Mapping[str, Any], parameters: Sequence[Array | None]) -> Array:
    names = ("starts", "ends", "axes", "steps")
    starts, ends, axes, steps = (_parameter(attributes, name, parameters, place) for place, name in enumerate(names))
    if starts is None or ends is None:
        raise ValueError("it has no bounds")
    cuts = [slice(None)] * array.ndim
    for start, end, axis, step in zip_longest(
        starts, ends, range(len(starts)) if axes is None else axes, [1] * len(starts) if steps is None else steps
    ):
        cuts[axis] = _cut(array.shape[axis], start, end, step)
    return array[tuple(cuts)]


def _cut(extent: int, start: int, end: int, step: int) -> slice:
    if step < 0 and end in _OPEN_ENDS:
        raise ValueError("runtimes do not agree where a Slice that steps backwards to no end stops")
    start, end = (bound + extent if bound < 0 else bound for bound in (start, end))
    if step > 0:
        return slice(max(start, 0), max(end, 0), step)
    start = min(max(start, 0), extent - 1)
    # Python would count an end below 0 from the end of the axis.
    return slice(start, end if end >= 0 else None, step) if extent else slice(0, 0, step)


def _parameter(
    attributes: Mapping[str, Any], name: str, parameters: Sequence[Array | None], place: int
) -> list[int] | None:
    """Return an attribute of old opsets, or the input that took its place."""
    given = parameters[place] if place < len(parameters) else None
    return attributes.get(name) if given is None else [int(number) for number in given.reshape(-1)]


_VIEWS: Final[Mapping[str, Callable[[Array, Mapping[str, Any], Sequence[Array | None]], Array]]] = {
    "Flatten": _flatten,
    "Identity": _identity,
    "Reshape": _reshape,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
VIEWS: Final = frozenset(_VIEWS)
"""Operators whose result is a view of their first input."""


# One step -------------------------------------------------------------------------------------------------------------

# They only move elements, so an unsigned integer type of the same size can replace any type.
_MOVERS: Final = VIEWS | {"Concat", "DepthToSpace", "Expand", "Gather", "SpaceToDepth", "Split", "Tile"}
# numpy's ``isbuiltin`` of types that a package adds.
_ADDED = 2


def is_small(dtype: np.dtype[Any]) -> bool:
    """Return whether ml_dtypes adds the type to numpy: bfloat16, 8-bit floats and below."""
    return dtype.isbuiltin == _ADDED


@dataclass(frozen=True, eq=False)
class Step:
    """One operator of a constant computation, independent of its node.

    Attributes:
        node: name of the node, for messages.
        inputs: data of constants, or outputs of earlier steps; None for an absent input.
    """

    node: str
    op: str
    attributes: Mapping[str, Any]
    inputs: tuple[TensorData | Variable | None, ...]
    outputs: tuple[Variable, ...]

    @classmethod
    def of(cls, node: Node) -> Step:
        """Return the step of a node."""
        return cls(node.name, node.op, dict(node.attrs), tuple(map(_source, node.inputs)), tuple(node.outputs))


def _source(tensor: Tensor) -> TensorData | Variable | None:
    if isinstance(tensor, Variable):
        return tensor if tensor.name else None
    return tensor.tensor_data


def is_numpys(step: Step, given: Sequence[TensorData | None]) -> bool:
    """Return whether numpy computes a step of these inputs as onnxruntime does."""
    types = [tensor_data.dtype for tensor_data in given if tensor_data is not None]
    if not types or given[0] is None:
        return False
    if step.op == "Cast":
        return _is_numpys_cast(types[0], step.attributes.get("to"))
    if step.op in _SAME_TYPED:
        return len(types) == len(given) and len(set(types)) == 1 and (types[0].kind in "iuf" or is_small(types[0]))
    return step.op in VIEWS or step.op == "Shape" or step.op in _NUMPY


def compute(step: Step, given: Sequence[TensorData | None], opset: int) -> list[TensorData]:
    """Compute one step. Views and casts of large inputs are computed when they are loaded.

    Args:
        step: the operator.
        given: its inputs; None for an absent one.
        opset: version of the default domain of the step.

    Returns:
        Its outputs, in order; an empty array for an absent one.

    Raises:
        ModelError: The step cannot be computed.
    """
    if is_numpys(step, given):
        try:
            with np.errstate(all="ignore"):
                found = _by_numpy(step, given)
        except (AttributeError, TypeError, ValueError, IndexError, OverflowError) as error:
            raise ModelError(f"{error}; check the model") from error
        if found is not None:
            return [found]
    arrays = [None if tensor_data is None else tensor_data.load() for tensor_data in given]
    small = next((array.dtype for array in arrays if array is not None and is_small(array.dtype)), None)
    if step.op not in _MOVERS or small is None:
        return [_payload(found) for found in _by_onnxruntime(step, arrays, opset)]
    plain = [a if a is None or not is_small(a.dtype) else a.view(f"u{a.itemsize}") for a in arrays]
    return [ArrayData(array.view(small)) for array in _by_onnxruntime(step, plain, opset)]


def _by_numpy(step: Step, given: Sequence[TensorData | None]) -> TensorData | None:
    first = given[0]
    assert first is not None, "only steps with a first input are numpy's"
    if step.op == "Shape":
        ends = slice(step.attributes.get("start"), step.attributes.get("end"))
        return ArrayData(np.array(first.shape[ends], np.int64))
    if step.op == "Cast":
        dtype = helper.tensor_dtype_to_np_dtype(step.attributes["to"])
        return derived(first, lambda array: array.astype(dtype, copy=False), dtype)
    parameters = [None if tensor_data is None else tensor_data.load() for tensor_data in given[1:]]
    if step.op in VIEWS:
        view = view_of(step.op, step.attributes, parameters)
        return None if view is None else derived(first, view)
    return ArrayData(np.asarray(_NUMPY[step.op](step.attributes, first.load(), *parameters)))


def _by_onnxruntime(step: Step, arrays: Sequence[Array | None], opset: int) -> list[Any]:
    inputs = [
        Variable("") if array is None else Variable(f"i{index}", array.dtype, list(array.shape))
        for index, array in enumerate(arrays)
    ]
    outputs = [Variable(f"o{index}" if tensor.name else "") for index, tensor in enumerate(step.outputs)]
    wanted = [tensor for tensor in outputs if tensor.name]
    node = Node(step.op, "step", dict(step.attributes), inputs, outputs)
    graph = Graph([node], [tensor for tensor in inputs if tensor.name], wanted, "step", opset=opset)
    session = open_session(to_model(graph), threads=1, optimize=False)
    found = iter(run(session, {f"i{index}": array for index, array in enumerate(arrays) if array is not None}))
    return [next(found) if tensor.name else np.empty(0) for tensor in outputs]


def _payload(found: Any) -> TensorData:
    # onnxruntime returns lists for sequences.
    if not isinstance(found, np.ndarray):
        raise ModelError("it makes no tensor")
    return ArrayData(found)


def _is_numpys_cast(dtype: np.dtype[Any], wanted: object) -> bool:
    # numpy and onnxruntime may differ where an integer type cannot hold a float.
    if not isinstance(wanted, int) or wanted not in _CAST_TO or dtype.kind in "OSU":
        return False
    target = helper.tensor_dtype_to_np_dtype(wanted)
    twice_rounded = dtype == np.float64 and target.itemsize < np.dtype(np.float32).itemsize
    return not twice_rounded and (dtype.kind != "f" or target.kind == "f" or is_small(target))


# onnxruntime rounds to smaller floats than these.
_CAST_TO: Final = frozenset(
    {
        TensorProto.BFLOAT16,
        TensorProto.DOUBLE,
        TensorProto.FLOAT,
        TensorProto.FLOAT16,
        TensorProto.INT64,
        TensorProto.UINT32,
        TensorProto.UINT64,
        *(row.onnx_type for row in FORMATS.values() if not row.is_float),
    }
    # The oldest supported onnx has no 2-bit integers.
) & set(TensorProto.DataType.values())


def _dequantize(
    attributes: Mapping[str, Any], quantized: Array, scale: Array, zero_point: Array | None = None
) -> Array:
    dtype = attributes.get("output_dtype")
    return dequantize_linear(
        quantized,
        scale,
        zero_point,
        attributes.get("axis", 1),
        attributes.get("block_size", 0),
        helper.tensor_dtype_to_np_dtype(dtype) if dtype else None,
    )


_SAME_TYPED: Final = frozenset({"Add", "Mul", "Sub"})
_NUMPY: Final[Mapping[str, Callable[..., Array]]] = {
    "Add": lambda _, left, right: left + right,
    "DequantizeLinear": _dequantize,
    "Mul": lambda _, left, right: left * right,
    "Sub": lambda _, left, right: left - right,
}


# Many steps -----------------------------------------------------------------------------------------------------------

# Largest input, in bytes, of a step that runs with others in one session.
_TOGETHER = 1 << 16
_TYPES = ("to", "dtype", "output_dtype")

Source = TensorData | Variable


@dataclass(frozen=True)
class Evaluated:
    """Results of steps.

    Attributes:
        values: of the wanted tensors, and of inputs of steps that failed.
        failed: reason for each step that failed; steps that depend on one are included.
    """

    values: Mapping[Variable, TensorData]
    failed: Mapping[Step, str]


def evaluate(
    steps: Sequence[Step], wanted: Variable, opset: int, given: Mapping[Variable, Array] | None = None
) -> Array:
    """Compute the subgraph that decodes a weight; onnxruntime runs the steps that numpy does not compute the same.

    Args:
        steps: in execution order.
        wanted: an output of one of them.
        opset: version of the default domain of the steps.
        given: values of tensors that no step makes.

    Raises:
        ModelError: A step cannot be computed. The message names its node.
    """
    found = evaluate_all(steps, [wanted], opset, given)
    for step, reason in found.failed.items():
        raise ModelError(f"node {step.node} ({step.op}) decodes a weight, but {reason}")
    return found.values[wanted].load()


def evaluate_all(
    steps: Sequence[Step],
    wanted: Collection[Variable],
    opset: int,
    given: Mapping[Variable, Array] | None = None,
    largest: int | None = None,
) -> Evaluated:
    """Compute steps; each value is kept until the last step has read it.

    Args:
        steps: in execution order.
        wanted: outputs of the steps.
        opset: version of the default domain of the steps.
        given: values of tensors that no step makes.
        largest: most bytes of a value that is kept in memory; None for any.
    """
    held: dict[Variable, TensorData] = {tensor: ArrayData(array) for tensor, array in (given or {}).items()}
    work = _Evaluation(opset, largest, set(wanted), held)
    for step in steps:
        for source in set(step.inputs):
            work.readers.setdefault(source, set()).add(step)
    for step in steps:
        work.take(step)
    work.flush()
    return Evaluated(work.values, work.failed)


@dataclass(eq=False)
class _Evaluation:
    """Steps in progress.

    Attributes:
        readers: the steps that have yet to read each source.
        lost: outputs of the failed steps.
        waiting: small steps to run in one session.
        coming: outputs of the waiting steps.
    """

    opset: int
    largest: int | None
    wanted: set[Variable]
    values: dict[Variable, TensorData]
    readers: dict[Source | None, set[Step]] = field(default_factory=dict)
    failed: dict[Step, str] = field(default_factory=dict)
    lost: set[Variable] = field(default_factory=set)
    waiting: list[Step] = field(default_factory=list)
    coming: set[Variable] = field(default_factory=set)

    def take(self, step: Step) -> None:
        waits = any(source in self.coming for source in step.inputs)
        known = [self._payload(source) for source in step.inputs if source is not None and source not in self.coming]
        if not self._fits(step, known):
            if waits:
                self.flush()
            self._alone(step)
        elif waits or not is_numpys(step, known) or _is_half_arithmetic(step, known):
            self.waiting.append(step)
            self.coming.update(step.outputs)
        else:
            self._alone(step)

    def flush(self) -> None:
        waiting, self.waiting, self.coming = self.waiting, [], set()
        pending = [waiting] if waiting else []
        while pending:
            steps = pending.pop()
            if len(steps) == 1:
                self._alone(steps[0])
            elif not self._together(steps):
                # Bisect, so that one failing step does not stop the others.
                half = len(steps) // 2
                pending += [steps[half:], steps[:half]]

    def _payload(self, source: Source | None) -> TensorData | None:
        return source if isinstance(source, TensorData) else self.values.get(source) if source is not None else None

    def _fits(self, step: Step, known: Iterable[TensorData | None]) -> bool:
        """Whether a step may share a session with others."""
        types = (numpy_dtype(kind) for name in _TYPES if isinstance(kind := step.attributes.get(name), int))
        if step.op == "DequantizeLinear" or any(dtype is not None and is_small(dtype) for dtype in types):
            return False
        return all(
            tensor_data is not None and tensor_data.nbytes <= _TOGETHER and not is_small(tensor_data.dtype)
            for tensor_data in known
        )

    def _alone(self, step: Step) -> None:
        if self._depends_on_lost(step):
            return
        try:
            found = compute(step, [self._payload(source) for source in step.inputs], self.opset)
            self._keep(step.outputs, found)
        except OnnxqError as error:
            self._fail(step, str(error))
        else:
            self._read([step])

    def _together(self, steps: Sequence[Step]) -> bool:
        able = [step for step in steps if not self._depends_on_lost(step)]
        inside = set(able)
        made = dict.fromkeys(tensor for step in able for tensor in step.outputs if tensor.name)
        needed = [tensor for tensor in made if tensor in self.wanted or self.readers.get(tensor, set()) - inside]
        try:
            found = _run(able, needed, self._payload, self.opset) if needed else []
            self._keep(needed, found)
        except OnnxqError:
            return False
        self._read(able)
        return True

    def _depends_on_lost(self, step: Step) -> bool:
        if any(source in self.lost for source in step.inputs):
            self._fail(step, "one of its inputs cannot be computed")
            return True
        return False

    def _fail(self, step: Step, reason: str) -> None:
        self.failed[step] = reason
        self.lost.update(step.outputs)

    def _keep(self, tensors: Iterable[Variable], found: Iterable[TensorData]) -> None:
        new = {tensor: tensor_data for tensor, tensor_data in zip(tensors, found, strict=False) if tensor.name}
        for tensor_data in new.values():
            if tensor_data.dtype.kind not in "fiub" and not is_small(tensor_data.dtype):
                raise ModelError(f"its result is of type {tensor_data.dtype}")
            if self.largest is not None and isinstance(tensor_data, ArrayData) and tensor_data.nbytes > self.largest:
                raise ModelError(f"its result of {tensor_data.nbytes} bytes is too large")
        self.values.update(new)

    def _read(self, steps: Iterable[Step]) -> None:
        for step in steps:
            for source in set(step.inputs):
                self.readers[source].discard(step)
        for step in steps:
            for tensor in (*step.inputs, *step.outputs):
                if isinstance(tensor, Variable) and not self.readers.get(tensor) and tensor not in self.wanted:
                    self.values.pop(tensor, None)


def _is_half_arithmetic(step: Step, known: Sequence[TensorData | None]) -> bool:
    """Whether onnxruntime may leave out the rounding of a result, as it does before a Cast."""
    return step.op in _SAME_TYPED and any(one is not None and one.dtype == np.float16 for one in known)


def _run(
    steps: Sequence[Step], needed: Sequence[Variable], payload_of: Callable[[Source], TensorData | None], opset: int
) -> list[TensorData]:
    made = {tensor for step in steps for tensor in step.outputs}
    twins: dict[Source, Variable] = {}
    feeds: dict[str, Array] = {}

    def twin(source: Source | None) -> Variable:
        if source is None or (isinstance(source, Variable) and not source.name):
            return Variable("")
        if source not in twins:
            twins[source] = Variable(f"t{len(twins)}")
            if source not in made:
                tensor_data = payload_of(source)
                assert tensor_data is not None, "a step comes after the producers of its inputs"
                twins[source].dtype, twins[source].shape = tensor_data.dtype, list(tensor_data.shape)
                feeds[twins[source].name] = tensor_data.load()
        return twins[source]

    nodes = [
        Node(step.op, f"n{index}", dict(step.attributes), list(map(twin, step.inputs)), list(map(twin, step.outputs)))
        for index, step in enumerate(steps)
    ]
    outputs = [twin(tensor) for tensor in needed]
    graph = Graph(nodes, [tensor for tensor in twins.values() if tensor.name in feeds], outputs, "steps", opset=opset)
    found = run(open_session(to_model(graph), threads=1, optimize=False), feeds)
    if not all(isinstance(array, np.ndarray) for array in found):
        raise ModelError("a result is no tensor")
    return [ArrayData(array) for array in found]
