from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from onnxq.calibration.ranges import MinMax
from onnxq.graph import load, save
from onnxq.plan import Demotion, Plan
from onnxq.preparation import prepare
from onnxq.presets import PRESETS
from onnxq.progress import silent
from onnxq.scheme import Mode
from onnxq.targets import TARGETS
from onnxq.workbench import Workbench

MODELS = Path(__file__).parent.parent / "models"
SAMPLES = [{"image": image[None]} for image in np.load(MODELS / "data" / "calib.npz")["image"][:4]]


@pytest.fixture
def bench(tmp_path: Path) -> Workbench:
    path = tmp_path / "prepared.onnx"
    save(prepare(load(MODELS / "resnet.onnx")), path, external_data=True)
    return Workbench(path, PRESETS["int8"], TARGETS["onnxruntime-cpu"])


def test_building_does_not_change_the_prepared_model(bench: Workbench, tmp_path: Path) -> None:
    before = bench.prepared.read_bytes()
    plan = bench.plan({})
    statistics = bench.calibrate(plan, SAMPLES, silent)
    assert set(plan.taps) == set(statistics.tensors)
    bench.build(plan, statistics, MinMax(), tmp_path / "a.onnx", external_data=False)
    bench.build(plan, statistics, MinMax(), tmp_path / "b.onnx", external_data=False)
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()
    assert bench.prepared.read_bytes() == before


def test_trials_measure_what_a_plan_costs(bench: Workbench) -> None:
    plan = bench.plan({})
    statistics = bench.calibrate(plan, SAMPLES, silent)
    trials = bench.trials(MODELS / "resnet.onnx", SAMPLES, statistics)

    def demoted(mode: Mode) -> Plan:
        return bench.plan({one.node: Demotion(mode, "for the test") for one in plan.decisions if one.weights})

    static, stored, left = (trials.sqnr(one, MinMax()) for one in (plan, demoted(Mode.STORAGE), demoted(Mode.FLOAT)))
    assert 15 < static < stored < 60
    assert left > 100


def test_a_plan_without_activations_needs_no_calibration(bench: Workbench) -> None:
    storage = Workbench(bench.prepared, PRESETS["int8-storage"], bench.target)
    assert storage.calibrate(storage.plan({}), SAMPLES, silent).samples == 0
