"""SplitHardSwishes writes HardSwish as HardSigmoid times its data."""

from __future__ import annotations

from model_texts import apply_once, difference, model, named_graph, nodes, ops, outputs, sample

from onnxq.passes import SplitHardSwishes
from onnxq.preparing.preparation import prepare_for_integers
from onnxq.rewrite import Changes


def test_the_gate_and_the_product_say_what_hard_swish_says() -> None:
    made = model("g (float[2, 3] x) => (float[2, 3] y) { [swish] a = HardSwish(x) y = Neg(a) }")
    graph = named_graph(made)
    assert apply_once(SplitHardSwishes(), graph) == Changes(("swish",))
    assert [(node.op, node.name) for node in graph.nodes[:2]] == [("HardSigmoid", "swish.gate"), ("Mul", "swish")]
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 1e-6


def test_hard_swish_in_a_body_is_split() -> None:
    made = model(
        """g (bool c, float[2, 3] x) => (float[2, 3] y) {
            y = If(c) <then_branch = t () => (float[2, 3] a) { a = HardSwish(x) },
                       else_branch = e () => (float[2, 3] b) { b = Neg(x) }>
        }"""
    )
    graph = named_graph(made)
    SplitHardSwishes().apply(graph)
    assert sorted(ops(graph)) == ["HardSigmoid", "If", "Mul", "Neg"]


def test_a_damaged_one_or_one_of_another_domain_is_left() -> None:
    graph = named_graph(model("g (float[2, 3] x) => (float[2, 3] y) { y = HardSwish(x) }"))
    nodes(graph)[0].domain = "mine"
    assert not apply_once(SplitHardSwishes(), graph)
    nodes(graph)[0].domain, nodes(graph)[0].inputs = "", []
    assert not apply_once(SplitHardSwishes(), graph)


def test_preparing_again_gives_the_same_names() -> None:
    gate = "HardSigmoid <alpha = 0.16666667, beta = 0.5> (a)"
    graph = named_graph(model(f"g (float[2, 3] x) => (float[2, 3] y) {{ a = Sin(x) g = {gate} y = Mul(a, g) }}"))
    prepare_for_integers(graph, (SplitHardSwishes(),))
    first = [(node.name, node.outputs[0].name) for node in graph.nodes]
    assert "HardSwish" not in ops(graph)
    prepare_for_integers(graph, (SplitHardSwishes(),), opset=21)
    assert [(node.name, node.outputs[0].name) for node in graph.nodes] == first
