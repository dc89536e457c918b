"""Reasons name what was weighed, and times only where they were taken."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto

from onnxq.config.scheme import Mode
from onnxq.search.cost_model import KernelOption
from onnxq.search.sensitivity import QuantizerId, Sensitivities
from onnxq.search.tradeoff import CostTradeoff, OptionSensitivities, reason_of, untimed_reason
from search.timed_models import timed, times

DYNAMIC = KernelOption(Mode.DYNAMIC)
FLOATS, STATIC = times({"first": 9e6, "second": 9e6}), times({"first": 3e6, "second": 9e6})


@pytest.mark.parametrize(
    ("node", "ratio", "taken", "reason", "figures"),
    [
        ("first", 0.01, None, "not worth the noise", "9.000 ms in float, 3.000 ms as integers, 20.0 dB as integers"),
        ("first", 0.0, None, "less than what its borders cost", "9.000 ms in float, 3.000 ms as integers"),
        ("second", 0.0, None, "not faster as an integer kernel", "9.000 ms in float, 9.000 ms as integers"),
        ("first", 0.0, DYNAMIC, "than with fixed scales", "9.000 ms in float"),
    ],
)
def test_a_reason_is_what_decided(
    perceptron: ModelProto, node: str, ratio: float, taken: KernelOption | None, reason: str, figures: str
) -> None:
    costs = timed(perceptron, FLOATS, STATIC)
    told = reason_of(costs, node, Mode.STATIC, ratio, taken)
    assert reason in told[0]
    assert told[1].startswith(figures)


def test_nothing_is_said_of_times_that_nobody_took(perceptron: ModelProto) -> None:
    prices = CostTradeoff(timed(perceptron, FLOATS, STATIC), is_timed=False)
    noise = OptionSensitivities(Sensitivities({QuantizerId("first", is_node=True): np.array([0.01])}))
    found = prices.demotions(prices.assignment(frozenset(), noise, 0.0), noise)
    assert found["first"].reason == "static quantization of it hurts the worst output too much"
    assert found["first"].figures == "20.0 dB as integers alone"
    assert found["second"].reason == untimed_reason(Mode.STATIC, 0.0)[0]
