"""What a model is good for as one number: top-1 accuracy, or a Python function of the user's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from onnxq.data.arrays import npy_array, npz_arrays
from onnxq.data.dataset import group_equal, list_shared_files
from onnxq.data.inputs import Sample, SampleSource
from onnxq.errors import DataError, SchemeError, did_you_mean
from onnxq.evaluation.bounds import RISK, highest_mean
from onnxq.evaluation.comparison import ComparisonSpec
from onnxq.system.plugins import import_plugin

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
        answers = [_classes(next(iter(output.values()))) for output in outputs]
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
        raise SchemeError(f"metric {text!r} is not written as {_EXPECTED}{did_you_mean(text, [_TOP1])}")
    module = import_plugin(place, f"metric {text!r}", [_TOP1])
    function = getattr(module, name, None)
    if not callable(function):
        found = "has none of that name" if function is None else f"has {type(function).__name__} {name!r}"
        callables = [each for each, value in vars(module).items() if callable(value)]
        raise SchemeError(f"metric {text!r} needs a function, but {place} {found}{did_you_mean(name, callables)}")
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
            raise DataError(f"{path} has no array {key!r}{did_you_mean(key, arrays)}")
        stored = arrays[key]
    elif path.suffix == ".npy" and path == Path(text):
        stored = npy_array(path)
    else:
        raise DataError(f"labels {text!r} are not written as LABELS.npy or LABELS.npz:KEY")
    if stored.dtype.kind not in "iu":
        raise DataError(f"labels {text} have type {stored.dtype.name}, expected whole numbers, one for each sample")
    labels: NDArray[np.integer[Any]] = stored.read().reshape(-1)
    return labels


def _classes(output: Any) -> NDArray[np.integer[Any]]:
    if isinstance(output, np.ndarray) and output.dtype.kind in "iu":
        return output.reshape(-1)
    if not isinstance(output, np.ndarray) or not output.ndim or not output.shape[-1]:
        raise DataError(
            "the first output holds no scores or numbers of classes, which metric top1 needs; give a function instead"
        )
    answers: NDArray[np.integer[Any]] = output.argmax(axis=-1).reshape(-1)
    return answers


# What a metric says of the float model and of another, and how much the other may have lost on all samples.

# A function is called without each of so many groups of samples in turn.
_GROUPS = 16
# Sums of floats in another order differ by less.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Scores:
    """What a metric says of both models, on the same samples in their order.

    Attributes:
        name: of the metric.
        reference: of the float model.
        candidate: of the quantized model.
        most_lost: upper 95 % confidence bound of the drop over all samples; infinite where it cannot be told.
        least_shown: the least bound that so many samples can show, when the models differ on none.
        doubt: why the bound cannot be told, in a sentence; empty where it can.
        chosen_by: what it says on the samples by which plans are chosen, where others judge; else None.
    """

    name: str
    reference: float
    candidate: float
    most_lost: float = math.inf
    least_shown: float = math.inf
    doubt: str = ""
    chosen_by: Scores | None = None

    @property
    def drop(self) -> float:
        """How much less the quantized model's is."""
        return self.reference - self.candidate

    def allowed_by(self, most: float) -> bool:
        """Whether the drop is at most what is allowed, apart from what sums of floats are rounded by."""
        return self.drop <= most + _ROUNDING

    def is_trusted(self, allowed: float) -> bool:
        """Whether the drop is at most what is allowed: its bound, unless so few samples could never show that.

        Where plans are chosen by other samples than those that judge, it has to be on both.
        """
        if self.chosen_by is not None and not self.chosen_by.is_trusted(allowed):
            return False
        return self.allowed_by(allowed) if self.least_shown > allowed else self.most_lost <= allowed + _ROUNDING


