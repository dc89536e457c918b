"""The promise by construction: whatever fails or is slower, what is written is verified, or nothing is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from onnxq import (
    Budget,
    Goal,
    Match,
    NodePattern,
    OpsetPatternBuilder,
    RewriteContext,
    RewriteRule,
    quantize,
)
from onnxq.config.presets import PRESETS
from onnxq.config.scheme import Mode, Rule
from onnxq.errors import ModelError, PassError, RunError, SchemeError
from onnxq.evaluation import verification
from onnxq.evaluation.latency import Latency
from onnxq.ir import Tensor
from onnxq.passes.shapes import FoldShapes
from onnxq.pipeline import ladder, quantization
from onnxq.pipeline.calibrate import CalibratedModel
from onnxq.pipeline.prepare import Form, PreparedRun, Preparer
from onnxq.pipeline.search import SearchedModel
from onnxq.report import AccuracyError, Report
from onnxq.search.candidate import Workshop
from onnxq.search.search import Search
from onnxq.system.failures import collect_failures, tolerate
from onnxq.system.resources import Deadline

Quick = Callable[..., Report]


@pytest.fixture
def quick(perceptron: ModelProto, samples_for: Callable[..., list[Any]], tmp_path: Path) -> Quick:
    """Return what quantizes a small model in a second, and returns the report."""

    def run(**budget: Any) -> Report:
        given = {"latency_seconds": 0.02, **budget}
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
        ("onnxq.search.search.Chooser.fastest", "the choice of a plan"),
        ("onnxq.pipeline.samples.warn_unmeasured_nodes", "the check for nodes that are not compared"),
        ("onnxq.pipeline.report._ran", "the check of kernels"),
        ("onnxq.search.accuracy_methods._with_ranges", "accuracy method 'ranges'"),
    ],
)
def test_a_part_that_fails_is_left_out_and_reported(
    quick: Quick, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, part: str
) -> None:
    monkeypatch.setattr(place, fail)
    report = quick(layers=1, accuracy="ranges")
    assert report.run.failures == (f"{part} failed and was left out: ZeroDivisionError: a fault of ours",)
    assert (tmp_path / "q.onnx").exists()


def test_a_search_that_fails_ends_in_stored_weights(
    quick: Quick, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Search.run

    def once(search: Search, *, stored: bool = False) -> Any:
        return run(search, stored=True) if stored else fail()

    monkeypatch.setattr(Search, "run", once)
    report = quick()
    assert report.run.failures == ("the search failed and was left out: ZeroDivisionError: a fault of ours",)
    assert {one.mode for one in report.plan.decisions if one.weights} == {Mode.STORAGE}
    assert any("the search for something faster failed" in one.reason for one in report.plan.decisions)
    assert (tmp_path / "q.onnx").exists()


def cancelling(layers: int = 8, channels: int = 64) -> ModelProto:
    """Return layers of harmless weights, and of one whose inputs cancel in it, so that it alone needs 16 bits."""
    generator = np.random.default_rng(0)
    inner = [generator.standard_normal((channels, channels)) * channels**-0.5 for _ in range(layers)]
    inner[layers // 2] += 400 * generator.standard_normal((1, channels)) * channels**-0.5
    outer = [0.5 * generator.standard_normal((channels, channels)) * channels**-0.5 for _ in range(layers)]
    steps = " ".join(
        f"n{i} = LayerNormalization<axis = -1>(x{i}, one) [in{i}] h{i} = MatMul(n{i}, w{i}) r{i} = Relu(h{i}) "
        f"[out{i}] o{i} = MatMul(r{i}, u{i}) x{i + 1} = Add(x{i}, o{i})"
        for i in range(layers)
    )
    ends = f"(float[1,s,{channels}] x0) => (float[1,s,{channels}] x{layers})"
    text = f'<ir_version: 9, opset_import: ["" : 17]> late {ends} {{ {steps} }}'
    model = onnx.parser.parse_model(text)
    weights = {"one": np.ones(channels)}
    weights |= {f"w{i}": one for i, one in enumerate(inner)} | {f"u{i}": one for i, one in enumerate(outer)}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(np.float32(a), name) for name, a in weights.items())
    return model


def test_a_search_that_is_late_says_so_and_gives_no_weight_more_bits_than_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = np.random.default_rng(1)
    steps = [generator.standard_normal((1, 12 + place, 64)) * 0.5 for place in range(12)]
    samples = [{"x0": np.cumsum(one, 1).astype(np.float32)} for one in steps]
    monkeypatch.setattr(Search, "until", Deadline.within(0))
    goal, budget = Goal(force=True), Budget(latency_seconds=0.02)
    report = quantize(cancelling(), samples, tmp_path / "q.onnx", goal=goal, budget=budget).report
    assert not [one.node for one in report.plan.decisions for weight in one.weights if "16" in weight.spec.format]
    assert "time ran out" in report.verdict
    assert report.search.limit == "--search fast"


def test_models_that_do_not_run_are_no_end(quick: Quick, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = Workshop._errors

    def of_floats(workshop: Workshop, plan: Any, *given: Any) -> Any:
        if plan.count(Mode.STATIC):
            raise RunError("the sample cannot be run")
        return errors(workshop, plan, *given)

    monkeypatch.setattr(Workshop, "_errors", of_floats)
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
    monkeypatch.setattr(verification, "time_beside", lambda *_, **__: slow)
    with pytest.raises(AccuracyError, match=f"runs {speed}x as fast .* expected no slower than float") as refused:
        quick()
    assert not (tmp_path / "q.onnx").exists()
    assert {one.mode for one in refused.value.report.plan.decisions if one.weights} == {Mode.STORAGE}


def test_what_a_busy_machine_does_not_tell_is_accepted_for_its_kernels(
    quick: Quick, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "time_beside", lambda *_, **__: Latency(1.0, 1.1, 1, 10, 6, (0.7, 1.2)))
    report = quick()
    assert report.plan.count(Mode.STORAGE) == 2
    assert report.performance.kernels.computes_in_float


@dataclass(frozen=True)
class NegateRelu(RewriteRule):
    """A rule that is wrong."""

    def pattern(self, op: OpsetPatternBuilder) -> NodePattern | tuple[NodePattern, ...]:
        return op.Relu(op.any("x"))

    def rewrite(self, new: RewriteContext, match: Match) -> Tensor | Sequence[Tensor]:
        return new.Neg(match.x)


def test_a_rule_that_changes_outputs_is_left_out(quick: Quick, monkeypatch: pytest.MonkeyPatch) -> None:
    from onnxq.passes.preparing import preparation

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

    def rewrite(self, new: RewriteContext, match: Match) -> Tensor | Sequence[Tensor]:
        raise ZeroDivisionError("a fault of ours")


def test_a_rule_that_raises_is_skipped_and_reported(quick: Quick, monkeypatch: pytest.MonkeyPatch) -> None:
    from onnxq.passes.preparing import preparation

    known = preparation.passes_of
    monkeypatch.setattr(preparation, "passes_of", lambda name: {**known(name), "RaiseAtRelu": RaiseAtRelu})
    [failure] = quick().run.failures
    assert failure.startswith("rule RaiseAtRelu failed at Relu node 'relu': ZeroDivisionError: a fault of ours")


@pytest.mark.parametrize("error", [ZeroDivisionError("a fault of ours"), PassError("a fault of ours")])
def test_a_pass_that_fails_is_left_out(error: Exception, quick: Quick, monkeypatch: pytest.MonkeyPatch) -> None:
    def apply(*_: object) -> None:
        raise error

    monkeypatch.setattr(FoldShapes, "apply", apply)
    report, what = quick(), f"{type(error).__name__}: "
    [(name, reason)] = report.run.left_out
    [failure] = report.run.failures
    assert (name, "a fault of ours" in reason) == ("FoldShapes", True)
    assert reason.startswith(f"it fails with {what}")
    assert failure.startswith(f"preparing with FoldShapes failed and was left out: {what}")


def test_a_model_that_misses_its_goal_is_refused_for_that_alone(
    perceptron: ModelProto, samples_for: Callable[..., list[Any]]
) -> None:
    with pytest.raises(AccuracyError, match="expected 200 dB or more"):
        quantize(perceptron, samples_for(perceptron, 16), goal=Goal(200), budget=Budget(search="off"))


def test_an_attempt_that_fails_leaves_the_one_before_alone(
    quick: Quick, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, folders = ladder.search_for_plan, []

    def spoil_the_second(seen: CalibratedModel, *given: Any, **options: Any) -> SearchedModel:
        folders.append(seen.bench.prepared.parent)
        found = known(seen, *given, **options)
        if len(folders) == 2:
            found.result.candidate.path.write_bytes(b"of the attempt that fails")
            raise RunError("verification fails")
        # Only after a slow model is another form tried.
        return replace(found, result=replace(found.result, keeps_up=False))

    monkeypatch.setattr(ladder, "search_for_plan", spoil_the_second)
    monkeypatch.setattr(quantization, "check", lambda *_, **__: None)
    report = quick(latency_seconds=0)
    assert len(set(folders)) == 2
    part = "storing the weights of the model as it was given"
    assert report.run.failures == (f"{part} failed and was left out: RunError: verification fails",)
    onnx.checker.check_model(tmp_path / "q.onnx")


@pytest.mark.parametrize("error", [IndexError("a fault of ours"), RunError("it does not run")])
def test_a_slow_model_is_refused_even_if_the_last_attempt_fails(
    quick: Quick, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    prepared = Preparer.prepared

    def prepare(preparer: Preparer, form: Form | None = None) -> PreparedRun:
        if form is not None and form.without:
            raise error
        return prepared(preparer, form)

    monkeypatch.setattr(Preparer, "prepared", prepare)
    monkeypatch.setattr(verification, "time_beside", lambda *_, **__: Latency(1.0, 2.0, 1, 10, 6, (0.49, 0.51)))
    with pytest.raises(AccuracyError, match=r"runs 0\.50x as fast"):
        quick()


def test_a_pattern_that_matches_nothing_is_not_mended_by_leaving_out_steps(
    build: Callable[..., ModelProto], samples_for: Callable[..., list[Any]]
) -> None:
    model = build(
        "(float[N,4] x) => (float[N,4] y) { a = MatMul(x, w) b = Identity(a) y = Relu(b) }", w=np.eye(4, dtype="f4")
    )
    for node in model.graph.node:
        node.name = node.op_type
    scheme = replace(PRESETS["int8"], rules=(Rule(Mode.FLOAT, nodes=("Identity",)), *PRESETS["int8"].rules))
    with pytest.raises(SchemeError, match="pattern 'Identity' matches nothing"):
        quantize(model, samples_for(model, 4), scheme=scheme)


_CRASHING = """
import os
from onnxq.system.isolation import run_isolated

