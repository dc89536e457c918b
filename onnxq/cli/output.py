"""What a command keeps of a quantization beside the model, most of all of one that was refused."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onnxq.cli.groups import OUTPUT, Command, option, with_options
from onnxq.cli.options import FILE
from onnxq.errors import OutputError

if TYPE_CHECKING:
    from onnxq.report import Report
if TYPE_CHECKING:
    from onnxq.pipeline import Quantized
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
            help="Write mode, time and SQNR of nodes for Model Explorer, as FILE with .mode, .time and .sqnr.",
        ),
    )


def with_command(report: Report) -> Report:
    """Return a report that says which command line it comes from."""
    return replace(report, run=replace(report.run, command=("onnxq", *sys.argv[1:])))


# Where the result of a quantization goes and how much is told of it, for all commands that quantize.


@dataclass(frozen=True)
class Output:
    """What options say of the result.

    Attributes:
        file: to write.
        kept: what is written beside it, of a refused result too.
        as_json: whether the report is printed in the place of the written file.
        verbose: whether all of it is told.
        quiet: whether nothing is told on the way and at the end.
    """

    file: Path | None
    kept: Kept
    as_json: bool = False
    verbose: bool = False
    quiet: bool = False

    def named(self, name: str, model: Path, others: Mapping[str, Path | str | None], read: Iterable[object]) -> Path:
        """Return the file to write, once it is no other one.

        Args:
            name: of the file where none is given.
            model: the file that is read.
            others: what else is written, by the options that name it.
            read: what else is read, of which paths count.

        Raises:
            UsageError: two options name one file.
            OutputError: a file cannot be written.
        """
        file = self.file or Path(name)
        _check_files(model, file, {**self.kept.files, **others}, tuple(read))
        return file

    def of(self, run: Callable[[], Quantized], plan: Path | None = None) -> Report:
        """Return the report of a quantization, after it was kept and told.

        Args:
            run: quantizes.
            plan: a file for the plan that was carried out.

        Raises:
            FidelityError: the result misses the goal; what is kept is written, and what was found told, all the same.
            OutputError: something to be kept cannot be written; the message says where the model is.
        """
        from onnxq.report import FidelityError

        try:
            report = with_command(run().report)
        except FidelityError as refused:
            refused.report = with_command(refused.report)
            self._keep(refused.report, plan)
            self._tell(refused.report)
            if self.as_json:
                click.echo(refused.report.to_json())
            raise
        try:
            self._keep(report, plan)
        except OutputError as error:
            written = f"; the model is there all the same, in {report.output}" if report.output else ""
            raise OutputError(f"{error}{written}") from error
        self._tell(report)
        return report

    def _tell(self, report: Report) -> None:
        """Print the tables."""
        if not self.quiet:
            from onnxq.cli import terminal

            terminal.print_report(report, every=self.verbose)

    def _keep(self, report: Report, plan: Path | None) -> None:
        """Write what was asked to be kept, most of all of what was refused."""
        self.kept.write(report)
        if plan is not None:
            from onnxq.planning.plan_file import save_plan

            save_plan(report.plan, plan)


def output_options(default: str) -> Callable[[Command], Command]:
    """Return a decorator that adds where the result goes to a command, which takes it as one argument ``output``.

    Args:
        default: how the written file is called where no name is given.
    """

    def add(command: Command) -> Command:
        @functools.wraps(command)
        def with_output(*args: Any, **kwargs: Any) -> None:
            file, kept, as_json, verbose, quiet = (
                kwargs.pop(name) for name in ("output", "kept", "as_json", "verbose", "quiet")
            )
            if verbose and quiet:
                raise click.UsageError("--verbose shows more and --quiet less; leave one of them out")
            command(*args, output=Output(file, kept, as_json, verbose, quiet), **kwargs)

        return with_options(
            with_output,
            option(
                "-o",
                "--output",
                group=OUTPUT,
                type=FILE,
                help=f"File to write.  [default: {default} in the current folder]",
            ),
            kept_options,
            option(
                "--json",
                "as_json",
                group=OUTPUT,
                is_flag=True,
                help="Print the report as JSON instead of the name of the written file, of a refused result too.",
            ),
            option("-v", "--verbose", group=OUTPUT, is_flag=True, help="Show all reasons, plans and regions."),
            option("-q", "--quiet", group=OUTPUT, is_flag=True, help="Show neither progress nor tables."),
        )

    return add


def _check_files(model: Path, output: Path, others: Mapping[str, Path | str | None], read: tuple[object, ...]) -> None:
    """Refuse files of one name before anything runs."""
    from onnxq.system.publish import check_output, data_file

    check_output(output, model, read)
    written = {output.resolve(): "the output", data_file(output).resolve(): "the data of the output"}
    for name, path in others.items():
        if path is None:
            continue
        check_output(Path(path), model, read)
        other = written.setdefault(Path(path).resolve(), name)
        if other.startswith("-") and other != name:
            raise click.UsageError(f"{other} and {name} are both {path}; give one of them another name")
        if other != name:
            raise click.UsageError(f"{name} {path} is {other} itself; give another name")
