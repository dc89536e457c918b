from __future__ import annotations

import json

from cli.commands import MODELS, invoke


def bench(*arguments: str) -> str:
    models = [MODELS / "mobilenet.onnx"] * 2
    options = ("--data", MODELS / "data" / "test.npz", "--seconds", 0, "--threads", 1)
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
