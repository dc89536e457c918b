"""The table of kinds: which statistics there are, by name; installed packages add theirs."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from onnxq.calibration.channel_means import ChannelMeans
from onnxq.calibration.channel_ranges import ChannelRanges
from onnxq.calibration.gram import Gram
from onnxq.calibration.histogram import Histogram
from onnxq.calibration.requests import Request
from onnxq.calibration.sample_extremes import SampleExtremes
from onnxq.calibration.statistic import Statistic
from onnxq.calibration.value_range import Range
from onnxq.errors import SchemeError, did_you_mean
from onnxq.system.plugins import load_registered, registered_names

ENTRY_POINTS = "onnxq.statistics"
"""Group of entry points; each names a class of its own kind of `Statistic`."""

KINDS: Mapping[str, type[Statistic]] = MappingProxyType(
    {
        "range": Range,
        "histogram": Histogram,
        "channel-means": ChannelMeans,
        "channel-ranges": ChannelRanges,
        "sample-extremes": SampleExtremes,
        "gram": Gram,
    }
)


def kind_named(name: str) -> type[Statistic]:
    """Return the kind of statistic with that name.

    Raises:
        SchemeError: Nobody has such a kind, or what is registered cannot be loaded.
    """
    if (ours := KINDS.get(name)) is not None:
        return ours
    found = load_registered(ENTRY_POINTS, name, "Statistic")
    if found is None:
        known = [*KINDS, *registered_names(ENTRY_POINTS)]
        raise SchemeError(
            f"Statistic {name!r} is unknown, expected one of {', '.join(known)}{did_you_mean(name, known)}"
        )
    if not (isinstance(found, type) and issubclass(found, Statistic) and found.kind == name):
        raise SchemeError(f"Statistic {name!r} is no class of that kind, expected one of onnxq's Statistic")
    return found


def request_for(tensor: str, kind: str, axis: int | None = None) -> Request:
    """Return the request for a kind with the options that it has by default."""
    return Request(tensor, kind, axis, kind_named(kind).options)
