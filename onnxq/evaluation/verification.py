"""Verification of written models: outputs, kernels and latency beside the float model."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

from onnxq.data.inputs import Sample, SampleSource
from onnxq.data.samples import evenly
from onnxq.evaluation.agreement import Agreement, compare, with_own_choices
from onnxq.evaluation.bounds import alpha_spending
from onnxq.evaluation.comparison import ComparisonSession, ComparisonSpec, threads_at_once
from onnxq.evaluation.latency import ENOUGH, NOT_SLOWER, Latency, measure_latency
from onnxq.evaluation.metrics import Scorer, Scores
from onnxq.evaluation.reference import ReferenceModel
from onnxq.ir.stored_tensors import is_large
from onnxq.runtime.engine import Engine, OnnxRuntime, is_in_process
from onnxq.runtime.kernels import Kernel, loaded_kernels, ran_operators, saved_kernels
from onnxq.runtime.sessions import copy_without_weights, open_session, run
from onnxq.system.publish import staging
from onnxq.system.resources import NEVER, Deadline

_LOG = logging.getLogger(__name__)

_INTEGER_KERNELS = frozenset(
    {"ConvInteger", "DynamicQuantizeLSTM", "DynamicQuantizeMatMul", "GatherBlockQuantized", "MatMulInteger"}
    | {"MatMulIntegerToFloat", "MatMulNBits", "NhwcMaxPool", "QGemm", "QMoE"}
)
# Decibels. Runtimes round differently: two runtimes were 17 dB apart where a few probabilities turned over.
_NONSENSE, _DISPUTED = 6.0, 15.0
# Decibels. A larger loss on an engine than in this process may come from its float precision.
_COARSER = 3.0
COMPARED_SAMPLES = 64
"""Number of samples that a model is evaluated on at most, evenly spaced."""
_HEAVY = frozenset({"Conv", "ConvTranspose", "FusedConv", "FusedGemm", "FusedMatMul", "Gemm", "MatMul", "MatMulNBits"})
_HEAVY_INTEGER = frozenset(
    {"ConvInteger", "DynamicQuantizeMatMul", "MatMulInteger", "MatMulIntegerToFloat", "QGemm", "QLinearConv"}
    | {"QLinearMatMul"}
)


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
    def of(cls, operators: Iterable[str]) -> Kernels:
        """Count the kernels of an optimized graph, given the operator of each of its nodes."""
        count = Counter(operators)
        return cls(
            integer=sum(count[op] for op in count if op in _INTEGER_KERNELS or op.startswith("QLinear")),
            quantize=count["QuantizeLinear"] + count["DequantizeLinear"],
            heavy_float=sum(count[op] for op in _HEAVY),
            heavy_integer=sum(count[op] for op in _HEAVY_INTEGER),
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
        latency: on the engine that the model is for; None if it was not timed.
        elsewhere: the model on that engine, if it is not onnxruntime in this process.
        runs_as_float: whether onnxruntime runs the same kernels as for the float model, given or prepared, all in
            float. Checked if timing does not show that it keeps up.
        opened: the open sessions of both models; None if other tensors than the outputs were compared.
    """

    agreement: Agreement
    kernels: Kernels
    latency: Latency | None = None
    elsewhere: EngineVerification | None = None
    runs_as_float: bool = False
    opened: tuple[ReferenceModel, ComparisonSession] | None = None

    @property
    def closed(self) -> Verification:
        """The same without open sessions, whose memory another model needs."""
        return replace(self, opened=None)

    @property
    def keeps_up(self) -> bool:
        """Whether the model is not slower than the float model, as far as it was timed."""
        latency = self.latency
        return latency is None or latency.keeps_up or (self.runs_as_float and latency.interval[1] >= NOT_SLOWER)

    @property
    def agreements(self) -> tuple[Agreement, ...]:
        """The agreement in this process, and on the engine that the model is for if that is another one."""
        return (self.agreement, *(() if self.elsewhere is None else (self.elsewhere.agreement,)))

    @property
    def disputed(self) -> bool:
        """Whether the model is useless on the engine that it is for, and not on onnxruntime in this process."""
        if self.elsewhere is None:
            return False
        return self.elsewhere.agreement.worst_sqnr < min(_NONSENSE, self.agreement.worst_sqnr - _DISPUTED)

    def floats_miss(self, min_sqnr: float) -> bool:
        """Whether the float model misses `min_sqnr` too on the engine that the model is for."""
        floats = self.elsewhere.floats if self.elsewhere is not None else None
        return floats is not None and floats < min_sqnr


