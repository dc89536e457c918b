"""Transposes become one or none, and regions compute in the layout around them."""

from __future__ import annotations

from itertools import permutations, product

import numpy as np
import onnx
import pytest
from model_texts import difference, model, named_graph, ops, outputs, sample, values
from onnx import ModelProto
from rule_cases import Case, Rule, table

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

LAST, FIRST = "perm = [0, 2, 3, 1]", "perm = [0, 3, 1, 2]"
TO_LAST, TO_FIRST = f"Transpose<{LAST}>", f"Transpose<{FIRST}>"

merge = Rule(MergeTransposes())
MERGED = [
    *(merge(f"t = Neg(x) {body} y = Exp(z)", f"Neg {left} Exp", inputs=f"float[{shape}] x", error=0.0)
      for shape, body, left in [
          ("B,3,4,5", f"a = {TO_LAST}(t) z = {TO_FIRST}(a)", ""),
          ("B,3,4,5", f"a = {TO_LAST}(t) z = {TO_LAST}(a)", "Transpose"),
          ("B,C", "a = Transpose(t) z = Transpose(a)", ""),
          ("B,3,4", "z = Transpose<perm=[0,1,2]>(t)", ""),
          ("40,2,1,128", "z = Transpose<perm=[0,2,1,3]>(t)", "Reshape"),
          ("B,1,64", "z = Transpose<perm=[1,0,2]>(t)", "Reshape"),
          ("1,B,8,C", "a = Transpose<perm=[1,0,2,3]>(t) z = Transpose<perm=[0,1,3,2]>(a)", "Transpose")]),
    *(merge(f"t = Neg(x) z = Transpose<{perm}>(t) y = Exp(z)", inputs=f"float[{shape}] x", stays="")
      for shape, perm in [("B,L,1,64", "perm=[0,2,1,3]"), ("B,L,64", "perm=[0,2,1]")]),
    *(merge(f"u = local.F(x) {body}", inputs="float[2,3,4] x", stays="its order of dimensions is not known")
      for body in ("y = Transpose<perm=[0,0,1]>(x)", "y = Transpose<perm=[0,1]>(x)", "y = Transpose(u)")),
]  # fmt: skip

key = Rule(MergeTransposeBetweenReshapes(), "float[2, 3, 4, 5] x")
KEY = "f = Reshape(x, flat) t = Transpose <perm = [0, 2, 1]> (f) y = Reshape(t, to)"
KEYS = [
    *(key(KEY, "Transpose", flat=flat, to=to, error=0.0,
          holds=lambda graph: graph.nodes[0].attrs["perm"] == [0, 1, 3, 2])
      for flat, to in [([-1, 4, 5], [2, 3, 5, 4]), ([6, 4, 5], [-1, 3, 5, 4])]),
    key(KEY, flat=[8, 3, 5], to=[2, 4, 5, 3], stays="do not keep the last two axes"),
    key(KEY, flat=[-1, 4, 5], to=[3, 2, 5, 4], stays="do not keep the last two axes"),
    key(KEY, flat=[1, 4, 5], to=[1, 5, 4], inputs="float[4, 5] x", stays="unknown"),
]  # fmt: skip

weight = Rule(FoldTransposeIntoWeight(), "float[N, 2, 3, 4] x", w=values(24, 5), v=values(5, 24), b=values(5),
              rest=[-1, 24], same=[0, -1], mixed=[-1, 12], narrow=values(12, 5))  # fmt: skip
