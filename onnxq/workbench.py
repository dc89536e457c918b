"""The prepared float model on disk, and everything that is built from it: plans, statistics, candidate models."""

from __future__ import annotations

import math
import statistics as statistics_module
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from onnxq.calibration.chain import ChainedSamples, with_optional
from onnxq.calibration.data import open_samples
from onnxq.calibration.images import ImageOptions
from onnxq.calibration.inputs import Sample, model_inputs
from onnxq.calibration.resume import Collection, calibrate_tensors
from onnxq.calibration.runner import SampleSource, collect
from onnxq.calibration.statistics import Statistics
from onnxq.evaluate import agreement_of, output_names
from onnxq.graph import Graph, Variable, load, save, scopes, skeleton, spilling
from onnxq.lowering import Emit
from onnxq.parameters import RangeMethod, activation_parameters
from onnxq.passes import (
    DecodeWeights,
    InsertQuantizeDequantize,
    IsolateProducts,
    Pipeline,
    QuantizeDynamically,
    QuantizeWeights,
    RemoveUnused,
    ReplaceWithContrib,
    ShareInitializers,
    StoreWeights,
)
from onnxq.planning.plan import METADATA_KEY, Demotion, Plan
from onnxq.planning.planner import make_plan
from onnxq.progress import Progress
from onnxq.runtime import is_large, open_session, run
from onnxq.scheme import Scheme
from onnxq.targets import Target


@dataclass(frozen=True)
class Workbench:
    """A prepared float model in a working folder, with what the user wants of it.

    Attributes:
        prepared: file of the prepared model, its weights beside it, so that loading it again costs little.
        scheme: the user's rules.
        target: the runtime.
        declared: names of the inner tensors whose types the user's model declares; built models declare no others.
        emit: which operators decode weights.
    """

    prepared: Path
    scheme: Scheme
    target: Target
    declared: frozenset[str] = frozenset()
    emit: Emit = Emit.QDQ

    @cached_property
    def graph(self) -> Graph:
        """The prepared graph, for reading only."""
        return load(self.prepared)

    @cached_property
    def is_large(self) -> bool:
        """Whether the model's weights had better stay in their files than in memory."""
        return is_large(self.prepared)

    def plan(self, demotions: Mapping[str, Demotion]) -> Plan:
        """Plan with some nodes taken out of integer arithmetic."""
        return make_plan(self.graph, self.scheme, self.target, demotions)

    def samples(
        self,
        source: str | Path | Iterable[Sample],
        images: ImageOptions | None,
        limit: int | None,
        chain: Mapping[str, str],
    ) -> SampleSource:
        """Open samples for the model; chained inputs are completed with what the float model leaves behind."""
        inputs = with_optional(model_inputs(skeleton(self.graph)), chain)
        samples = open_samples(source, inputs, images=images, limit=limit)
        return ChainedSamples(samples, self.prepared, chain) if chain else samples

    def calibrate(
        self, plan: Plan, samples: SampleSource, progress: Progress, collection: Collection | None = None
    ) -> Statistics:
        """Run the float model and collect statistics of every tensor that the plan needs.

        Told how to collect them, they have a provenance, which takes reading all samples and the model once more.
        """

        def told(done: int, total: int) -> None:
            progress("calibrate", done, total)

        if not plan.taps:
            return Statistics(0, {})
        if collection is None:
            return collect(self.prepared, samples, plan.taps, progress=told)
        return calibrate_tensors(self.prepared, samples, plan.taps, collection, progress=told)

    def build(
        self, plan: Plan, statistics: Statistics, ranges: RangeMethod, path: Path, *, external_data: bool
    ) -> Graph:
        """Write the model that a plan describes to ``path`` and return its graph."""
        graph = load(self.prepared)
        parameters = activation_parameters(plan, statistics, ranges)
        pipeline = Pipeline(
            (
                QuantizeWeights(plan, parameters),
                InsertQuantizeDequantize(plan, parameters),
                QuantizeDynamically(plan),
                *((ReplaceWithContrib(plan),) if self.emit is Emit.ORT else ()),
                IsolateProducts(plan),
                DecodeWeights(plan, self.emit),
                StoreWeights(plan, self.emit),
                ShareInitializers(),
                RemoveUnused(),
            )
        )
        with spilling(path.parent) if self.is_large else nullcontext():
            pipeline.apply(graph)
        graph.set_metadata(METADATA_KEY, plan.scheme)
        for tensor in inner_variables(graph):
            if tensor.name not in self.declared:
                tensor.dtype = tensor.shape = tensor.source = None
        save(graph, path, external_data=external_data)
        return graph

    def trials(self, reference: Path, samples: Iterable[Sample], statistics: Statistics) -> Trials:
        """Run the float model once on a few samples, whose outputs are kept, so that plans can be tried against it."""
        kept = tuple(samples)
        session = open_session(reference)
        names = tuple(output_names(session))
        expected = tuple(tuple(run(session, sample, names)) for sample in kept)
        return Trials(self, statistics, kept, names, expected)


