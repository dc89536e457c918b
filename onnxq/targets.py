"""Targets: what a runtime fuses into integer kernels and which code types those kernels want. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from onnxq.errors import SchemeError, nearest


@dataclass(frozen=True)
class Target:
    """A runtime and device.

    Attributes:
        name: the name users write.
        activation: format of activations its integer kernels want.
        weight: format of weights.
        fused: op types that run as integer kernels when every data input and the output stand between
            DequantizeLinear and QuantizeLinear.
        float_output: op types of ``fused`` whose kernel can also give float, so that the output needs no
            QuantizeLinear of its own.
        clamps: op types that vanish between an integer kernel and the QuantizeLinear behind it.
    """

    name: str
    activation: str
    weight: str
    fused: frozenset[str]
    float_output: frozenset[str]
    clamps: frozenset[str]


# Read off the optimised graphs of single-operator models between Q and DQ on onnxruntime 1.31.1; int8 activations
# fuse the same operators, uint8 is chosen because MaxPool and Clip fuse with it since the oldest supported release.
_ONNXRUNTIME_CPU = Target(
    name="onnxruntime-cpu",
    activation="uint8",
    weight="int8-narrow",
    fused=frozenset(
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
)

TARGETS: Mapping[str, Target] = MappingProxyType({row.name: row for row in (_ONNXRUNTIME_CPU,)})
"""Every target by name."""


def target_named(name: str) -> Target:
    """Return the row of TARGETS called ``name``.

    Raises:
        SchemeError: no such target; the message suggests the nearest one.
    """
    if name not in TARGETS:
        raise SchemeError(f"target {name!r} is not one of {', '.join(TARGETS)}{nearest(name, TARGETS)}")
    return TARGETS[name]
