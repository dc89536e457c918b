"""What others see of this project: its version, action, hook, templates, site and errors."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import onnxq
from onnxq import (
    Budget,
    Data,
    Goal,
    bench,
    compare_files,
    errors,
    load_plan,
    load_report,
    load_scheme,
    load_statistics,
    save_plan,
)
from onnxq.calibration.methods import Fixed, Percentile
from onnxq.data.inputs import Input, check_signature
from onnxq.errors import DataError, SchemeError
from onnxq.numerics.spec import QuantSpec
from onnxq.passes.preparing.named_passes import as_passes
from onnxq.version import VERSION

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


def test_the_version_is_said_in_one_place() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert settings["project"]["dynamic"] == ["version"]
    assert settings["tool"]["setuptools"]["dynamic"] == {"version": {"attr": "onnxq.version.VERSION"}}
    assert onnxq.__version__ == VERSION


def test_a_tree_that_is_not_installed_has_a_version() -> None:
    code = (
        "import importlib.metadata as metadata, sys\n"
        "def absent(name): raise metadata.PackageNotFoundError(name)\n"
        "metadata.version = metadata.distribution = absent\n"
        "from onnxq.report.parts import Machine\n"
        "assert Machine.this().versions['onnxq'] and Machine.this().versions['onnx']\n"
        "sys.argv[1:] = ['--version']\n"
        "from onnxq.cli.main import main\n"
        "main()\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (found.returncode, found.stdout) == (0, f"onnxq, version {VERSION}\n"), found.stderr


def test_the_citation_and_the_changelog_are_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == VERSION
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.+)$", changelog, re.MULTILINE)[0] == "Unreleased"


@pytest.mark.parametrize("name", ["DataError", "ModelError", "OutputError", "SchemeError"])
def test_every_error_is_an_onnxq_error(name: str) -> None:
    assert issubclass(getattr(errors, name), errors.OnnxqError)


def test_the_nearest_name_is_suggested_only_when_there_is_one() -> None:
    assert errors.did_you_mean("minmx", ["minmax", "mse"]) == "; did you mean 'minmax'?"
    assert errors.did_you_mean("zzz", ["minmax", "mse"]) == ""
    assert errors.did_you_mean("x", []) == ""


def test_a_message_with_names_made_to_hurt_is_one_printable_line_of_bounded_length() -> None:
    assert str(errors.ModelError("node 'a\nb\x1b[2J' is bad")) == "node 'a b [2J' is bad"
    assert len(str(errors.ModelError(f"node {'x' * 10_000} is bad"))) < 700
    assert str(errors.ModelError(f"node {'x' * 10_000} is bad")).endswith("xxx is bad")


def test_an_unknown_name_is_told_with_all_names_and_the_nearest() -> None:
    errors.check_name("preset", "int8", {"int8": 1})
    with pytest.raises(errors.SchemeError, match=r"^preset 'itn8' is not one of int8, mxfp4; did you mean 'int8'\?$"):
        errors.check_name("preset", "itn8", {"int8": 1, "mxfp4": 2})


def test_what_is_no_path_is_told_before_it_is_opened() -> None:
    readers: list[Callable[[Any], object]] = [load_plan, load_report, load_scheme, load_statistics]
    for called in (*readers, partial(save_plan, 5)):
        with pytest.raises(SchemeError, match=r"is 5 of type int, expected a"):
            called(5)
    models: list[Callable[..., object]] = [compare_files, bench]
    for called in models:
        for files in ((5, "x.onnx"), ("x.onnx", 5)):
            with pytest.raises(SchemeError, match="the file of a model is 5 of type int, expected a path"):
                called(*files, [])


@pytest.mark.parametrize(
    "made",
    [
        lambda: Budget(progress=None),
        lambda: Data("x", chain=[1]),
        lambda: Percentile("a"),
        lambda: Fixed("a", 3),
        lambda: QuantSpec(5),
        lambda: as_passes(5),
        lambda: as_passes(None),
        lambda: Budget(threads=True),
    ],
)
def test_other_types_end_in_a_sentence(made: Callable[[], object]) -> None:
    with pytest.raises(SchemeError, match=r"(expected|is not one of)"):
        made()


def test_names_of_samples_that_are_no_texts_end_in_a_sentence() -> None:
    array = np.zeros(1, np.float32)
    with pytest.raises(DataError, match="1 is not an input of the model, expected 'x'"):
        check_signature({1: (array.dtype, array.shape)}, [Input("x", array.dtype, (1,))], "sample 0")


def test_numbers_of_numpy_are_taken_as_numbers() -> None:
    assert type(Budget(threads=np.int64(2)).threads) is int
    assert type(Goal(np.float32(20)).min_sqnr) is float
    assert type(Data("x", limit=np.int64(5)).limit) is int
    assert type(Percentile(np.float32(50)).percent) is float