WEIGHTS = [
    *(weight(f"t = Transpose<perm = [{order}]>(x) {behind}", expected)
      for order, (behind, expected) in product(("0, 2, 3, 1", "0, 3, 1, 2", "0, 3, 2, 1", "0, 1, 3, 2"), [
          ("f = Flatten(t) y = Gemm(f, w, b)", "Flatten Gemm"),
          ("f = Reshape(t, rest) y = MatMul(f, w)", "Reshape MatMul"),
          ("f = Reshape(t, same) y = Gemm<transB = 1>(f, v)", "Reshape Gemm")])),
    weight(f"t = {TO_LAST}(x) f = Flatten(t) y = MatMul(f, w)", inputs="float[N, 2, H, 4] x", runs=False,
           stays="the shape of its data is not known"),
    weight(f"t = {TO_LAST}(x) f = Reshape(t, mixed) y = MatMul(f, narrow)", stays="it is not known to flatten"),
    weight("t = Transpose<perm = [1, 0, 2, 3]>(x) f = Flatten(t) y = MatMul(f, w)", inputs="float[2, N, 3, 4] x",
           runs=False, stays="it moves the batch"),
    weight(f"t = {TO_LAST}(x) f = Flatten(t) k = MatMul(f, w) l = Abs(w) y = Add(k, l)", inputs="float[24, 2, 3, 4] x",
           stays="others read the weight"),
]  # fmt: skip


sink = Rule(SinkTransposes(), "float[N, 4, 8, 8] x", w=values(4, 4, 3, 3), c=values(4), pads=[0, 1, 1, 0, 0, 1, 1, 0],
            six=6, zero=0, m=values(4, 5))  # fmt: skip
MANY = 500
READERS = " ".join(f"n{index} = Neg(t)" for index in range(MANY))
SUNK = [
    *(sink(f"e = Exp(x) t = {TO_LAST}(e) {inner} y = {TO_FIRST}(u)", f"Exp {left}",
           holds=lambda graph: [tensor.name for tensor in graph.outputs] == ["y"]) for inner, left in [
        ("u = Add(t, c)", "Add"),
        ("u = Clip(t, zero, six)", "Clip"),
        ("s = Sigmoid(t) u = Mul(t, s)", "Sigmoid Mul"),
        ("r = ReduceMean<axes = [1, 2]>(t) u = Mul(t, r)", "ReduceMean Mul"),
        ("p = Pad(t, pads) u = Relu(p)", "Pad Relu"),
        ("a, b = Split<axis = 3>(t) k = Neg(a) u = Concat<axis = 3>(b, k)", "Split Neg Concat"),
        ("a = Add(t, c) b = Mul(t, c) d = Sub(a, b) u = Max(d, a, t)", "Add Mul Sub Max"),
        (f"{READERS} u = Sum({', '.join(f'n{index}' for index in range(MANY))})", "Neg " * MANY + "Sum")]),
    # A network with a residual and a mean keeps only the first.
    sink(f"""a = {TO_FIRST}(x) b = Conv<pads = [1, 1, 1, 1]>(a, w) d = {TO_LAST}(b)
         e = Add(d, c) f = Relu(e) g0 = Pad(f, pads) h = {TO_FIRST}(g0) i = Conv(h, w)
         j = {TO_LAST}(i) k = Add(j, f) l = Relu(k) n = ReduceMean<axes = [1, 2], keepdims = 0>(l) y = MatMul(n, m)""",
         "Transpose Conv Add Relu Pad Conv Add Relu ReduceMean MatMul", inputs="float[N, 8, 8, 4] x"),
    # Padding in front of a convolution is done in its layout.
    sink(f"p = Pad(x, pads) t = {TO_FIRST}(p) y = Conv(t, w)", "Transpose Pad Conv", inputs="float[N, 8, 8, 4] x"),
    # Transposes of images go down.
    sink(f"b = Conv(x, w) t = {TO_LAST}(b) y = Add(t, c)", "Conv Add Transpose"),
    # A tensor in another layout takes another name.
    sink("""t = Transpose <perm = [2, 0, 1]> (x) a = Relu(t) b = Sin(a)
         d = Transpose <perm = [1, 2, 0]> (b) y = Neg(d)""", "Relu Sin Neg", inputs="float[2, 2, 2] x",
         holds=lambda graph: graph.nodes[0].outputs[0].name not in "tab" and graph.nodes[1].outputs[0].name == "d"),
    # An output of the graph keeps its layout.
    sink(f"""(float[N, 4, 8, 8] x) => (y, k, z) {{ e = Exp(x) t = {TO_LAST}(e) k = Neg(t) y = {TO_FIRST}(k)
         z = {TO_FIRST}(k) }}""", expected="Exp Neg Transpose Transpose",
         holds=lambda graph: [tensor.name for tensor in graph.outputs] == ["y", "k", "z"]),
    sink(f"""(float[N, 4, 8, 8] x, bool q) => (y) {{ t = {TO_LAST}(x) y = If (q) <
         then_branch = yes () => (a) {{ b = {TO_LAST}(x) d = Add(b, c) a = {TO_FIRST}(d) }},
         else_branch = no () => (h) {{ i = Add(t, c) h = {TO_FIRST}(i) }}> }}""", "Transpose If Add Add Transpose"),
]  # fmt: skip
# What a region costs, by the Transposes that are left.
COUNTED = {
    f"t = {TO_LAST}(x) s = Softmax(t) k = Neg(s) z = Softmax(k) u = Add(k, z) y = {TO_FIRST}(u)": 2,
    "t = Transpose<perm = [0, 2, 1, 3]>(x) y = Relu(t)": 1,
    "y = Relu(x)": 0,
    f"""e = Exp(x) t = {TO_LAST}(e) k = Neg(t) s = Softmax(k) f = Add(k, s) u = {TO_FIRST}(k)
    v = {TO_FIRST}(f) y = Add(u, v)""": 2,
}
# A region that reads a tensor in two layouts.
TWO_LAYOUTS = {
    "t = Transpose<perm = [0, 2, 1]>(x) a = Add(x, t) r = Relu(a) y = Transpose<perm = [0, 2, 1]>(r)": 1,
    """t = Transpose<perm = [0, 2, 1]>(x) u = Transpose<perm = [0, 2, 1]>(t) a = Mul(t, u) r = Relu(a)
    y = Transpose<perm = [0, 2, 1]>(r)""": 1,
    "t = Transpose<perm = [2, 0, 1]>(x) r = Relu(t) u = Transpose<perm = [2, 0, 1]>(r) y = Sub(u, r)": 2,
    """t = Transpose<perm = [2, 0, 1]>(x) r = Relu(t) u = Transpose<perm = [2, 0, 1]>(r)
    v = Transpose<perm = [2, 0, 1]>(u) y = Sub(v, r)""": 3,
}


