from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from onnxq.calibration.inputs import Sample
from onnxq.calibration.ranges import MinMax
from onnxq.calibration.statistics import Statistics
from onnxq.graph import load, read_model, save
from onnxq.lowering import Emit
from onnxq.planning.plan import Demotion, Plan
from onnxq.preparation import prepare
from onnxq.presets import PRESETS
from onnxq.progress import silent
from onnxq.runtime import open_session, run
from onnxq.scheme import Mode, Spec
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


def test_a_plan_without_activations_and_corrections_needs_no_calibration(bench: Workbench) -> None:
    storage = Workbench(bench.prepared, replace(PRESETS["int8-storage"], correct_biases=False), bench.target)
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


CODES = Demotion(Mode.WEIGHT_ONLY, "for the test", weight=Spec("int4", (32,)))


def test_only_a_model_with_blocks_of_codes_gets_the_opset_that_they_need(
    perceptron: ModelProto, samples_for: Callable[..., list[Sample]], tmp_path: Path
) -> None:
    path, output = tmp_path / "prepared.onnx", tmp_path / "out.onnx"
    save(prepare(read_model(perceptron)), path, external_data=True)
    before = path.read_bytes()
    bench = Workbench(path, PRESETS["int8"], TARGETS["onnxruntime-cpu"])
    samples = samples_for(perceptron, 2)
    statistics = bench.calibrate(bench.plan({}), samples, silent)
    for plan, opset in ((bench.plan({}), 17), (bench.plan({"first": CODES}), 21), (bench.plan({}), 17)):
        assert bench.expresses(plan)
        bench.build(plan, statistics, MinMax(), output, external_data=False)
        assert onnx.load(output).opset_import[0].version == opset
        assert np.isfinite(run(open_session(output), samples[0])[0]).all()
    assert path.read_bytes() == before


def test_a_plan_that_a_later_opset_has_other_nodes_for_cannot_be_built(
    build: Callable[..., ModelProto], tmp_path: Path
) -> None:
    text = "(float[2,3,64] x) => (float[2,3,64] y) { [first] h = MatMul(x, w) [soft] y = Softmax(h) }"
    for opset, whether in ((12, False), (13, True)):
        path = tmp_path / f"{opset}" / "prepared.onnx"
        path.parent.mkdir()
        save(prepare(read_model(build(text, opset=opset, w=(64, 64)))), path)
        bench = Workbench(path, PRESETS["int8"], TARGETS["onnxruntime-cpu"])
        # Before opset 13 Softmax flattens its data, which the converter writes as nodes of their own.
        assert bench.expresses(bench.plan({}))
        assert bench.expresses(bench.plan({"first": CODES})) is whether


def test_runtime_operators_of_codes_need_no_later_opset(perceptron: ModelProto, tmp_path: Path) -> None:
    path = tmp_path / "prepared.onnx"
    save(prepare(read_model(perceptron)), path)
    bench = Workbench(path, PRESETS["int8"], TARGETS["onnxruntime-cpu"], emit=Emit.ORT)
    assert bench.expresses(bench.plan({"first": CODES}))
    assert [found.name for found in tmp_path.iterdir()] == ["prepared.onnx"]


def test_nodes_of_idle_bodies_stay_out_whatever_is_wished(build, tmp_path: Path) -> None:
    model = build(
        """(float[4,32] x, bool c) => (float[4,32] y) {
            [outer] a = MatMul(x, w)
            y = If (c) <
                then_branch = t () => (float[4,32] u) { [one] b = MatMul(a, w) d = Neg(b) [two] u = MatMul(d, w) },
                else_branch = e () => (float[4,32] v) { v = Tanh(a) }>
        }""",
        w=(32, 32),
    )
    path = tmp_path / "prepared.onnx"
    save(prepare(read_model(model)), path)
    bench = Workbench(path, PRESETS["int8"], TARGETS["onnxruntime-cpu"])
    plan = bench.plan({})
    x = np.random.default_rng(0).standard_normal((4, 32)).astype(np.float32)
    ran, idle = (bench.calibrate(plan, [{"x": x, "c": np.array(flag)}], silent) for flag in (True, False))
    assert bench.without_idle_bodies(plan, ran) is bench
    without = bench.without_idle_bodies(plan, idle)
    assert {name: without.plan({}).by_node[name].mode for name in ("outer", "one", "two")} == {
        "outer": Mode.STATIC, "one": Mode.STORAGE, "two": Mode.STORAGE
    }  # fmt: skip
    wished = without.plan({"one": Demotion(Mode.STATIC, "for the test")})
    assert wished.by_node["one"].mode is Mode.STORAGE
