"""A plan carried out again from the same samples is the same file, byte for byte."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import Build

from onnxq.calibration.data import Data
from onnxq.config.presets import PRESETS
from onnxq.config.scheme import Scheme
from onnxq.errors import SchemeError
from onnxq.evaluation.goal import Goal
from onnxq.pipeline import plan, quantize
from onnxq.planning.plan_file import load_plan, save_plan
from onnxq.steps.request import Budget

MODELS = Path(__file__).parents[2] / "models"
CALIB = MODELS / "data" / "calib.npz"
FORCED = Goal(force=True)
UNTIMED = Budget(search="off", latency=0)


def first_and_again(
    model: object, data: object, folder: Path, scheme: str | Scheme, budget: Budget
) -> tuple[bytes, bytes]:
    first = quantize(model, data, folder / "first.onnx", scheme=scheme, goal=FORCED, budget=budget).report
    save_plan(first.plan, folder / "plan.toml")
    replay = load_plan(folder / "plan.toml")
    assert replay == first.plan
    again = quantize(model, data, folder / "again.onnx", scheme=replay, goal=FORCED, budget=UNTIMED).report
    assert again.plan == first.plan
    assert (again.search.measured, again.encoding.gains) == (0, ())
    return (folder / "first.onnx").read_bytes(), (folder / "again.onnx").read_bytes()


@pytest.mark.parametrize("scheme", PRESETS)
@pytest.mark.parametrize("model", ["perceptron", "residual"])
def test_the_plan_of_every_preset_is_found_again(
    model: str, scheme: str, request: pytest.FixtureRequest, samples_for, tmp_path: Path
) -> None:
    given = request.getfixturevalue(model)
    first, again = first_and_again(given, samples_for(given, 6), tmp_path, scheme, UNTIMED)
    assert first == again


def test_weights_whose_errors_cancel_are_found_again(perceptron, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    few, wide = generator.standard_normal((12, 4, 6), np.float32), generator.standard_normal((6, 32), np.float32)
    samples = [{"x": one @ wide} for one in few]
    budget = Budget("off", "compensation", latency=0)
    first, again = first_and_again(perceptron, samples, tmp_path, "int4-block32", budget)
    assert first == again
    assert load_plan(tmp_path / "plan.toml").damping is not None


def test_factors_of_float_data_are_found_again(build: Build, tmp_path: Path) -> None:
    norm = np.where(np.arange(32) == 3, 30.0, 1.0).astype(np.float32)
    text = "(float[8,32] x) => (float[8,16] y) {n = LayerNormalization(x, s) y = MatMul(n, w)}"
    samples = [{"x": one} for one in np.random.default_rng(0).standard_normal((16, 8, 32), np.float32)]
    budget = Budget("off", "scaling,compensation", latency=0)
    first, again = first_and_again(build(text, s=norm, w=(32, 16)), samples, tmp_path, "int2-block16", budget)
    assert first == again
    assert [one.tensor for one in load_plan(tmp_path / "plan.toml").scaling] == ["n"]


def test_a_plan_that_was_searched_for_is_found_again(tmp_path: Path) -> None:
    data = Data(CALIB, limit=12)
    first, again = first_and_again(MODELS / "gru.onnx", data, tmp_path, "int8", Budget(latency=0.05))
    assert first == again


@pytest.mark.parametrize("emit", ["qdq", "ort", "strict"])
def test_what_is_emitted_is_in_the_plan(emit: str, perceptron, samples_for, tmp_path: Path) -> None:
    scheme = replace(PRESETS["int4-block32"], emit=emit)
    first, again = first_and_again(perceptron, samples_for(perceptron), tmp_path, scheme, UNTIMED)
    assert first == again


def test_ranges_of_a_method_without_a_name_are_in_the_plan(perceptron, samples_for, tmp_path: Path) -> None:
    scheme = replace(PRESETS["int8"], ranges=lambda seen, spec: (-1 / 3, 2 / 3))
    first, again = first_and_again(perceptron, samples_for(perceptron), tmp_path, scheme, UNTIMED)
    assert first == again


def test_ranges_do_not_depend_on_the_samples_of_the_replay(perceptron, samples_for, tmp_path: Path) -> None:
    scheme = replace(PRESETS["int8"], correct_biases=False)
    budget = Budget("off", "ranges", latency=0)
    samples = samples_for(perceptron, 8)
    plan = quantize(perceptron, samples, tmp_path / "a.onnx", scheme=scheme, goal=FORCED, budget=budget).report.plan
    louder = [{"x": 9 * samples[0]["x"]}]
    quantize(perceptron, louder, tmp_path / "b.onnx", scheme=plan, goal=FORCED, budget=UNTIMED)
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()


def test_a_first_plan_can_be_carried_out(perceptron, samples_for, tmp_path: Path) -> None:
    samples, budget = samples_for(perceptron), Budget("off", "off", latency=0)
    scheme = replace(PRESETS["int8"], ranges="minmax")
    quantize(perceptron, samples, tmp_path / "a.onnx", scheme=scheme, goal=FORCED, budget=budget)
    quantize(perceptron, samples, tmp_path / "b.onnx", scheme=plan(perceptron), goal=FORCED, budget=budget)
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"version": "0.0.1"}, "the plan was made by onnxq 0.0.1, expected .*, which is installed; make it again"),
        ({"steps": ("UnfuseProduct",)}, "the plan has step 'UnfuseProduct', expected .*did you mean 'UnfuseProducts'"),
        ({"model": "0" * 32}, "the plan was made for another model, whose nodes are called alike"),
    ],
)
def test_a_plan_of_something_else_is_refused(change: dict, sentence: str, perceptron, samples_for) -> None:
    made = plan(perceptron)
    with pytest.raises(SchemeError, match=sentence):
        quantize(
            perceptron, samples_for(perceptron), scheme=replace(made, preparation=replace(made.preparation, **change))
        )


def test_a_plan_that_does_not_say_what_it_is_of_is_refused(perceptron, samples_for) -> None:
    with pytest.raises(SchemeError, match="the plan does not say what it was made for"):
        quantize(perceptron, samples_for(perceptron), scheme=replace(plan(perceptron), preparation=None))


def test_a_model_with_other_weights_is_another_model(build, samples_for) -> None:
    text = "(float[4,32] x) => (float[4,32] y) { [a] y = MatMul(x, w) }"
    made, other = (build(text, w=np.full((32, 32), value, np.float32)) for value in (1.0, 2.0))
    with pytest.raises(SchemeError, match="the plan was made for another model"):
        quantize(other, samples_for(other), scheme=plan(made))
