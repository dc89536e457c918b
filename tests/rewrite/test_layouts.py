"""Layouts: which operators work in any order of axes, and what changes in them."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from model_texts import difference, model, named_graph, outputs, sample, values
from onnx import ModelProto

from onnxq.ir import Graph, Names, Node, Variable, toposort
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
