"""Write the table of rules and passes from their docstrings: ``python docs/rules.py``."""

from __future__ import annotations

import inspect
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from onnxq.passes import passes_of
from onnxq.passes.preparing.named_passes import equation_and_purpose

PAGE = Path(__file__).parent / "reference" / "rules.md"
_HEAD = """# Rules and passes

A rule replaces the left side of its arrow by the right side; a pass without an equation edits the whole graph.
`onnxq run --list` shows their options, and [Passes and rules](../how-to/passes-and-rules.md) how to write your own.
"""


def page() -> str:
    """Return the page: for each topic a table of its rules and passes."""
    topics: dict[str, list[str]] = defaultdict(list)
    steps = {**passes_of("canonical"), **passes_of("prepare")}
    for name, step in sorted(steps.items()):
        equation, purpose = equation_and_purpose(step)
        topics[step.__module__].append(f"| `{name}` | {_cell(equation)} | {purpose.replace('``', '`')} |")
    return "\n".join((_HEAD, *_tables(topics)))


def _tables(topics: dict[str, list[str]]) -> Iterator[str]:
    for module, rows in sorted(topics.items()):
        topic = (inspect.getdoc(sys.modules[module]) or "").partition("\n")[0].partition(":")[0].rstrip(".")
        yield "\n".join((f"## {topic}", "", "| | equation | in words |", "|---|---|---|", *rows, ""))


def _cell(equation: str) -> str:
    equation, _, condition = equation.partition(" with ")
    return " with ".join(f"`{text}`" for text in (equation, condition) if text)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
