"""Reshape, Expand, Concat, Split and Slice become one or none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from model_texts import apply_once, difference, model, named_graph, nodes, ops, outputs, sample
from onnx import ModelProto

from onnxq.ir import Graph
from onnxq.passes import (
    DropExpands,
    MergeConcats,
    MergeReshapes,
    MergeSlices,
    RemoveUnused,
    SimplifySplits,
)
from onnxq.rewrite import Changes

# MergeReshapes --------------------------------------------------------------------------------------------------------


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


# DropExpands ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ("e = Expand(x, ones) y = Exp(e)", ["Exp"]),
        ("e = Expand(x, wide) y = Exp(e)", ["Expand", "Exp"]),
        ("e = Expand(x, wide) y = Add(e, z)", ["Add"]),
        ("e = Expand(x, wide) y = Sub(z, e)", ["Sub"]),
        ("e = Expand(x, wide) y = Mul(e, w)", ["Expand", "Mul"]),
        ("e = Expand(x, wide) c = Greater(e, z) y = Where(c, z, e)", ["Greater", "Where"]),
        ("s = Shape(z) e = Expand(x, s) y = Add(e, z)", ["Shape", "Expand", "Add"]),
        ("e = Expand(x, wide) f = Expand(z, wide) y = Mul(e, f)", ["Mul"]),
        ("e = Expand(x, deep) y = Add(e, z)", ["Expand", "Add"]),
    ],
)
def test_expands(body: str, left: list[str]) -> None:
    made = model(
        f"g (float[B, 1] x, float[B, 4] z, float[B, 1] w) => (float y) {{ {body} }}",
        ones=np.array([1, 1]), wide=np.array([1, 4]), deep=np.array([2, 1, 1]),
    )  # fmt: skip
    made.graph.output[0].type.tensor_type.ClearField("shape")
    graph = named_graph(made)
    DropExpands().apply(graph)
    RemoveUnused().apply(graph)
    assert ops(graph) == left
    assert not apply_once(DropExpands(), graph)
    for free in (1, 3):
        assert difference(outputs(graph, sample(made, 0, free)), outputs(made, sample(made, 0, free))) == 0


def test_unknown_ranks_stay() -> None:
    graph = named_graph(
        model("g (float[4] x) => (float y) { a = local.F(x) e = Expand(a, k) y = Exp(e) }", k=np.array([1]))
    )
    assert DropExpands().apply(graph).skipped == ((graph.nodes[1].name, "the shape that it makes is not known"),)


# MergeConcats ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "concats"),
    [
        ("a = Concat<axis=1>(x, z) y = Concat<axis=1>(z, a, x)", [["z", "x", "z", "x"]]),
        ("a = Concat<axis=-1>(x, z) y = Concat<axis=1>(z, a, x)", [["z", "x", "z", "x"]]),
        ("a = Concat<axis=1>(x, z) b = Concat<axis=1>(a, x) y = Concat<axis=1>(b, z)", [["x", "z", "x", "z"]]),
        (
            "a = Concat<axis=0>(x, z) b = Concat<axis=0>(z, x) y = Concat<axis=1>(a, b)",
            [["x", "z"], ["z", "x"], ["a", "b"]],
        ),
        ("a = Concat<axis=1>(x, z) y = Concat<axis=1>(a, a)", [["x", "z"], ["a", "a"]]),
        ("a = Concat<axis=1>(x) b = Neg(a) y = Exp(b)", []),
    ],
)
def test_concats(body: str, concats: list[list[str]]) -> None:
    made = model(f"g (float[2, 3] x, float[2, 3] z) => (float y) {{ {body} }}")
    made.graph.output[0].type.tensor_type.ClearField("shape")
    graph = named_graph(made)
    MergeConcats().apply(graph)
    RemoveUnused().apply(graph)
    assert [[tensor.name for tensor in node.inputs] for node in nodes(graph, "Concat")] == concats
    assert not apply_once(MergeConcats(), graph)
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) == 0


def test_one_that_others_read_stays() -> None:
    text = "a = Concat<axis=0>(x, x) y = Concat<axis=0>(a, x) w = Neg(a)"
    graph = named_graph(model(f"g (float[2] x) => (float[6] y, float[4] w) {{ {text} }}"))
    assert not MergeConcats().apply(graph)


# SimplifySplits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "opset", "left"),
    [
        ("a = Split<axis=1>(x) y = Exp(a)", 17, ["Exp"]),
        ("a, b, c = Split<axis=1>(x, sizes) y = Exp(b)", 17, ["Slice", "Exp"]),
        ("a, b, c = Split<axis=-1, split=[2, 3, 4]>(x) y = Exp(c)", 11, ["Slice", "Exp"]),
        ("a, b, c = Split<axis=1>(x) y = Exp(a)", 13, ["Slice", "Exp"]),
        ("a, b = Split<axis=1, num_outputs=2>(x) y = Exp(b)", 18, ["Slice", "Exp"]),
        ("a, b, c = Split<axis=1>(x) y = Add(a, b)", 17, ["Split", "Add"]),
        ("a, b, c = Split<axis=1>(x) y = Add(b, b)", 17, ["Slice", "Add"]),
    ],
)
def test_splits(body: str, opset: int, left: list[str]) -> None:
    made = model(f"g (float[B, 9] x) => (float y) {{ {body} }}", opset=opset, sizes=np.array([2, 3, 4]))
    made.graph.output[0].type.tensor_type.ClearField("shape")
    graph = named_graph(made)
    apply_once(SimplifySplits(), graph)
    assert ops(graph) == left
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) == 0


def test_a_part_that_is_an_output_keeps_its_name() -> None:
    made = model("g (float[B, 9] x) => (float[B, 3] b) { a, b, c = Split<axis=1>(x) }")
    graph = named_graph(made)
    apply_once(SimplifySplits(), graph)
    assert ops(graph) == ["Slice"]
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) == 0


@pytest.mark.parametrize(
    ("body", "opset", "reason"),
    [
        ("a, b = Split(x) y = Add(a, b)", 17, "several of its parts are read"),
        ("a, b = Split(x) y = Exp(a)", 17, "the sizes of its parts are not known"),
        ("a, b = Split<axis=1, split=[4, 5]>(x) y = Exp(a)", 9, "the bounds of a Slice are attributes at this opset"),
    ],
)
def test_simplify_splits_refusals_have_their_reasons(body: str, opset: int, reason: str) -> None:
    graph = named_graph(model(f"g (float[B, 9] x) => (float y) {{ [split] {body} }}", opset=opset))
    assert SimplifySplits().apply(graph).skipped == (("split", reason),)


# MergeSlices ----------------------------------------------------------------------------------------------------------

NUMBERS = {
    "zero": np.array([0]), "one": np.array([1]), "two": np.array([2]), "minus": np.array([-1]),
    "far": np.array([2**63 - 1]), "eight": np.array([8]), "back": np.array([-8]),
}  # fmt: skip


def between(body: str, opset: int = 17) -> ModelProto:
    made = model(f"g (float[B, 8, 8] x) => (float y) {{ t = Neg(x) {body} y = Exp(z) }}", opset=opset, **NUMBERS)
    made.graph.output[0].type.tensor_type.ClearField("shape")
    return made


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ("a = Slice(t, one, far, one, two) z = Slice(a, zero, far, two, two)", ["Slice"]),
        ("a = Slice(t, one, far, one) z = Slice(a, zero, minus, minus)", ["Slice"]),
        ("a = Slice(t, one, far, one) z = Slice(a, zero, minus, one)", ["Slice", "Slice"]),
        ("z = Slice(t, zero, far, zero)", []),
        ("z = Slice(t, zero, eight, one)", []),
        ("z = Slice(t, back, far, minus)", []),
        ("z = Slice(t, zero, eight, zero)", ["Slice"]),
        ("z = Slice(t, zero, far, one, two)", ["Slice"]),
        ("z = Slice(t, minus, back, one, minus)", ["Slice"]),
        ("a = Slice(t, zero, far, one) z = Slice(a, zero, far, two)", []),
    ],
)
def test_slices(body: str, left: list[str]) -> None:
    made = between(body)
    graph = named_graph(made)
    apply_once(MergeSlices(), graph)
    assert ops(graph) == ["Neg", *left, "Exp"]
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) == 0


def test_a_first_that_only_slices_read_goes() -> None:
    made = model(
        """g (float[B, 8, 8] x) => (float[B, 3, 4] y, float[B, 3, 3] w) {
        a = Slice(x, one, far, one, two) b = Slice(a, zero, far, two, two) c = Slice(a, one, far, two, two)
        y = Exp(b) w = Exp(c) }""",
        **NUMBERS,
    )
    for info in made.graph.output:
        info.type.tensor_type.ClearField("shape")
    graph = named_graph(made)
    MergeSlices().apply(graph)
    RemoveUnused().apply(graph)
    assert ops(graph) == ["Slice", "Slice", "Exp", "Exp"]
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) == 0


@pytest.mark.parametrize(
    ("text", "opset", "reason"),
    [
        ("t = Neg(x) z = Slice<starts=[0], ends=[8]>(t)", 9, "its bounds are attributes at this opset"),
        ("k = Shape(x) t = Neg(x) z = Slice(t, zero, k)", 17, "its bounds are not constant"),
        ("t = local.F(x) a = Slice(t, one, far, one) z = Slice(a, one, far, minus)", 17, "the rank is not known"),
        ("t = Neg(x) z = Slice(t, one, far)", 17, "it takes a part"),
    ],
)
def test_merge_slices_refusals_have_their_reasons(text: str, opset: int, reason: str) -> None:
    made: Any = model(f"g (float[B, 8, 8] x) => (float y) {{ {text} y = Exp(z) }}", opset=opset, **NUMBERS)
    made.graph.output[0].type.tensor_type.ClearField("shape")
    changes = MergeSlices().apply(named_graph(made))
    assert not changes
    assert reason in dict(changes.skipped).popitem()[1]
