"""Passes, what they report, and pipelines, which take a user's own pass like any other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass

import pytest
from model_texts import difference, ops, outputs, sample
from model_zoo import batch_norm_chain, if_bodies_that_share_a_captured_weight

from onnxq.errors import ModelError, OnnxqError, PassError
from onnxq.ir import Graph, Node, Variable, all_graphs, as_graph
from onnxq.passes import DropNoOps, FoldConstants, FuseBatchNorm, NameNodes, RemoveUnused
from onnxq.rewrite import Changes, Pass, Pipeline


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
class AppendPlainNode(Pass):
    """A third one, which leaves plain GraphSurgeon objects in every graph and sorts nothing."""

    def apply(self, graph: Graph) -> Changes:
        import onnx_graphsurgeon as gs

        changed = []
        for scope in list(all_graphs(graph)):
            output = scope.outputs[0]
            made = gs.Variable(f"{output.name}.before", output.dtype, output.shape)
            output.inputs[0].outputs = [made]
            scope.nodes.append(gs.Node("Identity", f"{output.name}.same", inputs=[made], outputs=[output]))
            changed.append(output.name)
        return Changes(tuple(changed))


@dataclass(frozen=True)
class Does(Pass):
    """A pass that does whatever the test says."""

    what: Callable[[Graph], object]

    def apply(self, graph: Graph) -> Changes:
        return self.what(graph)  # type: ignore[return-value]


def test_changes_are_false_when_nothing_was_changed() -> None:
    assert not Changes()
    assert not Changes(skipped=(("node", "reason"),))
    assert Changes(changed=("node",))


def test_options_are_the_fields_of_a_pass() -> None:
    assert FoldConstants(largest=10).options() == {"largest": 10, "growth": None, "layouts_only": False}
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
    assert tuple(one.step for one in done) == steps
    assert not done[0]
    assert done[1].changes.changed == ("bn", "scaled", "bn2")
    assert "w" in done[2].changes.changed
    assert all(one.seconds > 0 for one in done)


def test_an_empty_pipeline_changes_nothing() -> None:
    assert Pipeline(()).apply(as_graph(batch_norm_chain())) == ()


def test_a_users_pass_in_plain_graphsurgeon_works_between_others() -> None:
    graph = as_graph(batch_norm_chain())
    done = Pipeline((FuseBatchNorm(), ReplaceRelu(by="Softplus"), RemoveUnused(), ReplaceRelu())).apply(graph)
    assert [bool(one) for one in done] == [True, True, True, False]
    assert ops(graph) == ["Conv", "Softplus", "ConvTranspose"]
    assert set(outputs(graph, sample(batch_norm_chain()))) == {"y"}


def test_every_pass_of_ours_works_behind_one_that_appends_plain_nodes_to_bodies() -> None:
    made = if_bodies_that_share_a_captured_weight()
    graph = as_graph(made)
    steps = (FuseBatchNorm(), FoldConstants(), DropNoOps(), RemoveUnused(), NameNodes())
    done = Pipeline((AppendPlainNode(), *steps)).apply(graph)
    assert len(done[0].changes.changed) == 3
    assert all(type(node) is Node for scope in all_graphs(graph) for node in scope.nodes)
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) == 0


def test_a_fault_of_a_users_pass_is_one_sentence_with_its_name_cause_and_line() -> None:
    reported = r"pass Does raised IndexError: list index out of range \(.*test_passes\.py, line \d+\); correct it"
    with pytest.raises(PassError, match=reported) as caught:
        Pipeline((Does(lambda graph: graph.nodes[99]),)).apply(as_graph(batch_norm_chain()))
    assert isinstance(caught.value.__cause__, IndexError)


def test_an_error_of_onnxq_keeps_its_kind_and_gains_the_name_of_the_pass() -> None:
    def refuse(graph: Graph) -> Changes:
        raise ModelError("node a is odd")

    with pytest.raises(ModelError, match=r"^pass Does: node a is odd$"):
        Pipeline((Does(refuse),)).apply(as_graph(batch_norm_chain()))


def test_a_fault_of_our_own_passes_is_not_taken_for_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NameNodes, "apply", lambda self, graph: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Pipeline((NameNodes(),)).apply(as_graph(batch_norm_chain()))


def _set_input(graph: Graph) -> Changes:
    list.__setitem__(graph.nodes[0].inputs, 0, "x")
    return Changes(("x",))


def _set_operator(graph: Graph) -> Changes:
    graph.nodes[0].op = 3
    return Changes(("x",))


def _append(graph: Graph) -> Changes:
    graph.nodes.append(Variable("not a node"))
    return Changes(("x",))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (lambda graph: None, "pass Does returned NoneType, expected onnxq.Changes; return Changes"),
        (lambda graph: True, "pass Does returned bool"),
        (lambda graph: Changes("name"), "pass Does raised TypeError: Changes takes a tuple of names"),
        (lambda graph: Changes((3,)), "pass Does raised TypeError: Changes takes a tuple of names"),  # type: ignore[arg-type]
        (lambda graph: Changes((), ("name",)), "pass Does raised TypeError: Changes takes"),  # type: ignore[arg-type]
        (_set_input, "pass Does: Conv node 'conv' reads or makes 'x' of type str, expected a tensor"),
        (_set_operator, "pass Does: node 'conv' has the operator 3"),
        (_append, "pass Does: graph 'g' lists .* of type Variable, expected a node"),
    ],
)
def test_what_a_pass_must_not_do_is_one_sentence(what: Callable[[Graph], object], message: str) -> None:
    with pytest.raises(OnnxqError, match=message):
        Pipeline((Does(what),)).apply(as_graph(batch_norm_chain()))


@pytest.mark.parametrize("step", [NameNodes, "NameNodes", None])
def test_what_is_no_pass_is_refused(step: object) -> None:
    with pytest.raises(PassError, match=r"is no pass, expected an instance of a subclass of onnxq.Pass"):
        Pipeline((step,)).apply(as_graph(batch_norm_chain()))  # type: ignore[arg-type]
