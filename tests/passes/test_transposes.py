"""Transposes become one or none, and regions compute in the layout around them."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import onnx
import pytest
from model_texts import apply_once, difference, model, named_graph, ops, outputs, sample, values
from onnx import ModelProto

from onnxq.ir import Graph, Names, Node, Variable, to_model, toposort
from onnxq.passes import (
    FoldTransposeIntoWeight,
    MergeTransposeBetweenReshapes,
    MergeTransposes,
    SinkTransposes,
)
from onnxq.passes.transposes import (
    channels_last,
    composed,
    inverse,
    laid_out,
    lose,
    loses_order,
    permutation_of,
    rank_in_any_layout,
    turn,
)
from onnxq.rewrite import Changes

# MergeTransposes ------------------------------------------------------------------------------------------------------


def between(shape: str, body: str) -> ModelProto:
    made = model(f"g (float[{shape}] x) => (float y) {{ t = Neg(x) {body} y = Exp(z) }}")
    made.graph.output[0].type.tensor_type.ClearField("shape")
    return made


@pytest.mark.parametrize(
    ("shape", "body", "left"),
    [
        ("B,3,4,5", "a = Transpose<perm=[0,2,3,1]>(t) z = Transpose<perm=[0,3,1,2]>(a)", []),
        ("B,3,4,5", "a = Transpose<perm=[0,2,3,1]>(t) z = Transpose<perm=[0,2,3,1]>(a)", ["Transpose"]),
        ("B,C", "a = Transpose(t) z = Transpose(a)", []),
        ("B,3,4", "z = Transpose<perm=[0,1,2]>(t)", []),
        ("40,2,1,128", "z = Transpose<perm=[0,2,1,3]>(t)", ["Reshape"]),
        ("B,1,64", "z = Transpose<perm=[1,0,2]>(t)", ["Reshape"]),
        ("B,L,1,64", "z = Transpose<perm=[0,2,1,3]>(t)", ["Transpose"]),
        ("B,L,64", "z = Transpose<perm=[0,2,1]>(t)", ["Transpose"]),
        ("1,B,8,C", "a = Transpose<perm=[1,0,2,3]>(t) z = Transpose<perm=[0,1,3,2]>(a)", ["Transpose"]),
    ],
)
def test_transposes(shape: str, body: str, left: list[str]) -> None:
    made = between(shape, body)
    graph = named_graph(made)
    apply_once(MergeTransposes(), graph)
    assert ops(graph) == ["Neg", *left, "Exp"]
    for free in (1, 2):
        assert difference(outputs(graph, sample(made, 0, free)), outputs(made, sample(made, 0, free))) == 0


@pytest.mark.parametrize("perm", ["<perm=[0,0,1]>", "<perm=[0,1]>", ""])
def test_orders_that_are_none_stay(perm: str) -> None:
    graph = named_graph(between("2,3,4", f"u = local.F(t) z = Transpose{perm}({'t' if perm else 'u'})"))
    changes = MergeTransposes().apply(graph)
    assert not changes
    assert changes.skipped[0][1] == "its order of dimensions is not known"


# MergeTransposeBetweenReshapes ----------------------------------------------------------------------------------------


def key(data: str, flat: tuple[int, ...], to: tuple[int, ...], result: str = "a, b, c, d") -> ModelProto:
    return model(
        f"""g (float[{data}] x) => (float[{result}] y) {{
            f = Reshape(x, flat) t = Transpose <perm = [0, 2, 1]> (f) y = Reshape(t, to) }}""",
        flat=np.array(flat), to=np.array(to),
    )  # fmt: skip


@pytest.mark.parametrize(
    "made",
    [
        key("2, 3, 4, 5", (-1, 4, 5), (2, 3, 5, 4)),
        key("2, 3, 4, 5", (6, 4, 5), (-1, 3, 5, 4)),
        key("N, 3, 4, 5", (-1, 4, 5), (-1, 3, 5, 4), "N, 3, 5, 4"),
    ],
)
def test_becomes_one_transpose(made: ModelProto) -> None:
    graph = named_graph(made)
    # What follows symbolic dimensions through Reshape knows this.
    graph.outputs[0].shape = [*graph.inputs[0].shape[:2], 5, 4]
    apply_once(MergeTransposeBetweenReshapes(), graph)
    assert ops(graph) == ["Transpose"]
    assert graph.nodes[0].attrs == {"perm": [0, 1, 3, 2]}
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) == 0


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (key("2, 3, 4, 5", (8, 3, 5), (2, 4, 5, 3)), "do not keep the last two axes"),
        (key("2, 3, 4, 5", (-1, 4, 5), (3, 2, 5, 4)), "do not keep the last two axes"),
        (key("4, 5", (1, 4, 5), (1, 5, 4), "a, b, c"), "unknown"),
    ],
)
def test_a_refusal_has_its_reason(made: ModelProto, reason: str) -> None:
    ((_, found),) = MergeTransposeBetweenReshapes().apply(named_graph(made)).skipped
    assert reason in found


# FoldTransposeIntoWeight ----------------------------------------------------------------------------------------------

FOLD_TRANSPOSE_INTO_WEIGHT_WEIGHTS = {
    "w": values(24, 5),
    "v": values(5, 24),
    "b": values(5),
    "rest": np.array([-1, 24]),
    "same": np.array([0, -1]),
    "mixed": np.array([-1, 12]),
    "narrow": values(12, 5),
}
TURN = "t = Transpose<perm = [0, 2, 3, 1]>(x)"


def fold(body: str, data: str = "N, 2, 3, 4", result: str = "N, 5") -> tuple[Graph, Changes]:
    used = {name: array for name, array in FOLD_TRANSPOSE_INTO_WEIGHT_WEIGHTS.items() if f", {name}" in body}
    made = model(f"g (float[{data}] x) => (float[{result}] y) {{ {body} }}", **used)
    graph = named_graph(made)
    changes = FoldTransposeIntoWeight().apply(graph)
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 1e-6
    assert not FoldTransposeIntoWeight().apply(graph)
    return graph, changes


@pytest.mark.parametrize("order", ["0, 2, 3, 1", "0, 3, 1, 2", "0, 3, 2, 1", "0, 1, 3, 2"])
@pytest.mark.parametrize(
    "behind",
    [
        "f = Flatten(t) y = Gemm(f, w, b)",
        "f = Reshape(t, rest) y = MatMul(f, w)",
        "f = Reshape(t, same) y = Gemm<transB = 1>(f, v)",
    ],
)
def test_the_rows_are_reordered(order: str, behind: str) -> None:
    graph, _ = fold(f"t = Transpose<perm = [{order}]>(x) {behind}")
    assert ops(graph) == [behind.split()[2].split("(")[0], behind.split("y = ")[1].split("(")[0].split("<")[0]]


@pytest.mark.parametrize(
    ("body", "data", "reason"),
    [
        (f"{TURN} f = Flatten(t) y = MatMul(f, w)", "N, 2, H, 4", "the shape of its data is not known"),
        (f"{TURN} f = Reshape(t, mixed) y = MatMul(f, narrow)", "N, 2, 3, 4", "it is not known to flatten"),
        ("t = Transpose<perm = [1, 0, 2, 3]>(x) f = Flatten(t) y = MatMul(f, w)", "2, N, 3, 4", "it moves the batch"),
        (f"{TURN} f = Flatten(t) k = MatMul(f, w) l = Abs(w) y = Add(k, l)", "24, 2, 3, 4", "others read the weight"),
    ],
)
def test_others_stay(body: str, data: str, reason: str) -> None:
    used = {name: array for name, array in FOLD_TRANSPOSE_INTO_WEIGHT_WEIGHTS.items() if f", {name}" in body}
    graph = named_graph(model(f"g (float[{data}] x) => (float[M, 5] y) {{ {body} }}", **used))
    changes = FoldTransposeIntoWeight().apply(graph)
    assert not changes.changed
    assert reason in changes.skipped[0][1]


# SinkTransposes -------------------------------------------------------------------------------------------------------

SINK_TRANSPOSES_WEIGHTS = {
    "w": values(4, 4, 3, 3),
    "c": values(4),
    "pads": np.array([0, 1, 1, 0, 0, 1, 1, 0]),
    "six": np.array(6, np.float32),
    "zero": np.array(0, np.float32),
    "m": values(4, 5),
}
LAST, FIRST = "perm = [0, 2, 3, 1]", "perm = [0, 3, 1, 2]"


def sink(made: ModelProto) -> tuple[Graph, Changes]:
    graph = named_graph(made)
    changes = SinkTransposes().apply(graph)
    for seed in (0, 1):
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) < 1e-6
    assert not SinkTransposes().apply(graph)
    return graph, changes


def image(body: str, result: str = "N, 4, 8, 8", data: str = "N, 4, 8, 8") -> ModelProto:
    used = {
        name: array
        for name, array in SINK_TRANSPOSES_WEIGHTS.items()
        if any(f"{before}{name}" in body for before in (", ", "("))
    }
    return model(f"g (float[{data}] x) => (float[{result}] y) {{ {body} }}", **used)


@pytest.mark.parametrize(
    ("inner", "left"),
    [
        ("u = Add(t, c)", ["Add"]),
        ("u = Clip(t, zero, six)", ["Clip"]),
        ("s = Sigmoid(t) u = Mul(t, s)", ["Sigmoid", "Mul"]),
        ("r = ReduceMean<axes = [1, 2]>(t) u = Mul(t, r)", ["ReduceMean", "Mul"]),
        ("p = Pad(t, pads) u = Relu(p)", ["Pad", "Relu"]),
        ("a, b = Split<axis = 3>(t) k = Neg(a) u = Concat<axis = 3>(b, k)", ["Split", "Neg", "Concat"]),
        ("a = Add(t, c) b = Mul(t, c) d = Sub(a, b) u = Max(d, a, t)", ["Add", "Mul", "Sub", "Max"]),
    ],
)
def test_pairs_around_a_region_go(inner: str, left: list[str]) -> None:
    result = "N, 4, 10, 10" if "Pad" in inner else "N, 4, 8, 8"
    made = image(f"e = Exp(x) t = Transpose<{LAST}>(e) {inner} y = Transpose<{FIRST}>(u)", result)
    graph, _ = sink(made)
    assert ops(graph) == ["Exp", *left]
    assert [tensor.name for tensor in graph.outputs] == ["y"]


def test_a_network_with_a_residual_and_a_mean_keeps_only_the_first() -> None:
    body = f"""a = Transpose<{FIRST}>(x) b = Conv<pads = [1, 1, 1, 1]>(a, w) d = Transpose<{LAST}>(b)
        e = Add(d, c) f = Relu(e) g0 = Pad(f, pads) h = Transpose<{FIRST}>(g0) i = Conv(h, w)
        j = Transpose<{LAST}>(i) k = Add(j, f) l = Relu(k) n = ReduceMean<axes = [1, 2], keepdims = 0>(l)
        y = MatMul(n, m)"""
    graph, changes = sink(image(body, "N, 5", "N, 8, 8, 4"))
    assert ops(graph) == ["Transpose", "Conv", "Add", "Relu", "Pad", "Conv", "Add", "Relu", "ReduceMean", "MatMul"]
    assert len(changes.changed) == 5


def test_an_old_squeeze_names_its_axes_in_order_behind_a_region() -> None:
    body = f"t = Transpose<{LAST}>(x) r = ReduceMean<axes = [2, 3], keepdims = 1>(t) y = Squeeze<axes = [2, 3]>(r)"
    made = model(f"g (float[N, Q, 1, M] x) => (float[A, B] y) {{ {body} }}", opset=8)
    graph = named_graph(made)
    SinkTransposes().apply(graph)
    onnx.checker.check_model(to_model(graph), full_check=True)
    (squeeze,) = (node for node in graph.nodes if node.op == "Squeeze")
    assert squeeze.attrs["axes"] == sorted(squeeze.attrs["axes"])


def test_padding_in_front_of_a_convolution_is_done_in_its_layout() -> None:
    graph, _ = sink(image(f"p = Pad(x, pads) t = Transpose<{FIRST}>(p) y = Conv(t, w)", data="N, 8, 8, 4"))
    assert ops(graph) == ["Transpose", "Pad", "Conv"]


def test_a_tensor_in_another_layout_takes_another_name() -> None:
    made = model(
        """g (float[2, 2, 2] x) => (float[2, 2, 2] y) {
            t = Transpose <perm = [2, 0, 1]> (x) a = Relu(t) b = Sin(a)
            c = Transpose <perm = [1, 2, 0]> (b) y = Neg(c) }"""
    )
    graph = named_graph(made)
    SinkTransposes().apply(graph)
    assert [node.op for node in graph.nodes] == ["Relu", "Sin", "Neg"]
    first, second, _ = (node.outputs[0].name for node in graph.nodes)
    assert first not in ("t", "a", "b")
    assert second == "c"


def test_transposes_of_images_go_down() -> None:
    graph, _ = sink(image(f"b = Conv(x, w) t = Transpose<{LAST}>(b) y = Add(t, c)", "N, 6, 6, 4"))
    assert ops(graph) == ["Conv", "Add", "Transpose"]


@pytest.mark.parametrize(
    "body",
    [
        # One would go and two would come.
        f"t = Transpose<{LAST}>(x) s = Softmax(t) k = Neg(s) z = Softmax(k) u = Add(k, z) y = Transpose<{FIRST}>(u)",
        "t = Transpose<perm = [0, 2, 1, 3]>(x) y = Relu(t)",
        "y = Relu(x)",
    ],
)
def test_nothing_is_done_for_nothing(body: str) -> None:
    made = image(body, "N, 8, 4, 8" if "1, 3]" in body else "N, 4, 8, 8")
    before = ops(named_graph(made))
    graph, _ = sink(made)
    assert ops(graph).count("Transpose") <= before.count("Transpose")


def test_who_reads_the_old_layout_still_does() -> None:
    body = f"e = Exp(x) t = Transpose<{LAST}>(e) k = Neg(t) s = Softmax(k) f = Add(k, s) u = Transpose<{FIRST}>(k)"
    graph, _ = sink(image(f"{body} v = Transpose<{FIRST}>(f) y = Add(u, v)"))
    assert ops(graph).count("Transpose") == 2


def test_an_output_of_the_graph_keeps_its_layout() -> None:
    made = model(
        f"""g (float[N, 4, 8, 8] x) => (float[N, 4, 8, 8] y, float[N, 8, 8, 4] k, float[N, 4, 8, 8] z) {{
            e = Exp(x) t = Transpose<{LAST}>(e) k = Neg(t) y = Transpose<{FIRST}>(k) z = Transpose<{FIRST}>(k) }}"""
    )
    graph, _ = sink(made)
    assert [tensor.name for tensor in graph.outputs] == ["y", "k", "z"]


def test_inside_a_branch() -> None:
    made = model(
        f"""g (float[N, 4, 8, 8] x, bool q) => (float[N, 4, 8, 8] y) {{
            t = Transpose<{LAST}>(x)
            y = If (q) <
                then_branch = yes () => (float[N, 4, 8, 8] a) {{
                    b = Transpose<{LAST}>(x) d = Add(b, c) a = Transpose<{FIRST}>(d) }},
                else_branch = no () => (float[N, 4, 8, 8] h) {{ i = Add(t, c) h = Transpose<{FIRST}>(i) }}> }}""",
        c=SINK_TRANSPOSES_WEIGHTS["c"],
    )
    graph, _ = sink(made)
    assert ops(graph) == ["Transpose", "If", "Add", "Add", "Transpose"]


def test_many_readers_take_linear_time() -> None:
    names = ", ".join(f"n{index}" for index in range(2000))
    inner = " ".join(f"n{index} = Neg(t)" for index in range(2000))
    graph, _ = sink(image(f"e = Exp(x) t = Transpose<{LAST}>(e) {inner} u = Sum({names}) y = Transpose<{FIRST}>(u)"))
    assert "Transpose" not in ops(graph)


@pytest.mark.parametrize(
    ("inner", "left"),
    [
        ("t = Transpose<perm = [0, 2, 1]>(x) a = Add(x, t) r = Relu(a) y = Transpose<perm = [0, 2, 1]>(r)", 1),
        (
            """t = Transpose<perm = [0, 2, 1]>(x) u = Transpose<perm = [0, 2, 1]>(t) a = Mul(t, u) r = Relu(a)
            y = Transpose<perm = [0, 2, 1]>(r)""",
            1,
        ),
        ("t = Transpose<perm = [2, 0, 1]>(x) r = Relu(t) u = Transpose<perm = [2, 0, 1]>(r) y = Sub(u, r)", 2),
        (
            """t = Transpose<perm = [2, 0, 1]>(x) r = Relu(t) u = Transpose<perm = [2, 0, 1]>(r)
            v = Transpose<perm = [2, 0, 1]>(u) y = Sub(v, r)""",
            3,
        ),
    ],
    ids=["a tensor and its transpose", "a transpose of a transpose", "its own result", "its own result turned twice"],
)
def test_a_region_that_reads_a_tensor_in_two_layouts(inner: str, left: int) -> None:
    graph, _ = sink(model(f"g (float[3, 3, 3] x) => (float[3, 3, 3] y) {{ {inner} }}"))
    assert ops(graph).count("Transpose") == left


# Layouts --------------------------------------------------------------------------------------------------------------

ARRAYS = {
    "w": values(3, 4, 5),
    "c": values(5),
    "s": values(1, 1),
    "pads": np.array([0, 1, 2, 0, 0, 3, 0, 1]),
    "some": np.array([1, 0, 2, 3]),
    "axes": np.array([-1, 1]),
    "one": np.array([1, 1]),
    "most": np.array([4, 3]),
    "slope": values(4, 1),
    "halves": np.array([2, 2]),
    "v": values(2, 3, 4, 5, seed=3),
    "m": values(5, 5),
    "inner": np.array([1, -2]),
    "rows": np.array([0, -1]),
}
ANY_LAYOUT = [
    "y = Add(x, w)",
    "y = Mul(c, x)",
    "y = Max(x, s, w)",
    "y = Clip(x, s0)",
    "y = PRelu(x, slope)",
    "y = Where(q, x, w)",
    "y = Concat<axis = -1>(x, v)",
    "y = Pad(x, pads)",
    "y = Pad(x, some, , axes)",
    "y = Slice(x, one, most)",
    "y = Slice(x, one, most, axes)",
    "y, z = Split<axis = 2>(x, halves)",
    "y = ReduceMax(x, axes)",
    "y = ReduceMean(x)",
]
DROPPING = [
    ("y = ReduceMean<keepdims = 0>(x, axes)", True),
    ("y = Squeeze(x, axes)", True),
    ("y = Flatten(x)", True),
    ("y = Flatten<axis = 2>(x)", False),
    ("y = Reshape(x, rows)", True),
    ("y = Squeeze(x)", False),
    ("y = ReduceSum<keepdims = 0, noop_with_empty_axes = 1>(x)", False),
]
ORDERS = [order for order in permutations(range(4)) if order[0] == 0 and order != (0, 1, 2, 3)]


def graph_of(body: str, shape: str = "2, 3, 4, 5") -> tuple[ModelProto, Graph]:
    used = {name: array for name, array in ARRAYS.items() if f" {name}," in body or f" {name})" in body}
    used |= {"c": ARRAYS["c"]} if "(c" in body else {}
    used |= {"s0": np.array(0.25, np.float32)} if "s0" in body else {}
    extra = " q = Not(b)" if "(q" in body else ""
    inputs = f"float[{shape}] x, bool[{shape}] b" if extra else f"float[{shape}] x"
    made = model(f"g ({inputs}) => (float[A, B, C, D] y) {{{extra} {body} }}", opset=18, **used)
    made.graph.output[0].type.tensor_type.ClearField("shape")
    return made, named_graph(made)


def in_another_layout(graph: Graph, node: Node, order: tuple[int, ...], *, drops: bool) -> None:
    """Transpose what a node reads, and what it makes back."""
    names = Names(graph)
    made = []
    for tensor in laid_out(node):
        new = Variable(names.unique("turned"), tensor.dtype, [tensor.shape[axis] for axis in inverse(order)])
        made.append(Node("Transpose", names.unique("before"), {"perm": list(inverse(order))}, [tensor], [new]))
        node.inputs[next(index for index, read in enumerate(node.inputs) if read is tensor)] = new
    for index, tensor in enumerate([] if drops else list(node.outputs)):
        new = Variable(names.unique("result"), tensor.dtype)
        node.outputs[index] = new
        made.append(Node("Transpose", names.unique("behind"), {"perm": list(order)}, [new], [tensor]))
    graph.nodes.extend(made)
    toposort(graph)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("body", ANY_LAYOUT)
def test_a_turned_node_computes_the_same(body: str, order: tuple[int, ...]) -> None:
    made, graph = graph_of(body)
    node = graph.nodes[-1]
    assert rank_in_any_layout(node) == 4
    turn(node, order, Names(graph))
    in_another_layout(graph, node, order, drops=False)
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 1e-6


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("body", "possible"), DROPPING)
def test_what_drops_axes_may_lose_the_order(body: str, possible: bool, order: tuple[int, ...]) -> None:
    shape = "2, 3, 4, 5" if "Reduce" in body else "2, 1, 3, 1"
    made, graph = graph_of(body, shape)
    node = graph.nodes[-1]
    if not loses_order(node, order):
        return
    assert possible
    lose(node, order, Names(graph))
    in_another_layout(graph, node, order, drops=True)
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 1e-6


@pytest.mark.parametrize("body", [body.replace("axes", "inner") for body, possible in DROPPING if possible])
def test_channels_last_are_lost(body: str) -> None:
    _, graph = graph_of(body, "2, 1, 1, 5")
    assert loses_order(graph.nodes[-1], channels_last(4))


@pytest.mark.parametrize(
    "body",
    ["y = MatMul(x, m)", "y = Softmax(x)", "y = Shape(x)", "y = Flatten(x)", "y = ReduceMax<keepdims = 0>(x, axes)"],
)
def test_others_know_their_layout(body: str) -> None:
    _, graph = graph_of(body)
    assert rank_in_any_layout(graph.nodes[-1]) == 0


def test_permutations() -> None:
    assert composed(channels_last(5), inverse(channels_last(5))) == (0, 1, 2, 3, 4)
    _, graph = graph_of("y = Transpose(x)")
    assert permutation_of(graph.nodes[-1]) == (3, 2, 1, 0)
    graph.nodes[-1].attrs["perm"] = [0, 0, 1, 2]
    assert permutation_of(graph.nodes[-1]) is None
    assert permutation_of(Node("Neg", "n")) is None
