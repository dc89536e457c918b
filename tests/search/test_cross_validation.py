"""What is found on some samples is judged by others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from conftest import MODELS, Build

from onnxq.algorithms.encoding_config import DEFAULT_CONFIG, EncodingConfig
from onnxq.algorithms.range_search import NsrBySample, pooled
from onnxq.calibration.instrumented import OpenedModel
from onnxq.calibration.methods import DEFAULT_METHODS, Percentile
from onnxq.calibration.provenance import sample_digest
from onnxq.config.effort import FAST, FULL, AccuracyEffort
from onnxq.config.presets import PRESETS, preset_named
from onnxq.data.inputs import Input
from onnxq.data.samples import evenly, open_samples
from onnxq.ir import as_graph, load
from onnxq.planning.plan import Plan
from onnxq.runtime.targets import TARGETS, target_named
from onnxq.search.activation_methods import with_equalization
from onnxq.search.cross_validation import (
    ALL,
    AlgorithmResult,
    CrossValidator,
    Finding,
    Groups,
    observe_groups,
    split_groups,
)
from onnxq.search.evaluator import PlanEvaluator
from onnxq.search.prepared_model import PreparedModel, open_prepared_model
from onnxq.system.resources import silent

SAMPLES = [{"image": image[None]} for image in np.load(MODELS / "data" / "calib.npz")["image"][:24]]
COARSE, PLAIN, FINE = (EncodingConfig(Percentile(percent)) for percent in (50.0, 90.0, 99.99))


@pytest.fixture(scope="module")
def validator(tmp_path_factory: pytest.TempPathFactory) -> CrossValidator:
    folder = tmp_path_factory.mktemp("bench")
    bench = open_prepared_model(load(MODELS / "resnet.onnx"), PRESETS["int8"], TARGETS["onnxruntime-cpu"], folder)
    statistics = bench.calibrate(bench.plan({}), SAMPLES, silent)
    return CrossValidator(
        PlanEvaluator.of(bench, MODELS / "resnet.onnx", list(evenly(SAMPLES, 7)), statistics), SAMPLES
    )


@pytest.fixture(scope="module")
def plan(validator: CrossValidator) -> Plan:
    return validator.evaluator.bench.plan({})


def always(validator: CrossValidator, config: EncodingConfig) -> Callable[[Groups], AlgorithmResult]:
    return lambda _: AlgorithmResult(config, validator.evaluator.statistics)


@pytest.mark.parametrize(("count", "holdout"), [(2, 2), (7, 3), (24, 7), (300, 16), (1000, 16)])
def test_groups_share_no_sample_and_hold_all_or_enough(validator: CrossValidator, count: int, holdout: int) -> None:
    samples = [{"x": np.array(index)} for index in range(count)]
    evaluation_samples = tuple(evenly(samples, holdout))
    evaluator = replace(
        validator.evaluator,
        answered=replace(validator.evaluator.answered, samples=evaluation_samples, expected=((),) * holdout),
    )
    groups = [[int(sample["x"]) for sample in group] for group in CrossValidator(evaluator, samples).groups]
    assert len(set().union(*groups)) == sum(map(len, groups)) == min(count, 512)
    assert {index for group in groups[:2] for index in group} == {int(sample["x"]) for sample in evaluation_samples}
    assert [len(group) for group in groups[:2]] == [-(-holdout // 2), holdout // 2]


def test_groups_share_no_file_where_there_are_several(tmp_path: Path) -> None:
    for number in range(12):
        np.savez(tmp_path / f"{number}.npz", x=np.full((5, 1), number, np.float32))
    samples = open_samples(tmp_path, [Input("x", np.dtype(np.float32), ("N", 1))], batch=1)
    files = [{float(sample["x"].item()) for sample in group} for group in split_groups(samples, 16)]
    assert sum(map(len, files)) == len(set().union(*files)) == 12
    assert [len(group) for group in split_groups(samples, 16)] == [15, 15, 30]


def test_nothing_is_judged_by_what_it_was_found_on(validator: CrossValidator, plan: Plan) -> None:
    requested: list[Groups] = []

    def found(groups: Groups) -> AlgorithmResult:
        requested.append(groups)
        return AlgorithmResult(FINE, validator.evaluator.statistics)

    validator.kept(plan, AlgorithmResult(PLAIN, validator.evaluator.statistics), [found])
    assert set(requested) == {*validator.found_on, ALL}
    assert [0 in groups for groups in validator.found_on] == [False, True]
    assert [1 in groups for groups in validator.found_on] == [True, False]


def test_some_samples_of_groups_are_spread_over_them(validator: CrossValidator) -> None:
    places = sorted((*validator.groups[0].places, *validator.groups[2].places))
    assert validator.of((0, 2), 100).places == places
    few = validator.of((0, 2), 4).places
    assert len(few) == 4
    assert (few[0], few[-1]) == (places[0], places[-1])


def test_the_best_is_kept_where_it_is_worth_it(validator: CrossValidator, plan: Plan) -> None:
    basis = AlgorithmResult(PLAIN, validator.evaluator.statistics)
    found = validator.kept(plan, basis, [always(validator, COARSE), always(validator, FINE)])
    assert found.config is FINE
    assert validator.kept(plan, basis, [always(validator, COARSE)]) is basis
    assert validator.kept(plan, basis, [always(validator, PLAIN)]) is basis


def test_the_first_of_equals_is_the_quietest(validator: CrossValidator, plan: Plan) -> None:
    one, other = always(validator, FINE), always(validator, FINE)
    assert validator.lowest_error(plan, [one, other]) is one


def test_the_second_fold_finds_nothing_where_the_first_has_no_hope(validator: CrossValidator, plan: Plan) -> None:
    requested: list[Groups] = []

    def found(groups: Groups) -> AlgorithmResult:
        requested.append(groups)
        return AlgorithmResult(COARSE, validator.evaluator.statistics)

    basis = AlgorithmResult(FINE, validator.evaluator.statistics)
    assert validator.kept(plan, basis, [found]) is basis
    assert set(requested) == {validator.found_on[0]}


@pytest.mark.parametrize(
    ("taken", "pays", "folds"),
    [
        ([0.5, 0.4, 0.6, 0.5, 0.4, 0.6, 0.5], True, {0, 1}),
        # All is gained by one sample.
        ([0.0, 0.0, 0.0, 0.9, -0.1, 0.1, 0.0], False, {0, 1}),
        # The one fold gains what the other loses, or nearly so.
        ([0.3, -0.2, 0.3, -0.2, 0.3, -0.4, 0.3], False, {0, 1}),
        # The loss of the first fold is hardly ever made up for, unlike that of the second.
        ([-0.2, 0.3, -0.2, 0.3, -0.2, 0.3, -0.2], False, {0}),
        ([0.9, -0.2, 0.9, -0.2, 0.9, -0.2, 0.9], True, {0, 1}),
    ],
)
def test_what_pays_for_sure_does_so_on_most_samples(
    validator: CrossValidator,
    plan: Plan,
    monkeypatch: pytest.MonkeyPatch,
    taken: list[float],
    pays: bool,
    folds: set[int],
) -> None:
    other, finding = always(validator, PLAIN), always(validator, FINE)
    nsr = {other: np.ones((7, 1)), finding: 1 - np.array(taken)[:, None]}
    seen: set[int] = set()

    def each(self: CrossValidator, plan: Plan, requested: Iterable[tuple[int, Finding]]) -> Iterator[NsrBySample]:
        for fold, one in requested:
            seen.add(fold)
            yield nsr[one][fold::2]

    monkeypatch.setattr(CrossValidator, "_seen", each)
    assert validator.improves_significantly(plan, finding, other) is pays
    assert seen == folds


@pytest.mark.parametrize(
    ("taken", "requested"), [([0.5, 0.4, 0.6, 0.5], {0}), ([0.9, 0.0, 0.1, 0.2], {0, 1}), ([-0.9, -0.8, 0.1, 0.2], {0})]
)
def test_the_second_fold_finds_nothing_where_the_first_leaves_no_doubt(
    validator: CrossValidator, plan: Plan, monkeypatch: pytest.MonkeyPatch, taken: list[float], requested: set[int]
) -> None:
    other, finding = always(validator, PLAIN), always(validator, FINE)
    nsr: dict[Finding, NsrBySample] = {other: np.ones((4, 1)), finding: 1 - np.array(taken)[:, None]}
    seen: set[int] = set()

    def each(self: CrossValidator, plan: Plan, requested: Iterable[tuple[int, Finding]]) -> Iterator[NsrBySample]:
        for fold, one in requested:
            seen.add(fold)
            yield nsr[one]

    monkeypatch.setattr(CrossValidator, "_seen", each)
    assert validator.improves(plan, finding, other) is (sum(taken) > 0)
    assert seen == requested


@pytest.mark.parametrize("count", [2, 9, 24])
def test_ranges_are_held_against_samples_that_they_are_not_made_of(
    validator: CrossValidator, plan: Plan, count: int
) -> None:
    found = CrossValidator(validator.evaluator.part(range(min(count, 7))), SAMPLES[:count]).held_out_evaluator(plan)
    held_out = found.answered.samples
    assert held_out
    assert not {sample_digest(sample) for sample in held_out} & set(found.statistics.samples)
    assert pooled(found.nsr(plan, FINE)) < pooled(found.nsr(plan, COARSE))


def test_samples_that_are_held_out_are_compared_as_the_others_are(build: Build, tmp_path: Path) -> None:
    """Of the prepared model more is decided, as two equal products have become one."""
    model = build(
        """(float[4,64] x) => (float[4,64] y, z, e) {
            a = MatMul(x, w) b = MatMul(x, w) m = Greater(a, half) n = Less(b, two) i = And(m, n) j = NonZero(i)
            t = Transpose(j) z = GatherND(a, t) e = Exp(z) r = Relu(a) y = MatMul(r, u)
        }""",
        w=(64, 64),
        u=(64, 64),
        half=np.float32([0.5]),
        two=np.float32([2]),
    )
    onnx.save(model, tmp_path / "model.onnx")
    samples = [{"x": one} for one in np.random.default_rng(0).standard_normal((24, 4, 64)).astype(np.float32)]
    bench = open_prepared_model(load(tmp_path / "model.onnx"), PRESETS["int8"], TARGETS["onnxruntime-cpu"], tmp_path)
    plan = bench.plan({})
    evaluator = PlanEvaluator.of(bench, tmp_path / "model.onnx", samples[:8], bench.calibrate(plan, samples, silent))
    held_out = CrossValidator(evaluator, samples).held_out_evaluator(plan)
    assert held_out.answered.views == evaluator.answered.views
    assert held_out.nsr(plan, FINE).shape == (16, len(evaluator.answered.views.names))


# What methods of accuracy ask of groups of samples is known from the run in which these were calibrated.

TEXT = "(float[1,6,8,8] x) => (float[1,3,8,8] y) {s = Sqrt(x) a = Conv(s, w) r = Relu(a) y = Conv(r, u)}"
COUNT = 21
# With all effort more of them judge than with little.
MANY = 84


@pytest.fixture
def model(build: Build) -> onnx.ModelProto:
    return build(TEXT, w=(8, 6, 1, 1), u=(3, 8, 1, 1))


def bench_of(model: onnx.ModelProto, folder: Path) -> PreparedModel:
    folder.mkdir()
    return open_prepared_model(as_graph(model), preset_named("int8"), target_named("onnxruntime-cpu"), folder)


@pytest.mark.parametrize(("accuracy", "count"), [(FAST, COUNT), (FULL, MANY)])
def test_nothing_runs_again_and_nothing_is_other_than_where_it_does(
    model: onnx.ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accuracy: AccuracyEffort, count: int
) -> None:
    generator = np.random.default_rng(1)
    samples = [{"x": generator.uniform(0, 1, (1, 6, 8, 8)).astype(np.float32)} for _ in range(count)]
    found = []
    for name in ("apart", "grouped"):
        bench = bench_of(model, tmp_path / name)
        plan = bench.plan({})
        if name == "grouped":
            observe_groups(bench, plan, samples, accuracy, DEFAULT_METHODS, silent)
            for method in ("observe", "observe_apart"):
                monkeypatch.setattr(OpenedModel, method, None)
        statistics = bench.calibrate(plan, samples, silent)
        evaluator = PlanEvaluator.of(
            bench, bench.prepared, list(evenly(samples, accuracy.evaluation_samples(count))), statistics
        )
        validator = CrossValidator(evaluator, samples)
        held_out = validator.held_out_evaluator(plan).statistics
        equalized = with_equalization(validator, plan, AlgorithmResult(DEFAULT_CONFIG, statistics), accuracy)
        found.append((statistics, held_out, equalized.config.key, [len(validator.groups[group]) for group in ALL]))
    assert found[0] == found[1]


def test_more_samples_than_are_judged_by_are_calibrated_as_usual(model: onnx.ModelProto, tmp_path: Path) -> None:
    bench = bench_of(model, tmp_path / "bench")
    samples = [{"x": np.zeros((1, 6, 8, 8), np.float32)}] * 513
    observe_groups(bench, bench.plan({}), samples, FAST, DEFAULT_METHODS, silent)
    statistics = bench.calibrate(bench.plan({}), samples[:2], silent)
    validator = CrossValidator(PlanEvaluator.of(bench, bench.prepared, samples[:2], statistics), samples)
    assert not bench.grouped.parts(validator.groups, ())
