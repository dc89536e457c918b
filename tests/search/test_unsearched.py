"""Without a search the scheme is taken as it is, but for tables that the goal takes more bits for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from conftest import Build

from onnxq.config.presets import PRESETS
from onnxq.config.scheme import Scheme
from onnxq.evaluation.goal import Goal
from onnxq.pipeline import Quantized, quantize
from onnxq.steps.request import Budget

TEXT = "(int64[4,8] i) => (float[4,8,16] y) {a = Gather(table, i) y = MatMul(a, w)}"
TABLES = "tables"


@pytest.fixture
def model(build: Build) -> onnx.ModelProto:
    return build(TEXT, table=(64, 64), w=(64, 16))


@pytest.fixture
def samples() -> list[dict[str, np.ndarray]]:
    return [{"i": one} for one in np.random.default_rng(0).integers(0, 64, (12, 4, 8))]


def quantized(
    model: object, samples: object, *, least: float, accuracy: str = "fast", scheme: str | Scheme = "int4-block32"
) -> Quantized:
    goal, budget = Goal(least, force=True), Budget("off", accuracy, latency=0)
    return quantize(model, samples, scheme=scheme, goal=goal, budget=budget)


def formats(found: Quantized) -> dict[str, str]:
    return {one.op_type: one.weights[0].spec.format for one in found.report.plan.decisions if one.weights}


@pytest.mark.parametrize("accuracy", ["fast", "full", TABLES])
def test_a_table_gets_8_bits_where_the_goal_takes_them(accuracy: str, model, samples) -> None:
    found = quantized(model, samples, least=30.0, accuracy=accuracy)
    assert formats(found) == {"Gather": "int8-narrow", "MatMul": "int4"}
    gain = next(one for one in found.report.encoding.gains if one.method == TABLES)
    assert gain.after > gain.before + 1
    assert gain.kept == "1 of 8 bits, 0.00 MB more"
    # The bits that the preset asks for are what the table tells first.
    assert "1 of 2 weights has 4 bits, the others not" in str(found.report.encoding.delivered[0])


@pytest.mark.parametrize(("least", "accuracy"), [(5.0, "fast"), (30.0, "compensation"), (30.0, "off")])
def test_it_keeps_its_bits_where_the_goal_is_reached_or_it_is_not_tried(
    least: float, accuracy: str, model, samples
) -> None:
    found = quantized(model, samples, least=least, accuracy=accuracy)
    assert formats(found) == {"Gather": "int4", "MatMul": "int4"}
    assert TABLES not in [one.method for one in found.report.encoding.gains]


def test_the_table_of_most_noise_for_its_bytes_comes_first(build: Build, samples) -> None:
    text = """(int64[4,8] i) => (float[4,8,16] y)
        {a = Gather(small, i) b = Gather(large, i) c = Add(a, b) y = MatMul(c, w)}"""
    model = build(text, small=(64, 64), large=(512, 64), w=(64, 16))
    least = quantized(model, samples, least=90.0, accuracy=TABLES).report.encoding.gains[0].before + 0.5
    found = quantized(model, samples, least=least - 0.5, accuracy=TABLES).report.plan
    tables = [one.weights[0] for one in found.decisions if one.op_type == "Gather"]
    assert {one.elements: one.spec.format for one in tables} == {64 * 64: "int8-narrow", 512 * 64: "int4"}


def test_codes_of_another_toolkit_stay_as_they_are(model, samples) -> None:
    assert formats(quantized(model, samples, least=90.0, scheme="burn-q4s"))["Gather"] == "int4-narrow"


def test_the_plan_is_carried_out_to_the_same_bytes(model, samples) -> None:
    first = quantized(model, samples, least=30.0, scheme=replace(PRESETS["int4-block32"], name="mine"))
    again = quantized(model, samples, least=30.0, scheme=first.report.plan)
    assert first.report.files.output_digest == again.report.files.output_digest
