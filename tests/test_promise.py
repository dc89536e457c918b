"""The promise by construction: whatever fails or is slower, what is written is verified, or nothing is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from onnxq import Budget, Call, Goal, Graph, Match, New, Operators, RewriteRule, quantize
from onnxq.config.scheme import Mode
from onnxq.errors import ModelError, RunError, SchemeError, collect_failures, tolerate
from onnxq.evaluation.latency import Latency
from onnxq.evaluation.verification import Timer
from onnxq.ir import Tensor
from onnxq.passes.prepare.fold_shapes import FoldShapes
from onnxq.report import FidelityError, Report
from onnxq.search import attempts, choosers
from onnxq.search.trials import Trials

Quick = Callable[..., Report]


@pytest.fixture
def quick(perceptron: ModelProto, samples_for: Callable[..., list[Any]], tmp_path: Path) -> Quick:
    """Return what quantizes a small model in a second, and returns the report."""

    def run(**budget: Any) -> Report:
        given = {"latency": 0.02, **budget}
        return quantize(perceptron, samples_for(perceptron, 16), tmp_path / "q.onnx", budget=Budget(**given)).report

    return run


def fail(*_: object, **__: object) -> None:
    raise ZeroDivisionError("a fault of ours")


@pytest.mark.parametrize("error", [SchemeError("the user's"), ModelError("the user's"), MemoryError()])
def test_what_the_user_has_to_mend_is_raised(error: Exception) -> None:
    with collect_failures() as failures, pytest.raises(type(error)), tolerate("a part"):
        raise error
    assert failures == []


def test_outside_of_a_run_errors_are_raised() -> None:
    with pytest.raises(ZeroDivisionError), tolerate("a part"):
        fail()


@pytest.mark.parametrize(
    ("place", "part"),
    [
        ("onnxq.search.frontier.find_fastest", "the search for the fastest plan"),
        ("onnxq.steps.steps.units", "the look at unused units"),
        ("onnxq.steps.reporting._ran", "the look at kernels"),
        ("onnxq.search.choosing.Chooser.affordable", "the search for factors of channels that cost no time"),
        ("onnxq.search.choosers.CHOOSERS", "accuracy method 'bias'"),
    ],
)
def test_a_part_that_fails_is_left_out_and_reported(
    quick: Quick, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, part: str
) -> None:
    if place.endswith("CHOOSERS"):
        monkeypatch.setattr(place, MappingProxyType({**choosers.CHOOSERS, "bias": fail}))
    else:
        monkeypatch.setattr(place, fail)
    report = quick(layers=1, accuracy="bias")
    assert report.run.failures == (f"{part} failed and was left out: ZeroDivisionError: a fault of ours",)
    assert (tmp_path / "q.onnx").exists()


def test_a_search_that_fails_ends_in_stored_weights(
    quick: Quick, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = attempts.choose

    def once(*given: Any, is_stored: bool = False) -> Any:
        return choose(*given, is_stored=True) if is_stored else fail()

    monkeypatch.setattr(attempts, "choose", once)
    report = quick()
    assert report.run.failures == ("the search failed and was left out: ZeroDivisionError: a fault of ours",)
    assert {one.mode for one in report.plan.decisions if one.weights} == {Mode.STORAGE}
    assert any("the search for something faster failed" in one.reason for one in report.plan.decisions)
    assert (tmp_path / "q.onnx").exists()


def test_models_that_do_not_run_are_no_end(quick: Quick, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Trials._run

    def of_floats(trials: Trials, plan: Any, *given: Any) -> Any:
        if plan.count(Mode.STATIC):
            raise RunError("the sample cannot be run")
        return run(trials, plan, *given)

    monkeypatch.setattr(Trials, "_run", of_floats)
    report = quick()
    assert report.plan.count(Mode.STATIC) == 0
    assert report.plan.count(Mode.STORAGE) == 2
    assert all("RunError" in failure for failure in report.run.failures)
    assert report.run.failures


@pytest.mark.parametrize("speed", [0.63, 0.95])
def test_what_is_slower_in_every_form_is_refused(
    quick: Quick, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, speed: float
) -> None:
    slow = Latency(1.0, 1 / speed, 1, 10, 6, (speed - 0.01, speed + 0.01))
    monkeypatch.setattr(Timer, "latency", lambda *_, **__: slow)
    with pytest.raises(
        FidelityError, match=f"runs {speed}x as fast .* expected not to be slower than float"
    ) as refused:
        quick()
    assert not (tmp_path / "q.onnx").exists()
    assert {one.mode for one in refused.value.report.plan.decisions if one.weights} == {Mode.STORAGE}


def test_what_a_busy_machine_does_not_tell_is_accepted_for_its_kernels(
    quick: Quick, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Timer, "latency", lambda *_, **__: Latency(1.0, 1.1, 1, 10, 6, (0.7, 1.2)))
    report = quick()
    assert report.plan.count(Mode.STORAGE) == 2
    assert report.performance.kernels.computes_in_float


@dataclass(frozen=True)
class NegateRelu(RewriteRule):
    """A rule that is wrong."""

    def pattern(self, op: Operators) -> Call | tuple[Call, ...]:
        return op.Relu(op.any("x"))

    def replacement(self, new: New, found: Match) -> Tensor | Sequence[Tensor]:
        return new.Neg(found.x)


def test_a_rule_that_changes_outputs_is_left_out(quick: Quick, monkeypatch: pytest.MonkeyPatch) -> None:
    from onnxq.preparing import preparation

    known = preparation.passes_of
    monkeypatch.setattr(preparation, "passes_of", lambda name: {**known(name), "NegateRelu": NegateRelu})
    report = quick()
    [(name, reason)] = report.run.left_out
    assert name == "NegateRelu"
    assert reason.startswith("it changes output 'y'")
    assert report.agreement.worst_sqnr > 20


@dataclass(frozen=True)
class RaiseAtRelu(NegateRelu):
    """A rule that raises."""

    def replacement(self, new: New, found: Match) -> Tensor | Sequence[Tensor]:
        raise ZeroDivisionError("a fault of ours")


def test_a_rule_that_raises_is_skipped_and_reported(quick: Quick, monkeypatch: pytest.MonkeyPatch) -> None:
    from onnxq.preparing import preparation

    known = preparation.passes_of
    monkeypatch.setattr(preparation, "passes_of", lambda name: {**known(name), "RaiseAtRelu": RaiseAtRelu})
    [failure] = quick().run.failures
    assert failure.startswith("rule RaiseAtRelu failed at Relu node 'relu': ZeroDivisionError: a fault of ours")


def test_a_pass_that_fails_is_left_out(quick: Quick, monkeypatch: pytest.MonkeyPatch) -> None:
    def apply(step: FoldShapes, graph: Graph) -> None:
        fail()

    monkeypatch.setattr(FoldShapes, "apply", apply)
    report = quick()
    assert report.run.left_out == (("FoldShapes", "it fails with ZeroDivisionError: a fault of ours"),)
    assert report.run.failures == (
        "preparing with FoldShapes failed and was left out: ZeroDivisionError: a fault of ours",
    )


def test_a_model_that_misses_its_goal_is_refused_for_that_alone(
    perceptron: ModelProto, samples_for: Callable[..., list[Any]]
) -> None:
    with pytest.raises(FidelityError, match="expected 200 dB or more"):
        quantize(perceptron, samples_for(perceptron, 16), goal=Goal(200), budget=Budget(search="off"))


_CRASHING = """
import os
from onnxq.system.isolation import run_isolated

