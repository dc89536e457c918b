"""The documentation as a site: it builds without a warning, and what it says of the code is so."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import onnxq

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))


def said() -> Iterator[str]:
    """Every text in the code, with an ellipsis in the place of each value."""
    for place in (ROOT / "onnxq", ROOT / "passes"):
        for path in place.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def test_every_message_of_troubleshooting_is_one_that_the_code_says() -> None:
    headings = re.findall(r"^### `(.+)`$", (DOCS / "troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(headings) > 10
    texts = "\n".join(said())
    parts = [part.strip(" ;:,.()") for heading in headings for part in heading.split("…")]
    assert not [part for part in parts if part not in texts]


def test_every_exported_name_stands_in_the_reference_once() -> None:
    page = (DOCS / "reference" / "python.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\.\. auto\w+:: onnxq\.(\w+)$", page, re.MULTILINE)) == sorted(onnxq.__all__)


def test_pictures_are_what_their_script_draws() -> None:
    figures = import_module("figures")
    for name, draw in figures.FIGURES.items():
        assert (DOCS / "explanation" / "figures" / f"{name}.svg").read_text(encoding="utf-8") == draw().svg(), name


def test_lines_that_a_run_does_not_print_are_found() -> None:
    outputs = import_module("outputs")
    printed = ("┃ logits │ 37.4 dB │ 99.60% ┃", "it took 3.1 s")
    assert not outputs.differences(("│ logits │ 38.0 dB │ 99.60% │", "...", "it took 9.0 s"), printed)
    assert outputs.differences(("logits 30.4 dB 99.60%",), printed)
    assert outputs.differences(("another line",), printed)


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("sphinx")
    built = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-d", tmp_path / "cache", DOCS, tmp_path / "site"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    for page in (tmp_path / "site").rglob("*.html"):
        # A directive that one markup does not know is shown as it was written.
        assert not re.search(r">\s*\.\. \w+::|generated: ", page.read_text(encoding="utf-8")), page.name
