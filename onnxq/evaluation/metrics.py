"""Task metrics: top-1 accuracy or the user's Python function, and a bound of the drop on all samples."""

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

from onnxq.calibration.data import Data, SamplesLike
from onnxq.data.arrays import npy_array, npz_arrays
from onnxq.data.dataset import Subset, group_equal, labels_of, list_shared_files
from onnxq.data.inputs import Sample, SampleSource
from onnxq.data.samples import is_truncated
from onnxq.errors import DataError, SchemeError, did_you_mean
from onnxq.evaluation.bounds import RISK, highest_mean
from onnxq.evaluation.comparison import ComparisonSpec, open_pair
from onnxq.system.plugins import describe_error, import_plugin

Named: TypeAlias = Mapping[str, Any]
"""Arrays by name of input or output."""

_TOP1 = "top1"
_EXPECTED = "top1, top1:LABELS.npy, top1:LABELS.npz:KEY, MODULE:FUNCTION or FILE.py:FUNCTION"


@dataclass(frozen=True, eq=False)
class Metric:
    """A number for the outputs of a model, higher is better.

    Attributes:
        name: the user's text.
        function: takes outputs and samples, two lists of dictionaries from name to read-only array, and returns the
            number. It may be called on subsets and in other orders, so it pairs labels by sample, not by position.

    >>> Metric("mine", lambda outputs, samples: float(len(samples))).function([], [{}, {}])
    2.0
    """

    name: str
    function: Callable[[Sequence[Named], Sequence[Named]], Any]

    @property
    def knows_samples(self) -> bool:
        """Whether it can score some of the samples alone; a function may depend on their number and order."""
        return isinstance(self.function, Top1)


@dataclass(frozen=True, eq=False)
class Top1:
    """The share of samples whose label is the arg max of the first output along its last axis, or the output itself.

    Attributes:
        labels: class numbers in the order of the data; None takes those that the samples were given with.
        of_more: whether the labels may be of more samples than are used; the first ones are used.
    """

    labels: NDArray[np.integer[Any]] | None = None
    of_more: bool = False

    def of_samples(self, samples: SampleSource) -> Top1:
        """Return the metric with the labels that the samples were given with, if it has none.

        Raises:
            DataError: samples were given without labels.
        """
        if self.labels is not None:
            return self
        labels = [labels_of(samples, index) for index in range(len(samples))]
        if lacking := sum(not label for label in labels):
            raise DataError(
                f"metric top1 has no label for {lacking} of {len(labels)} samples, expected one for each; write "
                "top1:LABELS.npy, or give a loader of inputs and as many labels, dictionaries with labels, or a folder "
                "of images with a subfolder for each class"
            )
        return Top1(np.array(list(chain.from_iterable(labels))))

    def __call__(self, outputs: Sequence[Named], samples: Sequence[Named]) -> float:
        """Return the share; an output of several rows has one label for each row."""
        right, count = np.sum(self.by_sample(outputs), axis=0).tolist()
        return float(right / count)

    def by_sample(self, outputs: Sequence[Named]) -> NDArray[np.float64]:
        """Return the number of right answers and of all answers, for each sample.

        Raises:
            DataError: The number of answers is not that of the labels, or the first output holds no scores.
        """
        assert self.labels is not None, "labels of the samples are taken before they are scored"
        answers = [_classes(next(iter(output.values()))) for output in outputs]
        ends = np.cumsum([len(answer) for answer in answers])
        if ends[-1] > len(self.labels) or (ends[-1] < len(self.labels) and not self.of_more):
            raise DataError(
                f"the model gives {ends[-1]} answers for {len(outputs)} samples and there are {len(self.labels)} "
                "labels, expected one for each; give the labels of these samples alone, of --validation if it is given"
            )
        labels = np.split(self.labels[: ends[-1]], ends[:-1])
        right = [np.count_nonzero(answer == label) for answer, label in zip(answers, labels, strict=True)]
        return np.stack([np.array(right, np.float64), np.diff(ends, prepend=0).astype(np.float64)], 1)


