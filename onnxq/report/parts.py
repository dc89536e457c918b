"""The parts of a report: files, samples, accuracy, performance, search, encoding, and the run with its machine."""

from __future__ import annotations

import logging
import platform
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module

import numpy as np

from onnxq.calibration.histogram import Histogram
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.evaluation.agreement import Agreement
from onnxq.evaluation.goal import EvaluationSplit
from onnxq.evaluation.latency import Latency
from onnxq.evaluation.layers import Layers
from onnxq.evaluation.metrics import Scores
from onnxq.evaluation.verification import EngineVerification, Kernels
from onnxq.ir import Graph, all_nodes
from onnxq.passes.quantize.graph_io import GraphTensor
from onnxq.planning.delivery import Delivery
from onnxq.planning.plan import Decision, Plan, Weight
from onnxq.report.formatting import size
from onnxq.rewrite import Pass, PassResult
from onnxq.search.kernel_times import NodeTime, Region
from onnxq.search.results import MethodGain, NodeSensitivity, Point, SizePoint
from onnxq.system.records import read_record
from onnxq.system.resources import Progress, available_cores, parallel_map
from onnxq.version import VERSION

_LOG = logging.getLogger(__name__)
_PACKAGES = ("onnxruntime", "onnx", "numpy")


@dataclass(frozen=True)
class Stage:
    """A stage of the work.

    Attributes:
        name: one or two words.
        seconds: duration.
        peak_bytes: the most memory of the process until its end; 0 if the system does not report it.
    """

    name: str
    seconds: float
    peak_bytes: int = 0


@dataclass(frozen=True)
class Machine:
    """A machine and its software.

    Attributes:
        processor: its architecture.
        cores: number of cores that the process may use.
        system: the operating system.
        versions: of Python and of the packages that decide the result, by name.
    """

    processor: str
    cores: int
    system: str
    versions: Mapping[str, str]

    @classmethod
    def this(cls) -> Machine:
        """Return this machine.

        >>> sorted(Machine.this().versions)
        ['numpy', 'onnx', 'onnxq', 'onnxruntime', 'python']
        """
        versions = {
            "python": platform.python_version(),
            "onnxq": VERSION,
            **{name: import_module(name).__version__ for name in _PACKAGES},
        }
        return cls(platform.machine(), available_cores(), f"{platform.system()} {platform.release()}", versions)


# The choice of a plan, and what follows it, as progress functions hear it.
_CHOICE, _PARTS = "choose", frozenset({"encode", "write", "verify"})


class Stopwatch:
    """Times stages: each ends when the next begins."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self._stages: dict[str, Stage] = {}
        self._running = _CHOICE

    def following(self, progress: Progress) -> Progress:
        """Return a progress function that also ends a stage when encoding, writing or verifying begins."""

        def follow(stage: str, done: int, total: int) -> None:
            if stage in _PARTS and stage != self._running:
                self.end_parts()
                self._running = stage
            progress(stage, done, total)

        return follow

    def end_parts(self) -> None:
        """End the stage that runs since calibration: the choice of a plan, or what `following` heard last."""
        self.lap(self._running)
        self._running = _CHOICE

    def lap(self, name: str) -> None:
        """End a stage; time of a repeated name adds up."""
        now, before = time.perf_counter(), self._stages.get(name)
        seconds, peak = now - self._last, peak_memory()
        self._stages[name] = Stage(name, seconds + (before.seconds if before is not None else 0.0), peak)
        self._last = now
        _LOG.info("%s: %.1f s, peak memory so far %s", name, seconds, size(peak))

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages so far."""
        return tuple(self._stages.values())

    @property
    def seconds(self) -> float:
        """The time since the start."""
        return time.perf_counter() - self._start


def peak_memory() -> int:
    """Return the most bytes that this process has held; 0 if the system does not report it."""
    if sys.platform == "win32":
        return 0
    import resource

    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kibibytes if sys.platform == "darwin" else kibibytes << 10


# Calibrated values and weights, small enough to be drawn.

_BARS = 48
_QUARTERS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class TensorValues:
    """The values of a calibrated tensor beside its quantization range.

    Attributes:
        tensor: its name.
        low: the smallest value.
        high: the largest value.
        range: that the quantized values span.
        clipped: share of the values outside the range.
        counts: number of values in each of equally wide bars from `low` to `high`.
    """

    tensor: str
    low: float
    high: float
    range: tuple[float, float]
    clipped: float
    counts: tuple[int, ...]


@dataclass(frozen=True)
class WeightChannels:
    """How much the output channels of a weight differ.

    Attributes:
        node: that reads it.
        tensor: its name.
        channels: number of channels.
        maxima: minimum, lower quartile, median, upper quartile and maximum of the channels' largest magnitudes.
    """

    node: str
    tensor: str
    channels: int
    maxima: tuple[float, float, float, float, float]


