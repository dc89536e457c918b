"""Where and in what time something was done: the machine, its versions, and stages with their time and memory."""

from __future__ import annotations

import logging
import platform
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module

import numpy as np

from onnxq.calibration.histogram import Histogram
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.evaluation.agreement import Agreement
from onnxq.evaluation.goal import EvaluationSplit
from onnxq.evaluation.layers import Layers
from onnxq.evaluation.metrics import Scores
from onnxq.evaluation.verification import EngineVerification, Kernels, Latency
from onnxq.ir import Graph, all_nodes
from onnxq.planning.delivery import Delivery
from onnxq.planning.plan import Plan
from onnxq.report.formatting import size
from onnxq.rewrite import Pass, PassResult
from onnxq.search.kernel_times import NodeTime, Region
from onnxq.search.refinement import MethodGain
from onnxq.search.search import NodeSensitivity, Point
from onnxq.system.records import read_record
from onnxq.system.resources import available_cores
from onnxq.version import VERSION

_LOG = logging.getLogger(__name__)
_PACKAGES = ("onnxruntime", "onnx", "numpy")


@dataclass(frozen=True)
class Stage:
    """A stage of the work.

    Attributes:
        name: in a word or two.
        seconds: that it took.
        peak_bytes: the most memory that the process had held by its end; 0 where the system does not tell.
    """

    name: str
    seconds: float
    peak_bytes: int = 0


@dataclass(frozen=True)
class Machine:
    """A machine and what it ran.

    Attributes:
        processor: its architecture.
        cores: how many the process might use.
        system: the operating system.
        versions: of Python and of the packages that decide what comes out, by name.
    """

    processor: str
    cores: int
    system: str
    versions: Mapping[str, str]

    @classmethod
    def this(cls) -> Machine:
        """Return the machine that this runs on.

        >>> sorted(Machine.this().versions)
        ['numpy', 'onnx', 'onnxq', 'onnxruntime', 'python']
        """
        versions = {
            "python": platform.python_version(),
            "onnxq": VERSION,
            **{name: import_module(name).__version__ for name in _PACKAGES},
        }
        return cls(platform.machine(), available_cores(), f"{platform.system()} {platform.release()}", versions)


class Stopwatch:
    """Tells stages apart: each ends where the next begins."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self._stages: dict[str, Stage] = {}

    def lap(self, name: str) -> None:
        """End a stage of that name, or one more part of it where work went back to it."""
        now, before = time.perf_counter(), self._stages.get(name)
        seconds, peak = now - self._last, peak_memory()
        self._stages[name] = Stage(name, seconds + (before.seconds if before is not None else 0.0), peak)
        self._last = now
        _LOG.info("%s: %.1f s, most memory so far %s", name, seconds, size(peak))

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages so far."""
        return tuple(self._stages.values())

    @property
    def seconds(self) -> float:
        """The time of all of them, and what came after."""
        return time.perf_counter() - self._start


def peak_memory() -> int:
    """Return the most bytes that this process has held; 0 where the system does not tell."""
    if sys.platform == "win32":
        return 0
    import resource

    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kibibytes if sys.platform == "darwin" else kibibytes << 10


# What was seen of tensors and weights, small enough to be drawn.

_BARS = 48
_QUARTERS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class TensorValues:
    """The values of a calibrated tensor beside the range that its codes span.

    Attributes:
        tensor: its name.
        low: the smallest value that was seen.
        high: the largest.
        range: of the codes.
        clipped: share of the values that lie outside the range.
        counts: how many values lie in each of equally wide bars from the smallest to the largest.
    """

    tensor: str
    low: float
    high: float
    range: tuple[float, float]
    clipped: float
    counts: tuple[int, ...]


@dataclass(frozen=True)
class WeightChannels:
    """How far the output channels of a weight are apart.

    Attributes:
        node: that reads it.
        tensor: its name.
        channels: how many there are.
        maxima: least, lower quartile, median, upper quartile and greatest of the channels' largest magnitudes.
    """

    node: str
    tensor: str
    channels: int
    maxima: tuple[float, float, float, float, float]


def tensor_values(plan: Plan, evidence: CalibrationStatistics) -> tuple[TensorValues, ...]:
    """Return the values of each tensor of which a histogram was kept, in the plan's order.

    Tensors whose channels are divided by factors are left out: their ranges are of other values.

    Args:
        plan: with the ranges that were found.
        evidence: what samples have shown.
    """
    return tuple(_tensor_values(plan, evidence))


