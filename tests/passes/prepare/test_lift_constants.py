"""LiftConstants makes initializers of Constant nodes of every kind but sparse ones."""

from __future__ import annotations

import numpy as np
import pytest
from model_texts import difference, model, nodes, ops, outputs, sample, values
from onnx import helper, numpy_helper

from onnxq.ir import as_graph, constants, to_model
from onnxq.passes import LiftConstants
from onnxq.rewrite import Changes


@pytest.mark.parametrize(
    ("attribute", "expected"),
    [
        ("value = float[2, 2] {1.0, 2.0, 3.0, 4.0}", np.array([[1, 2], [3, 4]], np.float32)),
        ("value = int64 {7}", np.array(7)),
        ("value_float = 1.5", np.array(1.5, np.float32)),
        ("value_floats = [1.5, 2.5]", np.array([1.5, 2.5], np.float32)),
        ("value_int = 3", np.array(3)),
        ("value_ints = [3, -4]", np.array([3, -4])),
    ],
)
def test_lifts_numbers_with_type_and_shape(attribute: str, expected: np.ndarray) -> None:
    kind = "float" if expected.dtype == np.float32 else "int64"
    made = model(f"g ({kind}[2] x) => ({kind}[A, B] y) {{ k = Constant <{attribute}> () y = Add(x, k) }}")
    made.graph.output[0].type.tensor_type.ClearField("shape")
    graph = as_graph(made)
    assert LiftConstants().apply(graph) == Changes(("k",))
    assert ops(graph) == ["Add"]
    (lifted,) = constants(graph)
    np.testing.assert_array_equal(lifted.values, expected, strict=True)
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) == 0


@pytest.mark.parametrize("attribute", ['value_string = "é"', 'value_strings = ["é"]', 'value = string[1] {"é"}'])
def test_lifts_text(attribute: str) -> None:
    made = model(f"g (string[1] x) => (bool[1] y) {{ k = Constant <{attribute}> () y = Equal(x, k) }}", opset=19)
    graph = as_graph(made)
    assert LiftConstants().apply(graph) == Changes(("k",))
    for text, same in (("é", True), ("e", False)):
        assert outputs(graph, {"x": np.array([text], object)})["y"].tolist() == [same]


def test_leaves_sparse_values() -> None:
    made = model("g (float[4] x) => (float[4] y) { [sparse] k = Constant () y = Add(x, k) }")
    numbers = numpy_helper.from_array(values(2), "v")
    sparse = helper.make_sparse_tensor(numbers, numpy_helper.from_array(np.array([0, 2]), "i"), [4])
    made.graph.node[0].attribute.append(helper.make_attribute("sparse_value", sparse))
    graph = as_graph(made)
    assert LiftConstants().apply(graph) == Changes((), (("k", "holds sparse values"),))
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) == 0


def test_leaves_outputs_of_the_model() -> None:
    made = model(
        """g (float[2] x) => (float[2] y, float[2] k) {
            k = Constant <value_floats = [1.0, 2.0]> ()  y = Add(x, k)
        }"""
    )
    graph = as_graph(made)
    assert LiftConstants().apply(graph) == Changes((), (("k", "is an output of its graph"),))
    assert outputs(graph, sample(made))["k"].tolist() == [1, 2]


def test_lifts_into_the_body_that_holds_the_node_and_leaves_outputs_of_bodies() -> None:
    made = model(
        """g (float[2] x, bool c) => (float[2] y) {
            y = If (c) <
                then_branch = yes () => (float[2] t) { a = Constant <value_floats = [3.0, 4.0]> () t = Add(x, a) },
                else_branch = no () => (float[2] e) { e = Constant <value_floats = [1.0, 2.0]> () }>
        }"""
    )
    graph = as_graph(made)
    assert LiftConstants().apply(graph) == Changes(("a",), (("e", "is an output of its graph"),))
    assert not graph.initializers
    branches = to_model(graph).graph.node[0].attribute
    assert [[tensor.name for tensor in branch.g.initializer] for branch in branches] == [["a"], []]
    for seed in (0, 1):
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) == 0


def test_a_constant_that_a_body_captures_is_declared_around_it() -> None:
    made = model(
        """g (float[2] x, bool c) => (float[2] y) {
            k = Constant <value_floats = [3.0, 4.0]> ()
            y = If (c) <
                then_branch = yes () => (float[2] t) { t = Add(x, k) },
                else_branch = no () => (float[2] e) { e = Mul(x, k) }>
        }"""
    )
    graph = as_graph(made)
    assert LiftConstants().apply(graph).changed == ("k",)
    assert [tensor.name for tensor in graph.initializers] == ["k"]
    assert difference(outputs(graph, sample(made, 1)), outputs(made, sample(made, 1))) == 0


def test_a_constant_that_nothing_reads_goes_with_its_node() -> None:
    graph = as_graph(model("g (float[2] x) => (float[2] y) { k = Constant <value_int = 3> () y = Neg(x) }"))
    assert LiftConstants().apply(graph).changed == ("k",)
    assert [node.op_type for node in to_model(graph).graph.node] == ["Neg"]
    assert not nodes(graph, "Constant")
