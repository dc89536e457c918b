"""There is one version: the package's, its metadata's and the citation's."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import yaml

import onnxq
from onnxq.version import VERSION

ROOT = Path(__file__).parents[1]


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
