"""What a command keeps of a quantization beside the model, most of all of one that was refused."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnxq.cli.groups import OUTPUT, Command, option, with_options
from onnxq.cli.options import FILE

if TYPE_CHECKING:
    from onnxq.report import Report

# Samples on which a page compares layers: noise of a layer is much the same on all.
_LAYERS = 8


@dataclass(frozen=True)
class Kept:
    """Files that are written beside the model.

    Attributes:
        report: the JSON.
        html: the page.
        overlay: after which node data for Model Explorer is named.
    """

    report: Path | None = None
    html: Path | None = None
    overlay: Path | None = None

    @property
    def files(self) -> dict[str, Path | None]:
        """The files by the options that name them."""
        return {"--report": self.report, "--html": self.html, "--overlay": self.overlay}

    @property
    def layers(self) -> int:
        """By how many samples the page tells of layers; 0 where there is none."""
        return 0 if self.html is None else _LAYERS

    def write(self, report: Report) -> None:
        """Write what was asked for.

        Raises:
            OutputError: a file cannot be written.
        """
        if self.report is not None:
            report.save(self.report)
        if self.html is not None:
            from onnxq.report.page import save_html

            save_html(report, self.html)
        if self.overlay is not None:
            from onnxq.report.exports import save_overlays

            save_overlays(report, self.overlay)


def kept_options(command: Command) -> Command:
    """Add the files that are kept to a command, which takes them as one argument ``kept``."""

    @functools.wraps(command)
    def with_kept(*args: Any, **kwargs: Any) -> None:
        command(*args, kept=Kept(*(kwargs.pop(name) for name in ("report", "html", "overlay"))), **kwargs)

    return with_options(
        with_kept,
        option(
            "--report", group=OUTPUT, type=FILE, help="Write the plan and all figures as JSON, of a refused result too."
        ),
        option("--html", group=OUTPUT, type=FILE, help="Write a page that shows all of it, of a refused result too."),
        option(
            "--overlay",
            group=OUTPUT,
            type=FILE,
            help="Write mode, time and noise of nodes for Model Explorer, as FILE with .mode, .time and .noise.",
        ),
    )


def with_command(report: Report) -> Report:
    """Return a report that says which command line it comes from."""
    return replace(report, run=replace(report.run, command=("onnxq", *sys.argv[1:])))
