"""SplitSwishes writes Swish as Sigmoid times its data."""

from __future__ import annotations

import numpy as np
import pytest
from model_texts import apply_once, model, named_graph, ops, outputs, sample

from onnxq.ir import Node, as_graph
from onnxq.passes import SplitSwishes

TEXT = "g (float[2, 3] x) => (float[2, 3] y) {{ [swish] y = Swish{} (x) }}"


@pytest.mark.parametrize(
    ("slope", "attributes", "expected"),
    [
        (1.0, "", ["Sigmoid", "Mul"]),
        (1.0, " <alpha = 1.0>", ["Sigmoid", "Mul"]),
        (1.702, " <alpha = 1.702>", ["Mul", "Sigmoid", "Mul"]),
    ],
)
def test_the_gate_and_the_product_say_what_swish_says(slope: float, attributes: str, expected: list[str]) -> None:
    made = model(TEXT.format(attributes), opset=24)
    graph = named_graph(made)
    assert apply_once(SplitSwishes(), graph).changed == ("swish",)
    assert ops(graph) == expected
    assert graph.nodes[-1].name == "swish"
    x = sample(made)["x"].astype(np.float64)
    np.testing.assert_allclose(outputs(graph, sample(made))["y"], x / (1 + np.exp(-slope * x)), rtol=1e-5, atol=1e-6)


def test_one_of_another_domain_is_left() -> None:
    graph = named_graph(model(TEXT.format(""), opset=24))
    node: Node = graph.nodes[0]
    node.domain = "mine"
    assert not apply_once(SplitSwishes(), graph)


def test_a_slope_of_unknown_type_is_left() -> None:
    graph = as_graph(model(TEXT.format(" <alpha = 1.702>"), opset=24))
    graph.inputs[0].dtype = None
    assert SplitSwishes().apply(graph).skipped == (("swish", "the type of its data is not known"),)
