"""Look at what a written model really does: which kernels run, and how long they take beside the float model's."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import onnx

from onnxq.calibration.runner import SampleSource
from onnxq.evaluate import Agreement, compare
from onnxq.runtime import Array, Session, open_session, run

Item = TypeVar("Item")

_INTEGER_KERNELS = frozenset(
    {
        "ConvInteger",
        "DynamicQuantizeLSTM",
        "DynamicQuantizeMatMul",
        "MatMulInteger",
        "MatMulIntegerToFloat",
        "MatMulNBits",
        "NhwcMaxPool",
        "QGemm",
    }
)
_EQUAL_SPEED = 0.97
_COMPARED_SAMPLES = 64
_TIMED_SAMPLES = 4
_HEAVY = frozenset({"Conv", "ConvTranspose", "FusedConv", "FusedGemm", "FusedMatMul", "Gemm", "MatMul"})


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


@dataclass(frozen=True)
class Latency:
    """Two models timed by turns on the same samples.

    Attributes:
        reference: seconds of a run of the float model: the median for each sample, averaged over the samples.
        candidate: the same of the quantized model.
        threads: threads inside an operator.
        runs: timed runs of each model.
    """

    reference: float
    candidate: float
    threads: int
    runs: int

    @property
    def speed(self) -> float:
        """How many times as fast as the float model the quantized one is."""
        return self.reference / self.candidate


@dataclass(frozen=True)
class Verification:
    """What a written model does beside the float model.

    Attributes:
        agreement: of the outputs.
        kernels: what runs in the optimised graph.
        latency: None when it was not asked for.
    """

    agreement: Agreement
    kernels: Kernels
    latency: Latency | None

    @property
    def slower(self) -> bool:
        """Whether the model is slower than the float model by more than such a measurement is worth."""
        return self.latency is not None and self.latency.speed < _EQUAL_SPEED


def verify(reference: Path, candidate: Path, samples: SampleSource, *, seconds: float) -> Verification:
    """Load a written model with all optimisations, run it beside the float model, and look at its kernels.

    Args:
        reference: file of the float model.
        candidate: file of the quantized model.
        samples: the data, of which at most 64 evenly spaced samples are compared.
        seconds: time to spend on comparing latency; 0 leaves it out.

    Returns:
        Everything that was seen.

    Raises:
        ModelError: onnxruntime refuses a model.
        DataError: a run fails.
    """
    count = len(samples)
    with tempfile.TemporaryDirectory(prefix="onnxq-") as folder:
        copy = Path(folder) / "optimized.onnx"
        session = open_session(candidate, optimized_copy=copy)
        kernels = _kernels(copy)
    agreement = compare(open_session(reference), session, evenly(samples, count, _COMPARED_SAMPLES))
    timed = list(evenly(samples, count, _TIMED_SAMPLES)) if seconds > 0 else []
    latency = measure_latency(reference, candidate, timed, seconds=seconds) if timed else None
    return Verification(agreement, kernels, latency)


def evenly(items: Iterable[Item], count: int, most: int) -> Iterable[Item]:
    """Yield at most ``most`` of ``count`` items, evenly spaced, without holding them.

    >>> list(evenly(range(10), 10, 4))
    [0, 3, 6, 9]
    """
    wanted = {int(index) for index in np.linspace(0, count - 1, min(count, most)).round()}
    return (item for index, item in enumerate(items) if index in wanted)


def count_kernels(model: Path) -> Kernels:
    """Load a model with all optimisations and count the kernels of the graph that runs.

    Args:
        model: the file.

    Returns:
        The counts, bodies of control flow included.

    Raises:
        ModelError: onnxruntime refuses the model.
    """
    with tempfile.TemporaryDirectory(prefix="onnxq-") as folder:
        copy = Path(folder) / "optimized.onnx"
        open_session(model, optimized_copy=copy)
        return _kernels(copy)


def _kernels(optimized: Path) -> Kernels:
    counts = Counter(_op_types(onnx.load(optimized, load_external_data=False).graph))
    return Kernels(
        integer=sum(n for op, n in counts.items() if op in _INTEGER_KERNELS or op.startswith("QLinear")),
        quantize=counts["QuantizeLinear"] + counts["DequantizeLinear"],
        heavy_float=sum(counts[op] for op in _HEAVY),
    )


def _op_types(graph: onnx.GraphProto) -> Iterator[str]:
    pending = [graph]
    while pending:
        for node in pending.pop().node:
            yield node.op_type
            pending.extend(attribute.g for attribute in node.attribute if attribute.HasField("g"))
            pending.extend(body for attribute in node.attribute for body in attribute.graphs)


def measure_latency(
    reference: Path,
    candidate: Path,
    samples: Sequence[Mapping[str, Array]],
    *,
    seconds: float = 2.0,
    threads: int | None = None,
) -> Latency:
    """Time two models by turns, one run each, so that both see the same moods of the machine.

    Args:
        reference: file of the float model.
        candidate: file of the quantized model.
        samples: run round robin; at least one.
        seconds: time to spend, two warm-up runs of each aside.
        threads: threads inside an operator; None takes all cores.

    Returns:
        The times; at least three runs of each sample by each model.
    """
    # Not every system says which cores a process may use.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = threads or cores
    sessions = open_session(reference, threads=threads), open_session(candidate, threads=threads)
    for _ in range(2):
        for session in sessions:
            run(session, samples[0])
    times: tuple[list[list[float]], list[list[float]]] = [[] for _ in samples], [[] for _ in samples]
    deadline = time.perf_counter() + seconds
    turn = 0
    while turn < 3 * len(samples) or time.perf_counter() < deadline:
        sample = turn % len(samples)
        # The order alternates, so that neither always runs behind the other's warm caches.
        for index in (0, 1) if (turn // len(samples)) % 2 else (1, 0):
            times[index][sample].append(_timed(sessions[index], samples[sample]))
        turn += 1
    reference_seconds, candidate_seconds = (statistics.fmean(map(statistics.median, each)) for each in times)
    return Latency(reference_seconds, candidate_seconds, threads, turn)


def _timed(session: Session, sample: Mapping[str, Array]) -> float:
    start = time.perf_counter()
    run(session, sample)
    return time.perf_counter() - start
