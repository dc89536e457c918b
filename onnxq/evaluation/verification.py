"""Verification of written models: outputs, kernels and latency beside the float model."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import onnx

from onnxq.data.dataset import Subset
from onnxq.data.inputs import Sample, SampleSource
from onnxq.data.samples import evenly, is_truncated
from onnxq.evaluation.agreement import Agreement, compare, with_own_choices
from onnxq.evaluation.bounds import RISK, alpha_spending
from onnxq.evaluation.comparison import ComparisonSession, ComparisonSpec, threads_at_once
from onnxq.evaluation.latency import ENOUGH, NOT_SLOWER, Latency, measure_latencies
from onnxq.evaluation.metrics import Metric, Scorer, Scores, of_first_samples
from onnxq.evaluation.reference import ReferenceModel
from onnxq.ir.protos import node_protos
from onnxq.ir.stored_tensors import is_large
from onnxq.runtime.engine import Engine, OnnxRuntime, is_in_process
from onnxq.runtime.kernels import ran_kernels
from onnxq.runtime.sessions import copy_without_weights, open_session, run
from onnxq.system.publish import staging
from onnxq.system.resources import NEVER, Deadline

_LOG = logging.getLogger(__name__)

_INTEGER_KERNELS = frozenset(
    {
        "ConvInteger",
        "DynamicQuantizeLSTM",
        "DynamicQuantizeMatMul",
        "GatherBlockQuantized",
        "MatMulInteger",
        "MatMulIntegerToFloat",
        "MatMulNBits",
        "NhwcMaxPool",
        "QGemm",
        "QMoE",
    }
)
# Seconds. Models of thousands of nodes take seconds to load, in each round anew.
_PATIENCE = 20.0
# Rounds of the first timing.
_ROUNDS = 6
# Runs of a model in each round of the second timing, and how often it is repeated at most.
_MANY, _MORE_LOOKS = 32, 4
# Decibels. Runtimes round differently: two runtimes were 17 dB apart where a few probabilities turned over.
_NONSENSE, _DISPUTED = 6.0, 15.0
# Decibels. A larger loss on an engine than in this process may come from its float precision.
_COARSER = 3.0
COMPARED_SAMPLES = 64
"""Number of samples that a model is evaluated on at most, evenly spaced."""
_TIMED_SAMPLES = 4
_HEAVY = frozenset({"Conv", "ConvTranspose", "FusedConv", "FusedGemm", "FusedMatMul", "Gemm", "MatMul", "MatMulNBits"})
_HEAVY_INTEGER = frozenset(
    {"ConvInteger", "DynamicQuantizeMatMul", "MatMulInteger", "MatMulIntegerToFloat", "QGemm", "QLinearConv"}
    | {"QLinearMatMul"}
)


@dataclass(frozen=True, eq=False)
class Timer:
    """Settings for timing a written model.

    Attributes:
        seconds: time to spend on each engine; 0 leaves timing out, as does a model above 1 GiB.
        patience: seconds after which models are not loaded once more; 20 at most.
    """

    seconds: float
    patience: float = _PATIENCE

    def latency(
        self,
        engine: Engine,
        reference: Path,
        candidate: Path,
        samples: Sequence[Sample],
        *,
        computes_in_float: bool,
    ) -> Latency:
        """Time a model, and time it again if it is not shown to keep up with the float model.

        Other work on the machine shows in the float model beside itself. Then timing goes on for longer, and says so,
        rather than decide against the model.

        Args:
            engine: runs both models.
            reference: file of the float model.
            candidate: file of the model.
            samples: run round robin.
            computes_in_float: whether the model has no integer kernel. It is then as fast as float at best, so it only
                has to keep up. A model with integer kernels has to be faster.
        """

        def look(model: Path = candidate, **settings: Any) -> Latency:
            return measure_latencies((reference, model), samples, engine=engine, **settings)[0]

        def is_enough(latency: Latency) -> bool:
            return latency.keeps_up and (computes_in_float or not latency.slower)

        short: dict[str, Any] = {"seconds": self.seconds, "rounds": _ROUNDS, "enough": ENOUGH}
        latency = look(patience=min(self.patience, _PATIENCE), **short)
        if is_enough(latency):
            return latency
        patience = min(2 * self.patience, 2 * _PATIENCE)
        long: dict[str, Any] = {
            "seconds": 2 * self.seconds,
            "rounds": 2 * latency.rounds,
            "patience": patience,
            "enough": _MANY,
        }
        latency = look(**long)
        # With little time left there is one more look.
        for number in range(_MORE_LOOKS if self.patience >= _PATIENCE else 1):
            if is_enough(latency):
                break
            if number or latency.is_shown:
                itself = look(reference, patience=patience, **short)
                # What is slower by more than the float model differs from itself is slower.
                is_slower = latency.interval[1] * itself.interval[1] < NOT_SLOWER
                if itself.is_plain or not itself.is_bounded or is_slower:
                    break
                _LOG.warning(
                    "the machine is busy (the float model ran at %.2f to %.2f times its own speed); timing continues",
                    *itself.interval,
                )
            latency = latency.together(look(**long))
        return latency


@dataclass(frozen=True)
class Kernels:
    """The kernels of the optimized graph.

    Attributes:
        integer: number of kernels that read quantized values.
        quantize: number of QuantizeLinear and DequantizeLinear nodes left over, most at the borders of integer regions.
        heavy_float: number of convolutions and matrix multiplications of float activations, whatever their weights.
        heavy_integer: number of those of quantized activations and weights.
    """

    integer: int
    quantize: int
    heavy_float: int
    heavy_integer: int = 0

    @classmethod
    def of(cls, op_types: Mapping[str, int]) -> Kernels:
        """Count the kernels of an optimized graph, given the number of its nodes by operator."""
        return cls(
            integer=sum(n for op, n in op_types.items() if op in _INTEGER_KERNELS or op.startswith("QLinear")),
            quantize=op_types.get("QuantizeLinear", 0) + op_types.get("DequantizeLinear", 0),
            heavy_float=sum(op_types.get(op, 0) for op in _HEAVY),
            heavy_integer=sum(op_types.get(op, 0) for op in _HEAVY_INTEGER),
        )

    @property
    def computes_in_float(self) -> bool:
        """Whether the loaded model has neither integer kernels nor Q/DQ."""
        return self.integer + self.quantize == 0


@dataclass(frozen=True)
class EngineVerification:
    """A written model on another engine than onnxruntime in this process.

    Attributes:
        engine: its name and version.
        agreement: with the float model on onnxruntime in this process.
        floats: SQNR in decibels of the float model's worst output on this engine, which may compute in fewer bits.
            Measured if the written model is less accurate there than in this process.
    """

    engine: str
    agreement: Agreement
    floats: float | None = None


@dataclass(frozen=True)
class Verification:
    """A written model beside the float model.

    Attributes:
        kernels: of the optimized graph.
        latencies: on each engine that the model is for; empty if it was not asked for.
        on_engines: the model on each of these engines that is not onnxruntime in this process.
        runs_as_float: whether onnxruntime runs the same kernels as for the float model, given or prepared, all in
            float. Checked if timing does not show that it keeps up.
        opened: the open sessions of both models; None if other tensors than the outputs were compared.
    """

    agreement: Agreement
    kernels: Kernels
    latencies: tuple[Latency, ...] = ()
    on_engines: tuple[EngineVerification, ...] = ()
    runs_as_float: bool = False
    opened: tuple[ReferenceModel, ComparisonSession] | None = None

    @property
    def closed(self) -> Verification:
        """The same without open sessions, whose memory another model needs."""
        return replace(self, opened=None)

    @property
    def latency(self) -> Latency | None:
        """Where the model is slowest beside float; None if it was not timed."""
        return min(self.latencies, key=lambda latency: latency.speed, default=None)

    @property
    def keeps_up(self) -> bool:
        """Whether the model is nowhere slower than the float model, as far as it was timed."""
        return all(
            latency.keeps_up or (self.runs_as_float and latency.interval[1] >= NOT_SLOWER) for latency in self.latencies
        )

    @property
    def agreements(self) -> tuple[Agreement, ...]:
        """The agreement on each engine that the model ran on."""
        return (self.agreement, *(engine.agreement for engine in self.on_engines))

    @property
    def disputed(self) -> bool:
        """Whether the model is useless on an engine that it is for, and not on onnxruntime in this process."""
        here, *there = (agreement.worst_sqnr for agreement in self.agreements)
        return any(sqnr < min(_NONSENSE, here - _DISPUTED) for sqnr in there)

    def floats_miss(self, min_sqnr: float) -> bool:
        """Whether the float model misses `min_sqnr` too on an engine that the model is for."""
        return any(engine.floats is not None and engine.floats < min_sqnr for engine in self.on_engines)


def verify(
    reference: Path,
    candidate: Path,
    samples: SampleSource,
    *,
    timer: Timer,
    risk: float = RISK,
    engines: Sequence[Engine] = (),
    prepared: Path | None = None,
) -> Verification:
    """Load a written model with all optimizations, compare it with the float model, time it, and count its kernels.

    Args:
        reference: file of the float model.
        candidate: file of the quantized model.
        samples: the data, of which at most 64 evenly spaced samples are compared.
        timer: settings for timing it.
        risk: probability that a bound is wrong; see `alpha_spending`.
        engines: the engines that the model is for, which run both models; empty for onnxruntime in this process.
        prepared: file of a float model that keeps up with the float model.

    Raises:
        ModelError: onnxruntime refuses a model.
        DataError: A run fails.
        EngineError: The engine fails.
    """
    # A large model runs from its file to fit into memory; then its speed means nothing.
    large, spec = is_large(reference), ComparisonSpec.of(reference, candidate)
    floating = ReferenceModel(reference, spec)
    agreement, kernel_types, view = _compared(floating, candidate, samples, risk, large=large)
    kernels = Kernels.of(kernel_types)
    on_engines = [
        _on_engine(engine, floating, candidate, agreement, samples, risk)
        for engine in engines
        if not is_in_process(engine)
    ]
    timed = list(evenly(samples, _TIMED_SAMPLES)) if timer.seconds > 0 and not large else []
    timers = (engines or (OnnxRuntime(),)) if timed else ()
    latencies = [
        timer.latency(engine, reference, candidate, timed, computes_in_float=kernels.computes_in_float)
        for engine in timers
    ]
    # On a busy machine, timing may not show that a model with the float model's own kernels keeps up.
    slow = [engine for engine, latency in zip(timers, latencies, strict=True) if not latency.keeps_up]
    is_uncertain = bool(slow) and kernels.computes_in_float and all(map(is_in_process, slow))
    floats = (file for file in (reference, prepared) if file is not None and is_uncertain)
    return Verification(
        agreement,
        kernels,
        tuple(latencies),
        tuple(on_engines),
        runs_as_float=any(_kernel_types(file) == kernel_types for file in floats),
        opened=(floating.keep_open(), view) if spec.plain else None,
    )


def _compared(
    floating: ReferenceModel, candidate: Path, samples: SampleSource, risk: float, *, large: bool
) -> tuple[Agreement, Counter[str], ComparisonSession]:
    """Compare a model in this process, and return its agreement, its kernels by operator, and its session."""
    spec = floating.views
    with staging(None) as folder:
        # A session that saves its graph keeps a second copy of the weights, so a large model tells its kernels by a
        # profile of its runs.
        copy, profile = (None, folder / "run") if large else (copy_without_weights(folder), None)
        threads = threads_at_once(floating.model)
        session = open_session(candidate, optimized_copy=copy, profile=profile, mapped=large, threads=threads)
        if spec.plain:
            view = spec.view(session, candidate, at_once=spec.runs_at_once)
        else:
            view = spec.open(candidate, mapped=large, at_once=True)
        agreement = compare(floating, view, samples, risk, COMPARED_SAMPLES)
        if large and not spec.plain:
            run(session, next(iter(evenly(samples, 1))))
        kernel_types = _op_types(copy) if copy is not None else ran_kernels(session, candidate)
    opened = partial(ComparisonSpec.open, model=candidate, mapped=large, at_once=True)
    agreement = with_own_choices(agreement, floating.model, opened, samples, risk, COMPARED_SAMPLES)
    return agreement, kernel_types, view


def _on_engine(
    engine: Engine, floating: ReferenceModel, candidate: Path, here: Agreement, samples: SampleSource, risk: float
) -> EngineVerification:
    """Compare a model on an engine with the float model in this process; if it is coarser, the float model too."""

    def there(model: Path) -> Agreement:
        with staging(None) as folder, closing(floating.views.open_on(engine, model, folder)) as view:
            return compare(floating, view, samples, risk, COMPARED_SAMPLES)

    agreement = there(candidate)
    is_coarser = agreement.worst_sqnr < here.worst_sqnr - _COARSER
    return EngineVerification(engine.place, agreement, there(floating.model).worst_sqnr if is_coarser else None)


def _kernel_types(model: Path) -> Counter[str]:
    with staging(None) as folder:
        copy = copy_without_weights(folder)
        open_session(model, optimized_copy=copy)
        return _op_types(copy)


def _op_types(optimized: Path) -> Counter[str]:
    nodes = onnx.load(optimized, load_external_data=False).graph.node
    return Counter(node.op_type for node in node_protos(nodes))


# Verification of the candidates of a search.

# Part of the time left for the first timing. With two more of twice the time for a slower model, that is half.
_LOOKING = 1 / 10
# A model is timed even if no time is left: an untimed one could be slower. These seconds give the rounds that an
# interval needs; if less time was asked for, three times that do.
_LEAST_PATIENCE = 3.0


@dataclass(frozen=True, eq=False)
class Verifier:
    """Settings for verifying candidates.

    Attributes:
        reference: file of the float model.
        samples: that models are evaluated on.
        seconds: time to spend on comparing latency; 0 leaves it out.
        scorer: of the metric, if there is one.
        deadline: timing takes half of the time left, or the least that an interval needs if that is more.
        engines: the engines that models are for; empty for onnxruntime in this process.
        prepared: file of the prepared float model.
    """

    reference: Path
    samples: SampleSource
    seconds: float
    scorer: Scorer | None = None
    deadline: Deadline = NEVER
    engines: Sequence[Engine] = ()
    prepared: Path | None = None

    @classmethod
    def of(cls, reference: Path, samples: SampleSource, seconds: float, metric: Metric | None) -> Verifier:
        """Score the float model first, so that a broken metric fails before a search.

        Args:
            reference: file of the float model.
            samples: that models are evaluated on. If they are a subset, a metric with `knows_samples` scores the whole
                set, as its labels are in that order.
            seconds: time to spend on comparing latency.
            metric: replaces decibels; None for decibels.

        Raises:
            DataError: A run fails, or the metric does.
        """
        if metric is None:
            return cls(reference, samples, seconds)
        whole: SampleSource = samples
        holdout: tuple[int, ...] = ()
        if metric.knows_samples and isinstance(samples, Subset):
            whole, holdout = samples.samples, tuple(samples.places)
        metric = of_first_samples(metric) if is_truncated(whole) else metric
        return cls(reference, samples, seconds, Scorer.of(metric, reference, whole, holdout))

    def verified(self, candidate: Path, look: int) -> Verification:
        """Run a model beside the float model; see `verify`.

        Args:
            candidate: file of the model.
            look: number of models evaluated on these samples, this one included.
        """
        left = self.deadline.left / max(len(self.engines), 1)
        patience = max(left * _LOOKING, min(_LEAST_PATIENCE, 3 * self.seconds))
        timer = Timer(min(self.seconds, patience), patience)
        models, risk = (self.reference, candidate), alpha_spending(look)
        return verify(*models, self.samples, timer=timer, risk=risk, engines=self.engines, prepared=self.prepared)

    def scores(self, candidate: Path, look: int) -> Scores | None:
        """Return the metric's scores of a model, if there is a metric; see `verified`."""
        return self.scorer.scores(candidate, alpha_spending(look)) if self.scorer is not None else None

    @property
    def scored(self) -> int:
        """Number of runs of a model that the metric takes; 0 without a metric."""
        return len(self.scorer.samples) if self.scorer is not None else 0
