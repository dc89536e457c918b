"""What a metric says of the float model and of another, and how much the other may have lost on all samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from onnxq.data.dataset import counting_as_one, shared_files
from onnxq.data.inputs import Sample, SampleSource
from onnxq.errors import DataError
from onnxq.evaluation.bounds import RISK, highest_mean
from onnxq.evaluation.metrics import Metric, Named, Top1, score
from onnxq.evaluation.views import Views

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
        files: of each sample, see `shared_files`; nothing where each counts by itself.
        judging: places of the samples by which models are judged, where plans are chosen by the others; else none.
    """

    metric: Metric
    views: Views
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
        views, given = Views.whole(reference), tuple(samples)
        outputs = _answers(views, reference, given)
        reached = score(metric, outputs, given)
        return cls(metric, views, given, outputs, reached, shared_files(samples), tuple(judging))

    def scores(self, candidate: Path, risk: float = RISK) -> Scores:
        """Return the scores of a model, and a bound of what it has lost.

        The bound leaves out parts of the samples, in both models alike, and asks for the drop of the rest (jackknife;
        Efron, Annals of Statistics 1979): single samples for top-1 accuracy, one of 16 interleaved groups for a
        function, which is called with what is left. The samples of one file, which are alike, are left out together.
        Student's t distribution tells how far the drop can be trusted. As for bounds of the SQNR, a sample that was not
        seen is counted besides that loses more than the worst that was.

        Args:
            candidate: file of the model.
            risk: how often the bound may be wrong; see `risk_of_look`.

        Raises:
            DataError: a run fails, or the metric does.
        """
        outputs = _answers(self.views, candidate, self.samples)
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
        return counting_as_one(self.files or ("",) * len(self.samples))

    @property
    def _most_of_a_sample(self) -> float:
        """How much a single sample can lose: the one answer that it is for, or else all of the score."""
        return 1.0 if isinstance(self.metric.function, Top1) else abs(self.score)

    @cached_property
    def _doubt(self) -> str:
        """Why samples cannot be left out; empty where they can."""
        if len(self.samples) < 2:
            return "one sample does not tell how much less others may score"
        if isinstance(self.metric.function, Top1):
            return ""
        try:
            again = score(self.metric, self.outputs, self.samples)
            turned = score(self.metric, self.outputs[::-1], self.samples[::-1])
            _ = self._without
        except DataError as error:
            return f"how much less other samples may score cannot be told, for without some of them {error}"
        if not _same(again, self.score):
            return (
                f"metric {self.metric.name!r} gives another score for the same answers in the same order, "
                f"{self.score:.4g} and {again:.4g}, so how much less others may score cannot be told; draw no random "
                "numbers in it, or from one seed in each call"
            )
        if not _same(turned, self.score):
            return (
                f"metric {self.metric.name!r} depends on the order of the samples, from {self.score:.4g} to "
                f"{turned:.4g} when it is turned round, so how much less others may score cannot be told"
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


def _answers(views: Views, model: Path, samples: Sequence[Sample]) -> tuple[Named, ...]:
    view = views.open(model)
    found = (view.run(sample, index) for index, sample in enumerate(samples))
    return tuple(dict(zip(views.names, one, strict=True)) for one in found)
