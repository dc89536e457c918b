"""One session answers what any of the codes of a plan do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto

from onnxq.algorithms.encoding_config import Recipe
from onnxq.config.presets import preset_named
from onnxq.config.scheme import Mode
from onnxq.ir import load, read_model, save
from onnxq.numerics.affine import decibels
from onnxq.planning.plan import Demotion
from onnxq.preparing.preparation import prepare
from onnxq.runtime.targets import target_named
from onnxq.search.evaluator import PlanEvaluator
from onnxq.search.prepared_model import PreparedModel
from onnxq.search.sensitivity import QuantizerId, QuantizerToggleSession, measure_sensitivities, worst_output_nsr
from onnxq.system.resources import silent

MODELS = Path(__file__).parents[2] / "models"
TARGET = target_named("onnxruntime-cpu")


def trials_of(path: Path, samples: list) -> PlanEvaluator:
    bench = PreparedModel(path, preset_named("int8"), TARGET)
    return PlanEvaluator.of(bench, path, samples, bench.calibrate(bench.plan({}), samples, silent))


def test_all_codes_make_the_noise_of_the_quantized_model(
    residual: ModelProto, samples_for: Callable[..., list], tmp_path: Path
) -> None:
    path = tmp_path / "prepared.onnx"
    save(prepare(read_model(residual)), path)
    evaluator = trials_of(path, samples_for(residual, 4))
    plan = evaluator.bench.plan({})
    board = QuantizerToggleSession.of(evaluator, plan, Recipe())
    everything = range(4)
    silent_codes, joint = board.noises([(), board.sources], everything)
    assert silent_codes.max() < 1e-9
    real = evaluator.noise(plan, Recipe())
    assert joint.shape == real.shape
    noise, influence = board.everything()
    assert (noise == joint).all()
    assert influence.shape == joint.shape
    assert decibels(worst_output_nsr(joint.sum(0))) == pytest.approx(decibels(worst_output_nsr(real.sum(0))), abs=1.0)
    some = QuantizerToggleSession.of(evaluator, plan, Recipe(), {"stem"})
    assert some.sources == (QuantizerId("stem", is_node=True),)


@pytest.mark.parametrize("name", ["resnet", "mobilenet"])
def test_sums_of_what_codes_make_alone_predict_other_plans(name: str, tmp_path: Path) -> None:
    path = tmp_path / "prepared.onnx"
    save(prepare(load(MODELS / f"{name}.onnx")), path)
    evaluator = trials_of(path, [{"image": one[None]} for one in np.load(MODELS / "data" / "calib.npz")["image"][:4]])
    bench, full = evaluator.bench, evaluator.bench.plan({})
    found = measure_sensitivities(QuantizerToggleSession.of(evaluator, full, Recipe()), 4, runs=1000)
    generator = np.random.default_rng(0)
    static = [one.node for one in full.decisions if one.mode is Mode.STATIC and one.weights]
    errors = []
    for share in (0.2, 0.5, 0.8):
        left = {node: Demotion(Mode.STORAGE, "why") for node in static if generator.random() < share}
        plan = bench.plan(left)
        errors.append(
            decibels(found.of_plan(plan)) - decibels(worst_output_nsr(evaluator.noise(plan, Recipe()).sum(0)))
        )
    # Errors of neighbouring codes point the same way more or less often.
    assert np.median(np.abs(errors)) < 2.5
