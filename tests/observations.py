"""What tests observe: evidence of one tensor `t`, by the kinds that they name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from onnxq.calibration.accumulators import Accumulator, Option, Request
from onnxq.calibration.histogram import HISTOGRAM_ELEMENTS
from onnxq.calibration.instrument import added_outputs, append_outputs
from onnxq.calibration.kinds import Observers
from onnxq.calibration.statistics import CalibrationStatistics, TensorStatistics
from onnxq.numerics.spec import QuantSpec

AFFINE = QuantSpec("uint8", symmetric=False)
"""What data gets by default."""
KINDS = ("range", "histogram", "sample-extremes")


def wanted(tensors: Iterable[str], *kinds: str, elements: int = HISTOGRAM_ELEMENTS) -> list[Request]:
    """Return requests for kinds of tensors."""
    options = {"histogram": {"elements": elements}}
    return [Request.of(name, kind, **options.get(kind, {})) for name in tensors for kind in kinds or KINDS]


def observe(arrays: Mapping[str, NDArray[Any]], requests: Iterable[Request], sample: str = "") -> CalibrationStatistics:
    """Return the statistics of one sample from its arrays by tensor; `sample` is its digest."""
    observers = Observers(requests)
    for tensor, array in arrays.items():
        observers.add(tensor, array, sample)
    return CalibrationStatistics((sample,), observers.statistics())


def alike(one: CalibrationStatistics, other: CalibrationStatistics) -> bool:
    """Return whether two statistics differ by no more than the rounding of sums."""
    return (
        one.samples == other.samples
        and one.statistics.keys() == other.statistics.keys()
        and all(same(one.statistics[request], other.statistics[request]) for request in one.statistics)
    )


def same(one: Accumulator, other: Accumulator) -> bool:
    """Return whether two statistics of one kind differ by no more than the rounding of sums."""
    mine, theirs = one.arrays(), other.arrays()
    return mine.keys() == theirs.keys() and all(
        mine[name].shape == theirs[name].shape and np.allclose(mine[name], theirs[name], rtol=1e-10, atol=1e-10)
        for name in mine
    )


def with_outputs(model: onnx.ModelProto, names: Iterable[str]) -> onnx.ModelProto:
    """Return a copy of a model with more of its tensors as outputs."""
    return onnx.ModelProto.FromString(append_outputs(model.SerializeToString(), added_outputs(model, names)))


def seen(values: Any, *kinds: str, sample: str = "", elements: int = 0) -> TensorStatistics:
    """Return what kinds say of the values, all of which are counted unless told otherwise."""
    requests = [Request.of("t", kind, elements=elements) for kind in kinds or KINDS]
    return observe({"t": np.asarray(values)}, requests, sample).of("t")


def statistic(values: Any, kind: str, axis: int | None = None, sample: str = "", **options: Option) -> Accumulator:
    """Return what one kind says of the values."""
    request = Request.of("t", kind, axis, **options)
    return observe({"t": np.asarray(values)}, [request], sample).statistics[request]


def one_by_one(arrays: Iterable[NDArray[Any]], kind: str, axis: int | None = None, **options: Option) -> Accumulator:
    """Return what one observer says of arrays that are shown to it one after the other, each of its own sample."""
    request = Request.of("t", kind, axis, **options)
    observers = Observers([request])
    for index, array in enumerate(arrays):
        observers.add("t", array, f"{index:016x}" * 2, index)
    return observers.statistics()[request]


def statistics(values: Mapping[str, Any], *kinds: str, sample: str = "") -> CalibrationStatistics:
    """Return the evidence of one sample of several tensors."""
    arrays = {name: np.asarray(one) for name, one in values.items()}
    return observe(arrays, [Request.of(name, kind) for name in arrays for kind in kinds or KINDS], sample)
