"""Biases in order are kept where they pay on samples that they were not found on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from onnxq.algorithms.encoding_config import Recipe
from onnxq.algorithms.encodings import Codes
from onnxq.config.effort import FAST, FULL
from onnxq.config.presets import PRESETS
from onnxq.data.inputs import SampleSource
from onnxq.data.samples import evenly
from onnxq.ir import Graph, load
from onnxq.planning.plan import Plan
from onnxq.runtime.targets import TARGETS
from onnxq.search.cross_validation import LARGE, AlgorithmResult, CrossValidator
from onnxq.search.evaluator import PlanEvaluator
from onnxq.search.prepared_model import PreparedModel, open_prepared_model
from onnxq.search.weight_methods import with_bias_correction
from onnxq.system.resources import silent

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


@pytest.fixture(scope="module")
def folds_of(bench: PreparedModel, plan: Plan) -> Callable[[int, int], CrossValidator]:
    evidence = bench.calibrate(plan, SAMPLES, silent)

    def validator(judged: int, most: int) -> CrossValidator:
        spread = list(evenly(SAMPLES[:most], judged))
        return CrossValidator(PlanEvaluator.of(bench, MODELS / "mobilenet.onnx", spread, evidence), SAMPLES[:most])

    return validator


@pytest.mark.parametrize(("judged", "most"), [(12, 24), (12, 12)])
def test_biases_are_kept_where_they_pay(
    folds_of: Callable[[int, int], CrossValidator], plan: Plan, judged: int, most: int
) -> None:
    validator = folds_of(judged, most)
    basis = AlgorithmResult(Recipe(), validator.evaluator.evidence)
    corrected = with_bias_correction(validator, plan, basis, FULL)
    assert corrected.recipe.biases
    assert validator.evaluator.trust(plan, corrected.recipe).nsr < 0.9 * validator.evaluator.trust(plan, Recipe()).nsr
    assert with_bias_correction(validator, plan, corrected, FULL).recipe.key == corrected.recipe.key


@pytest.mark.parametrize("is_sure", [False, True])
def test_with_little_effort_they_are_found_once_and_kept_where_that_leaves_no_doubt(
    folds_of: Callable[[int, int], CrossValidator], plan: Plan, monkeypatch: pytest.MonkeyPatch, is_sure: bool
) -> None:
    validator, found = folds_of(12, 12), list[int]()
    basis = AlgorithmResult(Recipe(), validator.evaluator.evidence)
    right = with_bias_correction(validator, plan, basis, FULL).recipe.biases

    def once(recipe: Recipe, plan: Plan, graph: Graph, codes: Codes, model: Path, samples: SampleSource) -> Recipe:
        found.append(len(samples))
        return replace(recipe, biases=right)

    monkeypatch.setattr("onnxq.search.weight_methods.with_sequential_biases", once)
    monkeypatch.setattr("onnxq.search.cross_validation.takes_off", lambda *_: is_sure)
    corrected = with_bias_correction(validator, plan, basis, FAST)
    assert found == [6]
    assert bool(corrected.recipe.biases) is is_sure


def test_biases_that_do_not_pay_are_not_kept(
    folds_of: Callable[[int, int], CrossValidator], plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    validator = folds_of(8, 24)
    basis = AlgorithmResult(Recipe(), validator.evaluator.evidence)
    wrong = {node: 1 + bias for node, bias in with_bias_correction(validator, plan, basis, FULL).recipe.biases.items()}
    monkeypatch.setattr(
        "onnxq.search.weight_methods.with_sequential_biases", lambda recipe, *_: replace(recipe, biases=wrong)
    )
    assert with_bias_correction(validator, plan, basis, FAST).recipe.key == Recipe().key


def test_of_too_few_samples_none_are_found(folds_of: Callable[[int, int], CrossValidator], plan: Plan) -> None:
    validator = folds_of(3, 3)
    found = with_bias_correction(validator, plan, AlgorithmResult(Recipe(), validator.evaluator.evidence), FULL)
    assert not found.recipe.biases
    assert found.left == "it does not apply: fewer than 3 samples do not tell a mean from chance"


def test_large_models_get_none(
    folds_of: Callable[[int, int], CrossValidator], plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    validator = folds_of(4, 8)
    monkeypatch.setitem(vars(validator.evaluator.bench), "is_large", True)
    assert (
        with_bias_correction(validator, plan, AlgorithmResult(Recipe(), validator.evaluator.evidence), FULL).left
        == f"it does not apply: {LARGE}"
    )


def test_what_is_stored_alone_gets_none(folds_of: Callable[[int, int], CrossValidator], bench: PreparedModel) -> None:
    validator = folds_of(4, 8)
    floats = replace(bench.plan({}), decisions=())
    basis = AlgorithmResult(Recipe(), validator.evaluator.evidence)
    found = with_bias_correction(validator, floats, basis, FAST)
    assert (found.recipe.key, found.left) == (Recipe().key, "it does not apply: most layers do not round their data")
