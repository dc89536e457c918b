"""Observing: arrays go in, statistics come out, each array looked at once for all that is wanted of its tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxq.calibration.evidence import Evidence
from onnxq.calibration.kinds import KINDS, kind_named
from onnxq.calibration.requests import Request
from onnxq.calibration.statistic import Observer, Seen, Statistic
from onnxq.system.plugins import wrap_plugin_errors


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
        seen = Seen(tensor, array, sample, index)
        for observer in self._observers[tensor].values():
            observer.add(seen)

    def statistics(self) -> dict[Request, Statistic]:
        """Return the statistics of all that was added."""
        pairs = (pair for group in self._observers.values() for pair in group.items())
        return {request: observer.statistic() for request, observer in pairs}

    def taken(self, requests: Iterable[Request]) -> dict[Request, Statistic]:
        """Return the statistics of some requests, which begin anew."""
        found = {}
        for request in requests:
            group = self._observers[request.tensor]
            found[request], group[request] = group[request].statistic(), _observer(request)
        return found


def _observer(request: Request) -> Observer:
    kind = kind_named(request.kind)
    return kind.observer(request) if request.kind in KINDS else _OfUser(kind, request)


class _OfUser:
    """An observer of a kind that a user has added: what goes wrong in it, or is no statistic, is told by its name."""

    def __init__(self, kind: type[Statistic], request: Request) -> None:
        self._blamed = partial(wrap_plugin_errors, f"Statistic {request.kind!r} of tensor {request.tensor!r}")
        self._kind = kind
        with self._blamed():
            self._observer = kind.observer(request)

    def add(self, seen: Seen) -> None:
        with self._blamed():
            self._observer.add(seen)

    def statistic(self) -> Statistic:
        with self._blamed():
            found = self._observer.statistic()
            if not isinstance(found, self._kind):
                raise TypeError(f"it is {found!r}, expected {self._kind.__name__}")
            if not all(isinstance(array, np.ndarray) for array in found.arrays().values()):
                raise TypeError("what holds it in a file are no arrays")
            return found


def observe(arrays: Mapping[str, NDArray[Any]], requests: Iterable[Request], sample: str = "") -> Evidence:
    """Return the evidence of one sample.

    Args:
        arrays: By tensor.
        requests: What is wanted of them.
        sample: The digest of the sample.

    Raises:
        DataError: An array is not what a kind that is wanted is for.
        SchemeError: A kind is unknown.
    """
    observers = Observers(requests)
    for tensor, array in arrays.items():
        observers.add(tensor, array, sample)
    return Evidence((sample,), observers.statistics())
