"""Codes are chosen before any graph is edited, for all nodes of a plan."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from onnx import ModelProto

from onnxq.encoding.codes import encode_with
from onnxq.errors import ModelError
from onnxq.graph import Graph, scopes
from onnxq.modelfile import as_graph, to_model
from onnxq.numbers.numerics import Parameters
from onnxq.planning.plan import Activation, Decision, Plan, Weight
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


def graph_of(build: Build, **stored: object) -> Graph:
    rows = np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4)
    return as_graph(build(TWO, **{"w": rows, "b": np.ones(4, np.float32), "d": np.ones(4, np.float32), **stored}))


def test_nothing_of_the_graph_is_edited(build: Build) -> None:
    graph = graph_of(build)
    before = to_model(graph).SerializeToString()
    found = encode_with(plan_of(Mode.STATIC, Mode.STORAGE), graph, SCALES, {})
    assert to_model(graph).SerializeToString() == before
    assert set(found.weights) == {("a", 1), ("c", 1)}
    assert set(found.biases) == {"a"}


@pytest.mark.parametrize("mode", [Mode.STATIC, Mode.DYNAMIC, Mode.STORAGE, Mode.WEIGHT_ONLY])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_weight_without_codes_is_told_in_every_mode(mode: Mode, bad: float, build: Build) -> None:
    graph = graph_of(build, w=np.array([[bad] * 4] * 4, np.float32))
    with pytest.raises(ModelError, match="weight w holds NaN or infinity, which have no code"):
        encode_with(plan_of(mode, mode), graph, SCALES, {})


def test_nodes_of_bodies_have_codes_too(build: Build) -> None:
    made = build(
        """(float[3,4] x, bool t) => (float[3,4] y) {
            y = If (t) <
                then_branch = one () => (float[3,4] u) { [a] u = Gemm(x, w, b) },
                else_branch = two () => (float[3,4] v) { v = Neg(x) }>
        }""",
        w=(4, 4), b=(4,),
    )  # fmt: skip
    graph = as_graph(made)
    assert len(list(scopes(graph))) == 3
    assert set(encode_with(plan_of(Mode.STATIC), graph, SCALES, {}).weights) == {("a", 1)}
