"""What models that were quantized for a runtime do there: whether they load, their decibels, their speed beside float.

    python benchmarks/engines.py presets models/gru.onnx models/vit.onnx --data models/data/test.npz --target openvino

Each preset of each model is written as the scheme says, without a search, for the target; then onnxruntime and the
target's engine run it on the same samples. A disagreement is silent where the engine loads the model, and its answers
are more than 3 dB further from the float model than onnxruntime's. Exits with 1 if there is any.

    python benchmarks/engines.py make DIR/*.onnx --data 'DIR/{}/calib' --eval 'DIR/{}/eval' --into MADE
    python benchmarks/engines.py time DIR/*.onnx --data 'DIR/{}/calib' --into MADE --seconds 6
    python benchmarks/engines.py table --into MADE

``make`` quantizes each model for --target by default, searched on its engine, and once for onnxruntime-cpu, searched
on that, with the seconds of both commands, and has the engine run both on samples of --eval; what is there already is
not made again. ``time`` times all of a model by turns with the float model, which wants a machine that does nothing
else; where it stays open whether the model that is meant for the engine is slower than float, all are loaded anew and
timed again, up to 30 rounds. Other tools' models of the same networks take part with ``--beside NAME=PATTERN``.
``table`` prints what was found as Markdown, and exits with 1 if a model does not load, or is slower than float, on the
engine that it is meant for.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
from processes import keep_bytecode

from onnxq import PRESETS, Budget, Data, Goal, quantize
from onnxq.data.inputs import Sample, model_inputs
from onnxq.data.samples import evenly, open_samples
from onnxq.errors import OnnxqError
from onnxq.evaluation.agreement import agreement_of
from onnxq.evaluation.latency import Latency, measure_latencies
from onnxq.runtime.engine import Engine
from onnxq.runtime.engines import open_engine
from onnxq.runtime.targets import DEFAULT_TARGET

ENGINES = {"openvino": "openvino-f32", "onnxruntime-node": "onnxruntime-node", "onnxruntime-web": "onnxruntime-web"}
ALLOWED, AGREEING = 3.0, 50.0
SLOWEST = 0.97
COMPARED, TIMED = 24, 4
FEWEST_RUNS, LONGEST = 90, 30.0
MOST_ROUNDS = 30
PLAIN = Budget(search="off", accuracy="off", latency_seconds=0.0)
Row = dict[str, Any]
_ONNXQ = (sys.executable, "-m", "onnxq", "quantize")


def presets(model: Path, data: Path, target: str, engine: str) -> Iterator[Row]:
    """Yield what became of each preset."""
    for preset in PRESETS:
        row: Row = {"model": model.stem, "preset": preset}
        budget, given = replace(PLAIN, engine=engine), Data(data, limit=16)
        try:
            done = quantize(model, given, scheme=preset, target=target, goal=Goal(force=True), budget=budget)
        except OnnxqError as error:
            yield {**row, "refused": str(error)}
            continue
        found = done.report.accuracy
        here, there = found.agreement.worst_sqnr, found.on_engines[0].agreement.worst_sqnr
        silent = not there >= min(here - ALLOWED, AGREEING)
        yield {**row, "here": round(here, 1), "there": round(there, 1), "silent": silent}


def make(
    model: Path, data: Path, holdout: Path, into: Path, target: str, engine: str, beside: Mapping[str, str]
) -> Row:
    """Quantize a model for a target and for onnxruntime-cpu, and run both on the target's engine."""
    made: Row = {}
    for planned, measured in ((target, engine), (DEFAULT_TARGET, "onnxruntime")):
        path, start = into / planned / model.name, time.perf_counter()
        path.parent.mkdir(parents=True, exist_ok=True)
        made[planned] = {"file": str(path)}
        if not path.exists():
            given = ("--calib", data, "--output", path, "--target", planned, "--engine", measured, "--quiet")
            done = subprocess.run([*_ONNXQ, model, *given], check=False, capture_output=True, text=True)
            made[planned]["seconds"] = round(time.perf_counter() - start, 2)
            if done.returncode:
                made[planned]["refused"] = " ".join(done.stderr.split())
    made.update({name: {"file": pattern.format(model.stem)} for name, pattern in beside.items()})
    with open_engine(engine) as there, open_engine("onnxruntime") as here:
        for one in made.values():
            if Path(one["file"]).exists():
                one.update(accuracy(here, there, model, Path(one["file"]), samples_of(model, holdout, COMPARED)))
        return {"model": model.stem, "engine": there.version, "load": round(os.getloadavg()[0], 1), "made": made}


def accuracy(here: Engine, there: Engine, reference: Path, candidate: Path, samples: list[Sample]) -> Row:
    """Return how far the answers of an engine are from those of the float model on onnxruntime."""
    try:
        known, loaded = here.load(reference), there.load(candidate)
        found = agreement_of(known.outputs, ((known.run(one), loaded.run(one)) for one in samples))
        loaded.close()
    except OnnxqError as error:
        return {"fault": str(error)}
    return {"sqnr": round(found.worst_sqnr, 1) if found.sound and math.isfinite(found.worst_sqnr) else None}


