"""Damage real models, quantize what comes out, and count how that ends.

    python benchmarks/mutations.py MODEL=SAMPLES... [--count N] [--seed S] [--keep DIR] [--output FILE]

Ends are those of the command line: 0 quantized, 2 refused in a sentence, 3 unfaithful, and 1 a fault, of which there
should be none. Crashes in native code, which the command line turns into 2, and hangs are counted apart. `quantize`
runs without search and timing on one sample, in processes that take a batch each and are replaced when they die. The
same seed gives the same damage (see damages.py). What ends badly is kept.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from damages import damaged  # type: ignore[import-not-found, unused-ignore]

BATCH = 50
SECONDS = 120
FAULT, REFUSED, UNFAITHFUL = 1, 2, 3
KINDS = {
    0: "quantized (0)",
    FAULT: "fault (1)",
    REFUSED: "refused (2)",
    UNFAITHFUL: "unfaithful (3)",
    "native": "native crash",
    "hang": "hang",
}


def main() -> None:
    if sys.argv[1:2] == ["quantize"]:
        quantize_each(Path(sys.argv[2]), [Path(name) for name in sys.argv[3:]])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL=SAMPLES", help="a model and a file or folder of samples")
    parser.add_argument("--count", type=int, default=100, help="mutations of each model")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="folder for what ends in a fault")
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    options = parser.parse_args()
    figures: dict[str, Any] = {"seed": options.seed, "count": options.count, "models": {}, "faults": []}
    total: Counter[str] = Counter()
    for pair in options.models:
        model, samples = map(Path, pair.split("=", 1))
        start = time.perf_counter()
        counts, faults = damage(model, samples, options.count, options.seed, options.keep)
        figures["models"][model.stem] = dict(counts)
        figures["faults"] += faults
        total += counts
        print(f"{model.stem}: {dict(counts)}, {time.perf_counter() - start:.0f} s", flush=True)
        if options.output is not None:
            options.output.write_text(json.dumps(figures, indent=2) + "\n")
    print(f"{total.total()} mutations: {dict(total)}")


def damage(
    model: Path, samples: Path, count: int, seed: int, keep: Path | None
) -> tuple[Counter[str], list[dict[str, str]]]:
    """Quantize damaged copies of a model and return how many end in which way, and what the bad ends say."""
    counts: Counter[str] = Counter()
    faults: list[dict[str, str]] = []
    with tempfile.TemporaryDirectory(prefix="onnxq-mutations-") as temporary:
        folder = Path(temporary)
        whole = model.read_bytes()
        for first in range(0, count, BATCH):
            batch = [(folder / f"{index}.onnx", index) for index in range(first, min(count, first + BATCH))]
            damages = {}
            for path, index in batch:
                damages[str(path)], data = damaged(whole, random.Random(f"{model.stem} {seed} {index}"), index)
                path.write_bytes(data)
            for file, (code, text) in run_batch(samples, list(damages)).items():
                counts[KINDS[code]] += 1
                if code in (FAULT, "native", "hang"):
                    kept = f"{model.stem}-{seed}-{Path(file).name}"
                    faults.append({"file": kept, "damage": damages[file], "end": KINDS[code], "text": text})
                    print(f"{kept}, {damages[file]}: {KINDS[code]}\n{text}", flush=True)
                    if keep is not None:
                        keep.mkdir(parents=True, exist_ok=True)
                        (keep / kept).write_bytes(Path(file).read_bytes())
            for path, _ in batch:
                path.unlink()
    return counts, faults


def run_batch(samples: Path, waiting: list[str]) -> dict[str, tuple[Any, str]]:
    """Return for each file the exit code, or ``native`` or ``hang``, and what was said."""
    ends: dict[str, tuple[Any, str]] = {}
    while waiting:
        command = [sys.executable, __file__, "quantize", str(samples), *waiting]
        done = subprocess.run(command, capture_output=True, text=True, check=False, errors="replace")
        events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]
        ends |= {event["ends"]: (event["code"], event["text"]) for event in events if "ends" in event}
        if done.returncode:
            started = [event["starts"] for event in events if "starts" in event]
            if not started:
                sys.exit(done.stderr)
            ends[started[-1]] = ("hang" if "Timeout" in done.stderr else "native", done.stderr[-2000:])
        waiting = [path for path in waiting if path not in ends]
    return ends


# --- in a process of its own --------------------------------------------------------------------------------------


def quantize_each(samples: Path, paths: list[Path]) -> None:
    """Quantize models, and print one JSON line before and after each."""
    from onnxq import Budget, Data, quantize
    from onnxq.errors import OnnxqError
    from onnxq.report import AccuracyError

    for path in paths:
        print(json.dumps({"starts": str(path)}), flush=True)
        code, text = 0, ""
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        try:
            quantize(
                path,
                Data(samples, limit=1),
                path.with_suffix(".int8.onnx"),
                budget=Budget(search="off", latency_seconds=0),
            )
        except AccuracyError as error:
            code, text = UNFAITHFUL, str(error)
        except OnnxqError as error:
            code, text = (REFUSED, str(error)) if "\n" not in str(error) else (FAULT, f"several lines: {error}")
        except BaseException:  # noqa: BLE001 - finding them is what this is for
            code, text = FAULT, traceback.format_exc()
        faulthandler.cancel_dump_traceback_later()
        for left in path.parent.glob(f"{path.stem}.int8.onnx*"):
            if code:
                code, text = FAULT, f"{left.name} was written: {text}"
            left.unlink()
        print(json.dumps({"ends": str(path), "code": code, "text": text}), flush=True)
    # onnxruntime may crash in its destructors, when all is told.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