@dataclass(frozen=True, eq=False)
class Verifier:
    """Judges models that are made from a float model.

    Attributes:
        reference: file of the float model.
        samples: that models are evaluated on, at most 64 evenly spaced ones.
        seconds: time to spend on comparing latency; 0 leaves timing out, as does a model above 1 GiB.
        scorer: of the metric, if there is one.
        deadline: timing takes half of the time left, or the least that an interval needs if that is more.
        engine: the engine that models are for; None for onnxruntime in this process.
        prepared: file of the prepared float model, which keeps up with the float model.
    """

    reference: Path
    samples: SampleSource
    seconds: float
    scorer: Scorer | None = None
    deadline: Deadline = NEVER
    engine: Engine | None = None
    prepared: Path | None = None

    def verified(self, candidate: Path, look: int) -> Verification:
        """Load a model with all optimizations, compare it with the float model, time it, and count its kernels.

        Args:
            candidate: file of the model.
            look: number of models evaluated on these samples, this one included.

        Raises:
            ModelError: onnxruntime refuses a model.
            DataError: A run fails.
            EngineError: The engine fails.
        """
        risk, spec = alpha_spending(look), ComparisonSpec.of(self.reference, candidate)
        floating = ReferenceModel(self.reference, spec)
        agreement, operators, view = self._compared(floating, candidate, risk)
        kernels = Kernels.of(operators)
        engine = None if self.engine is None or is_in_process(self.engine) else self.engine
        elsewhere = None if engine is None else self._elsewhere(engine, floating, candidate, agreement, risk)
        # A large model runs from its file to fit into memory; then its speed means nothing.
        is_timed = self.seconds > 0 and not is_large(self.reference)
        latency = self._latency(candidate, computes_in_float=kernels.computes_in_float) if is_timed else None
        # On a busy machine, timing may not show that a model with the float model's own kernels keeps up.
        is_uncertain = latency is not None and not latency.keeps_up and engine is None
        floats = (self.reference, self.prepared) if is_uncertain and kernels.computes_in_float else ()
        return Verification(
            agreement,
            kernels,
            latency,
            elsewhere,
            runs_as_float=any(_operators(loaded_kernels(file)) == operators for file in floats if file is not None),
            opened=(floating.keep_open(), view) if spec.plain else None,
        )

    def scores(self, candidate: Path, look: int) -> Scores | None:
        """Return the metric's scores of a model, if there is a metric; see `verified`."""
        return self.scorer.scores(candidate, alpha_spending(look)) if self.scorer is not None else None

    @property
    def scored(self) -> int:
        """Number of runs of a model that the metric takes; 0 without a metric."""
        return len(self.scorer.samples) if self.scorer is not None else 0

    def _compared(
        self, floating: ReferenceModel, candidate: Path, risk: float
    ) -> tuple[Agreement, Counter[str], ComparisonSession]:
        """Compare a model in this process, and return its agreement, its kernels by operator, and its session."""
        spec, large = floating.views, is_large(floating.model)
        with staging(None) as folder:
            # A session that saves its graph keeps a second copy of the weights, so a large model tells its kernels by
            # a profile of its runs.
            copy, profile = (None, folder / "run") if large else (copy_without_weights(folder), None)
            threads = threads_at_once(floating.model)
            session = open_session(candidate, optimized_copy=copy, profile=profile, mapped=large, threads=threads)
            if spec.plain:
                view = spec.view(repeat(session), candidate, at_once=spec.runs_at_once)
            else:
                view = spec.open(candidate, mapped=large, at_once=True)
            agreement = compare(floating, view, self.samples, risk, COMPARED_SAMPLES)
            if large and not spec.plain:
                run(session, next(iter(evenly(self.samples, 1))))
            operators = _operators(saved_kernels(copy)) if copy is not None else ran_operators(session, candidate)
        opened = partial(ComparisonSpec.open, model=candidate, mapped=large, at_once=True)
        agreement = with_own_choices(agreement, floating.model, opened, self.samples, risk, COMPARED_SAMPLES)
        return agreement, operators, view

    def _elsewhere(
        self, engine: Engine, floating: ReferenceModel, candidate: Path, here: Agreement, risk: float
    ) -> EngineVerification:
        """Compare a model on an engine with the float model in this process; if it is coarser, the float model too."""

        def there(model: Path) -> Agreement:
            with staging(None) as folder, closing(floating.views.open_on(engine, model, folder)) as view:
                return compare(floating, view, self.samples, risk, COMPARED_SAMPLES)

        agreement = there(candidate)
        is_coarser = agreement.worst_sqnr < here.worst_sqnr - _COARSER
        return EngineVerification(engine.place, agreement, there(floating.model).worst_sqnr if is_coarser else None)

    def _latency(self, candidate: Path, *, computes_in_float: bool) -> Latency:
        patience = max(self.deadline.left * _LOOKING, min(_LEAST_PATIENCE, 3 * self.seconds))
        return time_beside(
            self.engine or OnnxRuntime(),
            self.reference,
            candidate,
            list(evenly(self.samples, _TIMED_SAMPLES)),
            seconds=min(self.seconds, patience),
            patience=patience,
            computes_in_float=computes_in_float,
        )


