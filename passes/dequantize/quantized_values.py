"""Quantized values: the floats they stand for, quantized inputs and outputs of float models, and names."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from onnxq.errors import ModelError
from onnxq.ir import Constant, Names, Node, NodeBuilder, Tensor, TensorData, Variable, onnx_dtype, optional_input
from onnxq.ir.computed_data import computed
from onnxq.numerics.affine import Array, dequantize_linear
from onnxq.numerics.blocks import along


@dataclass(frozen=True, eq=False)
class QuantizedValue:
    """The floats that a quantized tensor stands for.

    Attributes:
        value: the float tensor.
        scale: tensor of the scale.
        zero_point: tensor of the zero point, or None.
        layout: axis and block size of the scale; empty for a single number.
    """

    value: Tensor
    scale: Tensor
    zero_point: Tensor | None
    layout: tuple[int, ...] = ()

    @classmethod
    def by(cls, node: Node, value: Tensor) -> QuantizedValue:
        """Return the meaning that a QuantizeLinear or DequantizeLinear gives to quantized values."""
        scale = node.inputs[1]
        if isinstance(scale, Constant):
            single = math.prod(scale.shape) == 1
        else:
            single = any(maker.op == "DynamicQuantizeLinear" for maker in scale.inputs)
        layout = () if single else (int(node.attrs.get("axis", 1)), int(node.attrs.get("block_size", 0)))
        return cls(value, scale, optional_input(node, 2), layout)

    def agrees(self, other: QuantizedValue) -> bool:
        """Whether both have the same scale and zero point."""
        return (
            self.layout == other.layout
            and same_parameter(self.scale, other.scale)
            and same_parameter(self.zero_point, other.zero_point)
        )

    def factor(self, other: QuantizedValue) -> NDArray[np.float64] | None:
        """Return the ratio of another scale to this one, or None if it is unknown or the zero points differ.

        The ratio is a number, or has one entry for each channel in a shape that broadcasts to the floats.
        """
        if not _have_one_zero_point(self.zero_point, other.zero_point):
            return None
        here, there = (self._scales(encoded, self.value) for encoded in (self, other))
        return there / here if here is not None and there is not None and here.all() and there.all() else None

    @staticmethod
    def _scales(of: QuantizedValue, value: Tensor) -> NDArray[np.float64] | None:
        """Return the scale in a shape that broadcasts to the floats; None if it is unknown or in blocks."""
        if not isinstance(of.scale, Constant):
            return None
        scales = of.scale.values.astype(np.float64)
        if not of.layout:
            return scales.reshape(())
        axis, block = of.layout
        if block or value.shape is None:
            return None
        return along(scales, axis, len(value.shape))


def _have_one_zero_point(left: Tensor | None, right: Tensor | None) -> bool:
    """Whether both zero points are the same number, however often it is repeated."""
    if not all(isinstance(tensor, Constant | None) for tensor in (left, right)):
        return left is right
    values = (np.zeros(1) if tensor is None else tensor.values.reshape(-1) for tensor in (left, right))
    return len({int(value) for array in values for value in array}) == 1


def same_parameter(first: Tensor | None, second: Tensor | None) -> bool:
    """Return whether two scales or zero points are equal; a missing zero point is zero."""
    if first is second:
        return True
    if not all(isinstance(tensor, Constant | None) for tensor in (first, second)):
        return False
    left, right = (np.zeros(()) if tensor is None else tensor.values.squeeze() for tensor in (first, second))
    return bool(np.array_equal(left, right)) or (None in (first, second) and not left.any() and not right.any())


# --- quantized inputs and outputs of a float model ------------------------------------------------------------------

_ROUND_SINCE: Final = 11


def integer_range(dtype: np.dtype[Any]) -> tuple[int, int] | None:
    """Return the lowest and highest value of an integer type; None for other types.

    >>> integer_range(np.dtype(np.int8))
    (-128, 127)
    """
    try:
        limits = ml_dtypes.iinfo(dtype)  # type: ignore[no-untyped-call]
    except (TypeError, ValueError):
        return None
    return int(limits.min), int(limits.max)


def decode_values(
    quantized: Tensor, scale: Tensor, zero_point: Tensor | None, values: Variable, names: Names
) -> list[Node]:
    """Return `Cast -> [Sub] -> Mul`, which equals DequantizeLinear with one scale bit for bit.

    `values` has no producer yet.
    """
    new, to = NodeBuilder(values.name, names), onnx_dtype(scale) or int(TensorProto.FLOAT)
    number = new.node("Cast", "cast", [quantized], "number", to=to)
    if zero_point is not None:
        zero = new.node("Cast", "cast_zero", [zero_point], "zero", to=to)
        number = new.node("Sub", "subtract", [number, zero], "shifted")
    new.node("Mul", "multiply", [number, scale], values)
    return new.nodes


def encode_values(
    values: Tensor, scale: Tensor, zero_point: Constant, quantized: Variable, names: Names, opset: int
) -> list[Node]:
    """Return `Div -> Round -> Add -> Clip -> Cast`, which equals QuantizeLinear with one scale.

    `quantized` has no producer yet; it gets the type of `zero_point`.

    Raises:
        ModelError: the type is not an integer, or the opset has no Round.
    """
    limits = integer_range(zero_point.dtype)
    if limits is None or opset < _ROUND_SINCE:
        raise ModelError(
            f"output {quantized.name} is quantized to {zero_point.dtype} at opset {opset}, expected integers at opset "
            f"{_ROUND_SINCE} or above; upgrade the model's opset, or remove this output"
        )
    dtype = np.float32 if onnx_dtype(scale) in (0, TensorProto.FLOAT) else scale.dtype
    new = NodeBuilder(quantized.name, names)
    low, high, zero = (
        new.store(role, np.asarray(number, np.float32).astype(dtype))
        for role, number in zip(("minimum", "maximum", "zero"), (*limits, zero_point.values), strict=True)
    )
    steps: list[tuple[str, list[Tensor]]] = [("Div", [scale]), ("Round", []), ("Add", [zero]), ("Clip", [low, high])]
    for op, others in steps:
        values = new.node(op, f"encode_{op.lower()}", [values, *others], op.lower())
    new.node("Cast", "encode", [values], quantized, to=zero_point.tensor_data.onnx_dtype)
    return new.nodes


# --- constants ------------------------------------------------------------------------------------------------------

# Suffixes that onnxq and onnxruntime.quantization append to the name of a weight.
_SUFFIXES: Final = (".codes", "_quantized")


def value_name(quantized: str, names: Names, otherwise: str = "") -> str:
    """Reserve a name for dequantized values: the original name, if it is known and free.

    >>> from onnxq.ir import Graph
    >>> value_name("w.codes", Names(Graph())), value_name("c", Names(Graph()))
    ('w', 'c.values')
    """
    base = next((quantized.removesuffix(suffix) for suffix in _SUFFIXES if quantized.endswith(suffix)), "")
    if base and base not in names:
        return names.unique(base)
    return otherwise or names.unique(f"{quantized}.values")


def dequantized(quantized: TensorData, scale: TensorData, zero_point: TensorData | None, axis: int = 1) -> TensorData:
    """Return `(quantized - zero point) * scale` in the type of the scale.

    Args:
        quantized: values of any integer or 8-bit float type.
        scale: one number, one for each index of `axis`, or a shape that broadcasts against `quantized`.
        zero_point: one number, or in the shape of `scale`; None for zero.
        axis: axis of a vector of scales.
    """

    def compute() -> Array:
        zero = None if zero_point is None else zero_point.load()
        return dequantize_linear(quantized.load(), scale.load(), zero, axis)

    return computed(compute, scale.onnx_dtype, quantized.shape)


def stored_data(node: Node, tensor: Tensor) -> TensorData:
    """Return the values of a constant that a node reads.

    Raises:
        ModelError: the tensor is computed.
    """
    if not isinstance(tensor, Constant):
        raise ModelError(
            f"node {node.name} ({node.op}) reads {tensor.name}, which is computed, expected a constant; "
            "its quantized values have no float meaning that is known beforehand"
        )
    return tensor.tensor_data
