from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from onnxq.calibration.budget import peak_memory, tap_groups, tap_sizes
from onnxq.calibration.runner import collect
from onnxq.errors import DataError

MODEL = Path(__file__).parents[2] / "models" / "resnet.onnx"
SAMPLE = {"image": np.load(MODEL.parent / "data" / "calib.npz")["image"][:3]}


def test_sizes_are_those_of_the_tensors() -> None:
    import onnx

    graph = onnx.load(MODEL).graph
    names = [node.output[0] for node in graph.node if node.op_type == "Conv"]
    sizes = tap_sizes(MODEL, SAMPLE, [*names, "image", graph.output[0].name])
    seen = collect(MODEL, [SAMPLE], names)
    assert {name: sizes[name] for name in names} == {name: 4 * seen.tensors[name].count for name in names}
    assert sizes["image"] == sizes[graph.output[0].name] == 0


@pytest.mark.parametrize(
    ("limit", "groups"),
    [(9, (("a", "b", "c"),)), (8, (("a", "b"), ("c",))), (5, (("a", "b"), ("c",))), (4, (("a",), ("b",), ("c",)))],
)
def test_groups_keep_the_order_and_the_limit(limit: int, groups: tuple[tuple[str, ...], ...]) -> None:
    assert tap_groups({"a": 3, "b": 2, "c": 4}, limit) == groups


@pytest.mark.parametrize("limit", [3, 0, -1])
def test_a_tensor_beyond_the_limit_is_named(limit: int) -> None:
    with pytest.raises(DataError, match=rf"Tensor 'c' takes 4 bytes, expected at most the {max(limit, 0)} that"):
        tap_groups({"c": 4}, limit)


def test_memory_is_counted_in_bytes() -> None:
    before = peak_memory()
    ballast = np.ones(50_000_000, np.uint8)
    assert 10_000_000 < before <= peak_memory() < 10**12
    assert peak_memory() > ballast.nbytes
