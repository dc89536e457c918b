"""Interleaved timing of models, and confidence intervals of the ratio of their times."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxq.calibration.data import Data, SamplesLike
from onnxq.data.samples import evenly
from onnxq.errors import EngineError
from onnxq.evaluation.bounds import student_t_quantile
from onnxq.evaluation.comparison import open_pair
from onnxq.runtime.engine import Engine, OnnxRuntime
from onnxq.runtime.interleaved_timing import Turn, balanced_orders
from onnxq.runtime.sessions import Array
from onnxq.system.plugins import wrap_plugin_errors
from onnxq.system.publish import staging

ENOUGH = 4
"""Runs of a model in a round: more runs hardly help, as the rounds differ more than the runs."""
_CONFIDENCE = 0.95
NOT_SLOWER = 0.97
"""A candidate is accepted as not slower than the reference if its speed is above this with 95 % confidence."""
# Fewer rounds do not show their distribution.
_FEWEST_ROUNDS = 3
# Timing ends if a model is at least this much faster, or its speed is known to this relative error.
_PLAIN, _CLOSE = 1.1, 0.02


@dataclass(frozen=True)
class Latency:
    """Interleaved times of two models on the same samples.

    Attributes:
        reference: seconds of a run of the float model: the median for each sample, averaged over the samples.
        candidate: the same for the quantized model.
        threads: threads inside an operator.
        runs: timed runs of each model.
        rounds: how often both models were loaded anew.
        interval: 95 % confidence interval of the speed.
        engine: name and version.
        ratios: the speed in each round.
    """

    reference: float
    candidate: float
    threads: int
    runs: int
    rounds: int = 0
    interval: tuple[float, float] = (0.0, math.inf)
    engine: str = ""
    ratios: tuple[float, ...] = ()

    @property
    def speed(self) -> float:
        """Seconds of the float model over seconds of the quantized one."""
        return self.reference / self.candidate

    @property
    def slower(self) -> bool:
        """Whether the candidate takes longer than the reference; between equally fast models this is chance."""
        return self.speed < 1.0

    @property
    def keeps_up(self) -> bool:
        """Whether the candidate is shown not to be slower than the reference; see `NOT_SLOWER`."""
        return self.interval[0] > NOT_SLOWER

    @property
    def is_plain(self) -> bool:
        """Whether the candidate is so much faster, or its speed so well known, that no more timing is worth it."""
        return _is_plain(self.interval)

    @property
    def significant(self) -> bool:
        """Whether the interval excludes equal speed."""
        low, high = self.interval
        return not low <= 1.0 <= high

    @property
    def is_bounded(self) -> bool:
        """Whether there were enough rounds for an interval; without one, the speed must not be reported."""
        low, high = self.interval
        return low > 0 and math.isfinite(high)

    @property
    def is_shown(self) -> bool:
        """Whether more runs would hardly change the result."""
        return self.significant or self.is_plain

    def together(self, more: Latency) -> Latency:
        """Return these rounds and more rounds of the same two models as one result."""
        rounds, ratios = self.rounds + more.rounds, self.ratios + more.ratios
        part = more.rounds / rounds
        merged = replace(
            more,
            reference=(1 - part) * self.reference + part * more.reference,
            candidate=(1 - part) * self.candidate + part * more.candidate,
            runs=self.runs + more.runs,
            rounds=rounds,
            ratios=ratios,
        )
        return replace(merged, interval=_around(merged.speed, median_interval(ratios)))


def measure_latency(
    reference: Path, candidate: Path, samples: Sequence[Mapping[str, Array]], **settings: Any
) -> Latency:
    """Time one candidate beside a reference; see `measure_latencies`, which has the settings."""
    return measure_latencies((reference, candidate), samples, **settings)[0]


def measure_latencies(
    models: Sequence[Path],
    samples: Sequence[Mapping[str, Array]],
    *,
    seconds: float = 2.0,
    threads: int | None = None,
    rounds: int = 6,
    patience: float = math.inf,
    enough: int | None = None,
    engine: Engine | None = None,
) -> list[Latency]:
    """Time models alternately, one run each, so that all see the same state of the machine.

    The place of its weights in memory makes a model a few percent faster or slower for as long as it is loaded. So
    every round loads all models anew and gives one ratio. The difference between rounds sets the interval, not the
    number of runs (Kalibera and Jones, Rigorous Benchmarking in Reasonable Time, 2013).

    Args:
        models: file of the reference, then of each candidate.
        samples: run round robin; at least one.
        seconds: time to spend in all, without loading and one or two warm-up runs of each model in each round.
        threads: threads inside an operator; None takes the engine's default, mostly all cores.
        rounds: how often all models are loaded; below 3 there is no interval.
        patience: seconds after which no further round begins, for models that take long to load.
        enough: runs of a model that end a round, unless they took hardly any time. If all candidates are plainly
            faster, or their speeds are known to 2 %, no further round begins. None leaves this to `seconds` and
            `rounds`.
        engine: runs all models; None stands for onnxruntime in this process.

    Returns:
        The times of each candidate beside the reference; at least one run of each model in each round.
    """
    if engine is None:
        with staging(None) as folder:
            again = partial(measure_latencies, models, samples, seconds=seconds, threads=threads, rounds=rounds)
            return again(patience=patience, enough=enough, engine=OnnxRuntime(folder))
    threads = threads or engine.threads_given
    times: list[list[Turn]] = [[] for _ in samples]
    typical: list[NDArray[np.float64]] = []
    start, orders = time.perf_counter(), balanced_orders(len(models))
    for number in range(rounds):
        if number and time.perf_counter() - start > patience:
            break
        # The order of loading changes too.
        order = orders[number % len(orders)]
        with wrap_plugin_errors(f"engine {engine.name!r}", EngineError):
            loaded = dict(zip(order, engine.load_all([models[index] for index in order], threads), strict=True))
            running = [loaded[index] for index in range(len(models))]
            turns_by_sample = engine.time(running, samples, seconds / rounds, sum(map(len, times)), enough)
        for model in running:
            model.close()
        for all_turns, turns in zip(times, turns_by_sample, strict=True):
            all_turns.extend(turns)
        typical.append(_typical(turns_by_sample))
        if enough is not None and all(_is_plain(median_interval(ratios)) for ratios in _ratios(typical)):
            break
    whole, runs = [float(median) for median in _typical(times)], sum(map(len, times))
    latencies = []
    for candidate, ratios in zip(whole[1:], _ratios(typical), strict=True):
        interval = _around(whole[0] / candidate, median_interval(ratios))
        latencies.append(Latency(whole[0], candidate, threads, runs, len(ratios), interval, engine.place, ratios))
    return latencies


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return an interval that holds the median of the distribution of ratios with a probability of at least 95 %.

    Inverts the sign test, which assumes no distribution (Conover, Practical Nonparametric Statistics, 3.2). Fewer than
    6 values all lie on one side of the median too often. For these, the logarithms are assumed to be normal (Student's
    t).

    Args:
        values: the ratios.

    Returns:
        Zero and infinity if there are fewer than 3 values.

    >>> median_interval([1.1, 1.2, 1.3, 1.4, 1.5, 1.6]), median_interval([1.1, 1.2])
    ((1.1, 1.6), (0.0, inf))
    """
    if len(values) < _FEWEST_ROUNDS:
        return 0.0, math.inf
    risk = (1 - _CONFIDENCE) / 2
    if 2.0 ** -len(values) > risk:
        logs = np.log(values)
        margin = student_t_quantile(len(values) - 1, risk) * logs.std(ddof=1) / math.sqrt(len(values))
        return math.exp(logs.mean() - margin), math.exp(logs.mean() + margin)
    count, tail, left_out = len(values), 0.0, -1
    while (tail := tail + math.comb(count, left_out + 1) / 2**count) <= risk:
        left_out += 1
    ordered = sorted(values)
    return ordered[left_out], ordered[-1 - left_out]


