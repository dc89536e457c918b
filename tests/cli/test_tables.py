"""Answers as tables: whole names, and one row a line where no terminal is."""

from __future__ import annotations

import math

import pytest

from onnxq.cli.tables import print_agreement, print_portability, print_sensitivity, written
from onnxq.config.scheme import Mode, QuantSpec
from onnxq.evaluation.agreement import Agreement, OutputAgreement
from onnxq.evaluation.latency import Latency
from onnxq.evaluation.portability import EngineResult
from onnxq.search.sensitivity_report import NodeCost, Sensitivity, TensorCost, WayCost

LONG = "/a/very/long/name" * 10


def test_names_are_not_cut_off_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    ways = (WayCost(Mode.STATIC, QuantSpec("int8-narrow"), 0.5, 30.0), WayCost(Mode.STORAGE, None, None, math.inf))
    tensors = (TensorCost(LONG, "uint8", 31.0, 0.5, False, "y", None, None),)
    print_sensitivity(Sensitivity("int8", "t", 4, 20.0, tensors, (NodeCost(LONG, "Conv", Mode.STATIC, 1.0, ways),)))
    out, err = capsys.readouterr()
    assert err == ""
    rows = [line for line in out.splitlines() if LONG in line]
    assert len(rows) == 2
    assert "~31.0 dB ± 0.5" in rows[0]
    assert "static int8-narrow" in rows[1]
    assert "its share of what a group adds" in out


def test_names_are_shown_and_not_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    print_agreement(Agreement(3, (OutputAgreement("a\x1b[2J\u202e[/b]", 1.0, None, 0.0, True, True, 0),)))
    out = capsys.readouterr().out
    assert r"a\x1b[2J\u202e[/b]" in out
    assert not {"\x1b", "\u202e"} & set(out)


def test_outputs_that_cannot_be_compared_say_why(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = [
        OutputAgreement("a", 1.0, None, 0.0, same_shapes=False, finite=True, compared=0),
        OutputAgreement("b", 1.0, 0.5, 0.0, same_shapes=True, finite=False, compared=0),
    ]
    print_agreement(Agreement(3, tuple(outputs)))
    out = capsys.readouterr().out
    assert "shapes differ" in out
    assert "not finite" in out
    assert "50.00%" in out


def test_blocks_are_written_with_their_extent() -> None:
    assert written(QuantSpec("int4", (2, 16))) == "int4 in blocks of 2x16"


@pytest.mark.parametrize(("interval", "told"), [((1.9, 2.1), "2.00x"), ((0.0, math.inf), "in too few rounds to tell")])
def test_the_speed_on_an_engine_is_told_of_rounds_enough(
    interval: tuple[float, float], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    latency = Latency(2.0, 1.0, threads=1, runs=5, interval=interval)
    print_portability("m.onnx", [EngineResult("openvino", "openvino 1", latency=latency, agrees=True)])
    out = capsys.readouterr().out
    assert told in out
    assert ("2.00x" in out) == (told == "2.00x")