@dataclass(frozen=True, eq=False)
class Trials:
    """What is needed to build a plan's model and see how far it is from the float model.

    Attributes:
        bench: builds the models.
        statistics: of the plan's activations.
        samples: the samples that every candidate runs.
        names: of the outputs.
        expected: the float model's outputs for each sample.
        measured: what sqnr() found.
    """

    bench: Workbench
    statistics: Statistics
    samples: tuple[Sample, ...]
    names: tuple[str, ...]
    expected: tuple[tuple[Any, ...], ...]
    measured: dict[object, float] = field(default_factory=dict)

    def sqnr(self, plan: Plan, ranges: RangeMethod) -> float:
        """Return the SQNR in decibels that a plan's model can be trusted to have on samples it has not seen.

        This is the worst output's over all samples, or the lower confidence bound of the samples' own SQNRs where that
        is less: few samples that differ much prove little. It is -inf when an output is not finite. What was measured
        before is remembered.
        """
        key = plan.effect, repr(ranges)
        if key not in self.measured:
            alone = self._outputs(plan, ranges)
            agreement = agreement_of(self.names, alone)
            each = [agreement_of(self.names, [pair]).worst_sqnr for pair in alone]
            trusted = min(agreement.worst_sqnr, lower_bound(each))
            self.measured[key] = trusted if agreement.sound else float("-inf")
        return self.measured[key]

    def _outputs(self, plan: Plan, ranges: RangeMethod) -> list[tuple[tuple[Any, ...], list[Any]]]:
        """Build a plan's model and return the float model's outputs and its own for each sample."""
        session = open_session(self.candidate(plan, ranges), mapped=self.bench.is_large)
        pairs = zip(self.samples, self.expected, strict=True)
        return [(expected, run(session, sample, self.names)) for sample, expected in pairs]

    def candidate(self, plan: Plan, ranges: RangeMethod) -> Path:
        """Build a plan's model and return its file, which the next candidate overwrites."""
        path = self.bench.prepared.with_name("candidate.onnx")
        self.bench.build(plan, self.statistics, ranges, path, external_data=self.bench.is_large)
        return path


# One-sided 95 % quantiles of Student's t distribution for 1, 2, ... degrees of freedom.
_STUDENT = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833)
# Outputs that are equal, or nearly, must not make the ratio zero.
_LARGEST_SQNR = 150.0


def lower_bound(values: Sequence[float]) -> float:
    """Return a one-sided 95 % lower confidence bound of the SQNR over all samples from those of a few.

    The bound is taken of the mean noise-to-signal ratio, which the worst samples dominate as they dominate the noise of
    all. A sample twice as noisy as the worst is counted besides, since a few samples seldom hold the rare answer
    that a little noise turns over, and a plan was chosen because they did not. Infinite for a single value.

    >>> round(lower_bound([28.0, 17.8, 25.9]), 1)
    15.1
    """
    if len(values) < 2:
        return float("inf")
    ratios = [10 ** (-min(value, _LARGEST_SQNR) / 10) for value in values]
    ratios.append(2 * max(ratios))
    quantile = _STUDENT[min(len(ratios) - 1, len(_STUDENT)) - 1]
    highest = statistics_module.fmean(ratios) + quantile * statistics_module.stdev(ratios) / math.sqrt(len(ratios))
    return -10 * math.log10(highest)


def inner_variables(graph: Graph) -> Iterator[Variable]:
    """Yield the tensors that nodes of a graph and its bodies compute, outputs of a graph aside."""
    for scope in scopes(graph):
        outputs = set(scope.outputs)
        for node in scope.nodes:
            yield from (tensor for tensor in node.outputs if tensor.name and tensor not in outputs)
