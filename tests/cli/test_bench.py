from __future__ import annotations

import json
import sys

import pytest

from cli.commands import MODELS, invoke
from onnxq.errors import EngineError
from onnxq.runtime.sessions import runtime_version


def bench(*arguments: str) -> str:
    models = [MODELS / "mobilenet.onnx"] * 2
    options = ("--data", MODELS / "data" / "test.npz", "--latency-seconds", 0, "--threads", 1)
    done = invoke("bench", *models, *options, *arguments)
    assert done.exit_code == 0
    return done.output


def test_bench_prints_times_conditions_and_a_verdict() -> None:
    text = " ".join(bench("--limit", "3").split())
    assert "onnxruntime" in text
    assert "medians of 12 runs of each model by turns, loaded 12 times, on 3 samples with 1 thread" in text
    assert "mobilenet.onnx is " in text
    assert "with 95 % confidence" in text


def test_bench_prints_json() -> None:
    plain = json.loads(bench("--json"))
    assert plain["samples"] == 8
    assert plain["latency"]["rounds"] == 12
    assert plain["latency"]["interval"][0] <= plain["speed"] <= plain["latency"]["interval"][1]


def test_bench_runs_on_another_engine() -> None:
    plain = json.loads(bench("--limit", "1", "--json", "--engine", f"python:{sys.executable}"))
    assert plain["runtime"] == plain["latency"]["engine"] == runtime_version()


def test_an_engine_that_is_not_there_is_a_sentence() -> None:
    with pytest.raises(EngineError, match="engine 'openvina' is not one of"):
        bench("--engine", "openvina")
