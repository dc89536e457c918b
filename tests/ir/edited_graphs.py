"""Small graphs that edits are tried on, and what tells how they hang together."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
from onnx import parser

from onnxq.ir import Graph, Node, Variable, all_graphs, read_model

BRANCHES = """<ir_version: 8, opset_import: ["" : 17]> g (float[4] x, bool c) => (float[4] y)
<float[4] w = {1, 2, 3, 4}, float[4] spare = {1, 2, 3, 4}, float[4] never = {1, 2, 3, 4}> {
  [first] h = Relu(x)
  [captured] k = Add(h, spare)
  [branch] y = If (c) <
    then_branch = t () => (u) { [then] u = Add(h, w) },
    else_branch = e () => (k) { }>
  [dead] d = Neg(h)
  [deader] dd = If (c) <then_branch = t2 () => (z) { z = Neg(d) }, else_branch = e2 () => (q) { q = Mul(d, w) }>
}"""


def branches() -> Graph:
    return read_model(parser.parse_model(BRANCHES))


def named(graph: Graph, name: str) -> Node:
    return next(node for scope in all_graphs(graph) for node in scope.nodes if node.name == name)


def names(graph: Graph) -> list[str]:
    return [node.name for node in graph.nodes]


def hub(consumers: int) -> tuple[Graph, Variable]:
    """Return a graph in which many nodes read one tensor."""
    x, h = Variable("x", np.float32, [4]), Variable("h")
    nodes = [Node("Relu", "hub", inputs=[x], outputs=[h])]
    nodes += [Node("Neg", f"n{i}", inputs=[h], outputs=[Variable(f"y{i}")]) for i in range(consumers)]
    return Graph(nodes, [x], [node.outputs[0] for node in nodes[1:]], opset=17), h


def calls(work: Callable[[], object]) -> int:
    """Return how many functions were called; C code that loops inside one call is not seen."""
    count = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def wire(name: str, tensor: object) -> Node:
    return Node("Identity", name, inputs=[tensor], outputs=[Variable(f"{name}.out")])
