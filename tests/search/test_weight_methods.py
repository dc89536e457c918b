"""Error-compensating rounding is taken where it lowers noise on samples that it has not seen, and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import MODELS, Build

from onnxq.algorithms.encoders import weight_requests
from onnxq.algorithms.encoding_config import EncodingConfig
from onnxq.algorithms.gptq import Gptq
from onnxq.algorithms.range_search import pooled
from onnxq.calibration.accumulators import Request
from onnxq.calibration.collect import collect
from onnxq.calibration.data import Data
from onnxq.calibration.hessian import HessianAccumulator
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.config.effort import FAST, FULL, AccuracyEffort
from onnxq.config.presets import PRESETS, preset_named
from onnxq.config.scheme import Mode, Rule, Scheme
from onnxq.data.inputs import Sample
from onnxq.data.samples import evenly
from onnxq.errors import SchemeError
from onnxq.evaluation.agreement import compare_files
from onnxq.evaluation.goal import Goal
from onnxq.ir import as_graph, load
from onnxq.numerics.spec import Method, QuantSpec
from onnxq.pipeline.quantization import plan, quantize
from onnxq.pipeline.request import Budget
from onnxq.planning.plan import Plan
from onnxq.planning.plan_file import load_plan, save_plan
from onnxq.runtime.targets import DEFAULT_TARGET, target_named
from onnxq.search import weight_methods
from onnxq.search.cross_validation import LARGE, AlgorithmResult, CrossValidator, Finding
from onnxq.search.evaluator import PlanEvaluator
from onnxq.search.prepared_model import PreparedModel, open_prepared_model
from onnxq.search.sensitivity import QuantizerToggleSession
from onnxq.search.weight_methods import with_awq, with_gptq
from onnxq.system.resources import silent


def images(file: str, count: int) -> list[Sample]:
    arrays = np.load(MODELS / "data" / file)
    return [{name: arrays[name][index : index + 1] for name in arrays.files} for index in range(count)]


@pytest.fixture
def bench(tmp_path: Path) -> PreparedModel:
    graph = load(MODELS / "gru.onnx")
    return open_prepared_model(graph, preset_named("int4-block32"), target_named(DEFAULT_TARGET), tmp_path)


def chosen(
    bench: PreparedModel, samples: Sequence[Sample], effort: AccuracyEffort = FAST
) -> tuple[AlgorithmResult, AlgorithmResult, Plan]:
    plan = bench.plan({})
    statistics = bench.calibrate(plan, samples, silent)
    plain = AlgorithmResult(EncodingConfig(), statistics)
    validator = CrossValidator(PlanEvaluator.of(bench, bench.prepared, list(evenly(samples, 16)), statistics), samples)
    return with_gptq(validator, plan, plain, effort), plain, plan


def test_four_bits_gain_more_than_two_decibels_on_new_samples(bench: PreparedModel, tmp_path: Path) -> None:
    best, plain, plan = chosen(bench, images("calib.npz", 64))
    assert best.config.gptq is not None
    found = []
    for basis in (plain, best):
        bench.build(plan, basis.statistics, basis.config, tmp_path / "out.onnx", external_data=False)
        found.append(compare_files(bench.prepared, tmp_path / "out.onnx", Data(MODELS / "data" / "test.npz", limit=50)))
    assert found[1].worst_sqnr > found[0].worst_sqnr + 2


def test_the_gram_matrices_are_of_all_samples_in_the_end(bench: PreparedModel) -> None:
    best, _, plan = chosen(bench, images("calib.npz", 32))
    assert best.config.gptq is not None
    requests = weight_requests(plan, bench.graph, best.config.gptq)
    grams = [best.statistics.statistics[request] for request in requests]
    assert grams
    # Each image has 28 rows of pixels, and one vector for each in front of the last layer.
    assert {gram.count for gram in grams if isinstance(gram, HessianAccumulator)} == {32 * 28, 32}


def test_what_does_not_help_is_left_out(bench: PreparedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        PlanEvaluator, "nsr", lambda _, plan, config: np.full((2, 1), 0.1 if config.gptq is None else 0.11)
    )
    best, plain, _ = chosen(bench, images("calib.npz", 4))
    assert best is plain
    assert not any(isinstance(statistic, HessianAccumulator) for statistic in best.statistics.statistics.values())


@pytest.mark.parametrize(("part", "looked_at"), [(0.05, False), (0.5, True)])
def test_weights_that_make_little_of_the_noise_are_not_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: float, looked_at: bool
) -> None:
    static = open_prepared_model(
        load(MODELS / "gru.onnx"), preset_named("int8"), target_named(DEFAULT_TARGET), tmp_path
    )
    requested: list[AlgorithmResult] = []
    monkeypatch.setattr(PlanEvaluator, "nsr", lambda *_: np.full((2, 1), 0.1))
    monkeypatch.setattr(QuantizerToggleSession, "nsr_by_set", lambda *_: iter([np.full((2, 1), 0.1 * part)]))

    def first(validator: CrossValidator, plan: Plan, findings: Sequence[Finding]) -> Finding:
        requested.append(findings[1](validator.found_on[0]))
        return findings[0]

    monkeypatch.setattr(CrossValidator, "lowest_error", first)
    best, plain, _ = chosen(static, images("calib.npz", 4), FULL)
    assert best.config is plain.config
    assert best.left == ("" if looked_at else "it does not apply: weights alone make hardly any of the error")
    assert bool(requested) is looked_at


def test_rounded_weights_alone_make_a_part_of_the_noise(tmp_path: Path) -> None:
    bench = open_prepared_model(
        load(MODELS / "resnet.onnx"), preset_named("int8"), target_named(DEFAULT_TARGET), tmp_path
    )
    samples, plan = [{"image": one["image"]} for one in images("calib.npz", 8)], bench.plan({})
    evaluator = PlanEvaluator.of(bench, bench.prepared, samples, bench.calibrate(plan, samples, silent))
    weighted = {decision.node for decision in plan.decisions if decision.weights}
    alone = QuantizerToggleSession.of(evaluator, plan, EncodingConfig(), weighted)
    assert {source.is_node for source in alone.sources} == {True}
    [nsr] = alone.nsr_by_set([alone.sources], range(8))
    part = pooled(nsr) / pooled(evaluator.nsr(plan, EncodingConfig()))
    assert 0 < part < 1


def test_weights_of_more_bits_are_left_out(bench: PreparedModel) -> None:
    best, plain, _ = chosen(bench, images("calib.npz", 4), replace(FAST, gptq_bits=3))
    assert (best.config, best.left) == (
        plain.config,
        plain.unfit("no weights of 3 bits or fewer are multiplied by data that can be seen").left,
    )


def test_large_models_get_none(bench: PreparedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PreparedModel, "is_large", True)
    best, plain, _ = chosen(bench, images("calib.npz", 4))
    assert (best.config, best.left) == (plain.config, plain.unfit(LARGE).left)


def test_quantize_takes_it_for_four_bits(tmp_path: Path) -> None:
    found = [
        quantize(
            MODELS / "gru.onnx",
            images("calib.npz", 32),
            tmp_path / f"{accuracy}.onnx",
            scheme="int4-block32",
            goal=Goal(force=True),
            budget=Budget(search="off", accuracy=accuracy, latency_seconds=0),
        ).report.agreement.worst_sqnr
        for accuracy in ("off", "gptq")
    ]
    assert found[1] > found[0] + 2


def test_weights_whose_matrices_have_no_room_in_memory_are_rounded(
    bench: PreparedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested: list[set[str]] = []

    def collected(
        model: Path, samples: Sequence[Sample], requests: Sequence[Request], **more: object
    ) -> CalibrationStatistics:
        requested.append({request.tensor for request in requests})
        return collect(model, samples, requests)

    monkeypatch.setattr(weight_methods, "collect", collected)
    # The rows of images are 28 values long, what later layers multiply is 128.
    narrow, wide = 28 * 28 * 8, 128 * 128 * 8
    monkeypatch.setattr(weight_methods, "GRAM_BYTES", narrow - 1)
    best, plain, _ = chosen(bench, images("calib.npz", 32), FAST)
    assert (best.config, best.left) == (
        plain.config,
        plain.unfit("Gram matrices of the activations do not fit into memory").left,
    )
    assert not requested
    for memory, tensors in ((narrow + wide - 1, 1), (narrow + 2 * wide - 1, 2)):
        monkeypatch.setattr(weight_methods, "GRAM_BYTES", memory)
        chosen(bench, images("calib.npz", 32), FAST)
        assert {len(names) for names in requested} == {tensors}
        requested.clear()


@pytest.mark.parametrize("count", [1, 32])
def test_weights_whose_spec_asks_for_it_get_it_unasked_for_by_accuracy(count: int, tmp_path: Path) -> None:
    spec = QuantSpec("int4", (32,), method=Method.GPTQ)
    samples, evaluation_samples = images("calib.npz", count), images("test.npz", 50)
    budget, found = Budget(search="off", latency_seconds=0, accuracy="off"), {}
    for wanted in (spec, replace(spec, method=Method.MINMAX)):
        scheme, output = Scheme((Rule(Mode.WEIGHT_ONLY, weight=wanted),)), tmp_path / f"{wanted.method}.onnx"
        data = Data(samples, evaluation_samples)
        found[wanted.method] = quantize(MODELS / "gru.onnx", data, output, scheme=scheme, budget=budget).report
    assert found[Method.GPTQ].agreement.worst_sqnr > found[Method.MINMAX].agreement.worst_sqnr + 1
    plan = found[Method.GPTQ].plan
    assert plan.accuracy == ("gptq",)
    again = tmp_path / "again.onnx"
    quantize(MODELS / "gru.onnx", data, again, scheme=plan, budget=Budget(latency_seconds=0))
    assert again.read_bytes() == (tmp_path / "gptq.onnx").read_bytes()


def test_what_had_no_room_is_rounded_again(bench: PreparedModel) -> None:
    samples = images("calib.npz", 32)
    plan = bench.plan({})
    statistics = bench.calibrate(plan, samples, silent)
    validator = CrossValidator(PlanEvaluator.of(bench, bench.prepared, list(evenly(samples, 16)), statistics), samples)
    gptq = Gptq.of_samples(32)
    (first, *others) = dict.fromkeys(request.tensor for request in weight_requests(plan, bench.graph, gptq))
    assert others
    basis = weight_methods.with_seen_rows(
        validator, plan, AlgorithmResult(EncodingConfig(gptq=gptq), statistics), [first]
    )
    assert {request.tensor for request in basis.statistics.statistics if request.kind == "hessian"} == {first}


# Factors of float data are kept where some channels are far larger than others, and nowhere else.

TEXT = "(float[8,64] x) => (float[8,48] y) {n = LayerNormalization(x, s, b) a = MatMul(n, w) y = Add(a, c)}"
LOUD = np.where(np.arange(64) % 32 == 3, 30.0, 1.0).astype(np.float32)


def samples(count: int, seed: int = 0) -> list[dict[str, np.ndarray]]:
    generator = np.random.default_rng(seed)
    return [{"x": generator.normal(size=(8, 64)).astype(np.float32)} for _ in range(count)]


def opened(
    build: Build, folder: Path, norm: np.ndarray, scheme: str = "int4-block32"
) -> tuple[CrossValidator, Plan, AlgorithmResult]:
    shift = np.where(norm, 0.1, 0.0).astype(np.float32)
    graph = as_graph(build(TEXT, s=norm, b=shift, w=(64, 48), c=(48,)))
    bench, data = open_prepared_model(graph, preset_named(scheme), target_named(DEFAULT_TARGET), folder), samples(32)
    plan = bench.plan({})
    statistics = bench.calibrate(plan, data, silent)
    return (
        CrossValidator(PlanEvaluator.of(bench, bench.prepared, data[::2], statistics), data),
        plan,
        AlgorithmResult(EncodingConfig(), statistics),
    )


def nsr(validator: CrossValidator, plan: Plan, basis: AlgorithmResult) -> float:
    fresh = PlanEvaluator.of(
        validator.evaluator.bench, validator.evaluator.bench.prepared, samples(16, seed=1), basis.statistics
    )
    return float(fresh.nsr(plan, basis.config).sum())


@pytest.mark.parametrize("scheme", ["int4-block32", "int2-block16", "nf4-block64"])
def test_factors_lower_the_noise_on_new_samples(scheme: str, build: Build, tmp_path: Path) -> None:
    validator, plan, plain = opened(build, tmp_path, LOUD, scheme)
    found = with_awq(validator, plan, plain, FULL)
    assert set(found.config.awq.factors) == {"n"}
    assert nsr(validator, plan, found) < 0.85 * nsr(validator, plan, plain)


def test_errors_cancel_with_factors_too(build: Build, tmp_path: Path) -> None:
    validator, plan, plain = opened(build, tmp_path, LOUD)
    both, alone = (with_gptq(validator, plan, one, FULL) for one in (with_awq(validator, plan, plain, FULL), plain))
    assert both.config.gptq is not None
    assert nsr(validator, plan, both) < 1.02 * nsr(validator, plan, alone)


def test_channels_that_are_alike_get_none(build: Build, tmp_path: Path) -> None:
    validator, plan, plain = opened(build, tmp_path, np.ones(64, np.float32))
    assert with_awq(validator, plan, plain, FULL) is plain


def test_channels_of_which_nothing_was_seen_stay_as_they_are(build: Build, tmp_path: Path) -> None:
    norm = np.where(np.arange(64) == 5, 0.0, LOUD).astype(np.float32)
    validator, plan, plain = opened(build, tmp_path, norm)
    factors = with_awq(validator, plan, plain, FULL).config.awq.factors["n"].values
    assert factors[5] == 1
    assert factors[3] > 1


def test_data_whose_matrices_have_no_room_in_memory_get_none(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    validator, plan, plain = opened(build, tmp_path, LOUD)
    expected, room = with_awq(validator, plan, plain, FULL).config.awq.key, 64 * 64 * 8
    monkeypatch.setattr(weight_methods, "GRAM_BYTES", room - 1)
    left = with_awq(validator, plan, plain, FULL)
    assert (left.config, left.left) == (
        plain.config,
        plain.unfit("Gram matrices of the activations do not fit into memory").left,
    )
    monkeypatch.setattr(weight_methods, "GRAM_BYTES", room)
    assert with_awq(validator, plan, plain, FULL).config.awq.key == expected


@pytest.mark.parametrize(
    ("scheme", "large", "reported"),
    [
        ("int8", False, "no float data that a normalization or a Mul makes is multiplied by quantized values alone"),
        ("int4-block32", True, LARGE),
    ],
)
def test_why_no_factors_apply_is_told(
    scheme: str, large: bool, reported: str, build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    validator, plan, plain = opened(build, tmp_path, LOUD, scheme)
    monkeypatch.setitem(vars(validator.evaluator.bench), "is_large", large)
    assert with_awq(validator, plan, plain, FULL).left == f"it does not apply: {reported}"


def test_weights_of_too_many_bits_for_factors_are_told(build: Build, tmp_path: Path) -> None:
    validator, plan, plain = opened(build, tmp_path, LOUD)
    left = with_awq(validator, plan, plain, replace(FULL, gptq_bits=3)).left
    assert left.endswith("is multiplied by weights of 3 bits or fewer")


# A plan carried out again from the same samples is the same file, byte for byte.

CALIB = MODELS / "data" / "calib.npz"
FORCED = Goal(force=True)
UNTIMED = Budget(search="off", latency_seconds=0, certificate=False)


def first_and_again(
    model: object, data: object, folder: Path, scheme: str | Scheme, budget: Budget
) -> tuple[bytes, bytes]:
    budget = replace(budget, certificate=False)
    first = quantize(model, data, folder / "first.onnx", scheme=scheme, goal=FORCED, budget=budget).report
    save_plan(first.plan, folder / "plan.toml")
    replay = load_plan(folder / "plan.toml")
    assert replay == first.plan
    again = quantize(model, data, folder / "again.onnx", scheme=replay, goal=FORCED, budget=UNTIMED).report
    assert again.plan == first.plan
    assert (again.search.measured, again.encoding.gains) == (0, ())
    return (folder / "first.onnx").read_bytes(), (folder / "again.onnx").read_bytes()


@pytest.mark.parametrize("scheme", PRESETS)
@pytest.mark.parametrize("model", ["perceptron", "residual"])
def test_the_plan_of_every_preset_is_found_again(
    model: str, scheme: str, request: pytest.FixtureRequest, samples_for, tmp_path: Path
) -> None:
    given = request.getfixturevalue(model)
    first, again = first_and_again(given, samples_for(given, 6), tmp_path, scheme, UNTIMED)
    assert first == again


def test_weights_whose_errors_cancel_are_found_again(perceptron, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    few, wide = generator.standard_normal((12, 4, 6), np.float32), generator.standard_normal((6, 32), np.float32)
    samples = [{"x": one @ wide} for one in few]
    budget = Budget("off", "gptq", latency_seconds=0)
    first, again = first_and_again(perceptron, samples, tmp_path, "int4-block32", budget)
    assert first == again
    assert load_plan(tmp_path / "plan.toml").damping is not None


def test_factors_of_float_data_are_found_again(build: Build, tmp_path: Path) -> None:
    norm = np.where(np.arange(32) == 3, 30.0, 1.0).astype(np.float32)
    text = "(float[8,32] x) => (float[8,16] y) {n = LayerNormalization(x, s) y = MatMul(n, w)}"
    samples = [{"x": one} for one in np.random.default_rng(0).standard_normal((16, 8, 32), np.float32)]
    budget = Budget("off", "awq,gptq", latency_seconds=0)
    first, again = first_and_again(build(text, s=norm, w=(32, 16)), samples, tmp_path, "int2-block16", budget)
    assert first == again
    assert [one.tensor for one in load_plan(tmp_path / "plan.toml").awq] == ["n"]


def test_a_plan_that_was_searched_for_is_found_again(tmp_path: Path) -> None:
    data = Data(CALIB, limit=12)
    first, again = first_and_again(MODELS / "gru.onnx", data, tmp_path, "int8", Budget(latency_seconds=0.05))
    assert first == again


@pytest.mark.parametrize("emit", ["qdq", "ort"])
def test_what_is_emitted_is_in_the_plan(emit: str, perceptron, samples_for, tmp_path: Path) -> None:
    scheme = replace(PRESETS["int4-block32"], emit=emit)
    first, again = first_and_again(perceptron, samples_for(perceptron), tmp_path, scheme, UNTIMED)
    assert first == again


def test_ranges_of_a_method_without_a_name_are_in_the_plan(perceptron, samples_for, tmp_path: Path) -> None:
    scheme = replace(PRESETS["int8"], ranges=lambda seen, spec: (-1 / 3, 2 / 3))
    first, again = first_and_again(perceptron, samples_for(perceptron), tmp_path, scheme, UNTIMED)
    assert first == again


def test_ranges_do_not_depend_on_the_samples_of_the_replay(perceptron, samples_for, tmp_path: Path) -> None:
    scheme = replace(PRESETS["int8"], correct_biases=False)
    budget = Budget("off", "ranges", latency_seconds=0, certificate=False)
    samples = samples_for(perceptron, 8)
    plan = quantize(perceptron, samples, tmp_path / "a.onnx", scheme=scheme, goal=FORCED, budget=budget).report.plan
    louder = [{"x": 9 * samples[0]["x"]}]
    quantize(perceptron, louder, tmp_path / "b.onnx", scheme=plan, goal=FORCED, budget=UNTIMED)
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()


def test_a_first_plan_can_be_carried_out(perceptron, samples_for, tmp_path: Path) -> None:
    samples, budget = samples_for(perceptron), Budget("off", "off", latency_seconds=0, certificate=False)
    scheme = replace(PRESETS["int8"], ranges="minmax")
    quantize(perceptron, samples, tmp_path / "a.onnx", scheme=scheme, goal=FORCED, budget=budget)
    quantize(perceptron, samples, tmp_path / "b.onnx", scheme=plan(perceptron), goal=FORCED, budget=budget)
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"version": "0.0.1"}, "the plan was made by onnxq 0.0.1, expected .*, which is installed; make it again"),
        ({"steps": ("UnfuseProduct",)}, "the plan has step 'UnfuseProduct', expected .*did you mean 'UnfuseProducts'"),
        ({"model": "0" * 32}, "the plan was made for another model, whose nodes are called alike"),
    ],
)
def test_a_plan_of_something_else_is_refused(change: dict, sentence: str, perceptron, samples_for) -> None:
    made = plan(perceptron)
    with pytest.raises(SchemeError, match=sentence):
        quantize(
            perceptron, samples_for(perceptron), scheme=replace(made, preparation=replace(made.preparation, **change))
        )


def test_a_plan_that_does_not_say_what_it_is_of_is_refused(perceptron, samples_for) -> None:
    with pytest.raises(SchemeError, match=r"the plan has no \[preparation\] table"):
        quantize(perceptron, samples_for(perceptron), scheme=replace(plan(perceptron), preparation=None))


def test_a_model_with_other_weights_is_another_model(build, samples_for) -> None:
    text = "(float[4,32] x) => (float[4,32] y) { [a] y = MatMul(x, w) }"
    made, other = (build(text, w=np.full((32, 32), value, np.float32)) for value in (1.0, 2.0))
    with pytest.raises(SchemeError, match="the plan was made for another model"):
        quantize(other, samples_for(other), scheme=plan(made))
