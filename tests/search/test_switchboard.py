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
from onnxq.search.evaluator import Trials
from onnxq.search.sensitivity import Source, Switchboard, measure_noises, worst
from onnxq.search.workbench import Workbench
from onnxq.system.resources import silent

MODELS = Path(__file__).parents[2] / "models"
TARGET = target_named("onnxruntime-cpu")


def trials_of(path: Path, samples: list) -> Trials:
    bench = Workbench(path, preset_named("int8"), TARGET)
    return Trials.of(bench, path, samples, bench.calibrate(bench.plan({}), samples, silent))


def test_all_codes_make_the_noise_of_the_quantized_model(
    residual: ModelProto, samples_for: Callable[..., list], tmp_path: Path
) -> None:
    path = tmp_path / "prepared.onnx"
    save(prepare(read_model(residual)), path)
    trials = trials_of(path, samples_for(residual, 4))
    plan = trials.bench.plan({})
    board = Switchboard.of(trials, plan, Recipe())
    everything = range(4)
    silent_codes, joint = board.noises([(), board.sources], everything)
    assert silent_codes.max() < 1e-9
    real = trials.noise(plan, Recipe())
    assert joint.shape == real.shape
    noise, influence = board.everything()
    assert (noise == joint).all()
    assert influence.shape == joint.shape
    assert decibels(worst(joint.sum(0))) == pytest.approx(decibels(worst(real.sum(0))), abs=1.0)
    some = Switchboard.of(trials, plan, Recipe(), {"stem"})
    assert some.sources == (Source("stem", is_node=True),)


@pytest.mark.parametrize("name", ["resnet", "mobilenet"])
def test_sums_of_what_codes_make_alone_predict_other_plans(name: str, tmp_path: Path) -> None:
    path = tmp_path / "prepared.onnx"
    save(prepare(load(MODELS / f"{name}.onnx")), path)
    trials = trials_of(path, [{"image": one[None]} for one in np.load(MODELS / "data" / "calib.npz")["image"][:4]])
    bench, full = trials.bench, trials.bench.plan({})
    found = measure_noises(Switchboard.of(trials, full, Recipe()), 4, runs=1000)
    generator = np.random.default_rng(0)
    static = [one.node for one in full.decisions if one.mode is Mode.STATIC and one.weights]
    errors = []
    for share in (0.2, 0.5, 0.8):
        left = {node: Demotion(Mode.STORAGE, "why") for node in static if generator.random() < share}
        plan = bench.plan(left)
        errors.append(decibels(found.of_plan(plan)) - decibels(worst(trials.noise(plan, Recipe()).sum(0))))
    # Errors of neighbouring codes point the same way more or less often.
    assert np.median(np.abs(errors)) < 2.5
