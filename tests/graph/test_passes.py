"""Passes, what they report, and pipelines, which take a user's own pass like any other."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass

import numpy as np
import pytest
from model_zoo import batch_norm_chain, difference, model, ops, outputs, sample, values

from onnxq.graph import Changes, Graph, Pass, Pipeline
from onnxq.modelfile import as_graph
from onnxq.passes import FoldConstants, FuseBatchNorm, NameNodes, RemoveUnused


@dataclass(frozen=True)
class ReplaceRelu(Pass):
    """A user's pass, in the idioms of plain GraphSurgeon."""

    by: str = "Tanh"

    def apply(self, graph: Graph) -> Changes:
        found = [node for node in graph.nodes if node.op == "Relu" and node.i().op == "Conv"]
        for node in found:
            graph.tensors()[node.outputs[0].name].inputs[0].op = self.by
        return Changes(tuple(node.name for node in found))


@dataclass(frozen=True)
class SkipLast(Pass):
    """Another one, which rewires and leaves the rest to cleanup."""

    def apply(self, graph: Graph) -> Changes:
        import onnx_graphsurgeon as gs

        last = graph.outputs[0].inputs[0]
        if last.op == "Neg":
            return Changes()
        half = gs.Constant("half", np.array(0.5, np.float32))
        inner = gs.Variable("inner", dtype=np.float32)
        graph.nodes.append(gs.Node("Mul", "halve", inputs=[last.inputs[0], half], outputs=[inner]))
        graph.nodes.append(gs.Node("Neg", "negate", inputs=[inner], outputs=[graph.outputs[0]]))
        last.outputs.clear()
        graph.cleanup().toposort()
        return Changes((last.name,))


def test_changes_are_false_when_nothing_was_changed() -> None:
    assert not Changes()
    assert not Changes(left=(("node", "reason"),))
    assert Changes(changed=("node",))


def test_options_are_the_fields_of_a_pass() -> None:
    assert FoldConstants(largest=10).options() == {"largest": 10}
    assert NameNodes().options() == {}


def test_passes_with_equal_options_are_equal_and_cannot_be_changed() -> None:
    assert FoldConstants(largest=10) == FoldConstants(largest=10) != FoldConstants()
    with pytest.raises(FrozenInstanceError):
        FoldConstants().largest = 1  # type: ignore[misc]


def test_a_class_without_apply_is_no_pass() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Pass()  # type: ignore[abstract]


def test_a_pipeline_applies_its_passes_in_order_and_returns_what_each_did() -> None:
    graph = as_graph(batch_norm_chain())
    steps = (NameNodes(), FuseBatchNorm(), RemoveUnused())
    done = Pipeline(steps).apply(graph)
    assert tuple(step for step, _ in done) == steps
    assert not done[0][1]
    assert done[1][1].changed == ("bn", "scaled", "bn2")
    assert "w" in done[2][1].changed


def test_an_empty_pipeline_changes_nothing() -> None:
    assert Pipeline(()).apply(as_graph(batch_norm_chain())) == ()


def test_a_users_pass_in_plain_graphsurgeon_works_between_others() -> None:
    graph = as_graph(batch_norm_chain())
    done = Pipeline((FuseBatchNorm(), ReplaceRelu(by="Softplus"), RemoveUnused(), ReplaceRelu())).apply(graph)
    assert [bool(changes) for _, changes in done] == [True, True, True, False]
    assert ops(graph) == ["Conv", "Softplus", "ConvTranspose"]
    assert set(outputs(graph, sample(batch_norm_chain()))) == {"y"}


def test_stock_graphsurgeon_objects_of_a_users_pass_are_seen_by_the_passes_behind_it() -> None:
    made = model("g (float[N, 4] x) => (float[N, 3] y) { [dot] m = MatMul(x, w) [act] y = Relu(m) }", w=values(4, 3))
    graph = as_graph(made)
    done = Pipeline((SkipLast(), NameNodes(), FuseBatchNorm(), RemoveUnused(), SkipLast())).apply(graph)
    assert ops(graph) == ["MatMul", "Neg"]
    assert done[2][1].changed == ("halve",)
    assert not done[-1][1]
    found = outputs(graph, sample(made))
    assert difference(found, {"y": -0.5 * (sample(made)["x"] @ values(4, 3))}) <= 1e-6
