"""Targets: what a runtime fuses into integer kernels and which code types those kernels want. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from onnxq.errors import check_name
from onnxq.numerics.pairs import Pairs
from onnxq.numerics.spec import Granularity, QuantSpec
from onnxq.runtime.capabilities import Forms, Fused, Kernels, ReadCodes

LARGE_WEIGHT = 1 << 18
"""Values of a weight that, as floats, no core keeps close by from one step of a loop to the next."""


@dataclass(frozen=True)
class Target:
    """A runtime and device.

    Attributes:
        name: the name users write.
        activation: how its integer kernels want activations.
        weight: how they want weights.
        kernels: what it has fast kernels for.
        reads: which codes it reads.
        engine: name of the engine that runs it; empty where there is none on this machine.
        workarounds: whether what stands beside integer kernels is to be written in forms of which onnxruntime makes
            the fastest kernels, and which it does not take for something else.
        has_contrib: whether operators that only onnxruntime has may be written for it.
    """

    name: str
    activation: QuantSpec
    weight: QuantSpec
    kernels: Kernels
    reads: ReadCodes = field(default_factory=ReadCodes)
    engine: str = ""
    workarounds: bool = False
    has_contrib: bool = False

    @property
    def keeping_forms(self) -> Target:
        """The same where operators keep the form they have, though another one serves its integer kernels as a rule."""
        return replace(self, kernels=replace(self.kernels, forms=Forms()))


# Blocks of 8 bits that take 8.25 with their scale, which keeps a file of them at a quarter of its floats, and of 4 bits
# that take 5. Their kernels in MLAS round each block of data to 8 bits (ONNX Runtime contrib operators, MatMulNBits,
# accuracy_level 4; session option session.qdq_matmulnbits_accuracy_level). The least squared error would make 4 bits a
# little finer, but takes sixty times as long to find, for every model that a search builds.
_MULTIPLIED = (QuantSpec("int8-narrow", per=(128,)), QuantSpec("int4", per=(32,)))

# Read off the optimised graphs of single-operator models between Q and DQ on onnxruntime 1.31.1, HardSigmoid as the Add
# that it is on codes; int8 activations fuse the same operators, uint8 is chosen because MaxPool and Clip fuse with it
# since the oldest supported release.
_ONNXRUNTIME_CPU = Target(
    name="onnxruntime-cpu",
    activation=QuantSpec("uint8", symmetric=False),
    weight=QuantSpec("int8-narrow", per=Granularity.CHANNEL),
    kernels=Kernels(
        fused=Fused(
            ops=frozenset(
                {
                    "Add",
                    "AveragePool",
                    "Concat",
                    "Conv",
                    "DepthToSpace",
                    "Expand",
                    "Flatten",
                    "Gather",
                    "Gemm",
                    "GlobalAveragePool",
                    "HardSigmoid",
                    "LeakyRelu",
                    "MatMul",
                    "MaxPool",
                    "Mul",
                    "ReduceMax",
                    "Reshape",
                    "Resize",
                    "Sigmoid",
                    "Slice",
                    "Softmax",
                    "Split",
                    "Squeeze",
                    "Tile",
                    "Transpose",
                    "Unsqueeze",
                }
            ),
            float_output=frozenset({"Gemm", "MatMul"}),
            clamps=frozenset({"Clip", "Relu"}),
        ),
        dynamic=frozenset({"Gemm", "MatMul"}),
        own_dynamic=frozenset({"LSTM"}),
        multiplied=_MULTIPLIED,
        # Seen in the optimised graphs of bodies on onnxruntime 1.23 and 1.31.1.
        in_bodies=True,
    ),
    reads=ReadCodes(looks_up=True),
    workarounds=True,
    has_contrib=True,
)

# Arm adds the products in 32 bits, and its dot product instructions multiply signed with signed (the same page, and
# "Arm Architecture Reference Manual", SDOT).
_ONNXRUNTIME_CPU_ARM = replace(
    _ONNXRUNTIME_CPU, name="onnxruntime-cpu-arm", activation=QuantSpec("int8", symmetric=False)
)

# The same library behind another interface.
_ONNXRUNTIME_NODE = replace(_ONNXRUNTIME_CPU, name="onnxruntime-node", engine="onnxruntime-node")

# The CPU's own kernels compiled to WebAssembly ("ONNX Runtime Web" README); their products widen to 16 bits first and
# add in 32 bits, so that 8-bit weights are safe (pull request 9191 of microsoft/onnxruntime). Blocks of codes it
# multiplies with float data half as fast as floats, of 8 bits as of 4 (minilm-l3, one thread, onnxruntime-web 1.31).
_ONNXRUNTIME_WEB = replace(
    _ONNXRUNTIME_CPU,
    name="onnxruntime-web",
    engine="onnxruntime-web",
    kernels=replace(_ONNXRUNTIME_CPU.kernels, multiplied=()),
)

_PRODUCTS = frozenset({"Conv", "Gemm", "MatMul"})
_CONVOLUTIONS = frozenset({"Conv", "ConvTranspose"})

# Codes are int8 around zero, weights from -127 on, and a quantizer belongs in front of weighted layers only: it moves
# them through pooling and reshaping, and fuses Relu, by itself (NVIDIA TensorRT documentation, "Working with Quantized
# Types" and "Explicit Quantization", layer placement). Its parser refuses DequantizeLinear of an int32 bias (issues
# 3360 of NVIDIA/TensorRT and 850 of onnx/onnx-tensorrt), and no scale is computed in each run. Weights of 4 bits are
# multiplied by float data only, in blocks (the first page, "Quantized Types").
_TENSORRT = Target(
    name="tensorrt",
    activation=QuantSpec("int8"),
    weight=_ONNXRUNTIME_CPU.weight,
    kernels=Kernels(Fused(_PRODUCTS, float_output=_PRODUCTS), half=True),
    reads=ReadCodes(static_bits=8, integer_bias=False),
)

# One scale for activations, also with a zero point, and one for each channel of symmetric weights ("OpenVINO Low
# Precision Transformations", Convolution, ConvolutionBackpropData, and the preset "mixed" of its quantization);
# Sigmoid, HardSigmoid, Softmax, Expand and Tile are not among the operations through which it moves scales.
_OPENVINO = replace(
    _ONNXRUNTIME_CPU,
    name="openvino",
    kernels=Kernels(
        Fused(
            _ONNXRUNTIME_CPU.kernels.fused.ops - {"Expand", "HardSigmoid", "Sigmoid", "Softmax", "Tile"}
            | _CONVOLUTIONS,
            _ONNXRUNTIME_CPU.kernels.fused.float_output,
            # What is made of their floats, as by Gelu, they compute before they make codes; a transposed one only where
            # it reads codes: the Sigmoid behind that of ppocr-det takes a tenth of a run with all else as integers.
            either_output=_CONVOLUTIONS,
            clamps=_ONNXRUNTIME_CPU.kernels.fused.clamps,
            # HardSigmoid times its data are two kernels, and as many changes of layout: ppocr-cls took 1.7 times as
            # long.
            whole=frozenset({"HardSwish"}),
        ),
        multiplied=(QuantSpec("int8-narrow", per=Granularity.CHANNEL),),
        # Where all is integer, models/resnet.onnx is 1.1 times as fast with products of pooled images as convolutions,
        # and effnet-lite0 1.02 times. nsnet2 takes 22 instead of 48 ms as a Scan with one thread, 21 instead of 28 with
        # two.
        forms=Forms(convolves_pooled=True, pads_channels=True, scans=True),
        # Tried on 2026.4, with AVX2: single convolutions and products saturate as those of onnxruntime do.
        pairs=Pairs.TAP,
    ),
    reads=ReadCodes(
        # Tried on 2026.4: it computes uint32 in 31 bits and rounds what it shifts out, and has no 2-bit types in ONNX.
        words=False,
        fewest_bits=4,
        # Of parts it says that "DequantizeLinear doesn't support" them, and that the model is not converted.
        whole_blocks=True,
        # It keeps codes of products as they are and decodes them in each run: of large weights that is faster than to
        # read floats, of small ones slower, and cells behind codes are refused ("expects Constant for port 3").
        constants=_PRODUCTS | {"ConvTranspose", "GRU", "LSTM", "RNN"},
        # minilm-l3 takes 3.0 ms a run either way.
        looks_up=True,
    ),
    engine="openvino",
    workarounds=False,
    has_contrib=False,
)

# Activations are uint8, or uint16, which is not planned for; its MatMul wants uint8 weights as well, which have a zero
# point, so it stays float (ONNX Runtime documentation, "QNN Execution Provider", supported operators and generating a
# quantized model). Outputs are codes, as the HTP computes in nothing else; weights may be int4
# (Qualcomm AI Engine Direct documentation, "INT4 encodings for weights").
_QNN = replace(
    _ONNXRUNTIME_CPU,
    name="qnn",
    kernels=Kernels(
        Fused(
            (_ONNXRUNTIME_CPU.kernels.fused.ops - {"HardSigmoid", "MatMul"}) | {"SpaceToDepth", "Tanh"},
            clamps=_ONNXRUNTIME_CPU.kernels.fused.clamps,
        ),
        half=True,
    ),
    reads=ReadCodes(multiplied_bits=4),
    workarounds=False,
    has_contrib=False,
)

TARGETS: Mapping[str, Target] = MappingProxyType(
    {
        row.name: row
        for row in (
            _ONNXRUNTIME_CPU,
            _ONNXRUNTIME_CPU_ARM,
            _ONNXRUNTIME_NODE,
            _ONNXRUNTIME_WEB,
            _TENSORRT,
            _OPENVINO,
            _QNN,
        )
    }
)
"""Every target by name."""

DEFAULT_TARGET = "onnxruntime-cpu"
"""The target whose speed is measured where the model is quantized."""


def target_named(name: str) -> Target:
    """Return the row of TARGETS called ``name``.

    Raises:
        SchemeError: no such target; the message suggests the nearest one.
    """
    check_name("target", name, TARGETS)
    return TARGETS[name]
