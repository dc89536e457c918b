"""What passes share that carry out plans."""

from __future__ import annotations

from model_texts import model, ops, values

from onnxq.config.scheme import Mode, QuantSpec
from onnxq.ir import Constant, Graph, Node, all_graphs, as_graph
from onnxq.passes.quantize.planned import NodeReplacement, planned_nodes, rewrite_planned
from onnxq.planning.plan import Decision, Plan, Weight
from onnxq.rewrite import Changes


def storing_both_products() -> tuple[Graph, Plan]:
    """A graph of two products, one in a branch, that a plan would store, and a Neg that it would not."""
    made = model(
        """g (float[2, 4] x, bool c) => (float[2, 4] y) {
            [outer] a = MatMul(x, w)  [neg] b = Neg(a)
            [branch] y = If (c) <
                then_branch = t () => (u) { [inner] u = MatMul(b, v) }, else_branch = e () => (b) { }
            >
        }""",
        w=values(4, 4),
        v=values(4, 4, seed=1),
    )
    decisions = [
        Decision("neg", "Neg", Mode.FLOAT, "float"),
        *(Decision(n, "MatMul", Mode.STORAGE, "", (Weight(1, "", QuantSpec("int8"), 1),)) for n in ("outer", "inner")),
    ]
    return as_graph(made), Plan(tuple(decisions), (), "int8", "onnxruntime-cpu")


def test_planned_nodes_are_found_in_bodies_too() -> None:
    graph, plan = storing_both_products()
    found = [(scope.name, node.name) for scope, node, _ in planned_nodes(graph, plan, Mode.STORAGE)]
    assert found == [("g", "outer"), ("t", "inner")]
    assert not list(planned_nodes(graph, plan, Mode.DYNAMIC))
    assert not list(planned_nodes(graph, plan, Mode.STORAGE, {"Gemm"}))


def test_new_nodes_stand_first_or_in_the_place_of_their_node_in_its_graph() -> None:
    graph, plan = storing_both_products()

    def rewrite(scope: Graph, node: Node, source: Constant, weight: Weight) -> NodeReplacement:
        half = Node("Identity", f"{node.name}.weight", {}, [source], [source.copy().to_variable()])
        product = Node("MatMul", f"{node.name}.new", {}, [node.inputs[0], half.outputs[0]], list(node.outputs))
        node.outputs.clear()
        return NodeReplacement(instead=[product], first=[half])

    assert rewrite_planned(graph, plan, Mode.STORAGE, rewrite) == Changes(("outer", "inner"))
    assert [node.name for scope in all_graphs(graph) for node in scope.nodes] == [
        *("outer.weight", "outer.new", "neg", "branch"),
        *("inner.weight", "inner.new"),
    ]


def test_planned_nodes_are_left_where_their_weight_is_codes_or_the_rewrite_says_so() -> None:
    graph, plan = storing_both_products()
    outer = graph.nodes[0]
    outer.inputs[1] = graph.nodes[1].outputs[0]
    changes = rewrite_planned(graph, plan, Mode.STORAGE, lambda *_: "it is too small")
    assert changes == Changes((), (("outer", "its weight is quantized already"), ("inner", "it is too small")))
    assert ops(graph) == ["MatMul", "Neg", "If", "MatMul"]
