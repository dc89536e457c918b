"""The codes of a node are found once for all plans that have its weight in common."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from shared_weight import SCALES, Build, graph_of, plan_of

from onnxq.algorithms import node_codes as module
from onnxq.algorithms.cache import CodesCache
from onnxq.algorithms.codes import encode_with
from onnxq.algorithms.encoders import encode_weight
from onnxq.config.scheme import Mode
from onnxq.planning.plan import Mean


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    calls: list[object] = []

    def count(*given: object) -> object:
        calls.append(given)
        return encode_weight(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "encode_weight", count)
    return calls


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