def program():
    from onnxq.pipeline import quantization
    from onnxq.cli.main import main
    from onnxq.search.search import Search
    from onnxq.pipeline.prepare import PreparationCheck
    run, published = Search.run, quantization.publish_model
    def search(self, *, stored=False):
        return run(self, stored=True) if stored else os.abort()
    def publish(*given):
        published(*given)
        os.abort()
    {crash}
    main()

run_isolated(program)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked")
@pytest.mark.parametrize(
    ("crash", "code", "crashes"),
    [
        ("Search.run = search", 0, 1),
        ("PreparationCheck.fault = lambda *_: os.abort()", 0, 2),
        ("quantization.publish_model = publish", 2, 0),
    ],
    ids=["in the search", "of the prepared model", "after publishing"],
)
def test_a_crash_of_the_runtime_ends_in_stored_weights(
    perceptron: ModelProto,
    samples_for: Callable[..., list[Any]],
    tmp_path: Path,
    crash: str,
    code: int,
    crashes: int,
) -> None:
    # Something for preparing to do.
    model = ModelProto.FromString(perceptron.SerializeToString())
    model.graph.node.insert(0, onnx.helper.make_node("Identity", ["x"], ["same"]))
    model.graph.node[1].input[0] = "same"
    onnx.save(model, tmp_path / "model.onnx")
    (tmp_path / "calib").mkdir()
    for number, sample in enumerate(samples_for(perceptron, 8)):
        np.savez(tmp_path / "calib" / f"{number}.npz", **sample)
    given = [str(tmp_path / "model.onnx"), "--calib", str(tmp_path / "calib"), "-o", str(tmp_path / "q.onnx")]
    command = [sys.executable, "-c", _CRASHING.replace("{crash}", crash), "quantize", *given, "--json"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == code, run.stderr
    assert run.stderr.count("a simpler run is tried now") == crashes
    onnx.checker.check_model(tmp_path / "q.onnx")
    if not crashes:
        return
    report = json.loads(run.stdout)
    assert report["run"]["failures"][0].startswith("what was tried before failed and was left out: Crash: SIGABRT")
    assert {one["mode"] for one in report["plan"]["decisions"] if one["weights"]} == {"storage"}
