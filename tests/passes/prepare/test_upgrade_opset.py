"""UpgradeOpset converts old models, and leaves those that are new enough exactly as they are."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from model_texts import difference, model, node_named, nodes, ops, outputs, sample, values
from model_zoo import zoo
from onnx import ModelProto

from onnxq.errors import ModelError
from onnxq.ir import as_graph, to_model
from onnxq.passes import UpgradeOpset
from onnxq.rewrite import Changes

OLD: dict[str, Callable[[], ModelProto]] = {name: build for name, build in zoo() if name.startswith("opset_")}


@pytest.mark.parametrize("version", [13, 17, 21])
@pytest.mark.parametrize("name", OLD)
def test_a_converted_model_computes_the_same(name: str, version: int) -> None:
    made = OLD[name]()
    graph = as_graph(made)
    before = graph.opset
    changes = UpgradeOpset(version).apply(graph)
    assert bool(changes) is (before < version)
    assert graph.opset == max(before, version)
    onnx.checker.check_model(to_model(graph), full_check=True)
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) <= 1e-6
    assert not UpgradeOpset(version).apply(graph)


def test_nodes_still_stand_for_what_they_stood_for() -> None:
    graph = as_graph(model("g (float[4] x) => (float[4] y) { [n] y = Neg(x) }", opset=11))
    graph.nodes[0].origins = (("a", "Sub"), ("b", "Mul"))
    UpgradeOpset(13).apply(graph)
    assert graph.nodes[0].origins == (("a", "Sub"), ("b", "Mul"))


def test_changes_say_from_which_opset_to_which() -> None:
    assert UpgradeOpset(13).apply(as_graph(OLD["opset_11"]())) == Changes(("opset 11 to 13",))


def test_attributes_that_became_inputs_are_constants() -> None:
    made = model(
        """g (float[2, 1, 4] x) => (float[4, 2] y, float[1, 2, 4] z) {
            [squeeze] s = Squeeze <axes = [1]> (x)  [unsqueeze] z = Unsqueeze <axes = [0]> (s)
            [sum] r = ReduceSum <axes = [1], keepdims = 1> (x)  [swap] y = Transpose <perm = [1, 0]> (s)
        }""",
        opset=11,
    )
    graph = as_graph(made)
    UpgradeOpset(13).apply(graph)
    for name, axes in (("squeeze", [1]), ("unsqueeze", [0]), ("sum", [1])):
        node = node_named(graph, name)
        assert "axes" not in node.attrs
        source = node.inputs[1]
        stored = source if not source.inputs else source.inputs[0].attrs["value"]
        assert stored.values.tolist() == axes
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) == 0


@pytest.mark.parametrize("version", [7, 16, 17])
def test_a_model_that_is_new_enough_is_not_touched(version: int) -> None:
    graph = as_graph(model("g (float[2, 4] x) => (float[2, 4] y) { y = MatMul(x, w) }", w=values(4, 4)))
    written, before = to_model(graph), graph.nodes
    assert not UpgradeOpset(version).apply(graph)
    assert graph.nodes is before
    assert to_model(graph) == written


def test_bodies_are_converted_and_still_know_the_graph_around_them() -> None:
    made = model(
        """g (float[2, 1] x, bool c) => (float[2] y) {
            y = If (c) <
                then_branch = yes () => (float[2] t) { m = Mul(x, w) t = Squeeze <axes = [1]> (m) },
                else_branch = no () => (float[2] e) { e = Squeeze <axes = [1]> (x) }>
        }""",
        opset=11, w=values(2, 1),
    )  # fmt: skip
    graph = as_graph(made)
    UpgradeOpset(13).apply(graph)
    assert all(body.parent is graph for body in graph.nodes[-1].subgraphs())
    assert all("axes" not in node.attrs for node in nodes(graph, "Squeeze"))
    for seed in (0, 1):
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) <= 1e-6


def test_weights_are_the_same_bytes_afterwards() -> None:
    made = OLD["opset_9"]()
    graph = as_graph(made)
    UpgradeOpset(21).apply(graph)
    weight = nodes(graph, "Conv")[0].inputs[1]
    np.testing.assert_array_equal(weight.values, values(8, 3, 3, 3), strict=True)


def test_a_version_that_onnxruntime_does_not_load_is_an_error() -> None:
    with pytest.raises(ModelError, match="1000"):
        UpgradeOpset(1000).apply(as_graph(OLD["opset_21"]()))
    assert ops(as_graph(OLD["opset_21"]()))[0] == "Conv"
