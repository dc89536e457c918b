"""What a runtime can do: which kernels are fast, and which codes it reads."""

from __future__ import annotations

from dataclasses import dataclass

from onnxq.numerics.pairs import Pairs
from onnxq.numerics.spec import QuantSpec


@dataclass(frozen=True)
class Fused:
    """What a runtime makes one integer kernel of.

    Attributes:
        ops: op types that run as integer kernels when every data input and the output stand between DequantizeLinear
            and QuantizeLinear.
        float_output: those whose kernel can also give float, so that the output needs no QuantizeLinear of its own.
        either_output: those whose kernels give floats as fast as codes where not all want codes.
        clamps: op types that vanish between an integer kernel and the QuantizeLinear behind it.
        whole: op types that are computed in the kernel before them, unlike the nodes that others split them into.
    """

    ops: frozenset[str]
    float_output: frozenset[str] = frozenset()
    either_output: frozenset[str] = frozenset()
    clamps: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Forms:
    """Which other forms of operators a runtime has faster integer kernels for, as a rule.

    Attributes:
        convolves_pooled: whether a product of what is left of an image is faster as a convolution of one pixel.
        pads_channels: whether a transposed convolution of few channels takes as long as one of many.
        scans: whether a Scan that multiplies codes of a large weight is faster than a recurrent cell of floats.
    """

    convolves_pooled: bool = False
    pads_channels: bool = False
    scans: bool = False


@dataclass(frozen=True)
class Kernels:
    """What a runtime has fast kernels for.

    Attributes:
        fused: what it makes one integer kernel of.
        dynamic: op types that multiply integers fast when the scale of their data is computed in each run.
        own_dynamic: op types that multiply integers so, but only as operators of the runtime's own, which are written
            on wish.
        multiplied: weights that float data multiplies as codes, in one kernel, from the finest to the coarsest.
        in_bodies: whether integer kernels are known to be made in bodies of control flow too.
        half: whether it computes in 16-bit floats, rather than in float32 between casts.
        forms: other forms of operators that its integer kernels are faster with.
        pairs: which products of uint8 data and int8 weights of a convolution are added in 16 bits, by itself or by
            onnxruntime, with which plans for all are tried: on x86 processors without VNNI MLAS does so (ONNX Runtime
            documentation, "Quantize ONNX Models", data type selection). Those of matrices then as well.
    """

    fused: Fused
    dynamic: frozenset[str] = frozenset()
    own_dynamic: frozenset[str] = frozenset()
    multiplied: tuple[QuantSpec, ...] = ()
    in_bodies: bool = False
    half: bool = False
    forms: Forms = Forms()
    pairs: Pairs = Pairs.ROW


@dataclass(frozen=True)
class ReadCodes:
    """Which codes a runtime reads as the standard says.

    Attributes:
        fewest_bits: of any weight.
        static_bits: fewest bits of weights between quantizers of data.
        multiplied_bits: fewest bits of weights that its integer kernels multiply; others it decodes in each run.
        words: whether it shifts and masks uint32.
        integer_bias: whether a bias may be int32 codes behind a DequantizeLinear.
        constants: op types whose weights have to be constants, which codes of 8 bits and fewer are not folded to.
        whole_blocks: whether codes in blocks are read only where all blocks are whole.
        looks_up: whether rows of a large table had better be looked up as codes than the table decoded ahead, which
            takes as much memory as floats, and time to load.
    """

    fewest_bits: int = 2
    static_bits: int = 4
    multiplied_bits: int = 8
    words: bool = True
    integer_bias: bool = True
    constants: frozenset[str] = frozenset()
    whole_blocks: bool = False
    looks_up: bool = False
