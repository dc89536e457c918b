"""Commands that rewrite float models: optimize, dequantize and run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import ModelProto

from cli.commands import CALIB, RESNET, invoke, refusal_of, words_of
from onnxq.errors import ModelError, PassError, SchemeError
from onnxq.ir import load
from onnxq.ops import ALREADY_QUANTIZED
from onnxq.passes.preparing.named_passes import passes_by_name


def test_it_writes_the_model_and_tells_what_every_rule_did(tmp_path: Path) -> None:
    output, report = tmp_path / "out.onnx", tmp_path / "report.json"
    done = invoke("optimize", RESNET, "-o", output, "--data", CALIB, "--latency-seconds", "0", "--report", report)
    assert done.exit_code == 0
    assert done.stdout.strip() == str(output)
    assert "nodes before" in done.stderr
    assert re.search(r"│ Conv +│ +\d+ │ +\d+ │", done.stderr)
    onnx.checker.check_model(output)
    found = json.loads(report.read_text())
    assert found["nodes"][1] <= found["nodes"][0]
    assert [sum(found["operators"][when].values()) for when in ("before", "after")] == found["nodes"]
    assert found["left_out"] == []


def test_an_unknown_rule_is_told(tmp_path: Path) -> None:
    with pytest.raises(SchemeError, match="did you mean 'FoldConstants'"):
        invoke("optimize", RESNET, "-o", tmp_path / "o.onnx", "--without", "FoldConstant")
    assert not (tmp_path / "o.onnx").exists()


def test_the_report_is_not_the_output(tmp_path: Path) -> None:
    output = tmp_path / "out.onnx"
    assert "is the output itself" in refusal_of("optimize", RESNET, "-o", output, "--report", output)
    assert not output.exists()


@pytest.fixture
def quantized(perceptron: ModelProto, quantize_to: Callable[..., Any], tmp_path: Path) -> Path:
    path = tmp_path / "model.int8.onnx"
    quantize_to(perceptron, path)
    return path


def test_it_writes_one_file_and_names_it_on_stdout(quantized: Path, tmp_path: Path) -> None:
    output = tmp_path / "back.onnx"
    result = invoke("dequantize", quantized, "-o", output)
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"{output}\n", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back.onnx", "model.int8.onnx"]
    assert not ALREADY_QUANTIZED & {node.op_type for node in onnx.load(output).graph.node}


def test_the_output_is_named_after_the_model_in_the_current_folder(
    quantized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert invoke("dequantize", quantized).stdout == "model.int8.float.onnx\n"
    assert (tmp_path / "here" / "model.int8.float.onnx").is_file()


def test_an_existing_file_stays_when_there_is_nothing_to_dequantize(perceptron: ModelProto, tmp_path: Path) -> None:
    onnx.save(perceptron, tmp_path / "float.onnx")
    (tmp_path / "back.onnx").write_bytes(b"precious")
    with pytest.raises(ModelError, match="nothing to dequantize"):
        invoke("dequantize", tmp_path / "float.onnx", "-o", tmp_path / "back.onnx")
    assert (tmp_path / "back.onnx").read_bytes() == b"precious"


def test_help_says_what_it_does() -> None:
    text = " ".join(invoke("dequantize", "--help").stdout.split())
    assert "back into a plain float model" in text
    assert "MODEL.float.onnx" in text


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


@pytest.fixture
def mine(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(MINE)
    return f"{tmp_path / 'mine.py'}:Soften"


def test_it_writes_the_model_and_prints_its_path(tmp_path: Path, mine: str) -> None:
    output, report = tmp_path / "out.onnx", tmp_path / "report.json"
    done = invoke("run", RESNET, "-p", "LiftConstants", "--pass", mine, "-o", output, "--report", report)
    assert done.stdout == f"{output}\n"
    assert {"Softplus", "Conv"} <= {node.op for node in load(output).nodes}
    assert not {"Relu", "Constant"} & {node.op for node in load(output).nodes}
    passes = json.loads(report.read_text())["passes"]
    assert [one["pass"] for one in passes] == ["LiftConstants", "Soften"]
    assert all(one["changed"] for one in passes)


@pytest.mark.parametrize(("data", "said"), [((), "generated inputs"), (("--data", CALIB), "the samples given")])
def test_it_compares_after_every_pass(tmp_path: Path, data: tuple[object, ...], said: str) -> None:
    done = invoke("run", RESNET, "-p", "FuseBatchNorm", "-o", tmp_path / "out.onnx", "--verify-each", *data)
    assert f"compared on {said}" in words_of(done.stderr)
    assert "largest difference" in done.stderr


def test_it_names_the_pass_that_changes_outputs_and_writes_nothing(tmp_path: Path, mine: str) -> None:
    output = tmp_path / "out.onnx"
    with pytest.raises(PassError, match="pass Soften changes output 'logits' by"):
        invoke("run", RESNET, "-p", "FuseBatchNorm", "-p", mine, "-o", output, "--verify-each")
    assert not output.exists()
    invoke("run", RESNET, "-p", mine, "-o", output, "--verify-each", "--tolerance", 100)
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
    done = invoke("run", RESNET, "-p", f"{tmp_path / 'rules.py'}:Broken", "-o", output, "--report", report)
    assert "Skipped: rule Broken failed at Relu node" in words_of(done.stderr)
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
        (("-p", "NameNodes", "--image-fit", "crop"), "need --verify-each"),
        (("-p", "NameNodes", "--report", "out.onnx"), "is the output itself"),
        (("-p", "NameNodes", "--tolerance", "nan", "--verify-each"), "expected a finite number"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in refusal_of("run", RESNET, "-o", "out.onnx", *options)
    assert not list(tmp_path.iterdir())
