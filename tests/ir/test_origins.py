"""Origins: joined in order, each once, and put back on nodes that were read again."""

from __future__ import annotations

from small_models import BRANCHING, model

from onnxq.ir import Node, all_nodes, join_origins, origins_by_name, read_model, restore_origins


def fused(*origins: tuple[str, str]) -> Node:
    node = Node("Gemm", "g")
    node.origins = origins
    return node


def test_a_node_that_stands_for_others_is_none_of_the_model_itself() -> None:
    both = fused(("m", "MatMul"), ("a", "Add"))
    assert join_origins((Node("Relu", "r"), both, both)) == (("r", "Relu"), ("m", "MatMul"), ("a", "Add"))


def test_of_very_many_the_first_are_kept() -> None:
    long = join_origins([Node("Neg", f"n{index}") for index in range(1000)])
    assert long[0] == ("n0", "Neg")
    assert len(long) < 100
    assert join_origins((fused(*long), Node("Neg", "last"))) == long


def test_origins_come_back_by_name_in_bodies_too() -> None:
    named = BRANCHING.replace("u = Add", "[inner] u = Add")
    graph, again = read_model(model(named)), read_model(model(named))
    for _, node in all_nodes(graph):
        node.origins = ((f"before {node.name}", node.op),)
    restore_origins(again, origins_by_name(graph))
    assert {node.name: node.origins for _, node in all_nodes(again)} == {
        "scale": (("before scale", "Mul"),),
        "branch": (("before branch", "If"),),
        "inner": (("before inner", "Add"),),
    }
