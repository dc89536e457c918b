"""The steps of quantize(): request, prepare, calibrate, search and report."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from conftest import MODELS
from onnx import ModelProto

from onnxq.calibration.data import Data
from onnxq.calibration.methods import DEFAULT_METHODS, MinMax
from onnxq.cli import terminal
from onnxq.config.effort import EFFORTS, FULL
from onnxq.config.presets import PRESETS
from onnxq.data.dataset import evenly_spaced_indices, ranges_of
from onnxq.errors import DataError, ModelError, OutputError, SchemeError
from onnxq.evaluation.goal import Goal
from onnxq.evaluation.metrics import Metric, Top1
from onnxq.lowering import AllowedOps
from onnxq.passes.preparing.equivalence import find_culprits
from onnxq.pipeline.calibrate import CalibratedModel, accuracy_tried, calibrate_model, initial_config, range_methods
from onnxq.pipeline.prepare import (
    PreparationCheck,
    PreparedRun,
    Preparer,
    apply_own_passes,
    check_output_path,
    open_prepared,
)
from onnxq.pipeline.quantization import calibrate, plan, quantize
from onnxq.pipeline.request import Budget, QuantizationRequest
from onnxq.pipeline.samples import SplitSamples
from onnxq.pipeline.search import open_search
from onnxq.report import load_report
from onnxq.runtime.engine import OnnxRuntime
from onnxq.runtime.engines import TargetEngine
from onnxq.runtime.targets import DEFAULT_TARGET
from onnxq.search.prepared_model import PreparedModel
from onnxq.search.times import MeasuredTimes


def test_a_plan_brings_its_own_target_and_emit(residual) -> None:
    made = replace(plan(residual, target="tensorrt"), emit=AllowedOps.ORT)
    wanted = QuantizationRequest.of(made, DEFAULT_TARGET, ())
    assert (wanted.target, wanted.replay, wanted.scheme.emit) == ("tensorrt", made, AllowedOps.ORT)


@pytest.mark.parametrize(
    ("requested", "target", "measured", "written"),
    [
        (AllowedOps.FASTEST, DEFAULT_TARGET, True, AllowedOps.FASTEST),
        (AllowedOps.FASTEST, DEFAULT_TARGET, False, AllowedOps.QDQ),
        (AllowedOps.FASTEST, "openvino", True, AllowedOps.QDQ),
        (AllowedOps.QDQ, DEFAULT_TARGET, True, AllowedOps.QDQ),
        (AllowedOps.ORT, "onnxruntime-cpu-arm", False, AllowedOps.ORT),
    ],
)
def test_operators_of_the_runtimes_own_are_written_where_they_are_measured_or_asked_for(
    requested: AllowedOps, target: str, measured: bool, written: AllowedOps
) -> None:
    wanted = QuantizationRequest.of(replace(PRESETS["int8"], emit=requested), target, ())
    assert wanted.emit(measured=measured) is written


@pytest.mark.parametrize(
    ("requested", "target", "written"),
    [
        (AllowedOps.FASTEST, DEFAULT_TARGET, AllowedOps.ORT),
        (AllowedOps.FASTEST, "openvino", AllowedOps.QDQ),
        (AllowedOps.QDQ, DEFAULT_TARGET, AllowedOps.QDQ),
    ],
)
def test_a_model_with_operators_of_the_runtimes_own_gets_more(
    requested: AllowedOps, target: str, written: AllowedOps
) -> None:
    wanted = QuantizationRequest.of(replace(PRESETS["int4-block32"], emit=requested), target, ())
    assert wanted.emit(measured=False, has_own=True) is written


def test_a_plan_is_carried_out_with_the_operators_that_it_was_made_with(residual) -> None:
    made = replace(plan(residual), emit=AllowedOps.FASTEST)
    assert QuantizationRequest.of(made, DEFAULT_TARGET, ()).emit(measured=False) is AllowedOps.FASTEST


@pytest.mark.parametrize("target", ["tensorrt", "openvino", "qnn"])
def test_no_other_target_is_given_operators_of_onnxruntimes_own(target: str) -> None:
    wanted = QuantizationRequest.of(replace(PRESETS["int8"], emit=AllowedOps.ORT), target, ())
    with pytest.raises(SchemeError, match=f"only onnxruntime has, and the target is {target}; leave it out"):
        wanted.emit(measured=True)


def test_names_are_looked_up_at_the_door() -> None:
    assert QuantizationRequest.of("int8-storage", DEFAULT_TARGET, ()).scheme is PRESETS["int8-storage"]
    with pytest.raises(SchemeError, match="did you mean 'tensorrt'"):
        QuantizationRequest.of("int8", "tensort", ())


@pytest.mark.parametrize("name", list(EFFORTS))
def test_a_name_stands_for_that_effort_in_search_and_accuracy(name: str) -> None:
    budget = Budget.of(name)
    assert (budget.search, budget.accuracy, budget.effort) == (name, name, EFFORTS[name])
    assert Budget.of(budget) is budget


def test_the_limit_of_a_search_names_the_option_that_raises_it() -> None:
    budgets = Budget(time_limit=1.5), Budget(), Budget(time_limit=200), Budget("full", time_limit=200), Budget("off")
    limits = "--time-limit 1.5", "--search fast", "--search fast", "--time-limit 200", ""
    assert tuple(budget.limit for budget in budgets) == limits
    longer = "--time-limit 3", "--search full", "--search full", "--time-limit 400", ""
    assert tuple(budget.longer for budget in (*budgets, Budget("full"))) == (*longer, "")


def test_methods_may_be_given_instead_of_an_effort() -> None:
    assert Budget(accuracy="gptq").tried.methods == ("gptq",)
    assert Budget(accuracy=FULL).tried is FULL


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"latency_seconds": math.nan},
            "the time for latency in seconds is nan, expected a finite number that is not negative",
        ),
        ({"latency_seconds": -1}, "the time for latency in seconds is -1, expected"),
        ({"latency_seconds": "2"}, "the time for latency in seconds is '2' of type str, expected a number"),
        ({"search": "ful"}, "search 'ful' is not one of off, fast, full; did you mean 'full'"),
        ({"accuracy": "biases"}, "accuracy 'biases' is not one of"),
        ({"time_limit": 0}, "the time limit in seconds is 0, expected more than 0; leave it out to have no limit"),
        ({"time_limit": math.nan}, "the time limit in seconds is nan, expected more than 0"),
        ({"layers": -1}, "the number of samples for layers is -1, expected 0 or more"),
        ({"threads": 0}, "the number of threads is 0, expected more than 0"),
        ({"threads": 1.5}, "the number of threads is 1.5 of type float, expected a whole number"),
        ({"cache": 3}, "the cache is 3 of type int, expected True, False or a path"),
    ],
)
def test_what_says_nothing_is_refused(given: dict[str, object], sentence: str) -> None:
    with pytest.raises(SchemeError, match=sentence):
        Budget(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        (3, "the target is 3 of type int, expected the name of a runtime"),
        (["openvino", "qnn"], "of type list, expected the name of a runtime"),
        ("openvino+qnn", "target 'openvino[+]qnn' is not one of"),
    ],
)
def test_there_is_one_target(target: object, sentence: str) -> None:
    with pytest.raises(SchemeError, match=sentence):
        QuantizationRequest.of("int8", target, ())  # type: ignore[arg-type]


@pytest.mark.parametrize("goal", [Goal(prefer="size"), Goal(max_size=0.3)])
@pytest.mark.parametrize("scheme", ["int8", "nf4-block64"])
def test_a_small_size_needs_weights_whose_bits_can_be_chosen(goal: Goal, scheme: str) -> None:
    QuantizationRequest.of("int4-block32", DEFAULT_TARGET, ()).check(goal)
    with pytest.raises(SchemeError, match=f"chooses the bits of weights, and scheme {scheme} has other formats"):
        QuantizationRequest.of(scheme, DEFAULT_TARGET, ()).check(goal)


def test_what_is_smallest_is_found_by_a_search_alone() -> None:
    Budget().check(Goal(prefer="size"))
    Budget("off").check(Goal())
    with pytest.raises(SchemeError, match="prefer = size needs a search"):
        Budget("off").check(Goal(prefer="size"))


def test_a_search_ends_with_the_time_there_is_for_all() -> None:
    effort = Budget(time_limit=5.0).effort
    assert effort is not None
    assert effort.seconds == 5.0
    assert Budget("off", time_limit=5.0).effort is None


GRU = Path(__file__).parents[2] / "models" / "gru.onnx"


@pytest.mark.parametrize(
    "given",
    [lambda: GRU, lambda: str(GRU), lambda: onnx.load(GRU), lambda: gs.import_onnx(onnx.load(GRU))],  # noqa: TID251
    ids=["path", "text", "message", "surgeon"],
)
def test_a_model_may_be_a_file_or_in_memory(given: Callable[[], Any]) -> None:
    expected, found = apply_own_passes(GRU, ()), apply_own_passes(given(), ())
    assert [(node.op, node.name) for node in found.nodes] == [(node.op, node.name) for node in expected.nodes]


def test_passes_of_the_users_come_first(build: Callable[..., ModelProto]) -> None:
    model = build("(float[4] x) => (float[4] y) { unused = Neg(x) y = Relu(x) }")
    assert [node.op for node in apply_own_passes(model, ()).nodes] == ["Neg", "Relu"]
    assert [node.op for node in apply_own_passes(model, ("RemoveUnused",)).nodes] == ["Relu"]


def test_what_is_quantized_already_is_refused(build: Callable[..., ModelProto]) -> None:
    model = build("(float[4] x, float s) => (float[4] y) { q = QuantizeLinear(x, s) y = DequantizeLinear(q, s) }")
    with pytest.raises(ModelError, match="float"):
        apply_own_passes(model, ())


def test_plans_are_made_on_the_bench_of_what_is_wanted(tmp_path: Path) -> None:
    bench = open_prepared(
        apply_own_passes(GRU, ()),
        QuantizationRequest.of("int4-block32", "onnxruntime-cpu", ()),
        tmp_path,
        measured=False,
    )
    specs = {weight.spec.format for one in bench.plan({}).decisions for weight in one.weights}
    assert "int4" in specs


def test_an_output_is_neither_the_model_nor_the_file_of_times(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"")
    with pytest.raises(OutputError, match="is the model itself"):
        check_output_path(tmp_path / "m.onnx", tmp_path / "m.onnx", Budget(), Data([]))
    with pytest.raises(OutputError, match="times cannot be kept in the output"):
        check_output_path(tmp_path / "q.onnx", tmp_path / "m.onnx", Budget(cache=tmp_path / "q.onnx.data"), Data([]))
    (tmp_path / "c.npz").write_bytes(b"")
    with pytest.raises(OutputError, match="is read as well"):
        check_output_path(tmp_path / "c.npz", tmp_path / "m.onnx", Budget(), Data(tmp_path / "c.npz"))
    assert check_output_path(None, tmp_path / "m.onnx", Budget(), Data([])) is None


SAMPLES = [{"x": np.linspace(-1, 1, 64, dtype=np.float32)}]
GIVEN = "(float[64] x) => (float[64] y) { h = Tanh(x) y = Relu(h) }"
Build = Callable[..., ModelProto]


@pytest.fixture
def check(build: Build, tmp_path: Path) -> PreparationCheck:
    onnx.save(build(GIVEN), tmp_path / "given.onnx")
    return PreparationCheck(tmp_path / "given.onnx", SAMPLES)


@pytest.mark.parametrize(
    ("culprits", "found"),
    [("", ""), ("a", "a"), ("c", "c"), ("h", "h"), ("bg", "bg"), ("abcdefgh", "abcdefgh")],
)
def test_each_culprit_is_found_in_few_looks(culprits: str, found: str) -> None:
    looks = []

    def fault(without: frozenset[str]) -> str:
        looks.append(without)
        return "wrong" if set(culprits) - without else ""

    assert "".join(sorted(find_culprits("abcdefgh", fault(frozenset()), fault))) == found
    assert len(looks) == len(set(looks)) <= 2 + 4 * len(culprits)


def test_nothing_is_left_out_where_that_does_not_help() -> None:
    assert find_culprits("abc", "wrong", lambda without: "wrong") == {}


@pytest.mark.parametrize(
    ("prepared", "reason"),
    [
        ("(float[64] x) => (float[64] y) { h = Relu(x) y = Tanh(h) }", ""),
        ("(float[64] x) => (float[64] y) { h = Tanh(x) y = Neg(h) }", "it changes output 'y' by 2"),
        ("(float[64] x) => (float[64] y) { h = Tanh(x) y = Log(h) }", "it changes output 'y' by inf"),
    ],
    ids=["equal", "another value", "not finite"],
)
def test_a_prepared_model_that_changes_outputs_is_told(
    check: PreparationCheck, build: Build, tmp_path: Path, prepared: str, reason: str
) -> None:
    onnx.save(build(prepared), tmp_path / "prepared.onnx")
    fault = check.fault(tmp_path / "prepared.onnx")
    assert fault.startswith(reason)
    assert bool(fault) == bool(reason)


@pytest.mark.parametrize(
    ("given", "prepared", "is_wrong"),
    [
        ("int64[1] y) { y = ArgMax(x) }", "int64[1] y) { y = ArgMin(x) }", True),
        ("bool[256] y) { m = ReduceMax(x) t = Mul(w, m) y = Less(t, z) }", "bool[256] y) { y = Less(v, z) }", False),
        ("float[64] y) { a = Exp(x) y = Div(a, z) }", "float[64] y) { a = Exp(x) b = Neg(a) y = Div(b, z) }", True),
        ("float[64] y) { y = Div(x, z) }", "float[64] y) { y = Div(x, z) }", False),
        ("seq(float[64]) y) { y = SequenceConstruct(x) }", "seq(float[64]) y) { y = SequenceConstruct(x) }", False),
        (
            "seq(float[64]) y) { y = SequenceConstruct(x) }",
            "seq(float[64]) y) { a = Exp(x) y = SequenceConstruct(a) }",
            True,
        ),
        (
            "seq(float[64]) y) { y = SequenceConstruct(x) }",
            "seq(float[64]) y) { y = SequenceConstruct(x, x) }",
            True,
        ),
    ],
    ids=[
        "labels",
        "one label of many",
        "sign of infinity",
        "NaN and infinity",
        "sequence",
        "values in it",
        "its length",
    ],
)
def test_outputs_of_every_kind_are_compared(
    given: str, prepared: str, is_wrong: bool, build: Build, tmp_path: Path
) -> None:
    w = np.linspace(-1, 1, 256, dtype=np.float32)
    values = {"w": w, "v": np.where(np.arange(256) == 7, 1, w).astype(np.float32), "z": np.zeros(1, np.float32)}
    for name, text in (("given", given), ("prepared", prepared)):
        used = {one: value for one, value in values.items() if f"{one})" in text or f"({one}" in text}
        onnx.save(build(f"(float[64] x) => ({text}", **used), tmp_path / f"{name}.onnx")
    check = PreparationCheck(tmp_path / "given.onnx", SAMPLES)
    found = check.fault(tmp_path / "prepared.onnx")
    assert found.startswith("it changes output 'y' by inf" if is_wrong and "Exp(x) y = Seq" not in prepared else found)
    assert bool(found) == is_wrong


def test_random_outputs_are_not_compared(build: Build, tmp_path: Path) -> None:
    text = "(float[64] x) => (float[64] y) { r = RandomNormalLike(x) y = Add(r, x) }"
    onnx.save(build(text), tmp_path / "given.onnx")
    given = tmp_path / "given.onnx"
    assert PreparationCheck(given, SAMPLES).fault(given) == ""


def ready(model, folder: Path, scheme="int8") -> PreparedRun:
    request, engine = QuantizationRequest.of(scheme, DEFAULT_TARGET, ()), TargetEngine(OnnxRuntime())
    return Preparer(model, request, folder, None, Budget(), engine, MeasuredTimes()).prepared()


def test_what_the_scheme_names_is_not_tried_against_others(residual, tmp_path: Path) -> None:
    free = ready(residual, tmp_path)
    named = ready(residual, tmp_path, replace(PRESETS["int8"], ranges="minmax"))
    assert initial_config(free).methods == initial_config(named).methods == (MinMax(),)
    assert [("ranges" in accuracy_tried(model, Budget()).methods) for model in (free, named)] == [True, False]
    assert range_methods(free, Budget()) == DEFAULT_METHODS
    assert range_methods(named, Budget()) == (MinMax(),)


@pytest.mark.parametrize("accuracy", ["fast", "full"])
def test_of_a_large_model_only_ranges_are_tried(
    accuracy: str, residual, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PreparedModel, "is_large", True)
    model = ready(residual, tmp_path)
    assert accuracy_tried(model, Budget(accuracy=accuracy)).methods == ("ranges",)


def calibrated(
    model: PreparedRun, data: Data, goal: Goal | None = None, budget: Budget | None = None
) -> CalibratedModel:
    samples = SplitSamples.of(model, data, goal or Goal())
    return calibrate_model(model, samples, DEFAULT_METHODS, budget or Budget())


def parts_of(seen: CalibratedModel) -> tuple[int, int, int]:
    return len(seen.samples.fit), len(seen.samples.holdout), len(seen.statistics.samples)


def test_validation_samples_set_no_ranges(residual, samples_for, tmp_path: Path) -> None:
    samples = samples_for(residual, 6)
    seen = calibrated(ready(residual, tmp_path), Data(samples[:2], samples[2:]))
    assert parts_of(seen) == (2, 4, 2)


def test_equal_samples_count_once_but_for_a_metric(residual, samples_for, tmp_path: Path) -> None:
    samples, model, by_metric = samples_for(residual, 3), ready(residual, tmp_path), Metric("mine", lambda *_: 1.0)
    cases = (None, Goal()), (samples[:2] * 2, Goal()), (None, Goal(metric=by_metric))
    parts = [parts_of(calibrated(model, Data(samples * 4, others), goal))[:2] for others, goal in cases]
    assert parts == [(3, 3), (3, 2), (12, 12)]


def test_some_samples_are_kept_for_judging_unless_a_metric_counts_on_their_order(
    residual, samples_for, tmp_path: Path
) -> None:
    data, model = Data(samples_for(residual, 9)), ready(residual, tmp_path)
    parted, whole = (
        parts_of(calibrated(model, data, goal))
        for goal in (Goal(), Goal(metric=Metric("mine", lambda outputs, samples: 1.0)))
    )
    assert parted == (7, 2, 7)
    assert whole == (9, 9, 9)


@pytest.mark.parametrize(("given", "parts"), [(9, (7, 2)), (400, (300, 100)), (7, (7, 7))])
def test_of_a_metric_that_knows_samples_all_that_are_kept_apart_judge(
    given: int, parts: tuple[int, int], residual, samples_for, tmp_path: Path
) -> None:
    metric, samples = Metric("top1", Top1(np.zeros(given, np.int64))), samples_for(residual, 3) * 134
    for others in (None, samples[:5]):
        data = Data(samples[:given], others)
        seen = calibrated(ready(residual, tmp_path), data, Goal(metric=metric))
        assert parts_of(seen)[:2] == (parts if others is None else (given, 5))


@pytest.mark.parametrize(("accuracy", "evaluation_samples"), [("fast", 16), ("full", 25)])
def test_more_of_many_samples_judge_with_all_effort(
    accuracy: str, evaluation_samples: int, residual, samples_for, tmp_path: Path
) -> None:
    budget, data = Budget(accuracy=accuracy), Data(samples_for(residual, 134))
    carried = replace(plan(residual), thorough=accuracy == "full")
    for name, scheme in (("first", "int8"), ("replay", carried)):
        (tmp_path / name).mkdir()
        model = ready(residual, tmp_path / name, scheme)
        seen = calibrated(model, data, budget=budget)
        assert len(open_search(seen, Goal(), budget).workshop.reference.samples) == evaluation_samples


CALIB = MODELS / "data" / "calib.npz"
UNSEARCHED = Budget(search="off", latency_seconds=0)


def test_statistics_collected_once_serve_several_calls() -> None:
    statistics = calibrate(MODELS / "resnet.onnx", Data(CALIB, limit=16))
    assert len(statistics.samples) == 16
    data, budget = Data(CALIB, limit=16, statistics=statistics), Budget(latency_seconds=0, search="off")
    reused, again = (quantize(MODELS / "resnet.onnx", data, budget=budget).report for _ in range(2))
    assert reused.agreement == again.agreement
    # The statistics are of all samples, those included that judge.
    assert reused.samples.split is not None
    assert (reused.samples.split.samples, reused.samples.split.seen) == (4, 4)
    assert reused.agreement.worst_sqnr > 20


def test_statistics_of_another_model_or_without_what_is_needed_are_refused() -> None:
    resnet, options = MODELS / "resnet.onnx", {"goal": Goal(force=True), "budget": UNSEARCHED}
    others = calibrate(MODELS / "vit.onnx", Data(CALIB, limit=2))
    with pytest.raises(DataError, match="given statistics are of another model, expected those of this one"):
        quantize(resnet, Data(CALIB, limit=4, statistics=others), **options)
    scheme = replace(PRESETS["int8"], ranges="minmax")
    extremes = Data(CALIB, limit=4, statistics=calibrate(resnet, Data(CALIB, limit=4), scheme=scheme))
    with pytest.raises(DataError, match=r"given statistics lack the histogram of '.*', expected what this plan"):
        quantize(resnet, extremes, **options)
    assert quantize(resnet, extremes, scheme=scheme, **options).report.samples.calibrated == 4


def test_statistics_serve_a_plan_that_needs_a_later_opset(build, samples_for) -> None:
    model = build("(float[4,64] x) => (float[4,64] y) { h = MatMul(x, w) y = Relu(h) }", opset=13, w=(64, 64))
    samples = samples_for(model)
    seen = calibrate(model, samples)
    quantized = quantize(
        model,
        Data(samples, statistics=seen),
        scheme="int4-block32",
        goal=Goal(force=True),
        budget=Budget(search="off", latency_seconds=0),
    )
    assert quantized.graph.opset >= 21


UNTIMED = Budget("off", "off", latency_seconds=0)


def test_a_report_tells_where_everything_comes_from_and_is_read_again(tmp_path: Path) -> None:
    output = tmp_path / "out.onnx"
    data = Data(MODELS / "data" / "calib.npz", limit=8)
    report = quantize(
        MODELS / "gru.onnx", data, output, budget=Budget(search="off", accuracy="off", latency_seconds=0)
    ).report
    assert report.files.output_digest == hashlib.sha256(output.read_bytes()).hexdigest()
    assert report.files.model_digest == hashlib.sha256((MODELS / "gru.onnx").read_bytes()).hexdigest()
    assert [stage.name for stage in report.run.stages] == ["prepare", "calibrate", "choose", "verify", "report"]
    assert {one.tensor for one in report.encoding.tensors} <= {one.tensor for one in report.plan.activations}
    assert len(report.encoding.weights) == sum(len(one.weights) for one in report.plan.decisions) > 0
    assert report.accuracy.wanted == 20.0
    report.save(tmp_path / "report.json")
    assert load_report(tmp_path / "report.json") == report


@pytest.mark.parametrize(("accuracy", "reported"), [("fast", True), ("off", False)])
def test_methods_are_skipped_if_the_model_is_accurate_without(accuracy: str, reported: bool, tmp_path: Path) -> None:
    budget = Budget(search="off", accuracy=accuracy, latency_seconds=0)
    data = Data(MODELS / "data" / "calib.npz", limit=8)
    report = quantize(MODELS / "resnet.onnx", data, tmp_path / "q.onnx", goal=5, budget=budget).report
    assert (report.encoding.skipped_at_sqnr is not None) == reported


@pytest.mark.parametrize("wanted", [0, 2])
def test_layers_and_kernels_are_looked_at_where_they_are_wanted(wanted: int, tmp_path: Path) -> None:
    budget = Budget(search="off", accuracy="off", latency_seconds=0, layers=wanted)
    data = Data(MODELS / "data" / "calib.npz", limit=4)
    report = quantize(MODELS / "resnet.onnx", data, tmp_path / "q.onnx", budget=budget).report
    report.save(tmp_path / "report.json")
    assert load_report(tmp_path / "report.json") == report
    layers, ran = report.accuracy.layers, report.performance.ran
    if not wanted:
        assert (layers, ran) == (None, {})
        return
    assert layers is not None
    assert layers.samples == wanted
    assert layers.layers[-1].tensor == "logits"
    convolutions = [one.node for one in report.plan.decisions if one.op_type == "Conv"]
    assert {ran[name] for name in convolutions} == {"QLinearConv"}


@pytest.mark.parametrize("apart", [False, True])
def test_the_samples_that_judge_and_are_worst_are_told_by_their_numbers(
    apart: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], build: Callable[..., ModelProto]
) -> None:
    random = np.random.default_rng(0)
    values = random.uniform(-1, 1, (40, 1, 64)).astype(np.float32)
    # What is far out of range is cut off where it did not set the range.
    values[35] *= 30
    np.savez(tmp_path / "all.npz", x=values)
    calibration = tmp_path / "all.npz"
    if apart:
        np.savez(tmp_path / "quiet.npz", x=random.uniform(-1, 1, (16, 1, 64)).astype(np.float32))
        calibration = tmp_path / "quiet.npz"
    data = Data(calibration, validation=tmp_path / "all.npz" if apart else None)
    model = build("(float[1,64] x) => (float[1,64] y) { y = MatMul(x, w) }", w=(64, 64))
    budget = Budget(search="off", accuracy="off", latency_seconds=0, layers=2)
    report = quantize(model, data, goal=Goal(force=True), budget=budget).report
    assert report.samples.split.apart == apart
    holdout = [*range(40)] if apart else evenly_spaced_indices(40, 10)
    assert report.samples.split.places == ranges_of(holdout)
    worst = report.agreement.outputs[0].worst[0]
    assert (worst.sample, worst.file) == (35, str(tmp_path / "all.npz"))
    assert {one.sample for layer in report.accuracy.layers.layers for one in layer.worst} == {0, 39}
    report.save(tmp_path / "report.json")
    assert load_report(tmp_path / "report.json") == report
    terminal.print_report(report, every=True)
    reported = " ".join(capsys.readouterr().err.replace("│", "").split())
    assert f"{len(holdout)} held-out samples" in reported
    assert "35, all.npz" in reported


def test_of_how_many_files_the_samples_are_is_told(tmp_path: Path, build: Callable[..., ModelProto]) -> None:
    (tmp_path / "stacks").mkdir()
    random = np.random.default_rng(0)
    for file in range(32):
        np.savez(tmp_path / "stacks" / f"{file}.npz", x=random.uniform(-1, 1, (3, 64)).astype(np.float32))
    model = build("(float[N,64] x) => (float[N,64] y) { y = MatMul(x, w) }", w=(64, 64))
    budget = Budget(search="off", accuracy="off", latency_seconds=0)
    data = Data(tmp_path / "stacks", batch=1)
    report = quantize(model, data, goal=Goal(force=True), budget=budget).report
    assert (report.samples.split.samples, report.samples.split.files, report.agreement.files) == (24, 8, 8)
    assert report.verdict.endswith("on 24 held-out samples of 8 files")
    assert report.agreement.outputs[0].bound < report.agreement.outputs[0].sqnr
    report.save(tmp_path / "report.json")
    assert load_report(tmp_path / "report.json") == report


@pytest.mark.parametrize("by_labels", [True, False])
@pytest.mark.parametrize("statistics", [True, False])
def test_a_metric_is_of_samples_that_chose_nothing_where_it_knows_them_and_else_tells_that_they_did(
    by_labels: bool, statistics: bool, tmp_path: Path, build: Callable[..., ModelProto]
) -> None:
    random = np.random.default_rng(0)
    values, others = random.uniform(-1, 1, (2, 40, 1, 64)).astype(np.float32)
    model = build("(float[1,64] x) => (float[1,64] y) { y = MatMul(x, w) }", w=(64, 64))
    samples, known = [{"x": one} for one in values], None
    if statistics:
        known = calibrate(model, [{"x": one} for one in others])
    top1 = Metric("top1", Top1(np.zeros(40, np.int64)))
    metric = top1 if by_labels else Metric("same", lambda outputs, samples: float(len(outputs) > 0))
    data, goal = Data(samples, statistics=known), Goal(metric=metric, max_drop=0.1)
    report = quantize(model, data, goal=goal, budget=Budget(accuracy="off", latency_seconds=0)).report
    holdout = report.samples.split
    assert (holdout.samples, holdout.seen) == ((10, 0) if by_labels else (40, 40))
    assert (holdout.places == ranges_of(evenly_spaced_indices(40, 10))) == by_labels
    assert (report.accuracy.scores.chosen_by is not None) == by_labels
    report.save(tmp_path / "report.json")
    assert load_report(tmp_path / "report.json") == report
