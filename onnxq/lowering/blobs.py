"""onnxruntime's own operators that multiply and look up packed codes: MatMulNBits and GatherBlockQuantized."""

from __future__ import annotations

from typing import Final

from onnxq.ir import Tensor, Variable
from onnxq.lowering.emit import Emit
from onnxq.lowering.node_chain import Chain
from onnxq.lowering.scale_tensors import stored_scale
from onnxq.numerics.affine import QTensor
from onnxq.numerics.formats import format_named
from onnxq.numerics.ort_packing import Blobs, pack_gather_blocks, pack_matmul_nbits
from onnxq.numerics.spec import Spec, Storage

DOMAIN: Final = "com.microsoft"

_BITS: Final = frozenset({2, 4, 8})
_BYTE: Final = 8
_SMALLEST_BLOCK = 16
# Data is brought to 8 bits for each block, as onnxruntime does where it makes the operator from a DequantizeLinear.
_ACCURACY_LEVEL = 4


def is_kernel_block(per: object) -> bool:
    """Return whether blocks are along one axis and a power of two that the kernels know."""
    return isinstance(per, tuple) and len(per) == 1 and per[0] >= _SMALLEST_BLOCK and not per[0] & (per[0] - 1)


def fits_blob(spec: Spec, op_type: str) -> bool:
    """Return whether one of the operators can take the place of a node of this op type."""
    format = format_named(spec.format)
    integers = not format.is_float and format.bits in _BITS
    native = spec.storage is Storage.NATIVE
    return op_type in ("Gather", "Gemm", "MatMul") and integers and native and is_kernel_block(spec.per)


def takes_blob(spec: Spec, op_type: str, emit: Emit, *, in_body: bool) -> bool:
    """Return whether one of the operators is written in the place of a node.

    Of a DequantizeLinear in front of a product onnxruntime makes the same kernel by itself, but not in bodies; rows of
    2 and 4 bits it looks up 2 to 5 times as fast as the standard operators that decode them (onnxruntime 1.32, tables
    of 30,000 rows of 384 and 1024 values).

    Args:
        spec: of the weight.
        op_type: of the node.
        emit: what may be written.
        in_body: whether the node stands in a body.
    """
    if not fits_blob(spec, op_type) or not emit.has_own:
        return False
    faster = format_named(spec.format).bits < _BYTE if op_type == "Gather" else in_body
    return faster or emit is Emit.ORT


def matmul_nbits(
    chain: Chain, quantized: QTensor, spec: Spec, data: Tensor, bias: Tensor | None, dtype: int
) -> Variable:
    """Append a MatMulNBits and return the product.

    Args:
        chain: receives the node.
        quantized: the weight of shape ``[K, N]``, in blocks along its first axis.
        spec: its spec, which ``fits_blob``.
        data: what it multiplies.
        bias: ``N`` values to add; None adds nothing.
        dtype: ``TensorProto.DataType`` of data and scales.
    """
    rows, columns = quantized.codes.shape
    block_size = _block_size(spec)
    inputs = [data, *_stored(chain, pack_matmul_nbits(quantized, block_size), quantized, spec, dtype)]
    if bias is not None:
        # In front of the bias stand the zero points and an index of groups, both optional.
        inputs += [Variable("")] * (5 - len(inputs)) + [bias]
    return chain.then(
        "MatMulNBits",
        "product",
        inputs,
        domain=DOMAIN,
        K=rows,
        N=columns,
        bits=quantized.format.bits,
        block_size=block_size,
        accuracy_level=_ACCURACY_LEVEL,
    )


def gather_block_quantized(chain: Chain, quantized: QTensor, spec: Spec, indices: Tensor, dtype: int) -> Variable:
    """Append a GatherBlockQuantized and return the rows.

    Args:
        chain: receives the node.
        quantized: the table of rank 2, in blocks along its last axis.
        spec: its spec, which ``fits_blob``.
        indices: of the rows.
        dtype: ``TensorProto.DataType`` of the rows and scales.
    """
    block_size = _block_size(spec)
    codes, *parameters = _stored(chain, pack_gather_blocks(quantized, block_size), quantized, spec, dtype)
    return chain.then(
        "GatherBlockQuantized",
        "rows",
        [codes, indices, *parameters],
        domain=DOMAIN,
        gather_axis=0,
        quantize_axis=1,
        bits=quantized.format.bits,
        block_size=block_size,
    )


def _block_size(spec: Spec) -> int:
    assert isinstance(spec.per, tuple), "only blocks fit"
    return spec.per[0]


def _stored(chain: Chain, blobs: Blobs, quantized: QTensor, spec: Spec, dtype: int) -> list[Tensor]:
    """Return codes, scales and, where there are any, zero points as tensors."""
    # Two levels are multiplied here: the operators know one.
    name = spec.scale if quantized.parameters.tensor_scale is None else "float32"
    scale = stored_scale(chain, blobs.scales, name, dtype)
    found: list[Tensor] = [chain.store("codes", blobs.codes), scale]
    if blobs.zero_points is not None:
        found.append(chain.store("zero_point", blobs.zero_points))
    return found
