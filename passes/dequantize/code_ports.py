"""Integer codes that enter or leave a float model: encoded and decoded by operators that are not quantized ones."""

from __future__ import annotations

from typing import Any, Final

import ml_dtypes
import numpy as np
from onnx import TensorProto

from onnxq.errors import ModelError
from onnxq.ir import Constant, Names, Node, Tensor, Variable, constant, onnx_dtype

_ROUND_SINCE: Final = 11


def code_range(dtype: np.dtype[Any]) -> tuple[int, int] | None:
    """Return the lowest and the highest code of an integer type; None for any other type.

    >>> code_range(np.dtype(np.int8))
    (-128, 127)
    """
    try:
        limits = ml_dtypes.iinfo(dtype)  # type: ignore[no-untyped-call]
    except (TypeError, ValueError):
        return None
    return int(limits.min), int(limits.max)


def decode_codes(codes: Tensor, scale: Tensor, zero_point: Tensor | None, values: Variable, names: Names) -> list[Node]:
    """Return ``Cast -> [Sub] -> Mul``, which computes what DequantizeLinear with one scale does, bit for bit.

    Args:
        codes: what is decoded.
        scale: one number.
        zero_point: one code; None for zero.
        values: the decoded tensor, which has no producer yet.
        names: source of new names.
    """
    to = onnx_dtype(scale) or int(TensorProto.FLOAT)
    number = Variable(names.unique(f"{values.name}.number"))
    nodes = [Node("Cast", names.unique(f"{values.name}.cast"), {"to": to}, [codes], [number])]
    if zero_point is not None:
        zero = Variable(names.unique(f"{values.name}.zero"))
        shifted = Variable(names.unique(f"{values.name}.shifted"))
        nodes += [
            Node("Cast", names.unique(f"{values.name}.cast_zero"), {"to": to}, [zero_point], [zero]),
            Node("Sub", names.unique(f"{values.name}.subtract"), {}, [number, zero], [shifted]),
        ]
        number = shifted
    return [*nodes, Node("Mul", names.unique(f"{values.name}.multiply"), {}, [number, scale], [values])]


def encode_codes(
    values: Tensor, scale: Tensor, zero_point: Constant, codes: Variable, names: Names, opset: int
) -> list[Node]:
    """Return ``Div -> Round -> Add -> Clip -> Cast``, which computes what QuantizeLinear with one scale does.

    Args:
        values: what is encoded.
        scale: one number.
        zero_point: one code of the type that codes have.
        codes: the encoded tensor, which has no producer yet.
        names: source of new names.
        opset: of the default domain.

    Raises:
        ModelError: the codes are not integers, or the opset has no Round.
    """
    limits = code_range(zero_point.dtype)
    if limits is None or opset < _ROUND_SINCE:
        raise ModelError(
            f"codes of tensor {codes.name} leave the model as {zero_point.dtype} at opset {opset}, expected integers "
            f"at opset {_ROUND_SINCE} or above; upgrade the model's opset, or remove this output"
        )
    dtype = np.float32 if onnx_dtype(scale) in (0, TensorProto.FLOAT) else scale.dtype
    low, high, zero = (
        constant(names.unique(f"{codes.name}.{role}"), np.asarray(number, np.float32).astype(dtype))
        for role, number in zip(("minimum", "maximum", "zero"), (*limits, zero_point.values), strict=True)
    )
    steps: list[tuple[str, list[Tensor]]] = [("Div", [scale]), ("Round", []), ("Add", [zero]), ("Clip", [low, high])]
    nodes: list[Node] = []
    for op, others in steps:
        made = Variable(names.unique(f"{codes.name}.{op.lower()}"))
        nodes.append(Node(op, names.unique(f"{codes.name}.encode_{op.lower()}"), {}, [values, *others], [made]))
        values = made
    to = {"to": zero_point.tensor_data.onnx_dtype}
    return [*nodes, Node("Cast", names.unique(f"{codes.name}.encode"), to, [values], [codes])]
