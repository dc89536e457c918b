"""Operators that a written model may contain, kernels of onnxruntime for packed weights, and the opset they need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

from onnx.helper import tensor_dtype_to_np_dtype

from onnxq.errors import check_name
from onnxq.ir import NodeBuilder, Tensor, Variable, without_absent
from onnxq.lowering.decode import is_packed, stored_format, stored_scale
from onnxq.numerics.affine import QTensor
from onnxq.numerics.formats import QuantDType, format_named
from onnxq.numerics.ort_packing import PackedWeights, pack_experts, pack_gather_blocks, pack_matmul_nbits
from onnxq.numerics.spec import QuantSpec, Storage


class AllowedOps(StrEnum):
    """The operators that a written model may contain."""

    FASTEST = "fastest"
    """As QDQ; if latency is measured, also onnxruntime's own operators where they are faster."""
    QDQ = "qdq"
    """Standard ONNX that onnxruntime executes: types without kernels are stored in another type without loss."""
    ORT = "ort"
    """onnxruntime's MatMulNBits, GatherBlockQuantized, QMoE and DynamicQuantizeLSTM where they fit, or else as QDQ."""

    @property
    def has_own(self) -> bool:
        """Whether operators of onnxruntime are allowed."""
        return self in (AllowedOps.FASTEST, AllowedOps.ORT)


def allowed_ops_named(name: str) -> AllowedOps:
    """Return the member of AllowedOps with this value; raise SchemeError if there is none."""
    check_name("emit", name, [str(member) for member in AllowedOps])
    return AllowedOps(name)


# MatMulNBits, GatherBlockQuantized and QMoE

DOMAIN: Final = "com.microsoft"

_BITS: Final = frozenset({2, 4, 8})
# QMoE multiplies 2 bits in blocks of 32 and more on some processors; elsewhere each run dequantizes them first.
_BITS_OF: Final = {"Gather": _BITS, "Gemm": _BITS, "MatMul": _BITS, "MoE": frozenset({4, 8})}
_BYTE: Final = 8
_SMALLEST_BLOCK = 16
# Activations are quantized to 8 bits per block, as in the MatMulNBits that onnxruntime fuses from a DequantizeLinear.
_ACCURACY_LEVEL = 4


def is_kernel_block(granularity: object) -> bool:
    """Whether ``granularity`` is a block along one axis whose extent is a power of two of at least 16."""
    return (
        isinstance(granularity, tuple)
        and len(granularity) == 1
        and granularity[0] >= _SMALLEST_BLOCK
        and not granularity[0] & (granularity[0] - 1)
    )


def kernel_supports(spec: QuantSpec, op_type: str) -> bool:
    """Whether MatMulNBits, GatherBlockQuantized or QMoE can replace a node of this op type."""
    format = format_named(spec.format)
    integers = not format.is_float and format.bits in _BITS_OF.get(op_type, ())
    return integers and spec.storage is Storage.NATIVE and is_kernel_block(spec.granularity)


def should_use_kernel(spec: QuantSpec, op_type: str, emit: AllowedOps, *, in_body: bool) -> bool:
    """Whether an operator of onnxruntime is written in place of a node, which may be in a control-flow body.

    onnxruntime fuses a DequantizeLinear and a matrix multiplication to the same kernel, but not in bodies. It looks up
    rows of 2 and 4 bits 2 to 5 times as fast as the standard operators that decode them (onnxruntime 1.32, embeddings
    of 30,000 rows of 384 and 1024 values). It multiplies no quantized experts but those of a QMoE, which is written in
    the main graph only.
    """
    if not kernel_supports(spec, op_type) or not emit.has_own:
        return False
    if op_type == "MoE":
        return not in_body
    faster = format_named(spec.format).bits < _BYTE if op_type == "Gather" else in_body
    return faster or emit is AllowedOps.ORT


