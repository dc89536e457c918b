"""Whether onnxruntime's QMoE multiplies the quantized experts of a MoE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from onnx import TensorProto

from onnxq.ir import Node, onnx_dtype, optional_input
from onnxq.lowering import AllowedOps, kernel_supports
from onnxq.planning.plan import Weight
from onnxq.runtime.sessions import multiplies_experts

# The inputs of a MoE that hold the two weights of each expert, and those of a third, which the processor's kernel does
# not take.
_EXPERTS: Final = (2, 4)
_THIRD: Final = (6, 7)
_RANK: Final = 3
_FLOATS: Final = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16})
# What the processor's kernel computes; gates and values of swiglu must take turns.
_ACTIVATIONS: Final = frozenset({"gelu", "identity", "relu", "silu", "swiglu"})
_INTERLEAVED: Final = 1
_UNKNOWN: Final = ("swiglu_limit_after_activation", "use_sparse_mixer")


def is_moe(node: Node) -> bool:
    """Return whether a node is a MoE of onnxruntime."""
    return (node.domain, node.op) == ("com.microsoft", "MoE")


def weights_of_experts(weights: Sequence[Weight]) -> tuple[Weight, ...]:
    """Return the weights of a MoE that are multiplied; its biases may be stored quantized, too."""
    return tuple(weight for weight in weights if weight.index in _EXPERTS)


def experts_obstacle(node: Node, weights: Sequence[Weight], emit: AllowedOps, *, in_body: bool) -> str:
    """Return why no QMoE multiplies the quantized weights of a MoE; an empty string if one does.

    Args:
        node: a MoE.
        weights: those of its experts.
        emit: operators that the written model may contain.
        in_body: whether the node is in a control-flow subgraph.
    """
    if not emit.has_own:
        return "standard ONNX multiplies no quantized experts; onnxruntime's QMoE does, with --emit ort"
    if not multiplies_experts():
        return "QMoE multiplies quantized experts since onnxruntime 1.32"
    if in_body:
        return "QMoE is not written in bodies of control flow"
    return _form_obstacle(node) or _weights_obstacle(node, weights)


def _form_obstacle(node: Node) -> str:
    if any(optional_input(node, index) is not None for index in _THIRD):
        return "QMoE has no kernel for a third weight of each expert"
    activation = node.attrs.get("activation_type", "relu")
    fusion = int(node.attrs.get("swiglu_fusion", 0))
    if activation not in _ACTIVATIONS or (activation == "swiglu" and fusion != _INTERLEAVED):
        return f"QMoE has no kernel for {activation} with swiglu_fusion {fusion}"
    unknown = next((name for name in _UNKNOWN if node.attrs.get(name, 0)), "")
    return f"QMoE has no kernel for {unknown}" if unknown else ""


def _weights_obstacle(node: Node, weights: Sequence[Weight]) -> str:
    if tuple(weight.index for weight in weights) != _EXPERTS:
        return "QMoE takes experts whose weights both are constants that are large enough to be quantized"
    spec, tensors = weights[0].spec, [node.inputs[weight.index] for weight in weights]
    if spec != weights[1].spec or not kernel_supports(spec, node.op):
        return "QMoE takes experts of 4 or 8 bits in blocks of 16, 32, 64 and so on"
    dtypes = {onnx_dtype(tensor) for tensor in tensors}
    if not dtypes <= _FLOATS or any(len(tensor.shape) != _RANK for tensor in tensors):
        return "QMoE takes experts of float32 or float16 and of rank 3"
    if TensorProto.FLOAT16 in dtypes and (spec.two_level or spec.scale not in ("float32", "float16")):
        return "float16 activations are multiplied by experts with float16 scales only"
    assert isinstance(spec.granularity, tuple), "kernels read blocks"
    block, extents = spec.granularity[0], [tensor.shape[-1] for tensor in tensors]
    if part := next((extent for extent in extents if extent % block), 0):
        return f"QMoE takes whole blocks, and {part} values are not whole blocks of {block}"
    # With one block a row, its zero points have another layout.
    return "QMoE takes zero points of two blocks and more" if block in extents and not spec.symmetric else ""
