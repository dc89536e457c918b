"""Codes are chosen before any graph is edited, for all nodes of a plan."""

from __future__ import annotations

import numpy as np
import pytest
from shared_weight import SCALES, Build, graph_of, plan_of

from onnxq.algorithms.codes import encode_with
from onnxq.config.scheme import Mode
from onnxq.errors import ModelError
from onnxq.ir import as_graph, scopes, to_model


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
