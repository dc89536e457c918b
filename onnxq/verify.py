"""Look at what a written model really does: which kernels run, and how long they take beside the float model's."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from onnxq.runtime import Array, Session, open_session, run

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
        reference: median seconds of a run of the float model.
        candidate: median seconds of a run of the quantized model.
        speed: median, over turns, of the float model's time over the quantized model's on the same sample.
        threads: threads inside an operator.
        runs: timed runs of each model.
    """

    reference: float
    candidate: float
    speed: float
    threads: int
    runs: int


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
        counts = Counter(_op_types(onnx.load(copy, load_external_data=False).graph))
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
        Medians over all turns; at least five.
    """
    # Not every system says which cores a process may use.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = threads or cores
    sessions = open_session(reference, threads=threads), open_session(candidate, threads=threads)
    for _ in range(2):
        for session in sessions:
            run(session, samples[0])
    times: tuple[list[float], list[float]] = [], []
    deadline = time.perf_counter() + seconds
    turn = 0
    while turn < 5 or time.perf_counter() < deadline:
        sample = samples[turn % len(samples)]
        # The order alternates, so that neither always runs behind the other's warm caches.
        for index in (0, 1) if turn % 2 else (1, 0):
            times[index].append(_timed(sessions[index], sample))
        turn += 1
    speed = statistics.median(one / other for one, other in zip(*times, strict=True))
    return Latency(statistics.median(times[0]), statistics.median(times[1]), speed, threads, turn)


def _timed(session: Session, sample: Mapping[str, Array]) -> float:
    start = time.perf_counter()
    run(session, sample)
    return time.perf_counter() - start
