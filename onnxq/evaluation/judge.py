"""By what built models are judged: samples, a metric, and the time to spend on their speed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from onnxq.data.dataset import Selection, even_places
from onnxq.data.inputs import SampleSource
from onnxq.data.samples import leaves_out
from onnxq.evaluation.bounds import risk_of_look
from onnxq.evaluation.hardest import hardest
from onnxq.evaluation.latency import Latency
from onnxq.evaluation.metrics import Metric, of_first_samples
from onnxq.evaluation.scoring import Scorer, Scores
from onnxq.evaluation.verify import COMPARED_SAMPLES, Timer, Verification, verify
from onnxq.runtime.engine import Engine
from onnxq.system.deadline import NEVER, Deadline

# A look at a model's speed, and two of twice the time where it is slower, take half of the time that is left.
_LOOKING = 1 / 10
# A model that is tried when the time is up is timed as well: an untimed one could be slower. So many seconds give the
# rounds that an interval needs; where less time was asked for, three times that do.
_LEAST_PATIENCE = 3.0


@dataclass(frozen=True, eq=False)
class Judge:
    """What judges the models that are built.

    Attributes:
        reference: file of the float model.
        samples: those that models are judged by.
        seconds: time to spend on comparing latency; 0 leaves it out.
        scorer: of the metric, where there is one.
        deadline: comparing latency takes half of what is left until then, or what a look needs if that is more.
        engine: what models are for, where that is not onnxruntime in this process.
        timer: what times models; None makes what they are for do so.
        prepared: file of the prepared float model.
    """

    reference: Path
    samples: SampleSource
    seconds: float
    scorer: Scorer | None = None
    deadline: Deadline = NEVER
    engine: Engine | None = None
    timer: Engine | None = None
    prepared: Path | None = None

    @classmethod
    def of(cls, reference: Path, samples: SampleSource, seconds: float, metric: Metric | None) -> Judge:
        """Ask the metric about the float model first, so that whatever is wrong with it is told before a search.

        Args:
            reference: file of the float model.
            samples: those that models are judged by; where the others that they were selected from choose, the metric
                knows all of them, in whose order its labels are.
            seconds: time to spend on comparing latency.
            metric: tells instead of decibels.

        Raises:
            DataError: a run fails, or the metric does.
        """
        if metric is None:
            return cls(reference, samples, seconds)
        whole: SampleSource = samples
        judging: tuple[int, ...] = ()
        if metric.knows_samples and isinstance(samples, Selection):
            whole, judging = samples.samples, tuple(samples.places)
        metric = of_first_samples(metric) if leaves_out(whole) else metric
        return cls(reference, samples, seconds, Scorer.of(metric, reference, whole, judging))

    def verified(self, candidate: Path, look: int, known: Latency | None = None) -> Verification:
        """Run a model beside the float model; see `verify`.

        Args:
            candidate: file of the model.
            look: how many models these samples have judged, with this one.
            known: what is known of its times; more is measured where that is not plain.
        """
        patience = max(self.deadline.left * _LOOKING, min(_LEAST_PATIENCE, 3 * self.seconds))
        timer = Timer(min(self.seconds, patience), self.timer, patience, known)
        given = self.reference, candidate, self.samples
        risk = risk_of_look(look)
        return verify(*given, timer=timer, risk=risk, engine=self.engine, prepared=self.prepared)

    def scores(self, candidate: Path, look: int) -> Scores | None:
        """Return what the metric says of a model, where there is one; see `verified`."""
        return self.scorer.scores(candidate, risk_of_look(look)) if self.scorer is not None else None

    @property
    def scored(self) -> int:
        """How many runs of a model the metric takes; 0 where there is none."""
        return len(self.scorer.samples) if self.scorer is not None else 0

    def hardest(self, candidate: Path, most: int) -> SampleSource:
        """Return the samples that a model is least faithful to, at most so many."""
        judging = Selection(self.samples, even_places(len(self.samples), COMPARED_SAMPLES))
        return Selection(judging, hardest(self.reference, candidate, judging, most))
