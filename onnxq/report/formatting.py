"""Figures as text."""

from __future__ import annotations

from collections.abc import Sequence


def share(value: float | None) -> str:
    """Return a share as text.

    >>> share(0.98437), share(None)
    ('98.44%', '-')
    """
    return "-" if value is None else f"{value:.2%}"


def counted(samples: int, files: int = 0) -> str:
    """Return a number of samples as text, with the number of files if samples of one file count as one.

    >>> counted(1), counted(400, 8)
    ('1 sample', '400 samples of 8 files')
    """
    text = plural(samples, "sample")
    return f"{text} of {plural(files, 'file')}" if files else text


def plural(count: int, what: str) -> str:
    """Return a number of things as text.

    >>> plural(1, "node"), plural(3, "node")
    ('1 node', '3 nodes')
    """
    return f"{count} {what if count == 1 else what + 's'}"


def shortened(name: str, width: int) -> str:
    """Return a name, without its middle if it is too long.

    >>> shortened("/model/layers.0/attention/query/MatMul", 20)
    '/model/l...ry/MatMul'
    """
    half = (width - 3) // 2
    return name if len(name) <= width else f"{name[: width - 3 - half - 1]}...{name[-half - 1 :]}"


def visible(text: str) -> str:
    r"""Return text with control characters escaped.

    Names in a model may hold them: one that changes the direction of writing would change the text after it too.

    >>> visible("/head\tMatMul")
    '/head\\tMatMul'
    """
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def size(count: int) -> str:
    """Return a number of bytes as text.

    >>> size(1_500), size(2_500_000)
    ('1.5 kB', '2.50 MB')
    """
    return f"{count / 1e6:.2f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"


def duration(seconds: float) -> str:
    """Return the time of a run, in seconds, as text."""
    return f"{seconds * 1e3:.2f} ms"


def milliseconds(value: float | None) -> str:
    """Return the time of a node as text.

    >>> milliseconds(0.0123), milliseconds(None)
    ('0.012 ms', '-')
    """
    return "-" if value is None else f"{value:.3f} ms"


def places(ranges: Sequence[tuple[int, int]], most: int) -> str:
    """Return runs of indices as text, at most `most` of them.

    >>> places([(0, 2), (7, 7), (9, 12)], 2), places([(5, 5)], 2)
    ('0-2, 7 and 4 more', '5')
    """
    text = [str(first) if first == last else f"{first}-{last}" for first, last in ranges[:most]]
    others = sum(last - first + 1 for first, last in ranges[most:])
    return ", ".join(text) + (f" and {others} more" if others else "")