def matmul_nbits(
    build: NodeBuilder, quantized: QTensor, spec: QuantSpec, data: Tensor, bias: Tensor | None, dtype: int
) -> Variable:
    """Append a MatMulNBits and return its output.

    The weight of shape ``[K, N]`` has blocks along its first axis, and a spec that `kernel_supports` accepts. A bias
    has ``N`` values. ``dtype`` is the ``TensorProto.DataType`` of activations and scales.
    """
    rows, columns = quantized.shape
    block_size = _block_size(spec)
    inputs = [data, *_stored(build, pack_matmul_nbits(quantized, block_size), quantized, spec, dtype)]
    if bias is not None:
        # Before the bias come two optional inputs: the zero points and the group indices.
        inputs += [Variable("")] * (5 - len(inputs)) + [bias]
    return build.then(
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


def gather_block_quantized(
    build: NodeBuilder, quantized: QTensor, spec: QuantSpec, indices: Tensor, dtype: int
) -> Variable:
    """Append a GatherBlockQuantized and return the rows.

    The embedding of rank 2 has blocks along its last axis, and a spec that `kernel_supports` accepts. ``dtype`` is the
    ``TensorProto.DataType`` of rows and scales.
    """
    block_size = _block_size(spec)
    stored, *parameters = _stored(build, pack_gather_blocks(quantized, block_size), quantized, spec, dtype)
    return build.then(
        "GatherBlockQuantized",
        "rows",
        [stored, indices, *parameters],
        domain=DOMAIN,
        gather_axis=0,
        quantize_axis=1,
        bits=quantized.format.bits,
        block_size=block_size,
    )


def stored_experts(build: NodeBuilder, quantized: QTensor, spec: QuantSpec, dtype: int) -> list[Tensor]:
    """Store a weight of a MoE, of shape ``[E, N, K]``, as QMoE reads it: its values, scales and zero points, if any.

    Its blocks lie along the last axis, with a spec that `kernel_supports` accepts. Scales have the type ``dtype`` of
    activations, whatever their format: where nodes compute them, each run may dequantize the weights first.
    """
    blobs = pack_experts(quantized, _block_size(spec))
    scales = blobs.scales.astype(tensor_dtype_to_np_dtype(dtype))
    tensors: list[Tensor] = [build.store("codes", blobs.values), build.store("scale", scales)]
    return tensors if blobs.zero_points is None else [*tensors, build.store("zero_point", blobs.zero_points)]


def qmoe(
    build: NodeBuilder,
    spec: QuantSpec,
    inputs: Sequence[Tensor],
    experts: Sequence[Sequence[Tensor]],
    biases: Sequence[Tensor | None],
    attributes: Mapping[str, Any],
) -> Variable:
    """Append a QMoE and return its output.

    Args:
        build: takes the nodes.
        spec: of both weights.
        inputs: the tokens and the scores of their experts.
        experts: both weights, see `stored_experts`.
        biases: of both weights.
        attributes: of the MoE.
    """
    absent = Variable("")
    operands = list(inputs)
    for (values, scale, *_), bias in zip(experts, biases, strict=True):
        operands += [values, scale, absent if bias is None else bias]
    # Between the weights and their zero points come three inputs of a third weight, which the kernel does not take.
    operands += [absent] * 3 + [zero_point for _, _, *zero_points in experts for zero_point in zero_points or [absent]]
    if not attributes.get("normalize_routing_weights", 0):
        # A MoE then weighs experts by the softmax of all scores, and QMoE by that of the chosen experts' scores.
        operands += [absent, build.then("Softmax", "shares", inputs[1:2], axis=-1)]
    own = {
        "expert_weight_bits": format_named(spec.format).bits,
        "block_size": _block_size(spec),
        "accuracy_level": _ACCURACY_LEVEL,
    }
    return build.then("QMoE", "experts", without_absent(operands), domain=DOMAIN, **attributes, **own)


def _block_size(spec: QuantSpec) -> int:
    assert isinstance(spec.granularity, tuple), "only blocks fit"
    return spec.granularity[0]


def _stored(build: NodeBuilder, blobs: PackedWeights, quantized: QTensor, spec: QuantSpec, dtype: int) -> list[Tensor]:
    # The operators know one level of scales, so two levels are multiplied here.
    name = spec.scale if quantized.parameters.tensor_scale is None else "float32"
    scale = stored_scale(build, blobs.scales, name, dtype)
    tensors: list[Tensor] = [build.store("codes", blobs.values), scale]
    if blobs.zero_points is not None:
        tensors.append(build.store("zero_point", blobs.zero_points))
    return tensors


# The lowest opset that can decode a weight

# The opsets since which Mul broadcasts implicitly, Pad takes its extents as an input, and BitwiseAnd unpacks words.
_MUL, _PAD, _WORDS = 7, 11, 18
# The opsets since which DequantizeLinear takes float16 scales, and blocks.
_FLOAT16_SCALE, _BLOCKS = 19, 21
_SCALE = {"float32": _MUL, "float16": _MUL, "bfloat16": 13, "ue4m3": 19, "e8m0": _MUL}


def minimum_opset(spec: QuantSpec, op_type: str, emit: AllowedOps, *, folded: bool) -> int:
    """Return the lowest opset of the default domain that has all types and operators to decode a weight.

    ``op_type`` is the operator that uses the weight; ``folded`` weights are dequantized at load.
    """
    format, blocked = format_named(spec.format), isinstance(spec.granularity, tuple)
    if folded:
        return max(_quantized_opset(spec, format), _SCALE[spec.scale], _PAD if blocked else 0)
    # It is not known here whether the node is in a body. Outside bodies the higher opset is needed.
    if should_use_kernel(spec, op_type, emit, in_body=False):
        return _SCALE[spec.scale]
    if op_type == "Gather":
        stored = _WORDS if is_packed(spec, format) else _MUL
        return max(stored, _SCALE[spec.scale], _PAD if blocked else 0)
    linear = max(format.opset, _BLOCKS if blocked else 0, _FLOAT16_SCALE if spec.scale == "float16" else 0)
    return max(linear, _SCALE[spec.scale], _WORDS if spec.storage is Storage.WORDS else 0)


def _quantized_opset(spec: QuantSpec, format: QuantDType) -> int:
    """Return the first opset whose Cast reads the stored values."""
    if spec.storage is Storage.WORDS:
        return _WORDS
    stored = stored_format(format)
    return _MUL if not stored.is_float and stored.bits >= _BYTE else stored.opset