def _ratios(typical: Sequence[NDArray[np.float64]]) -> list[tuple[float, ...]]:
    """Return each candidate's speed in each round so far."""
    return [tuple(float(medians[0] / medians[place]) for medians in typical) for place in range(1, len(typical[0]))]


def _around(speed: float, interval: tuple[float, float]) -> tuple[float, float]:
    """Widen an interval to hold a speed.

    If the machine changes halfway, the speed of all runs together may differ from the median of the rounds.
    """
    return min(interval[0], speed), max(interval[1], speed)


def _is_plain(interval: tuple[float, float]) -> bool:
    low, high = interval
    return low > _PLAIN or (low > 0 and high / low < (1 + _CLOSE) ** 2)


def _typical(times: Sequence[Sequence[Turn]]) -> NDArray[np.float64]:
    """Return the median of each model for each sample that ran, averaged over the samples."""
    medians = [[median(runs) for runs in zip(*turns, strict=True)] for turns in times if turns]
    return np.asarray(np.mean(medians, axis=0))


# Comparison of two model files.

_TIMED_SAMPLES = 8
# With 12 rounds the interval leaves out the two lowest and highest, so one disturbed round changes nothing.
_ROUNDS = 12
# Narrower intervals are shown with another digit.
_WIDE = 0.02
_PROCESSORS = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class LatencyComparison:
    """Interleaved times of two models, and the machine they ran on.

    Attributes:
        reference: file of the first model.
        candidate: file of the second model.
        samples: number of samples that ran in turn.
        machine: name of the processor.
        runtime: the engine and its version.
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

    def lack(self, min_speed: float) -> str:
        """Describe that the candidate is shown to be less than `min_speed` times as fast; "" if it is not."""
        low, high = self.latency.interval
        if high >= min_speed:
            return ""
        return f"{self.candidate} is {low:.2f}x to {high:.2f}x as fast, expected {min_speed:g}x or more"

    def to_dict(self) -> dict[str, object]:
        """Return plain values for JSON; times in seconds."""
        low, high = self.latency.interval
        latency = {**asdict(self.latency), "interval": [low, high if math.isfinite(high) else None]}
        return {**asdict(self), "latency": latency, "speed": self.latency.speed, "verdict": self.verdict}


def bench(
    reference: str | Path,
    candidate: str | Path,
    data: SamplesLike | Data,
    *,
    threads: int | None = None,
    latency_seconds: float = 10.0,
    engine: Engine | None = None,
) -> LatencyComparison:
    """Time two models alternately on at most 8 evenly spaced samples; see `measure_latency`.

    Args:
        reference: file of the model to compare with, such as the float model.
        candidate: file of a model with the same inputs. If they are integers, quantizing them is timed, too.
        data: samples that fit the reference, or Data with how they are read.
        threads: threads inside an operator; None takes all cores.
        latency_seconds: time to spend, without loading.
        engine: runs both models; None stands for onnxruntime in this process.

    Raises:
        ModelError: A file cannot be read or loaded.
        DataError: The samples do not fit a model.

    >>> bench("model.onnx", "model.int8.onnx", "data/").latency.speed  # doctest: +SKIP
    2.15
    """
    with open_pair(reference, candidate, data) as (floating, model, samples):
        timed = tuple(evenly(samples, _TIMED_SAMPLES))
        latency = measure_latency(
            floating, model, timed, seconds=latency_seconds, threads=threads, rounds=_ROUNDS, engine=engine
        )
    return LatencyComparison(str(reference), str(candidate), latency, len(timed), processor_name(), latency.engine)


@cache
def processor_name() -> str:
    """Return the processor's name, which Python does not know on Linux."""
    with suppress(OSError):
        lines = _PROCESSORS.read_text(encoding="utf-8", errors="replace").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        if names:
            return names[0]
    return platform.processor() or platform.machine()
