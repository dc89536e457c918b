"""The kinds of accumulators by name, and observers for all requests."""

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
"""Group of entry points; each names a subclass of `Accumulator` whose `kind` is the name."""

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
        SchemeError: The name is unknown, or the registered class cannot be loaded or is not an `Accumulator` of it.
    """
    kind = KINDS.get(name) or load_registered(ENTRY_POINTS, name, "Statistic")
    if kind is None:
        names = [*KINDS, *registered_names(ENTRY_POINTS)]
        raise SchemeError(
            f"Statistic {name!r} is unknown, expected one of {', '.join(names)}{did_you_mean(name, names)}"
        )
    if not (isinstance(kind, type) and issubclass(kind, Accumulator) and kind.kind == name):
        raise SchemeError(
            f"Statistic {name!r} is no class of that kind, expected a subclass of Accumulator whose kind is {name!r}"
        )
    return kind


def default_request(tensor: str, kind: str, axis: int | None = None) -> Request:
    """Return a request with the default options of the kind."""
    return Request(tensor, kind, axis, find_kind(kind).options)


# Observing: each array is scanned once for all requests of its tensor.


class Observers:
    """Turns the tensors of samples into the requested statistics.

    Raises:
        SchemeError: A kind is unknown.
    """

    def __init__(self, requests: Iterable[Request]) -> None:
        self._observers: dict[str, dict[Request, Observer]] = {}
        for request in requests:
            self._observers.setdefault(request.tensor, {})[request] = _observer(request)

    def add(self, tensor: str, array: NDArray[Any], sample: str = "", index: int | None = None) -> None:
        """Add one array; ignored if it is empty or its tensor was not requested.

        `sample` is the digest of the sample, and `index` its index for error messages.

        Raises:
            DataError: A requested kind does not apply to the array.
        """
        if tensor not in self._observers or not array.size:
            return
        seen = TensorSample(tensor, array, sample, index)
        for observer in self._observers[tensor].values():
            observer.add(seen)

    def statistics(self) -> dict[Request, Accumulator]:
        """Return the statistics of all arrays so far."""
        pairs = (pair for group in self._observers.values() for pair in group.items())
        return {request: observer.statistic() for request, observer in pairs}


def _observer(request: Request) -> Observer:
    kind = find_kind(request.kind)
    return kind.observer(request) if request.kind in KINDS else _PluginObserver(kind, request)


class _PluginObserver:
    """An observer of a plugin's kind; its errors are raised as onnxq errors with the name of the kind."""

    def __init__(self, kind: type[Accumulator], request: Request) -> None:
        self._wrapped = partial(wrap_plugin_errors, f"Statistic {request.kind!r} of tensor {request.tensor!r}")
        self._kind = kind
        with self._wrapped():
            self._observer = kind.observer(request)

    def add(self, seen: TensorSample) -> None:
        with self._wrapped():
            self._observer.add(seen)

    def statistic(self) -> Accumulator:
        with self._wrapped():
            statistic = self._observer.statistic()
            if not isinstance(statistic, self._kind):
                raise TypeError(f"it is {statistic!r}, expected {self._kind.__name__}")
            if not all(isinstance(array, np.ndarray) for array in statistic.arrays().values()):
                raise TypeError("what holds it in a file are no arrays")
            return statistic
