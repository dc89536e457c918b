"""Decoding a whole weight: by nodes that a runtime folds when it loads the model, or by DequantizeLinear."""

from __future__ import annotations

from typing import Any

from onnx import TensorProto

from onnxq.ir import Tensor, Variable, onnx_dtype
from onnxq.lowering import native, words
from onnxq.lowering.layout import Layout
from onnxq.lowering.node_chain import Chain
from onnxq.lowering.scale_tensors import scale_tensor, strict_scale, zero_point_codes, zero_point_numbers
from onnxq.numerics.affine import QTensor
from onnxq.numerics.spec import Spec, Storage


def decode_folded(
    chain: Chain, quantized: QTensor, spec: Spec, dtype: int, *, strict: bool = False, widened: bool = False
) -> Variable:
    """Append ``Cast -> [Pad] -> [Reshape] -> [Sub] -> Mul -> [Reshape] -> [Slice] -> [Cast]`` and return the weight.

    The computation is float32 in the order of ``QTensor.dequantize``, so its values are the same bit for bit; a
    weight of another type is rounded last. A runtime folds these nodes of constants when it loads the model.

    Args:
        chain: receives the nodes.
        quantized: the weight.
        spec: its spec.
        dtype: ``TensorProto.DataType`` of the weight.
        strict: whether codes keep the ONNX type of their format where onnxruntime cannot read it.
        widened: whether they pass through a wider type; see `native.numbers`.
    """
    layout = Layout.of(quantized)
    if spec.storage is Storage.WORDS:
        numbers = words.numbers(chain, quantized.codes, quantized.format)
    else:
        numbers = native.numbers(chain, quantized.codes, quantized.format, strict=strict, widened=widened)
    if layout.padded != layout.shape:
        missing = [whole - extent for whole, extent in zip(layout.padded, layout.shape, strict=True)]
        numbers = chain.pad("padded", numbers, missing)
    if layout.blocked:
        numbers = chain.reshape("split", numbers, layout.split)
    shift = zero_point_numbers(chain, quantized, layout.split_scale, in_bytes=spec.storage is Storage.WORDS)
    if shift is not None:
        numbers = chain.then("Sub", "shifted", [numbers, shift])
    scale = scale_tensor(chain, quantized, spec, layout.split_scale, TensorProto.FLOAT)
    values = chain.then("Mul", "decoded", [numbers, scale])
    if layout.blocked:
        values = chain.reshape("whole", values, layout.padded)
    for axis in layout.blocked:
        if layout.padded[axis] != layout.shape[axis]:
            values = chain.cut("cut", values, axis, layout.shape[axis])
    return values if dtype == TensorProto.FLOAT else chain.cast("rounded", values, dtype)


def is_linear(quantized: QTensor, spec: Spec) -> bool:
    """Return whether one DequantizeLinear can express a weight."""
    # Nothing takes a codebook's numbers, or those of minifloats in words, but a lookup.
    looked_up = quantized.format.is_float and (spec.storage is Storage.WORDS or quantized.format.codebook is not None)
    return Layout.of(quantized).linear is not None and not looked_up


def decode_linear(chain: Chain, quantized: QTensor, spec: Spec, dtype: int, *, strict: bool = False) -> Variable:
    """Append a DequantizeLinear and return the weight.

    Args:
        chain: receives the nodes.
        quantized: the weight, which ``is_linear``.
        spec: its spec.
        dtype: ``TensorProto.DataType`` of the weight, which the scale is cast to.
        strict: whether the scale keeps the type that it is stored in.
    """
    linear = Layout.of(quantized).linear
    assert linear is not None, "the layout is looked at first"
    typed_codes = words.typed_codes if spec.storage is Storage.WORDS else native.typed_codes
    inputs: list[Tensor] = [typed_codes(chain, quantized.codes, quantized.format)]
    attributes = {"axis": linear.axis, "block_size": linear.block_size}
    if strict:
        scale = strict_scale(chain, quantized, spec, linear.shape)
        # Scales that nodes compute are float32, which they do not say.
        made = onnx_dtype(scale) or TensorProto.FLOAT
    else:
        scale, made = scale_tensor(chain, quantized, spec, linear.shape, dtype), dtype
    if made not in (dtype, TensorProto.FLOAT):
        attributes["output_dtype"] = made = dtype
    zero_point = zero_point_codes(chain, quantized, linear.shape)
    inputs += [scale] if zero_point is None else [scale, zero_point]
    given: dict[str, Any] = {name: value for name, value in attributes.items() if value is not None}
    values = chain.then("DequantizeLinear", "decoded", inputs, **given)
    return values if made == dtype else chain.cast("rounded", values, dtype)
