"""All commands that quantize say where the result goes in the same way, and check that before anything runs."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from cli.commands import CALIB, MODELS, invoke
from onnxq.errors import OutputError
from onnxq.report import FidelityError

COMMANDS = ("quantize", "plan", "train")
SAMPLES = ("--calib", CALIB, "--limit", 8, "--latency-seconds", 0, "--accuracy", "off")


@pytest.mark.parametrize("command", COMMANDS)
def test_more_and_less_contradict_each_other(command: str) -> None:
    result = invoke(command, MODELS / "gru.onnx", *SAMPLES, "-v", "-q")
    assert result.exit_code == 2
    assert "--verbose shows more and --quiet less" in result.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_the_output_is_no_file_that_is_kept_beside_it(command: str, tmp_path: Path) -> None:
    result = invoke(command, MODELS / "gru.onnx", *SAMPLES, "-o", tmp_path / "o", "--report", tmp_path / "o")
    assert result.exit_code == 2
    assert "is the output itself" in " ".join(result.stderr.split())


@pytest.mark.parametrize(("command", "more"), [("quantize", ("--search", "off")), ("train", ("--epochs", 1))])
def test_a_report_is_printed_where_json_is_asked_for(command: str, more: tuple[object, ...], tmp_path: Path) -> None:
    options = (*SAMPLES, *more, "--force", "--json", "-q", "-o", tmp_path / "q.onnx")
    result = invoke(command, MODELS / "gru.onnx", *options)
    assert result.stderr == ""
    found = json.loads(result.stdout)
    assert found["files"]["output"] == str(tmp_path / "q.onnx")
    assert found["run"]["command"][0] == "onnxq"


def test_a_refused_plan_is_kept_and_a_refused_model_is_not(tmp_path: Path) -> None:
    options = (*SAMPLES, "--search", "off", "--min-sqnr", 200, "-q")
    with pytest.raises(FidelityError):
        invoke("quantize", MODELS / "gru.onnx", *options, "-o", tmp_path / "q.onnx", "--plan-out", tmp_path / "p.toml")
    with pytest.raises(FidelityError):
        invoke("plan", MODELS / "gru.onnx", *options, "-o", tmp_path / "refused.toml")
    assert [path.name for path in tmp_path.iterdir()] == ["p.toml"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_report_that_has_no_room_says_where_the_model_is(tmp_path: Path) -> None:
    (tmp_path / f".r.json.{os.getpid()}.tmp").symlink_to("/dev/full")
    options = (*SAMPLES, "--search", "off", "--force", "-q", "-o", tmp_path / "q.onnx", "--report", tmp_path / "r.json")
    with pytest.raises(OutputError, match=r"report .*r\.json cannot .*: No space .* is there .* in .*q\.onnx$"):
        invoke("quantize", MODELS / "gru.onnx", *options)
    assert [path.name for path in tmp_path.iterdir()] == ["q.onnx"]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_model_is_never_the_output(command: str, tmp_path: Path) -> None:
    shutil.copy(MODELS / "gru.onnx", tmp_path / "m.onnx")
    with pytest.raises(OutputError, match="is the model itself"):
        invoke(command, tmp_path / "m.onnx", *SAMPLES, "-o", tmp_path / "m.onnx")
    with pytest.raises(OutputError, match="of the output does not exist"):
        invoke(command, tmp_path / "m.onnx", *SAMPLES, "-o", tmp_path / "missing" / "o")


@pytest.mark.parametrize(
    ("flags", "told"),
    [((), [False]), (("-q",), []), (("-v",), [True]), (("--json", "-q"), ["json"]), (("--json",), [False, "json"])],
)
def test_a_refusal_is_told_as_the_flags_say(
    flags: tuple[str, ...], told: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[object] = []
    monkeypatch.setattr("onnxq.cli.terminal.print_report", lambda report, *, every: found.append(every))
    monkeypatch.setattr(
        "click.echo", lambda text, **_: found.append(json.loads(text)["fidelity"]["refusal"] and "json")
    )
    options = (*SAMPLES, "--search", "off", "--min-sqnr", 200, *flags, "-o", tmp_path / "q.onnx")
    with pytest.raises(FidelityError):
        invoke("quantize", MODELS / "gru.onnx", *options)
    assert found == told


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("option", ["-o", "--report"])
def test_samples_are_never_overwritten(command: str, option: str, tmp_path: Path) -> None:
    shutil.copy(CALIB, tmp_path / "c.npz")
    rest = () if option == "-o" else ("-o", tmp_path / "o")
    with pytest.raises(OutputError, match=r"c\.npz is read as well; give another name"):
        invoke(command, MODELS / "gru.onnx", "--calib", tmp_path / "c.npz", option, tmp_path / "c.npz", *rest)
    assert (tmp_path / "c.npz").read_bytes() == CALIB.read_bytes()
