"""Recipes that are kept because their models are nearer to the float model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from observations import evidence, seen

from onnxq.accuracy.recipes import Recipes, fitting, noise_share, ranges_by_tensor
from onnxq.encoding.recipe import Recipe
from onnxq.evidence.ranges import MinMax, Percentile
from onnxq.modelfile import load
from onnxq.numbers.spec import Spec
from onnxq.planning.plan import Plan
from onnxq.presets import PRESETS
from onnxq.progress import silent
from onnxq.samples.data import evenly
from onnxq.targets import TARGETS
from onnxq.trials import Trials
from onnxq.workbench import Workbench, open_workbench

UINT8, UINT4 = (Spec(name, symmetric=False) for name in ("uint8", "uint4"))
MODELS = Path(__file__).parents[2] / "models"
SAMPLES = [{"image": image[None]} for image in np.load(MODELS / "data" / "calib.npz")["image"][:24]]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    return open_workbench(
        load(MODELS / "mobilenet.onnx"), PRESETS["int8"], TARGETS["onnxruntime-cpu"], tmp_path_factory.mktemp("bench")
    )


@pytest.fixture(scope="module")
def plan(bench: Workbench) -> Plan:
    return bench.plan({})


def recipes(bench: Workbench, plan: Plan, judged: int, most: int) -> Recipes:
    statistics = bench.calibrate(plan, SAMPLES[:most], silent)
    spread = evenly(SAMPLES[:most], judged)
    return Recipes(Trials.of(bench, MODELS / "mobilenet.onnx", spread, statistics), SAMPLES[:most])


@pytest.mark.parametrize(("judged", "most"), [(12, 24), (12, 12)])
def test_biases_are_kept_where_they_pay(bench: Workbench, plan: Plan, judged: int, most: int) -> None:
    found = recipes(bench, plan, judged, most)
    corrected = found.with_biases(plan, Recipe())
    assert corrected.biases
    assert found.trials.trust(plan, corrected).noise < 0.9 * found.trials.trust(plan, Recipe()).noise
    assert found.with_biases(plan, corrected).key == corrected.key


def test_biases_that_do_not_pay_are_not_kept(bench: Workbench, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    found = recipes(bench, plan, 8, 24)
    wrong = {node: 1 + bias for node, bias in found.with_biases(plan, Recipe()).biases.items()}
    monkeypatch.setattr(
        "onnxq.accuracy.recipes.with_sequential_biases", lambda recipe, *_: replace(recipe, biases=wrong)
    )
    assert found.with_biases(plan, Recipe()).key == Recipe().key


@pytest.mark.parametrize(
    ("count", "judged", "expected"),
    [(10, 4, [0, 3, 6, 9]), (12, 4, [1, 2, 3, 5, 6, 8, 9, 10]), (2, 2, [0, 1]), (0, 4, [])],
)
def test_biases_are_found_on_samples_that_judge_nothing_where_there_are_enough(
    count: int, judged: int, expected: list[int]
) -> None:
    assert [int(sample["x"]) for sample in fitting([{"x": np.array(n)} for n in range(count)], judged)] == expected


def test_a_single_sample_corrects_nothing(bench: Workbench, plan: Plan) -> None:
    assert recipes(bench, plan, 1, 1).with_biases(plan, Recipe()).key == Recipe().key


def test_the_best_ranges_are_never_noisier_than_the_first(bench: Workbench, plan: Plan) -> None:
    found = recipes(bench, plan, 4, 8)
    recipe = found.with_ranges(plan, Recipe(), 6, (Percentile(90.0), MinMax()))
    assert repr(recipe.ranges) == repr(MinMax())
    assert len(found.trials.measured) == 6
    assert found.trials.trust(plan, recipe).noise <= found.trials.trust(plan, Recipe()).noise


def test_plans_without_ranges_keep_the_recipe(bench: Workbench, plan: Plan) -> None:
    found = recipes(bench, plan, 1, 1)
    stored = replace(plan, activations=())
    assert found.with_ranges(stored, Recipe(MinMax()), 6, (Percentile(90.0),)).key == Recipe().key
    assert not found.trials.measured


def test_tensors_of_much_noise_for_their_signal_come_first(bench: Workbench, plan: Plan) -> None:
    spread, peaked = np.linspace(-1, 1, 100), np.append(np.linspace(-1, 1, 100), 100.0)
    assert noise_share(seen(peaked), UINT8) > 5 * noise_share(seen(spread), UINT8)
    assert noise_share(seen(spread), UINT4) > 100 * noise_share(seen(spread), UINT8)
    assert noise_share(seen([3.0]), UINT8) == 0
    values = dict.fromkeys(plan.taps, spread) | {plan.taps[-1]: peaked}
    found = ranges_by_tensor(plan, evidence(values), (MinMax(), Percentile(50.0)))
    assert next(iter(found)) == plan.taps[-1]
    assert found[plan.taps[0]][MinMax()] == (-1, 1)
