"""How often 95 % bounds hold for each kind of output, simulated, and on real models.

    python benchmarks/coverage_of_bounds.py [--models DIR --data DIR [NAME ...]] [--results FILE]

Simulated: outputs of a float model and errors of a candidate are drawn for 8,000 samples of each kind, whose errors
differ from sample to sample. A few of these are judged many times over, and compared with the error over all. A cell
is the share of draws in which the bound holds, and the decibels by which it is too low in the median. For labels, what
is claimed is the share that surely differs, so it holds if no more labels differ in truth; its slack is of that share.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import median
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
from onnxq.evaluation.sqnr import ErrorAccumulator, estimate_sqnr
from onnxq.ir import load
from onnxq.lowering import AllowedOps
from onnxq.planning.plan import Demotion
from onnxq.runtime.targets import DEFAULT_TARGET, target_named
from onnxq.search.candidate import Recipe, Workshop
from onnxq.search.prepared_model import open_prepared_model
from onnxq.system.resources import silent

Floats: TypeAlias = NDArray[np.float64]
Draw: TypeAlias = Callable[[np.random.Generator, tuple[int, ...]], tuple[Floats, Floats]]
Sample: TypeAlias = tuple[NDArray[Any], NDArray[Any]]
Kind: TypeAlias = Callable[[np.random.Generator], Sample]

COUNTS = (3, 8, 16, 64)
DRAWN = 200
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


def coverage(draw: Draw, count: int, drawn: int, true: float) -> tuple[float, float]:
    """Return how often a bound of so many samples holds, and by how many decibels it is too low in the median."""
    signals, noises = draw(np.random.default_rng(count), (drawn, count))
    slacks = [true - ours(*one) for one in zip(signals, noises, strict=True)]
    return sum(slack >= 0 for slack in slacks) / drawn, median(slacks)


# Kinds of outputs: a sample of the float model and of a candidate.


def sigmoid(logits: Floats) -> Floats:
    return np.asarray(1 / (1 + np.exp(-logits)))


def noisy(generator: np.random.Generator, values: Floats, error: float) -> Floats:
    """Add normal errors, whose size differs from sample to sample."""
    return values + error * generator.lognormal(0, 0.5) * generator.normal(0, 1, values.shape)


def regression(generator: np.random.Generator) -> Sample:
    values = generator.normal(0, 1, (1, 8)) * generator.lognormal(0, 0.5)
    return values, noisy(generator, values, 0.1)


def logits(generator: np.random.Generator) -> Sample:
    values = generator.normal(0, 3, (1, 10))
    return values, noisy(generator, values, 0.3)


def probabilities(generator: np.random.Generator) -> Sample:
    values, found = logits(generator)
    return softmax(values), softmax(found)


def sure_probabilities(generator: np.random.Generator) -> Sample:
    values = generator.normal(0, 8, (1, 10))
    return softmax(values), softmax(noisy(generator, values, 0.5))


def scores(generator: np.random.Generator) -> Sample:
    values = generator.normal(-2, 3, (1, 20))
    return sigmoid(values), sigmoid(noisy(generator, values, 0.3))


def one_score(generator: np.random.Generator) -> Sample:
    values = generator.normal(0, 5, (1, 1))
    return sigmoid(values), sigmoid(noisy(generator, values, 0.5))


def detector(generator: np.random.Generator) -> Sample:
    """Draw the scores of 300 anchors, a few of which hold an object that is more or less sure."""
    values, objects = generator.normal(-8, 1.5, (1, 300)), generator.poisson(3) + 1
    values[:, :objects] = generator.normal(3 * generator.lognormal(0, 0.5) - 1, 1.5, objects)
    return sigmoid(values), sigmoid(noisy(generator, values, 0.3))


def best_scores(generator: np.random.Generator) -> Sample:
    """Draw the twenty highest scores of a detector, as TopK gives them with the float model's choice."""
    values, found = detector(generator)
    order = np.argsort(-values, -1)[:, :20]
    return np.take_along_axis(values, order, -1), np.take_along_axis(found, order, -1)