def timed(model: Path, data: Path, row: Row, engine: str, seconds: float) -> Row:
    """Return a row with the speed of each model beside float."""
    made = {name: one for name, one in row["made"].items() if "sqnr" in one}
    with open_engine(engine) as there:
        try:
            files = [model, *(Path(one["file"]) for one in made.values())]
            samples = samples_of(model, data, TIMED)
            found = measure_latencies(files, samples, seconds=seconds, engine=there)
            if found and found[0].runs < FEWEST_RUNS:
                # Few runs of a long model tell less than its own copy differs from it.
                longer = min(seconds * FEWEST_RUNS / found[0].runs, LONGEST)
                found = measure_latencies(files, samples, seconds=longer, engine=there)
            # Where weights come to lie decides by a few percent, as long as a model is loaded.
            while found and is_open(found[0]) and found[0].rounds < MOST_ROUNDS:
                more = measure_latencies(files, samples, seconds=seconds, engine=there)
                found = [one.together(other) for one, other in zip(found, more, strict=True)]
        except OnnxqError as error:
            return {**row, "fault": str(error)}
    for one, latency in zip(made.values(), found, strict=True):
        one.update(speed=round(latency.speed, 2), interval=[round(end, 2) for end in latency.interval])
    milliseconds = round(found[0].reference * 1e3, 3) if found else None
    return {**row, "milliseconds": milliseconds, "timed_at_load": round(os.getloadavg()[0], 1)}


def is_open(latency: Latency) -> bool:
    """Whether a speed may be on either side of what counts as slower than float."""
    low, high = latency.interval
    return low < SLOWEST < high


def samples_of(model: Path, data: Path, most: int) -> list[Sample]:
    """Return samples from all over."""
    inputs = model_inputs(onnx.load(model, load_external_data=False))
    return list(evenly(open_samples(data, inputs), most))


def table(into: Path) -> Iterator[str]:
    """Yield the lines of what was found, a table for each target."""
    for target in ENGINES:
        rows = [json.loads(file.read_text()) for file in sorted((into / target).glob("*.json"))]
        if not rows:
            continue
        names = list(dict.fromkeys(name for row in rows for name in row["made"]))
        yield f"\n## {target}: {rows[0]['engine']}\n"
        yield f"| model | float | {' | '.join(f'{name} dB | speed' for name in names)} |"
        yield f"|---|--:|{'--:|--:|' * len(names)}"
        for row in rows:
            cells = [_cell(row["made"].get(name, {})) for name in names]
            yield f"| {row['model']} | {row.get('milliseconds', '-')} ms | {' | '.join(cells)} |"
        means = [_mean(rows, name) for name in names]
        yield f"| geometric mean | | {' | '.join(f'{sqnr} | {speed}' for sqnr, speed in means)} |"


def _cell(one: Row) -> str:
    if "sqnr" not in one:
        return f"{'refused' if 'refused' in one else 'does not load' if 'fault' in one else '-'} | -"
    interval = "-".join(f"{end:.2f}" for end in one["interval"]) if "interval" in one else ""
    return f"{one['sqnr']} | {one['speed']:.2f} ({interval})" if interval else f"{one['sqnr']} | -"


def _mean(rows: list[Row], name: str) -> tuple[str, str]:
    """Return the mean decibels and the geometric mean speed of the models of one tool that all tools have."""
    common = [row["made"] for row in rows if all("speed" in one for one in row["made"].values())]
    if not common:
        return "-", "-"
    decibels = statistics.fmean(made[name]["sqnr"] for made in common if made[name]["sqnr"] is not None)
    return f"{decibels:.1f}", f"{statistics.geometric_mean(made[name]['speed'] for made in common):.2f}"


def faults(into: Path) -> Iterator[str]:
    """Yield what is wrong with models on the engines that they are meant for."""
    for target in ENGINES:
        for file in sorted((into / target).glob("*.json")):
            row = json.loads(file.read_text())
            own = row["made"][target]
            if "fault" in own:
                yield f"{target} {row['model']}: {own['fault']}"
            elif own.get("speed", 1.0) < SLOWEST:
                yield f"{target} {row['model']}: {own['speed']:.2f} times as fast as float"


def main() -> None:
    """Print one line for each model or preset, or the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("presets", "make", "time", "table"))
    parser.add_argument("models", type=Path, nargs="*")
    parser.add_argument("--data", help="a folder or file, or with {} for the model's name")
    parser.add_argument("--eval", help="samples to judge by, as --data")
    parser.add_argument("--target", default="openvino", choices=tuple(ENGINES))
    parser.add_argument("--engine", help="such as onnxruntime-web:FOLDER")
    parser.add_argument("--into", type=Path, help="folder of models and figures")
    parser.add_argument("--beside", action="append", default=[], metavar="NAME=PATTERN")
    parser.add_argument("--seconds", type=float, default=6.0)
    given = parser.parse_args()
    engine, silent = given.engine or ENGINES[given.target], 0
    if given.what == "table":
        print(*table(given.into), "", *(wrong := list(faults(given.into))), sep="\n")
        sys.exit(int(bool(wrong)))
    if given.what == "make":
        keep_bytecode(given.into, "onnxq.search.search")
    for model in given.models:
        data = Path(given.data.format(model.stem))
        if given.what == "presets":
            for row in presets(model, data, given.target, engine):
                silent += bool(row.get("silent"))
                print(json.dumps(row), flush=True)
            continue
        kept = given.into / given.target / f"{model.stem}.json"
        if given.what == "time":
            row = timed(model, data, json.loads(kept.read_text()), engine, given.seconds)
        else:
            holdout = Path((given.eval or given.data).format(model.stem))
            beside = dict(one.split("=", 1) for one in given.beside)
            row = make(model, data, holdout, given.into, given.target, engine, beside)
        kept.write_text(json.dumps(row, indent=1))
        print(json.dumps(row), flush=True)
    if given.what == "presets":
        print(f"{silent} silent disagreements")
    sys.exit(int(silent > 0))


if __name__ == "__main__":
    main()
