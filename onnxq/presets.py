"""Presets: named schemes, data only."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from onnxq.errors import SchemeError, nearest
from onnxq.scheme import Granularity, Mode, Rule, Scheme, Spec

_PER_CHANNEL = Spec("int8-narrow", per=Granularity.CHANNEL)
_PER_TENSOR = Spec("int8-narrow", per=Granularity.TENSOR)

_TABLE = (
    Scheme((Rule(Mode.STATIC, weight=_PER_CHANNEL),), name="int8"),
    Scheme((Rule(Mode.STATIC, weight=_PER_TENSOR),), name="int8-per-tensor"),
    Scheme((Rule(Mode.STORAGE, weight=_PER_CHANNEL),), name="int8-storage"),
)

PRESETS: Mapping[str, Scheme] = MappingProxyType({scheme.name: scheme for scheme in _TABLE})
"""Every preset by name: ``int8`` is static with per-channel weights, ``int8-storage`` touches weights only."""


def preset_named(name: str) -> Scheme:
    """Return the scheme of PRESETS called ``name``.

    Raises:
        SchemeError: no such preset; the message suggests the nearest one.
    """
    if name not in PRESETS:
        raise SchemeError(f"preset {name!r} is not one of {', '.join(PRESETS)}{nearest(name, PRESETS)}")
    return PRESETS[name]
