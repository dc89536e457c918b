"""Passes applied to a model: what is written, what is compared, and which pass is named when something is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from conftest import Build, Samples
from model_texts import difference, outputs, sample
from onnx import ModelProto

import onnxq
from onnxq.errors import DataError, PassError, SchemeError
from onnxq.ir import Graph, Tensor, all_graphs, load, remove_nodes, replace_uses
from onnxq.passes.preparing.rewriting import Verify, apply_to_float, run_passes
from onnxq.rewrite import Changes, Match, NodePattern, OpsetPatternBuilder, Pass, RewriteContext, RewriteRule


@dataclass(frozen=True)
class RemoveIdentity(Pass):
    """A stranger's pass, as the page on passes shows one."""

    def apply(self, graph: Graph) -> Changes:
        nodes = [node for scope in all_graphs(graph) for node in scope.nodes]
        gone = [node for node in nodes if node.op == "Identity" and not node.outputs[0].graph_output_of]
        for node in gone:
            replace_uses(node.outputs[0], node.inputs[0])
        remove_nodes(graph, gone)
        return Changes(tuple(node.name for node in gone))


@dataclass(frozen=True)
class SoftenRelu(Pass):
    """A stranger's pass in plain GraphSurgeon: Relu becomes Max with zero, in bodies too."""

    def apply(self, graph: Graph) -> Changes:
        changed = []
        for scope in all_graphs(graph):
            for node in [node for node in scope.nodes if node.op == "Relu"]:
                zero = gs.Constant(f"{node.name}.zero", np.zeros((), np.float32))
                scope.nodes.append(
                    gs.Node("Max", f"{node.name}.max", inputs=[node.inputs[0], zero], outputs=node.outputs)
                )
                node.outputs.clear()
                changed.append(node.name)
        graph.cleanup().toposort()
        return Changes(tuple(changed))


@dataclass(frozen=True)
class Rename(Pass):
    """Put another operator in the place of one."""

    old: str = "Relu"
    new: str = "Tanh"

    def apply(self, graph: Graph) -> Changes:
        found = [node for scope in all_graphs(graph) for node in scope.nodes if node.op == self.old]
        for node in found:
            node.op = self.new
        return Changes(tuple(node.name for node in found))


@dataclass(frozen=True)
class Does(Pass):
    """A pass that does whatever the test says."""

    what: Callable[[Graph], object]

    def apply(self, graph: Graph) -> Changes:
        self.what(graph)
        return Changes(("something",))


@dataclass(frozen=True)
class ClipRelu(RewriteRule):
    """A stranger's rule that gives plain numbers for constants."""

    def pattern(self, op: OpsetPatternBuilder) -> NodePattern:
        return op.Relu(op.any("x"))

    def rewrite(self, new: RewriteContext, match: Match) -> Tensor:
        return new.Clip(match.x, 0.0, 1e6)


@dataclass(frozen=True)
class DivToMul(RewriteRule):
    """A stranger's rule that reads a constant."""

    def pattern(self, op: OpsetPatternBuilder) -> NodePattern:
        return op.Div(op.any("x"), op.constant("c"))

    def rewrite(self, new: RewriteContext, match: Match) -> Tensor:
        return new.Mul(match.x, 1 / match.c.values)


BRANCHES = """(float[N,4] x, bool c) => (float[N,4] y) {
    [dot] m = MatMul(x, w)
    [branch] h = If (c) <
        then_branch = yes () => (t) { [inner_relu] a = Relu(m) [same] b = Identity(a) [norm] t = Mul(b, factor) },
        else_branch = no () => (e) { [inner_keep] e = Identity(m) }
    >
    [last_relu] y = Relu(h)
}"""


@pytest.fixture
def branches(build: Build) -> ModelProto:
    return build(BRANCHES, w=(4, 4), factor=np.float32([2]))


def test_strangers_passes_and_ours_make_one_pipeline_on_a_model_with_bodies(
    branches: ModelProto, tmp_path: Path
) -> None:
    steps = ["NameNodes", SoftenRelu(), "FuseBatchNorm", RemoveIdentity(), "FoldConstants:largest=1000", "RemoveUnused"]
    done = run_passes(branches, steps, tmp_path / "out.onnx", verify_each=Verify())

    assert [len(one.changes.changed) for one in done.applied] == [0, 2, 0, 1, 0, 0]
    assert done.made_up
    assert max(done.differences) <= 1e-6
    assert {node.op for scope in all_graphs(load(tmp_path / "out.onnx")) for node in scope.nodes} == {
        "MatMul",
        "If",
        "Max",
        "Mul",
        "Identity",
    }
    for flag in (True, False):
        given = {**sample(branches), "c": np.array(flag)}
        assert difference(outputs(done.graph, given), outputs(branches, given)) <= 1e-6


@pytest.mark.parametrize(("rule", "op"), [(ClipRelu(), "Clip"), (DivToMul(), "Mul")])
def test_rules_know_types_and_constants_that_only_nodes_of_the_model_tell(
    build: Build, tmp_path: Path, rule: Pass, op: str
) -> None:
    model = build("""(float[4] x) => (float[4] y) {
        c = Constant<value = float {2.0}>() a = Neg(x) b = Div(a, c) r = Relu(b) y = Exp(r) }""")
    done = run_passes(model, [rule], tmp_path / "out.onnx", verify_each=Verify())
    assert [node.op for node in done.graph.nodes].count(op) == len(done.applied[0].changes.changed) == 1
    assert not onnx.load(tmp_path / "out.onnx").graph.value_info
    graph = onnxq.ir.as_graph(model)
    assert apply_to_float(graph, [rule])[0].changes == done.applied[0].changes
    assert not any(tensor.dtype for tensor in onnxq.ir.inner_variables(graph))


