"""Models are opened and prepared; preparing is undone where it changes what a model computes, or makes it slower."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from onnx import ModelProto

from onnxq.calibration.data import Data
from onnxq.errors import ModelError, OutputError
from onnxq.preparing.equivalence import find_culprits
from onnxq.runtime.engine import OnnxRuntime
from onnxq.runtime.interleaved_timing import Turn
from onnxq.runtime.sessions import Array, open_session
from onnxq.search.cost_cache import CostCache
from onnxq.steps.prepare import (
    PreparationCheck,
    apply_own_passes,
    check_output_path,
    harmful_steps,
    open_prepared,
)
from onnxq.steps.request import Budget, QuantizationRequest

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


def test_an_output_is_neither_the_model_nor_the_file_of_node_times(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"")
    with pytest.raises(OutputError, match="is the model itself"):
        check_output_path(tmp_path / "m.onnx", tmp_path / "m.onnx", Budget(), Data([]))
    with pytest.raises(OutputError, match="node times cannot be kept in the output"):
        check_output_path(
            tmp_path / "q.onnx", tmp_path / "m.onnx", Budget(profile_cache=tmp_path / "q.onnx.data"), Data([])
        )
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
    return PreparationCheck(tmp_path / "given.onnx", SAMPLES, 0.0, OnnxRuntime(tmp_path), CostCache())


@pytest.mark.parametrize(
    ("culprits", "found"),
    [("", ""), ("a", "a"), ("c", "c"), ("h", "h"), ("bg", "bg"), ("abcdefgh", "abcdefgh")],
)
def test_each_culprit_is_found_in_few_looks(culprits: str, found: str) -> None:
    looks = []

    def fault(without: frozenset[str]) -> str:
        looks.append(without)
        return "wrong" if set(culprits) - without else ""

    assert "".join(sorted(find_culprits("abcdefgh", fault))) == found
    assert len(looks) == len(set(looks)) <= 2 + 4 * len(culprits)


def test_nothing_is_left_out_where_that_does_not_help() -> None:
    assert find_culprits("abc", lambda without: "wrong") == {}


@pytest.mark.parametrize(
    ("prepared", "reason"),
    [
        ("(float[64] x) => (float[64] y) { h = Relu(x) y = Tanh(h) }", ""),
        ("(float[64] x) => (float[64] y) { h = Tanh(x) y = Neg(h) }", "it changes output 'y' by 2"),
        ("(float[64] x) => (float[64] y) { h = Tanh(x) y = Log(h) }", "it changes output 'y' by inf"),
    ],
    ids=["equal", "another value", "not finite"],
)
def test_a_step_that_changes_outputs_is_left_out(
    check: PreparationCheck, build: Build, tmp_path: Path, prepared: str, reason: str
) -> None:
    def prepare(without: frozenset[str]) -> Path:
        onnx.save(build(GIVEN if "b" in without else prepared), tmp_path / "prepared.onnx")
        return tmp_path / "prepared.onnx"

    found = harmful_steps(check, "abc", prepare)
    assert list(found) == ["b"] * bool(reason)
    assert all(text.startswith(reason) for text in found.values())


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
    check = PreparationCheck(tmp_path / "given.onnx", SAMPLES, 0.0, OnnxRuntime(tmp_path), CostCache())
    found = check.fault(tmp_path / "prepared.onnx")
    assert found.startswith("it changes output 'y' by inf" if is_wrong and "Exp(x) y = Seq" not in prepared else found)
    assert bool(found) == is_wrong


def test_a_step_that_fails_is_left_out(check: PreparationCheck) -> None:
    def prepare(without: frozenset[str]) -> Path:
        if "b" not in without:
            raise ZeroDivisionError("no such thing")
        return check.reference

    assert harmful_steps(check, "abc", prepare) == {"b": "it fails: ZeroDivisionError: no such thing"}


def test_random_outputs_are_not_compared(build: Build, tmp_path: Path) -> None:
    text = "(float[64] x) => (float[64] y) { r = RandomNormalLike(x) y = Add(r, x) }"
    onnx.save(build(text), tmp_path / "given.onnx")
    given = tmp_path / "given.onnx"
    assert PreparationCheck(given, SAMPLES, 0.0, OnnxRuntime(tmp_path), CostCache()).fault(given) == ""


@pytest.mark.parametrize(
    ("glance", "speeds", "reason"),
    [
        (0.98, [], ""),
        (0.6, [0.6] * 9, "it makes the float model 0.60 times as fast"),
        (0.95, [0.92] * 9, "it makes the float model 0.92 times as fast"),
        (0.6, [1.0] * 9, ""),
        (0.6, [0.5, 1.5, 0.8] * 3, ""),
    ],
    ids=["hardly slower", "slower", "a little slower", "disturbed once", "scattered"],
)
def test_a_prepared_model_that_is_slower_is_told_from_one_on_a_busy_machine(
    check: PreparationCheck,
    build: Build,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    glance: float,
    speeds: list[float],
    reason: str,
) -> None:
    rounds = iter(speeds)

    def times(
        engine: OnnxRuntime, models: Sequence[Any], samples: Sequence[Mapping[str, Array]], *_: Any
    ) -> list[list[Turn]]:
        speed = next(rounds)
        return [[(1.0, 1 / speed)] for _ in samples]

    monkeypatch.setattr(OnnxRuntime, "time", times)
    monkeypatch.setattr(PreparationCheck, "_glance", lambda *_: glance)
    onnx.save(build(GIVEN), tmp_path / "prepared.onnx")
    costs = CostCache()
    timed = PreparationCheck(check.reference, SAMPLES, 0.1, OnnxRuntime(tmp_path), costs)
    assert timed.fault(tmp_path / "prepared.onnx") == reason
    # What was decided stays so without another look.
    assert timed.fault(tmp_path / "prepared.onnx") == reason
    assert len(costs.added_speeds) == 1


def test_sessions_that_are_open_tell_which_is_much_slower(build: Build, tmp_path: Path) -> None:
    chain = " ".join(f"t{number + 1} = MatMul(t{number}, w)" for number in range(60))
    weight = np.eye(64, dtype=np.float32)
    for name, body in (("given", "y = MatMul(x, w)"), ("slow", f"t0 = MatMul(x, w) {chain} y = Identity(t60)")):
        onnx.save(build(f"(float[512,64] x) => (float[512,64] y) {{ {body} }}", w=weight), tmp_path / f"{name}.onnx")
    samples = [{"x": np.ones((512, 64), np.float32)}]
    check = PreparationCheck(tmp_path / "given.onnx", samples, 1.0, OnnxRuntime(tmp_path), CostCache())
    slow = tmp_path / "slow.onnx"
    assert check._glance(slow, open_session(slow)) < 0.5


def test_open_sessions_have_the_threads_of_the_engine(check: PreparationCheck) -> None:
    alone = replace(check, engine=OnnxRuntime(threads=1))
    assert alone._given.get_session_options().intra_op_num_threads == 1
