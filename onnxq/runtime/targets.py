"""Targets: the operators that a runtime fuses into integer kernels, and the formats that these kernels take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from onnxq.errors import check_name
from onnxq.numerics.pairs import Pairs
from onnxq.numerics.spec import Granularity, QuantSpec
from onnxq.runtime.capabilities import Fused, Kernels, ReadQuantized


@dataclass(frozen=True)
class Target:
    """A runtime and device.

    Attributes:
        name: the name that users write.
        activation: activation spec of its integer kernels.
        weight: weight spec of its integer kernels.
        kernels: its fast kernels.
        reads: the quantized values that it reads.
        engine: name of the engine that runs it; empty if there is none on this machine.
        is_onnxruntime: whether it is onnxruntime's CPU provider. The nodes beside integer kernels are then written in
            variants that it computes fastest and does not fuse by mistake, and its own operators may be written.
    """

    name: str
    activation: QuantSpec
    weight: QuantSpec
    kernels: Kernels
    reads: ReadQuantized = field(default_factory=ReadQuantized)
    engine: str = ""
    is_onnxruntime: bool = False

    @property
    def takes_bytes(self) -> bool:
        """Whether applications hand a model to the runtime as bytes, beside which no other file lies."""
        return self.engine in ("onnxruntime-node", "onnxruntime-web")


# With scales, 8-bit blocks take 8.25 bits a value, about a quarter of float, and 4-bit blocks take 5. Their kernels in
# MLAS round each block of activations to 8 bits (ONNX Runtime contrib operators, MatMulNBits, accuracy_level 4; session
# option session.qdq_matmulnbits_accuracy_level). Scales of least squared error would make 4 bits slightly more
# accurate, but take sixty times as long to find, for every model that a search builds.
_MULTIPLIED = (QuantSpec("int8-narrow", granularity=(128,)), QuantSpec("int4", granularity=(32,)))

_PRODUCTS = frozenset({"Conv", "Gemm", "MatMul"})

# From the optimized graphs of single-operator models between Q and DQ on onnxruntime 1.31.1; HardSigmoid is an Add on
# quantized values. int8 activations fuse the same operators. uint8 is chosen because MaxPool and Clip fuse with it
# since the oldest supported release.
_ONNXRUNTIME_CPU = Target(
    name="onnxruntime-cpu",
    activation=QuantSpec("uint8", symmetric=False),
    weight=QuantSpec("int8-narrow", granularity=Granularity.CHANNEL),
    kernels=Kernels(
        fused=Fused(
            ops=_PRODUCTS
            | {"Add", "HardSigmoid", "LeakyRelu", "Mul", "Sigmoid", "Softmax"}
            | {"AveragePool", "GlobalAveragePool", "MaxPool", "ReduceMax"}
            # Operators that keep the values, or repeat them.
            | {"Concat", "DepthToSpace", "Expand", "Flatten", "Gather", "Reshape", "Resize", "Slice"}
            | {"Split", "Squeeze", "Tile", "Transpose", "Unsqueeze"},
            float_output=frozenset({"Gemm", "MatMul"}),
            clamps=frozenset({"Clip", "Relu"}),
        ),
        dynamic=frozenset({"Gemm", "MatMul"}),
        own_dynamic=frozenset({"LSTM"}),
        multiplied=_MULTIPLIED,
        # Seen in the optimized graphs of control-flow subgraphs on onnxruntime 1.23 and 1.31.1.
        in_bodies=True,
    ),
    reads=ReadQuantized(looks_up=True),
    is_onnxruntime=True,
)

# Arm adds products in 32 bits, and its dot product instructions multiply signed with signed values (ONNX Runtime
# documentation, "Quantize ONNX Models"; "Arm Architecture Reference Manual", SDOT).
_ONNXRUNTIME_CPU_ARM = replace(
    _ONNXRUNTIME_CPU, name="onnxruntime-cpu-arm", activation=QuantSpec("int8", symmetric=False)
)

# The same library with another interface.
_ONNXRUNTIME_NODE = replace(_ONNXRUNTIME_CPU, name="onnxruntime-node", engine="onnxruntime-node")

# The CPU kernels compiled to WebAssembly ("ONNX Runtime Web" README). They widen to 16 bits before multiplying and add
# in 32 bits, so 8-bit weights are safe (pull request 9191 of microsoft/onnxruntime). Quantized blocks of 8 or 4 bits
# are multiplied with float activations half as fast as floats (minilm-l3, one thread, onnxruntime-web 1.31).
_ONNXRUNTIME_WEB = replace(
    _ONNXRUNTIME_CPU,
    name="onnxruntime-web",
    engine="onnxruntime-web",
    kernels=replace(_ONNXRUNTIME_CPU.kernels, multiplied=()),
)

_CONVOLUTIONS = frozenset({"Conv", "ConvTranspose"})

# Quantized values are symmetric int8, weights from -127 on. A quantizer belongs only before weighted layers: TensorRT
# moves quantizers through pooling and reshaping, and fuses Relu, by itself (NVIDIA TensorRT documentation, "Working
# with Quantized Types" and "Explicit Quantization", layer placement). Its parser refuses DequantizeLinear of an int32
# bias (issues 3360 of NVIDIA/TensorRT and 850 of onnx/onnx-tensorrt). It has no dynamic quantization. Weights of 4 bits
# are multiplied only with float activations, in blocks (the first page, "Quantized Types"); no type has 16 bits. All
# scales have to be positive (C++ API, IDequantizeLayer).
_TENSORRT = Target(
    name="tensorrt",
    activation=QuantSpec("int8"),
    weight=_ONNXRUNTIME_CPU.weight,
    kernels=Kernels(Fused(_PRODUCTS, float_output=_PRODUCTS), half=True),
    reads=ReadQuantized(static_bits=8, negative_scales=False, integer_bias=False, wide=False),
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
            # Convolution kernels compute float consumers, such as Gelu, before they quantize. A transposed convolution
            # does so only if its input is quantized: the Sigmoid after that of ppocr-det takes a tenth of a run with
            # all else as integers.
            either_output=_CONVOLUTIONS,
            clamps=_ONNXRUNTIME_CPU.kernels.fused.clamps,
        ),
        multiplied=(QuantSpec("int8-narrow", granularity=Granularity.CHANNEL),),
        # With all nodes integer and matrix multiplications of pooled images as convolutions, models/resnet.onnx is 1.1
        # times as fast, and effnet-lite0 1.02 times.
        prefers_convolutions=True,
        # Tested on 2026.4, with AVX2: single convolutions and matrix multiplications saturate as in onnxruntime.
        pairs=Pairs.TAP,
        # It fuses HardSwish, which came with this opset. HardSigmoid and Mul would be two kernels and two layout
        # changes: ppocr-cls took 1.7 times as long.
        opset=14,
    ),
    reads=ReadQuantized(
        # Tested on 2026.4: it computes uint32 in 31 bits, rounds in shifts, and has no 2-bit types in ONNX.
        words=False,
        fewest_bits=4,
        # A model with a partial block is not converted: "DequantizeLinear doesn't support" it.
        whole_blocks=True,
        # It keeps quantized weights of these nodes and dequantizes them in each run. That is faster than reading floats
        # for large weights, and slower for small ones. Recurrent cells with quantized weights are refused ("expects
        # Constant for port 3").
        constants=_PRODUCTS | {"ConvTranspose", "GRU", "LSTM", "RNN"},
        # minilm-l3 takes 3.0 ms a run with and without it.
        looks_up=True,
    ),
    engine="openvino",
    is_onnxruntime=False,
)

# Activations are uint8 or uint16. MatMul stays float, because its weights must be uint8 with a zero point too (ONNX
# Runtime documentation, "QNN Execution Provider", supported operators and generating a quantized model). Outputs are
# quantized, because the HTP computes in nothing else. Weights may be int4 (Qualcomm AI Engine Direct documentation,
# "INT4 encodings for weights"). Scales of 16-bit Sigmoid and Tanh are those of onnxruntime's get_qnn_qdq_config.
_QNN = replace(
    _ONNXRUNTIME_CPU,
    name="qnn",
    kernels=Kernels(
        Fused(
            (_ONNXRUNTIME_CPU.kernels.fused.ops - {"HardSigmoid", "MatMul"}) | {"SpaceToDepth", "Tanh"},
            clamps=_ONNXRUNTIME_CPU.kernels.fused.clamps,
        ),
        half=True,
        wide=True,
    ),
    reads=ReadQuantized(multiplied_bits=4, negative_scales=False),
    is_onnxruntime=False,
)

_ROWS = (_ONNXRUNTIME_CPU, _ONNXRUNTIME_CPU_ARM, _ONNXRUNTIME_NODE, _ONNXRUNTIME_WEB, _TENSORRT, _OPENVINO, _QNN)

TARGETS: Mapping[str, Target] = MappingProxyType({row.name: row for row in _ROWS})
"""Every target by name."""

DEFAULT_TARGET = "onnxruntime-cpu"
"""The target whose speed is measured in this process."""


def target_named(name: str) -> Target:
    """Return the target of this name.

    >>> target_named("openvino").is_onnxruntime
    False

    Raises:
        SchemeError: the target is unknown; the message suggests the nearest name.
    """
    check_name("target", name, TARGETS)
    return TARGETS[name]
