"""train() and quantize_and_train() write what is better than without training, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from conftest import MODELS, Build
from runtime.elsewhere import offer_elsewhere

from onnxq.calibration.data import Data
from onnxq.errors import DataError, OnnxqError, SchemeError
from onnxq.evaluation.agreement import compare_files
from onnxq.evaluation.goal import Goal
from onnxq.evaluation.latency import Latency
from onnxq.evaluation.metrics import Metric
from onnxq.evaluation.verification import Verification, Verifier
from onnxq.pipeline.calibrate import CalibratedModel, calibrate_model, range_methods
from onnxq.pipeline.prepare import PreparedRun, Preparer
from onnxq.pipeline.quantization import Quantized, quantize
from onnxq.pipeline.request import Budget, QuantizationRequest
from onnxq.pipeline.samples import SplitSamples
from onnxq.pipeline.search import SearchedModel, search_for_plan
from onnxq.report import AccuracyError
from onnxq.runtime.engine import OnnxRuntime
from onnxq.runtime.engines import TargetEngine
from onnxq.runtime.targets import DEFAULT_TARGET
from onnxq.search.results import SearchResult
from onnxq.search.times import MeasuredTimes
from onnxq.training import pipeline as module
from onnxq.training.pipeline import quantize_and_train, search_and_train, train
from onnxq.training.settings import Training
from training.modules import images

LAYERS = "(float[N,32] x) => (float[N,16] y) { h = MatMul(x, w)  r = Relu(h)  y = MatMul(r, v) }"


WEIGHTS = {"w": (32, 32), "v": (32, 16)}


SAMPLES = images(48, (1, 32))


SQUARE = {"w": (32, 32)}


PRODUCT = "(float[N,32] x) => (float[N,32] y) { y = MatMul(x, w) }"


LOSSES = """
def nothing(outputs, expected, inputs):
    return outputs["y"].sum() * float("nan")

def steep(outputs, expected, inputs):
    return (0 * outputs["y"]).sqrt().sum()

def wrong(outputs, expected, inputs):
    return (outputs["y"].argmax(-1) != expected["y"].argmax(-1)).float().mean()
