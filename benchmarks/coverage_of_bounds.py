"""How often bounds on the SQNR hold, and how far below the truth they lie: on simulated errors and on real models.

    python benchmarks/coverage_of_bounds.py [--models DIR --data DIR [NAME ...]] [--results FILE]

Simulated: signals and noises of a few samples are drawn many times over from distributions whose ratio of means is
known. Four other bounds stand beside ours: Student's t interval of the ratio (linearised), the jackknife of its
logarithm, the bootstrap-t of its logarithm, and the mean of the samples' own ratios that faint samples decide.

Real: plans of a model with some nodes at random left in float are judged on a random quarter of its calibration
samples, many times over, and compared with the SQNR over the other three quarters. MODELS/NAME.onnx runs on
DATA/NAME/calib; a model without a data folder of its own name takes the one whose name its own starts with. The last
column is what no bound can know: the slack of the SQNR that was seen less the constant with which 95 % hold on just
these samples. Above 2 dB, no bound that moves with what was seen holds in 95 % with a slack of 2 dB.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import NormalDist, median
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from onnxq.algorithms.encoding_config import EncodingConfig
from onnxq.calibration.data import Data
from onnxq.config.presets import PRESETS
from onnxq.config.scheme import Mode
from onnxq.evaluation.agreement import agreement_of
from onnxq.evaluation.bounds import lower_bound
from onnxq.evaluation.sqnr import estimate_sqnr
from onnxq.ir import load
from onnxq.lowering import AllowedOps
from onnxq.planning.plan import Demotion
from onnxq.runtime.targets import DEFAULT_TARGET, target_named
from onnxq.search.evaluator import PlanEvaluator
from onnxq.search.prepared_model import open_prepared_model
from onnxq.system.resources import silent

Floats: TypeAlias = NDArray[np.float64]
Draw: TypeAlias = Callable[[np.random.Generator, tuple[int, ...]], tuple[Floats, Floats]]
Bound: TypeAlias = Callable[[Floats, Floats], float]

COUNTS = (2, 4, 8, 16, 32)
DRAWN = 2000
PLANS = 5
QUARTERS = 20
RESULTS = Path(__file__).parent / "results" / "coverage-of-bounds.md"


def energies(generator: np.random.Generator, shape: tuple[int, ...], elements: int) -> Floats:
    """Draw mean squares of so many normal values."""
    return generator.chisquare(elements, shape) / elements


def normal(generator: np.random.Generator, shape: tuple[int, ...]) -> tuple[Floats, Floats]:
    return energies(generator, shape, 64), energies(generator, shape, 64)


def one_number(generator: np.random.Generator, shape: tuple[int, ...]) -> tuple[Floats, Floats]:
    return generator.lognormal(0, 0.5, shape), energies(generator, shape, 1)


def lognormal(generator: np.random.Generator, shape: tuple[int, ...]) -> tuple[Floats, Floats]:
    return energies(generator, shape, 16), generator.lognormal(0, 1, shape)


def both_lognormal(generator: np.random.Generator, shape: tuple[int, ...]) -> tuple[Floats, Floats]:
    return generator.lognormal(0, 1, shape), generator.lognormal(0, 1, shape)


def proportional(generator: np.random.Generator, shape: tuple[int, ...]) -> tuple[Floats, Floats]:
    signal = generator.lognormal(0, 1, shape)
    return signal, signal * generator.lognormal(0, 0.3, shape)


def heavy_tails(generator: np.random.Generator, shape: tuple[int, ...]) -> tuple[Floats, Floats]:
    return energies(generator, shape, 16), np.square(generator.standard_t(5, (*shape, 8))).mean(-1)


def heavier_tails(generator: np.random.Generator, shape: tuple[int, ...]) -> tuple[Floats, Floats]:
    return energies(generator, shape, 16), np.square(generator.standard_t(3, (*shape, 64))).mean(-1)


def faint(generator: np.random.Generator, shape: tuple[int, ...]) -> tuple[Floats, Floats]:
    audible = generator.random(shape) >= 1 / 16
    return np.where(audible, 1e6, 1e-6) * energies(generator, shape, 16), energies(generator, shape, 16)


def mostly_silent(generator: np.random.Generator, shape: tuple[int, ...]) -> tuple[Floats, Floats]:
    signal = np.where(generator.random(shape) < 0.4, 1.0, 1e-6)
    return signal, signal * generator.lognormal(0, 0.7, shape)


def mirrored(generator: np.random.Generator, shape: tuple[int, ...]) -> tuple[Floats, Floats]:
    logits = generator.normal(0, 3, (*shape, 10))
    error = generator.normal(0, 0.3, logits.shape)
    expected, found, other = (softmax(one) for one in (logits, logits + error, logits - error))
    noise = (np.square(found - expected) + np.square(other - expected)).sum(-1) / 2
    return np.square(expected).sum(-1), noise


def softmax(logits: Floats) -> Floats:
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(powers / powers.sum(-1, keepdims=True))


SCENARIOS: Mapping[str, Draw] = MappingProxyType(
    {
        "normal, 64 numbers a sample": normal,
        "normal, one number a sample": one_number,
        "lognormal, sigma 1": lognormal,
        "lognormal, signal as well": both_lognormal,
        "proportional to a lognormal signal": proportional,
        "Student's t(5), 8 numbers a sample": heavy_tails,
        "Student's t(3), 64 numbers a sample": heavier_tails,
        "60 dB, one sample of 16 silent": faint,
        "lognormal, six samples of ten silent": mostly_silent,
        "probabilities, errors of either sign": mirrored,
    }
)


def ours(signal: Floats, noise: Floats) -> float:
    return lower_bound(list(zip(signal.tolist(), noise.tolist(), strict=True)))


def student(signal: Floats, noise: Floats) -> float:
    ratio = noise.sum() / signal.sum()
    residuals = (noise - ratio * signal) / signal.mean()
    return -decibels(ratio + t_quantile(len(noise) - 1) * residuals.std(ddof=1) / math.sqrt(len(noise)))


def jackknife(signal: Floats, noise: Floats) -> float:
    count = len(noise)
    without = np.log((noise.sum() - noise) / (signal.sum() - signal))
    error = math.sqrt((count - 1) * without.var())
    return -decibels(noise.sum() / signal.sum() * math.exp(t_quantile(count - 1) * error))


def bootstrap_t(signal: Floats, noise: Floats, resamples: int = 200) -> float:
    count = len(noise)
    rows = np.random.default_rng(0).integers(0, count, (resamples, count))
    ratio, error = linearised(signal[None], noise[None])
    ratios, errors = linearised(signal[rows], noise[rows])
    with np.errstate(divide="ignore", invalid="ignore"):
        pivots = np.log(ratios / ratio) / errors
    lowest = float(np.quantile(pivots[np.isfinite(pivots)], 0.05))
    return -decibels(float(ratio[0] * np.exp(min(-lowest, 100.0) * error[0])))


def linearised(signal: Floats, noise: Floats) -> tuple[Floats, Floats]:
    """Return the ratio of each row and the standard error of its logarithm."""
    ratio = noise.sum(-1) / signal.sum(-1)
    residuals = (noise - ratio[:, None] * signal) / noise.mean(-1, keepdims=True)
    return ratio, residuals.std(-1, ddof=1) / math.sqrt(noise.shape[-1])


def of_ratios(signal: Floats, noise: Floats) -> float:
    ratios = noise / signal
    ratios = np.append(ratios, 2 * ratios.max())
    return -decibels(ratios.mean() + t_quantile(len(ratios) - 1) * ratios.std(ddof=1) / math.sqrt(len(ratios)))


BOUNDS: Mapping[str, Bound] = MappingProxyType(
    {
        "onnxq": ours,
        "Student's t": student,
        "jackknife": jackknife,
        "bootstrap-t": bootstrap_t,
        "mean of ratios": of_ratios,
    }
)


def t_quantile(freedom: int) -> float:
    """Return the 95 % quantile of Student's t distribution (Abramowitz and Stegun 26.7.5, and the first by table)."""
    if freedom < 2:
        return 6.314
    z = NormalDist().inv_cdf(0.95)
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def decibels(ratio: float) -> float:
    return 10 * math.log10(ratio)


