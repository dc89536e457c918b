"""Decoders of several operators, computed: by numpy where it computes the same bits, by onnxruntime where not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from onnx import TensorProto, helper

from onnxq.dequantizing.decoding import Array, dequantize_linear
from onnxq.errors import ModelError, OnnxqError
from onnxq.graph import Graph, Node, Payload, Tensor, Variable
from onnxq.modelfile import to_model
from onnxq.numbers.formats import FORMATS
from onnxq.runtime import open_session, run

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
# numpy's number for types that a package adds.
_ADDED = 2


def is_small(dtype: np.dtype[Any]) -> bool:
    """Whether numpy itself does not have the type, but ml_dtypes adds it: bfloat16, 8-bit floats and below."""
    return dtype.isbuiltin == _ADDED


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
