"""Shapes of numbers and names, targets of Reshape, and arithmetic on shapes."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

import numpy as np
import pytest
from model_texts import model
from onnx.reference import ReferenceEvaluator

from onnxq.ir import Graph, as_graph
from onnxq.rewrite.shapes import (
    MOST_ENTRIES,
    Value,
    broadcast,
    evaluate,
    expand_target,
    reshape_target,
    reshaped,
    shape_value,
    sliced,
    value_of,
)

# ShapeTargets ---------------------------------------------------------------------------------------------------------

LAST = np.iinfo(np.int64).max


RESHAPED: list[tuple[Any, list[Any], list[Any]]] = [
    ([2, 6], [3, 4], [3, 4]),
    (["a", 6], [0, 2, -1], ["a", 2, 3]),
    (["a", "b", 6], ["a", "b", 2, 3], ["a", "b", 2, 3]),
    (["a", "b", 6], [-1, 6], ["(a*b)", 6]),
    ([None, 6], [-1, 3], [None, 3]),
    (["a", 6], [-1, 4], [None, 4]),
    ([6, "a"], [3, None], [3, "(2*a)"]),
    # An entry that is 0 copies a dimension. It is 0 too, or another entry has to be.
    (["(a*b)", 6], ["a", "b", 6], ["a", "b", 6]),
    (["(a*b)", 6], ["a", -1, 6], ["a", None, 6]),
    ([6, "a", "b"], ["(2*a)", 3, "b"], ["(2*a)", 3, "b"]),
    (["min(7,min(5,a))", 6], ["a", 6], ["a", 6]),
    # It may be another dimension.
    ([6], ["a", 1], [6, 1]),
    ([6, "b"], ["a", "b"], [None, "b"]),
    ([6, "a"], ["a", -1], [None, None]),
    ([6, "a"], ["a", None], [None, None]),
    (["a", 6], ["b", -1], [None, None]),
    (["(a+b)", 6], ["a", 2, 3], ["(a+b)", 2, 3]),
    # A computed entry is free beside one that is 0.
    (["a", 6], ["a", None], ["a", None]),
]


@pytest.mark.parametrize(
    ("data", "target", "expected"),
    [
        *RESHAPED,
        (None, [0, 3, -1], [None, 3, None]),
        ([2], [0, 0, -1], [2, None, None]),
        (["a", 4], [-1, -1], [None, None]),
    ],
)
def test_reshape_gives(data: Any, target: list[Any], expected: list[Any]) -> None:
    assert reshaped(data, target) == expected


@pytest.mark.parametrize(("data", "target"), [row[:2] for row in RESHAPED])
def test_reshape_gives_the_same_with_every_size(data: list[Any], target: list[Any]) -> None:
    """Named dimensions have every size, and so have unknown ones; two entries are not 0 at once."""
    shape, seen = reshaped(data, target), 0
    for a, b, unknown, entry in product(range(7), range(7), (0, 3), (-1, 0, 2, 6)):
        sizes = {"a": a, "b": b, "min": min}
        given = [unknown if extent is None else sized(extent, sizes) for extent in data]
        wanted = [entry if extent is None else sized(extent, sizes) for extent in target]
        made = by_onnxruntime(given, wanted)
        if made is None or wanted.count(0) > 1:
            continue
        seen += 1
        believed = [size if extent is None else sized(extent, sizes) for extent, size in zip(shape, made, strict=True)]
        assert believed == made, (given, wanted)
    assert seen


def sized(extent: Any, sizes: dict[str, Any]) -> int:
    return int(eval(extent, {}, sizes)) if isinstance(extent, str) else int(extent)


def by_onnxruntime(data: list[int], target: list[int]) -> list[int] | None:
    """The shape that Reshape gives; None where it fails."""
    made = [data[index] if entry == 0 and index < len(data) else entry for index, entry in enumerate(target)]
    if made.count(-1) == 1:
        rest = -prod(made)
        made[made.index(-1)] = prod(data) // rest if rest and prod(data) % rest == 0 else -1
    return made if -1 not in made and prod(made) == prod(data) else None


def test_a_literal_zero_is_a_dimension() -> None:
    assert reshaped(["a", 0], [0, 3], literal=True) == [0, 3]
    assert reshape_target(["a", 0], [0, "a"], literal=True) is None
    assert reshape_target(["a", 4], ["a", 2, 2], literal=True) == [0, 2, 2]


@pytest.mark.parametrize(
    ("data", "target", "expected"),
    [
        (["a", "b", 6], ["a", "b", 2, 3], [0, 0, 2, 3]),
        (["a", "b", 6], ["a", "c", 2, 3], None),
        ([4, "b", 6], [0, "c", 2, 3], [0, -1, 2, 3]),
        ([0, "b", 6], [0, "c", 2, 3], None),
        (["a", "b", 6], [None, 2, 3], [-1, 2, 3]),
        (["a", "b", 6], [0, "b", -1], [0, 0, -1]),
        (["a", "b", 6], ["c", "d", 6], None),
        (["a", "b", 6], ["c", -1], None),
        ([None, 6], [None, 2, 3], [-1, 2, 3]),
        ([None, None, 6], [None, None, 2, 3], None),
        (None, ["a", 6], [-1, 6]),
        (["a"], [1, "a"], [1, -1]),
        ([4], [2, 2], [2, 2]),
    ],
)
def test_targets_of_reshape(data: Any, target: list[Any], expected: list[int] | None) -> None:
    assert reshape_target(data, target) == expected


@pytest.mark.parametrize(
    ("target", "expected"), [(["a", -1], [0, -1]), (["a", "c"], None), (["c", 6], [-1, 6]), (["a", "b"], [0, 0])]
)
def test_beside_a_dimension_that_may_be_empty_none_is_inferred(target: list[Any], expected: list[int] | None) -> None:
    assert reshape_target(["a", "b", 6], target) == expected


@pytest.mark.parametrize(
    ("data", "target", "shape", "numbers"),
    [
        (["a", 1], ["a", "b"], ["a", "b"], None),
        (["a", 1], ["a", 4], ["a", 4], [1, 4]),
        (["a", 4], [2, "a", 1], [2, "a", 4], [2, 1, 1]),
        (["b", "a", 4], ["a", 4], ["b", "a", 4], [1, 4]),
        (["a"], ["b"], [None], None),
        ([], [3], [3], [3]),
        ([3], [], [3], []),
        (["a"], [None], [None], None),
    ],
)
def test_expand(data: Any, target: list[Any], shape: list[Any], numbers: list[int] | None) -> None:
    assert broadcast([data, target]) == shape
    assert expand_target(data, target) == numbers


@pytest.mark.parametrize(
    ("extent", "start", "end", "step", "expected"),
    [
        (7, 1, -1, 2, 3),
        (7, 5, 2, 1, 0),
        (7, 6, 0, -1, None),
        (64, 0, "a", 1, "min(64,a)"),
        (64, 1, "a", 1, None),
        ("a", 0, "a", 1, "a"),
        ("a", 0, LAST, 1, "a"),
        ("a", 0, -1, 1, None),
        (None, 0, 4, 1, None),
    ],
)
def test_slices_take(extent: Any, start: Any, end: Any, step: Any, expected: Any) -> None:
    assert sliced(extent, start, end, step) == expected


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ([["a", 1], ["b", 4]], [None, 4]),
        ([["a", 3], [3]], ["a", 3]),
        ([["a"], ["min(64,a)"]], ["a"]),
        ([["a"], ["min(1,a)"]], [None]),
        ([["a"], [None]], [None]),
        ([[1], [None]], [None]),
        ([["a"], [7]], [7]),
        ([[], []], []),
        ([[1], [1]], [1]),
    ],
)
def test_shapes_broadcast_to(shapes: list[Any], expected: list[Any]) -> None:
    assert broadcast(shapes) == expected


# ShapeValues ----------------------------------------------------------------------------------------------------------

NUMBERS = {
    "a": np.array([4, 7, -2, 9]), "b": np.array([3, -2, 5, 1]), "m": np.arange(6).reshape(2, 3), "zero": np.array(0),
    "zeros": np.array([0]), "one": np.array([1]), "minus": np.array([-1]), "two": np.array(2), "four": np.array(4),
    "far": np.array([100]), "farther": np.array([-100]), "flat": np.array([3, -1]), "pair": np.array([2, 3]),
}  # fmt: skip


def evaluated(graph: Graph, **known: list[Any]) -> dict[str, Value | None]:
    """What is known of every tensor, where some inputs are known."""
    values = {
        name: Value(np.array([*entries, None], object)[:-1], np.dtype(np.int64)) for name, entries in known.items()
    }
    found: dict[str, Value | None] = dict(values)
    for tensor in graph.initializers:
        found[tensor.name] = value_of(tensor)
    for node in graph.nodes:
        inputs = [found.get(tensor.name) for tensor in node.inputs]
        shapes = [tensor.shape for tensor in node.inputs]
        found[node.outputs[0].name] = evaluate(node, inputs, shapes)
    return found


@pytest.mark.parametrize(
    ("body", "opset"),
    [
        ("y = Add(a, b)", 17),
        ("y = Sub(a, b)", 17),
        ("y = Mul(a, b)", 17),
        ("y = Div(a, b)", 17),
        ("y = Max(a, b, a)", 17),
        ("y = Min(a, b)", 17),
        ("c = Greater(a, b) y = Where(c, a, b)", 17),
        ("c = Less(a, b) d = Not(c) y = Where(d, a, b)", 17),
        ("c = Equal(a, b) d = Less(a, b) e = Or(c, d) f = And(e, d) y = Where(f, a, b)", 17),
        ("y = Cast<to = 6>(a)", 17),
        ("y = Concat<axis = 0>(a, b)", 17),
        ("y = Gather<axis = 1>(m, minus)", 17),
        ("y = Gather(a, zero)", 17),
        ("y = Slice(a, one, minus)", 17),
        ("y = Slice(a, minus, farther, zeros, minus)", 17),
        ("y = Slice(m, one, far, one)", 17),
        ("y = Slice<starts = [1], ends = [3]>(a)", 9),
        ("y = Unsqueeze(a, zeros)", 17),
        ("y = Unsqueeze<axes = [0, 2]>(a)", 11),
        ("u = Unsqueeze(a, zeros) y = Squeeze(u)", 17),
        ("u = Unsqueeze(a, zeros) y = Squeeze(u, zeros)", 17),
        ("y = Reshape(m, flat)", 17),
        ("y = Transpose(m)", 17),
        ("y = Expand(one, pair)", 17),
        ("y = ReduceProd<axes = [0], keepdims = 0>(a)", 17),
        ("y = ReduceProd(a)", 17),
        ("y = Shape(m)", 17),
        ("y = Shape<start = 1>(m)", 17),
        ("y = Size(m)", 17),
        ("y = Identity(a)", 17),
        ("y = Range(zero, four, two)", 17),
        ("y = ConstantOfShape<value = int64[1] {3}>(pair)", 17),
        ("y = Mod(four, two)", 17),
    ],
)
def test_known_values_are_what_the_runtime_computes(body: str, opset: int) -> None:
    made = model(f"g () => (int64 y) {{ {body} }}", opset=opset, **NUMBERS)
    found = evaluated(as_graph(made))["y"]
    expected = ReferenceEvaluator(made).run(None, {})[0]
    assert found is not None
    assert found.known
    np.testing.assert_array_equal(found.array, expected)
    assert found.array.dtype == expected.dtype


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("y = Add(s, one)", ["(1+batch)", "(1+seq)"]),
        ("y = Mul(s, one)", ["batch", "seq"]),
        ("y = Mul(s, minus)", [None, None]),
        ("y = Sub(s, s)", [0, 0]),
        ("c = Equal(s, minus) y = Where(c, one, s)", ["batch", "seq"]),
        ("c = Equal(s, one) y = Where(c, one, s)", [None, None]),
        ("g = Gather(s, minus) y = Concat<axis = 0>(g, one)", ["seq", 1]),
        ("y = Slice(s, minus, far)", ["seq"]),
        ("y = Reshape(s, minus)", ["batch", "seq"]),
        ("c = Cast<to = 6>(s) y = Cast<to = 7>(c)", ["batch", "seq"]),
        ("y = Shape(s)", [2]),
        ("y = ReduceProd(s)", ["(batch*seq)"]),
    ],
)
def test_names_go_where_they_can(body: str, expected: list[Any]) -> None:
    made = as_graph(model(f"g (int64[2] s) => (int64 y) {{ {body} }}", **NUMBERS))
    found = evaluated(made, s=["batch", "seq"])["y"]
    assert found is not None
    assert list(found.entries) == expected
    assert found.known == (None not in expected and all(isinstance(entry, int) for entry in expected))


@pytest.mark.parametrize(
    "body",
    [
        "y = Cast<to = 1>(a)",
        "y = Cast<to = 9>(a)",
        "y = Sqrt(f)",
        "y = Gather(a, far)",
        "y = Concat<axis = 3>(a, b)",
        "y = Add(a, flat)",
        "y = Slice(a, one, far, one)",
        "y = Reshape(a, pair)",
        "y = Squeeze(a, zeros)",
        "y = Expand(one, far_pair)",
        "y = ConstantOfShape(far_pair)",
        "y = Range(zero, long, two)",
        "y = local.Add(a, b)",
        "y = Neg(a)",
    ],
)
def test_what_is_not_known_or_cannot_be_has_no_value(body: str) -> None:
    numbers = {**NUMBERS, "far_pair": np.array([1000, 1000]), "long": np.array(10**6), "f": np.ones(2, np.float32)}
    assert evaluated(as_graph(model(f"g () => (int64 y) {{ {body} }}", **numbers)))["y"] is None


def test_numbers_that_the_type_cannot_hold_are_unknown() -> None:
    made = model(
        "g () => (int64 y) { b = Mul(a, a) c = Cast<to = 6>(a) y = Concat<axis = 0>(b, a) }", a=np.array([2**40])
    )
    found = evaluated(as_graph(made))
    assert [list(found[name].entries) for name in "byc"] == [[None], [None, 2**40], [None]]  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="not known"):
        _ = found["b"].numbers  # type: ignore[union-attr]


def test_long_tensors_and_those_a_caller_may_feed_are_no_shape_arithmetic() -> None:
    made = model(
        "g (int64[1] b) => (int64 y) { y = Add(a, b) }", a=np.zeros(MOST_ENTRIES + 1, np.int64), b=np.zeros(1, np.int64)
    )
    graph = as_graph(made)
    assert [value_of(tensor) for tensor in graph.nodes[0].inputs] == [None, None]


def test_shapes_are_values_without_what_cannot_be_a_dimension() -> None:
    assert list(shape_value(["a", 3, None, -5]).entries) == ["a", 3, None, None]
    assert list(shape_value(["a", 3, None], -2, 2).entries) == [3]
