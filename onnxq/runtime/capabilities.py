"""Describe what a runtime can do: its fast kernels, and the quantized values that it reads."""

from __future__ import annotations

from dataclasses import dataclass

from onnxq.numerics.pairs import Pairs
from onnxq.numerics.spec import QuantSpec


@dataclass(frozen=True)
class Fused:
    """Nodes that a runtime fuses into one integer kernel.

    Attributes:
        ops: op types that run as integer kernels if DequantizeLinear precedes every data input and QuantizeLinear
            follows the output.
        float_output: op types whose kernel can also output float, so that the output needs no QuantizeLinear.
        either_output: op types whose kernel outputs float as fast as quantized values if not all consumers are integer.
        clamps: op types that are absorbed between an integer kernel and the QuantizeLinear after it.
    """

    ops: frozenset[str]
    float_output: frozenset[str] = frozenset()
    either_output: frozenset[str] = frozenset()
    clamps: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Kernels:
    """The fast kernels of a runtime.

    Attributes:
        fused: nodes that it fuses into one integer kernel.
        dynamic: op types that are fast with dynamic quantization.
        own_dynamic: op types with dynamic quantization only as operators of the runtime, which are written on request.
        multiplied: specs of weights that a kernel multiplies with float activations, from the finest to the coarsest.
        in_bodies: whether integer kernels are known to be fused in control-flow subgraphs too.
        half: whether it computes in 16-bit floats, rather than in float32 between casts.
        prefers_convolutions: whether a convolution is faster than the matrix multiplication of a pooled image and than
            a transposed convolution of few channels.
        pairs: which products of uint8 activations and int8 weights in a convolution are added in 16 bits, by the
            runtime or by onnxruntime, which evaluates plans for all targets. Products of matrices are then added so
            too. On x86 processors without VNNI, MLAS adds in 16 bits (ONNX Runtime documentation, "Quantize ONNX
            Models", data type selection).
        opset: lowest opset of models with integer kernels, for the operators that it fuses beside them.
        wide: whether its integer kernels take activations of 16 bits, with a power of two as the scale of outputs of
            Sigmoid and Tanh; others dequantize such activations and compute in float.
    """

    fused: Fused
    dynamic: frozenset[str] = frozenset()
    own_dynamic: frozenset[str] = frozenset()
    multiplied: tuple[QuantSpec, ...] = ()
    in_bodies: bool = False
    half: bool = False
    prefers_convolutions: bool = False
    pairs: Pairs = Pairs.ROW
    # QuantizeLinear and DequantizeLinear have per-axis scales since this opset.
    opset: int = 13
    wide: bool = False


@dataclass(frozen=True)
class ReadQuantized:
    """The quantized values that a runtime reads as the ONNX standard says.

    Attributes:
        fewest_bits: minimum bits of any weight.
        static_bits: minimum bits of weights between quantized activations.
        multiplied_bits: minimum bits of weights that its integer kernels multiply; others are dequantized in each run.
        negative_scales: whether scales of weights may be negative.
        words: whether it shifts and masks uint32 correctly.
        integer_bias: whether a bias may be int32 before a DequantizeLinear.
        constants: op types whose weights must be constants; values of 8 bits and fewer are not folded to constants.
        whole_blocks: whether it reads blocks only if all blocks are full.
        looks_up: whether looking up quantized rows of a large table is better than dequantizing the table at load,
            which takes as much memory as floats, and load time.
        wide: whether it reads activations of 16 bits.
    """

    fewest_bits: int = 2
    static_bits: int = 4
    multiplied_bits: int = 8
    negative_scales: bool = True
    words: bool = True
    integer_bias: bool = True
    constants: frozenset[str] = frozenset()
    whole_blocks: bool = False
    looks_up: bool = False
    wide: bool = True
