"""Whether models quantized for a runtime load there and compute what they compute on onnxruntime.

    python benchmarks/engines.py models/resnet.onnx models/gru.onnx --data models/data/test.npz --target openvino

Each preset of each model is written as the scheme says, without a search, for the target; then onnxruntime and the
target's engine run it. A disagreement is silent where the engine loads the model, its answers are more than 3 dB
further from the float model than onnxruntime's, and `quantize` would have written it. Exits with 1 if there is any.

    python benchmarks/engines.py DIR/*.onnx --data 'DIR/{}/calib' --eval 'DIR/{}/eval' --target openvino --defaults

With --defaults each model is quantized for the target by default, searched on its engine, and once more for
onnxruntime-cpu, searched on that; the engine then runs both on samples of --eval: whether they load, their decibels
there, and how fast they are beside the float model there. Exits with 1 if what is meant for the target is slower.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from onnxq import PRESETS, Budget, Data, Goal, quantize
from onnxq.engines.table import open_engine
from onnxq.errors import OnnxqError
from onnxq.judging.portability import AGREEING, portability
from onnxq.targets import DEFAULT_TARGET

_ALLOWED = 3.0
_PLAIN = Budget(search="off", accuracy="off", latency=0.0, engine="onnxruntime")


def rows(model: Path, data: Path, target: str, engine: str, seconds: float) -> Iterator[dict[str, object]]:
    """Yield what became of each preset."""
    for preset in PRESETS:
        row: dict[str, object] = {"model": model.stem, "preset": preset}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            try:
                done = quantize(
                    model,
                    Data(data, limit=16),
                    path,
                    scheme=preset,
                    target=target,
                    goal=Goal(force=True),
                    budget=_PLAIN,
                )
                [port] = portability(path, [open_engine(engine)], data, reference=model, seconds=seconds, limit=8)
            except OnnxqError as error:
                yield {**row, "refused": str(error)}
                continue
            row |= {"fault": port.fault, "difference": port.difference}
            if port.fidelity is not None and port.agreement is not None:
                own, there = done.report.agreement.worst_sqnr, port.fidelity.worst_sqnr
                row |= {"here": round(own, 1), "there": round(there, 1), "beside": round(port.agreement.worst_sqnr, 1)}
                row["silent"] = there < min(own - _ALLOWED, AGREEING)
            if port.latency is not None:
                row["speed"] = round(port.latency.speed, 2)
        yield row


def defaults(model: Path, data: Path, judging: Path, target: str, engine: str, seconds: float) -> dict[str, object]:
    """Return what the defaults make of a model for a target and for onnxruntime-cpu, as the target's engine sees it."""
    row: dict[str, object] = {"model": model.stem, "engine": engine, "load": round(os.getloadavg()[0], 1)}
    for planned, measured in ((target, engine), (DEFAULT_TARGET, "onnxruntime")):
        with tempfile.TemporaryDirectory() as folder:
            path, start = Path(folder) / "model.onnx", time.perf_counter()
            try:
                quantize(model, Data(data), path, target=planned, budget=Budget(engine=measured))
                took = time.perf_counter() - start
                [port] = portability(path, [open_engine(engine)], judging, reference=model, seconds=seconds)
            except OnnxqError as error:
                row[planned] = {"refused": str(error)}
                continue
        found: dict[str, object] = {"seconds": round(took, 1), "fault": port.fault}
        if port.fidelity is not None:
            found["sqnr"] = round(port.fidelity.worst_sqnr, 1)
        if port.latency is not None:
            found |= {"speed": round(port.latency.speed, 2), "slower": port.latency.slower}
        row[planned] = found
    return row


def main() -> None:
    """Print one line for each model and preset, or for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--data", type=Path, required=True, help="a folder or file, or with {} for the model's name")
    parser.add_argument("--target", default="openvino")
    parser.add_argument("--engine", default="openvino-f32")
    parser.add_argument("--seconds", type=float, default=0.0, help="for the speed beside float; 0 leaves it out")
    parser.add_argument("--defaults", action="store_true", help="what the defaults make, searched on the engine")
    parser.add_argument("--eval", type=Path, help="samples that --defaults judges by, as --data")
    given = parser.parse_args()
    silent = slower = 0
    for model in given.models:
        data = Path(str(given.data).format(model.stem))
        if given.defaults:
            judging = Path(str(given.eval or given.data).format(model.stem))
            row = defaults(model, data, judging, given.target, given.engine, given.seconds or 5.0)
            made = row[given.target]
            slower += isinstance(made, dict) and bool(made.get("slower") or made.get("fault"))
            print(json.dumps(row), flush=True)
            continue
        for row in rows(model, data, given.target, given.engine, given.seconds):
            silent += bool(row.get("silent"))
            print(json.dumps(row), flush=True)
    print(f"{slower} slower than float" if given.defaults else f"{silent} silent disagreements")
    sys.exit(int(silent + slower > 0))


if __name__ == "__main__":
    main()