@table(MERGED, KEYS, WEIGHTS, SUNK)
def test_rules(case: Case) -> None:
    case.check()


@pytest.mark.parametrize(
    ("inputs", "body", "count"),
    [
        *(("float[N, 4, 8, 8] x", body, count) for body, count in COUNTED.items()),
        *(("float[3, 3, 3] x", body, count) for body, count in TWO_LAYOUTS.items()),
    ],
)
def test_nothing_is_done_for_nothing(inputs: str, body: str, count: int) -> None:
    made = sink(body, inputs=inputs).made
    graph = named_graph(made)
    SinkTransposes().apply(graph)
    assert ops(graph).count("Transpose") == count
    assert not SinkTransposes().apply(graph)
    for seed in (0, 1):
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) < 1e-6


def test_dimensions_that_a_reshape_is_known_to_keep_are_no_obstacle() -> None:
    case = key(KEY, flat=[-1, 4, 5], to=[-1, 3, 5, 4], inputs="float[N, 3, 4, 5] x")
    graph = named_graph(case.made)
    graph.outputs[0].shape = [*graph.inputs[0].shape[:2], 5, 4]
    assert MergeTransposeBetweenReshapes().apply(graph)
    assert ops(graph) == ["Transpose"]
    assert difference(outputs(graph, sample(case.made)), outputs(case.made, sample(case.made))) == 0


def test_an_old_squeeze_names_its_axes_in_order_behind_a_region() -> None:
    body = f"t = {TO_LAST}(x) r = ReduceMean<axes = [2, 3], keepdims = 1>(t) y = Squeeze<axes = [2, 3]>(r)"
    graph = named_graph(model(f"(float[N, Q, 1, M] x) => (float[A, B] y) {{ {body} }}", opset=8))
    SinkTransposes().apply(graph)
    onnx.checker.check_model(to_model(graph), full_check=True)
    (squeeze,) = (node for node in graph.nodes if node.op == "Squeeze")
    assert squeeze.attrs["axes"] == sorted(squeeze.attrs["axes"])


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