def test_the_first_pass_that_changes_outputs_is_named(branches: ModelProto, tmp_path: Path) -> None:
    steps = (RemoveIdentity(), Rename("Relu", "Softplus"), Rename("Mul", "Add"))
    with pytest.raises(PassError, match=r"^pass Rename changes output 'y' by 0\.\d+ of its largest value"):
        run_passes(branches, steps, tmp_path / "out.onnx", verify_each=Verify())
    assert not list(tmp_path.iterdir())
    assert run_passes(branches, steps, verify_each=Verify(tolerance=10)).differences[1] > 0.1


def test_outputs_are_compared_on_the_samples_given(build: Build, samples_for: Callable[..., Samples]) -> None:
    model = build("(float[N,4] x) => (float[N,4] y) { [a] y = Relu(x) }")
    positive = [{"x": np.abs(one["x"])} for one in samples_for(model)]
    done = run_passes(model, [Rename("Relu", "Identity")], verify_each=Verify(positive))
    assert (done.differences, done.made_up) == ((0.0,), False)
    with pytest.raises(DataError, match="'z' is not an input of the model"):
        run_passes(model, [Rename()], verify_each=Verify([{"z": np.zeros(3)}]))


def _same_name(graph: Graph) -> None:
    graph.nodes[-1].inputs[0].name = graph.nodes[-1].outputs[0].name


def _wrong_type(graph: Graph) -> None:
    graph.nodes[0].inputs[1].values = np.zeros((4, 4), np.int32)


def _no_output(graph: Graph) -> None:
    graph.outputs[0].name = "z"


def _new_input(graph: Graph) -> None:
    extra = gs.Variable("extra", np.float32, [1])
    graph.inputs.append(extra)
    graph.nodes[0].inputs[0] = extra


def _unknown_attribute(graph: Graph) -> None:
    graph.nodes[0].attrs["colour"] = 3


def _odd_attribute(graph: Graph) -> None:
    graph.nodes[0].attrs["axis"] = object()


def _cycle(graph: Graph) -> None:
    graph.nodes[0].inputs[0] = graph.nodes[-1].outputs[0]


NAMED = (_same_name, _odd_attribute, _cycle)
BREAKING = (*NAMED, _wrong_type, _no_output, _new_input, _unknown_attribute)


@pytest.mark.parametrize("what", BREAKING, ids=lambda what: what.__name__)
def test_a_pass_that_breaks_the_model_is_named_and_nothing_is_written(
    branches: ModelProto, tmp_path: Path, what: Callable[[Graph], object]
) -> None:
    with pytest.raises(PassError, match=r"^pass Does (breaks the model|raised)"):
        run_passes(branches, [RemoveIdentity(), Does(what)], tmp_path / "out.onnx", verify_each=Verify())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("what", [one for one in BREAKING if one not in (_no_output, _new_input)])
def test_what_does_not_load_is_not_written_without_verification_either(
    branches: ModelProto, tmp_path: Path, what: Callable[[Graph], object]
) -> None:
    sentence = "^pass Does breaks the model: " if what in NAMED else "verify each pass to learn which one did it"
    with pytest.raises(PassError, match=sentence):
        run_passes(branches, [Does(what), RemoveIdentity()], tmp_path / "out.onnx")
    assert not list(tmp_path.iterdir())


def test_what_is_no_pass_and_what_no_text_names_is_refused(branches: ModelProto) -> None:
    with pytest.raises(SchemeError, match="pass 'Nope' is unknown"):
        run_passes(branches, ["Nope"])
    with pytest.raises(PassError, match="is no pass"):
        run_passes(branches, [RemoveIdentity])  # type: ignore[list-item]


def test_external_data_stays_external(branches: ModelProto, tmp_path: Path) -> None:
    source, output = tmp_path / "in.onnx", tmp_path / "out.onnx"
    before = outputs(branches, sample(branches))
    onnx.save(branches, source, save_as_external_data=True, size_threshold=0)
    run_passes(source, [SoftenRelu()], output, verify_each=Verify())
    assert {path.name for path in tmp_path.iterdir()} >= {"out.onnx", "in.onnx"}
    assert difference(outputs(load(output), sample(branches)), before) <= 1e-6


def test_the_float_model_keeps_its_inputs_and_outputs(branches: ModelProto) -> None:
    graph = onnxq.ir.as_graph(branches)
    assert [len(one.changes.changed) for one in apply_to_float(graph, [SoftenRelu(), RemoveIdentity()])] == [2, 1]
    for what, changed in ((_no_output, "output y"), (_new_input, "input extra")):
        with pytest.raises(
            PassError, match=rf"pass Does changes an input or output of the model \({changed}\), expected"
        ):
            apply_to_float(onnxq.ir.as_graph(branches), [Does(what)])


def test_json_holds_the_beginning_of_long_lists(branches: ModelProto) -> None:
    @dataclass(frozen=True)
    class Long(Pass):
        def apply(self, graph: Graph) -> Changes:
            return Changes(tuple("abc" * 100), tuple(("node", "reason") for _ in range(500)))

    (plain,) = run_passes(branches, [Long()]).to_dict()["passes"]  # type: ignore[misc]
    assert (plain["pass"], plain["changed"], plain["skipped"]) == ("Long", 300, 500)
    assert (len(plain["changed_names"]), len(plain["skipped_names"])) == (100, 100)
