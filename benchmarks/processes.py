"""Processes that are timed whole, as users start them, beside one that does nothing but inference."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

INFERENCE = """
import sys
import numpy as np, onnxruntime
from pathlib import Path
onnxruntime.set_default_logger_severity(4)
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
for path in sorted(Path(sys.argv[2]).glob("*.npz")):
    with np.load(path) as arrays:
        session.run(None, dict(arrays))
"""
"""Runs a float model over the samples of a folder: what quantizing cannot do without."""


def keep_bytecode(folder: Path, *modules: str) -> None:
    """Let processes find the bytecode of all that they import, as they do of packages that were installed.

    Args:
        folder: where it is kept.
        modules: loaded once, so that none of what is timed compiles them.
    """
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = str(folder / "bytecode")
    loaded = ", ".join(("onnxruntime", "onnxq.pipeline.quantization", *modules))
    subprocess.run([sys.executable, "-c", f"import {loaded}"], check=True)


def inference_seconds(model: Path, samples: Path, runs: int = 3) -> float:
    """Return the median seconds of processes that run the float model over the samples of a folder."""
    took = []
    for _ in range(runs):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", INFERENCE, str(model), str(samples)], check=True)
        took.append(time.perf_counter() - start)
    return statistics.median(took)
