"""Operators on constants, computed one by one: by numpy where it computes the same bits, by onnxruntime where not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from onnx import TensorProto, helper

from onnxq.errors import ModelError
from onnxq.ir import ArrayPayload, Graph, Node, Payload, Tensor, Variable, to_model
from onnxq.numerics.formats import FORMATS
from onnxq.rewrite.constants.linear import Array, dequantize_linear
from onnxq.rewrite.constants.moves import VIEWS, view_of
from onnxq.rewrite.constants.payloads import derived
from onnxq.runtime.sessions import open_session, run

# They move elements and do not look at them, so any type can pass as unsigned integers of its size.
_MOVERS: Final = VIEWS | {"Concat", "DepthToSpace", "Expand", "Gather", "SpaceToDepth", "Split", "Tile"}
# numpy's number for types that a package adds.
_ADDED = 2


def is_small(dtype: np.dtype[Any]) -> bool:
    """Whether numpy itself does not have the type, but ml_dtypes adds it: bfloat16, 8-bit floats and below."""
    return dtype.isbuiltin == _ADDED


@dataclass(frozen=True, eq=False)
class Step:
    """One operator of what is computed from constants, kept when its node is gone.

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


def _source(tensor: Tensor) -> Payload | Variable | None:
    if isinstance(tensor, Variable):
        return tensor if tensor.name else None
    return tensor.payload


def is_numpys(step: Step, given: Sequence[Payload | None]) -> bool:
    """Whether numpy computes a step of these inputs as onnxruntime does."""
    types = [payload.dtype for payload in given if payload is not None]
    if not types or given[0] is None:
        return False
    if step.op == "Cast":
        return _is_numpys_cast(types[0], step.attributes.get("to"))
    if step.op in _SAME_TYPED:
        return len(types) == len(given) and len(set(types)) == 1 and (types[0].kind in "iuf" or is_small(types[0]))
    return step.op in VIEWS or step.op == "Shape" or step.op in _NUMPY


def compute(step: Step, given: Sequence[Payload | None], opset: int) -> list[Payload]:
    """Compute one step; what only moves or casts the elements of a large input is computed when it is asked for.

    Args:
        step: what is computed.
        given: its inputs, None where one is left out.
        opset: version of the default domain that it is written in.

    Returns:
        Its outputs, in order; empty where the step leaves one out.

    Raises:
        ModelError: it cannot be computed.
    """
    if is_numpys(step, given):
        try:
            with np.errstate(all="ignore"):
                found = _by_numpy(step, given, opset)
        except (AttributeError, TypeError, ValueError, IndexError, OverflowError) as error:
            raise ModelError(f"{error}; check the model") from error
        if found is not None:
            return [found]
    arrays = [None if payload is None else payload.load() for payload in given]
    small = next((array.dtype for array in arrays if array is not None and is_small(array.dtype)), None)
    if step.op not in _MOVERS or small is None:
        return [_payload(found) for found in _by_onnxruntime(step, arrays, opset)]
    plain = [a if a is None or not is_small(a.dtype) else a.view(f"u{a.itemsize}") for a in arrays]
    return [ArrayPayload(array.view(small)) for array in _by_onnxruntime(step, plain, opset)]


def _by_numpy(step: Step, given: Sequence[Payload | None], opset: int) -> Payload | None:
    first = given[0]
    assert first is not None, "only steps with a first input are numpy's"
    if step.op == "Shape":
        ends = slice(step.attributes.get("start"), step.attributes.get("end"))
        return ArrayPayload(np.array(first.shape[ends], np.int64))
    if step.op == "Cast":
        dtype = helper.tensor_dtype_to_np_dtype(step.attributes["to"])
        return derived(first, lambda array: array.astype(dtype, copy=False), dtype)
    parameters = [None if payload is None else payload.load() for payload in given[1:]]
    if step.op in VIEWS:
        view = view_of(step.op, step.attributes, parameters, opset)
        return None if view is None else derived(first, view)
    return ArrayPayload(np.asarray(_NUMPY[step.op](step.attributes, first.load(), *parameters)))


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


def _payload(found: Any) -> Payload:
    """Return a payload of a result, which numpy can only hold when it is a tensor."""
    if not isinstance(found, np.ndarray):
        raise ModelError("it makes no tensor")
    return ArrayPayload(found)


def _is_numpys_cast(dtype: np.dtype[Any], wanted: object) -> bool:
    """Whether numpy rounds as onnxruntime does; what becomes of floats that an integer does not hold is open."""
    if not isinstance(wanted, int) or wanted not in _CAST_TO or dtype.kind in "OSU":
        return False
    target = helper.tensor_dtype_to_np_dtype(wanted)
    twice_rounded = dtype == np.float64 and target.itemsize < np.dtype(np.float32).itemsize
    return not twice_rounded and (dtype.kind != "f" or target.kind == "f" or is_small(target))


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


_SAME_TYPED: Final = frozenset({"Add", "Mul", "Sub"})
_NUMPY: Final[Mapping[str, Callable[..., Array]]] = {
    "Add": lambda _, left, right: left + right,
    "DequantizeLinear": _dequantize,
    "Mul": lambda _, left, right: left * right,
    "Sub": lambda _, left, right: left - right,
}
