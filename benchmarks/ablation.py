"""Versions of onnxq on the same models: accuracy, speed, size, cost and decisions, each version with reruns.

    python benchmarks/ablation.py run SCRATCH --version base=CHECKOUT --version new=CHECKOUT --folder MODELS DATA
        [--folder ...] [--seeds N] [--reruns N] [--only MODEL ...]
    python benchmarks/ablation.py table SCRATCH --base base [--save results/ablation.md]

A version is a checkout of the repository. To see what a mechanism is worth, switch it off in a checkout of its own.
The first version runs N + 1 times, and so shows how much runs of the same code differ: a change has to beat that.

Every third calibration sample is held out and chooses nothing; the seed says which third. Decibels are those of the
held-out samples. Each model is quantized in a process of its own, with default options. Then all the results of a model
and seed are timed in turns beside the float model. ``run`` continues where it stopped when it is called again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from same_bytes import cases

PARTS = 3
TIMED_SAMPLES, TIMED_SECONDS = 4, 1.0
LOSS_DB, LOSS_SPEED = 1.0, 0.97


@dataclass(frozen=True)
class Outcome:
    """The model that a version made of a float model.

    Attributes:
        version: the name of the version, with the number of the rerun, as in ``base 2``.
        sqnr: decibels of the worst output on the held-out samples.
        speed: speed relative to the float model.
        size: bytes relative to the float model.
        seconds: duration of quantize().
        models: models that the search built.
        digest: of the file.
        modes: number of nodes by mode.
        refusal: the sentence of a refusal or error; nothing else is known then.
    """

    model: str
    seed: int
    version: str
    sqnr: float = math.nan
    speed: float = math.nan
    size: float = math.nan
    seconds: float = math.nan
    models: int = 0
    digest: str = ""
    modes: Mapping[str, int] = field(default_factory=dict)
    refusal: str = ""


def split(model: Path, data: Path, seed: int) -> tuple[list[Any], list[Any]]:
    """Return the samples to quantize with, and those that are held out."""
    from onnxq.calibration.data import samples_of

    samples = list(enumerate(samples_of(model, data)))
    held = [sample for index, sample in samples if index % PARTS == seed % PARTS]
    return [sample for index, sample in samples if index % PARTS != seed % PARTS], held


def quantized(model: Path, data: Path, seed: int, version: str, output: Path) -> Outcome:
    """Quantize a model with the version of onnxq that this process imports."""
    import onnxq

    samples, _ = split(model, data, seed)
    start = time.perf_counter()
    outcome = Outcome(model.stem, seed, version)
    try:
        report = onnxq.quantize(model, samples, output).report
    except onnxq.OnnxqError as error:
        return replace(outcome, seconds=time.perf_counter() - start, refusal=str(error))
    return replace(
        outcome,
        size=report.size_ratio,
        seconds=time.perf_counter() - start,
        models=report.search.measured,
        digest=hashlib.sha256(output.read_bytes()).hexdigest()[:16],
        modes=dict(Counter(str(decision.mode) for decision in report.plan.decisions)),
    )


def measured(model: Path, data: Path, outcomes: Sequence[Outcome], outputs: Mapping[str, Path]) -> list[Outcome]:
    """Return the outcomes with their decibels on the held-out samples and their speeds, all timed in turns."""
    from onnxq.data.samples import evenly
    from onnxq.evaluation.agreement import compare_files
    from onnxq.evaluation.latency import measure_latencies

    written = [one for one in outcomes if one.digest]
    if not written:
        return list(outcomes)
    samples, held = split(model, data, outcomes[0].seed)
    distinct = {one.digest: outputs[one.version] for one in written}
    decibels = {digest: compare_files(model, path, held).worst_sqnr for digest, path in distinct.items()}
    timed = measure_latencies([model, *distinct.values()], list(evenly(samples, TIMED_SAMPLES)), seconds=TIMED_SECONDS)
    speeds = {digest: latency.speed for digest, latency in zip(distinct, timed, strict=True)}
    return [
        replace(one, sqnr=decibels[one.digest], speed=speeds[one.digest]) if one.digest else one for one in outcomes
    ]


# All runs


def read(scratch: Path) -> dict[tuple[str, int], list[Outcome]]:
    """Return the outcomes so far, by model and seed."""
    kept = scratch / "outcomes.jsonl"
    known: dict[tuple[str, int], list[Outcome]] = {}
    for line in kept.read_text().splitlines() if kept.exists() else ():
        outcome = Outcome(**json.loads(line))
        known.setdefault((outcome.model, outcome.seed), []).append(outcome)
    return known


def process(checkout: Path, *arguments: object) -> str:
    """Run this script with the onnxq of a checkout, and return the last line that it prints."""
    command = [sys.executable, __file__, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(checkout.resolve())}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-500:])
    return done.stdout.strip().splitlines()[-1]


def run(options: argparse.Namespace) -> None:
    """Run all versions on each model and seed that has no outcomes yet."""
    options.scratch.mkdir(parents=True, exist_ok=True)
    (first, checkout), *others = [version.split("=", 1) for version in options.version]
    versions = {first: checkout, **{f"{first} {number + 2}": checkout for number in range(options.reruns)}}
    versions |= dict(others)
    models = {path.stem: (path, data) for folders in options.folder or [(None, None)] for path, data in cases(*folders)}
    for seed in range(options.seeds):
        for name, (model, data) in models.items():
            if (name, seed) in read(options.scratch) or (options.only and name not in options.only):
                continue
            outputs = {version: options.scratch / f"{number}.onnx" for number, version in enumerate(versions)}
            outcomes = []
            for version, where in versions.items():
                try:
                    line = process(Path(where), "quantize", model, data, seed, version, outputs[version])
                    outcomes.append(Outcome(**json.loads(line)))
                except RuntimeError as failure:
                    outcomes.append(Outcome(name, seed, version, refusal=f"failed: {failure}"))
            texts = [json.dumps([asdict(one) for one in outcomes]), json.dumps({k: str(v) for k, v in outputs.items()})]
            rows = json.loads(process(Path(checkout), "measure", model, data, *texts))
            with (options.scratch / "outcomes.jsonl").open("a") as kept:
                kept.writelines(json.dumps(row) + "\n" for row in rows)
            for one in (Outcome(**row) for row in rows):
                figures = (
                    f"{one.sqnr:.1f} dB, {one.speed:.2f}x, {one.size:.2f}, {one.seconds:.1f} s, {one.models} models"
                )
                print(f"{name}, seed {seed}, {one.version}: {one.refusal or figures}", flush=True)


# The table


def table(options: argparse.Namespace) -> None:
    """Print a row for each version and each loss, and save them."""
    lines = list(rows(read(options.scratch), options.base))
    print("\n".join(lines))
    if options.save is not None:
        options.save.write_text("\n".join(lines) + "\n")


def rows(known: Mapping[tuple[str, int], Sequence[Outcome]], base: str) -> Iterator[str]:
    """Yield the lines of the table: each version beside the base, then its losses."""
    heads = ["version", "runs", "refused", "least dB", "speed", "least", "beside the base", "size", "seconds"]
    yield f"| {' | '.join([*heads, 'models', 'same bytes as the base'])} |"
    yield "|" + "---|" * (len(heads) + 2)
    losses = []
    for version in dict.fromkeys(one.version for outcomes in known.values() for one in outcomes):
        pairs = [({one.version: one for one in outcomes}) for outcomes in known.values()]
        both = [(by[base], by[version]) for by in pairs if base in by and version in by]
        written = [(was, now) for was, now in both if was.digest and now.digest]
        if not written:
            continue
        ratios = [now.speed / was.speed for was, now in written]
        cells = [
            version,
            len(both),
            sum(not now.digest for _, now in both),
            f"{min(now.sqnr for _, now in written):.1f}",
            f"{statistics.geometric_mean([now.speed for _, now in written]):.2f}x",
            f"{min(now.speed for _, now in written):.2f}x",
            f"{statistics.geometric_mean(ratios):.3f} ({min(ratios):.2f} to {max(ratios):.2f})",
            f"{statistics.geometric_mean([now.size for _, now in written]):.2f}",
            f"{sum(now.seconds for _, now in both):.0f}",
            sum(now.models for _, now in both),
            f"{sum(was.digest == now.digest for was, now in both)} of {len(both)}",
        ]
        yield f"| {' | '.join(map(str, cells))} |"
        for was, now in both:
            if now.refusal and not was.refusal:
                losses.append(f"- {now.model}, seed {now.seed}, {version}: {now.refusal}")
            elif now.sqnr < was.sqnr - LOSS_DB or now.speed < LOSS_SPEED * was.speed:
                figures = f"{was.sqnr:.1f} -> {now.sqnr:.1f} dB, {was.speed:.2f}x -> {now.speed:.2f}x"
                losses.append(f"- {now.model}, seed {now.seed}, {version}: {figures}")
    yield from ["", f"Runs that lost over {LOSS_DB:g} dB or {1 - LOSS_SPEED:.0%} of speed beside {base}:", "", *losses]


def main() -> None:
    if sys.argv[1:2] == ["quantize"]:
        model, data, seed, version, output = sys.argv[2:]
        print(json.dumps(asdict(quantized(Path(model), Path(data), int(seed), version, Path(output)))))
        return
    if sys.argv[1:2] == ["measure"]:
        model, data, outcomes, outputs = sys.argv[2:]
        known = [Outcome(**row) for row in json.loads(outcomes)]
        paths = {version: Path(path) for version, path in json.loads(outputs).items()}
        print(json.dumps([asdict(one) for one in measured(Path(model), Path(data), known, paths)]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("run")
    command.set_defaults(run=run)
    command.add_argument("scratch", type=Path)
    command.add_argument("--version", action="append", required=True, metavar="NAME=CHECKOUT")
    command.add_argument("--folder", nargs=2, type=Path, action="append", metavar=("MODELS", "DATA"))
    command.add_argument("--seeds", type=int, default=1)
    command.add_argument("--reruns", type=int, default=1)
    command.add_argument("--only", nargs="*", metavar="MODEL")
    command = commands.add_parser("table")
    command.set_defaults(run=table)
    command.add_argument("scratch", type=Path)
    command.add_argument("--base", default="base")
    command.add_argument("--save", type=Path)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    main()
