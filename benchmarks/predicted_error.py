"""Compare the predicted error of random plans, the sum of the errors of single quantizers, with the measured error.

    python benchmarks/predicted_error.py --models DIR --data DIR [--plans 20] [--seconds 10] [NAME ...]

MODELS/NAME.onnx is calibrated with DATA/NAME/calib, with min-max ranges and no accuracy methods. Each plan leaves a
random part of the nodes with weights out of integer arithmetic. Probabilities count by their logarithms, before the
last Softmax. The last column is the median error after the first plan has said by how much sums are off.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from pathlib import Path

import numpy as np

from onnxq.algorithms.encoding_config import DEFAULT_CONFIG
from onnxq.config.presets import preset_named
from onnxq.config.scheme import Mode
from onnxq.data.inputs import model_inputs
from onnxq.data.samples import evenly, open_samples
from onnxq.ir import load
from onnxq.lowering import AllowedOps
from onnxq.numerics.affine import sqnr_of_ratio
from onnxq.onnx_api import weightless_model
from onnxq.planning.plan import Demotion
from onnxq.runtime.targets import target_named
from onnxq.search.evaluator import PlanEvaluator
from onnxq.search.prepared_model import open_prepared_model
from onnxq.search.sensitivity import QuantizerToggleSession, likely_shares, measure_sensitivities, worst_output_nsr
from onnxq.system.resources import silent

SAMPLES = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--plans", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=10.0, help="time to measure the error of each quantizer")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    columns = (
        "model",
        "quantizers",
        "measured alone",
        "seconds",
        "joint dB",
        "median error dB",
        "largest dB",
        "corrected dB",
    )
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * 8)
    for path in sorted(options.models.glob("*.onnx")):
        data = options.data / path.stem / "calib"
        if data.is_dir() and (not options.names or path.stem in options.names):
            print(line(path, data, options.plans, options.seconds), flush=True)


def line(path: Path, data: Path, plans: int, seconds: float) -> str:
    """Return a row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        samples = open_samples(data, model_inputs(weightless_model(load(path))))
        bench = open_prepared_model(
            load(path), preset_named("int8"), target_named("onnxruntime-cpu"), Path(folder), AllowedOps.QDQ
        )
        full = bench.plan({})
        trials = PlanEvaluator.of(bench, path, list(evenly(samples, SAMPLES)), bench.calibrate(full, samples, silent))
        start = time.perf_counter()
        board = QuantizerToggleSession.of(trials, full, DEFAULT_CONFIG)
        runs, shares = math.ceil(seconds / trials.answered.seconds), likely_shares(full, trials.statistics)
        nsr = measure_sensitivities(board, len(trials.answered.samples), runs, shares=shares)
        took = time.perf_counter() - start
        generator = np.random.default_rng(0)
        weighted = [one.node for one in full.decisions if one.mode is Mode.STATIC and one.weights]
        differences = []
        for share in np.linspace(0.05, 0.95, plans):
            left = {node: Demotion(Mode.STORAGE, "left out") for node in weighted if generator.random() < share}
            plan = bench.plan(left)
            differences.append(
                sqnr_of_ratio(nsr.of_plan(plan))
                - sqnr_of_ratio(worst_output_nsr(trials.nsr(plan, DEFAULT_CONFIG).sum(0)))
            )
        errors = np.abs(differences)
        corrected = np.abs(np.array(differences) - differences[0])[1:]
        figures = (
            took,
            sqnr_of_ratio(worst_output_nsr(nsr.joint)),
            np.median(errors),
            errors.max(),
            np.median(corrected),
        )
        counts = f"{len(board.sources)} | {len(nsr.alone)}"
        return f"| {path.stem} | {counts} | " + " | ".join(f"{figure:.1f}" for figure in figures) + " |"


if __name__ == "__main__":
    main()
