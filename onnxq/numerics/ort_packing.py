"""The weight layouts of onnxruntime's MatMulNBits, GatherBlockQuantized and QMoE."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from onnxq.errors import SchemeError
from onnxq.numerics.affine import QTensor, QuantParams
from onnxq.numerics.formats import FORMATS
from onnxq.numerics.packing import pack_rows, pack_words, unpack_rows, unpack_words

Bytes = npt.NDArray[np.uint8]

_SMALLEST_BLOCK = 16


class PackedWeights(NamedTuple):
    """Inputs of a kernel that dequantizes blocks itself.

    Attributes:
        values: packed unsigned values.
        scales: float32, one for each block.
        zero_points: packed like `values`. None means `2 ** (bits - 1)`, the kernels' default.
    """

    values: Bytes
    scales: npt.NDArray[np.float32]
    zero_points: Bytes | None


def pack_matmul_nbits(tensor: QTensor, block_size: int) -> PackedWeights:
    """Pack a weight for MatMulNBits: transposed, with each block along `K` contiguous.

    Signed values are shifted to unsigned ones. A scale that covers several kernel blocks is repeated.

    Args:
        tensor: integers of 2, 4 or 8 bits, shape `[K, N]`.
        block_size: the kernel's block, a power of two of at least 16.

    Returns:
        values `[N, ceil(K / block_size), block_size * bits / 8]`, scales `[N, ceil(K / block_size)]`, zero points
        `[N, ceil(ceil(K / block_size) * bits / 8)]`.

    Raises:
        SchemeError: the kernel does not support the format or the blocks.
    """
    bits = _checked_bits(tensor, block_size, axis=0, kernel="MatMulNBits")
    rows, columns = tensor.shape
    blocks = -(-rows // block_size)
    words = pack_words(_unsigned(tensor.values, tensor), tensor.format, axis=0)
    filled = np.zeros((columns, blocks * block_size * bits // 32), np.uint32)
    filled[:, : len(words)] = words.T
    scales, zero_points = _per_block(tensor, block_size, axis=0)
    return PackedWeights(
        filled.astype("<u4", copy=False).view(np.uint8).reshape(columns, blocks, -1),
        np.ascontiguousarray(scales.T),
        None if zero_points is None else pack_rows(np.ascontiguousarray(zero_points.T), bits),
    )


def unpack_matmul_nbits(
    quantized: Bytes,
    scales: npt.NDArray[np.floating],
    zero_points: npt.NDArray[Any] | None,
    *,
    bits: int,
    block_size: int,
    rows: int,
) -> QTensor:
    """Return the `[K, N]` weight of a MatMulNBits node; the inverse of `pack_matmul_nbits`.

    The arguments are inputs 1 to 3 and attributes of the node; `rows` is `K`. Zero points are packed uint8, one float
    for each block, or None.

    Returns:
        Unsigned values with scales and zero points of shape `[ceil(K / block_size), N]`.
    """
    columns, blocks = quantized.shape[0], quantized.shape[1]
    words = np.ascontiguousarray(quantized.reshape(columns, -1).view("<u4").T).astype(np.uint32, copy=False)
    format = FORMATS[f"uint{bits}"]
    if zero_points is None:
        offsets: npt.NDArray[Any] = np.full((columns, blocks), 2 ** (bits - 1), np.uint8)
    elif zero_points.dtype == np.uint8:
        offsets = unpack_rows(zero_points.reshape(columns, -1), bits, blocks)
    else:
        offsets = zero_points.reshape(columns, blocks).astype(np.float32)
    scale = scales.reshape(columns, blocks).astype(np.float32)
    parameters = QuantParams(np.ascontiguousarray(scale.T), np.ascontiguousarray(offsets.T), block=(block_size, 1))
    return QTensor(unpack_words(words, format, rows, axis=0), parameters, format)


def pack_gather_blocks(tensor: QTensor, block_size: int) -> PackedWeights:
    """Pack an embedding for GatherBlockQuantized as uint8, with blocks along the last axis.

    Args:
        tensor: integers of 2, 4 or 8 bits, rank 2 or more. The operator gathers along the first axis.
        block_size: the kernel's block, a power of two of at least 16.

    Returns:
        values `[..., ceil(D * bits / 8)]`, scales `[..., ceil(D / block_size)]`, zero points
        `[..., ceil(ceil(D / block_size) * bits / 8)]`.

    Raises:
        SchemeError: the kernel does not support the format or the blocks, or a row does not fill whole bytes.
    """
    bits = _checked_bits(tensor, block_size, axis=-1, kernel="GatherBlockQuantized")
    packed = _packed_rows(tensor, block_size)
    zero_points = 0 if packed.zero_points is None else packed.scales.shape[-1]
    if message := unfilled_rows(bits, tensor.shape[-1], zero_points):
        raise SchemeError(f"{message}; use 8 bits or DequantizeLinear")
    return packed


def pack_experts(tensor: QTensor, block_size: int) -> PackedWeights:
    """Pack the experts of a MoE for QMoE, with blocks along the last axis, which is summed over.

    Args:
        tensor: integers of 4 or 8 bits, shape `[E, N, K]`; `K` is a multiple of the block.
        block_size: the kernel's block, a power of two of at least 16.

    Returns:
        values `[E, N, K * bits / 8]`, scales `[E, N, K / block_size]`, zero points
        `[E, N, ceil(K / block_size * bits / 8)]`.

    Raises:
        SchemeError: the kernel does not support the format or the blocks.
    """
    _checked_bits(tensor, block_size, axis=-1, kernel="QMoE")
    return _packed_rows(tensor, block_size)


def _packed_rows(tensor: QTensor, block_size: int) -> PackedWeights:
    bits = tensor.format.bits
    scales, zero_points = _per_block(tensor, block_size, axis=-1)
    return PackedWeights(
        pack_rows(_unsigned(tensor.values, tensor), bits),
        scales,
        None if zero_points is None else pack_rows(zero_points, bits),
    )


def unfilled_rows(bits: int, extent: int, zero_points: int) -> str:
    """Return why GatherBlockQuantized cannot read rows of this size; an empty string if it can.

    onnxruntime 1.23 silently misreads 4-bit zero points that end within a byte. It supports no 2-bit zero points; later
    versions read all.

    Args:
        bits: bits of one value.
        extent: values in a row.
        zero_points: zero points in a row; 0 if there are none.

    >>> unfilled_rows(4, 96, 0), unfilled_rows(8, 75, 5)
    ('', '')
    """
    rows = {"quantized values": extent, "zero points": zero_points if bits == 4 else 0}
    for what, count in rows.items():
        if count * bits % 8:
            return f"GatherBlockQuantized reads rows of whole bytes, and {count} {what} of {bits} bits end within one"
    return ""


def _checked_bits(tensor: QTensor, block_size: int, *, axis: int, kernel: str) -> int:
    format, shape = tensor.format, tensor.shape
    if format.is_float or format.bits not in (2, 4, 8):
        raise SchemeError(f"{kernel} reads integers of 2, 4 or 8 bits, found {format.name}; use int4, int8 or int2")
    if block_size < _SMALLEST_BLOCK or block_size & (block_size - 1):
        raise SchemeError(f"blocks of {kernel} are a power of two of at least {_SMALLEST_BLOCK}, found {block_size}")
    length = tensor.parameters.block_in(shape)[axis]
    if length % block_size and length < shape[axis]:
        raise SchemeError(f"blocks of {length} are no multiple of the {block_size} that {kernel} is to read")
    return format.bits


def _unsigned(quantized: npt.NDArray[Any], tensor: QTensor) -> Bytes:
    """Shift values or zero points of a tensor so that its lowest value becomes 0."""
    if not tensor.format.signed:
        return quantized.view(np.uint8)
    flipped: Bytes = quantized.view(np.uint8) ^ np.uint8(2 ** (tensor.format.bits - 1))
    return flipped


def _per_block(tensor: QTensor, block_size: int, axis: int) -> tuple[npt.NDArray[np.float32], Bytes | None]:
    """Return the scale and the unsigned zero point, if any, of each kernel block."""
    shape, parameters = tensor.shape, tensor.parameters
    block = parameters.block_in(shape)
    axis %= len(shape)
    places = [
        np.arange(0, extent, block_size if i == axis else 1) // length
        for i, (extent, length) in enumerate(zip(shape, block, strict=True))
    ]
    grid = np.ix_(*places)
    scale = parameters.effective_scale
    scales = scale.reshape(scale.shape or (1,) * len(shape))[grid]
    if parameters.zero_point is None:
        return scales, None if tensor.format.signed else np.zeros(scales.shape, np.uint8)
    zero_point = parameters.zero_point.reshape(scale.shape or (1,) * len(shape))[grid]
    return scales, _unsigned(zero_point, tensor) & np.uint8(2**tensor.format.bits - 1)
