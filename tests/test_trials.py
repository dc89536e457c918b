"""Plans tried out on a few samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from onnxq.encoding.recipe import Recipe
from onnxq.modelfile import load, save
from onnxq.planning.plan import Demotion, Plan
from onnxq.preparation import prepare
from onnxq.presets import PRESETS
from onnxq.progress import silent
from onnxq.scheme import Mode
from onnxq.targets import TARGETS
from onnxq.trials import Trials
from onnxq.workbench import Workbench

MODELS = Path(__file__).parents[1] / "models"
SAMPLES = [{"image": image[None]} for image in np.load(MODELS / "data" / "calib.npz")["image"][:8]]


def test_trials_measure_what_a_plan_costs(tmp_path: Path) -> None:
    save(prepare(load(MODELS / "resnet.onnx")), tmp_path / "prepared.onnx")
    bench = Workbench(tmp_path / "prepared.onnx", PRESETS["int8"], TARGETS["onnxruntime-cpu"])
    plan = bench.plan({})
    statistics = bench.calibrate(plan, SAMPLES, silent)
    trials = Trials.of(bench, MODELS / "resnet.onnx", SAMPLES, statistics)

    def demoted(mode: Mode) -> Plan:
        return bench.plan({one.node: Demotion(mode, "for the test") for one in plan.decisions if one.weights})

    static, stored, left = (trials.sqnr(one, Recipe()) for one in (plan, demoted(Mode.STORAGE), demoted(Mode.FLOAT)))
    assert 15 < static < stored < 60
    assert left > 100
    assert trials.noise(plan, Recipe()).shape == (8, len(trials.views.names))
    assert trials.noise(demoted(Mode.STORAGE), Recipe()).sum() < trials.noise(plan, Recipe()).sum()
    assert len(trials.measured) == 3
