"""What is printed in colours: a console that shows texts of a model as they are."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from onnxq.report.formatting import visible


def open_console(*, stderr: bool = False) -> Console:
    """Return a console that shows the names of a model as they are, and obeys nothing that they hold."""
    return _Console(stderr=stderr, markup=False, emoji=False, highlight=False)


class _Console(Console):
    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str("\n".join(map(visible, text.split("\n"))), **options)
