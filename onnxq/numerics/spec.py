"""Quantization specs: how one tensor is quantized. The choices are checked against each other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from onnxq.errors import SchemeError, check_type, parse_choice
from onnxq.numerics.formats import QuantDType, format_named, scale_format_named

# Burn's blocks have at most this many axes.
_MOST_AXES = 5
_TWO_LEVEL = ("float16", "ue4m3")
_WORD_FIELDS = (2, 4, 8)
_TORCH_BITS = 8
_GPTQ_BITS = 8


class Granularity(StrEnum):
    """How many scales a tensor has.

    >>> QuantSpec("int8", Granularity.CHANNEL).granularity
    <Granularity.CHANNEL: 'channel'>
    """

    TENSOR = "tensor"
    CHANNEL = "channel"


class Rounding(StrEnum):
    """How a scale is rounded to its format."""

    UP = "up"
    """To the next larger scale, which clips nothing."""
    NEAREST = "nearest"
    """To the nearest scale."""
    FLOOR = "floor"
    """The rule of the OCP microscaling formats: ``2 ** (floor(log2(absmax)) - exponent of the format's maximum)``."""


class Method(StrEnum):
    """How scales, zero points and quantized values are chosen. Installed packages may add methods."""

    MINMAX = "minmax"
    """From the smallest and largest value."""
    MSE = "mse"
    """Least squared error: scales are fitted to integers and integers to scales; other formats try ranges."""
    HQQ = "hqq"
    """Half-quadratic quantization: scales and zero points that reduce the error of most values and ignore outliers."""
    GPTQ = "gptq"
    """Min-max scales with GPTQ: rounding errors cancel in the sums of a matrix multiplication."""
    BURN = "burn"
    """The arithmetic of Burn's Quantizer, which quantizes every float initializer, including biases and norms."""
    TORCH = "torch"
    """The arithmetic of the observers and kernels of PyTorch's eager mode."""


# These methods choose scales. The others only choose values for given scales.
_METHODS_OF_SCALES = (Method.MSE, Method.HQQ, Method.BURN, Method.TORCH)


class Storage(StrEnum):
    """How a file stores quantized values."""

    NATIVE = "native"
    """In the ONNX type of the format."""
    WORDS = "words"
    """In uint32 words, as Burn packs them."""


@dataclass(frozen=True)
class QuantSpec:
    """How one tensor is quantized.

    Attributes:
        format: a name of `FORMATS`.
        granularity: one scale for the tensor, one for each output channel, or one for each block of this shape. A
            single extent lies along the operator's reduction axis; several extents lie along the tensor's last axes.
        symmetric: whether the zero point is zero, so that none is stored.
        scale: a name of `SCALE_FORMATS`.
        scale_rounding: how scales are rounded to that format. A float32 scale is always rounded to the nearest.
        two_level: whether all scales are multiplied by one float32 scale of the tensor.
        method: a `Method`, or the name of an encoder from an installed package. The name is checked later, by the rule
            or plan that uses the spec.
        storage: how a file stores the quantized values.

    >>> QuantSpec("int8-narrow", granularity=Granularity.CHANNEL).symmetric
    True
    >>> QuantSpec("float4e2m1", granularity=(16,), scale="ue4m3", two_level=True).granularity
    (16,)
    """

    format: str
    granularity: Granularity | tuple[int, ...] = Granularity.TENSOR
    symmetric: bool = True
    scale: str = "float32"
    scale_rounding: Rounding = Rounding.UP
    two_level: bool = False
    method: str = Method.MINMAX
    storage: Storage = Storage.NATIVE

    def __post_init__(self) -> None:
        scale_format_named(self.scale)
        for name, kind in (("scale_rounding", Rounding), ("storage", Storage)):
            object.__setattr__(self, name, parse_choice(kind, name.replace("_", " "), getattr(self, name)))
        check_type(self.method, str, "the method", 'a Method such as "mse", or the name of an encoder')
        object.__setattr__(self, "method", next((method for method in Method if method == self.method), self.method))
        if not isinstance(self.granularity, (Granularity, tuple)):
            raise SchemeError(f"granularity is a Granularity or a tuple such as (32,), found {self.granularity!r}")
        if isinstance(self.granularity, tuple) and not (
            0 < len(self.granularity) <= _MOST_AXES and min(self.granularity) >= 1
        ):
            raise SchemeError(f"blocks have 1 to {_MOST_AXES} extents of at least 1, found {list(self.granularity)}")
        for wrong, sentence in _contradictions(self, format_named(self.format)):
            if wrong:
                raise SchemeError(sentence)

    @property
    def is_followed(self) -> bool:
        """Whether the spec reproduces another toolkit bit by bit, so that nothing may be optimized."""
        return self.method in (Method.BURN, Method.TORCH)

    @property
    def has_signed_scales(self) -> bool:
        """Whether the scale of a block is negative if its largest value is positive.

        Integers reach one step further below zero, so the largest value falls on the lowest integer. onnxruntime's
        quantizer does so, too.
        """
        format = format_named(self.format)
        further = not format.is_float and format.minimum < -format.maximum
        plain = self.scale == "float32" and not (self.two_level or self.is_followed)
        return self.symmetric and further and plain and isinstance(self.granularity, tuple)

    @property
    def with_positive_scales(self) -> QuantSpec:
        """The same without the lowest integer, if scales are negative otherwise.

        >>> QuantSpec("int4", (32,)).with_positive_scales.format
        'int4-narrow'
        """
        return replace(self, format=f"{self.format}-narrow") if self.has_signed_scales else self


def _contradictions(spec: QuantSpec, format: QuantDType) -> Iterable[tuple[bool, str]]:
    """Yield a condition for each contradiction of two choices, with its error message."""
    name = spec.format
    yield (
        spec.symmetric and not format.signed,
        f"{name} has no negative values, so it cannot be symmetric; say symmetric = false or use {name.lstrip('u')}",
    )
    yield (
        not spec.symmetric and format.is_float,
        f"{name} values have no zero point, so they are symmetric; leave symmetric = false out or use uint8",
    )
    yield (
        spec.scale_rounding is Rounding.FLOOR and (spec.scale != "e8m0" or not spec.symmetric),
        'scale_rounding = "floor" gives powers of two for symmetric values; say scale = "e8m0" and symmetric = true',
    )
    yield (
        spec.scale_rounding is Rounding.FLOOR and spec.method in _METHODS_OF_SCALES,
        f'scale_rounding = "floor" decides the scale, so method = "{spec.method}" has nothing to choose; '
        'say scale_rounding = "nearest"',
    )
    yield (
        spec.two_level and spec.granularity is Granularity.TENSOR,
        'two_level multiplies several scales by one of the tensor; say granularity = "channel" or give a block such '
        "as [16]",
    )
    yield (
        spec.two_level and spec.scale not in _TWO_LEVEL,
        f"two_level serves scales of a small range, {' or '.join(_TWO_LEVEL)}; {spec.scale} needs no second one",
    )
    yield (
        spec.method is Method.HQQ and spec.symmetric,
        'method = "hqq" chooses zero points and symmetric values have none; say symmetric = false or method = "mse"',
    )
    yield (
        spec.method is Method.GPTQ and format.bits > _GPTQ_BITS,
        f'method = "gptq" takes formats of {_GPTQ_BITS} bits or fewer and {name} has {format.bits}; '
        'use format = "int8", or leave method out',
    )
    plain = spec.scale == "float32" and spec.storage is Storage.NATIVE and isinstance(spec.granularity, Granularity)
    yield (
        spec.method is Method.TORCH and not (plain and format.bits == _TORCH_BITS and not format.is_float),
        'method = "torch" makes 8-bit integers with float32 scales per tensor or channel; say format = "int8" and no '
        "blocks, other scales or words",
    )
    yield (
        spec.storage is Storage.WORDS and format.bits not in _WORD_FIELDS,
        f'storage = "words" holds values of 2, 4 or 8 bits and {name} has {format.bits}; say storage = "native"',
    )
