"""Scales and zero points as tensors, stored in the formats that a spec names."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import TensorProto

from onnxq.ir import Tensor, onnx_dtype
from onnxq.lowering.node_chain import Chain
from onnxq.numerics.affine import Array, QTensor
from onnxq.numerics.formats import scale_format_named
from onnxq.numerics.spec import Spec


def scale_tensor(chain: Chain, quantized: QTensor, spec: Spec, shape: Sequence[int], dtype: int) -> Tensor:
    """Return the scale in a shape and type: a constant, behind nodes that fold where it is stored in another.

    Args:
        chain: receives the nodes.
        quantized: the weight.
        spec: names the format that scales are stored in.
        shape: of as many elements as there are scales.
        dtype: ``TensorProto.DataType`` of a float type.
    """
    scale = np.reshape(quantized.parameters.scale, tuple(shape))
    if quantized.parameters.tensor_scale is None:
        return stored_scale(chain, scale, spec.scale, dtype)
    number = stored_scale(chain, scale, spec.scale, TensorProto.FLOAT)
    product = chain.then("Mul", "scale.product", [number, _level(chain, quantized)])
    return product if dtype == TensorProto.FLOAT else chain.cast("scale.rounded", product, dtype)


def stored_scale(chain: Chain, scale: Array, name: str, dtype: int) -> Tensor:
    """Return scales of a float type that are stored in the scale format called ``name``.

    Powers of two are stored as bytes and looked up: their own type is younger than anything else that decodes a weight.
    """
    stored = scale.astype(scale_format_named(name).dtype)
    if name != "e8m0":
        held = chain.store("scale", stored)
        return held if onnx_dtype(held) == dtype else chain.cast("scale.number", held, dtype)
    table = chain.store("scale.table", np.arange(256, dtype=np.uint8).view(stored.dtype).astype(np.float32))
    exponents = chain.cast("scale.exponents", chain.store("scale", stored.view(np.uint8)), TensorProto.INT32)
    powers = chain.then("Gather", "scale.number", [table, exponents], axis=0)
    return powers if dtype == TensorProto.FLOAT else chain.cast("scale.rounded", powers, dtype)


def strict_scale(chain: Chain, quantized: QTensor, spec: Spec, shape: Sequence[int]) -> Tensor:
    """Return the scale in the type that it is stored in where DequantizeLinear takes that, else as float32."""
    scale = np.reshape(quantized.parameters.scale, tuple(shape))
    stored = chain.store("scale", scale.astype(scale_format_named(spec.scale).dtype))
    if spec.scale != "ue4m3" and quantized.parameters.tensor_scale is None:
        return stored
    if spec.scale == "ue4m3":
        # Numbers of 8 bits are codes to DequantizeLinear, which multiplies them by the second level.
        return chain.then("DequantizeLinear", "scale.product", [stored, _level(chain, quantized)])
    return chain.then("Mul", "scale.product", [chain.cast("scale.number", stored), _level(chain, quantized)])


def zero_point_codes(chain: Chain, quantized: QTensor, shape: Sequence[int]) -> Tensor | None:
    """Return the zero point in a shape and in the ONNX type of the codes; None where zero is code zero."""
    zero_point = quantized.parameters.zero_point
    if zero_point is None:
        return None
    return chain.store_codes("zero_point", np.reshape(zero_point, tuple(shape)), quantized.format)


def zero_point_numbers(chain: Chain, quantized: QTensor, shape: Sequence[int], *, in_bytes: bool) -> Tensor | None:
    """Return the zero point as float32 in a shape, stored in bytes where the type of the codes asks for more opset."""
    zero_point = quantized.parameters.zero_point
    if zero_point is None:
        return None
    codes = np.reshape(zero_point, tuple(shape))
    stored = chain.store("zero_point", codes) if in_bytes else chain.store_codes("zero_point", codes, quantized.format)
    return chain.cast("zero_point.number", stored)


def _level(chain: Chain, quantized: QTensor) -> Tensor:
    """Return the second level of scales, which is 1 where there is none."""
    level = quantized.parameters.tensor_scale
    return chain.store("tensor_scale", np.asarray(1.0 if level is None else level, np.float32))
