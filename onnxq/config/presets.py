"""Presets: named schemes with a line that tells what each does, data only."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from onnxq.config.scheme import Granularity, Method, Mode, QuantSpec, Rounding, Rule, Scheme, Storage
from onnxq.errors import check_name

_PER_CHANNEL = QuantSpec("int8-narrow", granularity=Granularity.CHANNEL)
_NARROW = QuantSpec("int4-narrow", granularity=Granularity.CHANNEL, method=Method.MSE)
_PER_TENSOR = QuantSpec("int8-narrow", granularity=Granularity.TENSOR)


def _blocks(format: str, extent: int, method: Method = Method.MINMAX, storage: Storage = Storage.NATIVE) -> QuantSpec:
    symmetric = not format.startswith("u")
    return QuantSpec(format, (extent,), symmetric, method=method, storage=storage)


def _microscaling(format: str) -> QuantSpec:
    """Return a format of the OCP microscaling specification: blocks of 32 that share a power of two."""
    return QuantSpec(format, (32,), scale="e8m0", scale_rounding=Rounding.FLOOR)


_NVFP4 = QuantSpec("float4e2m1", (16,), scale="ue4m3", two_level=True)


def _burn(format: str, granularity: Granularity | tuple[int, ...]) -> QuantSpec:
    return QuantSpec(format, granularity, method=Method.BURN)


def _torch(format: str, granularity: Granularity) -> QuantSpec:
    return QuantSpec(format, granularity, symmetric=not format.startswith("u"), method=Method.TORCH)


_TABLE: tuple[tuple[str, Mode, QuantSpec, str], ...] = (
    ("int8", Mode.STATIC, _PER_CHANNEL, "8-bit weights, per channel, and 8-bit activations: integer arithmetic"),
    ("int8-per-tensor", Mode.STATIC, _PER_TENSOR, "the same with one scale for each weight"),
    ("int4-int8-data", Mode.STATIC, _NARROW, "4-bit weights, per channel, and 8-bit activations, for accelerators"),
    (
        "int8-int16-data",
        Mode.STATIC,
        _PER_CHANNEL,
        "8-bit weights, per channel, and 16-bit activations (W8A16), for NPUs",
    ),
    ("int8-dynamic", Mode.DYNAMIC, _PER_CHANNEL, "8-bit weights, per channel, and activations with dynamic scales"),
    ("int8-storage", Mode.STORAGE, _PER_CHANNEL, "8-bit weights, dequantized at load: float arithmetic"),
    ("int8-block32", Mode.WEIGHT_ONLY, _blocks("int8-narrow", 32), "8-bit weights in blocks of 32, float activations"),
    ("int4-block32", Mode.WEIGHT_ONLY, _blocks("int4", 32, Method.MSE), "4-bit weights in blocks of 32"),
    ("int4-block32-rtn", Mode.WEIGHT_ONLY, _blocks("int4", 32), "the same by the range of each block: faster to make"),
    ("uint4-block32", Mode.WEIGHT_ONLY, _blocks("uint4", 32, Method.MSE), "4-bit weights with zero points"),
    (
        "uint4-hqq",
        Mode.WEIGHT_ONLY,
        _blocks("uint4", 32, Method.HQQ),
        "4-bit weights with half-quadratic zero points: slow to make, see uint4-block32",
    ),
    ("int2-block16", Mode.WEIGHT_ONLY, _blocks("int2", 16, Method.MSE), "2-bit weights in blocks of 16"),
    ("int2-block32", Mode.WEIGHT_ONLY, _blocks("int2", 32, Method.MSE), "2-bit weights in blocks of 32"),
    (
        "float8-e4m3",
        Mode.WEIGHT_ONLY,
        QuantSpec("float8e4m3fn", Granularity.CHANNEL),
        "8-bit floats of 3 mantissa bits",
    ),
    ("float8-e5m2", Mode.WEIGHT_ONLY, QuantSpec("float8e5m2", Granularity.CHANNEL), "8-bit floats of 2 mantissa bits"),
    ("mxfp8", Mode.WEIGHT_ONLY, _microscaling("float8e4m3fn"), "OCP microscaling, 8-bit floats"),
    ("mxfp6", Mode.WEIGHT_ONLY, _microscaling("float6e2m3"), "OCP microscaling, 6-bit floats, stored as 8-bit ones"),
    ("mxfp4", Mode.WEIGHT_ONLY, _microscaling("float4e2m1"), "OCP microscaling, 4-bit floats"),
    ("mxint8", Mode.WEIGHT_ONLY, _microscaling("int8-narrow"), "OCP microscaling, 8-bit integers"),
    ("nvfp4", Mode.WEIGHT_ONLY, _NVFP4, "4-bit floats in blocks of 16 with two levels of scales"),
    (
        "nf4-block64",
        Mode.WEIGHT_ONLY,
        _blocks("nf4", 64),
        "4-bit NormalFloat (QLoRA): float arithmetic",
    ),
    ("int8-words", Mode.WEIGHT_ONLY, _blocks("int8-narrow", 32, storage=Storage.WORDS), "int8-block32 in uint32 words"),
    ("int4-words", Mode.WEIGHT_ONLY, _blocks("int4", 32, Method.MSE, Storage.WORDS), "int4-block32 in uint32 words"),
    ("burn-q8s", Mode.STORAGE, _burn("int8-narrow", Granularity.TENSOR), "all parameters as Burn's Q8S per tensor"),
    ("burn-q4s", Mode.STORAGE, _burn("int4-narrow", Granularity.TENSOR), "all parameters as Burn's Q4S per tensor"),
    (
        "torch-fbgemm",
        Mode.STATIC,
        _torch("int8", Granularity.CHANNEL),
        "as PyTorch's qconfig fbgemm: 7-bit activations",
    ),
    (
        "torch-qnnpack",
        Mode.STATIC,
        _torch("int8", Granularity.TENSOR),
        "as PyTorch's qconfig qnnpack: 8-bit activations",
    ),
)

# What PyTorch's HistogramObserver makes of data; the others search for a range.
_HISTOGRAM = "histogram"
# The others take the target's format.
_ACTIVATIONS: Mapping[str, QuantSpec] = {
    "int8-int16-data": QuantSpec("uint16", symmetric=False),
    "torch-fbgemm": _torch("uint8-7bit", Granularity.TENSOR),
    "torch-qnnpack": _torch("uint8", Granularity.TENSOR),
}

PRESETS: Mapping[str, Scheme] = MappingProxyType(
    {
        name: Scheme(
            (Rule(mode, weight=weight, activation=_ACTIVATIONS.get(name)),),
            name=name,
            ranges=_HISTOGRAM if weight.method is Method.TORCH else "",
        )
        for name, mode, weight, _ in _TABLE
    }
)
"""Every preset by name."""

DESCRIPTIONS: Mapping[str, str] = MappingProxyType({name: description for name, _, _, description in _TABLE})
"""What each preset does, in one line."""


def preset_named(name: str) -> Scheme:
    """Return the scheme of PRESETS called ``name``.

    Raises:
        SchemeError: no such preset; the message suggests the nearest one.
    """
    check_name("preset", name, PRESETS)
    return PRESETS[name]
