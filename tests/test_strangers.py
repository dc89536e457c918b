"""A stranger's pass in plain GraphSurgeon and a stranger's rule, in one pipeline with ours, on a model with bodies."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from conftest import Build, Samples
from model_texts import difference, outputs
from onnx import ModelProto

import onnxq
from onnxq.cli.main import cli
from onnxq.ir import Graph, all_graphs, load

STRANGERS = '''
import numpy as np
import onnx_graphsurgeon as gs

from onnxq import Changes, Pass, RewriteRule, RewriteRules, all_graphs


class WriteReluAsMax(Pass):
    """Relu becomes Max with zero."""

    def apply(self, graph):
        found = [(scope, node) for scope in all_graphs(graph) for node in scope.nodes if node.op == "Relu"]
        for scope, node in found:
            zero = gs.Constant(f"{node.name}.zero", np.zeros((), np.float32))
            scope.nodes.append(gs.Node("Max", f"{node.name}.max", inputs=[node.inputs[0], zero], outputs=node.outputs))
            node.outputs.clear()
        graph.cleanup().toposort()
        return Changes(tuple(node.name for _, node in found))


class UseLogSoftmax(RewriteRule):
    """The logarithm of a Softmax is a LogSoftmax."""

    def pattern(self, op):
        return op.Log(op.Softmax(op.any("x"), name="softmax"))

    def rewrite(self, new, match):
        return new.LogSoftmax(match.x, axis=match.softmax.attrs.get("axis"))


RULES = RewriteRules((UseLogSoftmax(),))
'''
MODEL = """(float[N,64] x, bool c) => (float[N,8] y) {
    [dot] m = MatMul(x, w)
    [branch] h = If (c) <
        then_branch = yes () => (t) { [relu] a = Relu(m) [soft] p = Softmax<axis=1>(a) [log] t = Log(p) },
        else_branch = no () => (e) { [same] s = Identity(m) [keep] e = Relu(s) }
    >
    [head] y = MatMul(h, v)
}"""


@pytest.fixture
def model(build: Build) -> ModelProto:
    return build(MODEL, w=(64, 64), v=(64, 8))


@pytest.fixture
def samples() -> Samples:
    generator = np.random.default_rng(0)
    inputs = generator.standard_normal((8, 2, 64)).astype(np.float32)
    return [{"x": x, "c": np.array(index % 2 == 0)} for index, x in enumerate(inputs)]


@pytest.fixture
def strangers(tmp_path: Path) -> Path:
    path = tmp_path / "strangers.py"
    path.write_text(STRANGERS)
    return path


def _ops(graph: Graph) -> list[str]:
    return sorted(node.op for scope in all_graphs(graph) for node in scope.nodes)


def test_each_is_short() -> None:
    for found in ast.walk(ast.parse(STRANGERS)):
        if isinstance(found, ast.ClassDef):
            assert sum((line.end_lineno or 0) - line.lineno + 1 for line in found.body) < 12, "its docstring included"


@pytest.mark.parametrize("rule", ["UseLogSoftmax", "RULES"])
def test_the_command_line_takes_them_from_a_file(
    rule: str, strangers: Path, model: ModelProto, samples: Samples, tmp_path: Path
) -> None:
    source, output, data = tmp_path / "model.onnx", tmp_path / "out.onnx", tmp_path / "data"
    onnx.save(model, source)
    data.mkdir()
    for index, sample in enumerate(samples):
        np.savez(data / f"{index}.npz", **sample)  # type: ignore[arg-type]
    steps = ["NameNodes", f"{strangers}:WriteReluAsMax", "DropNoOps", f"{strangers}:{rule}", "RemoveUnused"]
    named = [word for step in steps for word in ("-p", step)]
    compared = ["--verify-each", "--data", str(data)]
    done = CliRunner().invoke(cli, ["run", str(source), *named, "-o", str(output), *compared], catch_exceptions=False)

    assert (done.exit_code, done.stdout) == (0, f"{output}\n")
    assert _ops(load(output)) == ["If", "LogSoftmax", "MatMul", "MatMul", "Max", "Max"]
    for sample in samples[:2]:
        assert difference(outputs(load(output), sample), outputs(model, sample)) <= 1e-5


def test_quantize_takes_them_as_objects(strangers: Path, model: ModelProto, samples: Samples, tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    exec(STRANGERS, names)
    own = [names["WriteReluAsMax"](), names["UseLogSoftmax"]()]
    done = onnxq.quantize(
        model, samples, tmp_path / "out.onnx", prepare=own, budget=onnxq.Budget(latency_seconds=0, search="off")
    )

    assert [(one.name, one.changed_names) for one in done.report.run.passes[:2]] == [
        ("WriteReluAsMax", ("relu", "keep")),
        ("UseLogSoftmax", ("log",)),
    ]
    found = _ops(load(tmp_path / "out.onnx"))
    assert "LogSoftmax" in found
    assert not {"Log", "Softmax"} & set(found)
    for sample in samples[:2]:
        assert difference(outputs(done.graph, sample), outputs(model, sample)) < 0.1
