"""There is one version: the package's, its metadata's and the citation's."""

from __future__ import annotations

import re
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


def test_the_citation_and_the_changelog_are_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == VERSION
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.+)$", changelog, re.MULTILINE)[0] == "Unreleased"
