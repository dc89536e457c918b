"""What encoding has made is found again by what decided it, and forgotten when there is no room."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from onnxq.algorithms.cache import CodesCache
from onnxq.ir import constant, load
from onnxq.ir.spill import spilling
from onnxq.numerics.affine import Parameters, QTensor
from onnxq.numerics.formats import FORMATS


def codes(size: int) -> QTensor:
    return QTensor(np.zeros(size, np.int8), Parameters(np.ones((), np.float32), None), FORMATS["int8"])


def test_codes_are_made_once() -> None:
    cache = CodesCache()
    first = cache.codes("a", lambda: codes(8))
    assert cache.codes("a", lambda: codes(8)) is first
    assert cache.codes("b", lambda: codes(8)) is not first


def test_nobody_can_write_to_them() -> None:
    with pytest.raises(ValueError, match="read-only"):
        CodesCache().codes("a", lambda: codes(8)).codes[0] = 1


def test_what_was_longest_not_asked_for_is_forgotten() -> None:
    cache = CodesCache(capacity=250)
    first, second = (cache.codes(name, lambda: codes(100)) for name in "ab")
    assert cache.codes("a", lambda: codes(100)) is first
    cache.codes("c", lambda: codes(100))
    assert cache.codes("a", lambda: codes(100)) is first
    assert cache.codes("b", lambda: codes(100)) is not second


def test_codes_in_a_file_take_no_room(tmp_path: Path) -> None:
    cache = CodesCache(capacity=250)
    with spilling(tmp_path):
        first, second = (cache.codes(name, lambda: codes(1 << 20)) for name in "ab")
        assert cache.codes("a", lambda: codes(1 << 20)) is first
        assert cache.chosen("c", lambda: (second, None))[0] is second
        assert cache.codes("b", lambda: codes(1 << 20)) is second


def test_a_cache_without_room_keeps_nothing() -> None:
    cache = CodesCache(capacity=0)
    assert cache.codes("a", lambda: codes(8)) is not cache.codes("a", lambda: codes(8))
    assert cache.array("b", lambda: np.ones(3)) is not cache.array("b", lambda: np.ones(3))


def test_equal_values_of_one_type_and_shape_have_one_digest() -> None:
    cache, values = CodesCache(), np.arange(6, dtype=np.float32)
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
    cache = CodesCache()
    first, again = ([cache.digest(node.inputs[1]) for node in load(tmp_path / "model.onnx").nodes] for _ in range(2))
    assert first == again
    assert len(set(first)) == 3
