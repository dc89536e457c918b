"""A badge for model cards, and the checkers that applications ship."""

from __future__ import annotations

import math
from html import escape
from importlib.resources import files
from pathlib import Path

from onnxq.certificate.certificate import Certificate
from onnxq.errors import OutputError
from onnxq.system.publish import write_text

CHECKERS = ("onnxq_verify.py", "onnxq-verify.mjs")
"""The checkers without onnxq."""

_LABEL = "onnxq certified"
# Pixels of a letter at 11 pixels of Verdana, and around a text.
_LETTER, _AROUND = 6.6, 10
_SVG = """<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="20" role="img" aria-label="{title}">
<title>{title}</title>
<rect width="{left}" height="20" fill="#444"/><rect x="{left}" width="{right}" height="20" fill="#246b3c"/>
<g fill="#fff" font-family="Verdana,Geneva,sans-serif" font-size="11" text-anchor="middle">
<text x="{middle_left}" y="14">{label}</text><text x="{middle_right}" y="14">{value}</text></g>
</svg>
"""


def badge_text(certificate: Certificate) -> str:
    """Return the accuracy on samples in a few words, as in ``31.4 dB on 64 samples``."""
    measured = certificate.measured
    what = "equal outputs" if math.isinf(measured.sqnr) else f"{measured.sqnr:.1f} dB"
    return f"{what} on {measured.samples} sample{'' if measured.samples == 1 else 's'}"


def badge_svg(certificate: Certificate) -> str:
    """Return the badge as SVG, which loads nothing."""
    value = badge_text(certificate)
    left, right = (round(len(text) * _LETTER + _AROUND) for text in (_LABEL, value))
    return _SVG.format(
        width=left + right,
        left=left,
        right=right,
        middle_left=left / 2,
        middle_right=left + right / 2,
        label=_LABEL,
        value=escape(value),
        title=escape(f"{_LABEL}: {value}"),
    )


def badge_markdown(certificate: Certificate, badge: str, model: str) -> str:
    """Return the badge for a model card, with the command that checks it.

    Args:
        certificate: of the model.
        badge: file of the SVG.
        model: file of the model.
    """
    return f"![{_LABEL}: {badge_text(certificate)}]({badge})\n\nCheck it where it runs: `onnxq verify {model}`\n"


def write_badge(certificate: Certificate, path: Path, model: str) -> tuple[Path, Path]:
    """Write the badge as SVG, and beside it its Markdown; return both files.

    Raises:
        OutputError: a file cannot be written.
    """
    card = path.with_suffix(".md")
    if card == path:
        raise OutputError(f"the badge {path} is an image; give a name that ends with .svg")
    write_text(path, badge_svg(certificate), "badge")
    write_text(card, badge_markdown(certificate, path.name, model), "badge")
    return path, card


def write_checkers(folder: Path) -> tuple[Path, ...]:
    """Write the checkers to a folder, which is made if it is missing, and return the files.

    Raises:
        OutputError: the folder or a file cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"folder {folder} cannot be made: {error.strerror}; give another") from error
    for name in CHECKERS:
        write_text(folder / name, files("onnxq.certificate").joinpath(name).read_text(encoding="utf-8"), "checker")
    return tuple(folder / name for name in CHECKERS)