def sparse_rows(generator: np.random.Generator) -> Sample:
    values = generator.normal(0, 1, (4, 16))
    return sparsemax(values), sparsemax(noisy(generator, values, 0.05))


def sparsemax(rows: Floats) -> Floats:
    """Project rows onto the simplex (Martins and Astudillo, ICML 2016)."""
    ordered = -np.sort(-rows, -1)
    sums, counts = ordered.cumsum(-1), np.arange(1, rows.shape[-1] + 1)
    support = (1 + counts * ordered > sums).sum(-1, keepdims=True)
    return np.asarray(np.maximum(rows - (np.take_along_axis(sums, support - 1, -1) - 1) / support, 0))


def boxes(generator: np.random.Generator) -> Sample:
    corners = generator.uniform(50, 600, (1, 6, 4))
    return corners, corners + 5 * generator.lognormal(0, 0.5) * generator.standard_t(4, corners.shape)


def labels(generator: np.random.Generator) -> Sample:
    values = generator.normal(0, 1, (40, 10))
    return values.argmax(-1), noisy(generator, values, 0.1).argmax(-1)


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "regression": regression,
        "logits": logits,
        "softmax": probabilities,
        "softmax, sure": sure_probabilities,
        "sigmoid scores": scores,
        "one sigmoid score": one_score,
        "scores of anchors": detector,
        "TopK of scores": best_scores,
        "sparse rows": sparse_rows,
        "boxes": boxes,
        "labels": labels,
    }
)


def coverage_of_kind(kind: Kind, count: int, drawn: int, population: int = 8000) -> tuple[float, float]:
    """Return how often a bound of so many samples of a kind holds, and by how many decibels it is too low."""
    generator = np.random.default_rng(1)
    pairs = [_narrowed(*kind(generator)) for _ in range(population)]
    everything = judged(pairs)
    is_label = not everything.is_float
    true = -20 * math.log10((1 - everything.equal / everything.compared) / 0.1) if is_label else everything.sqnr
    slacks = []
    for _ in range(drawn):
        tally = judged([pairs[place] for place in generator.integers(0, population, count)])
        # What labels claim is an upper bound of their decibels.
        slacks.append(tally.bound() - true if is_label else true - tally.bound())
    return sum(slack >= 0 for slack in slacks) / drawn, median(slacks)


def judged(pairs: Iterable[Sample]) -> ErrorAccumulator:
    tally = ErrorAccumulator()
    for pair in pairs:
        tally.add_sample(*pair)
    return tally


def _narrowed(expected: NDArray[Any], found: NDArray[Any]) -> Sample:
    kind = np.float32 if expected.dtype.kind == "f" else expected.dtype
    return expected.astype(kind), found.astype(kind)


def simulated() -> Iterator[str]:
    """Yield the lines of a table of kinds of outputs and numbers of samples."""
    yield f"| output | {' | '.join(f'{count} samples' for count in COUNTS)} |"
    yield f"|---|{'---:|' * len(COUNTS)}"
    for name, kind in KINDS.items():
        found = [coverage_of_kind(kind, count, DRAWN) for count in COUNTS]
        yield f"| {name} | {' | '.join(f'{held:.1%}, {slack:.1f} dB' for held, slack in found)} |"


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
                slacks.append(rest - estimate_sqnr(chosen))
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
        samples = list(bench.samples(calib, Data(calib)))
        statistics = bench.calibrate(bench.plan({}), samples, silent)
        workshop = Workshop.of(bench, model, samples, statistics, "candidate.onnx", count=len(samples))
        reference = workshop.reference
        weighted = [one.node for one in bench.plan({}).decisions if one.weights]
        stored = Demotion(Mode.STORAGE, "chance")
        for number in range(PLANS):
            out = [node for node in weighted if generator.random() < number / PLANS]
            candidate = workshop.built(bench.plan(dict.fromkeys(out, stored)), Recipe(EncodingConfig(), statistics))
            found = list(reference.views.open(candidate.path).run_each(reference.given))
            yield reference.views.names, list(zip(reference.expected, found, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    lines = [
        "How often a one-sided 95 % bound holds, and by how many decibels it is too low in the median.",
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
