"""Which samples a model is least faithful on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from onnxq.data.dataset import Subset, evenly_spaced_indices
from onnxq.data.inputs import Sample, SampleSource, is_floating
from onnxq.data.samples import evenly, is_truncated
from onnxq.errors import ModelError
from onnxq.evaluation.agreement import Agreement, OutputAgreement, agreement_of, compare
from onnxq.evaluation.bounds import RISK, alpha_spending
from onnxq.evaluation.comparison import ComparisonSession, ComparisonSpec
from onnxq.evaluation.latency import ENOUGH, NOT_SLOWER, Latency, measure_latencies, measure_latency
from onnxq.evaluation.metrics import Metric, Scorer, Scores, of_first_samples
from onnxq.evaluation.reference import ReferenceModel, run_beside
from onnxq.ir.protos import is_large, node_protos
from onnxq.runtime.engine import Engine
from onnxq.runtime.sessions import open_session
from onnxq.system.publish import staging
from onnxq.system.resources import NEVER, Deadline


def hardest(reference: Path, candidate: Path, samples: Iterable[Sample], most: int) -> list[int]:
    """Return the places of the samples that add most noise to the output that has most for its signal.

    Args:
        reference: file of the float model.
        candidate: file of a model with the same inputs and outputs.
        samples: the data, of which one at a time is held.
        most: how many places to return at most; samples without noise are none of them.

    Returns:
        Rising places.
    """
    views = ComparisonSpec.of(reference, candidate)
    one, other = ReferenceModel(reference, views), views.open(candidate)
    rows = []
    for expected, found in run_beside(one, other, samples):
        agreement = agreement_of(views.names, [(expected, found)])
        rows.append([_energies(*each) for each in zip(expected, found, agreement.outputs, strict=True)])
    if not rows or not views.names:
        return []
    energies = np.array(rows)
    signals, noises = energies[..., 0], energies[..., 1]
    shares = noises / np.maximum(signals.sum(0), np.finfo(np.float64).tiny)
    of_worst = shares[:, int(np.argmax(shares.sum(0)))]
    noisiest = np.argsort(-of_worst, kind="stable")[:most]
    return sorted(int(place) for place in noisiest if of_worst[place] > 0)


def _energies(expected: Any, found: Any, output: OutputAgreement) -> tuple[float, float]:
    """Return the energies of the signal and of the noise; of labels how many there are, and how many differ."""
    if not (output.same_shapes and output.finite):
        return 1.0, math.inf
    if not isinstance(expected, np.ndarray) or not is_floating(expected.dtype):
        return float(output.compared), float(output.differing)
    usable = np.isfinite(expected)
    signal, error = expected[usable].astype(np.float64), found[usable].astype(np.float64)
    error -= signal
    return float(np.vdot(signal, signal)), float(np.vdot(error, error))


# Look at what a written model really does: which kernels run, and how long they take beside the float model's.

__all__ = ["Kernels", "Latency", "Verification", "count_kernels", "measure_latency", "verify"]

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
    }
)
# Models of thousands of nodes take seconds to load, in each round anew.
_PATIENCE = 20.0
# Rounds of a look, and of one that goes on with what is known.
_ROUNDS, _FEWEST_ROUNDS = 6, 3
# Runs of a model in each round of a second look.
_MANY = 32
# Runtimes round otherwise: where a few probabilities that turn over decide, 17 dB were seen between two.
_NONSENSE, _DISPUTED = 6.0, 15.0
# So many decibels less on an engine than in this process may come of what it computes floats in.
_COARSER = 3.0
COMPARED_SAMPLES = 64
"""How many samples a model is judged by at most, evenly spaced."""
_TIMED_SAMPLES = 4
_HEAVY = frozenset({"Conv", "ConvTranspose", "FusedConv", "FusedGemm", "FusedMatMul", "Gemm", "MatMul"})


@dataclass(frozen=True, eq=False)
class Timer:
    """How the speed of a written model is looked at.

    Attributes:
        seconds: time to spend; 0 leaves it out, and so does a model above 1 GiB.
        engine: what runs both models; None takes what the model is for.
        patience: seconds after which models are not loaded once more; 20 at most.
        known: what rounds before have told of this very model, to which others are added until it is plain.
    """

    seconds: float
    engine: Engine | None = None
    patience: float = _PATIENCE
    known: Latency | None = None

    def latency(self, look: Callable[..., list[Latency]], *, computes_in_float: bool) -> Latency:
        """Look at a model's speed, and again where it is not shown to keep up with the float model.

        Args:
            look: times it, see `measure_latencies`.
            computes_in_float: whether no kernel of the model is of integers. Such a model is as fast as float at best,
                so it is enough that it keeps up. With integers it has to be faster.
        """
        if self.known is not None and self.known.is_plain:
            return self.known
        before = self.known.rounds if self.known is not None else 0
        rounds = max(_ROUNDS - before, _FEWEST_ROUNDS)
        look = partial(look, patience=min(self.patience, _PATIENCE))
        [first] = look(seconds=self.seconds * rounds / _ROUNDS, rounds=rounds, enough=ENOUGH)
        if self.known is not None:
            first = self.known.together(first)
        if first.keeps_up and (computes_in_float or not first.slower):
            return first
        # Other work on the machine may have made it so: a second look, of more runs, decides, and a third where that
        # one was disturbed too.
        patience = min(2 * self.patience, 2 * _PATIENCE)
        closer = partial(look, seconds=2 * self.seconds, rounds=2 * first.rounds, patience=patience, enough=_MANY)
        [second] = closer()
        if second.is_told or (second.keeps_up and (computes_in_float or not second.slower)):
            return second
        [third] = closer()
        return second.together(third)


@dataclass(frozen=True)
class Kernels:
    """What runs in the optimised graph.

    Attributes:
        integer: integer kernels.
        quantize: QuantizeLinear and DequantizeLinear nodes left over, most at the borders of integer regions.
        heavy_float: convolutions and matrix products that compute in float.
    """

    integer: int
    quantize: int
    heavy_float: int

    @classmethod
    def of(cls, op_types: Mapping[str, int]) -> Kernels:
        """Count the kernels of an optimised graph, given how often each operator is in it."""
        return cls(
            integer=sum(n for op, n in op_types.items() if op in _INTEGER_KERNELS or op.startswith("QLinear")),
            quantize=op_types.get("QuantizeLinear", 0) + op_types.get("DequantizeLinear", 0),
            heavy_float=sum(op_types.get(op, 0) for op in _HEAVY),
        )

    @property
    def computes_in_float(self) -> bool:
        """Whether nothing is left of integers once the model is loaded."""
        return self.integer + self.quantize == 0


@dataclass(frozen=True)
class EngineVerification:
    """What a written model does on another engine than onnxruntime in this process.

    Attributes:
        engine: which, and its version.
        agreement: of the outputs with those of the float model on onnxruntime in this process.
        floats: the same decibels of the float model's worst output on this engine, which may compute in fewer bits;
            asked where the written model is less faithful there than in this process.
    """

    engine: str
    agreement: Agreement
    floats: float | None = None


@dataclass(frozen=True)
class Verification:
    """What a written model does beside the float model.

    Attributes:
        agreement: of the outputs.
        kernels: what runs in the optimised graph.
        latency: on the engine that the model is for; None when it was not asked for.
        on_engine: what it does on that engine, where it is another one.
        runs_as_float: whether onnxruntime makes the same kernels of it as of the float model, as it was given or
            prepared, all in float; asked where timing does not show that it keeps up.
    """

    agreement: Agreement
    kernels: Kernels
    latency: Latency | None
    on_engine: EngineVerification | None = None
    runs_as_float: bool = False

    @property
    def keeps_up(self) -> bool:
        """Whether the model is not slower than the float model, as far as its speed was asked for."""
        if self.latency is None or self.latency.keeps_up:
            return True
        return self.runs_as_float and self.latency.interval[1] >= NOT_SLOWER

    @property
    def agreements(self) -> tuple[Agreement, ...]:
        """Of the outputs on each engine that the model ran on."""
        return (self.agreement,) if self.on_engine is None else (self.agreement, self.on_engine.agreement)

    @property
    def disputed(self) -> bool:
        """Whether the engine that the model is for computes nonsense where onnxruntime in this process does not."""
        here, *there = (one.worst_sqnr for one in self.agreements)
        return any(one < min(_NONSENSE, here - _DISPUTED) for one in there)

    def floats_miss(self, min_sqnr: float) -> bool:
        """Whether the engine that the model is for computes in so few bits that the float model misses a goal too."""
        floats = self.on_engine.floats if self.on_engine is not None else None
        return floats is not None and floats < min_sqnr


def verify(
    reference: Path,
    candidate: Path,
    samples: SampleSource,
    *,
    timer: Timer,
    risk: float = RISK,
    engine: Engine | None = None,
    prepared: Path | None = None,
) -> Verification:
    """Load a written model with all optimisations, run it beside the float model, and look at its kernels.

    Args:
        reference: file of the float model.
        candidate: file of the quantized model.
        samples: the data, of which at most 64 evenly spaced samples are compared.
        timer: how its speed is looked at.
        risk: how often a bound may be wrong; see `alpha_spending`.
        engine: what the model is for, where that is not onnxruntime in this process; it runs both models too.
        prepared: file of a float model that keeps up with the float model.

    Returns:
        Everything that was seen.

    Raises:
        ModelError: onnxruntime refuses a model.
        DataError: a run fails.
        EngineError: the engine fails.
    """
    # Run from its file a large model fits into memory, and says nothing about its speed.
    large = is_large(reference)
    with staging(None) as folder:
        copy = folder / "optimized.onnx"
        session = open_session(candidate, optimized_copy=copy, mapped=large, threads=None if large else 1)
        kernel_types = _op_types(copy)
    kernels = Kernels.of(kernel_types)
    views = ComparisonSpec.of(reference, candidate)
    opened = partial(views.open, candidate, mapped=large, at_once=not large)
    at_once = not large and views.most != 1
    view = ComparisonSession(session, views.names, views, at_once, made=candidate) if views.plain else opened()
    agreement = compare(ReferenceModel(reference, views), view, samples, risk, COMPARED_SAMPLES)
    timed = list(evenly(samples, _TIMED_SAMPLES)) if timer.seconds > 0 and not large else []
    elsewhere = None
    if engine is not None:
        there = partial(_agreement_on, engine, views, reference, samples=samples, risk=risk)
        found = there(candidate)
        is_coarser = found.worst_sqnr < agreement.worst_sqnr - _COARSER
        elsewhere = EngineVerification(engine.version, found, there(reference).worst_sqnr if is_coarser else None)
    look = partial(measure_latencies, (reference, candidate), timed, engine=timer.engine or engine)
    latency = timer.latency(look, computes_in_float=kernels.computes_in_float) if timed else None
    # A busy machine may not let a model of the float model's own kernels be shown to keep up with it.
    in_doubt = latency is not None and not latency.keeps_up and kernels.computes_in_float and engine is None
    as_float = in_doubt and any(_kernel_types(one) == kernel_types for one in (reference, prepared) if one is not None)
    return Verification(agreement, kernels, latency, elsewhere, runs_as_float=as_float)


def _agreement_on(
    engine: Engine, views: ComparisonSpec, reference: Path, model: Path, *, samples: SampleSource, risk: float
) -> Agreement:
    """Compare what an engine makes of a model with what onnxruntime in this process makes of the float model."""
    with staging(None) as folder:
        there = views.open_on(engine, model, folder)
        found = compare(ReferenceModel(reference, views), there, samples, risk, COMPARED_SAMPLES)
        there.loaded.close()
    return found


def loads_in_onnxruntime(model: Path) -> bool:
    """Return whether onnxruntime loads a model that the standard allows.

    Raises:
        ModelError: the model is not valid ONNX.
    """
    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError as error:
        raise ModelError(f"{model} is not valid ONNX: {' '.join(str(error).split())}; report it") from error
    try:
        open_session(model)
    except ModelError:
        return False
    return True


def count_kernels(model: Path) -> Kernels:
    """Load a model with all optimisations and count the kernels of the graph that runs.

    Args:
        model: the file.

    Returns:
        The counts, bodies of control flow included.

    Raises:
        ModelError: onnxruntime refuses the model.
    """
    return Kernels.of(_kernel_types(model))


def _kernel_types(model: Path) -> Counter[str]:
    with staging(None) as folder:
        copy = folder / "optimized.onnx"
        open_session(model, optimized_copy=copy)
        return _op_types(copy)


def _op_types(optimized: Path) -> Counter[str]:
    """Count the operators of a model's file, those in bodies included."""
    nodes = onnx.load(optimized, load_external_data=False).graph.node
    return Counter(node.op_type for node in node_protos(nodes))


