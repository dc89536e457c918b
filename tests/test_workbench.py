from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxq.calibration.ranges import MinMax
from onnxq.calibration.statistics import Statistics
from onnxq.graph import load, save
from onnxq.lowering import Emit
from onnxq.planning.plan import Demotion, Plan
from onnxq.preparation import prepare
from onnxq.presets import PRESETS
from onnxq.progress import silent
from onnxq.scheme import Mode
from onnxq.targets import TARGETS
from onnxq.workbench import Workbench, lower_bound

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


@pytest.mark.parametrize(
    ("emit", "found", "decoded"),
    [
        (Emit.QDQ, "DequantizeLinear", {Mode.WEIGHT_ONLY}),
        (Emit.ORT, "MatMulNBits", {Mode.WEIGHT_ONLY}),
        (Emit.STRICT, "DequantizeLinear", {Mode.WEIGHT_ONLY, Mode.STORAGE}),
    ],
)
def test_weights_are_decoded_as_the_bench_is_told(emit: Emit, found: str, decoded: set[Mode], tmp_path: Path) -> None:
    path = tmp_path / "prepared.onnx"
    save(prepare(load(MODELS / "vit.onnx"), opset=21), path, external_data=True)
    bench = Workbench(path, PRESETS["int4-block32"], TARGETS["onnxruntime-cpu"], emit=emit)
    plan = bench.plan({})
    built = bench.build(plan, Statistics(0, {}), MinMax(), tmp_path / "q.onnx", external_data=False)
    assert sum(node.op == found for node in built.nodes) == sum(map(plan.count, decoded)) > 10


@given(st.lists(st.floats(-50, 90), min_size=2, max_size=12))
def test_the_lower_bound_is_below_the_mean_and_close_to_it_for_many_equal_samples(values: list[float]) -> None:
    assert lower_bound(values) <= sum(values) / len(values) + 1e-9
    assert values[0] - 9 < lower_bound([values[0]] * len(values)) < values[0]
    assert values[0] - 0.7 < lower_bound([values[0]] * 32) < values[0]


def test_samples_that_differ_prove_less_and_more_samples_prove_more() -> None:
    assert lower_bound([28.0, 17.8, 25.9]) < 16 < 20 < lower_bound([25.9, 26.0, 25.0])
    assert lower_bound([20.0, 24.0] * 5) > lower_bound([20.0, 24.0])


def test_one_sample_and_equal_outputs_have_a_bound() -> None:
    assert lower_bound([21.0]) == float("inf")
    assert 140 < lower_bound([float("inf"), float("inf")]) < 150
