"""Optimizing: equal outputs, never slower, never larger, and what is left out when something is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from conftest import MODELS
from onnx import ModelProto

import onnxq
from onnxq.errors import DataError, ModelError, SchemeError
from onnxq.evaluation.latency import Latency
from onnxq.passes.preparing import equivalence, preparation
from onnxq.passes.preparing.equivalence import ROUNDING
from onnxq.passes.preparing.rewriting import Verify
from onnxq.pipeline.optimization import optimize
from onnxq.rewrite import (
    Match,
    NodePattern,
    OpsetPatternBuilder,
    RewriteContext,
    RewriteRule,
    RewriteRules,
)
from onnxq.runtime.sessions import run

CALIB = MODELS / "data" / "calib.npz"


@pytest.mark.parametrize("name", ["gru", "mobilenet", "resnet", "vit"])
def test_a_trained_model_gets_fewer_nodes_and_answers_the_same(name: str, tmp_path: Path) -> None:
    source, output = MODELS / f"{name}.onnx", tmp_path / "out.onnx"
    done = optimize(source, output, verify=Verify(CALIB), latency_seconds=0)
    assert done.after.nodes <= done.before.nodes
    assert done.after.bytes <= done.before.bytes
    assert done.difference.share <= ROUNDING
    assert not done.made_up
    assert done.left_out == ()
    assert sum(node.op_type != "Constant" for node in onnx.load(output).graph.node) <= done.after.nodes


def test_the_given_graph_stays_as_it_is() -> None:
    graph = onnxq.load(MODELS / "resnet.onnx")
    before = len(graph.nodes)
    done = optimize(graph, latency_seconds=0)
    assert len(graph.nodes) == before
    assert done.made_up
    assert len(done.graph.nodes) == done.after.nodes


def test_what_is_left_out_is_not_applied(build: Callable[..., ModelProto]) -> None:
    model = build("(float[4] x) => (float[4] y) { a = Identity(x) b = Neg(a) y = Exp(b) }")
    assert optimize(model, latency_seconds=0).counts == {"DropNoOps": 1}
    done = optimize(model, without=["DropNoOps"], latency_seconds=0)
    assert done.counts == {}
    assert done.left_out == (("DropNoOps", "it was asked for"),)
    with pytest.raises(
        SchemeError, match="no pass or rule that can be left out is named 'DropNoOp'; did you mean 'DropNoOps'"
    ):
        optimize(model, without=["DropNoOp"], latency_seconds=0)


class Wrong(RewriteRule):
    """exp(-x) is exp(x)."""

    def pattern(self, op: OpsetPatternBuilder) -> NodePattern:
        return op.Exp(op.Neg(op.any("x")))

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        return new.Exp(match.x)


def test_a_rule_that_changes_outputs_is_left_out_and_named(
    build: Callable[..., ModelProto], monkeypatch: pytest.MonkeyPatch
) -> None:
    def rules(without: frozenset[str]) -> RewriteRules:
        return RewriteRules(() if "Wrong" in without else (Wrong(),))

    monkeypatch.setattr(preparation, "_rules", rules)
    done = optimize(build("(float[4] x) => (float[4] y) { a = Identity(x) b = Neg(a) y = Exp(b) }"), latency_seconds=0)
    assert [node.op for node in done.graph.nodes] == ["Neg", "Exp"]
    ((name, reason),) = done.left_out
    assert name == "Wrong"
    assert reason.startswith("it changes output 'y' by ")


class OtherShape(Wrong):
    """Makes what does not run."""

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        return new.Reshape(match.x, np.int64([3]))


def test_a_rule_whose_result_does_not_run_is_left_out_and_named(
    build: Callable[..., ModelProto], monkeypatch: pytest.MonkeyPatch
) -> None:
    def rules(without: frozenset[str]) -> RewriteRules:
        return RewriteRules(() if "OtherShape" in without else (OtherShape(),))

    monkeypatch.setattr(preparation, "_rules", rules)
    done = optimize(build("(float[N] x) => (float[N] y) { a = Identity(x) b = Neg(a) y = Exp(b) }"), latency_seconds=0)
    assert [node.op for node in done.graph.nodes] == ["Neg", "Exp"]
    ((name, reason),) = done.left_out
    assert name == "OtherShape"
    assert reason.startswith("it fails with CandidateError: ")


def test_a_model_that_cannot_be_prepared_stays_as_it_was(
    build: Callable[..., ModelProto], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a fault of ours")

    monkeypatch.setattr("onnxq.pipeline.optimization.prepare_in_place", fail)
    done = optimize(build("(float[4] x) => (float[4] y) { a = Identity(x) y = Neg(a) }"), latency_seconds=0)
    assert [node.op for node in done.graph.nodes] == ["Identity", "Neg"]
    assert done.left_out == (("*", "it fails with ZeroDivisionError: a fault of ours"),)


def test_a_result_that_is_slower_is_not_taken(
    build: Callable[..., ModelProto], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "onnxq.pipeline.optimization.measure_latency", lambda *_, **__: Latency(1.0, 2.0, 1, 5, 6, (0.4, 0.6))
    )
    done = optimize(build("(float[4] x) => (float[4] y) { a = Identity(x) y = Neg(a) }"))
    assert [node.op for node in done.graph.nodes] == ["Identity", "Neg"]
    assert done.left_out == (("*", "the model would run at 0.50 times the speed"),)


@pytest.mark.parametrize(("times", "ops"), [(32, ["Add"]), (512, ["Tile", "Add"])])
def test_constants_are_computed_unless_the_model_would_be_larger(
    times: int, ops: list[str], build: Callable[..., ModelProto]
) -> None:
    model = build(
        f"(float[{2 * times},64] x) => (float[{2 * times},64] y) {{ w = Tile(v, s) y = Add(x, w) }}",
        v=np.arange(128, dtype=np.float32).reshape(2, 64), s=np.array([times, 1]),
    )  # fmt: skip
    done = optimize(model, latency_seconds=0)
    assert [node.op for node in done.graph.nodes] == ops
    assert done.left_out == ()
    assert done.after.bytes <= done.before.bytes + 2**16


class Larger(RewriteRule):
    """-x is x by a large tensor of -1."""

    def pattern(self, op: OpsetPatternBuilder) -> NodePattern:
        return op.Neg(op.any("x"))

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        return new.Mul(match.x, np.full((256, 256), -1, np.float32))


def test_a_rule_that_makes_the_model_larger_is_left_out_and_named(
    build: Callable[..., ModelProto], monkeypatch: pytest.MonkeyPatch
) -> None:
    def rules(without: frozenset[str]) -> RewriteRules:
        return RewriteRules(() if "Larger" in without else (Larger(),))

    monkeypatch.setattr(preparation, "_rules", rules)
    done = optimize(build("(float[256,256] x) => (float[256,256] y) { a = Identity(x) y = Neg(a) }"), latency_seconds=0)
    assert [node.op for node in done.graph.nodes] == ["Neg"]
    ((name, reason),) = done.left_out
    assert name == "Larger"
    assert reason.startswith("the model would have ")


def test_small_tensors_that_lie_outside_are_counted_once(build: Callable[..., ModelProto], tmp_path: Path) -> None:
    layers = " ".join(f"a{i} = Add(x{i}, b{i}) x{i + 1} = Identity(a{i})" for i in range(60))
    model = build(
        f"(float[64] x0) => (float[64] x60) {{ {layers} }}",
        **{f"b{i}": np.arange(64, dtype=np.float32) + i for i in range(60)},
    )
    source, output = tmp_path / "model.onnx", tmp_path / "out.onnx"
    onnx.save_model(model, source, save_as_external_data=True, location="model.data", size_threshold=0)
    done = optimize(source, output, latency_seconds=0)
    assert done.left_out == ()
    assert {node.op for node in done.graph.nodes} == {"Add"}
    assert done.before.bytes == sum(path.stat().st_size for path in (source, tmp_path / "model.data"))
    assert done.after.bytes == output.stat().st_size


def test_a_large_constant_on_the_way_to_a_small_one_is_computed_once(
    build: Callable[..., ModelProto], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(
        """(float[1,4,8,8] x) => (float[1,4,8,8] y) {
            p = Resize<mode="cubic">(v, , , sizes) w = Slice(p, begin, end, axes) y = Add(x, w)
        }""",
        v=np.arange(64, dtype=np.float32).reshape(1, 4, 4, 4), sizes=np.array([1, 4, 256, 256]),
        begin=np.array([0, 0]), end=np.array([8, 8]), axes=np.array([2, 3]),
    )  # fmt: skip
    runs = []
    monkeypatch.setattr(equivalence, "run", lambda *given, **named: runs.append(1) or run(*given, **named))
    done = optimize(model, latency_seconds=0)
    assert [node.op for node in done.graph.nodes] == ["Add"]
    assert len(runs) == 4 + 1 + 4, "the given model on each sample, the first again, and the rewritten one"


def test_speed_is_measured_and_reported(build: Callable[..., ModelProto]) -> None:
    done = optimize(build("(float[4] x) => (float[4] y) { a = Identity(x) y = Neg(a) }"), latency_seconds=0.2)
    assert done.latency is not None or done.left_out
    assert set(done.to_dict()) >= {"nodes", "bytes", "speed", "difference", "changes", "left_out"}


def test_the_interval_of_too_few_rounds_is_none_in_json(
    build: Callable[..., ModelProto], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onnxq.pipeline.optimization.measure_latency", lambda *_, **__: Latency(2.0, 1.0, 1, 5, 2))
    reported = optimize(build("(float[4] x) => (float[4] y) { a = Identity(x) y = Neg(a) }")).to_dict()
    assert (reported["speed"], reported["speed_interval"]) == (2.0, None)


def test_samples_that_do_not_fit_are_told(build: Callable[..., ModelProto]) -> None:
    model = build("(float[4] x) => (float[4] y) { y = Neg(x) }")
    with pytest.raises(DataError, match="'z'"):
        optimize(model, verify=Verify([{"z": np.zeros(4, np.float32)}]), latency_seconds=0)


def test_a_model_that_onnxruntime_does_not_run_is_rewritten_on_wish(build: Callable[..., ModelProto]) -> None:
    model = build("(float[4] x) => (float[4] y) { a = Identity(x) b = mine.Strange(a) y = Neg(b) }")
    model.opset_import.append(onnx.helper.make_opsetid("mine", 1))
    with pytest.raises(ModelError, match="Strange"):
        optimize(model)
    done = optimize(model, unverified=True)
    assert done.difference is None
    assert [node.op for node in done.graph.nodes] == ["Strange", "Neg"]


def test_metadata_goes_on_wish(build: Callable[..., ModelProto]) -> None:
    model = build("(float[4] x) => (float[4] y) { y = Neg(x) }")
    model.graph.node[0].metadata_props.add(key="namespace", value="block.0")
    kept, stripped = (optimize(model, latency_seconds=0, strip_metadata=flag).after.bytes for flag in (False, True))
    assert stripped < kept
