"""What others run of this project: its action, its hook, its templates, and what it says of itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import onnxq

ROOT = Path(__file__).parents[1]
MODEL, SAMPLES = ROOT / "models" / "gru.onnx", ROOT / "models" / "data" / "calib.npz"
QUICK = "--limit 4 --search off --accuracy off --latency-seconds 0"


def checked(folder: Path, **inputs: str) -> tuple[int, str]:
    """Run the action's script, and return its exit code and the summary that it writes."""
    variables = {"MODEL": str(MODEL), "DATA": str(SAMPLES), "GITHUB_STEP_SUMMARY": str(folder / "summary.md"), **inputs}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(ROOT / ".github" / "check_model")],
        env={**os.environ, "PATH": path, **variables},
        capture_output=True,
        cwd=folder,
        check=False,
    )
    return done.returncode, (folder / "summary.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("wanted", "code"), [("20", 0), ("90", 3)])
def test_the_action_checks_what_is_quantized_already(wanted: str, code: int, tmp_path: Path) -> None:
    onnxq.quantize(MODEL, onnxq.Data(SAMPLES, limit=4), tmp_path / "q.onnx", budget="off")
    found, summary = checked(tmp_path, CANDIDATE="q.onnx", MIN_SQNR=wanted, OPTIONS="--limit 4")
    assert (found, summary.count("```")) == (code, 2)
    assert "logits" in summary


def test_the_action_quantizes_what_is_not(tmp_path: Path) -> None:
    assert checked(tmp_path, OPTIONS=QUICK, OUTPUT="a name.onnx")[0] == 0
    assert (tmp_path / "a name.onnx").is_file()
    code, summary = checked(tmp_path, MODEL="no model; touch hacked", OPTIONS=QUICK)
    assert code == 2
    assert "no model; touch hacked" in summary
    assert not (tmp_path / "hacked").exists()


def test_every_input_of_the_action_is_one_of_its_script() -> None:
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    given = {value for step in action["runs"]["steps"] for value in step.get("env", {}).values()}
    assert given == {f"${{{{ inputs.{name} }}}}" for name in action["inputs"]}
    # Inputs in the text of a command would be run as one.
    assert not [step for step in action["runs"]["steps"] if "${{" in step.get("run", "")]
    script = (ROOT / ".github" / "check_model").read_text(encoding="utf-8")
    named = {name for step in action["runs"]["steps"] for name in step.get("env", {})}
    assert named <= set(re.findall(r"\b[A-Z_]+\b", script))


def test_the_hook_is_a_command_that_there_is() -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    done = subprocess.run([sys.executable, "-m", *hook["entry"].split(), "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "--min-sqnr" in done.stdout


def test_templates_are_whole() -> None:
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert path.stem == "config" or {"name", "description", "body"} <= set(form)


def test_checks_run_on_every_python_that_is_named_and_with_extras_that_there_are() -> None:
    text = (ROOT / ".github" / "workflows" / "checks.yml").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [match[1] for one in project["classifiers"] if (match := re.fullmatch(r".*:: (3\.\d+)", one))]
    assert yaml.safe_load(text)["jobs"]["tests"]["strategy"]["matrix"]["python"] == named
    assert set(re.findall(r"\.\[(\w+)\]", text)) <= project["optional-dependencies"].keys()
    for path in re.findall(r"\btests/\S+|\bdocs\b", text):
        assert (ROOT / path).exists()
