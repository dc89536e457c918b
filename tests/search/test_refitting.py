"""Evidence, factors and biases after more samples have been seen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from conftest import Build

from onnxq.algorithms.encoding_config import USUAL
from onnxq.calibration.accumulators import ChannelMeans, Range
from onnxq.calibration.calibrate import Collection
from onnxq.calibration.data import Data
from onnxq.config.effort import FAST
from onnxq.config.presets import preset_named
from onnxq.data.dataset import Selection
from onnxq.ir import as_graph
from onnxq.pipeline import quantize
from onnxq.runtime.targets import target_named
from onnxq.search.activation_methods import with_equalization
from onnxq.search.cross_validation import AlgorithmResult, CrossValidator
from onnxq.search.evaluator import PlanEvaluator
from onnxq.search.prepared_model import open_prepared_model
from onnxq.search.refinement import refit
from onnxq.steps.request import Budget
from onnxq.system.resources import silent

TEXT = "(float[1,6,8,8] x) => (float[1,3,8,8] y) {s = Sqrt(x) a = Conv(s, w) r = Relu(a) y = Conv(r, u)}"
MODELS = Path(__file__).parents[2] / "models"
WIDE = np.array([1, 0.05, 0.04, 0.05, 0.03, 0.05])


def test_ranges_and_factors_are_of_all_samples_and_means_of_those_before(build: Build, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    weight = (generator.standard_normal((8, 6, 1, 1)) / WIDE.reshape(1, -1, 1, 1)).astype(np.float32)
    model = build(TEXT, w=weight, u=(3, 8, 1, 1))
    bench = open_prepared_model(as_graph(model), preset_named("int8"), target_named("onnxruntime-cpu"), tmp_path)
    uniform = [generator.uniform(0, 1, (1, 6, 8, 8)) * WIDE.reshape(-1, 1, 1) for _ in range(12)]
    data = [{"x": np.square(one).astype(np.float32)} for one in uniform]
    # A channel that was quiet in all samples before.
    for one in data[8:]:
        one["x"][:, 1] *= 100
    seen, plan = Selection(data, range(8)), bench.plan({})
    evidence = bench.calibrate(plan, seen, silent)
    validator = CrossValidator(PlanEvaluator.of(bench, bench.prepared, seen, evidence), seen)
    basis = with_equalization(validator, plan, AlgorithmResult(USUAL, evidence), FAST)
    again = refit(validator, plan, plan, basis, Selection(data, range(8, 12)))

    before, after = (one.recipe.migration.factors["s"].values for one in (basis, again))
    assert after[1] > before[1] + 0.2
    assert np.allclose(before[2:], after[2:], atol=0.3)
    ends = [one.evidence.of("r").need(Range) for one in (basis, again)]
    assert ends[0].maximum < ends[1].maximum
    means = [one.evidence.of("s").need(ChannelMeans, 1).means for one in (basis, again)]
    assert np.array_equal(*means)

    # Factors that were left stay left.
    without = replace(basis, recipe=replace(basis.recipe, migration=basis.recipe.migration.select({"r"})))
    assert "s" not in refit(validator, plan, plan, without, Selection(data, range(8, 12))).recipe.migration.factors


def test_all_effort_goes_with_statistics_that_are_collected_in_bounded_memory() -> None:
    data = Data(MODELS / "data" / "calib.npz", limit=64)
    found = [
        quantize(MODELS / "gru.onnx", data, budget=Budget("off", "full", latency=0, collection=collection)).report
        for collection in (None, Collection(memory="4GB"))
    ]
    assert [one.samples.refitted for one in found] == [64, 64]
    assert found[0].plan == found[1].plan
