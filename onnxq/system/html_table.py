"""Tables of values that notebooks show."""

from __future__ import annotations

from collections.abc import Sequence

_MOST_ROWS = 50


def html_table(caption: str, titles: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return an HTML table of at most 50 rows. A last row counts the rows left out.

    >>> html_table("a < b", ["name"], [["<x>"]])
    '<table><caption>a &lt; b</caption><tr><th>name</th></tr><tr><td>&lt;x&gt;</td></tr></table>'
    """
    from html import escape

    left = len(rows) - _MOST_ROWS
    shown = [*rows[:_MOST_ROWS], *([[f"and {left} more"]] if left > 0 else [])]
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in shown)
    return f"<table><caption>{escape(caption)}</caption><tr>{head}</tr>{lines}</table>"
