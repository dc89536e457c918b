"""Read encodings of tensors from JSON files: AIMET's, and the TensorQuantOverrides of onnxruntime's quantizer."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from onnxq.config.documents import read_document
from onnxq.errors import SchemeError
from onnxq.numerics.affine import LARGEST_SCALE, SMALLEST_SCALE
from onnxq.numerics.formats import FORMATS, QuantDType, format_named
from onnxq.numerics.spec import Granularity, QuantSpec
from onnxq.system.records import read_record

Ranges = tuple[tuple[float, float], ...]
Entry = TypeVar("Entry")


@dataclass(frozen=True)
class TensorEncoding:
    """The number format, and the scales or ranges, that a file gives a tensor.

    Attributes:
        tensor: its name in the float model.
        format: a name of `FORMATS`; empty takes that of the rule.
        symmetric: whether the zero point is 0; None if the file does not say.
        scales: one, or one for each channel; empty if there are ranges, or only a format.
        zero_points: one for each scale.
        ranges: smallest and largest value, one pair or one for each channel; empty if there are scales.
        axis: axis of the channels; None if the file does not say.

    >>> TensorEncoding("x", "uint8", scales=(0.5,), zero_points=(0,)).ranges_in(QuantSpec("uint8", symmetric=False))
    ((0.0, 127.5),)
    """

    tensor: str
    format: str = ""
    symmetric: bool | None = None
    scales: tuple[float, ...] = ()
    zero_points: tuple[int, ...] = ()
    ranges: Ranges = ()
    axis: int | None = None

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            SchemeError: a scale or range is not finite, or a zero point is not a value of the format.
        """
        for scale in self.scales:
            if not SMALLEST_SCALE <= scale <= LARGEST_SCALE:
                raise SchemeError(f"tensor {self.tensor!r} has the scale {scale}, expected a positive normal number")
        for low, high in self.ranges:
            if not -math.inf < low <= high < math.inf:
                raise SchemeError(f"tensor {self.tensor!r} has the range [{low}, {high}], expected finite limits")
        if len(self.zero_points) != len(self.scales):
            counts = f"{len(self.scales)} scales and {len(self.zero_points)} zero points"
            raise SchemeError(f"tensor {self.tensor!r} has {counts}, expected as many")
        if self.format:
            self._check_zero_points(format_named(self.format))

    def _check_zero_points(self, format: QuantDType) -> None:
        for zero_point in self.zero_points:
            if not format.minimum <= zero_point <= format.maximum:
                raise SchemeError(
                    f"tensor {self.tensor!r} has the zero point {zero_point}, expected a value of {format.name}"
                )

    @property
    def count(self) -> int:
        """Number of scales or ranges; 0 if there is only a format."""
        return len(self.scales) or len(self.ranges)

    def spec(self, usual: QuantSpec) -> QuantSpec:
        """Return the spec that the tensor gets in place of the one of its rule."""
        format = format_named(self.format or usual.format)
        symmetric = self.symmetric
        if self.scales:
            symmetric = format.signed and not any(self.zero_points)
        elif symmetric is None:
            symmetric = usual.symmetric
        granularity = Granularity.CHANNEL if self.count > 1 else Granularity.TENSOR
        kept = usual.granularity if not self.count else granularity
        return QuantSpec(format.name, kept, symmetric=symmetric and format.signed)

    def ranges_in(self, spec: QuantSpec) -> Ranges:
        """Return the ranges from which `params_from_range` computes these scales and zero points, bit for bit."""
        format = format_named(spec.format)
        self._check_zero_points(format)
        return self.ranges or tuple(
            _range(scale, zero_point, format, symmetric=spec.symmetric)
            for scale, zero_point in zip(self.scales, self.zero_points, strict=True)
        )


def _range(scale: float, zero_point: int, format: QuantDType, *, symmetric: bool) -> tuple[float, float]:
    # Scales are float32, so that these products are exact.
    scale = float(np.float32(scale))
    if symmetric:
        half = scale * (format.maximum - format.minimum) / 2
        return -half, half
    return (format.minimum - zero_point) * scale, (format.maximum - zero_point) * scale


def load_encodings(path: str | Path) -> tuple[TensorEncoding, ...]:
    """Read encodings: of AIMET in the versions 0.6.1, 1.0.0, 2.0.0 and 2.1.0, or TensorQuantOverrides.

    Integers of 32 bits, which are biases, are left out: their scales follow from those of weights and activations.

    Args:
        path: JSON file.

    Returns:
        The encodings in the order of the file; a `Scheme` takes them as ``encodings``.

    Raises:
        SchemeError: the file cannot be read, has an unknown version, or holds a format or number that onnxq lacks.

    >>> load_encodings("model.encodings")[0].tensor  # doctest: +SKIP
    'input'
    """
    return read_document(path, "encodings", json.loads, _all_parsed)


