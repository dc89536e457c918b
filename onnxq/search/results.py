"""What a search hands on: the chosen candidate, what verified it, and the trail of what was tried."""

from __future__ import annotations

from dataclasses import dataclass, replace

from onnxq.config.scheme import Mode
from onnxq.data.inputs import Sample
from onnxq.evaluation.goal import Goal
from onnxq.evaluation.metrics import Scores
from onnxq.evaluation.verification import Verification
from onnxq.search.candidate import Candidate
from onnxq.search.kernel_times import NodeTime, Region

# Deficit in decibels of an output that no goal allows, such as one with non-finite values.
_INVALID_OUTPUT_DEFICIT_DB = 1.5

TRAINING = "training"
"""Method name of the gain of training, which comes after all methods."""


@dataclass(frozen=True)
class MethodGain:
    """The effect of one accuracy method.

    Attributes:
        before: SQNR in decibels of the worst output without it, on the samples that judged it.
        after: SQNR with the part that was kept.
        kept: what was kept, in words; empty if nothing was.
        left: why nothing, or not all, was kept; empty otherwise.
        where: the tensors or nodes that changed; empty if all did, or nothing was kept. For GPTQ, these are the tensors
            that the rounded weights multiply.
        device: what trained, with the times of a step if it was chosen by them; empty if there was no choice.
    """

    method: str
    before: float
    after: float
    kept: str
    seconds: float
    left: str = ""
    where: tuple[str, ...] = ()
    device: str = ""


@dataclass(frozen=True)
class NodeSensitivity:
    """The error that one quantized node adds.

    Attributes:
        sqnr: SQNR in decibels of the worst output with only this node quantized.
    """

    node: str
    mode: Mode
    sqnr: float


@dataclass(frozen=True)
class Point:
    """A plan that was tried, by its latency and accuracy.

    Attributes:
        static: number of integer nodes with fixed scales.
        dynamic: number of integer nodes whose scale each run computes.
        milliseconds: expected time of a run.
        sqnr: decibels of the worst output on unseen samples with 95 % confidence, or None.
        speed: measured speed relative to the float model, or None.
        weight_only: number of nodes that multiply quantized weights with float activations.
        predicted: expected SQNR in decibels before the measurement, or None.
        is_float: True for the float model, the reference of the others.
    """

    static: int
    dynamic: int
    milliseconds: float
    sqnr: float | None = None
    speed: float | None = None
    chosen: bool = False
    weight_only: int = 0
    predicted: float | None = None
    is_float: bool = False


@dataclass(frozen=True)
class SizePoint:
    """A size of the file, and the least error in it.

    Attributes:
        bytes: expected size.
        sqnr: expected SQNR in decibels of the worst output; None if nothing is measured.
    """

    bytes: int
    sqnr: float | None = None


@dataclass(frozen=True)
class Trail:
    """What was tried and measured on the way to a result.

    Attributes:
        measured: number of models built and run.
        sensitivities: the error to expect of each node if only it is quantized, highest first; empty if the scheme was
            accurate.
        frontier: the plans that were tried, by expected time; empty if no times are known.
        regions: the integer regions of the chosen plan beside float; empty likewise.
        times: times of the chosen plan's nodes beside float; empty likewise.
        late: whether time ran out.
        sizes: sizes that the model could have, smallest first; empty if the bits of weights were not chosen.
        gains: effect of each accuracy method that was tried.
        skipped_at_sqnr: bound in decibels of the scheme, if it was so high that no method was tried; else None.
        samples: that candidates were compared on.
        rounds: number of models that were judged on the holdout.
    """

    measured: int = 0
    sensitivities: tuple[NodeSensitivity, ...] = ()
    frontier: tuple[Point, ...] = ()
    regions: tuple[Region, ...] = ()
    times: tuple[NodeTime, ...] = ()
    late: bool = False
    sizes: tuple[SizePoint, ...] = ()
    gains: tuple[MethodGain, ...] = ()
    skipped_at_sqnr: float | None = None
    samples: tuple[Sample, ...] = ()
    rounds: int = 1


@dataclass(frozen=True, eq=False)
class SearchResult:
    """The chosen candidate, and what was seen of its model on the holdout.

    Attributes:
        scores: of the metric, if there is one.
        keeps_up: False if latency was measured and the model is not shown to be as fast as the float model.
    """

    candidate: Candidate
    verification: Verification
    scores: Scores | None = None
    keeps_up: bool = True
    trail: Trail = Trail()

    def lacks(self, goal: Goal) -> float:
        """Return by how many decibels the worst output misses the goal; 0 if it reaches it.

        The result is also 0 if the goal is a metric, or if output shapes differ.
        """
        agreements = self.verification.agreements
        outputs = (output for agreement in agreements for output in agreement.outputs)
        if goal.metric is not None or not all(output.same_shapes for output in outputs):
            return 0.0
        lacking = max(goal.min_sqnr - min(agreement.worst_sqnr for agreement in agreements), 0.0)
        return lacking if all(agreement.sound for agreement in agreements) else max(lacking, _INVALID_OUTPUT_DEFICIT_DB)

    def with_gain(self, gain: MethodGain) -> SearchResult:
        """Return the same with the effect of one more method."""
        return replace(self, trail=replace(self.trail, gains=(*self.trail.gains, gain)))