def tensor_values(plan: Plan, statistics: CalibrationStatistics) -> tuple[TensorValues, ...]:
    """Return the values of each tensor with a histogram, in the plan's order.

    Tensors with divided channels are left out, as their ranges are of the divided values.

    Args:
        plan: with the calibrated ranges.
        statistics: statistics of the samples.
    """
    tensors = []
    for activation in plan.activations:
        seen = statistics.of(activation.tensor).find(Histogram)
        span = activation.known_range
        if seen is None or span is None or activation.factors or not len(seen.whole.counts):
            continue
        bins = seen.whole
        centres = np.clip((bins.edges[:-1] + bins.edges[1:]) / 2, bins.minimum, bins.maximum)
        counts, _ = np.histogram(centres, _BARS, (bins.minimum, bins.maximum), weights=bins.counts)
        outside = bins.counts[(centres < span[0]) | (centres > span[1])].sum()
        clipped = float(outside / bins.counts.sum())
        bars = tuple(int(count) for count in counts)
        tensors.append(TensorValues(activation.tensor, bins.minimum, bins.maximum, span, clipped, bars))
    return tuple(tensors)


def weight_channels(plan: Plan, graph: Graph) -> tuple[WeightChannels, ...]:
    """Return how much the channels of each quantized weight differ, in the plan's order.

    Args:
        plan: with the quantized weights of each node.
        graph: the prepared graph, with float weights.
    """
    by_name = {node.name: node for _, node in all_nodes(graph)}

    def channels(pair: tuple[Decision, Weight]) -> WeightChannels | None:
        decision, weight = pair
        values = np.asarray(by_name[decision.node].inputs[weight.index].values, np.float32)
        if not values.size:
            return None
        axis = weight.axis % values.ndim
        others = tuple(other_axis for other_axis in range(values.ndim) if other_axis != axis)
        maxima = np.maximum(values.max(others), -values.min(others))
        # Quantiles by linear interpolation; numpy.quantile loads numpy's masked arrays.
        places = np.multiply(_QUARTERS, maxima.size - 1)
        least, lower, middle, upper, most = map(float, np.interp(places, np.arange(maxima.size), np.sort(maxima)))
        return WeightChannels(decision.node, weight.tensor, int(maxima.size), (least, lower, middle, upper, most))

    pairs = ((decision, weight) for decision in plan.decisions for weight in decision.weights)
    return tuple(spread for spread in parallel_map(channels, pairs) if spread is not None)


# The parts of a report, one for each question.


@dataclass(frozen=True)
class ModelFiles:
    """The files that were read and written.

    Attributes:
        model: origin of the float model.
        output: the file that was written, or None.
        float_bytes: size of the float model with its external data.
        bytes: size of the quantized model with its external data.
        metadata_bytes: part of `bytes` that is the exporter's metadata of nodes, tensors and graphs.
        model_digest: SHA-256 of the float model's file, without external data.
        output_digest: SHA-256 of the quantized model's file.
        data: the file with its weights, which has to stay beside the output; None if they are in the output.
    """

    model: str
    output: str | None
    float_bytes: int
    bytes: int
    metadata_bytes: int = 0
    model_digest: str = ""
    output_digest: str = ""
    data: str | None = None

    @property
    def size_ratio(self) -> float:
        """Size of the quantized model over the size of the float model."""
        return self.bytes / self.float_bytes


@dataclass(frozen=True)
class Samples:
    """The samples of calibration and evaluation.

    Attributes:
        calibrated: number of calibration samples.
        split: the samples that the agreement and the scores are measured on, and how many chose the plan.
        warnings: sentences on why the samples may not be representative.
        generated: whether they are generated inputs, because none were given.
        images: how image files became arrays, in words; empty if there are none.
    """

    calibrated: int
    split: EvaluationSplit | None = None
    warnings: tuple[str, ...] = ()
    generated: bool = False
    images: str = ""


@dataclass(frozen=True)
class Accuracy:
    """How accurate the quantized model is.

    Attributes:
        agreement: of the outputs.
        scores: the user's metric for both models, if there is one.
        refusal: why the model was refused, in a sentence; else empty.
        on_engines: the model on each engine that it is for, other than onnxruntime in this process.
        layers: the tensors of both models; None if they were not compared.
        wanted: required SQNR in decibels of the worst output; None if a metric decides.
        max_drop: how much the metric may fall.
    """

    agreement: Agreement
    scores: Scores | None = None
    refusal: str = ""
    on_engines: tuple[EngineVerification, ...] = ()
    layers: Layers | None = None
    wanted: float | None = None
    max_drop: float = 0.0

    @property
    def agreements(self) -> tuple[Agreement, ...]:
        """The agreement on each engine that the model ran on."""
        return (self.agreement, *(verification.agreement for verification in self.on_engines))


