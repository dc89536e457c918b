"""A faster plan is taken where training makes it faithful, and otherwise what was there is built again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from conftest import Build

from onnxq.calibration.data import Data
from onnxq.errors import SchemeError
from onnxq.evaluation.agreement import compare_files
from onnxq.evaluation.goal import Goal
from onnxq.evaluation.latency import Latency
from onnxq.pipeline import quantize
from onnxq.runtime.targets import DEFAULT_TARGET
from onnxq.steps.calibrate import CalibratedModel, calibrate_model, range_methods
from onnxq.steps.prepare import PreparedRun, prepare_model
from onnxq.steps.request import Budget, QuantizationRequest
from onnxq.steps.search import SearchedModel, search_for_plan
from onnxq.training import pipeline as module
from onnxq.training.pipeline import quantize_and_train, search_and_train
from onnxq.training.settings import Training
from training.modules import MODELS, images

LAYERS = "(float[N,32] x) => (float[N,16] y) { h = MatMul(x, w)  r = Relu(h)  y = MatMul(r, v) }"
WEIGHTS = {"w": (32, 32), "v": (32, 16)}
SAMPLES = images(32, (1, 32))
QUICK = Budget("off", "off", latency_seconds=0)
SHORT = Training(blocks="no", epochs=2)


@dataclass(frozen=True)
class Steps:
    """A model on its way, and the plan of a preset that is as fast as is said."""

    ready: PreparedRun
    seen: CalibratedModel
    first: SearchedModel

    @classmethod
    def of(cls, build: Build, folder: Path, preset: str, speed: float) -> Steps:
        folder.mkdir()
        ready = prepare_model(
            build(LAYERS, **WEIGHTS), QuantizationRequest.of(preset, DEFAULT_TARGET, ()), folder, None, QUICK
        )
        seen = calibrate_model(ready, Data.of(SAMPLES), range_methods(ready, QUICK), Goal(), QUICK)
        return cls(ready, seen, as_fast(search_for_plan(ready, seen, Goal(), QUICK), speed))


def as_fast(found: SearchedModel, speed: float) -> SearchedModel:
    verification = replace(found.chosen.verification, latency=Latency(speed, 1.0, 1, 9))
    return replace(found, chosen=replace(found.chosen, verification=verification))


def found_faster(
    build: Build, folder: Path, monkeypatch: pytest.MonkeyPatch, goal: Goal, speeds: tuple[float, float]
) -> tuple[Steps, bytes, SearchedModel]:
    """Let a plan in bytes meet one in 2 bits that is as fast as is said before and after training."""
    other = Steps.of(build, folder / "other", "int2-block16", speeds[0])
    steps = Steps.of(build, folder / "own", "int8-storage", 1.0)
    trained = module.train_chosen

    monkeypatch.setattr(module, "search_for_plan", lambda *arguments: other.first)
    monkeypatch.setattr(module, "train_chosen", lambda *arguments: as_fast(trained(*arguments), speeds[1]))
    staged = steps.ready.files.staged.read_bytes()
    return steps, staged, search_and_train(steps.ready, steps.seen, steps.first, goal, QUICK, SHORT)


def test_a_faster_plan_that_training_makes_faithful_is_taken(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, _, best = found_faster(build, tmp_path, monkeypatch, Goal(min_sqnr=1.0), (2.0, 1.9))
    assert best.chosen.outcome.plan.scheme == "int2-block16"
    assert best.chosen.gains[-1].method == "training"
    files = steps.ready.files
    found = compare_files(files.reference, files.staged, list(steps.seen.judged))
    assert found.worst_sqnr == pytest.approx(best.chosen.verification.agreement.worst_sqnr)


@pytest.mark.parametrize(
    ("decibels", "speeds", "told"),
    [
        (1.0, (0.9, 2.0), "no faster plan is close enough to the goal for training"),
        (1.0, (2.0, 0.9), "a trained plan measured no faster, so it was not taken"),
        (35.0, (2.0, 2.0), "dB after training, which misses the goal, so it was not taken"),
    ],
    ids=["slower", "slower after training", "not faithful"],
)
def test_what_was_there_is_built_again_otherwise(
    decibels: float,
    speeds: tuple[float, float],
    told: str,
    build: Build,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps, staged, best = found_faster(build, tmp_path, monkeypatch, Goal(min_sqnr=decibels), speeds)
    assert best.chosen is steps.first.chosen
    assert told in best.doubts[-1]
    assert steps.ready.files.staged.read_bytes() == staged


@pytest.mark.parametrize(
    ("gained", "aims"),
    [(1.5, [18.0, 18.5]), (0.2, [18.0]), (5.0, [18.0])],
    ids=["some", "hardly anything", "too little all the same"],
)
def test_the_next_plan_lacks_no_more_than_training_gave_back(
    gained: float, aims: list[float], build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    best, first, asked = attempts(build, tmp_path, monkeypatch, gained, faithful=False)
    assert asked == aims
    assert best.chosen is first.chosen


@pytest.mark.parametrize(("gained", "aims"), [(2.2, [18.0]), (6.0, [18.0, 14.0])], ids=["hardly more", "more"])
def test_the_next_plan_lacks_what_training_gave_back_of_one_that_is_faithful(
    gained: float, aims: list[float], build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    best, first, asked = attempts(build, tmp_path, monkeypatch, gained, faithful=True)
    assert asked == aims
    assert best.chosen is not first.chosen
    assert best.doubts == ()


def test_where_a_plan_is_no_faster_the_next_lacks_twice_as_much(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    best, first, asked = attempts(build, tmp_path, monkeypatch, 2.2, faithful=True, speed=0.9)
    assert asked == [18.0, 16.0]
    assert best.chosen is first.chosen


def attempts(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gained: float, *, faithful: bool, speed: float = 2.0
) -> tuple[SearchedModel, SearchedModel, list[float]]:
    """Return what is taken where training gives back so much, what was there, and the decibels that were asked for."""
    steps = Steps.of(build, tmp_path / "own", "int8-storage", 1.0)
    other = Steps.of(build, tmp_path / "other", "int2-block16", speed)
    asked, decibels = list[float](), {id(other.first.chosen): 12.0, id(steps.first.chosen): 40.0}

    def searched(model: PreparedRun, seen: CalibratedModel, goal: Goal, budget: Budget) -> SearchedModel:
        asked.append(goal.min_sqnr)
        return other.first

    def learned(model: PreparedRun, seen: CalibratedModel, less: SearchedModel, *others: object) -> SearchedModel:
        return as_fast(less, 2.0)

    monkeypatch.setattr(module, "search_for_plan", searched)
    monkeypatch.setattr(module, "train_chosen", learned)
    monkeypatch.setattr(module, "_meets_goal", lambda *arguments: faithful)
    monkeypatch.setattr(module, "_decibels", lambda found: decibels.get(id(found), 12.0 + gained))
    return search_and_train(steps.ready, steps.seen, steps.first, Goal(20.0), QUICK, SHORT), steps.first, asked


def test_a_whole_run_is_faithful_whatever_was_found(tmp_path: Path) -> None:
    model, samples, output = MODELS / "mobilenet.onnx", MODELS / "data" / "calib.npz", tmp_path / "q.onnx"
    data, budget = Data(samples, limit=24), Budget("fast", "off", latency_seconds=0.1, max_candidates=3)
    training = Training(blocks="no", minutes=0.02)
    done = quantize_and_train(model, data, output, goal=20.0, budget=budget, training=training)
    assert done.report.agreement.worst_sqnr >= 20
    assert done.report.files.output == str(output)
    gains = [gain.method for gain in done.report.encoding.gains]
    why = [doubt for doubt in done.report.samples.warnings if "plan" in doubt]
    assert ("training" in gains) != bool(why)


@pytest.mark.parametrize(
    ("budget", "told"),
    [
        (Budget("off"), "needs a search and time for latency"),
        (Budget(latency_seconds=0), "needs a search and time for latency"),
        (Budget(time_limit=60), "training has its own time limit in minutes beside that of the budget"),
    ],
)
def test_what_leaves_no_faster_plan_to_be_found_is_told(budget: Budget, told: str, build: Build) -> None:
    with pytest.raises(SchemeError, match=told):
        quantize_and_train(build(LAYERS, **WEIGHTS), SAMPLES, budget=budget)


def test_a_plan_is_carried_out_as_it_is(build: Build) -> None:
    model = build(LAYERS, **WEIGHTS)
    plan = quantize(model, SAMPLES, scheme="int8-storage", budget=QUICK).report.plan
    with pytest.raises(SchemeError, match="train it with onnxq train --plan"):
        quantize_and_train(model, SAMPLES, scheme=QuantizationRequest.of(plan, DEFAULT_TARGET, ()))