@cache
def truth(draw: Draw, draws: int = 4_000_000) -> float:
    """Return the SQNR over all samples."""
    totals = np.zeros(2)
    generator = np.random.default_rng(1)
    for _ in range(draws // 100_000):
        totals += [one.sum() for one in draw(generator, (100_000,))]
    return decibels(totals[0] / totals[1])


def coverage(draw: Draw, bound: Bound, count: int, drawn: int, true: float) -> tuple[float, float]:
    """Return how often a bound of so many samples holds, and by how many decibels it is too low in the median."""
    signals, noises = draw(np.random.default_rng(count), (drawn, count))
    slacks = [true - bound(*one) for one in zip(signals, noises, strict=True)]
    return sum(slack >= 0 for slack in slacks) / drawn, median(slacks)


def simulated() -> Iterator[str]:
    """Yield the lines of a table of all distributions, numbers of samples and bounds."""
    yield f"| samples are | n | {' | '.join(BOUNDS)} |"
    yield f"|---|---:|{'---:|' * len(BOUNDS)}"
    for name, draw in SCENARIOS.items():
        true = truth(draw)
        for count in COUNTS:
            found = [coverage(draw, bound, count, DRAWN, true) for bound in BOUNDS.values()]
            cells = [f"{coverage:.1%}, {slack:.1f} dB" for coverage, slack in found]
            yield f"| {name} | {count} | {' | '.join(cells)} |"


def real(models: Path, data: Path, names: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a table of models: how often bounds of a quarter held on the rest, and their median slack."""
    yield "| model | samples | a quarter | judged | held | missed by | median slack | of a constant |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|"
    everything: list[float] = []
    for name in names:
        calib = data / _data(data, name) / "calib"
        generator = np.random.default_rng(0)
        slacks: list[float] = []
        gains: list[float] = []
        count = quarter = 0
        for outputs, pairs in tried(models / f"{name}.onnx", calib, generator):
            count, quarter = len(pairs), max(len(pairs) // 4, 1)
            for _ in range(QUARTERS):
                order = generator.permutation(count)
                chosen, others = ([pairs[place] for place in part] for part in (order[:quarter], order[quarter:]))
                rest = agreement_of(outputs, others).worst_sqnr
                slacks.append(rest - estimate_sqnr(chosen).sqnr)
                gains.append(rest - agreement_of(outputs, chosen).worst_sqnr)
        everything += slacks
        constant = f"{median(gains) - np.quantile(gains, 0.05):.1f} dB"
        yield f"| {name} | {count} | {quarter} | {len(slacks)} | {_held(slacks)} | {constant} |"
    yield f"| all | | | {len(everything)} | {_held(everything)} | |"


def _held(slacks: Sequence[float]) -> str:
    """Return how often bounds held, by how much the others missed in the median, and the median slack of all."""
    missed = [-slack for slack in slacks if slack < 0]
    held = f"{1 - len(missed) / len(slacks):.1%}"
    return f"{held} | {f'{median(missed):.1f} dB' if missed else ''} | {median(slacks):.1f} dB"


def _data(data: Path, name: str) -> str:
    """Return the folder of a model's data: the longest name that its own starts with, or none."""
    return max((one.name for one in data.iterdir() if name.startswith(one.name)), key=len, default="")


def tried(
    model: Path, calib: Path, generator: np.random.Generator
) -> Iterator[tuple[Sequence[str], list[tuple[tuple[Any, ...], list[Any]]]]]:
    """Yield the outputs of the float model and of a plan's for each sample, of plans with ever fewer integers."""
    with tempfile.TemporaryDirectory() as folder:
        bench = open_prepared_model(
            load(model), PRESETS["int8"], target_named(DEFAULT_TARGET), Path(folder), AllowedOps.QDQ
        )
        samples = list(bench.samples(calib, Data(calib), lambda _: None))
        statistics = bench.calibrate(bench.plan({}), samples, silent)
        trials = PlanEvaluator.of(bench, model, samples, statistics)
        weighted = [one.node for one in bench.plan({}).decisions if one.weights]
        stored = Demotion(Mode.STORAGE, "chance")
        for number in range(PLANS):
            out = [node for node in weighted if generator.random() < number / PLANS]
            view = trials.answered.views.open(
                trials.candidate(bench.plan(dict.fromkeys(out, stored)), EncodingConfig()).path
            )
            found = [view.run(sample) for sample in trials.answered.given]
            yield trials.answered.views.names, list(zip(trials.answered.expected, found, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    lines = [
        "How often a one-sided 95 % bound of the SQNR holds, and by how many decibels it is too low in the median.",
        "",
    ]
    for line in simulated():
        lines.append(line)
        print(line, flush=True)
    if options.models is not None and options.data is not None:
        lines += ["", "Random plans judged on a random quarter of the calibration samples, and on the other three.", ""]
        names = options.names or sorted(
            path.stem for path in options.models.glob("*.onnx") if _data(options.data, path.stem)
        )
        for line in real(options.models, options.data, names):
            lines.append(line)
            print(line, flush=True)
    options.results.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
