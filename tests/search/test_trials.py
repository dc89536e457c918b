"""Plans tried out on a few samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxq.algorithms.encoding_config import Recipe
from onnxq.calibration.methods import Percentile
from onnxq.config.presets import PRESETS
from onnxq.config.scheme import Mode
from onnxq.data.inputs import model_inputs
from onnxq.data.samples import open_samples
from onnxq.evaluation.comparison import ComparisonSession, ComparisonSpec
from onnxq.ir import load, read_model, save
from onnxq.planning.plan import Demotion, Plan
from onnxq.preparing.preparation import prepare
from onnxq.runtime.targets import TARGETS
from onnxq.search.evaluator import BuiltModels, PlanEvaluator, measure_errors
from onnxq.search.prepared_model import PreparedModel
from onnxq.system.resources import silent

MODELS = Path(__file__).parents[2] / "models"
SAMPLES = [{"image": image[None]} for image in np.load(MODELS / "data" / "calib.npz")["image"][:8]]


def test_trials_measure_what_a_plan_costs(tmp_path: Path) -> None:
    save(prepare(load(MODELS / "resnet.onnx")), tmp_path / "prepared.onnx")
    bench = PreparedModel(tmp_path / "prepared.onnx", PRESETS["int8"], TARGETS["onnxruntime-cpu"])
    plan = bench.plan({})
    statistics = bench.calibrate(plan, SAMPLES, silent)
    evaluator = PlanEvaluator.of(bench, MODELS / "resnet.onnx", SAMPLES, statistics)

    def demoted(mode: Mode) -> Plan:
        return bench.plan({one.node: Demotion(mode, "for the test") for one in plan.decisions if one.weights})

    static, stored, left = (evaluator.sqnr(one, Recipe()) for one in (plan, demoted(Mode.STORAGE), demoted(Mode.FLOAT)))
    assert 15 < static < stored < 60
    assert left > 100
    assert evaluator.noise(plan, Recipe()).shape == (8, len(evaluator.answered.views.names))
    assert evaluator.noise(demoted(Mode.STORAGE), Recipe()).sum() < evaluator.noise(plan, Recipe()).sum()
    assert evaluator.size(demoted(Mode.STORAGE), Recipe()) < evaluator.size(demoted(Mode.FLOAT), Recipe())
    assert evaluator.count == len(evaluator.measured) == 3
    more = evaluator.joined(SAMPLES[:2])
    assert (more.count, len(more.measured), len(more.answered.samples)) == (3, 0, 10)
    assert more.process_seconds(2.0) - evaluator.process_seconds(2.0) == pytest.approx(4.0)
    assert 0 < evaluator.process_seconds(0.0) < 2


def test_noise_is_the_same_while_others_are_built(tmp_path: Path) -> None:
    save(prepare(load(MODELS / "resnet.onnx")), tmp_path / "prepared.onnx")
    bench = PreparedModel(tmp_path / "prepared.onnx", PRESETS["int8"], TARGETS["onnxruntime-cpu"])
    plan = bench.plan({})
    evaluator = PlanEvaluator.of(bench, MODELS / "resnet.onnx", SAMPLES, bench.calibrate(plan, SAMPLES, silent))
    asked = [
        (evaluator, plan, Recipe()),
        (evaluator, plan, Recipe(Percentile(90.0))),
        (evaluator.part((0, 1)), plan, Recipe()),
    ]
    found = list(measure_errors(asked))
    alone = replace(evaluator, built=BuiltModels())
    for (own, *what), noise in zip(asked, found, strict=True):
        again = replace(alone, answered=own.answered, measured={})
        assert np.array_equal(again.noise(*what), noise)


def test_what_rests_on_other_evidence_is_measured_anew(tmp_path: Path) -> None:
    save(prepare(load(MODELS / "resnet.onnx")), tmp_path / "prepared.onnx")
    bench = PreparedModel(tmp_path / "prepared.onnx", PRESETS["int8"], TARGETS["onnxruntime-cpu"])
    plan = bench.plan({})
    one, all_of_them = (bench.calibrate(plan, samples, silent) for samples in (SAMPLES[:1], SAMPLES))
    evaluator = PlanEvaluator.of(bench, MODELS / "resnet.onnx", SAMPLES, all_of_them)
    first = evaluator.sqnr(plan, Recipe())
    other = replace(evaluator, evidence=one)
    found = other.sqnr(plan, Recipe())
    alone = PlanEvaluator.of(bench, MODELS / "resnet.onnx", SAMPLES, one)
    assert found == alone.sqnr(plan, Recipe()) != first
    assert evaluator.sqnr(plan, Recipe()) == first
    assert len(evaluator.measured) == 2


@pytest.mark.parametrize(("target", "decoded"), [("openvino", True), ("onnxruntime-cpu", False)])
def test_codes_that_no_kernel_convolves_are_decoded_ahead(
    target: str, decoded: bool, build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(
        "(float[1,8,8,8] x) => (float[1,8,8,8] y) { a = Conv(x, v) b = Sigmoid(a) c = Mul(a, b) y = Conv(c, w) }",
        v=(8, 8, 1, 1),
        w=(8, 8, 1, 1),
    )
    save(prepare(read_model(model)), tmp_path / "prepared.onnx")
    samples = [{"x": np.random.default_rng(seed).standard_normal((1, 8, 8, 8), dtype=np.float32)} for seed in range(4)]
    bench = PreparedModel(tmp_path / "prepared.onnx", PRESETS["int8"], TARGETS[target])
    plan = bench.plan({})
    evaluator = PlanEvaluator.of(bench, bench.prepared, samples, bench.calibrate(plan, samples, silent))
    opened = []

    def counted(views: ComparisonSpec, model: Path, *, at_once: bool) -> ComparisonSession:
        opened.append(model)
        return open_decoded(views, model, at_once=at_once)

    open_decoded = ComparisonSpec.open_decoded
    monkeypatch.setattr(ComparisonSpec, "open_decoded", counted)
    assert 20 < evaluator.sqnr(plan, Recipe()) < 60
    assert bool(opened) == decoded


def test_samples_of_one_file_count_as_one(tmp_path: Path) -> None:
    images = np.load(MODELS / "data" / "calib.npz")["image"]
    (tmp_path / "stacks").mkdir()
    for file in range(8):
        np.savez(tmp_path / "stacks" / f"{file}.npz", image=images[2 * file : 2 * file + 2])
    save(prepare(load(MODELS / "resnet.onnx")), tmp_path / "prepared.onnx")
    bench = PreparedModel(tmp_path / "prepared.onnx", PRESETS["int8"], TARGETS["onnxruntime-cpu"])
    stacks = open_samples(tmp_path / "stacks", model_inputs(onnx.load(MODELS / "resnet.onnx")), batch=1)
    plan = bench.plan({})
    together = PlanEvaluator.of(bench, MODELS / "resnet.onnx", stacks, bench.calibrate(plan, stacks, silent))
    by_itself = PlanEvaluator.of(bench, MODELS / "resnet.onnx", list(stacks), together.evidence)
    noise = by_itself.noise(plan, Recipe())
    assert together.noise(plan, Recipe()) == pytest.approx(noise[::2] + noise[1::2])
    assert together.trust(plan, Recipe()).nsr == by_itself.trust(plan, Recipe()).nsr
    assert together.sqnr(plan, Recipe()) != by_itself.sqnr(plan, Recipe())
    # A part of one sample of each file is none of files.
    some = together.part(range(0, 16, 2))
    assert some.sqnr(plan, Recipe()) == by_itself.part(range(0, 16, 2)).sqnr(plan, Recipe())
