"""InlineIfs puts the branch that is always taken in the place of its If."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from model_texts import Array, apply_once, difference, model, named_graph, ops, outputs, sample
from onnx import ModelProto

from onnxq.ir import Graph, to_model
from onnxq.passes import InlineIfs


def inlined(made: ModelProto) -> Graph:
    graph = named_graph(made)
    apply_once(InlineIfs(), graph)
    onnx.checker.check_model(to_model(graph), full_check=True)
    for seed in (0, 1):
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) == 0
    assert [tensor.name for tensor in graph.outputs] == [info.name for info in made.graph.output]
    return graph


def choice(then: str, other: str, *, around: str = "y = Exp(t)", condition: Array | None = None) -> ModelProto:
    return model(
        f"""g (float[4] x) => (float[4] y) {{
            a = Neg(x)
            t = If (c) <then_branch = yes () => (float[4] p) {then}, else_branch = no () => (float[4] p) {other}>
            {around}
        }}""",
        c=np.array(True) if condition is None else condition,
    )


@pytest.mark.parametrize(
    ("condition", "left"),
    [(np.array(True), ["Neg", "Sqrt", "Exp"]), (np.array([False]), ["Neg", "Abs", "Sin", "Exp"])],
)
def test_the_branch_that_is_taken_takes_its_place(condition: Array, left: list[str]) -> None:
    graph = inlined(choice("{ p = Sqrt(x) }", "{ q = Abs(a) p = Sin(q) }", condition=condition))
    assert ops(graph) == left


def test_constants_of_the_branch_come_along_and_names_stay_unique() -> None:
    made = choice(
        "<float[4] w = {1, 2, 3, 4}> { q = Mul(x, w) p = Add(q, q) }",
        "<float[4] w = {5, 6, 7, 8}> { q = Mul(x, w) p = Sub(q, q) }",
        around="""s = If (d) <
                      then_branch = yes () => (float[4] p) <float[4] w = {2, 2, 2, 2}> { q = Mul(x, w) p = Add(q, w) },
                      else_branch = no () => (float[4] e) { e = Neg(x) }>
                  y = Add(t, s)""",
    )
    made.graph.initializer.append(onnx.numpy_helper.from_array(np.array(True), "d"))
    assert ops(inlined(made)) == ["Neg", "Mul", "Add", "Mul", "Add", "Add"]


def test_nested_choices_are_inlined_too() -> None:
    inner = (
        "If (c) <then_branch = i () => (float[4] k) { k = Sin(m) }, else_branch = j () => (float[4] l) { l = Cos(m) }>"
    )
    graph = inlined(choice(f"{{ m = Abs(x) p = {inner} }}", "{ p = Neg(x) }"))
    assert ops(graph) == ["Neg", "Abs", "Sin", "Exp"]


def test_a_choice_in_the_body_of_another_that_stays() -> None:
    made = model(
        """g (float[4] x, bool u) => (float[4] y) {
            y = If (u) <
                then_branch = yes () => (float[4] p) {
                    p = If (c) <then_branch = i () => (float[4] k) { k = Sin(x) },
                                else_branch = j () => (float[4] l) { l = Cos(x) }> },
                else_branch = no () => (float[4] e) { e = Neg(x) }>
        }""",
        c=np.array(False),
    )
    assert ops(inlined(made)) == ["If", "Cos", "Neg"]


@pytest.mark.parametrize(
    "then",
    [
        "{ p = Sqrt(x) }",
        "{ p = Identity(x) }",
        "<float[4] p = {1, 2, 3, 4}> { unread = Neg(x) }",
    ],
)
def test_outputs_of_the_graph_keep_their_names(then: str) -> None:
    made = choice(then, "{ p = Neg(x) }")
    made.graph.node[1].output[0] = "y"
    del made.graph.node[2:]
    assert "If" not in ops(inlined(made))


def test_a_result_that_is_returned_twice() -> None:
    made = model(
        """g (float[4] x) => (float[4] y, float[4] z) {
            y, z = If (c) <then_branch = yes () => (float[4] p, float[4] p) { p = Sqrt(x) },
                           else_branch = no () => (float[4] q, float[4] r) { q = Neg(x) r = Abs(x) }>
        }""",
        c=np.array(True),
    )
    graph = named_graph(made)
    InlineIfs().apply(graph)
    assert ops(graph) == ["Sqrt", "Identity"]
    assert [tensor.name for tensor in graph.outputs] == ["y", "z"]


def test_a_condition_that_a_caller_may_feed_stays() -> None:
    made = choice("{ p = Sqrt(x) }", "{ p = Neg(x) }")
    made.graph.input.append(onnx.helper.make_tensor_value_info("c", onnx.TensorProto.BOOL, []))
    assert not InlineIfs().apply(named_graph(made))
