"""The documentation as a site: it builds without a warning, and what it says of the code is so."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import onnxq

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


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
        assert not re.search(r">\s*\.\. \w+::", page.read_text(encoding="utf-8")), page.name