@dataclass(frozen=True)
class Performance:
    """How the quantized model runs.

    Attributes:
        kernels: of the optimized graph.
        latency: beside the float model, on the engine that it names; None if not measured.
        regions: the integer regions beside the same nodes in float; empty if latency was not measured.
        times: of the nodes beside float; empty if latency was not measured.
        unmeasured: why a runtime that the plan is for could not run; empty if all did.
        ran: by node, operators of its kernels in onnxruntime. Nodes that were fused into other kernels are missing;
            empty if not inspected.
        runs_as_float: whether it runs the kernels of the float model; checked if timing does not show that it keeps up.
    """

    kernels: Kernels
    latency: Latency | None = None
    regions: tuple[Region, ...] = ()
    times: tuple[NodeTime, ...] = ()
    unmeasured: str = ""
    ran: Mapping[str, str] = field(default_factory=dict)
    runs_as_float: bool = False


@dataclass(frozen=True)
class Search:
    """The plans that were evaluated.

    Attributes:
        measured: number of candidate models that were built and run.
        sensitivities: the nodes that were measured alone, worst first.
        frontier: the evaluated plans by expected time; empty if latency was not measured.
        limit: the option whose limit ended or prevented the search, such as ``--time-limit 1``; else empty.
        sizes: sizes that the model could have, smallest first; empty if the bits of weights were not chosen.
        max_size: bytes that the file may have; None if they are not limited.
        longer: the option that gives the search more time, if its limit ended it and there is one; else empty.
    """

    measured: int
    sensitivities: tuple[NodeSensitivity, ...] = ()
    frontier: tuple[Point, ...] = ()
    limit: str = ""
    sizes: tuple[SizePoint, ...] = ()
    max_size: int | None = None
    longer: str = ""


@dataclass(frozen=True)
class Encoding:
    """How scales and quantized values were chosen.

    Attributes:
        ranges: the calibration method that turned statistics into scales.
        corrected_biases: number of nodes whose bias corrects the mean error of their rounded weight.
        gains: the effect of each accuracy method that was tried on the whole model.
        skipped_at_sqnr: lower bound of the first plan in decibels, if it made accuracy methods needless; else None.
        delivered: number of weights with the bits of the scheme; empty if a given plan was used, or a size chose them.
        left_by_standard: number of nodes that stay float because standard ONNX has no integer operator for them, and
            the runtime's own operators were not allowed or not measured.
        tensors: calibrated values beside their ranges.
        io: inputs and outputs with scales and zero points, or why they stay in float; empty if nobody asked.
        weights: how much the channels of quantized weights differ.
    """

    ranges: str
    corrected_biases: int = 0
    gains: tuple[MethodGain, ...] = ()
    skipped_at_sqnr: float | None = None
    delivered: tuple[Delivery, ...] = ()
    left_by_standard: int = 0
    tensors: tuple[TensorValues, ...] = ()
    weights: tuple[WeightChannels, ...] = ()
    io: tuple[GraphTensor, ...] = ()


@dataclass(frozen=True)
class AppliedPass:
    """The result of a pass, in plain values.

    Attributes:
        options: as text.
        changed: number of nodes or tensors that it changed, made or removed.
        changed_names: the first of them.
        skipped: number of matches that it left unchanged.
        skipped_names: the first of them, each with the reason.
        failed: parts that failed and were skipped, each with the error.
        own: whether it is a pass of the user's.
    """

    name: str
    options: Mapping[str, str]
    seconds: float
    changed: int = 0
    changed_names: tuple[str, ...] = ()
    skipped: int = 0
    skipped_names: tuple[tuple[str, str], ...] = ()
    failed: tuple[tuple[str, str], ...] = ()
    own: bool = False

    @classmethod
    def of(cls, applied: PassResult, *, own: bool = False) -> AppliedPass:
        """Convert a result, which may hold any values and long lists."""
        fields = {"name" if key == "pass" else key: value for key, value in applied.to_dict().items()}
        return read_record(cls, "pass", {**fields, "own": own})

    def __str__(self) -> str:
        if self.failed and not self.changed:
            return f"{self.name} failed"
        if not self.changed and self.skipped_names:
            name, reason = self.skipped_names[0]
            return f"{self.name} changed nothing, skipped {self.skipped}, the first ({name}) because {reason}"
        counts = {"changed": self.changed, "skipped": self.skipped, "failed": len(self.failed)}
        done = ", ".join(f"{what} {count}" for what, count in counts.items() if count)
        return f"{self.name} {done or 'changed nothing'}"


@dataclass(frozen=True)
class Run:
    """How the run went.

    Attributes:
        passes: what the passes before the plan changed and skipped, the user's own first.
        stages: in order.
        command: the words of the command line; empty if called from Python.
        left_out: passes and rules that preparation left out, each with the error.
        failures: parts of the run that failed and were left out, in sentences.
    """

    seconds: float
    passes: tuple[AppliedPass, ...] = ()
    stages: tuple[Stage, ...] = ()
    machine: Machine | None = None
    command: tuple[str, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()
    failures: tuple[str, ...] = ()

    @property
    def own_passes(self) -> tuple[AppliedPass, ...]:
        """The user's passes, in order."""
        return tuple(applied for applied in self.passes if applied.own)

    def changed_by(self, step: type[Pass]) -> int:
        """Return how many nodes or tensors a pass changed, over all its applications."""
        return sum(applied.changed for applied in self.passes if applied.name == step.__name__)
