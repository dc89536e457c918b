"""Encodings of a plan, the cache of encoded weights, and what decides the encoding of one node."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from shared_weight import SCALES, Build, graph_of, plan_of

from onnxq.algorithms import encode as module
from onnxq.algorithms.encode import encode_with
from onnxq.algorithms.encoders import encode_weight
from onnxq.algorithms.encodings import EncodingCache
from onnxq.config.scheme import Mode
from onnxq.errors import ModelError
from onnxq.ir import all_graphs, as_graph, constant, load, to_model
from onnxq.ir.spilling import spilling
from onnxq.numerics.affine import QTensor, QuantParams
from onnxq.numerics.formats import FORMATS
from onnxq.planning.plan import Mean


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
    with pytest.raises(ModelError, match="weight w holds NaN or infinity, which cannot be quantized"):
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
    assert len(list(all_graphs(graph))) == 3
    assert set(encode_with(plan_of(Mode.STATIC), graph, SCALES, {}).weights) == {("a", 1)}


# What encoding has made is found again by what decided it, and forgotten when there is no room.


def quantized(size: int) -> QTensor:
    return QTensor(np.zeros(size, np.int8), QuantParams(np.ones((), np.float32), None), FORMATS["int8"])


def test_codes_are_made_once() -> None:
    cache = EncodingCache()
    first = cache.tensor("a", lambda: quantized(8))
    assert cache.tensor("a", lambda: quantized(8)) is first
    assert cache.tensor("b", lambda: quantized(8)) is not first


def test_nobody_can_write_to_them() -> None:
    with pytest.raises(ValueError, match="read-only"):
        EncodingCache().tensor("a", lambda: quantized(8)).values[0] = 1


def test_what_was_longest_not_asked_for_is_forgotten() -> None:
    cache = EncodingCache(capacity=250)
    first, second = (cache.tensor(name, lambda: quantized(100)) for name in "ab")
    assert cache.tensor("a", lambda: quantized(100)) is first
    cache.tensor("c", lambda: quantized(100))
    assert cache.tensor("a", lambda: quantized(100)) is first
    assert cache.tensor("b", lambda: quantized(100)) is not second


def test_codes_in_a_file_take_no_room(tmp_path: Path) -> None:
    cache = EncodingCache(capacity=250)
    with spilling(tmp_path):
        first, second = (cache.tensor(name, lambda: quantized(1 << 20)) for name in "ab")
        assert cache.tensor("a", lambda: quantized(1 << 20)) is first
        assert cache.tensor("b", lambda: quantized(1 << 20)) is second


def test_a_cache_without_room_keeps_nothing() -> None:
    cache = EncodingCache(capacity=0)
    assert cache.tensor("a", lambda: quantized(8)) is not cache.tensor("a", lambda: quantized(8))
    assert cache.array("b", lambda: np.ones(3)) is not cache.array("b", lambda: np.ones(3))


def test_equal_values_of_one_type_and_shape_have_one_digest() -> None:
    cache, values = EncodingCache(), np.arange(6, dtype=np.float32)
    same = [cache.digest(constant(name, values.copy())) for name in "ab"]
    others = [values.reshape(2, 3), values.view(np.int32), values + 1]
    assert len(set(same)) == 1
    assert len({*same, *(cache.digest(constant("c", other)) for other in others)}) == 4


def test_values_in_a_file_are_told_by_where_they_lie(tmp_path: Path) -> None:
    values = {"a": np.zeros(300, np.float32), "b": np.zeros(300, np.float32), "c": np.ones(300, np.float32)}
    nodes = [helper.make_node("Add", ["x", name], [f"y{name}"]) for name in values]
    infos = [helper.make_tensor_value_info(name, 1, [300]) for name in ("x", "ya", "yb", "yc")]
    weights = [numpy_helper.from_array(array, name) for name, array in values.items()]
    model = helper.make_model(helper.make_graph(nodes, "g", infos[:1], infos[1:], weights))
    onnx.save(model, tmp_path / "model.onnx", save_as_external_data=True, location="model.data", size_threshold=0)
    cache = EncodingCache()
    first, again = ([cache.digest(node.inputs[1]) for node in load(tmp_path / "model.onnx").nodes] for _ in range(2))
    assert first == again
    assert len(set(first)) == 3


# The quantized values of a node are found once for all plans that have its weight in common.


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
    cache, means = EncodingCache(), {"x": np.ones(4)}
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
    bias = found.biases["c"].quantized
    assert bias is not None
    np.testing.assert_allclose(bias.dequantize(), [1e9, 1, 1, 1], rtol=1e-3)
