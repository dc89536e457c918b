"""Error-compensating rounding is taken where it lowers noise on samples that it has not seen, and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from onnxq.algorithms.encoders import weight_requests
from onnxq.algorithms.encoding_config import Recipe
from onnxq.algorithms.gptq import Compensation
from onnxq.algorithms.range_search import pooled
from onnxq.calibration.accumulators import Request
from onnxq.calibration.collect import collect
from onnxq.calibration.data import Data
from onnxq.calibration.hessian import Gram
from onnxq.calibration.statistics import Evidence
from onnxq.calibration.workers import Threads
from onnxq.config.effort import FAST, FULL, Accuracy
from onnxq.config.presets import preset_named
from onnxq.config.scheme import Mode, Rule, Scheme
from onnxq.data.inputs import Sample
from onnxq.data.samples import evenly
from onnxq.evaluation.agreement import compare_files
from onnxq.evaluation.goal import Goal
from onnxq.ir import load
from onnxq.numerics.spec import Method, Spec
from onnxq.pipeline import quantize
from onnxq.planning.plan import Plan
from onnxq.runtime.targets import DEFAULT_TARGET, target_named
from onnxq.search import weight_methods
from onnxq.search.cross_validation import LARGE, AlgorithmResult, CrossValidator, Finding
from onnxq.search.evaluator import PlanEvaluator
from onnxq.search.prepared_model import PreparedModel, open_prepared_model
from onnxq.search.sensitivity import QuantizerToggleSession
from onnxq.search.weight_methods import gram_bytes, with_gptq
from onnxq.steps.request import Budget
from onnxq.system.resources import silent

MODELS = Path(__file__).parents[2] / "models"


def images(file: str, count: int) -> list[Sample]:
    arrays = np.load(MODELS / "data" / file)
    return [{name: arrays[name][index : index + 1] for name in arrays.files} for index in range(count)]


@pytest.fixture
def bench(tmp_path: Path) -> PreparedModel:
    graph = load(MODELS / "gru.onnx")
    return open_prepared_model(graph, preset_named("int4-block32"), target_named(DEFAULT_TARGET), tmp_path)


def chosen(
    bench: PreparedModel, samples: Sequence[Sample], effort: Accuracy = FAST
) -> tuple[AlgorithmResult, AlgorithmResult, Plan]:
    plan = bench.plan({})
    evidence = bench.calibrate(plan, samples, silent)
    plain = AlgorithmResult(Recipe(), evidence)
    validator = CrossValidator(PlanEvaluator.of(bench, bench.prepared, list(evenly(samples, 16)), evidence), samples)
    return with_gptq(validator, plan, plain, effort), plain, plan


def test_four_bits_gain_more_than_two_decibels_on_new_samples(bench: PreparedModel, tmp_path: Path) -> None:
    best, plain, plan = chosen(bench, images("calib.npz", 64))
    assert best.recipe.compensation is not None
    found = []
    for basis in (plain, best):
        bench.build(plan, basis.evidence, basis.recipe, tmp_path / "out.onnx", external_data=False)
        found.append(compare_files(bench.prepared, tmp_path / "out.onnx", Data(MODELS / "data" / "test.npz", limit=50)))
    assert found[1].worst_sqnr > found[0].worst_sqnr + 2


def test_the_gram_matrices_are_of_all_samples_in_the_end(bench: PreparedModel) -> None:
    best, _, plan = chosen(bench, images("calib.npz", 32))
    assert best.recipe.compensation is not None
    requests = weight_requests(plan, bench.graph, best.recipe.compensation)
    grams = [best.evidence.statistics[request] for request in requests]
    assert grams
    # Each image has 28 rows of pixels, and one vector for each in front of the last layer.
    assert {gram.count for gram in grams if isinstance(gram, Gram)} == {32 * 28, 32}


def test_what_does_not_help_is_left_out(bench: PreparedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        PlanEvaluator, "noise", lambda _, plan, recipe: np.full((2, 1), 0.1 if recipe.compensation is None else 0.11)
    )
    best, plain, _ = chosen(bench, images("calib.npz", 4))
    assert best is plain
    assert not any(isinstance(statistic, Gram) for statistic in best.evidence.statistics.values())


@pytest.mark.parametrize(("part", "looked_at"), [(0.05, False), (0.5, True)])
def test_weights_that_make_little_of_the_noise_are_not_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: float, looked_at: bool
) -> None:
    static = open_prepared_model(
        load(MODELS / "gru.onnx"), preset_named("int8"), target_named(DEFAULT_TARGET), tmp_path
    )
    asked: list[AlgorithmResult] = []
    monkeypatch.setattr(PlanEvaluator, "noise", lambda *_: np.full((2, 1), 0.1))
    monkeypatch.setattr(QuantizerToggleSession, "noises", lambda *_: iter([np.full((2, 1), 0.1 * part)]))

    def first(validator: CrossValidator, plan: Plan, findings: Sequence[Finding]) -> Finding:
        asked.append(findings[1](validator.found_on[0]))
        return findings[0]

    monkeypatch.setattr(CrossValidator, "lowest_error", first)
    best, plain, _ = chosen(static, images("calib.npz", 4), FULL)
    assert best.recipe is plain.recipe
    assert best.left == ("" if looked_at else "it does not apply: weights alone make hardly any of the noise")
    assert bool(asked) is looked_at


def test_rounded_weights_alone_make_a_part_of_the_noise(tmp_path: Path) -> None:
    bench = open_prepared_model(
        load(MODELS / "resnet.onnx"), preset_named("int8"), target_named(DEFAULT_TARGET), tmp_path
    )
    samples, plan = [{"image": one["image"]} for one in images("calib.npz", 8)], bench.plan({})
    evaluator = PlanEvaluator.of(bench, bench.prepared, samples, bench.calibrate(plan, samples, silent))
    weighted = {decision.node for decision in plan.decisions if decision.weights}
    alone = QuantizerToggleSession.of(evaluator, plan, Recipe(), weighted)
    assert {source.is_node for source in alone.sources} == {True}
    [noise] = alone.noises([alone.sources], range(8))
    part = pooled(noise) / pooled(evaluator.noise(plan, Recipe()))
    assert 0 < part < 1


def test_weights_of_more_bits_are_left_out(bench: PreparedModel) -> None:
    best, plain, _ = chosen(bench, images("calib.npz", 4), replace(FAST, compensated_bits=3))
    assert (best.recipe, best.left) == (
        plain.recipe,
        plain.unfit("no weights of 3 bits or fewer are multiplied by data that can be seen").left,
    )


def test_large_models_get_none(bench: PreparedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PreparedModel, "is_large", True)
    best, plain, _ = chosen(bench, images("calib.npz", 4))
    assert (best.recipe, best.left) == (plain.recipe, plain.unfit(LARGE).left)


def test_quantize_takes_it_for_four_bits(tmp_path: Path) -> None:
    found = [
        quantize(
            MODELS / "gru.onnx",
            images("calib.npz", 32),
            tmp_path / f"{accuracy}.onnx",
            scheme="int4-block32",
            goal=Goal(force=True),
            budget=Budget(search="off", accuracy=accuracy, latency=0),
        ).report.agreement.worst_sqnr
        for accuracy in ("off", "compensation")
    ]
    assert found[1] > found[0] + 2


def test_weights_whose_matrices_have_no_room_in_memory_are_rounded(
    bench: PreparedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[set[str], object]] = []

    def collected(model: Path, samples: Sequence[Sample], requests: Sequence[Request], **more: object) -> Evidence:
        asked.append(({request.tensor for request in requests}, more["workers"]))
        return collect(model, samples, requests)

    monkeypatch.setattr(weight_methods, "collect", collected)
    # The rows of images are 28 values long, what later layers multiply is 128.
    narrow, wide = 28 * 28 * 8, 128 * 128 * 8
    best, plain, _ = chosen(bench, images("calib.npz", 32), replace(FAST, memory=9 * narrow - 1))
    assert (best.recipe, best.left) == (
        plain.recipe,
        plain.unfit("Gram matrices of the data have no room in memory").left,
    )
    assert not asked
    for memory, tensors in ((9 * (narrow + wide) - 1, 1), (9 * (narrow + 2 * wide) - 1, 2)):
        chosen(bench, images("calib.npz", 32), replace(FAST, memory=memory))
        assert {len(names) for names, _ in asked} == {tensors}
        assert all(isinstance(workers, Threads) for _, workers in asked)
        asked.clear()


@pytest.mark.parametrize("count", [1, 32])
def test_weights_whose_spec_asks_for_it_get_it_unasked_for_by_accuracy(count: int, tmp_path: Path) -> None:
    spec = Spec("int4", (32,), method=Method.COMPENSATED)
    samples, judges = images("calib.npz", count), images("test.npz", 50)
    budget, found = Budget(search="off", latency=0, accuracy="off"), {}
    for wanted in (spec, replace(spec, method=Method.MINMAX)):
        scheme, output = Scheme((Rule(Mode.WEIGHT_ONLY, weight=wanted),)), tmp_path / f"{wanted.method}.onnx"
        data = Data(samples, judges)
        found[wanted.method] = quantize(MODELS / "gru.onnx", data, output, scheme=scheme, budget=budget).report
    assert found[Method.COMPENSATED].agreement.worst_sqnr > found[Method.MINMAX].agreement.worst_sqnr + 1
    plan = found[Method.COMPENSATED].plan
    assert plan.accuracy == ("compensation",)
    again = tmp_path / "again.onnx"
    quantize(MODELS / "gru.onnx", data, again, scheme=plan, budget=Budget(latency=0))
    assert again.read_bytes() == (tmp_path / "compensated.onnx").read_bytes()


def test_what_had_no_room_is_rounded_again(bench: PreparedModel) -> None:
    samples = images("calib.npz", 32)
    plan = bench.plan({})
    evidence = bench.calibrate(plan, samples, silent)
    validator = CrossValidator(PlanEvaluator.of(bench, bench.prepared, list(evenly(samples, 16)), evidence), samples)
    compensation = Compensation.of_samples(32)
    (first, *others) = dict.fromkeys(request.tensor for request in weight_requests(plan, bench.graph, compensation))
    assert others
    basis = weight_methods.with_seen_rows(
        validator, plan, AlgorithmResult(Recipe(compensation=compensation), evidence), [first]
    )
    assert {request.tensor for request in basis.evidence.statistics if request.kind == "gram"} == {first}


def test_hessians_are_given_their_part_of_the_memory() -> None:
    assert gram_bytes(FAST) == 1 << 30
    assert gram_bytes(replace(FAST, memory=9 * 10**6)) == 10**6
    assert gram_bytes(replace(FAST, memory=10**12)) == 1 << 30
