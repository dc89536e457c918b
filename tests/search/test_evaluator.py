"""Plans tried out on a few samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event

import numpy as np
import onnx
import pytest
from conftest import MODELS

from onnxq.algorithms.encoding_config import EncodingConfig
from onnxq.calibration.methods import Percentile
from onnxq.config.presets import PRESETS
from onnxq.config.scheme import Mode
from onnxq.data.inputs import model_inputs
from onnxq.data.samples import open_samples
from onnxq.errors import DataError
from onnxq.evaluation.comparison import ComparisonSession, ComparisonSpec
from onnxq.ir import load, read_model, save
from onnxq.passes.preparing.preparation import prepare
from onnxq.planning.plan import Demotion, Plan
from onnxq.runtime.targets import TARGETS
from onnxq.search.evaluator import Answers, BuiltModel, BuiltModels, PlanEvaluator, Runner, measure_errors
from onnxq.search.prepared_model import PreparedModel
from onnxq.system.resources import silent

SAMPLES = [{"image": image[None]} for image in np.load(MODELS / "data" / "calib.npz")["image"][:8]]


def test_trials_measure_what_a_plan_costs(tmp_path: Path) -> None:
    save(prepare(load(MODELS / "resnet.onnx")), tmp_path / "prepared.onnx")
    bench = PreparedModel(tmp_path / "prepared.onnx", PRESETS["int8"], TARGETS["onnxruntime-cpu"])
    plan = bench.plan({})
    statistics = bench.calibrate(plan, SAMPLES, silent)
    evaluator = PlanEvaluator.of(bench, MODELS / "resnet.onnx", SAMPLES, statistics)

    def demoted(mode: Mode) -> Plan:
        return bench.plan({one.node: Demotion(mode, "for the test") for one in plan.decisions if one.weights})

    static, stored, left = (
        evaluator.sqnr(one, EncodingConfig()) for one in (plan, demoted(Mode.STORAGE), demoted(Mode.FLOAT))
    )
    assert 15 < static < stored < 60
    assert left > 100
    assert evaluator.nsr(plan, EncodingConfig()).shape == (8, len(evaluator.answered.views.names))
    assert evaluator.nsr(demoted(Mode.STORAGE), EncodingConfig()).sum() < evaluator.nsr(plan, EncodingConfig()).sum()
    assert evaluator.size(demoted(Mode.STORAGE), EncodingConfig()) < evaluator.size(
        demoted(Mode.FLOAT), EncodingConfig()
    )
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
    requested = [
        (evaluator, plan, EncodingConfig()),
        (evaluator, plan, EncodingConfig(Percentile(90.0))),
        (evaluator.part((0, 1)), plan, EncodingConfig()),
    ]
    found = list(measure_errors(requested))
    alone = replace(evaluator, built=BuiltModels())
    for (own, *what), nsr in zip(requested, found, strict=True):
        again = replace(alone, answered=own.answered, measured={})
        assert np.array_equal(again.nsr(*what), nsr)


def test_what_rests_on_other_evidence_is_measured_anew(tmp_path: Path) -> None:
    save(prepare(load(MODELS / "resnet.onnx")), tmp_path / "prepared.onnx")
    bench = PreparedModel(tmp_path / "prepared.onnx", PRESETS["int8"], TARGETS["onnxruntime-cpu"])
    plan = bench.plan({})
    one, all_of_them = (bench.calibrate(plan, samples, silent) for samples in (SAMPLES[:1], SAMPLES))
    evaluator = PlanEvaluator.of(bench, MODELS / "resnet.onnx", SAMPLES, all_of_them)
    first = evaluator.sqnr(plan, EncodingConfig())
    other = replace(evaluator, statistics=one)
    found = other.sqnr(plan, EncodingConfig())
    alone = PlanEvaluator.of(bench, MODELS / "resnet.onnx", SAMPLES, one)
    assert found == alone.sqnr(plan, EncodingConfig()) != first
    assert evaluator.sqnr(plan, EncodingConfig()) == first
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
    assert 20 < evaluator.sqnr(plan, EncodingConfig()) < 60
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
    by_itself = PlanEvaluator.of(bench, MODELS / "resnet.onnx", list(stacks), together.statistics)
    nsr = by_itself.nsr(plan, EncodingConfig())
    assert together.nsr(plan, EncodingConfig()) == pytest.approx(nsr[::2] + nsr[1::2])
    assert together.trust(plan, EncodingConfig()).nsr == by_itself.trust(plan, EncodingConfig()).nsr
    assert together.sqnr(plan, EncodingConfig()) != by_itself.sqnr(plan, EncodingConfig())
    # A part of one sample of each file is none of files.
    some = together.part(range(0, 16, 2))
    assert some.sqnr(plan, EncodingConfig()) == by_itself.part(range(0, 16, 2)).sqnr(plan, EncodingConfig())


# Models that are built and run once.


def test_a_model_is_built_once_while_there_is_room(tmp_path: Path) -> None:
    built = BuiltModels(room=25)
    requested = []

    def build(path: Path) -> BuiltModel:
        requested.append(path.name)
        path.write_bytes(bytes(10))
        return BuiltModel(path, {})

    first, second = (built.model(name, tmp_path, build) for name in "ab")
    assert built.model("a", tmp_path, build) is first
    built.model("c", tmp_path, build)
    assert len(requested) == 3
    assert (first.path.exists(), second.path.exists()) == (True, False)
    assert built.model("b", tmp_path, build).path.exists()


def test_a_model_that_was_built_is_copied_where_it_is_all_in_one_file(tmp_path: Path) -> None:
    built, place = BuiltModels(), tmp_path / "copy.onnx"

    def build(path: Path, is_whole: bool = True) -> BuiltModel:
        path.write_bytes(b"model")
        return BuiltModel(path, {}, is_whole)

    assert not built.copied("a", place)
    built.model("a", tmp_path, build)
    assert built.copied("a", place)
    assert place.read_bytes() == b"model"
    built.model("b", tmp_path, partial(build, is_whole=False))
    assert not built.copied("b", place)


class Model:
    """Gives numbers, and knows on which samples it was run."""

    def __init__(self, failing: bool = False) -> None:
        self.built, self.ran, self.failing = 0, list[int](), failing

    def build(self) -> Runner:
        self.built += 1
        return self.run

    def run(self, numbers: Sequence[int]) -> Answers:
        if self.failing:
            raise DataError("the sample cannot be run")
        self.ran += numbers
        return {number: [np.full(4, number, np.float32)] for number in numbers}


def test_a_model_is_run_once_on_a_sample() -> None:
    model, candidates = Model(), BuiltModels()
    assert [float(answer[0][0]) for answer in candidates.answers("a", [3, 1], model.build)] == [3, 1]
    assert [float(answer[0][0]) for answer in candidates.answers("a", [1, 2, 3], model.build)] == [1, 2, 3]
    candidates.begin("a", [2, 3], model.build)
    assert (model.built, model.ran) == (2, [3, 1, 2])


def test_what_was_begun_is_waited_for() -> None:
    slow, quick, candidates, may_end = Model(), Model(), BuiltModels(), Event()

    def build() -> Runner:
        run = slow.build()
        return lambda numbers: run(numbers) if may_end.wait(60) else {}

    candidates.begin("slow", [1, 2], build)
    candidates.begin("slow", [1, 2], build)
    candidates.begin("quick", [1], quick.build)
    assert (slow.built, quick.built, quick.ran) == (1, 1, [])
    may_end.set()
    # Begun with fewer samples than are asked for.
    assert len(candidates.answers("quick", [1, 2], quick.build)) == len(candidates.answers("slow", [1, 2], build)) == 2
    assert (slow.built, slow.ran, quick.ran) == (1, [1, 2], [1, 2])


def test_a_run_that_fails_in_the_background_is_told_to_who_asks() -> None:
    model, candidates = Model(failing=True), BuiltModels()
    candidates.begin("a", [1], model.build)
    with pytest.raises(DataError, match="cannot be run"):
        candidates.answers("a", [1], model.build)


@pytest.mark.parametrize(("held", "ran"), [(32, [1, 2]), (31, [1, 2, 1, 2])])
def test_outputs_are_kept_while_there_is_room(held: int, ran: list[int]) -> None:
    model, candidates = Model(), BuiltModels(held=held)
    for _ in range(2):
        assert len(candidates.answers("a", [1, 2], model.build)) == 2
    assert model.ran == ran
