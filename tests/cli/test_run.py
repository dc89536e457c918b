"""The command that applies passes: what it writes, lists and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from cli.commands import CALIB, MODELS, invoke
from onnxq.cli.main import cli
from onnxq.errors import PassError
from onnxq.ir import load
from onnxq.preparing.named_passes import passes_by_name

MINE = """
from onnxq import Changes, Pass

class Soften(Pass):
    '''Relu becomes Softplus.

    More about it.
    '''

    def apply(self, graph):
        found = [node for node in graph.nodes if node.op == "Relu"]
        for node in found:
            node.op = "Softplus"
        return Changes(tuple(node.name for node in found))
"""
MODEL = MODELS / "resnet.onnx"


@pytest.fixture
def mine(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(MINE)
    return f"{tmp_path / 'mine.py'}:Soften"


def test_it_writes_the_model_and_prints_its_path(tmp_path: Path, mine: str) -> None:
    output, report = tmp_path / "out.onnx", tmp_path / "report.json"
    done = invoke("run", MODEL, "-p", "LiftConstants", "--pass", mine, "-o", output, "--report", report)
    assert done.stdout == f"{output}\n"
    assert {"Softplus", "Conv"} <= {node.op for node in load(output).nodes}
    assert not {"Relu", "Constant"} & {node.op for node in load(output).nodes}
    passes = json.loads(report.read_text())["passes"]
    assert [one["pass"] for one in passes] == ["LiftConstants", "Soften"]
    assert all(one["changed"] for one in passes)


@pytest.mark.parametrize(("data", "said"), [((), "made-up inputs"), (("--data", CALIB), "the samples given")])
def test_it_compares_after_every_pass(tmp_path: Path, data: tuple[object, ...], said: str) -> None:
    done = invoke("run", MODEL, "-p", "FuseBatchNorm", "-o", tmp_path / "out.onnx", "--verify-each", *data)
    assert f"compared on {said}" in " ".join(done.stderr.split())
    assert "largest difference" in done.stderr


def test_it_names_the_pass_that_changes_outputs_and_writes_nothing(tmp_path: Path, mine: str) -> None:
    output = tmp_path / "out.onnx"
    with pytest.raises(PassError, match="pass Soften changes output 'logits' by"):
        invoke("run", MODEL, "-p", "FuseBatchNorm", "-p", mine, "-o", output, "--verify-each")
    assert not output.exists()
    invoke("run", MODEL, "-p", mine, "-o", output, "--verify-each", "--tolerance", 100)
    assert output.exists()


def test_it_names_a_rule_that_raises_and_writes_what_the_others_make(tmp_path: Path) -> None:
    (tmp_path / "rules.py").write_text(
        """
from onnxq import RewriteRule

class Broken(RewriteRule):
    'It has a mistake.'

    def pattern(self, op):
        return op.Relu(op.any("x"), name="relu")

    def rewrite(self, new, match):
        return match.nothing
"""
    )
    output, report = tmp_path / "out.onnx", tmp_path / "report.json"
    done = invoke("run", MODEL, "-p", f"{tmp_path / 'rules.py'}:Broken", "-o", output, "--report", report)
    assert "Skipped: rule Broken failed at Relu node" in " ".join(done.stderr.split())
    ((name, what),) = json.loads(report.read_text())["passes"][0]["failed"]
    assert (name, "the pattern names nothing 'nothing'" in what) == ("Broken", True)
    assert "Relu" in {node.op for node in load(output).nodes}


def test_it_lists_every_pass_as_it_can_be_written() -> None:
    lines = [line.split("\t") for line in invoke("run", "--list").stdout.splitlines()]
    assert [line[0].partition(":")[0] for line in lines] == list(passes_by_name())
    assert [line[0] for line in lines if line[0].startswith("UpgradeOpset")] == ["UpgradeOpset:version=13"]
    assert all(line[1].endswith(".") for line in lines)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "give at least one --pass"),
        (("-p", "NameNodes", "--data", "d"), "need --verify-each"),
        (("-p", "NameNodes", "--report", "out.onnx"), "is the output itself"),
        (("-p", "NameNodes", "--tolerance", "nan", "--verify-each"), "expected a finite number"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli, ["run", str(MODEL), "-o", "out.onnx", *options])
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())
    assert not list(tmp_path.iterdir())
