"""The codes of a node are found once for all plans that have its weight in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from onnx import ModelProto

from onnxq.encoding import node_codes as module
from onnxq.encoding.cache import CodesCache
from onnxq.encoding.codes import encode_with
from onnxq.encoding.encoders import encode_weight
from onnxq.graph import Graph
from onnxq.modelfile import as_graph
from onnxq.numbers.numerics import Parameters
from onnxq.planning.plan import Activation, Decision, Mean, Plan, Weight
from onnxq.scheme import Granularity, Mode, Spec

Build = Callable[..., ModelProto]
CHANNELS = Spec("int8-narrow", Granularity.CHANNEL)
SCALES = {"x": Parameters(np.array(0.02, np.float32), np.array(128, np.uint8))}
TWO = """(float[3,4] x) => (float[3,4] y, float[3,4] z) { [a] y = Gemm(x, w, b)  [c] z = Gemm(x, w, d) }"""


def plan_of(*modes: Mode, weight: Spec = CHANNELS) -> Plan:
    decisions = (
        Decision(name, "Gemm", mode, "", (Weight(1, "w", weight, 1, 16, 0),), 2 if mode is Mode.STATIC else None, "x")
        for name, mode in zip("ac", modes, strict=False)
    )
    return Plan(tuple(decisions), (Activation("x", Spec("uint8", symmetric=False), "x"),), "s", "t")


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    calls: list[object] = []

    def count(*given: object) -> object:
        calls.append(given)
        return encode_weight(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "encode_weight", count)
    return calls


def graph_of(build: Build, **stored: object) -> Graph:
    rows = np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4)
    return as_graph(build(TWO, **{"w": rows, "b": np.ones(4, np.float32), "d": np.ones(4, np.float32), **stored}))


def test_a_weight_that_nodes_share_is_encoded_once_whatever_their_modes(build: Build, counted: list[object]) -> None:
    found = encode_with(plan_of(Mode.STATIC, Mode.STORAGE), graph_of(build), SCALES, {})
    assert len(counted) == 1
    assert found.weights["a", 1] is found.weights["c", 1]


def test_a_plan_whose_codes_are_known_encodes_nothing(build: Build, counted: list[object]) -> None:
    cache, means = CodesCache(), {"x": np.ones(4)}
    plan = plan_of(Mode.STATIC, Mode.DYNAMIC)
    corrected = replace(plan, decisions=tuple(replace(one, mean=Mean("x", -1)) for one in plan.decisions))
    first = encode_with(corrected, graph_of(build), SCALES, means, cache=cache)
    again = encode_with(corrected, graph_of(build), SCALES, means, cache=cache)
    assert len(counted) == 1
    assert again.weights["c", 1] is first.weights["c", 1]
    for name in "ac":
        one, other = first.biases[name].values, again.biases[name].values
        assert one is not None
        assert other is not None
        np.testing.assert_array_equal(one, other)


def test_a_bias_that_raises_the_scale_has_codes_of_its_own(build: Build, counted: list[object]) -> None:
    graph = graph_of(build, d=np.array([1e9, 1, 1, 1], np.float32))
    found = encode_with(plan_of(Mode.STATIC, Mode.STATIC), graph, SCALES, {})
    assert len(counted) == 2
    scales = [found.weights[name, 1].parameters.scale.reshape(-1) for name in "ac"]
    assert scales[1][0] > scales[0][0]
    assert (scales[1][1:] == scales[0][1:]).all()
    bias = found.biases["c"].codes
    assert bias is not None
    np.testing.assert_allclose(bias.dequantize(), [1e9, 1, 1, 1], rtol=1e-3)
