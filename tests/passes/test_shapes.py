"""Shape arithmetic is folded."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from model_texts import (
    apply_once,
    difference,
    initializer_names,
    model,
    named_graph,
    nodes,
    ops,
    outputs,
    sample,
    values,
)
from onnx import ModelProto

from onnxq.ir import Graph, as_graph, to_model
from onnxq.passes import FoldShapes
from onnxq.rewrite import Changes, Pass

# FoldShapes -----------------------------------------------------------------------------------------------------------

PARTS = {
    "zero": np.array(0), "one": np.array(1), "two": np.array(2), "first": np.array([0]), "second": np.array([1]),
    "third": np.array([2]), "minus": np.array([-1]), "four": np.array([4]), "half": np.array([2]), "far": np.array([9]),
}  # fmt: skip


def fold(made: ModelProto, step: Pass | None = None) -> tuple[Graph, Changes]:
    graph = named_graph(made)
    changes = apply_once(step or FoldShapes(), graph)
    onnx.checker.check_model(to_model(graph), full_check=True)
    for free in (1, 2, 3):
        inputs = sample(made, free, free)
        assert difference(outputs(graph, inputs), outputs(made, inputs)) < 1e-6
    return graph, changes


def target(graph: Graph, op: str = "Reshape") -> list[int]:
    """The constant that the one node of that operator reads second."""
    (node,) = nodes(graph, op)
    return list(node.inputs[1].values)


BATCH = "s = Shape(x) i = Gather(s, zero) b = Unsqueeze(i, first)"
LENGTH = "t = Shape(x) j = Gather(t, one) l = Unsqueeze(j, first)"


def test_a_shape_of_numbers_is_constant_with_all_that_follows() -> None:
    text = f"{BATCH} {LENGTH} k = Concat<axis=0>(b, l, half, four) y = Reshape(x, k)"
    graph, changes = fold(model(f"g (float[2, 3, 8] x) => (float[2, 3, 2, 4] y) {{ {text} }}", **PARTS))
    assert ops(graph) == ["Reshape"]
    assert target(graph) == [2, 3, 2, 4]
    assert "k" in changes.changed


@pytest.mark.parametrize(
    ("read", "entries", "expected"),
    [
        (f"{BATCH} {LENGTH}", "b, l, half, four", [0, 0, 2, 4]),
        (BATCH, "b, minus, half, four", [0, -1, 2, 4]),
        (LENGTH, "minus, l, half, four", [-1, 0, 2, 4]),
        (f"{BATCH} {LENGTH} m = Mul(b, l)", "m, half, four", [-1, 2, 4]),
        ("s = Shape<end = 2>(x)", "s, half, four", [0, 0, 2, 4]),
        ("s = Shape(x) c = Cast<to=6>(s) p = Slice(c, first, second) b = Cast<to=7>(p)", "b, minus", [0, -1]),
        ("s = Shape(x) p = Slice(s, first, half) q = Identity(p)", "q, minus", [0, 0, -1]),
        ("s = Shape(x) n = ReduceProd(s) m = Div(n, four)", "m, four", [-1, 4]),
    ],
)
def test_dimensions_of_the_data_itself_are_copied_and_one_other_is_inferred(
    read: str, entries: str, expected: list[int]
) -> None:
    text = f"{read} k = Concat<axis=0>({entries}) y = Reshape(x, k)"
    graph, changes = fold(untyped(model(f"g (float[B, L, 8] x) => (float y) {{ {text} }}", **PARTS)))
    assert ops(graph) == ["Reshape"]
    assert target(graph) == expected
    assert graph.nodes[0].name in changes.changed


def untyped(made: ModelProto) -> ModelProto:
    """The model with outputs of unknown rank."""
    for info in made.graph.output:
        info.type.tensor_type.ClearField("shape")
    return made


@pytest.mark.parametrize(
    "text",
    [
        "g (float[B, L] x, float[A, M] z) => (float y) { s = Shape(z) k = Concat<axis=0>(s, half) y = Reshape(x, k) }",
        f"g (float[B, 8, L] x) => (float y) {{ {BATCH} k = Concat<axis=0>(minus, half, four, b) y = Reshape(x, k) }}",
        "g (float[B, L, 8] x, int64[3] k) => (float y) { y = Reshape(x, k) }",
    ],
)
def test_what_may_be_anything_stays(text: str) -> None:
    graph = named_graph(untyped(model(text, **PARTS)))
    before = ops(graph)
    assert FoldShapes().apply(graph) == Changes()
    assert ops(graph) == before


@pytest.mark.parametrize(
    ("data", "rows", "text"),
    [
        ("B, L, 2, 4", (0, 3, 2, 4), f"{BATCH} {LENGTH} k = Concat<axis=0>(b, half, l, four) y = Reshape(x, k)"),
        ("B, 2, 4", (0, 2, 4), f"{BATCH} c = Shape(z) k = Concat<axis=0>(b, c) y = Reshape(x, k)"),
    ],
)
def test_dimensions_that_may_be_empty_are_not_inferred_beside_copied_ones(
    data: str, rows: tuple[int, ...], text: str
) -> None:
    made = untyped(model(f"g (float[{data}] x, float[C] z) => (float y) {{ {text} }}", **PARTS))
    graph = named_graph(made)
    FoldShapes().apply(graph)
    assert ops(graph)[-2:] == ["Concat", "Reshape"]
    empty = {"x": np.zeros(rows, np.float32), "z": np.zeros(8, np.float32)}
    assert difference(outputs(graph, empty), outputs(made, empty)) == 0


@pytest.mark.parametrize(
    ("inputs", "text", "empty"),
    [
        ("float[6, L] x, float[C] z", f"c = Shape(z) {LENGTH} k = Concat<axis=0>(c, l) r = Reshape(x, k)", (6, 1)),
        ("float[3, L] x, float[C] z", f"{LENGTH} k = Concat<axis=0>(l, minus) r = Reshape(x, k)", (3, 0)),
    ],
    ids=["of another tensor", "of the data"],
)
def test_a_dimension_that_is_empty_copies_another_one(inputs: str, text: str, empty: tuple[int, ...]) -> None:
    text += " u = Shape(r) n = Gather(u, zero) y = Range(zero, n, one)"
    made = untyped(model(f"g ({inputs}) => (int64 y) {{ {text} }}", **PARTS))
    graph = named_graph(made)
    FoldShapes().apply(graph)
    fed = {"x": np.zeros(empty, np.float32), "z": np.zeros(0, np.float32)}
    assert difference(outputs(graph, fed), outputs(made, fed)) == 0


def test_slices_to_a_number_are_bounded_by_their_axis() -> None:
    text = f"""g (float[B, 8] x) => (float y) {{ r = Slice(x, first, far, first) m = Slice(r, first, less, first)
        {BATCH} k = Concat<axis=0>(b, four, half) v = Reshape(m, k) y = Expand(v, k) }}"""
    graph, _ = fold(untyped(model(text, **PARTS, less=np.array([7]))))
    assert ops(graph) == ["Slice", "Slice", "Reshape", "Expand"]
    assert target(graph, "Expand") == [1, 4, 2]


def test_a_range_of_nothing_is_empty() -> None:
    text = "r = Range(zero, less, one) y = Shape(r)"
    made = model(f"g (float[2] x) => (int64[1] y) {{ {text} }}", less=np.array(-3), **PARTS)
    fold(made)


@pytest.mark.parametrize(
    ("inputs", "text", "given"),
    [
        (
            "float[?, ?] x, float[6] w",
            "s = Shape(x) b = Gather(s, zero) l = Gather(s, one) c = Unsqueeze(l, first) d = Unsqueeze(b, first) "
            "k = Concat<axis=0>(c, d) y = Reshape(w, k)",
            {"x": (2, 3), "w": (6,)},
        ),
        (
            "float[?, 2] x, float[?, 3] w",
            "s = Shape(w) b = Gather(s, first) y = Slice(x, first, b, first)",
            {"x": (4, 2), "w": (2, 3)},
        ),
        (
            "float[n, n] x, float[6] w",
            "s = Shape(x) b = Gather(s, zero) l = Gather(s, one) c = Unsqueeze(l, first) d = Unsqueeze(b, first) "
            "k = Concat<axis=0>(c, d) y = Reshape(w, k)",
            {"x": (2, 3), "w": (6,)},
        ),
        (
            "float[A, 2] x, float[B, 3] w",
            "v = Relu(x) t = Neg(w) s = Shape(t) b = Gather(s, first) y = Slice(v, first, b, first)",
            {"x": (4, 2), "w": (2, 3)},
        ),
    ],
    ids=[
        "placeholders of one tensor",
        "placeholders of two",
        "a name twice in one tensor",
        "claims about inner tensors",
    ],
)
def test_names_that_are_not_equal_dimensions(inputs: str, text: str, given: dict[str, tuple[int, ...]]) -> None:
    named = inputs.replace("?", "what")
    made = untyped(model(f"g ({named}) => (float y) {{ {text} }}", **PARTS))
    for info in made.graph.input:
        for size in info.type.tensor_type.shape.dim:
            size.dim_param = {"what": "?"}.get(size.dim_param, size.dim_param)
    for name in ("v", "t"):
        if f"{name} = " in text:
            made.graph.value_info.append(onnx.helper.make_tensor_value_info(name, 1, ["A", 3 if name == "t" else 2]))
    graph = as_graph(made)
    FoldShapes().apply(graph)
    fed = {name: np.arange(np.prod(shape), dtype=np.float32).reshape(shape) for name, shape in given.items()}
    assert difference(outputs(graph, fed), outputs(made, fed)) == 0


def test_unknown_dimensions_of_one_tensor_are_dimensions_too() -> None:
    text = f"n = Neg(x) {BATCH} {LENGTH} k = Concat<axis=0>(b, l, half, four) y = Reshape(n, k)"
    graph, _ = fold(untyped(model(f"g (float[?, ?, 8] x) => (float y) {{ {text} }}", **PARTS)))
    assert target(graph) == [0, 0, 2, 4]
    assert graph.nodes[0].outputs[0].shape == [None, None, 8], "a name of its own would be one that the model declares"


def test_a_chain_of_shapes_folds_at_once() -> None:
    step = """s{1} = Shape(x{0}) i{1} = Gather(s{1}, zero) b{1} = Unsqueeze(i{1}, first)
        k{1} = Concat<axis=0>(b{1}, minus, half, four) r{1} = Reshape(x{0}, k{1}) a{1} = Relu(r{1})
        t{1} = Shape(a{1}) h{1} = Slice(t{1}, first, half) c{1} = Concat<axis=0>(h{1}, minus)
        x{1} = Reshape(a{1}, c{1}) """
    body = "".join(step.format(index, index + 1) for index in range(20))
    graph, _ = fold(untyped(model(f"g (float[B, L, 8] x0) => (float y) {{ {body} y = Relu(x20) }}", **PARTS)))
    assert set(ops(graph)) == {"Reshape", "Relu"}


def test_padding_that_is_computed_folds_with_the_shapes_behind_it() -> None:
    pads = " ".join(
        f"s{i} = Shape(x{i}) p{i} = Slice(s{i}, third, far) d{i} = Mod(p{i}, two) z{i} = Sub(d{i}, d{i}) "
        f"f{i} = Concat<axis=0>(z{i}, z{i}, z{i}, d{i}) h{i} = Reshape(f{i}, pairs) r{i} = Transpose<perm=[0,1]>(h{i}) "
        f"q{i} = Reshape(r{i}, minus) e{i} = Pad(x{i}, q{i}) x{i + 1} = MaxPool<kernel_shape=[2,2],strides=[2,2]>(e{i})"
        for i in range(3)
    )
    made = model(f"g (float[1, 2, 23, 21] x0) => (float y) {{ {pads} y = Relu(x3) }}", **PARTS, pairs=np.array([-1, 2]))
    graph, _ = fold(untyped(made))
    assert ops(graph) == ["Pad", "MaxPool"] * 3 + ["Relu"]


def test_what_has_the_same_entries_is_computed_once() -> None:
    text = f"""g (float[B, L, 8] x, float[B, L] z) => (int64[2] p, int64[2] q) {{
        {BATCH} {LENGTH} p = Concat<axis=0>(b, l) u = Shape(z) v = Slice(u, first, far) q = Add(v, half) }}"""
    graph, changes = fold(model(text.replace("far", "half"), **PARTS))
    assert ops(graph) == ["Shape", "Gather", "Unsqueeze", "Gather", "Unsqueeze", "Concat", "Shape", "Add"]
    assert [len(node.outputs[0].outputs) for node in nodes(graph, "Shape")] == [2, 1]
    assert changes


def test_expand_keeps_what_the_data_has() -> None:
    text = f"g (float[B, L, 1] x) => (float y) {{ {BATCH} {LENGTH} k = Concat<axis=0>(b, l, four) y = Expand(x, k) }}"
    graph, _ = fold(untyped(model(text, **PARTS)))
    assert target(graph, "Expand") == [1, 1, 4]


def test_what_torch_writes_for_expand_folds() -> None:
    text = """g (float[B, 4] x) => (float y) {
        s = Shape(x) i = Gather(s, zero) b = Unsqueeze(i, first) k = Concat<axis=0>(b, minus, minus)
        r = Reshape(k, minus) t = Shape(r) o = ConstantOfShape<value = int64[1] {1}>(t)
        m = Mul(o, minus) e = Equal(r, m) w = Where(e, o, r) u = Unsqueeze(x, second) y = Expand(u, w) }"""
    graph, _ = fold(untyped(model(text, **PARTS)))
    assert ops(graph) == ["Unsqueeze", "Expand"]
    assert target(graph, "Expand") == [1, 1, 1]


def test_slices_to_the_end_of_their_axis() -> None:
    text = (
        "g (float[B, L, 8] x) => (float y) { t = Shape(x) l = Slice(t, second, half) y = Slice(x, first, l, second) }"
    )
    graph, _ = fold(untyped(model(text, **PARTS)))
    assert ops(graph) == ["Slice"]
    assert graph.nodes[0].inputs[2].values.tolist() == [np.iinfo(np.int64).max]


def test_positions_that_are_cut_to_the_data_have_its_length() -> None:
    text = f"""g (float[B, L, 8] x) => (float y) {{ {LENGTH} p = Slice(table, first, l, second)
        a = Add(x, p) {BATCH} k = Concat<axis=0>(b, l, half, four) y = Reshape(a, k) }}"""
    graph, _ = fold(untyped(model(text, **PARTS, table=values(1, 64, 8))))
    assert target(graph) == [0, 0, 2, 4]
    assert "Concat" not in ops(graph)


def test_what_a_graph_returns_is_left() -> None:
    text = "s = Shape(x) n = Size(x) m = Reshape(n, minus) y = Reshape(x, m)"
    graph, _ = fold(model(f"g (float[2, 3] x) => (int64[2] s, float[6] y) {{ {text} }}", **PARTS))
    assert ops(graph) == ["Shape", "Reshape"]
    assert [tensor.name for tensor in graph.outputs] == ["s", "y"]


def test_bodies_read_shapes_of_the_graph_around_them() -> None:
    text = f"""g (float[B, 8] x, bool c) => (float y) {{
        {BATCH}
        y = If (c) <
            then_branch = yes () => (float[B, 2, 4] t) {{ k = Concat<axis=0>(b, half, four) t = Reshape(x, k) }},
            else_branch = no () => (float[B, 2, 4] e) {{
                q = Concat<axis=0>(b, half, minus) n = Neg(x) e = Reshape(n, q) }}>
    }}"""
    graph, _ = fold(untyped(model(text, **PARTS)))
    assert ops(graph) == ["If", "Reshape", "Neg", "Reshape"]
    assert [list(node.inputs[1].values) for node in nodes(graph, "Reshape")] == [[0, 2, 4], [0, 2, -1]]


def test_a_literal_zero_of_the_target_is_kept() -> None:
    text = f"g (float[B, 0] x) => (float y) {{ {BATCH} k = Concat<axis=0>(first, b) y = Reshape<allowzero=1>(x, k) }}"
    graph = named_graph(untyped(model(text, **PARTS)))
    assert FoldShapes().apply(graph) == Changes()


def test_ill_typed_nodes_behind_a_new_constant_stay_as_they_are() -> None:
    made = model(
        f"g (float[2, 3] x) => (float y) {{ {BATCH} r = Reshape(x, b) y = MatMul(r, w) }}", **PARTS, w=values(5, 5)
    )
    graph = named_graph(untyped(made))
    FoldShapes().apply(graph)
    assert ops(graph) == ["Reshape", "MatMul"]


def test_what_a_caller_may_feed_is_no_constant() -> None:
    text = "g (float[2, 3] x, int64[1] add) => (float y) { s = Shape(x) k = Add(s, add) y = Expand(x, k) }"
    made = model(text, add=np.array([0]))
    graph, _ = fold(untyped(made))
    assert "add" in initializer_names(to_model(graph))
    assert ops(graph) == ["Add", "Expand"]
