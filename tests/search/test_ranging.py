"""Ranges that are kept because their models are nearer to the float model."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from observations import evidence, seen

from onnxq.algorithms.encoding_config import Recipe
from onnxq.algorithms.range_search import RangeChoice
from onnxq.calibration.methods import MinMax, Percentile
from onnxq.config.effort import FAST
from onnxq.config.presets import PRESETS
from onnxq.data.samples import evenly
from onnxq.ir import load
from onnxq.numerics.spec import Spec
from onnxq.planning.plan import Plan
from onnxq.runtime.targets import TARGETS
from onnxq.search import activation_methods
from onnxq.search.activation_methods import noise_share, ranges_by_tensor, with_ranges
from onnxq.search.cross_validation import AlgorithmResult, CrossValidator
from onnxq.search.evaluator import PlanEvaluator
from onnxq.search.prepared_model import PreparedModel, open_prepared_model
from onnxq.system.resources import silent

UINT8, UINT4 = (Spec(name, symmetric=False) for name in ("uint8", "uint4"))
MODELS = Path(__file__).parents[2] / "models"
SAMPLES = [{"image": image[None]} for image in np.load(MODELS / "data" / "calib.npz")["image"][:24]]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    return open_prepared_model(
        load(MODELS / "mobilenet.onnx"), PRESETS["int8"], TARGETS["onnxruntime-cpu"], tmp_path_factory.mktemp("bench")
    )


@pytest.fixture(scope="module")
def plan(bench: PreparedModel) -> Plan:
    return bench.plan({})


def validator(bench: PreparedModel, plan: Plan, judged: int, most: int) -> CrossValidator:
    statistics = bench.calibrate(plan, SAMPLES[:most], silent)
    spread = list(evenly(SAMPLES[:most], judged))
    return CrossValidator(PlanEvaluator.of(bench, MODELS / "mobilenet.onnx", spread, statistics), SAMPLES[:most])


def test_the_best_ranges_are_never_noisier_than_the_first(bench: PreparedModel, plan: Plan) -> None:
    found = validator(bench, plan, 4, 8)
    basis = AlgorithmResult(Recipe(), found.evaluator.evidence)
    recipe = with_ranges(found, plan, basis, FAST, (Percentile(90.0), MinMax())).recipe
    assert repr(recipe.ranges) == repr(MinMax())
    assert len(found.evaluator.measured) == FAST.models
    assert found.evaluator.trust(plan, recipe).nsr <= found.evaluator.trust(plan, Recipe()).nsr


@pytest.mark.parametrize(("before", "chosen", "kept"), [(99.99, 80.0, False), (80.0, 99.99, True)])
def test_ranges_are_kept_where_they_hold_on_samples_held_out(
    bench: PreparedModel, plan: Plan, monkeypatch: pytest.MonkeyPatch, before: float, chosen: float, kept: bool
) -> None:
    found = validator(bench, plan, 4, 12)
    basis = AlgorithmResult(Recipe(Percentile(before)), found.evaluator.evidence)
    monkeypatch.setattr(activation_methods, "choose_ranges", lambda *_, **__: RangeChoice(Percentile(chosen)))
    recipe = with_ranges(found, plan, basis, FAST).recipe
    assert repr(recipe.ranges) == repr(Percentile(chosen if kept else before))


def test_ranges_end_where_what_follows_is_flat(
    bench: PreparedModel, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = validator(bench, plan, 4, 8)
    basis, tensor = AlgorithmResult(Recipe(), found.evaluator.evidence), plan.taps[1]
    _, high = MinMax()(basis.evidence.of(tensor), plan.calibrated[tensor])
    for end, kept in ((high, True), (high / 50, False)):
        monkeypatch.setattr(activation_methods, "flat_ends", lambda *_, end=end: {tensor: (-math.inf, end)})
        recipe = with_ranges(found, plan, basis, FAST, (MinMax(),)).recipe
        # The first changes nothing, and takes nothing off; the second is not flat in truth.
        assert not recipe.own_ranges or kept


def test_plans_without_ranges_keep_the_recipe(bench: PreparedModel, plan: Plan) -> None:
    found = validator(bench, plan, 1, 1)
    basis, stored = AlgorithmResult(Recipe(), found.evaluator.evidence), replace(plan, activations=())
    left = with_ranges(found, stored, basis, FAST, (Percentile(90.0),))
    assert (left.recipe, left.left) == (basis.recipe, basis.unfit("no range of data is found by samples").left)
    assert not found.evaluator.measured


def test_tensors_of_much_noise_for_their_signal_come_first(bench: PreparedModel, plan: Plan) -> None:
    spread, peaked = np.linspace(-1, 1, 100), np.append(np.linspace(-1, 1, 100), 100.0)
    assert noise_share(seen(peaked), UINT8) > 5 * noise_share(seen(spread), UINT8)
    assert noise_share(seen(spread), UINT4) > 100 * noise_share(seen(spread), UINT8)
    assert noise_share(seen([3.0]), UINT8) == 0
    values = dict.fromkeys(plan.taps, spread) | {plan.taps[-1]: peaked}
    found = ranges_by_tensor(plan, evidence(values), (MinMax(), Percentile(50.0)))
    assert next(iter(found)) == plan.taps[-1]
    assert found[plan.taps[0]][MinMax()] == (-1, 1)