# By what built models are judged: samples, a metric, and the time to spend on their speed.

# A look at a model's speed, and two of twice the time where it is slower, take half of the time that is left.
_LOOKING = 1 / 10
# A model that is tried when the time is up is timed as well: an untimed one could be slower. So many seconds give the
# rounds that an interval needs; where less time was asked for, three times that do.
_LEAST_PATIENCE = 3.0


@dataclass(frozen=True, eq=False)
class Verifier:
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
    def of(cls, reference: Path, samples: SampleSource, seconds: float, metric: Metric | None) -> Verifier:
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
        if metric.knows_samples and isinstance(samples, Subset):
            whole, judging = samples.samples, tuple(samples.places)
        metric = of_first_samples(metric) if is_truncated(whole) else metric
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
        risk = alpha_spending(look)
        return verify(*given, timer=timer, risk=risk, engine=self.engine, prepared=self.prepared)

    def scores(self, candidate: Path, look: int) -> Scores | None:
        """Return what the metric says of a model, where there is one; see `verified`."""
        return self.scorer.scores(candidate, alpha_spending(look)) if self.scorer is not None else None

    @property
    def scored(self) -> int:
        """How many runs of a model the metric takes; 0 where there is none."""
        return len(self.scorer.samples) if self.scorer is not None else 0

    def hardest(self, candidate: Path, most: int) -> SampleSource:
        """Return the samples that a model is least faithful to, at most so many."""
        judging = Subset(self.samples, evenly_spaced_indices(len(self.samples), COMPARED_SAMPLES))
        return Subset(judging, hardest(self.reference, candidate, judging, most))