def _tensor_values(plan: Plan, evidence: CalibrationStatistics) -> Iterator[TensorValues]:
    for activation in plan.activations:
        seen = evidence.of(activation.tensor).find(Histogram)
        known = activation.known_range
        if seen is None or known is None or activation.factors or not len(seen.whole.counts):
            continue
        bins = seen.whole
        centres = np.clip((bins.edges[:-1] + bins.edges[1:]) / 2, bins.minimum, bins.maximum)
        counts, _ = np.histogram(centres, _BARS, (bins.minimum, bins.maximum), weights=bins.counts)
        outside = bins.counts[(centres < known[0]) | (centres > known[1])].sum()
        clipped = float(outside / bins.counts.sum())
        bars = tuple(int(count) for count in counts)
        yield TensorValues(activation.tensor, bins.minimum, bins.maximum, known, clipped, bars)


def weight_channels(plan: Plan, graph: Graph) -> tuple[WeightChannels, ...]:
    """Return how far the channels of each weight that becomes codes are apart, in the plan's order.

    Args:
        plan: what becomes of the nodes.
        graph: the prepared graph, with float weights.
    """
    by_name = {node.name: node for _, node in all_nodes(graph)}
    found = []
    for decision in plan.decisions:
        for weight in decision.weights:
            values = np.asarray(by_name[decision.node].inputs[weight.index].values, np.float32)
            if not values.size:
                continue
            axis = weight.axis % values.ndim
            others = tuple(other for other in range(values.ndim) if other != axis)
            maxima = np.maximum(values.max(others), -values.min(others))
            # Quantiles between two values in a line; those of numpy load its masked arrays.
            places = np.multiply(_QUARTERS, maxima.size - 1)
            least, lower, middle, upper, most = map(float, np.interp(places, np.arange(maxima.size), np.sort(maxima)))
            five = least, lower, middle, upper, most
            found.append(WeightChannels(decision.node, weight.tensor, int(maxima.size), five))
    return tuple(found)


# The parts of a report, each about one question that people have.


@dataclass(frozen=True)
class ModelFiles:
    """What was read and written.

    Attributes:
        model: where the float model came from.
        output: the file that was written, or None.
        float_bytes: size of the float model with its external data.
        bytes: size of the quantized model with its external data.
        metadata_bytes: how much of the quantized model is what the exporter wrote about nodes, tensors and graphs.
        model_digest: SHA-256 of the float model's file, without external data.
        output_digest: SHA-256 of the quantized model's.
        loads: whether onnxruntime loads the written model; if not, everything was measured on the same codes in types
            that it can load.
    """

    model: str
    output: str | None
    float_bytes: int
    bytes: int
    metadata_bytes: int = 0
    loads: bool = True
    model_digest: str = ""
    output_digest: str = ""

    @property
    def size_ratio(self) -> float:
        """Size of the quantized model as a share of the float model's."""
        return self.bytes / self.float_bytes


@dataclass(frozen=True)
class Samples:
    """What was calibrated and judged by.

    Attributes:
        calibrated: how many samples set the ranges.
        split: which samples the agreement and the scores are measured on, and which chose the plan.
        warnings: why the samples may not be representative, in sentences.
        refitted: of how many samples the ranges are, once the model before was judged; 0 where it stayed.
    """

    calibrated: int
    split: EvaluationSplit | None = None
    warnings: tuple[str, ...] = ()
    refitted: int = 0


@dataclass(frozen=True)
class Fidelity:
    """How close the quantized model is to the float model.

    Attributes:
        agreement: of the outputs.
        scores: what the user's metric says of both models, where there is one.
        refusal: why the model was refused, in a sentence; empty where it was not.
        on_engine: what it does on the engine that it is for, where that is not onnxruntime in this process.
        layers: of the tensors that both models have; None where these were not compared.
        wanted: SQNR in decibels that was asked of the worst output; None where a metric tells instead.
    """

    agreement: Agreement
    scores: Scores | None = None
    refusal: str = ""
    on_engine: EngineVerification | None = None
    layers: Layers | None = None
    wanted: float | None = None

    @property
    def agreements(self) -> tuple[Agreement, ...]:
        """Of the outputs on each engine that the model ran on."""
        return (self.agreement,) if self.on_engine is None else (self.agreement, self.on_engine.agreement)


