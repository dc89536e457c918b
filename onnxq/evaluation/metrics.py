"""What a model is good for as one number: top-1 accuracy, or a Python function of the user's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from onnxq.data.arrays import npy_array, npz_arrays
from onnxq.errors import DataError, SchemeError, nearest
from onnxq.system.extensions import imported

Named: TypeAlias = Mapping[str, Any]
"""Arrays by name of input or output."""

_TOP1 = "top1"
_EXPECTED = "top1:LABELS.npy, top1:LABELS.npz:KEY, MODULE:FUNCTION or FILE.py:FUNCTION"


@dataclass(frozen=True, eq=False)
class Metric:
    """A number for the outputs of a model, higher is better.

    Attributes:
        name: what the user wrote.
        function: called once with the outputs of all samples and with the samples, both lists of dictionaries from
            name to array, which cannot be written to, and in the order of the data; returns the number.
    """

    name: str
    function: Callable[[Sequence[Named], Sequence[Named]], Any]

    @property
    def knows_samples(self) -> bool:
        """Whether it scores any of the samples alone; a function may hold what counts on the order of all."""
        return isinstance(self.function, Top1)


@dataclass(frozen=True, eq=False)
class Top1:
    """The share of samples whose first output is largest, along its last axis, at the label, or is the label itself.

    Attributes:
        labels: class numbers of the data, in its order.
        of_more: whether the data has more samples than are used, which are its first.
    """

    labels: NDArray[np.integer[Any]]
    of_more: bool = False

    def __call__(self, outputs: Sequence[Named], samples: Sequence[Named]) -> float:
        """Return the share; an output of several rows answers as many labels."""
        right, count = np.sum(self.by_sample(outputs), axis=0).tolist()
        return float(right / count)

    def of_places(self, outputs: Sequence[Named], places: Sequence[int]) -> Top1:
        """Return what scores the samples at some places alone.

        Args:
            outputs: of a model, for each of all samples: how many answers it gives tells whose the labels are.
            places: rising indices.
        """
        ends = np.cumsum(self.by_sample(outputs)[:, 1]).astype(np.int64)
        labels = np.split(self.labels[: ends[-1]], ends[:-1])
        return Top1(np.concatenate([labels[place] for place in places]))

    def by_sample(self, outputs: Sequence[Named]) -> NDArray[np.float64]:
        """Return for each sample how many answers are right, and how many there are.

        Raises:
            DataError: there are more answers than labels, or fewer, or the first output holds no scores.
        """
        answers = [_answers(next(iter(output.values()))) for output in outputs]
        ends = np.cumsum([len(one) for one in answers])
        if ends[-1] > len(self.labels) or (ends[-1] < len(self.labels) and not self.of_more):
            raise DataError(
                f"the model gives {ends[-1]} answers for {len(outputs)} samples and there are {len(self.labels)} "
                "labels, expected one for each; give the labels of these samples alone"
            )
        labels = np.split(self.labels[: ends[-1]], ends[:-1])
        right = [np.count_nonzero(one == label) for one, label in zip(answers, labels, strict=True)]
        return np.stack([np.array(right, np.float64), np.diff(ends, prepend=0).astype(np.float64)], 1)


def load_metric(text: str) -> Metric:
    """Return the metric that a user names.

    A function is code that the user asks to run: importing its module or file runs that, and nothing else is run.

    Args:
        text: ``top1:LABELS`` with a ``.npy`` file of class numbers in the order of the samples, or an ``.npz`` file
            and ``:KEY`` where it holds several arrays; or ``module:function``; or ``file.py:function``.

    Returns:
        The metric.

    Raises:
        SchemeError: the text names nothing, or the module cannot be imported or has no such function.
        DataError: the labels cannot be read or are no class numbers.
    """
    kind, _, rest = text.partition(":")
    if kind == _TOP1:
        if not rest:
            raise SchemeError("metric top1 needs labels; write top1:LABELS.npy")
        return Metric(text, Top1(_labels(rest)))
    # A drive letter may stand in front of another colon.
    place, _, name = text.rpartition(":")
    if not place or not name:
        raise SchemeError(f"metric {text!r} is not written as {_EXPECTED}{nearest(text, [_TOP1])}")
    module = imported(place, f"metric {text!r}", [_TOP1])
    function = getattr(module, name, None)
    if not callable(function):
        found = "has none of that name" if function is None else f"has {type(function).__name__} {name!r}"
        callables = [each for each, value in vars(module).items() if callable(value)]
        raise SchemeError(f"metric {text!r} needs a function, but {place} {found}{nearest(name, callables)}")
    return Metric(text, function)


def of_first_samples(metric: Metric) -> Metric:
    """Return a metric for the first samples of its data alone, where there may be labels for all."""
    function = metric.function
    return replace(metric, function=replace(function, of_more=True)) if isinstance(function, Top1) else metric


def score(metric: Metric, outputs: Sequence[Named], samples: Sequence[Named]) -> float:
    """Return what a metric makes of the outputs of a model.

    Args:
        metric: from load_metric.
        outputs: of the model, for each sample in order.
        samples: the first ones of the data or all, in order, for labels count on it.

    Returns:
        The number, finite; higher is better.

    Raises:
        DataError: there is no sample, the function fails, or what it returns is no finite number.
    """
    if not samples:
        raise DataError(f"there are no samples for metric {metric.name!r}; give at least one")
    try:
        found = metric.function([_guarded(one) for one in outputs], [_guarded(one) for one in samples])
    except DataError:
        raise
    except (Exception, SystemExit) as error:
        raise DataError(f"metric {metric.name!r} failed: {type(error).__name__}: {error}") from error
    return _finite(found, metric.name)


def _guarded(value: Any) -> Any:
    """Return arrays, or what holds them, so that a metric changes nothing that it is called with again."""
    if isinstance(value, np.ndarray):
        value = value.view()
        value.flags.writeable = False
        return value
    if isinstance(value, Mapping):
        return {name: _guarded(one) for name, one in value.items()}
    return [_guarded(one) for one in value] if isinstance(value, list) else value


def _finite(found: Any, name: str) -> float:
    try:
        number = float(found)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise DataError(f"metric {name!r} returned {found!r}, expected a finite number, higher for a better model")
    return number


def _labels(text: str) -> NDArray[np.integer[Any]]:
    place, _, key = text.rpartition(":")
    path = Path(text if text.endswith((".npy", ".npz")) else place)
    if path.suffix == ".npz":
        arrays = npz_arrays(path)
        if path == Path(text):
            if len(arrays) != 1:
                raise DataError(f"{path} holds {', '.join(arrays)}; say which are the labels as top1:{path}:KEY")
            key = next(iter(arrays))
        if key not in arrays:
            raise DataError(f"{path} has no array {key!r}{nearest(key, arrays)}")
        stored = arrays[key]
    elif path.suffix == ".npy" and path == Path(text):
        stored = npy_array(path)
    else:
        raise DataError(f"labels {text!r} are not written as LABELS.npy or LABELS.npz:KEY")
    if stored.dtype.kind not in "iu":
        raise DataError(f"labels {text} have type {stored.dtype.name}, expected whole numbers, one for each sample")
    labels: NDArray[np.integer[Any]] = stored.read().reshape(-1)
    return labels


def _answers(output: Any) -> NDArray[np.integer[Any]]:
    if isinstance(output, np.ndarray) and output.dtype.kind in "iu":
        return output.reshape(-1)
    if not isinstance(output, np.ndarray) or not output.ndim or not output.shape[-1]:
        raise DataError(
            "the first output holds no scores or numbers of classes, which metric top1 needs; give a function instead"
        )
    answers: NDArray[np.integer[Any]] = output.argmax(axis=-1).reshape(-1)
    return answers
