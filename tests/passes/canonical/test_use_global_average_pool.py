"""UseGlobalAveragePool writes every mean over a whole image alike."""

from __future__ import annotations

import numpy as np
import pytest
from model_texts import difference, model, named_graph, nodes, ops, outputs, sample

from onnxq.ir import Graph
from onnxq.passes import UseGlobalAveragePool
from onnxq.rewrite import Changes


def pooled(
    body: str, data: str = "N, 4, 5, 6", result: str = "N, 4", opset: int = 17, **more: np.ndarray
) -> tuple[Graph, Changes]:
    made = model(f"g (float[{data}] x) => (float[{result}] y) {{ {body} }}", opset=opset, **more)
    graph = named_graph(made)
    changes = UseGlobalAveragePool().apply(graph)
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 1e-6
    assert not UseGlobalAveragePool().apply(graph)
    return graph, changes


@pytest.mark.parametrize(
    ("body", "more"),
    [
        ("y = ReduceMean<axes = [2, 3], keepdims = 0>(x)", {}),
        ("y = ReduceMean<axes = [-1, -2], keepdims = 0>(x)", {}),
        ("m = ReduceMean<axes = [-1, -2]>(x) y = Flatten(m)", {}),
        ("m = ReduceMean<axes = [2, 3]>(x) y = Squeeze(m, axes)", {"axes": [3, -2]}),
        ("m = AveragePool<kernel_shape = [5, 6], strides = [5, 6]>(x) y = Reshape(m, to)", {"to": [-1, 4]}),
        ('m = AveragePool<kernel_shape = [5, 6], auto_pad = "VALID">(x) y = Reshape(m, to)', {"to": [0, -1]}),
        ("m = GlobalAveragePool(x) y = Reshape(m, to)", {"to": [0, 4]}),
        ("m = GlobalAveragePool(x) y = Reshape<allowzero = 1>(m, to)", {"to": [-1, 4]}),
    ],
)
def test_all_forms_end_as_one(body: str, more: dict[str, list[int]]) -> None:
    graph, _ = pooled(body, **{name: np.array(values) for name, values in more.items()})
    assert ops(graph) == ["GlobalAveragePool", "Flatten"]


def test_images_of_another_rank() -> None:
    axes = np.array([2, 3, 4])
    graph, _ = pooled("y = ReduceMean<keepdims = 0>(x, axes)", "N, 4, 5, 6, 7", opset=18, axes=axes)
    assert ops(graph) == ["GlobalAveragePool", "Flatten"]
    graph, _ = pooled("m = AveragePool<kernel_shape = [5]>(x) y = Squeeze(m, axes)", "N, 4, 5", axes=np.array([2]))
    assert ops(graph) == ["GlobalAveragePool", "Flatten"]


def test_a_mean_over_the_features_of_a_sequence_stays() -> None:
    _, changes = pooled("y = ReduceMean<axes = [2], keepdims = 0>(x)", "N, 4, 5")
    assert changes.skipped[0][1] == "its data may be a sequence"


@pytest.mark.parametrize("restore", ["Reshape(f, to)", "Unsqueeze(f, axes)"])
def test_axes_that_are_restored_are_not_dropped(restore: str) -> None:
    body = f"m = ReduceMean<axes = [2, 3], keepdims = 0>(x) f = Flatten(m) s = {restore} y = Mul(x, s)"
    used = {"to": np.array([-1, 4, 1, 1])} if "to" in restore else {"axes": np.array([2, 3])}
    graph, _ = pooled(body.replace("f = Flatten(m) ", "").replace("(f", "(m"), result="N, 4, 5, 6", **used)
    assert ops(graph) == ["GlobalAveragePool", "Mul"]


def test_a_mean_that_keeps_its_axes_is_one_node() -> None:
    graph, _ = pooled("m = ReduceMean<axes = [2, 3]>(x) y = Mul(x, m)", result="N, 4, 5, 6")
    assert ops(graph) == ["GlobalAveragePool", "Mul"]
    assert nodes(graph)[0].outputs[0].shape == ["N", 4, 1, 1]


@pytest.mark.parametrize(
    ("body", "result", "reason"),
    [
        ("y = ReduceMean<axes = [1, 2], keepdims = 0>(x)", "N, 6", "it is not known to be over all axes"),
        ("y = ReduceMean<keepdims = 0>(x)", "", "it is not known to be over all axes of an image and no other"),
        ("y = AveragePool<kernel_shape = [5, 5]>(x)", "N, 4, 1, 2", "its window is not known to be the whole image"),
        ("y = AveragePool<kernel_shape = [5, 6], pads = [1, 0, 0, 0]>(x)", "N, 4, 2, 1", "it pads"),
        ("m = GlobalAveragePool(x) y = Squeeze(m)", "N, 4", "it may drop more axes"),
        ("m = GlobalAveragePool(x) y = Reshape(m, to)", "4, N", "it is not known to keep batch and channels"),
    ],
)
def test_other_means_stay(body: str, result: str, reason: str) -> None:
    _, changes = pooled(body, result=result, **({"to": np.array([4, -1])} if "to" in body else {}))
    assert not changes.changed
    assert reason in changes.skipped[0][1]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ("N, 4, H, 6", "the size of its image is not known"),
        ("N, C, 5, 6", "the number of its channels is not known"),
        ("1, 2, 65, 65", "its image is large"),
    ],
)
def test_sums_stay_exact(data: str, reason: str) -> None:
    _, changes = pooled("y = ReduceMean<axes = [2, 3], keepdims = 0>(x)", data, "N, C")
    assert reason in changes.skipped[0][1]


@pytest.mark.parametrize(("data", "dtype"), [("K", "float"), ("N, 4, 5, 6", "double")])
def test_other_data_stays(data: str, dtype: str) -> None:
    text = f"g ({dtype}[{data}] x) => ({dtype}[N, C] y) {{ y = ReduceMean<axes = [2, 3], keepdims = 0>(x) }}"
    assert not UseGlobalAveragePool().apply(named_graph(model(text)))