def program():
    from onnxq.cli.main import main
    from onnxq.search import attempts
    choose = attempts.choose
    attempts.choose = lambda *given, is_stored=False: choose(*given, is_stored=True) if is_stored else os.abort()
    main()

run_isolated(program)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked")
def test_a_crash_of_the_runtime_ends_in_stored_weights(
    perceptron: ModelProto, samples_for: Callable[..., list[Any]], tmp_path: Path
) -> None:
    onnx.save(perceptron, tmp_path / "model.onnx")
    (tmp_path / "calib").mkdir()
    for number, sample in enumerate(samples_for(perceptron, 8)):
        np.savez(tmp_path / "calib" / f"{number}.npz", **sample)
    given = [str(tmp_path / "model.onnx"), "--calib", str(tmp_path / "calib"), "-o", str(tmp_path / "q.onnx")]
    command = [sys.executable, "-c", _CRASHING, "quantize", *given, "--json"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "onnxq: SIGABRT ended the process" in run.stderr
    report = json.loads(run.stdout)
    assert report["run"]["failures"][0].startswith("what was tried before failed and was left out: Crash: SIGABRT")
    assert {one["mode"] for one in report["plan"]["decisions"] if one["weights"]} == {"storage"}
    assert (tmp_path / "q.onnx").exists()
