"""What each mechanism of the search, the accuracy methods and the judging is worth: each is switched off alone.

    python benchmarks/ablation.py run SCRATCH --folder MODELS DATA [--folder ...] [--seeds N] [--seconds S]
        [--only MODEL ...] [--settings SETTING ...] [--names MECHANISM ...]
    python benchmarks/ablation.py table SCRATCH [--save benchmarks/results/ablation]

Of the calibration samples every third is held out and chooses nothing; a seed says which third. Decibels are of these.
Each run is a process of its own. ``run`` ends after S seconds, and goes on where it stopped when it is called again.

All runs of a model and seed use the node times that its first run measured, so a mechanism alone makes the difference.
The row "nothing, measured again" shows how much runs differ that measure their own. Speeds are those of two models in
turns, beside the float model. A mechanism that the run with all of them never called is not run without.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from same_bytes import cases

PARTS = 3
TIMED_SAMPLES = 4
TIMED_SECONDS = 1.0
WORTH_DB, WORTH_SPEED = 1.0, 1.03
Patch = Callable[[Any], Any]
"""Maps what a module holds to what takes its place."""


def returning(value: Any) -> Patch:
    """Return a patch that makes a function return a value."""
    return lambda _: lambda *_, **__: value


def giving(place: int) -> Patch:
    """Return a patch that makes a function return the argument at a place."""
    return lambda _: lambda *arguments, **__: arguments[place]


def being(value: Any) -> Patch:
    """Return a patch that replaces a constant."""
    return lambda _: value


@dataclass(frozen=True)
class Setting:
    """Arguments of quantize() that mechanisms are switched off under."""

    search: str = "fast"
    accuracy: str = "fast"
    scheme: str = "int8"


SETTINGS: Mapping[str, Setting] = {
    "default": Setting(),
    "full accuracy": Setting("off", "full"),
    "4 bits": Setting("off", "full", "int4-block32"),
}


@dataclass(frozen=True)
class Mechanism:
    """How something is switched off.

    Attributes:
        patches: by "module:attribute".
        methods: accuracy methods that are left out.
        settings: names of SETTINGS.
        instead: the setting to run with, where that is the switch.
        within: the function that uses what is replaced, where that is a constant.
    """

    patches: Mapping[str, Patch] = field(default_factory=dict)
    methods: frozenset[str] = frozenset()
    settings: tuple[str, ...] = ("default",)
    instead: Setting | None = None
    within: str = ""

    @property
    def watched(self) -> frozenset[str]:
        """What a run calls where the mechanism has a part in it; empty if that is not known."""
        return frozenset([self.within] if self.within else [*self.methods, *self.patches])


FRONTIER, BOUNDS, SQNR = "onnxq.search.frontier", "onnxq.evaluation.bounds", "onnxq.evaluation.sqnr"
ACTIVATIONS, VALIDATION = "onnxq.search.activation_methods", "onnxq.search.cross_validation:CrossValidator"
SWEEP = f"{FRONTIER}:_Search._sweep_multiplier"
ALL_SETTINGS = tuple(SETTINGS)
NOTHING, AGAIN = "nothing", "nothing, measured again"


def _without(*methods: str, settings: tuple[str, ...] = ("default", "full accuracy")) -> Mechanism:
    return Mechanism(methods=frozenset(methods), settings=settings)


def _patched(target: str, patch: Patch, *settings: str, within: str = "") -> Mechanism:
    return Mechanism({target: patch}, settings=settings or ("default",), within=within)


def _first_plan(_: Any) -> Any:
    return lambda self, prices, noise: [self._measure(self._plan(prices, noise, 0.0, prices.best(noise, 0.0)))]


def _without_blocks(alternatives: Any) -> Any:
    return lambda target: (one for one in alternatives(target) if one.weight is None)


def _one_fold(_: Any) -> Any:
    from onnxq.algorithms.range_search import pooled

    def improves(self: Any, plan: Any, finding: Any, other: Any, worth: float = 0.977, **_: Any) -> bool:
        was, now = self._seen(plan, ((0, other), (0, finding)))
        return pooled(now) < worth * pooled(was)

    return improves


def _every_finding(_: Any) -> Any:
    return lambda self, plan, basis, findings, *_, **__: self.lowest_error(plan, findings)((0, 1, 2))


def _no_error(mean_error: Any) -> Any:
    return lambda *arguments: 0.0 * mean_error(*arguments)


def _measured_errors(_: Any) -> Any:
    def measured(self: Any) -> Any:
        return self.energies

    return property(measured)


MECHANISMS: Mapping[str, Mechanism] = {
    NOTHING: Mechanism(settings=ALL_SETTINGS),
    AGAIN: Mechanism(),
    # Whole searches
    "search": Mechanism(instead=Setting("off", "fast")),
    "search and accuracy methods": Mechanism(instead=Setting("off", "off")),
    # Accuracy methods
    "bias correction": _patched("onnxq.algorithms.encode:mean_error", _no_error, "default", "full accuracy"),
    "range search": _without("ranges"),
    "equalization": _without("equalization"),
    "AWQ": _without("awq", settings=("4 bits",)),
    "GPTQ": _without("gptq", settings=("4 bits", "full accuracy")),
    "finer embeddings": _without("embeddings", settings=("4 bits",)),
    "saturation limits": _patched(f"{ACTIVATIONS}:saturation_limits", returning({}), "default", "full accuracy"),
    "ranges by tensor": _patched(f"{ACTIVATIONS}:ranges_by_tensor", returning({}), "full accuracy"),
    "held-out samples for ranges": _patched(f"{ACTIVATIONS}:_holds", returning(True), "default", "full accuracy"),
    "equalization by group": _patched(f"{ACTIVATIONS}:_finer", giving(1), "full accuracy"),
    "free scales, else all": _patched("onnxq.search.context:drop_costly_scales", giving(2), within="equalization"),
    "second fold": _patched(f"{VALIDATION}.improves", _one_fold, *ALL_SETTINGS),
    "cross-validation": _patched(f"{VALIDATION}.kept", _every_finding, *ALL_SETTINGS),
    # The search for the fastest plan
    "multiplier sweep": _patched(SWEEP, _first_plan),
    "greedy add-back": _patched(f"{FRONTIER}:_Search._greedy_add_back", giving(3)),
    "plan of the scheme beside others": _patched(f"{FRONTIER}:_Search._simplest", giving(1)),
    "finer weights": _patched(f"{FRONTIER}:WeightPrecisionSearch.are_needed", returning(False)),
    "dynamic and block kernels": _patched("onnxq.search.profiling:alternatives", returning(())),
    "block kernels": _patched("onnxq.search.profiling:alternatives", _without_blocks),
    "another search after a miss": _patched("onnxq.search.attempts:_REPEATED_SEARCHES", being(0)),
    "promise of both sets": _patched("onnxq.search.attempts:_Attempts._lacking_promise", returning(0.0)),
    "4 dB without a holdout set": _patched("onnxq.search.context:NO_HOLDOUT_MARGIN_DB", being(0.0)),
    # The bound and the warnings
    "bound: unseen sample": _patched(f"{BOUNDS}:_UNSEEN_OF_FEW", being(0.0)),
    "bound: tail": _patched(f"{BOUNDS}:_TAIL", being(0.0)),
    "bound: spread of parts": _patched(f"{SQNR}:spread_of_parts", returning(None)),
    "bound: unseen answer": _patched(f"{SQNR}:unseen_noise", returning(0.0)),
    "bound: errors of either sign": _patched(f"{SQNR}:ErrorAccumulator._expected", _measured_errors),
    "interval of the fastest of several": _patched("onnxq.search.context:selection_adjusted_interval", returning(None)),
    "input units": _patched("onnxq.pipeline.calibrate:warn_input_units", returning(())),
    "mask values": _patched("onnxq.pipeline.calibrate:warn_mask_values", returning(())),
}


class Piece(NamedTuple):
    """One run."""

    model: str
    setting: str
    mechanism: str
    seed: int


@dataclass(frozen=True)
class Outcome:
    """What a run came to.

    Attributes:
        sqnr: in decibels on the samples that were held out.
        speed: beside float.
        relative: speed beside the model of the run with all mechanisms.
        called: functions that the run called, of those that some mechanism replaces, and accuracy methods it tried.
    """

    piece: Piece
    sqnr: float = math.nan
    speed: float = math.nan
    relative: float = 1.0
    seconds: float = math.nan
    models: int = 0
    digest: str = ""
    called: tuple[str, ...] = ()
    failure: str = ""


# One run, in a process of its own


def _holder(target: str) -> tuple[Any, str]:
    module, path = target.split(":")
    found: Any = importlib.import_module(module)
    *within, name = path.split(".")
    for one in within:
        found = getattr(found, one)
    return found, name


def _watched(target: str, called: set[str]) -> Patch:
    def watch(function: Any) -> Any:
        def watched(*arguments: Any, **options: Any) -> Any:
            called.add(target)
            return function(*arguments, **options)

        return watched

    return watch


def _patch(patches: Mapping[str, Patch]) -> None:
    for target, patch in patches.items():
        holder, name = _holder(target)
        setattr(holder, name, patch(getattr(holder, name)))


def run_piece(piece: Piece, model: Path, data: Path, scratch: Path, folder: Path) -> Outcome:
    """Quantize on two thirds of the samples, and judge on the others.

    Args:
        piece: what to run.
        model: file of the float model.
        data: its samples.
        scratch: keeps node times and the models of runs with all mechanisms.
        folder: for files of this run alone.
    """
    import onnxq
    from onnxq.calibration.data import samples_of
    from onnxq.config.effort import accuracy_named
    from onnxq.data.samples import evenly
    from onnxq.evaluation.agreement import compare_files
    from onnxq.evaluation.latency import measure_latencies

    mechanism, called = MECHANISMS[piece.mechanism], set[str]()
    setting = mechanism.instead or SETTINGS[piece.setting]
    if piece.mechanism == NOTHING:
        targets = {target for one in MECHANISMS.values() for target in one.watched if ":" in target}
        _patch({target: _watched(target, called) for target in targets if callable(getattr(*_holder(target)))})
    else:
        _patch(mechanism.patches)
    samples = list(samples_of(model, data))
    held = [sample for index, sample in enumerate(samples) if index % PARTS == piece.seed % PARTS]
    rest = [sample for index, sample in enumerate(samples) if index % PARTS != piece.seed % PARTS]
    stem = f"{piece.model}.{piece.setting}.{piece.seed}"
    times, basis = scratch / f"{piece.model}.{piece.seed}.times", scratch / f"{stem}.onnx"
    own = folder / "own.times"
    if times.exists() and piece.mechanism != AGAIN:
        shutil.copyfile(times, own)
    accuracy = accuracy_named(setting.accuracy)
    left = tuple(one for one in accuracy.methods if one not in mechanism.methods)
    budget = onnxq.Budget(setting.search, replace(accuracy, methods=left), profile_cache=own)
    output = basis if piece.mechanism == NOTHING else folder / "other.onnx"
    start = time.perf_counter()
    found = onnxq.quantize(
        model, rest, output, scheme=setting.scheme, goal=onnxq.Goal(force=True), budget=budget
    ).report
    seconds = time.perf_counter() - start
    if not times.exists() and own.exists():
        shutil.copyfile(own, times)
    called.update(gain.method for gain in found.encoding.gains)
    digest, agreement = _digest(output), compare_files(model, output, held)
    models = [basis] if output is basis or _digest(basis) == digest else [basis, output]
    if output is not basis and len(models) == 1 and setting == SETTINGS[piece.setting]:
        # The same model as with all mechanisms is as fast.
        speeds = [math.nan]
    else:
        timed = measure_latencies([model, *models], list(evenly(rest, TIMED_SAMPLES)), seconds=TIMED_SECONDS)
        speeds = [one.speed for one in timed]
    return Outcome(
        piece,
        agreement.worst_sqnr,
        speeds[-1],
        speeds[-1] / speeds[0] if len(speeds) > 1 else 1.0,
        seconds,
        found.search.measured,
        digest,
        tuple(sorted(called)),
    )


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.exists() else ""


# All runs


def pieces(models: Sequence[str], seeds: int, names: Sequence[str]) -> Iterator[Piece]:
    """Yield all runs; those with all mechanisms come first."""
    for seed in range(seeds):
        for setting in SETTINGS:
            for name, mechanism in MECHANISMS.items():
                if setting in mechanism.settings and (not names or name in names):
                    yield from (Piece(model, setting, name, seed) for model in models)


def read(scratch: Path) -> dict[Piece, Outcome]:
    """Return the outcomes so far."""
    kept = scratch / "outcomes.jsonl"
    lines = kept.read_text().splitlines() if kept.exists() else []
    found = (Outcome(**{**row, "piece": Piece(*row["piece"])}) for row in map(json.loads, lines))
    return {one.piece: one for one in found}


def is_idle(piece: Piece, known: Mapping[Piece, Outcome]) -> bool:
    """Return whether the run with all mechanisms never called what this one leaves out."""
    watched, whole = MECHANISMS[piece.mechanism].watched, known.get(piece._replace(mechanism=NOTHING))
    if whole is None or whole.failure:
        return whole is not None
    return bool(watched) and watched.isdisjoint(whole.called) and all(map(_is_called, watched))


def _is_called(target: str) -> bool:
    return ":" not in target or callable(getattr(*_holder(target)))


def run(options: argparse.Namespace) -> None:
    """Run what has no outcome yet, until the time is up."""
    options.scratch.mkdir(parents=True, exist_ok=True)
    found = {path.stem: (path, data) for one in options.folder or [(None, None)] for path, data in cases(*one)}
    if options.only:
        found = {name: one for name, one in found.items() if name in options.only}
    until = time.monotonic() + options.seconds
    known = read(options.scratch)
    left = 0
    for piece in pieces(list(found), options.seeds, options.names):
        if options.settings and piece.setting not in options.settings:
            continue
        known |= read(options.scratch)
        if piece in known or is_idle(piece, known):
            continue
        waits = piece.mechanism != NOTHING and piece._replace(mechanism=NOTHING) not in known
        if waits or time.monotonic() > until:
            left += 1
            continue
        command = [sys.executable, __file__, "piece", str(options.scratch), *map(str, (*found[piece.model], *piece))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or [f"exit {done.returncode}"]
        row = json.loads(lines[-1]) if not done.returncode else asdict(Outcome(piece, failure=done.stderr[-300:]))
        known[piece] = Outcome(**{**row, "piece": piece})
        with (options.scratch / "outcomes.jsonl").open("a") as kept:
            kept.write(json.dumps(asdict(known[piece])) + "\n")
        one = known[piece]
        print(
            f"{'/'.join(map(str, piece))}: {one.sqnr:.1f} dB, {one.speed:.2f}x, {one.relative:.3f}, {one.seconds:.1f} s"
            + f" {one.failure}",
            flush=True,
        )
    print(f"{left} runs are left")


# The table


@dataclass(frozen=True)
class Row:
    """What a mechanism is worth: the run with all mechanisms beside the one without it.

    Attributes:
        runs: models times seeds that ran without it.
        idle: those that did not, because the run with all mechanisms never called it.
        same: of the runs, those that wrote the same bytes without it.
        decibels: that it adds, for each run.
        speeds: how many times as fast the model is with it, for each run.
        seconds: how many times as long it takes to quantize with it, for each run.
        worth: models where the median over seeds is over 1 dB or 3 %.
        costs: models where it is as much worse.
    """

    mechanism: str
    setting: str
    seeds: int
    runs: int
    idle: int
    same: int
    decibels: list[float]
    speeds: list[float]
    seconds: list[float]
    worth: list[str]
    costs: list[str]


def _gain(one: Outcome, other: Outcome) -> float:
    """Return the decibels that a mechanism adds; 0 between outputs that are both exact."""
    return one.sqnr - other.sqnr if one.sqnr != other.sqnr else 0.0


def rows(known: Mapping[Piece, Outcome]) -> Iterator[Row]:
    """Yield a row for each mechanism and setting."""
    for name, mechanism in MECHANISMS.items():
        for setting in mechanism.settings if name != NOTHING else ():
            whole = [one for piece, one in known.items() if piece[1:3] == (setting, NOTHING) and not one.failure]
            pairs = [(one, known.get(one.piece._replace(mechanism=name))) for one in whole]
            done = [(one, other) for one, other in pairs if other is not None and not other.failure]
            if not done:
                continue
            idle = sum(is_idle(one.piece._replace(mechanism=name), known) for one, other in pairs if other is None)
            by_model: dict[str, list[tuple[Outcome, Outcome]]] = {}
            for one, other in done:
                by_model.setdefault(one.piece.model, []).append((one, other))
            worth, costs = [], []
            for model, both in by_model.items():
                decibels = statistics.median(_gain(one, other) for one, other in both)
                speed = statistics.median(1 / other.relative for _, other in both)
                entry = f"{model} {decibels:+.1f} dB {speed:.2f}x"
                worth += [entry] if decibels > WORTH_DB or speed > WORTH_SPEED else []
                costs += [entry] if decibels < -WORTH_DB or speed < 1 / WORTH_SPEED else []
            yield Row(
                name,
                setting,
                len({one.piece.seed for one, _ in done}),
                len(done),
                idle,
                sum(one.digest == other.digest for one, other in done),
                [_gain(one, other) for one, other in done],
                [1 / other.relative for _, other in done],
                [one.seconds / other.seconds for one, other in done],
                worth,
                costs,
            )


def table(options: argparse.Namespace) -> None:
    """Print the table, and save it."""
    found = list(rows(read(options.scratch)))
    heads = [
        "switched off",
        "setting",
        "seeds",
        "runs",
        "idle",
        "same bytes",
        "dB that it adds",
        "times as fast with it",
    ]
    heads += ["seconds with it", "models where it is worth over 1 dB or 3 %", "models where it costs as much"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    lines += map(_line, found)
    print("\n".join(lines))
    if options.save:
        options.save.with_suffix(".md").write_text("\n".join(lines) + "\n")
        options.save.with_suffix(".json").write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")


def _line(one: Row) -> str:
    cells = [
        one.mechanism,
        one.setting,
        str(one.seeds),
        str(one.runs),
        str(one.idle),
        str(one.same),
        _spread(one.decibels, "+.1f"),
        _spread(one.speeds, ".2f"),
        _spread(one.seconds, ".2f"),
        f"{len(one.worth)}: {'; '.join(one.worth)}",
        f"{len(one.costs)}: {'; '.join(one.costs)}",
    ]
    return "| " + " | ".join(cells) + " |"


def _spread(values: Sequence[float], form: str) -> str:
    """Return the median, and the lowest and highest."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("run")
    one.set_defaults(run=run)
    one.add_argument("scratch", type=Path)
    one.add_argument("--folder", nargs=2, type=Path, action="append", metavar=("MODELS", "DATA"))
    one.add_argument("--seeds", type=int, default=1)
    one.add_argument("--seconds", type=float, default=math.inf)
    one.add_argument("--only", nargs="*", help="models")
    one.add_argument("--settings", nargs="*")
    one.add_argument("--names", nargs="*", default=(), help="mechanisms")
    one = commands.add_parser("table")
    one.set_defaults(run=table)
    one.add_argument("scratch", type=Path)
    one.add_argument("--save", type=Path)
    if sys.argv[1:2] == ["piece"]:
        scratch, model, data, name, setting, mechanism, seed = sys.argv[2:]
        with TemporaryDirectory() as folder:
            paths = Path(model), Path(data), Path(scratch), Path(folder)
            print(json.dumps(asdict(run_piece(Piece(name, setting, mechanism, int(seed)), *paths))))
        return
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    main()
