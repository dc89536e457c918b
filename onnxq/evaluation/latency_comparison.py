"""Compare the latency of two model files honestly: on the same samples, by turns, with an interval."""

from __future__ import annotations

import math
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

from onnxq.calibration.chain import samples_of
from onnxq.calibration.data import Data, SamplesLike
from onnxq.data.samples import evenly
from onnxq.errors import check_path
from onnxq.evaluation.latency import Latency, measure_latency
from onnxq.runtime.engine import Engine

_TIMED_SAMPLES = 8
# The two lowest and highest of the rounds are left out of the interval, so one disturbed round moves nothing.
_ROUNDS = 12
# Intervals narrower than this are told with another digit.
_WIDE = 0.02
_PROCESSORS = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Bench:
    """Two models timed beside one another, and where.

    Attributes:
        reference: file of the first model.
        candidate: file of the second model.
        latency: the times.
        samples: how many samples were run in turn.
        machine: the processor.
        runtime: the engine that ran them and its version.
    """

    reference: str
    candidate: str
    latency: Latency
    samples: int
    machine: str
    runtime: str

    @property
    def verdict(self) -> str:
        """One sentence: how much faster the candidate is, or that no difference can be shown."""
        low, high = self.latency.interval
        digits = 2 if high - low > _WIDE else 3
        speed = f"{self.latency.speed:.{digits}f}x ({low:.{digits}f}-{high:.{digits}f})"
        sentence = f"{self.candidate} is {speed} as fast as {self.reference} with 95 % confidence"
        return sentence if self.latency.significant else f"no difference can be shown: {sentence}"

    def to_dict(self) -> dict[str, object]:
        """Return plain values for JSON; seconds."""
        low, high = self.latency.interval
        latency = {**asdict(self.latency), "interval": [low, high if math.isfinite(high) else None]}
        return {**asdict(self), "latency": latency, "speed": self.latency.speed, "verdict": self.verdict}


def bench(
    reference: str | Path,
    candidate: str | Path,
    data: SamplesLike | Data,
    *,
    threads: int | None = None,
    seconds: float = 10.0,
    engine: Engine | None = None,
) -> Bench:
    """Time two models by turns on at most 8 evenly spaced samples; see measure_latency.

    Args:
        reference: file of the model to compare with, such as the float model.
        candidate: file of a model with the same inputs.
        data: samples that fit the reference, or Data with how they are read.
        threads: threads inside an operator; None takes all cores.
        seconds: time to spend, loading aside.
        engine: what runs both; None stands for onnxruntime in this process.

    Returns:
        The times and what they mean.

    Raises:
        ModelError: a file cannot be read or loaded.
        DataError: the samples do not fit a model.
    """
    for path in (reference, candidate):
        check_path(path, "the file of a model")
    reference, candidate = Path(reference), Path(candidate)
    timed = tuple(evenly(samples_of(reference, data), _TIMED_SAMPLES))
    latency = measure_latency(
        reference, candidate, timed, seconds=seconds, threads=threads, rounds=_ROUNDS, engine=engine
    )
    return Bench(str(reference), str(candidate), latency, len(timed), _processor(), latency.engine)


def _processor() -> str:
    """Return the processor's name, which Python itself does not know on Linux."""
    if _PROCESSORS.is_file():
        lines = _PROCESSORS.read_text(encoding="utf-8", errors="replace").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        if names:
            return names[0]
    return platform.processor() or platform.machine()
