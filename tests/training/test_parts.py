"""Graphs are cut where little crosses, and their parts one after the other give what the whole gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import Build

from onnxq.ir import Graph, Node, as_graph, constants
from onnxq.training.program import Program, Subgraph, cut_graph

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
# The mask is the same whatever becomes codes.
MASKED = """(float[N,4] x) => (float[N,4] y) {
    m = Sign(x)  h = MatMul(x, a)  i = MatMul(h, b)  j = Mul(i, m)  k = MatMul(j, c)  l = MatMul(k, d)
    n = MatMul(l, e)  o = MatMul(n, f)  y = Mul(o, m)
}"""


def weighted(graph: Graph) -> dict[Node, int]:
    return {node: 1 for node in graph.nodes if node.op == "MatMul"}


@pytest.mark.parametrize(
    ("text", "ends"),
    [(CHAIN, ["l", "y"]), (RESIDUAL, ["t", "y"]), (MASKED, ["l", "y"])],
    ids=["chain", "residual", "masked"],
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
    program, x = Program(graph), torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    held = {tensor: torch.from_numpy(np.array(tensor.values)) for tensor in constants(graph)}

    def run(fed: dict[str, torch.Tensor], part: Subgraph) -> dict[str, torch.Tensor]:
        return program.run(fed, held, lambda node, index, one: one, lambda node, index, one: one, part)

    values = {"x": x}
    for part in cut_graph(graph, weighted(graph)):
        values |= run(values, part)
    assert values["y"].equal(run({"x": x}, Subgraph.whole(graph))["y"])


def test_a_node_of_many_weights_is_a_part(build: Build) -> None:
    graph = as_graph(build(CHAIN, **SQUARE))
    many = {node: 9 if number == 2 else 1 for number, node in enumerate(graph.nodes) if node.op == "MatMul"}
    assert [part.nodes[-1].outputs[0].name for part in cut_graph(graph, many)] == ["r", "i", "y"]


def test_without_weights_all_is_one_part(build: Build) -> None:
    graph = as_graph(build(CHAIN, **SQUARE))
    (only,) = cut_graph(graph, {})
    assert only.nodes == tuple(graph.nodes)
