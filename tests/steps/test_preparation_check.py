"""Preparing is undone where it changes what a model computes, or makes it slower."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from onnxq.preparing.equivalence import find_culprits
from onnxq.runtime.local import OnnxRuntime
from onnxq.runtime.sessions import Array, open_session
from onnxq.runtime.turns import Turn
from onnxq.search.cost_cache import CostCache
from onnxq.steps.preparation_check import PreparationCheck, harmful_steps

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
        (0.95, [], ""),
        (0.6, [0.6] * 9, "it makes the float model 0.60 times as fast"),
        (0.6, [1.0] * 9, ""),
        (0.6, [0.5, 1.5, 0.8] * 3, ""),
    ],
    ids=["hardly slower", "slower", "disturbed once", "scattered"],
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
    assert check._glance(open_session(tmp_path / "slow.onnx")) < 0.5
