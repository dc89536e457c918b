"""Whether models quantized for a runtime load there and compute what they compute on onnxruntime.

    python benchmarks/engines.py models/resnet.onnx models/gru.onnx --data models/data/test.npz --target openvino

Each preset of each model is written as the scheme says, without a search, for the target; then onnxruntime and the
target's engine run it. A disagreement is silent where the engine loads the model, its answers are more than 3 dB
further from the float model than onnxruntime's, and `quantize` would have written it. Exits with 1 if there is any.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from onnxq import PRESETS, Budget, Data, Goal, quantize
from onnxq.engines.table import open_engine
from onnxq.errors import OnnxqError
from onnxq.judging.portability import AGREEING, portability

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


def main() -> None:
    """Print one line for each model and preset."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--data", type=Path, required=True, help="a folder or file, or with {} for the model's name")
    parser.add_argument("--target", default="openvino")
    parser.add_argument("--engine", default="openvino-f32")
    parser.add_argument("--seconds", type=float, default=0.0, help="for the speed beside float; 0 leaves it out")
    given = parser.parse_args()
    silent = 0
    for model in given.models:
        data = Path(str(given.data).format(model.stem))
        for row in rows(model, data, given.target, given.engine, given.seconds):
            silent += bool(row.get("silent"))
            print(json.dumps(row), flush=True)
    print(f"{silent} silent disagreements")
    sys.exit(int(silent > 0))


if __name__ == "__main__":
    main()