"""


QUICK, FORCE = Budget("off", "off", latency_seconds=0), Goal(force=True)


def trained(model: onnx.ModelProto, training: Training, output: Path | None = None, **more: Any) -> Quantized:
    """Train a model whose weights become 4 bits, unless another scheme is given."""
    options = {"scheme": "int4-block32", "goal": FORCE, "budget": QUICK, **more}
    return train(model, options.pop("samples", SAMPLES), output, training=training, **options)


def test_the_written_model_is_better_than_without_training(build: Build, tmp_path: Path) -> None:
    # With fewer samples, weights in 2 bits learn these more than the model.
    model, samples, scheme = build(LAYERS, **WEIGHTS), images(192, (1, 32)), "int2-block16"
    without = quantize(model, samples, scheme=scheme, goal=FORCE, budget=QUICK)
    output = tmp_path / "q.onnx"
    done = trained(model, Training(epochs=40, rate=3e-3), output, samples=samples, scheme=scheme)
    assert done.report.agreement.worst_sqnr > without.report.agreement.worst_sqnr + 1
    assert done.report.encoding.gains[-1].method == "training"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["q.onnx"]
    onnx.checker.check_model(output)


def test_what_misses_the_goal_is_not_written(build: Build, tmp_path: Path) -> None:
    model, output = build(LAYERS, **WEIGHTS), tmp_path / "q.onnx"
    with pytest.raises(AccuracyError):
        trained(model, Training(epochs=1), output, scheme="int2-block16", goal=99)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "weights", "more", "reported"),
    [
        (PRODUCT, SQUARE, {"labels": np.zeros(5, np.int64)},
         r"labels .* expected one whole number for each of 48 samples"),
        (PRODUCT, SQUARE, {"labels": np.full(48, 99)}, r"labels lie in 99\.\.99, expected 0\.\.31"),
        (PRODUCT, SQUARE, {"labels": np.zeros(48)}, "labels .* are float64 of shape"),
        (PRODUCT, SQUARE, {"loss": "wrong"}, "has no gradient, expected one"),
        ("(float16[N,32] x) => (float16[N,32] y) { y = MatMul(x, w) }", {"w": np.ones((32, 32), np.float16)}, {},
         "tensor 'w' is float16, expected float32 to train in; convert the model, or take a scheme of integers"),
        ("(float[N,32] x) => (float[N,32] y) { y = Relu(x) }", {}, {}, "there is nothing to quantize in the model"),
        ("(float[N,32] x) => (int64[N,1] y) { h = MatMul(x, w)  y = ArgMax<axis = 1>(h) }", SQUARE, {},
         "no output of the model is a float that is not zero, so there is nothing to learn from"),
    ],
    ids=["count of labels", "range of labels", "type of labels", "flat loss", "float16", "no weights", "no floats"],
)  # fmt: skip
def test_what_cannot_be_trained_is_told_in_a_sentence(
    text: str, weights: dict[str, Any], more: dict[str, Any], reported: str, build: Build, tmp_path: Path
) -> None:
    model = build(text, **weights)
    half = model.graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT16
    samples = [{"x": one["x"].astype(np.float16 if half else np.float32)} for one in SAMPLES]
    output = tmp_path / "q.onnx"
    with pytest.raises(OnnxqError, match=reported) as raised:
        trained(model, training_of(more, tmp_path), output, samples=samples, goal=20.0)
    assert "\n" not in str(raised.value)
    assert not output.exists()


def training_of(more: dict[str, Any], folder: Path) -> Training:
    """Return a training by labels or a loss, whose file is put into a folder."""
    if "labels" in more:
        np.save(folder / "labels.npy", more["labels"])
        return Training(labels=folder / "labels.npy", epochs=1)
    (folder / "losses.py").write_text(LOSSES)
    return Training(loss=f"{folder / 'losses.py'}:{more['loss']}" if more else "", epochs=1)


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize(
    ("more", "training", "reported"),
    [
        ({"loss": "nothing"}, {}, "losses.py:nothing' or its gradient is not finite at the first step"),
        ({"loss": "steep"}, {}, "losses.py:steep' or its gradient is not finite at the first step"),
        ({}, {"rate": 1e30, "blocks": "no"}, r"not finite at the first step; .* give a smaller rate than 1e\+30"),
    ],
)
def test_a_first_step_without_a_number_is_named_and_nothing_written(
    more: dict[str, str], training: dict[str, Any], reported: str, build: Build, tmp_path: Path
) -> None:
    output = tmp_path / "q.onnx"
    with pytest.raises(DataError, match=reported):
        trained(build(PRODUCT, **SQUARE), replace(training_of(more, tmp_path), **training), output)
    assert not output.exists()


def test_where_no_gradient_passes_what_is_behind_learns(build: Build) -> None:
    text = "(float[N,32] x) => (float[N,32] y) { h = MatMul(x, w)  [hard] m = Hardmax(h)  y = MatMul(m, v) }"
    done = trained(build(text, w=(32, 32), v=(32, 32)), Training(epochs=4), scheme="int2-block32")
    assert done.report.samples.warnings == ("no gradient passes hard, which torch has no function for here",)
    assert done.report.encoding.gains[-1].kept


def test_half_floats_that_a_scheme_widens_are_trained(build: Build) -> None:
    model = build("(float16[N,32] x) => (float16[N,32] y) { y = MatMul(x, w) }", w=np.eye(32, dtype=np.float16))
    samples = [{"x": sample["x"].astype(np.float16)} for sample in SAMPLES]
    done = trained(model, Training(epochs=1), samples=samples, scheme="int8")
    assert done.report.encoding.gains[-1].method == "training"


def test_what_judges_say_is_worse_is_not_taken(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    def score(outputs: list[dict[str, Any]], samples: list[dict[str, Any]]) -> float:
        score.calls += 1  # type: ignore[attr-defined]
        return -float(score.calls)  # type: ignore[attr-defined]

    score.calls = 0  # type: ignore[attr-defined]
    goal = Goal(metric=Metric("falls", score), force=True)
    done = trained(build(LAYERS, **WEIGHTS), Training(epochs=2, rate=1e-2), scheme="int2-block16", goal=goal)
    assert done.report.encoding.gains[-1].left == "worse on the holdout"
    assert done.report.accuracy.scores is not None
    assert done.report.accuracy.scores.candidate == -2


@pytest.mark.parametrize(
    ("nsr", "lacking", "taken"),
    [
        ([2.0, 1.0], [0.0, 0.0], True),
        ([1.0, 2.0], [0.0, 0.0], False),
        ([2.0, 1.0], [0.5, 0.0], False),
        ([2.0, 1.0], [0.5, 0.2], True),
    ],
    ids=["quieter", "louder", "quieter, and below the goal for it", "quieter, below the goal before too"],
)
def test_the_noise_of_the_samples_that_judge_decides_and_the_goal_stays_reached(
    nsr: list[float], lacking: list[float], taken: bool, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    audible, lacks = iter(nsr), iter(lacking)
    monkeypatch.setattr(module, "_nsr", lambda verifier, candidate: next(audible))
    monkeypatch.setattr(SearchResult, "lacks", lambda found, goal: next(lacks, 0.0))
    model = build(LAYERS, **WEIGHTS)
    gain = trained(model, Training(epochs=2), scheme="int2-block16").report.encoding.gains[-1]
    assert (gain.left == "") == taken
    assert bool(gain.kept) == taken


def test_both_models_are_timed_by_the_engine_that_they_are_for(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    offer_elsewhere(monkeypatch)
    latencies = []

    def verified(verifier: Verifier, candidate: Path, look: int) -> Verification:
        found = verify(verifier, candidate, look)
        latencies.append(found.latency)
        return found

    verify = Verifier.verified
    monkeypatch.setattr(Verifier, "verified", verified)
    plan = QuantizationRequest.of("int4-block32", "openvino", ())
    budget = replace(QUICK, latency_seconds=0.05, engine="elsewhere")
    trained(build(LAYERS, **WEIGHTS), Training(epochs=2), scheme=plan, budget=budget)
    assert [latency and latency.engine for latency in latencies] == ["elsewhere 1"] * 2


def test_a_model_for_what_does_not_run_here_is_not_timed(build: Build) -> None:
    wanted = QuantizationRequest.of("int2-block16", "onnxruntime-cpu-arm", ())
    budget = replace(QUICK, latency_seconds=0.05)
    done = trained(build(LAYERS, **WEIGHTS), Training(epochs=2), scheme=wanted, budget=budget)
    assert done.report.encoding.gains[-1].kept
    assert done.report.performance.latency is None
    assert "onnxruntime-cpu-arm" in done.report.performance.unmeasured


FASTER_SAMPLES = images(32, (1, 32))


SHORT = Training(blocks="no", epochs=2)


@dataclass(frozen=True)
class Steps:
    """A model on its way, and the plan of a preset for it."""

    ready: PreparedRun
    first: SearchedModel

    @classmethod
    def of(cls, build: Build, folder: Path, preset: str) -> Steps:
        request = QuantizationRequest.of(preset, DEFAULT_TARGET, ())
        engine, times = TargetEngine(OnnxRuntime(threads=QUICK.threads)), MeasuredTimes()
        ready = Preparer(build(LAYERS, **WEIGHTS), request, folder, None, QUICK, engine, times).prepared()
        samples = SplitSamples.of(ready, Data.of(FASTER_SAMPLES), Goal())
        seen = calibrate_model(ready, samples, range_methods(ready, QUICK), QUICK)
        return cls(ready, search_for_plan(seen, Goal(), QUICK))


@pytest.fixture(scope="module")
def own(build: Build, tmp_path_factory: pytest.TempPathFactory) -> Steps:
    """A plan in bytes, as fast as the float model."""
    steps = Steps.of(build, tmp_path_factory.mktemp("own"), "int8-storage")
    return replace(steps, first=as_fast(steps.first, 1.0))


@pytest.fixture(scope="module")
def other(build: Build, tmp_path_factory: pytest.TempPathFactory) -> Steps:
    """A plan in 2 bits."""
    return Steps.of(build, tmp_path_factory.mktemp("other"), "int2-block16")


def as_fast(found: SearchedModel, speed: float) -> SearchedModel:
    verification = replace(found.result.verification, latency=Latency(speed, 1.0, 1, 9))
    return replace(found, result=replace(found.result, verification=verification))


def found_faster(
    own: Steps, other: Steps, monkeypatch: pytest.MonkeyPatch, goal: Goal, speeds: tuple[float, float]
) -> SearchedModel:
    """Let a plan in bytes meet one in 2 bits that is as fast as is said before and after training."""
    trained = module.train_chosen
    less = replace(as_fast(other.first, speeds[0]), seen=own.first.seen)
    monkeypatch.setattr(module, "search_for_plan", lambda *arguments: less)
    monkeypatch.setattr(module, "train_chosen", lambda *arguments: as_fast(trained(*arguments), speeds[1]))
    return search_and_train(own.first, goal, QUICK, SHORT)


def test_a_faster_plan_that_training_makes_faithful_is_taken(
    own: Steps, other: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = found_faster(own, other, monkeypatch, Goal(min_sqnr=1.0), (2.0, 1.9))
    assert best.result.candidate.plan.scheme == "int2-block16"
    assert best.result.trail.gains[-1].method == "training"
    found = compare_files(own.ready.reference, best.result.candidate.path, list(own.first.seen.samples.holdout))
    assert found.worst_sqnr == pytest.approx(best.result.verification.agreement.worst_sqnr)


@pytest.mark.parametrize(
    ("decibels", "speeds", "reported"),
    [
        (1.0, (0.9, 2.0), "no faster plan is close enough to the goal for training"),
        (1.0, (2.0, 0.9), "a trained plan measured no faster, so it was not taken"),
        (35.0, (2.0, 2.0), "dB after training, which misses the goal, so it was not taken"),
    ],
    ids=["slower", "slower after training", "not faithful"],
)
def test_what_was_there_stays_otherwise(
    decibels: float,
    speeds: tuple[float, float],
    reported: str,
    own: Steps,
    other: Steps,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built = own.first.result.candidate.path.read_bytes()
    best = found_faster(own, other, monkeypatch, Goal(min_sqnr=decibels), speeds)
    assert best.result is own.first.result
    assert reported in best.warnings[-1]
    assert best.result.candidate.path.read_bytes() == built


@pytest.mark.parametrize(
    ("gained", "accurate", "speed", "aims", "is_taken"),
    [
        # Where it misses the goal, the next plan lacks no more than training gave back.
        (1.5, False, 2.0, [18.0, 18.5], False),
        (0.2, False, 2.0, [18.0], False),
        (5.0, False, 2.0, [18.0], False),
        # Where it is faithful, the next plan lacks what training gave back, if that is more.
        (2.2, True, 2.0, [18.0], True),
        (6.0, True, 2.0, [18.0, 14.0], True),
        # Where it is no faster, the next plan lacks twice as much.
        (2.2, True, 0.9, [18.0, 16.0], False),
    ],
)
def test_what_training_gave_back_decides_how_much_the_next_plan_lacks(
    gained: float,
    accurate: bool,
    speed: float,
    aims: list[float],
    is_taken: bool,
    own: Steps,
    other: Steps,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    less = as_fast(other.first, speed)
    requested, decibels = list[float](), {id(less.result): 12.0, id(own.first.result): 40.0}

    def searched(seen: CalibratedModel, goal: Goal, budget: Budget) -> SearchedModel:
        requested.append(goal.min_sqnr)
        return less

    monkeypatch.setattr(module, "search_for_plan", searched)
    monkeypatch.setattr(module, "train_chosen", lambda less, *others: as_fast(less, 2.0))
    monkeypatch.setattr(module, "_meets_goal", lambda *arguments: accurate)
    monkeypatch.setattr(module, "_decibels", lambda found: decibels.get(id(found), 12.0 + gained))
    best = search_and_train(own.first, Goal(20.0), QUICK, SHORT)
    assert requested == aims
    assert (best.result is not own.first.result) == is_taken
    assert not (is_taken and best.warnings)


def test_a_whole_run_is_faithful_whatever_was_found(tmp_path: Path) -> None:
    model, samples, output = MODELS / "mobilenet.onnx", MODELS / "data" / "calib.npz", tmp_path / "q.onnx"
    data, budget = Data(samples, limit=24), Budget("fast", "off", latency_seconds=0.1)
    training = Training(blocks="no", minutes=0.02)
    done = quantize_and_train(model, data, output, goal=20.0, budget=budget, training=training)
    assert done.report.agreement.worst_sqnr >= 20
    assert done.report.files.output == str(output)
    gains = [gain.method for gain in done.report.encoding.gains]
    why = [doubt for doubt in done.report.samples.warnings if "plan" in doubt]
    assert ("training" in gains) != bool(why)


@pytest.mark.parametrize(
    ("budget", "reported"),
    [
        (Budget("off"), "needs a search and time for latency"),
        (Budget(latency_seconds=0), "needs a search and time for latency"),
        (Budget(time_limit=60), "training has its own limit, --train MINUTES; leave out --time-limit"),
    ],
)
def test_what_leaves_no_faster_plan_to_be_found_is_told(budget: Budget, reported: str, build: Build) -> None:
    with pytest.raises(SchemeError, match=reported):
        quantize_and_train(build(LAYERS, **WEIGHTS), FASTER_SAMPLES, budget=budget)


def test_a_plan_is_carried_out_as_it_is(build: Build) -> None:
    model = build(LAYERS, **WEIGHTS)
    plan = quantize(model, FASTER_SAMPLES, scheme="int8-storage", budget=QUICK).report.plan
    with pytest.raises(SchemeError, match="train it with onnxq train --plan"):
        quantize_and_train(model, FASTER_SAMPLES, scheme=QuantizationRequest.of(plan, DEFAULT_TARGET, ()))


@pytest.mark.parametrize(
    ("given", "reported"),
    [
        (
            {"learn": ("weight",)},
            "'weight' is not one of weights, biases, scales, zero-points; did you mean 'weights'?",
        ),
        ({"learn": ()}, "nothing would be trained; name one or more"),
        ({"loss": "a.py:b", "labels": "l.npy"}, "a loss function is given no labels"),
        ({"epochs": 0}, "epochs: 0, expected a whole number above 0"),
        ({"batch": -1}, "the batch: -1, expected"),
        ({"rate": 0.0}, "the rate is 0.0, expected a finite number above 0"),
        ({"rate": float("nan")}, "the rate is nan"),
        ({"minutes": 0.0}, "the time in minutes is 0.0, expected a finite number above 0"),
        ({"blocks": "onyl"}, "blocks 'onyl' is not one of no, first, only; did you mean 'only'?"),
        (
            {"blocks": "only", "labels": "l.npy"},
            "blocks are trained towards the float model, not towards labels or a loss",
        ),
        ({"device": 0}, "the device is 0 of type int"),
        ({"labels": 3}, "the labels is 3 of type int"),
    ],
)
def test_what_contradicts_itself_is_told(given: dict[str, Any], reported: str) -> None:
    with pytest.raises(SchemeError) as error:
        Training(**given)
    assert reported in str(error.value)
