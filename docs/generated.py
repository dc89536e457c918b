"""Tables that the site takes from the product itself, in place of ``<!-- generated: NAME -->``."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

PRODUCT = Path(__file__).parents[1] / "onnxq"
MARKER = re.compile(r"<!-- generated: (\w+) -->")


def presets() -> str:
    """All presets and their descriptions."""
    from onnxq.config.presets import DESCRIPTIONS

    lines = ["| preset | what it quantizes |", "|---|---|"]
    lines += [f"| `{name}` | {text} |" for name, text in DESCRIPTIONS.items()]
    return "\n".join(lines)


def messages() -> str:
    """Every message that the source raises as an error, by kind."""
    found: dict[str, set[str]] = {}
    for path in sorted(PRODUCT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for kind, text in raised(node):
                found.setdefault(kind, set()).add(text)
    parts = []
    for kind, texts in sorted(found.items()):
        parts += [f"### {kind}", "\n".join(f"- `` {text} ``" for text in sorted(texts))]
    return "\n\n".join(parts)


def raised(node: ast.AST) -> Iterator[tuple[str, str]]:
    """The kind and the text of an error that is made here with a text of its own."""
    match node:
        case ast.Call(func=ast.Name(id=kind), args=[ast.JoinedStr(values=parts), *_]) if kind.endswith("Error"):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts)
        case ast.Call(func=ast.Name(id=kind), args=[ast.Constant(value=str(text)), *_]) if kind.endswith("Error"):
            pass
        case _:
            return
    # Errors of Python itself are for programmers.
    if kind not in ("ValueError", "TypeError", "KeyError", "RuntimeError", "IndexError") and "`" not in text:
        yield kind, " ".join(text.split())


TABLES: dict[str, Callable[[], str]] = {"presets": presets, "messages": messages}


def fill(text: str) -> str:
    """The text of a page with its tables."""
    return MARKER.sub(lambda found: TABLES[found[1]](), text)