def _all_parsed(document: object) -> tuple[TensorEncoding, ...]:
    encodings = dict[str, TensorEncoding]()
    for encoding in _parse(document):
        if encoding.tensor in encodings:
            raise SchemeError(f"tensor {encoding.tensor!r} has two encodings, expected one")
        encodings[encoding.tensor] = encoding
    return tuple(encodings.values())


def _parse(document: object) -> Iterator[TensorEncoding]:
    if not isinstance(document, dict):
        raise SchemeError("it is no JSON object, expected encodings of AIMET or TensorQuantOverrides")
    sections = [document[key] for key in ("activation_encodings", "param_encodings") if key in document]
    if "version" not in document and not sections:
        for name, encodings in document.items():
            yield from _parse_overrides(name, encodings)
        return
    version = str(
        document.get("version", "0.6.1" if all(isinstance(section, dict) for section in sections) else "1.0.0")
    )
    if version not in _VERSIONS:
        raise SchemeError(f"version {version} of encodings is unknown, expected one of {', '.join(_VERSIONS)}")
    if version.startswith("2"):
        sections = [document.get("encodings")]
    kind = dict if version == "0.6.1" else list
    for section in sections:
        if not isinstance(section, kind):
            raise SchemeError(f"its encodings are no {kind.__name__}, which version {version} has; give its version")
        entries = section.items() if isinstance(section, dict) else ((_name_of(entry), entry) for entry in section)
        for name, entry in entries:
            encodings = _VERSIONS[version](name, entry)
            if encodings is not None:
                yield encodings


def _name_of(entry: object) -> str:
    name = entry.get("name") if isinstance(entry, dict) else None
    if not isinstance(name, str):
        raise SchemeError("an encoding has no name, expected that of its tensor")
    return name


def _read(kind: type[Entry], tensor: str, entry: object) -> Entry:
    """Return the known keys of an entry; AIMET's entries may hold more."""
    if not isinstance(entry, dict):
        raise SchemeError(f"the encoding of tensor {tensor!r} is {entry!r}, expected an object")
    keys = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    lists = {key: value if isinstance(value, list) else [value] for key, value in entry.items() if key in _LISTS}
    table = {key: value for key, value in {**entry, **lists}.items() if key in keys}
    return read_record(kind, f"the encoding of tensor {tensor!r}", table)


_LISTS = frozenset({"scale", "offset", "y_scale", "y_zero_point", "zero_point"})
_BIAS_BITS = 32


def _format(tensor: str, bits: int, *, signed: bool) -> str:
    """Return the name of a format; empty for biases."""
    name = f"{'' if signed else 'u'}int{bits}"
    if bits != _BIAS_BITS and name not in FORMATS:
        raise SchemeError(f"tensor {tensor!r} has integers of {bits} bits, expected 4, 8 or 16; leave it out")
    return "" if bits == _BIAS_BITS else name


def _check_integer(tensor: str, dtype: object) -> None:
    if "int" not in str(dtype).lower():
        raise SchemeError(f"tensor {tensor!r} is {dtype}, expected integers; leave it out, and --exclude its nodes")


# AIMET. The offsets of versions before 2 are those of unsigned integers, with the sign of an addend.


@dataclass(frozen=True)
class _First:
    bitwidth: int
    is_symmetric: str
    scale: tuple[float, ...]
    offset: tuple[float, ...]


def _parse_first(tensor: str, entries: object) -> TensorEncoding | None:
    if not isinstance(entries, list) or not entries:
        raise SchemeError(f"the encoding of tensor {tensor!r} is {entries!r}, expected a list with one for each scale")
    channels = []
    for entry in entries:
        if isinstance(entry, dict):
            _check_integer(tensor, entry.get("dtype", "int"))
            entry = {**entry, "is_symmetric": str(entry.get("is_symmetric"))}
        channels.append(_read(_First, tensor, entry))
    scales, offsets = (tuple(getattr(channel, key)[0] for channel in channels) for key in ("scale", "offset"))
    return _with_offsets(tensor, channels[0].bitwidth, scales, offsets, signed=channels[0].is_symmetric == "True")


@dataclass(frozen=True)
class _Second:
    bw: int
    is_sym: bool
    scale: tuple[float, ...]
    offset: tuple[float, ...]
    enc_type: str = "PER_TENSOR"