def load_metric(text: str) -> Metric:
    """Return the metric that a text names. It imports the user's module or file, and runs nothing else.

    Args:
        text: ``top1`` for the labels that the samples are given with, or ``top1:LABELS`` with a ``.npy`` file of class
            numbers in the order of the samples. An ``.npz`` file with several arrays needs ``:KEY``. Or
            ``module:function``, or ``file.py:function``.

    Raises:
        SchemeError: The text names nothing, or the module cannot be imported or has no such function.
        DataError: The labels cannot be read or are no class numbers.

    >>> load_metric("top1:models/data/test-labels.npy").name
    'top1:models/data/test-labels.npy'
    """
    kind, _, rest = text.partition(":")
    if kind == _TOP1:
        return Metric(text, Top1(_labels(rest) if rest else None))
    # A drive letter ends in a colon too.
    place, _, name = text.rpartition(":")
    if not place or not name:
        raise SchemeError(f"metric {text!r} is not written as {_EXPECTED}{did_you_mean(text, [_TOP1])}")
    module = import_plugin(place, f"metric {text!r}", [_TOP1])
    function = getattr(module, name, None)
    if not callable(function):
        fault = "has none of that name" if function is None else f"has {type(function).__name__} {name!r}"
        callables = [each for each, value in vars(module).items() if callable(value)]
        raise SchemeError(f"metric {text!r} needs a function, but {place} {fault}{did_you_mean(name, callables)}")
    return Metric(text, function)


def score(metric: Metric, outputs: Sequence[Named], samples: Sequence[Named]) -> float:
    """Return the metric's finite number for the outputs of a model.

    Args:
        metric: from `load_metric`.
        outputs: of the model, for each sample in order.
        samples: all samples or the first ones, in order, as the labels require.

    Raises:
        DataError: There is no sample, the function fails, or it returns no finite number.
    """
    if not samples:
        raise DataError(f"there are no samples for metric {metric.name!r}; give at least one")
    try:
        value = metric.function([_guarded(output) for output in outputs], [_guarded(sample) for sample in samples])
    except DataError:
        raise
    except (Exception, SystemExit) as error:
        raise DataError(f"metric {metric.name!r} failed: {describe_error(error)}") from error
    return _finite(value, metric.name)


def _guarded(value: Any) -> Any:
    """Return arrays as read-only views, so that a metric cannot change values that are used again."""
    if isinstance(value, np.ndarray):
        value = value.view()
        value.flags.writeable = False
        return value
    if isinstance(value, Mapping):
        return {name: _guarded(element) for name, element in value.items()}
    return [_guarded(element) for element in value] if isinstance(value, list) else value


