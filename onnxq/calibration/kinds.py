"""The table of kinds of accumulators, and what shows arrays to all that are requested of a tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxq.calibration.accumulators import (
    Accumulator,
    ChannelMeans,
    ChannelRanges,
    Observer,
    Range,
    Request,
    SampleExtremes,
    TensorSample,
)
from onnxq.calibration.hessian import HessianAccumulator
from onnxq.calibration.histogram import Histogram
from onnxq.errors import SchemeError, did_you_mean
from onnxq.system.plugins import load_registered, registered_names, wrap_plugin_errors

ENTRY_POINTS = "onnxq.statistics"
"""Group of entry points; each names a class of its own kind of `Accumulator`."""

KINDS: Mapping[str, type[Accumulator]] = MappingProxyType(
    {
        "range": Range,
        "histogram": Histogram,
        "channel-means": ChannelMeans,
        "channel-ranges": ChannelRanges,
        "sample-extremes": SampleExtremes,
        "hessian": HessianAccumulator,
    }
)


def find_kind(name: str) -> type[Accumulator]:
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
    if not (isinstance(found, type) and issubclass(found, Accumulator) and found.kind == name):
        raise SchemeError(f"Statistic {name!r} is no class of that kind, expected one of onnxq's Statistic")
    return found


def default_request(tensor: str, kind: str, axis: int | None = None) -> Request:
    """Return the request for a kind with the options that it has by default."""
    return Request(tensor, kind, axis, find_kind(kind).options)


# Observing: arrays go in, statistics come out, each array looked at once for all that is wanted of its tensor.


class Observers:
    """What is shown the tensors of samples, and turns them into the statistics that are requested.

    Args:
        requests: Of any tensors.

    Raises:
        SchemeError: A kind is unknown.
    """

    def __init__(self, requests: Iterable[Request]) -> None:
        self._observers: dict[str, dict[Request, Observer]] = {}
        for request in requests:
            self._observers.setdefault(request.tensor, {})[request] = _observer(request)

    def add(self, tensor: str, array: NDArray[Any], sample: str = "", index: int | None = None) -> None:
        """Show one array; nothing happens where nothing is wanted of its tensor, or it is empty.

        Args:
            tensor: Its name.
            array: Of any shape.
            sample: The digest of the sample.
            index: Its place among the samples, for errors.

        Raises:
            DataError: The array is not what a kind that is wanted is for.
        """
        if tensor not in self._observers or not array.size:
            return
        seen = TensorSample(tensor, array, sample, index)
        for observer in self._observers[tensor].values():
            observer.add(seen)

    def statistics(self) -> dict[Request, Accumulator]:
        """Return the statistics of all that was added."""
        pairs = (pair for group in self._observers.values() for pair in group.items())
        return {request: observer.statistic() for request, observer in pairs}

    def taken(self, requests: Iterable[Request]) -> dict[Request, Accumulator]:
        """Return the statistics of some requests, which begin anew."""
        found = {}
        for request in requests:
            group = self._observers[request.tensor]
            found[request], group[request] = group[request].statistic(), _observer(request)
        return found


def _observer(request: Request) -> Observer:
    kind = find_kind(request.kind)
    return kind.observer(request) if request.kind in KINDS else _OfUser(kind, request)


class _OfUser:
    """An observer of a kind that a user has added: what goes wrong in it, or is no statistic, is told by its name."""

    def __init__(self, kind: type[Accumulator], request: Request) -> None:
        self._blamed = partial(wrap_plugin_errors, f"Statistic {request.kind!r} of tensor {request.tensor!r}")
        self._kind = kind
        with self._blamed():
            self._observer = kind.observer(request)

    def add(self, seen: TensorSample) -> None:
        with self._blamed():
            self._observer.add(seen)

    def statistic(self) -> Accumulator:
        with self._blamed():
            found = self._observer.statistic()
            if not isinstance(found, self._kind):
                raise TypeError(f"it is {found!r}, expected {self._kind.__name__}")
            if not all(isinstance(array, np.ndarray) for array in found.arrays().values()):
                raise TypeError("what holds it in a file are no arrays")
            return found
