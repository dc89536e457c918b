"""One plan for several machines beside each machine's own: speed on the slowest, on average, and seconds of search.

    python benchmarks/fleet.py make DIR/*.onnx --data 'DIR/{}/calib' --into MADE
    python benchmarks/fleet.py time DIR/*.onnx --data 'DIR/{}/calib' --into MADE --seconds 6
    python benchmarks/fleet.py table --into MADE

``make`` quantizes each model for each machine alone, and once for all together, by the mean and by the worst case, and
notes the seconds of each command; what is there already is not made again. ``time`` times all of a model by turns with
the float model on each machine, which wants a machine that does nothing else. ``table`` prints what was found as
Markdown, and exits with 1 if a plan for all is slower than float somewhere, or took more than 1.5 times as long as
those for each machine together.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from onnxq.data.inputs import model_inputs
from onnxq.data.samples import evenly, open_samples
from onnxq.evaluation.latency import NOT_SLOWER, measure_latencies
from onnxq.ir import load
from onnxq.onnx_api import weightless_model
from onnxq.runtime.fleet import members_of, start_fleet

TARGETS = ("onnxruntime-cpu:threads=1", "onnxruntime-cpu:threads=2", "openvino")
FLEETS = {"mean": "all, by the mean", "worst": "all, by the worst"}
MOST, TIMED, ROUNDS, ENOUGH = 1.5, 4, 6, 16
Row = dict[str, Any]


def plans() -> Iterator[tuple[str, list[str]]]:
    """Yield the name of each plan and the options that make it."""
    for target in TARGETS:
        yield target, ["--target", target]
    every = [word for target in TARGETS for word in ("--target", target)]
    for prefer, name in FLEETS.items():
        yield name, [*every, "--prefer", prefer]


def make(model: Path, data: Path, into: Path) -> None:
    """Write each plan's model and what its command took."""
    notes = into / f"{model.stem}.made.json"
    made: Row = json.loads(notes.read_text()) if notes.exists() else {}
    for number, (name, options) in enumerate(plans()):
        if name in made:
            continue
        output = into / f"{model.stem}.{number}.onnx"
        command = [sys.executable, "-m", "onnxq", "quantize", str(model), "--calib", str(data), "-o", str(output)]
        start = time.monotonic()
        done = subprocess.run([*command, *options, "--json", "-q"], capture_output=True, text=True, check=False)
        made[name] = {"seconds": time.monotonic() - start, "file": output.name if done.returncode == 0 else ""}
        if done.returncode:
            made[name]["refused"] = done.stderr.strip().splitlines()[-1]
        notes.write_text(json.dumps(made, indent=1))
        print(f"{model.stem}: {name}: {made[name]['seconds']:.0f} s", flush=True)


def measure(model: Path, data: Path, into: Path, seconds: float) -> None:
    """Time all models of a network by turns on each machine."""
    made = json.loads((into / f"{model.stem}.made.json").read_text())
    files = {name: into / one["file"] for name, one in made.items() if one["file"]}
    samples = list(evenly(open_samples(data, model_inputs(weightless_model(load(model)))), TIMED))
    found: dict[str, Row] = {}
    with start_fleet(members_of(TARGETS)) as fleet:
        for target, engine in zip(TARGETS, fleet.engines, strict=True):
            engine.started()
            given = seconds * len(files)
            latencies = measure_latencies(
                [model, *files.values()], samples, seconds=given, rounds=ROUNDS, enough=ENOUGH, engine=engine
            )
            found[target] = {
                name: {"speed": one.speed, "interval": one.interval, "engine": one.engine, "float": one.reference}
                for name, one in zip(files, latencies, strict=True)
            }
    (into / f"{model.stem}.timed.json").write_text(json.dumps(found, indent=1))
    print(f"{model.stem}: timed", flush=True)


def table(into: Path) -> Iterator[str]:
    """Yield the lines of the table, and after it the faults."""
    faults = []
    yield f"| model | plan for | {' | '.join(TARGETS)} | slowest | mean | seconds |"
    yield f"|---|---|{'--:|' * (len(TARGETS) + 3)}"
    for path in sorted(into.glob("*.timed.json")):
        name = path.name.removesuffix(".timed.json")
        made, timed = json.loads((into / f"{name}.made.json").read_text()), json.loads(path.read_text())
        alone = sum(made[target]["seconds"] for target in TARGETS)
        for plan, one in made.items():
            if not one["file"]:
                yield f"| {name} | {plan} | refused: {one['refused']} |"
                continue
            speeds = [timed[target][plan]["speed"] for target in TARGETS]
            highs = [timed[target][plan]["interval"][1] for target in TARGETS]
            cells = " | ".join(f"{speed:.2f}" for speed in speeds)
            figures = f"{min(speeds):.2f} | {statistics.geometric_mean(speeds):.2f} | {one['seconds']:.0f}"
            yield f"| {name} | {plan} | {cells} | {figures} |"
            if plan in FLEETS.values():
                if min(highs) < NOT_SLOWER:
                    faults.append(f"{name}, {plan}: slower than float")
                if one["seconds"] > MOST * alone:
                    faults.append(f"{name}, {plan}: {one['seconds']:.0f} s, beside {alone:.0f} s for each alone")
    yield from (f"\n{fault}" for fault in faults)
    if faults:
        raise SystemExit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["make", "time", "table"])
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--data", help="samples; {} stands for the model's name")
    parser.add_argument("--into", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=6.0)
    given = parser.parse_args()
    if given.what == "table":
        for line in table(given.into):
            print(line)
        return
    given.into.mkdir(exist_ok=True)
    for model in given.models:
        data = Path(given.data.format(model.stem))
        if given.what == "make":
            make(model, data, given.into)
        else:
            measure(model, data, given.into, given.seconds)


if __name__ == "__main__":
    main()