@dataclass(frozen=True)
class Performance:
    """How the quantized model runs.

    Attributes:
        kernels: what runs in the optimised graph.
        latency: beside the float model on the engine that it names; None when it was not asked for.
        regions: the integer regions beside the same nodes in float; empty when latency was not measured.
        times: of the nodes beside float; empty likewise.
        unmeasured: why nothing ran on the runtime that the plan is for; empty where something did.
        ran: operators of the kernels that onnxruntime has made of each node, by node; those of a node that became part
            of another kernel are not there, and none are where nobody looked.
        runs_as_float: whether it runs the kernels of the float model; asked where timing does not show that it is as
            fast.
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
    """What was weighed.

    Attributes:
        measured: how many candidate models were built and run.
        sensitivities: the nodes that were measured alone, worst first.
        frontier: the plans that were weighed, by expected time; empty when latency was not measured.
        limit: what ended the search or left it out, such as ``1 s with --time-limit``; empty where nothing did.
    """

    measured: int
    sensitivities: tuple[NodeSensitivity, ...] = ()
    frontier: tuple[Point, ...] = ()
    limit: str = ""


@dataclass(frozen=True)
class Encoding:
    """How codes were chosen.

    Attributes:
        ranges: the calibration method that turned statistics into scales.
        range_methods: the method of each tensor, where one was chosen for each.
        corrected_biases: how many nodes have a bias that makes up for the mean error of their rounded weight.
        gains: what each accuracy method that was tried did to the whole model.
        skipped_at_sqnr: SQNR in decibels without any accuracy method, if it was so high that none was tried; else None.
        delivered: how many weights have the bits that the scheme asks for; empty where a plan was carried out.
        left_by_standard: how many nodes stay float because standard ONNX has no integers for them, and operators of the
            runtime's own were not to be written, or not measured.
        tensors: the values that were seen of calibrated tensors beside their ranges.
        weights: how far the channels of weights that became codes are apart.
    """

    ranges: str
    range_methods: Mapping[str, str] = field(default_factory=dict)
    corrected_biases: int = 0
    gains: tuple[MethodGain, ...] = ()
    skipped_at_sqnr: float | None = None
    delivered: tuple[Delivery, ...] = ()
    left_by_standard: int = 0
    tensors: tuple[TensorValues, ...] = ()
    weights: tuple[WeightChannels, ...] = ()


@dataclass(frozen=True)
class AppliedPass:
    """What a pass did, in plain values.

    Attributes:
        name: of the pass.
        options: of the pass, as text.
        seconds: the time it took.
        changed: how many nodes or tensors it changed, made or removed.
        changed_names: the first of them.
        skipped: how many it looked at and left as they were.
        skipped_names: the first of them, each with the reason.
        failed: its parts that failed and were skipped, each with what happened.
    """

    name: str
    options: Mapping[str, str]
    seconds: float
    changed: int = 0
    changed_names: tuple[str, ...] = ()
    skipped: int = 0
    skipped_names: tuple[tuple[str, str], ...] = ()
    failed: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, applied: PassResult) -> AppliedPass:
        """Tell of a pass, which may hold anything, and its lists be long."""
        told = {"name" if key == "pass" else key: value for key, value in applied.to_dict().items()}
        return read_record(cls, "pass", told)


@dataclass(frozen=True)
class Run:
    """How it was done.

    Attributes:
        seconds: time that everything took.
        passes: what the passes before the plan changed and left, the user's own first.
        stages: what each stage took, in order.
        machine: where it was done.
        command: the words of the command line; none where it was Python that called.
        left_out: passes and rules that preparing left out, each with what was wrong with it.
        failures: parts of the run that failed and were left out, in sentences.
    """

    seconds: float
    passes: tuple[AppliedPass, ...] = ()
    stages: tuple[Stage, ...] = ()
    machine: Machine | None = None
    command: tuple[str, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()
    failures: tuple[str, ...] = ()

    def changed_by(self, step: type[Pass]) -> int:
        """Return how many nodes or tensors a pass changed, however often it was applied."""
        return sum(one.changed for one in self.passes if one.name == step.__name__)