def _finite(value: Any, name: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise DataError(f"metric {name!r} returned {value!r}, expected a finite number, higher for a better model")
    return number


def _labels(text: str) -> NDArray[np.integer[Any]]:
    place, _, key = text.rpartition(":")
    path = Path(text if text.endswith((".npy", ".npz")) else place)
    if path.suffix == ".npz":
        arrays = npz_arrays(path)
        if path == Path(text):
            if len(arrays) != 1:
                raise DataError(
                    f"{path} has arrays {', '.join(arrays)}, expected one; name the labels as top1:{path}:KEY"
                )
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


# Scores of the float model and of a candidate, and a bound of the drop on all samples.

# Labels are doubted if the float model's accuracy covers less than this share of the way from chance to 100 %.
_HARDLY = 0.1
# Number of groups of samples that the jackknife leaves out in turn, for a function.
_GROUPS = 16
# Sums of floats in another order differ by less than this.
_ROUNDING = 1e-6
_ONE_SAMPLE = "one sample gives no bound for the score of others"


@dataclass(frozen=True)
class Scores:
    """A metric of both models on the same samples.

    Attributes:
        name: of the metric.
        reference: of the float model.
        candidate: of the quantized model.
        most_lost: upper 95 % confidence bound of the drop over all samples; infinite if unknown.
        least_shown: the least bound that this number of samples can show, if the models differ on none.
        warning: why there is no bound, in a sentence; else empty.
        doubt: that the float model hardly finds the labels, in a sentence; else empty.
        chosen_by: the scores on the samples that plans are chosen by, if others evaluate; else None.
    """

    name: str
    reference: float
    candidate: float
    most_lost: float = math.inf
    least_shown: float = math.inf
    warning: str = ""
    doubt: str = ""
    chosen_by: Scores | None = None

    @property
    def drop(self) -> float:
        """Float score less the quantized model's score."""
        return self.reference - self.candidate

    def allowed_by(self, most: float) -> bool:
        """Whether the drop is at most `most`, apart from rounding."""
        return self.drop <= most + _ROUNDING

    def is_trusted(self, allowed: float) -> bool:
        """Whether the bound of the drop is allowed; the drop itself counts if the samples are too few for that bound.

        If plans are chosen by other samples, both scores must be allowed.
        """
        if self.chosen_by is not None and not self.chosen_by.is_trusted(allowed):
            return False
        return self.allowed_by(allowed) if self.least_shown > allowed else self.most_lost <= allowed + _ROUNDING


@dataclass(frozen=True, eq=False)
class Scorer:
    """A metric with the float model's outputs, to score candidates.

    Attributes:
        views: opens models so that all draw the same random numbers.
        samples: in the order of the data.
        shown: the samples as the metric gets them, with their ``labels`` if they have any.
        outputs: the float model's, for each sample.
        score: of the float model.
        files: of each sample, see `list_shared_files`; empty if each counts by itself.
        holdout: indices of the holdout samples, if the other samples choose plans; else empty.
    """

    metric: Metric
    views: ComparisonSpec
    samples: tuple[Sample, ...]
    shown: tuple[Sample, ...]
    outputs: tuple[Named, ...]
    score: float
    files: tuple[str, ...] = ()
    holdout: tuple[int, ...] = ()

    @classmethod
    def of(cls, metric: Metric, reference: Path, samples: SampleSource, holdout: Sequence[int] = ()) -> Scorer:
        """Run the float model on samples and keep all its outputs.

        Args:
            metric: higher is better.
            reference: file of the float model.
            samples: in the order of the data; with a limit, its first ones, and labels may be of more.
            holdout: indices of the holdout samples; only for a metric with `knows_samples`.

        Raises:
            DataError: There is no sample, a run fails, or the metric does.
        """
        views, kept = ComparisonSpec.whole(reference), tuple(samples)
        if isinstance(metric.function, Top1):
            function = replace(metric.function.of_samples(samples), of_more=is_truncated(samples))
            metric = replace(metric, function=function)
        outputs = _run_each(views, reference, kept)
        labels = (labels_of(samples, index) for index in range(len(kept)))
        shown = tuple(
            {**sample, "labels": np.array(own)} if own else sample for sample, own in zip(kept, labels, strict=True)
        )
        reached = score(metric, outputs, shown)
        return cls(metric, views, kept, shown, outputs, reached, list_shared_files(samples), tuple(holdout))

    @classmethod
    def of_holdout(cls, metric: Metric, reference: Path, samples: SampleSource) -> Scorer:
        """Run the float model on the samples that models are evaluated on; see `of`.

        If they are a subset, a metric with `knows_samples` scores the whole set, as its labels are in that order.
        """
        if metric.knows_samples and isinstance(samples, Subset):
            return cls.of(metric, reference, samples.samples, samples.places)
        return cls.of(metric, reference, samples)

    def scores(self, candidate: Path, risk: float = RISK) -> Scores:
        """Return the scores of a model, and a bound of the drop.

        The jackknife leaves out parts of the samples in both models (Efron, Annals of Statistics 1979). For top-1
        accuracy a part is one sample; for a function, one of at most 16 interleaved groups. Samples of one file are
        left out together. Student's t distribution gives the bound, with one unseen sample that loses more than the
        worst.

        Args:
            candidate: file of the model.
            risk: probability that the bound is wrong; see `alpha_spending`.

        Raises:
            DataError: A run fails, or the metric does.
        """
        outputs = _run_each(self.views, candidate, self.samples)
        if not isinstance(self.metric.function, Top1):
            return self._by_function(outputs, risk)
        before, after = (self.metric.function.by_sample(each) for each in (self.outputs, outputs))
        choosing = [place for place in range(len(outputs)) if place not in self.holdout]
        if not self.holdout:
            return self._by_answers(before, after, choosing, risk)
        evaluated = self._by_answers(before, after, list(self.holdout), risk)
        return replace(evaluated, chosen_by=self._by_answers(before, after, choosing, risk))

    def _by_answers(
        self, reference: NDArray[np.float64], candidate: NDArray[np.float64], places: list[int], risk: float
    ) -> Scores:
        """Return the shares of right answers on some samples, given the right and all answers of each sample."""
        apart = self._apart(places)
        (before, before_without), (after, after_without) = (
            _shares(counts, places, apart) for counts in (reference, candidate)
        )
        scores = Scores(self.metric.name, before, after, doubt=self._doubt(before))
        if len(places) < 2:
            return replace(scores, warning=_ONE_SAMPLE)
        # If no sample differs, assume that one unseen sample loses its one answer; all right answers can become wrong.
        return self._bounded(scores, before_without, after_without, 1.0, before, risk)

    def _by_function(self, outputs: Sequence[Named], risk: float) -> Scores:
        reached = score(self.metric, outputs, self.shown)
        scores = Scores(self.metric.name, self.score, reached, warning=self._warning)
        if self._warning:
            return scores
        # If no sample differs, assume that one unseen sample or file loses the whole score; a group dilutes it.
        worst = abs(self.score) * len(self._without) / len(self._apart(range(len(outputs))))
        return self._bounded(scores, self._without, self._scores_without(outputs), worst, math.inf, risk)

    def _bounded(
        self,
        scores: Scores,
        before: NDArray[np.float64],
        after: NDArray[np.float64],
        worst: float,
        most_of_all: float,
        risk: float,
    ) -> Scores:
        """Return scores with the bound of the drop, given both models' scores without each group in turn."""
        groups = len(before)
        lost = groups * scores.drop - (groups - 1) * (before - after)
        most, least = (min(highest_mean(drops, worst, risk), most_of_all) for drops in (lost, np.zeros(groups)))
        # A few different answers in one file do not show that no file loses all it can.
        return replace(scores, most_lost=max(most, least) if self.files else most, least_shown=least)

    def _apart(self, places: Sequence[int]) -> list[list[int]]:
        """Return the indices of some samples, in groups that are left out together."""
        groups = group_equal([self.files[place] if self.files else "" for place in places])
        return [[places[index] for index in group] for group in groups]

    @cached_property
    def _warning(self) -> str:
        """Why samples cannot be left out of a function; empty if they can."""
        if len(self.samples) < 2:
            return _ONE_SAMPLE
        try:
            again = score(self.metric, self.outputs, self.shown)
            turned = score(self.metric, self.outputs[::-1], self.shown[::-1])
            _ = self._without
        except DataError as error:
            return f"no bound can be estimated for other samples: without some samples, {error}"
        if not _same(again, self.score):
            return (
                f"metric {self.metric.name!r} gives {self.score:.4g} and {again:.4g} for the same answers, so its "
                "score has no bound; seed its random numbers in each call"
            )
        if not _same(turned, self.score):
            return (
                f"metric {self.metric.name!r} depends on the order of the samples ({self.score:.4g}, reversed "
                f"{turned:.4g}), so its score has no bound"
            )
        return ""

    def _doubt(self, reference: float) -> str:
        """Return that the float model's top-1 accuracy is hardly above chance; empty if it is well above."""
        scores = next(iter(self.outputs[0].values()))
        if scores.dtype.kind in "iu" or scores.shape[-1] < 2:
            return ""
        chance = 1 / scores.shape[-1]
        if reference >= chance + _HARDLY * (1 - chance):
            return ""
        return (
            f"the float model gives {reference:.1%} of {self.metric.name} right, where guessing gives {chance:.1%}; "
            "check the labels and their order, and the preprocessing of the samples"
        )

    @cached_property
    def _without(self) -> NDArray[np.float64]:
        return self._scores_without(self.outputs)

    def _scores_without(self, outputs: Sequence[Named]) -> NDArray[np.float64]:
        """Return the scores of a model by a function without each of at most 16 interleaved groups in turn."""
        apart = self._apart(range(len(outputs)))
        scores = []
        for group in range(count := min(_GROUPS, len(apart))):
            rest = sorted(chain.from_iterable(places for number, places in enumerate(apart) if number % count != group))
            scores.append(score(self.metric, [outputs[place] for place in rest], [self.shown[place] for place in rest]))
        return np.array(scores)


def compare_scores(metric: Metric, reference: str | Path, candidate: str | Path, data: SamplesLike | Data) -> Scores:
    """Score two model files on samples that fit the reference, which both run on onnxruntime in this process.

    Args:
        metric: higher is better.
        reference: file of the float model.
        candidate: file of a model with the same outputs.
        data: the samples, in the order that the metric requires; with a limit, the first ones.

    Raises:
        ModelError: A file cannot be read or loaded.
        DataError: The samples do not fit, or the metric fails.
    """
    with open_pair(reference, candidate, data, in_order=True) as (floating, model, samples):
        return Scorer.of(metric, floating, samples).scores(model)


def _shares(
    counts: NDArray[np.float64], places: list[int], apart: Sequence[list[int]]
) -> tuple[float, NDArray[np.float64]]:
    """Return the share of right answers of some samples, and the shares without each group of these in turn."""
    whole = counts[places].sum(0)
    right, answers = (whole - np.array([counts[group].sum(0) for group in apart])).T
    return float(whole[0] / whole[1]), np.asarray(right / np.maximum(answers, 1))


def _same(first: float, second: float) -> bool:
    return math.isclose(first, second, rel_tol=_ROUNDING, abs_tol=_ROUNDING)


def _run_each(views: ComparisonSpec, model: Path, samples: Sequence[Sample]) -> tuple[Named, ...]:
    view = views.open(model)
    outputs = (view.run(sample, index) for index, sample in enumerate(samples))
    return tuple(dict(zip(views.names, output, strict=True)) for output in outputs)
