"""Bodies of control flow are found at any depth, with the names in them."""

from __future__ import annotations

from conftest import Build
from onnx import GraphProto, helper

from onnxq.calibration.instrument import bodies, known_dimensions, made_inside, names_made, own_bodies, unused_mark

TEXT = """(float[2,n] x, bool c) => (float[2,n] y) {
    s = Sin(x)
    y = If(c) <then_branch = t () => (float[2,n] a) { a = If(c) <
        then_branch = u () => (float[2,n] b) { b = Neg(s) }, else_branch = v () => (float[2,n] d) { d = Abs(s) }> },
        else_branch = e () => (float[2,n] f) { f = Exp(s) }>
}"""


def graph(build: Build) -> GraphProto:
    return build(TEXT).graph


def test_bodies_are_found_at_any_depth_and_by_node(build: Build) -> None:
    found = graph(build)
    assert [body.name for body in bodies(found)] == ["t", "u", "v", "e"]
    assert [body.name for body in own_bodies(found.node[1])] == ["t", "e"]


def test_names_are_those_of_a_graph_or_of_what_is_inside(build: Build) -> None:
    assert names_made(graph(build)) == {"x", "c", "s", "y"}
    assert made_inside(graph(build)) == {"a", "b", "d", "f"}


def test_a_mark_is_in_no_name(build: Build) -> None:
    model = build(TEXT)
    assert unused_mark(model.graph) == "/tap"
    model.graph.node[0].output.append("z/tap/tap'")
    assert unused_mark(model.graph) == "/tap''"


def test_dimensions_are_known_or_not() -> None:
    assert known_dimensions(helper.make_tensor_value_info("x", 1, [2, 3])) == [2, 3]
    assert known_dimensions(helper.make_tensor_value_info("x", 1, [2, "n"])) is None
    assert known_dimensions(helper.make_tensor_value_info("x", 1, None)) is None