def _parse_second(tensor: str, entry: object) -> TensorEncoding | None:
    if isinstance(entry, dict):
        _check_integer(tensor, entry.get("dtype"))
    channel = _read(_Second, tensor, entry)
    if channel.enc_type not in ("PER_TENSOR", "PER_CHANNEL"):
        raise SchemeError(f"tensor {tensor!r} has scales {channel.enc_type}, expected PER_TENSOR or PER_CHANNEL")
    return _with_offsets(tensor, channel.bw, channel.scale, channel.offset, signed=channel.is_sym)


def _with_offsets(
    tensor: str, bits: int, scales: tuple[float, ...], offsets: tuple[float, ...], *, signed: bool
) -> TensorEncoding | None:
    lowest = 2 ** (bits - 1) if signed else 0
    if not (format := _format(tensor, bits, signed=signed)):
        return None
    zero_points = tuple(_whole(tensor, -offset - lowest) for offset in offsets)
    return TensorEncoding(tensor, format, scales=scales, zero_points=zero_points)


def _whole(tensor: str, zero_point: float) -> int:
    if zero_point != round(zero_point):
        raise SchemeError(f"tensor {tensor!r} has the zero point {zero_point}, expected a whole number")
    return int(zero_point)


@dataclass(frozen=True)
class _Third:
    output_dtype: str
    y_scale: tuple[float, ...]
    y_zero_point: tuple[float, ...] = ()
    axis: int | None = None


def _parse_third(tensor: str, entry: object) -> TensorEncoding | None:
    if isinstance(entry, dict):
        _check_integer(tensor, entry.get("output_dtype"))
        if keys := sorted({"block_size", "per_block_int_scale"} & entry.keys()):
            raise SchemeError(f"tensor {tensor!r} has {keys[0]}, expected a scale for the tensor or for each channel")
    third = _read(_Third, tensor, entry)
    sign, _, bits = third.output_dtype.partition("int")
    if sign not in ("", "u") or not bits.isdigit():
        raise SchemeError(f"tensor {tensor!r} is {third.output_dtype}, expected a type such as uint8")
    if not (format := _format(tensor, int(bits), signed=not sign)):
        return None
    zero_points = third.y_zero_point or (0,) * len(third.y_scale)
    whole = tuple(_whole(tensor, zero_point) for zero_point in zero_points)
    return TensorEncoding(tensor, format, scales=third.y_scale, zero_points=whole, axis=third.axis)


_VERSIONS = {"0.6.1": _parse_first, "1.0.0": _parse_second, "2.0.0": _parse_third, "2.1.0": _parse_third}


# onnxruntime's TensorQuantOverrides: a list with a dictionary for the tensor, or one for each channel.


@dataclass(frozen=True)
class _Override:
    quant_type: str = ""
    symmetric: bool | None = None
    scale: tuple[float, ...] = ()
    zero_point: tuple[float, ...] = ()
    rmin: float | None = None
    rmax: float | None = None
    axis: int | None = None


_OVERRIDES = frozenset(field.name for field in fields(_Override))


def _parse_overrides(tensor: str, entries: object) -> Iterator[TensorEncoding]:
    if not isinstance(entries, list):
        raise SchemeError(
            f"tensor {tensor!r} has {entries!r}, expected a list as in TensorQuantOverrides, or encodings of AIMET "
            "with their version"
        )
    for override in entries:
        for key in override if isinstance(override, Mapping) else ():
            if key not in _OVERRIDES:
                raise SchemeError(f"tensor {tensor!r} has {key}, expected {', '.join(sorted(_OVERRIDES))}")
    channels = [_read(_Override, tensor, entry) for entry in entries]
    if not channels:
        return
    first = channels[0]
    kind = first.quant_type.lower().removeprefix("quanttype.").removeprefix("q")
    if kind:
        _check_integer(tensor, kind)
        if kind not in FORMATS:
            raise SchemeError(f"tensor {tensor!r} has the type {first.quant_type}, expected one such as QUInt16")
    parsed = TensorEncoding(tensor, kind, first.symmetric, axis=first.axis)
    scales = tuple(scale for entry in channels for scale in entry.scale)
    zero_points = tuple(_whole(tensor, zero_point) for entry in channels for zero_point in entry.zero_point)
    limits = tuple((entry.rmin, entry.rmax) for entry in channels if entry.rmin is not None and entry.rmax is not None)
    if any((entry.rmin is None) != (entry.rmax is None) for entry in channels) or (scales and limits):
        raise SchemeError(
            f"tensor {tensor!r} has rmin, rmax and scale, expected rmin and rmax, or scale and zero_point"
        )
    if max(len(scales), len(limits)) not in (0, len(channels)):
        raise SchemeError(f"tensor {tensor!r} has scales or ranges of some channels, expected all")
    yield replace(parsed, scales=scales, zero_points=zero_points, ranges=limits)