def _operators(kernels: Iterable[Kernel]) -> Counter[str]:
    return Counter(kernel.op_type for kernel in kernels)


# Timing of a model until it is shown to keep up with the float model, or not to.

_TIMED_SAMPLES = 4
# Part of the time left for the first timing. With two more of twice the time for a slower model, that is half.
_LOOKING = 1 / 10
# A model is timed even if no time is left: an untimed one could be slower. These seconds give the rounds that an
# interval needs; if less time was asked for, three times that do.
_LEAST_PATIENCE = 3.0
# Seconds. Models of thousands of nodes take seconds to load, in each round anew.
_PATIENCE = 20.0
# Rounds of the first timing.
_ROUNDS = 6
# Runs of a model in each round of the second timing, and how often it is repeated at most.
_MANY, _MORE_LOOKS = 32, 4


def time_beside(
    engine: Engine,
    reference: Path,
    candidate: Path,
    samples: Sequence[Sample],
    *,
    seconds: float,
    patience: float,
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
        seconds: time to spend on the first timing.
        patience: seconds after which models are not loaded once more; 20 at most.
        computes_in_float: whether the model has no integer kernel. It is then as fast as float at best, so it only has
            to keep up. A model with integer kernels has to be faster.
    """
    longer = min(2 * patience, 2 * _PATIENCE)
    short: dict[str, Any] = {"seconds": seconds, "rounds": _ROUNDS, "enough": ENOUGH}
    look = partial(measure_latency, reference, samples=samples, engine=engine)

    def is_enough(latency: Latency) -> bool:
        return latency.keeps_up and (computes_in_float or not latency.slower)

    latency = look(candidate, **short, patience=min(patience, _PATIENCE))
    if is_enough(latency):
        return latency
    look_longer = partial(
        look, candidate, seconds=2 * seconds, rounds=2 * latency.rounds, patience=longer, enough=_MANY
    )
    latency = look_longer()
    # With little time left there is one more look.
    for number in range(_MORE_LOOKS if patience >= _PATIENCE else 1):
        if is_enough(latency):
            break
        if number or latency.is_shown:
            itself = look(reference, **short, patience=longer)
            # What is slower by more than the float model differs from itself is slower.
            is_slower = latency.interval[1] * itself.interval[1] < NOT_SLOWER
            if itself.is_plain or not itself.is_bounded or is_slower:
                break
            _LOG.warning(
                "the machine is busy (the float model ran at %.2f to %.2f times its own speed); timing continues",
                *itself.interval,
            )
        latency = latency.together(look_longer())
    return latency
