"""What constant codes mean: the float values of weights, equal bit for bit to what onnxruntime computes from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, helper

from onnxq.errors import ModelError, OnnxqError
from onnxq.graph import ArrayPayload, Graph, Names, Node, Payload, Tensor, Variable, to_model
from onnxq.numbers.formats import FORMATS
from onnxq.runtime import open_session, run

Array = npt.NDArray[Any]

# They move elements and do not look at them, so any type can pass as unsigned integers of its size.
_MOVERS: Final = frozenset(
    {
        "Concat",
        "DepthToSpace",
        "Expand",
        "Flatten",
        "Gather",
        "Identity",
        "Reshape",
        "Slice",
        "SpaceToDepth",
        "Split",
        "Squeeze",
        "Tile",
        "Transpose",
        "Unsqueeze",
    }
)
# Results of fewer bytes are computed at once and kept.
_SMALL = 1 << 16
# numpy's number for types that a package adds.
_ADDED = 2
# What onnxq and onnxruntime.quantization append to the name of a weight.
_SUFFIXES: Final = (".codes", "_quantized")


@dataclass(frozen=True, eq=False, repr=False)
class ComputedPayload(Payload):
    """Values that are computed whenever they are asked for, so that a model of them need not fit into memory.

    Attributes:
        onnx_dtype: ``TensorProto.DataType`` of the elements.
        shape: the dimensions.
        compute: returns the values.
    """

    onnx_dtype: int
    shape: tuple[int, ...]
    compute: Callable[[], Array]

    def load(self) -> Array:
        """Return the values, computed anew.

        Raises:
            ModelError: they cannot be computed, or have another type or shape than the model says.
        """
        found = ArrayPayload(_sound(self.compute))
        if (found.onnx_dtype, found.shape) != (self.onnx_dtype, self.shape):
            raise ModelError(f"decoding a weight gave {found}, but the model says {self}; correct its declarations")
        return found.array

    def chunks(self) -> Iterator[memoryview]:
        """Yield the raw data in order."""
        yield from ArrayPayload(self.load()).chunks()


def is_small(dtype: np.dtype[Any]) -> bool:
    """Whether numpy itself does not have the type, but ml_dtypes adds it: bfloat16, 8-bit floats and below."""
    return dtype.isbuiltin == _ADDED


def computed(compute: Callable[[], Array], onnx_type: int = 0, shape: Sequence[object] | None = None) -> Payload:
    """Return a payload of what ``compute`` gives; large values are not kept where type and shape are known."""
    sizes = tuple(size for size in shape or () if isinstance(size, int))
    if onnx_type and shape is not None and len(sizes) == len(shape):
        payload = ComputedPayload(onnx_type, sizes, compute)
        return payload if payload.nbytes >= _SMALL else ArrayPayload(payload.load())
    found = ArrayPayload(_sound(compute))
    return ComputedPayload(found.onnx_dtype, found.shape, compute) if found.nbytes >= _SMALL else found


def _sound(compute: Callable[[], Array]) -> Array:
    """Compute; what numpy refuses is a fault of the model."""
    try:
        return compute()
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"codes, scale and zero point of a weight do not fit together: {error}; check the model"
        ) from error


def value_name(codes: str, names: Names, otherwise: str = "") -> str:
    """Return and take a name for the floats behind codes: what they were called before, where that is known and free.

    >>> value_name("w.codes", Names(Graph())), value_name("c", Names(Graph()))
    ('w', 'c.values')
    """
    base = next((codes.removesuffix(suffix) for suffix in _SUFFIXES if codes.endswith(suffix)), "")
    if base and base not in names:
        return names.fresh(base)
    return otherwise or names.fresh(f"{codes}.values")


def dequantized(codes: Payload, scale: Payload, zero_point: Payload | None, axis: int = 1) -> Payload:
    """Return ``(codes - zero point) * scale`` in the type of the scale.

    Args:
        codes: of any integer or 8-bit float type.
        scale: one number, one for each index of ``axis``, or a shape that broadcasts against the codes.
        zero_point: of the scale's shape or one number; None for zero.
        axis: axis of the codes that a vector of scales lies along.
    """

    def compute() -> Array:
        zero = None if zero_point is None else zero_point.load()
        return dequantize_linear(codes.load(), scale.load(), zero, axis)

    return computed(compute, scale.onnx_dtype, codes.shape)


def dequantize_linear(
    codes: Array,
    scale: Array,
    zero_point: Array | None = None,
    axis: int = 1,
    block_size: int = 0,
    dtype: npt.DTypeLike | None = None,
) -> Array:
    """Return what ONNX's DequantizeLinear gives, computed in float32 and rounded last, as onnxruntime does.

    Args:
        codes: of any integer or small float type.
        scale: a number, a vector along ``axis``, blocks along it, or a shape that broadcasts against the codes.
        zero_point: of the scale's shape or one number; None for zero.
        axis: axis that a vector or blocks of scales lie along.
        block_size: codes along ``axis`` that share a scale; 0 when each index has its own.
        dtype: of the result; by default that of the scale.

    >>> dequantize_linear(np.array([[1, 3], [5, 7]], np.uint8), np.float32([0.5, 2]), np.uint8([1, 3]))
    array([[0., 0.],
           [2., 8.]], dtype=float32)
    """
    wanted = np.dtype(scale.dtype if dtype is None else dtype)
    spread = partial(_spread, shape=codes.shape, axis=axis, block_size=block_size)
    if zero_point is not None and codes.dtype.kind in "iu" and codes.dtype.itemsize > 2:
        # float32 does not hold every difference of codes so wide.
        codes, zero_point = np.subtract(codes, spread(zero_point), dtype=np.int64), None
    values = codes.astype(np.float32)
    if zero_point is not None:
        np.subtract(values, spread(zero_point.astype(np.float32)), out=values)
    with np.errstate(all="ignore"):
        np.multiply(values, spread(scale.astype(np.float32)), out=values)
        return values.astype(wanted, copy=False)


def _spread(parameter: Array, *, shape: tuple[int, ...], axis: int, block_size: int) -> Array:
    """Return a scale or zero point in a shape that broadcasts against the codes."""
    if parameter.size == 1:
        return parameter.reshape(())
    along = axis % len(shape) if axis < len(shape) else 0
    if block_size:
        return np.repeat(parameter, block_size, axis=along)[(slice(None),) * along + (slice(shape[along]),)]
    if parameter.ndim == 1:
        return parameter.reshape([-1 if index == along else 1 for index in range(len(shape))])
    return parameter


@dataclass(frozen=True, eq=False)
class Step:
    """One operator of a decoder, kept when its node is gone.

    Attributes:
        node: name of the node, for messages.
        op: its op type.
        attributes: its attributes.
        inputs: payloads of constants, the outputs of earlier steps, None where an optional input is left out.
        outputs: what it makes.
    """

    node: str
    op: str
    attributes: Mapping[str, Any]
    inputs: tuple[Payload | Variable | None, ...]
    outputs: tuple[Variable, ...]

    @classmethod
    def of(cls, node: Node) -> Step:
        """Return the step that a node makes."""
        return cls(node.name, node.op, dict(node.attrs), tuple(map(_source, node.inputs)), tuple(node.outputs))


def evaluate(
    steps: Sequence[Step], wanted: Variable, opset: int, given: Mapping[Variable, Array] | None = None
) -> Array:
    """Compute a decoder; onnxruntime runs what numpy does not compute the same way.

    Args:
        steps: in an order of execution.
        wanted: an output of one of them.
        opset: version of the default domain that the steps are written in.
        given: values of tensors that no step makes.

    Raises:
        ModelError: a step cannot be computed; the message names its node.
    """
    values: dict[object, Array] = dict(given or {})
    last = {source: index for index, step in enumerate(steps) for source in step.inputs}
    last[wanted] = len(steps)
    for index, step in enumerate(steps):
        arrays = [
            None if source is None else source.load() if isinstance(source, Payload) else values[source]
            for source in step.inputs
        ]
        values.update(zip(step.outputs, _compute(step, arrays, opset), strict=False))
        for source in dict.fromkeys(step.inputs):
            if last[source] == index:
                values.pop(source, None)
    return values[wanted]


def _source(tensor: Tensor) -> Payload | Variable | None:
    if isinstance(tensor, Variable):
        return tensor if tensor.name else None
    return tensor.payload


def _compute(step: Step, arrays: Sequence[Array | None], opset: int) -> Sequence[Array]:
    given = [array for array in arrays if array is not None]
    if step.op in _NUMPY and len(given) == len(arrays) and step.attributes.get("to", TensorProto.FLOAT) in _CAST_TO:
        try:
            with np.errstate(all="ignore"):
                return [np.asarray(_NUMPY[step.op](step.attributes, *given))]
        except (TypeError, ValueError) as error:
            raise ModelError(f"node {step.node} ({step.op}) decodes a weight, but {error}; check the model") from error
    small = next((array.dtype for array in given if is_small(array.dtype)), None)
    if step.op not in _MOVERS or small is None:
        return _run(step, arrays, opset)
    plain = [a if a is None or not is_small(a.dtype) else a.view(f"u{a.itemsize}") for a in arrays]
    return [array.view(small) for array in _run(step, plain, opset)]


def _run(step: Step, arrays: Sequence[Array | None], opset: int) -> Sequence[Array]:
    """Run one step in onnxruntime."""
    inputs = [
        Variable("") if array is None else Variable(f"i{index}", array.dtype, list(array.shape))
        for index, array in enumerate(arrays)
    ]
    outputs = [Variable(f"o{index}" if tensor.name else "") for index, tensor in enumerate(step.outputs)]
    wanted = [tensor for tensor in outputs if tensor.name]
    node = Node(step.op, "step", dict(step.attributes), inputs, outputs)
    graph = Graph([node], [tensor for tensor in inputs if tensor.name], wanted, "step", opset=opset)
    try:
        session = open_session(to_model(graph), threads=1, optimize=False)
        found = run(session, {f"i{index}": array for index, array in enumerate(arrays) if array is not None})
    except OnnxqError as error:
        raise ModelError(f"node {step.node} ({step.op}) decodes a weight, but {error}") from error
    results = iter(found)
    return [next(results) if tensor.name else np.empty(0) for tensor in outputs]


def _cast(attributes: Mapping[str, Any], values: Array) -> Array:
    return values.astype(helper.tensor_dtype_to_np_dtype(attributes["to"]), copy=False)


def _dequantize(attributes: Mapping[str, Any], codes: Array, scale: Array, zero_point: Array | None = None) -> Array:
    dtype = attributes.get("output_dtype")
    return dequantize_linear(
        codes,
        scale,
        zero_point,
        attributes.get("axis", 1),
        attributes.get("block_size", 0),
        helper.tensor_dtype_to_np_dtype(dtype) if dtype else None,
    )


# Rounding to a smaller float than these is left to onnxruntime.
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
    # The oldest supported onnx knows no integers of two bits.
) & set(TensorProto.DataType.values())
_NUMPY: Final[Mapping[str, Callable[..., Array]]] = {
    "Add": lambda _, left, right: left + right,
    "Cast": _cast,
    "DequantizeLinear": _dequantize,
    "Mul": lambda _, left, right: left * right,
    "Sub": lambda _, left, right: left - right,
}
