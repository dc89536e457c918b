"""Graphs run in torch as in onnxruntime, whole or cut into subgraphs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import Build

from onnxq.errors import DataError, ModelError
from onnxq.ir import Graph, Node, as_graph
from onnxq.training.program import Program, cut_graph
from training.modules import constants_of, difference, run_float

X = {"x": np.array([[1.0, -2.0, 3.0]], np.float32)}


LOOP = """(float[1,3] x) => (float[1,3] y, float[?] s) {
    n = Constant<value = int64 {4}>()  t = Constant<value = bool {1}>()
    y, s = Loop (n, t, x) <body = b (int64 i, bool c, float[1,3] v) => (bool d, float[1,3] w, float[1,3] v) {
        d = Identity(c)  h = Tanh(v)  w = Add(h, x) }>
}"""


SCAN = """(float[1,3] x) => (float[3] y, float[?] s) {
    z = Constant<value = float[3] {0, 0, 0}>()
    y, s = Scan <num_scan_inputs = 1, body = b (float[3] a, float[3] r) => (float[3] u, float[3] v) {
        u = Add(a, r)  v = Identity(u) }> (z, x)
}"""


BRANCH = """(float[1,3] x) => (float[1,3] y) {
    m = ReduceMax<keepdims = 0>(x)  l = Constant<value = float {2.0}>()  c = Greater(m, l)
    y = If (c) <then_branch = a () => (float[1,3] u) { u = Neg(x) },
                else_branch = b () => (float[1,3] v) { v = Abs(x) }>
}"""


@pytest.mark.parametrize("text", [LOOP, SCAN, BRANCH])
def test_bodies_give_what_onnxruntime_gives(text: str, build: Build) -> None:
    model = build(text)
    for output in model.graph.output[1:]:
        output.type.tensor_type.ClearField("shape")
    assert difference(model, X) < 1e-6


def run(program: Program, x: torch.Tensor) -> dict[str, torch.Tensor]:
    return program.run({"x": x}, constants_of(program.graph))


def test_gradients_pass_loops(build: Build) -> None:
    x = torch.ones(1, 3, requires_grad=True)
    run(Program(as_graph(build(LOOP))), x)["y"].sum().backward()
    assert x.grad is not None
    assert bool((x.grad > 1).all())


def test_onnxruntime_computes_what_torch_does_not_and_no_gradient_passes(build: Build) -> None:
    model = build("(float[1,3] x) => (float[1,3] y) { [n] h = Hardmax(x)  [m] y = Mul(h, x) }")
    program, x = Program(as_graph(model)), torch.tensor([[1.0, -2.0, 3.0]], requires_grad=True)
    for _ in range(2):
        found = run(program, x)["y"]
    assert found.tolist() == [[0, 0, 3]]
    assert [node.name for node in program.sessions] == ["n"]
    found.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[0, 0, 1]]


@pytest.mark.parametrize(
    ("text", "size", "error", "sentence"),
    [
        ("(float[3] z) => (float[3] y) { y = Relu(z) }", 3, DataError, "input 'z' is missing, found x; feed it"),
        (
            "(float[A] x) => (float[A] y) { [a] y = Add(x, w) }",
            2,
            DataError,
            "torch cannot compute the Add 'a': The size of tensor a .*; check the sample",
        ),
        (
            SCAN.replace("num_scan_inputs = 1,", "num_scan_inputs = 1, scan_input_axes = [1],"),
            3,
            ModelError,
            "scans along another axis than the first",
        ),
    ],
    ids=["missing", "shapes", "scan"],
)
def test_graphs_that_torch_cannot_run_are_named(
    text: str, size: int, error: type[Exception], sentence: str, build: Build
) -> None:
    weights = {"w": (3,)} if "w)" in text else {}
    with pytest.raises(error, match=sentence):
        run(Program(as_graph(build(text, **weights))), torch.zeros(*((1, size) if "Scan" in text else (size,))))


SQUARE = dict.fromkeys("abcdef", (4, 4))


CHAIN = """(float[N,4] x) => (float[N,4] y) {
    h = MatMul(x, a)  r = Relu(h)  i = MatMul(r, b)  j = MatMul(i, c)  k = MatMul(j, d)  l = Relu(k)
    m = MatMul(l, e)  y = MatMul(m, f)
}"""


# What crosses inside of a residual branch are two tensors.
RESIDUAL = """(float[N,4] x) => (float[N,4] y) {
    h = MatMul(x, a)  i = MatMul(h, b)  s = Add(h, i)  j = MatMul(s, c)  k = MatMul(j, d)  t = Add(s, k)
    l = MatMul(t, e)  u = Add(t, l)  y = MatMul(u, f)
}"""


# A part of four weights would end inside of the second branch.
UNEVEN = """(float[N,4] x) => (float[N,4] y) {
    h = MatMul(x, a)  i = MatMul(h, b)  j = MatMul(i, c)  s = Add(h, j)  k = MatMul(s, d)  l = MatMul(k, e)
    m = MatMul(l, f)  y = Add(s, m)
}"""


# The mask is the same whatever becomes quantized values.
MASKED = """(float[N,4] x) => (float[N,4] y) {
    m = Sign(x)  h = MatMul(x, a)  i = MatMul(h, b)  j = Mul(i, m)  k = MatMul(j, c)  l = MatMul(k, d)
    n = MatMul(l, e)  o = MatMul(n, f)  y = Mul(o, m)
}"""


def weighted(graph: Graph) -> dict[Node, int]:
    return {node: 1 for node in graph.nodes if node.op == "MatMul"}


@pytest.mark.parametrize(
    ("text", "ends"),
    [(CHAIN, ["l", "y"]), (RESIDUAL, ["t", "y"]), (UNEVEN, ["s", "y"]), (MASKED, ["l", "y"])],
    ids=["chain", "residual", "uneven", "masked"],
)
def test_a_part_ends_where_the_fewest_tensors_cross(text: str, ends: list[str], build: Build) -> None:
    graph = as_graph(build(text, **SQUARE))
    found = cut_graph(graph, weighted(graph))
    assert [part.nodes[-1].outputs[0].name for part in found] == ends
    assert [node for part in found for node in part.nodes] == list(graph.nodes)


def test_what_crosses_is_what_is_read_behind(build: Build) -> None:
    graph = as_graph(build(MASKED, **SQUARE))
    first, last = cut_graph(graph, weighted(graph))
    assert [tensor.name for tensor in first.inputs] == ["x"]
    assert {tensor.name for tensor in first.outputs} == {"m", "l"}
    assert {tensor.name for tensor in last.inputs} == {"m", "l"}


@pytest.mark.parametrize("text", [CHAIN, RESIDUAL, MASKED])
def test_parts_give_what_the_whole_gives(text: str, build: Build) -> None:
    graph = as_graph(build(text, **SQUARE))
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    values = {"x": x}
    for part in cut_graph(graph, weighted(graph)):
        values |= run_float(graph, values, part)
    assert values["y"].equal(run_float(graph, {"x": x})["y"])


def test_a_node_of_many_weights_is_a_part(build: Build) -> None:
    graph = as_graph(build(CHAIN, **SQUARE))
    many = {node: 9 if number == 2 else 1 for number, node in enumerate(graph.nodes) if node.op == "MatMul"}
    assert [part.nodes[-1].outputs[0].name for part in cut_graph(graph, many)] == ["r", "i", "y"]


def test_without_weights_all_is_one_part(build: Build) -> None:
    graph = as_graph(build(CHAIN, **SQUARE))
    (only,) = cut_graph(graph, {})
    assert only.nodes == tuple(graph.nodes)
