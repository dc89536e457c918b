"""MergeReshapes makes one operator of two that change the shape alone, and none of one that does not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from model_texts import apply_once, difference, model, named_graph, nodes, ops, outputs, sample

from onnxq.ir import Graph
from onnxq.passes import MergeReshapes, RemoveUnused
from onnxq.rewrite import Changes


def merged(shape: str, body: str, *, opset: int = 17, **numbers: list[int]) -> tuple[Graph, Changes]:
    """Apply between two operators; the numbers are targets and axes."""
    weights = {name: np.array(entries) for name, entries in numbers.items()}
    made = model(f"g (float[{shape}] x) => (float y) {{ t = Neg(x) {body} y = Exp(z) }}", opset=opset, **weights)
    made.graph.output[0].type.tensor_type.ClearField("shape")
    graph = named_graph(made)
    changes = apply_once(MergeReshapes(), graph)
    RemoveUnused().apply(graph)
    for free in (1, 3):
        inputs = sample(made, free, free)
        assert difference(outputs(graph, inputs), outputs(made, inputs)) == 0
    return graph, changes


def numbers_of(graph: Graph) -> Any:
    node = graph.nodes[1]
    return list(node.inputs[1].values if len(node.inputs) > 1 else node.attrs["axes"])


@pytest.mark.parametrize(
    ("shape", "body", "op", "expected", "numbers"),
    [
        ("2,6", "a = Reshape(t, p) z = Reshape(a, q)", "Reshape", [4, 3], {"p": [12], "q": [4, 3]}),
        ("B,6", "a = Reshape(t, p) z = Reshape(a, q)", "Reshape", [-1, 3, 2], {"p": [-1, 2], "q": [-1, 3, 2]}),
        ("B,6", "a = Reshape(t, p) z = Reshape(a, q)", "Reshape", [0, 6, 1], {"p": [0, 2, 3], "q": [0, -1, 1]}),
        ("B,L,6", "a = Reshape(t, p) z = Reshape(a, q)", "Reshape", [-1, 2], {"p": [0, -1], "q": [-1, 2]}),
        ("B,C,1,1", "a = Flatten(t) z = Unsqueeze(a, p)", "Reshape", [0, 0, 1], {"p": [2]}),
        ("B,8,2,2", "a = Flatten(t) z = Reshape(a, p)", "Reshape", [0, 32], {"p": [-1, 32]}),
        ("B,1,8", "a = Squeeze(t, p) z = Unsqueeze(a, q)", "Reshape", [0, 8, 1], {"p": [1], "q": [2]}),
        ("B,8", "a = Unsqueeze(t, p) z = Unsqueeze(a, q)", "Unsqueeze", [1, 3], {"p": [1], "q": [-1]}),
        ("B,8", "a = Unsqueeze(t, p) z = Unsqueeze(a, q)", "Unsqueeze", [0, 2], {"p": [1], "q": [0]}),
        ("1,B,1,8", "a = Squeeze(t, p) z = Squeeze(a, q)", "Squeeze", [0, 2], {"p": [0], "q": [1]}),
        ("1,B,1,8", "a = Squeeze(t, p) z = Squeeze(a, q)", "Squeeze", [0, 2], {"p": [-2], "q": [0]}),
    ],
)
def test_pairs_become_one(shape: str, body: str, op: str, expected: list[int], numbers: dict[str, Any]) -> None:
    graph, _ = merged(shape, body, **numbers)
    assert ops(graph) == ["Neg", op, "Exp"]
    assert numbers_of(graph) == expected


@pytest.mark.parametrize(
    ("shape", "body", "numbers"),
    [
        ("2,6", "z = Reshape(t, p)", {"p": [2, 6]}),
        ("B,6", "z = Reshape(t, p)", {"p": [-1, 6]}),
        ("?,6", "z = Reshape(t, p)", {"p": [-1, 6]}),
        ("B,L,6", "z = Reshape(t, p)", {"p": [0, 0, 6]}),
        ("B,L,6", "z = Reshape(t, p)", {"p": [0, -1, 6]}),
        ("B,6", "z = Flatten(t)", {}),
        ("?,?", "a = Unsqueeze(t, p) z = Squeeze(a, p)", {"p": [1]}),
        ("B,6", "a = Reshape(t, p) z = Reshape(a, q)", {"p": [-1, 2, 3], "q": [-1, 6]}),
        ("7", "z = Reshape(t, p)", {"p": [-1]}),
    ],
)
def test_what_keeps_the_shape_goes(shape: str, body: str, numbers: dict[str, Any]) -> None:
    assert ops(merged(shape, body, **numbers)[0]) == ["Neg", "Exp"]


@pytest.mark.parametrize("opset", [11, 12])
def test_axes_are_attributes_in_older_models(opset: int) -> None:
    graph, _ = merged("B,8", "a = Unsqueeze<axes=[1]>(t) z = Unsqueeze<axes=[0]>(a)", opset=opset)
    assert ops(graph) == ["Neg", "Unsqueeze", "Exp"]
    assert numbers_of(graph) == [0, 2]


@pytest.mark.parametrize(
    ("shape", "body", "numbers"),
    [
        ("B,L,6", "a = Reshape(t, p) z = Reshape(a, q)", {"p": [-1, 6], "q": [0, 3, 2]}),
        ("B,L", "a = Flatten(t) z = Unsqueeze(a, p)", {"p": [1]}),
        ("0,6", "a = Reshape(t, p) z = Reshape(a, q)", {"p": [6, 0], "q": [2, 0]}),
    ],
)
def test_what_cannot_be_said_in_one_target_stays_or_loses_its_first(
    shape: str, body: str, numbers: dict[str, Any]
) -> None:
    made = model(
        f"g (float[{shape}] x) => (float y) {{ t = Neg(x) {body} y = Exp(z) }}",
        **{name: np.array(entries) for name, entries in numbers.items()},
    )
    made.graph.output[0].type.tensor_type.ClearField("shape")
    graph = named_graph(made)
    MergeReshapes().apply(graph)
    assert len(nodes(graph)) >= 3
    if not shape.startswith("0"):
        assert difference(outputs(graph, sample(made, 0)), outputs(made, sample(made, 0))) == 0


def test_a_first_that_others_read_stays_for_them() -> None:
    text = "a = Reshape(x, p) z = Unsqueeze(a, q) y = Exp(z) w = Exp(a)"
    made = model(f"g (float[2,6] x) => (float[12,1] y, float[12] w) {{ {text} }}", p=np.array([12]), q=np.array([1]))
    graph = named_graph(made)
    apply_once(MergeReshapes(), graph)
    assert ops(graph) == ["Reshape", "Reshape", "Exp", "Exp"]
    assert difference(outputs(graph, sample(made, 0)), outputs(made, sample(made, 0))) == 0


def test_axes_of_an_unknown_rank_merge_where_they_count_from_the_front() -> None:
    text = "g (float[2,6] x) => (float y) { t = local.F(x) a = Unsqueeze(t, p) z = Unsqueeze(a, q) y = Exp(z) }"
    graph = named_graph(model(text, p=np.array([1]), q=np.array([0])))
    assert MergeReshapes().apply(graph).changed
    graph = named_graph(model(text, p=np.array([1]), q=np.array([-1])))
    assert not MergeReshapes().apply(graph).changed


@pytest.mark.parametrize(
    "body", ["z = Unsqueeze(x, k)", "z = Squeeze(x, k)", "z = Reshape(x, k)", "a = Flatten(x) z = Squeeze(a, k)"]
)
def test_what_is_fed_is_not_known(body: str) -> None:
    graph = named_graph(model(f"g (float[2,6] x, int64[N] k) => (float y) {{ {body} y = Exp(z) }}"))
    assert not [name for name in MergeReshapes().apply(graph).changed if "Flatten" not in name]


def test_a_squeeze_without_axes_takes_all_that_are_one() -> None:
    graph, _ = merged("2,1,6,1", "a = Squeeze(t) z = Unsqueeze(a, p)", p=[0])
    assert ops(graph) == ["Neg", "Reshape", "Exp"]
    assert numbers_of(graph) == [1, 2, 6]