@dataclass(frozen=True, eq=False)
class Scorer:
    """A metric, and what the float model answers, beside which others are scored.

    Attributes:
        metric: higher is better.
        views: opens models so that all draw the same random numbers.
        samples: in the order of the data.
        outputs: the float model's, for each sample.
        score: of the float model.
        files: of each sample, see `list_shared_files`; nothing where each counts by itself.
        judging: places of the samples by which models are judged, where plans are chosen by the others; else none.
    """

    metric: Metric
    views: ComparisonSpec
    samples: tuple[Sample, ...]
    outputs: tuple[Named, ...]
    score: float
    files: tuple[str, ...] = ()
    judging: tuple[int, ...] = ()

    @classmethod
    def of(cls, metric: Metric, reference: Path, samples: SampleSource, judging: Sequence[int] = ()) -> Scorer:
        """Run the float model on samples, all outputs of which are held.

        Args:
            metric: higher is better.
            reference: file of the float model.
            samples: in the order of the data.
            judging: places of those that judge, where plans are chosen by the others; of a metric that knows samples.

        Raises:
            DataError: there is no sample, a run fails, or the metric does.
        """
        views, given = ComparisonSpec.whole(reference), tuple(samples)
        outputs = _run_each(views, reference, given)
        reached = score(metric, outputs, given)
        return cls(metric, views, given, outputs, reached, list_shared_files(samples), tuple(judging))

    def scores(self, candidate: Path, risk: float = RISK) -> Scores:
        """Return the scores of a model, and a bound of what it has lost.

        The bound leaves out parts of the samples, in both models alike, and asks for the drop of the rest (jackknife;
        Efron, Annals of Statistics 1979): single samples for top-1 accuracy, one of 16 interleaved groups for a
        function, which is called with what is left. The samples of one file, which are alike, are left out together.
        Student's t distribution tells how far the drop can be trusted. As for bounds of the SQNR, a sample that was not
        seen is counted besides that loses more than the worst that was.

        Args:
            candidate: file of the model.
            risk: how often the bound may be wrong; see `alpha_spending`.

        Raises:
            DataError: a run fails, or the metric does.
        """
        outputs = _run_each(self.views, candidate, self.samples)
        if not self.judging:
            return self._scored(outputs, risk)
        chosen, judged = (
            part._scored([outputs[place] for place in places], risk) for places, part in self._parts.items()
        )
        return replace(judged, chosen_by=chosen)

    @cached_property
    def _parts(self) -> dict[tuple[int, ...], Scorer]:
        """What scores the samples that choose and those that judge, by their places."""
        choosing = tuple(sorted(set(range(len(self.samples))).difference(self.judging)))
        return {places: self._part(places) for places in (choosing, self.judging)}

    def _part(self, places: Sequence[int]) -> Scorer:
        function = self.metric.function
        assert isinstance(function, Top1), "no other metric tells what some of the samples score"
        metric = replace(self.metric, function=function.of_places(self.outputs, places))
        samples, outputs = tuple(self.samples[one] for one in places), tuple(self.outputs[one] for one in places)
        files = tuple(self.files[place] for place in places) if self.files else ()
        return Scorer(metric, self.views, samples, outputs, score(metric, outputs, samples), files)

    def _scored(self, outputs: Sequence[Named], risk: float) -> Scores:
        drop = self.score - score(self.metric, outputs, self.samples)
        found = Scores(self.metric.name, self.score, self.score - drop, doubt=self._doubt)
        if self._doubt:
            return found
        groups = len(self._without)
        lost = groups * drop - (groups - 1) * (self._without - self._scores_without(outputs))
        # Where no sample differs, one that loses all it can is what may come, and so may a file; a group dilutes it.
        worst = self._most_of_a_sample * groups / len(self._apart)
        # No more than all answers that are right can be wrong.
        all_of_it = self.score if isinstance(self.metric.function, Top1) else math.inf
        most, least = (min(highest_mean(one, worst, risk), all_of_it) for one in (lost, np.zeros(groups)))
        # Few answers that differ in one file are no sign that none loses all it can.
        return replace(found, most_lost=max(most, least) if self.files else most, least_shown=least)

    @cached_property
    def _apart(self) -> list[list[int]]:
        """The places of samples, those together that count as one."""
        return group_equal(self.files or ("",) * len(self.samples))

    @property
    def _most_of_a_sample(self) -> float:
        """How much a single sample can lose: the one answer that it is for, or else all of the score."""
        return 1.0 if isinstance(self.metric.function, Top1) else abs(self.score)

    @cached_property
    def _doubt(self) -> str:
        """Why samples cannot be left out; empty where they can."""
        if len(self.samples) < 2:
            return "one sample does not show how much less others may score"
        if isinstance(self.metric.function, Top1):
            return ""
        try:
            again = score(self.metric, self.outputs, self.samples)
            turned = score(self.metric, self.outputs[::-1], self.samples[::-1])
            _ = self._without
        except DataError as error:
            return f"how much less other samples may score cannot be estimated, for without some of them {error}"
        if not _same(again, self.score):
            return (
                f"metric {self.metric.name!r} gives another score for the same answers in the same order, "
                f"{self.score:.4g} and {again:.4g}, so how much less others may score cannot be estimated; draw no "
                "random numbers in it, or from one seed in each call"
            )
        if not _same(turned, self.score):
            return (
                f"metric {self.metric.name!r} depends on the order of the samples, from {self.score:.4g} to "
                f"{turned:.4g} when it is turned round, so how much less others may score cannot be estimated"
            )
        return ""

    @cached_property
    def _without(self) -> NDArray[np.float64]:
        return self._scores_without(self.outputs)

    def _scores_without(self, outputs: Sequence[Named]) -> NDArray[np.float64]:
        """Return the score of a model without each part of the samples in turn."""
        if isinstance(self.metric.function, Top1):
            counted = self.metric.function.by_sample(outputs)
            counted = np.array([counted[one].sum(0) for one in self._apart])
            right, answers = (counted.sum(0) - counted).T
            return np.asarray(right / np.maximum(answers, 1))
        count = min(_GROUPS, len(self._apart))
        left = [
            sorted(chain.from_iterable(one for number, one in enumerate(self._apart) if number % count != group))
            for group in range(count)
        ]
        found = [
            score(self.metric, [outputs[place] for place in places], [self.samples[place] for place in places])
            for places in left
        ]
        return np.array(found)


def _same(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_ROUNDING, abs_tol=_ROUNDING)


def _run_each(views: ComparisonSpec, model: Path, samples: Sequence[Sample]) -> tuple[Named, ...]:
    view = views.open(model)
    found = (view.run(sample, index) for index, sample in enumerate(samples))
    return tuple(dict(zip(views.names, one, strict=True)) for one in found)
