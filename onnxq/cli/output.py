"""The result of a command: written files and printed text."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onnxq.cli.help import OUTPUT, REPORTS, Decorator, Option, packed
from onnxq.cli.options import BELOW_GOAL
from onnxq.errors import OutputError

if TYPE_CHECKING:
    from onnxq.pipeline.quantization import Quantized
    from onnxq.report import Report


# Samples to compare layers on for a page; the error of a layer is much the same on all samples.
_LAYER_SAMPLES = 8


def print_json(results: Mapping[str, object]) -> None:
    """Print the result of the only model as JSON, or the results of several models by name."""
    click.echo(json.dumps(results if len(results) > 1 else next(iter(results.values())), indent=2))


def print_start(model: Path, *, quiet: bool = False) -> None:
    """Print that the model is being read, before the imports and preparations that take seconds."""
    if not quiet:
        click.echo(f"Reading {model} ...", err=True)


def exit_below(lacks: Iterable[str]) -> None:
    """Print what models lack, and exit with the code of a missed goal if they lack anything."""
    lacks = list(filter(None, lacks))
    for message in lacks:
        click.echo(f"onnxq: {message}", err=True)
    if lacks:
        sys.exit(BELOW_GOAL)


def write_json(document: object, file: Path | None) -> None:
    """Write a document as JSON, if a file is given."""
    from onnxq.system.publish import write_text

    if file is not None:
        write_text(file, json.dumps(document, indent=2) + "\n", "report")


def output_option(default: str = "", **settings: Any) -> Option:
    """Return the option of the file to write; `default` names the file in the help."""
    named = f"  [default: {default}]" if default else ""
    return Option(OUTPUT, "-o --output PATH", f"Write this file.{named}", **settings)


# The output options of all commands that quantize.


@dataclass(frozen=True)
class Output:
    """The values of the output options.

    Attributes:
        output: the model to write, or None for the default name.
        report: file of the report; it is written for a refused result too, as the page is.
        html: file of the page.
        as_json: True to print the report instead of the name of the written file.
        verbose: True to print all tables.
        quiet: True to print neither progress nor tables.
    """

    output: Path | None
    report: Path | None = None
    html: Path | None = None
    as_json: bool = False
    verbose: bool = False
    quiet: bool = False

    def __post_init__(self) -> None:
        if self.verbose and self.quiet:
            raise click.UsageError("--verbose shows more and --quiet less; leave one of them out")

    @property
    def layers(self) -> int:
        """Number of samples to compare layers on; 0 without a page."""
        return 0 if self.html is None else _LAYER_SAMPLES

    def named(self, name: str, model: Path, outputs: Mapping[str, Path | None], read: Iterable[object]) -> Path:
        """Return the file to write, after checking that no two options name the same file.

        Args:
            name: default if no file is given.
            model: the file that is read.
            outputs: other files to write, by the options that name them.
            read: other values that are read; only paths matter.

        Raises:
            UsageError: if two options name one file.
            OutputError: if a file cannot be written.
        """
        file = self.output or Path(name)
        check_files(model, file, {"--report": self.report, "--html": self.html, **outputs}, tuple(read))
        return file

    def of(self, run: Callable[[], Mapping[str, Quantized]], plan: Path | None = None) -> Mapping[str, Report]:
        """Run quantizations, write and print their results, and return the reports by the names of the models.

        Files beside several models have the names of the models in theirs.

        Args:
            run: quantizes one model or several.
            plan: file to write the plan to.

        Raises:
            AccuracyError: if a result misses the goal; reports are written and printed all the same.
            OutputError: if a report cannot be written; the message says where the model is.
        """
        from onnxq.report import AccuracyError

        try:
            reports = {name: _with_command(quantized.report) for name, quantized in run().items()}
        except AccuracyError as refused:
            refused.report = _with_command(refused.report)
            self._write(refused.report, plan)
            self._show(refused.report)
            if self.as_json:
                click.echo(refused.report.to_json())
            raise
        for name, report in reports.items():
            try:
                self._write(report, plan, "" if len(reports) == 1 else f".{name}")
            except OutputError as error:
                written = f"; the model is there all the same, in {report.output}" if report.output else ""
                raise OutputError(f"{error}{written}") from error
            self._show(report)
        return reports

    def _show(self, report: Report) -> None:
        if not self.quiet:
            from onnxq.cli import terminal

            terminal.print_report(report, every=self.verbose)

    def _write(self, report: Report, plan: Path | None, name: str = "") -> None:
        """Write the requested files; `name` is added to the names of the files."""

        def named(file: Path) -> Path:
            return file.with_stem(f"{file.stem}{name}")

        if self.report is not None:
            report.save(named(self.report))
        if self.html is not None:
            from onnxq.report.page import save_html

            save_html(report, named(self.html))
        if plan is not None:
            from onnxq.planning.plan_file import save_plan

            save_plan(report.plan, named(plan))


def _with_command(report: Report) -> Report:
    """Return the report with the command line in it."""
    return replace(report, run=replace(report.run, command=("onnxq", *sys.argv[1:])))


def output_options(default: str) -> Decorator:
    """Return a decorator that adds the output options; the command receives ``output``.

    `default` is the name of the written file for the help.
    """
    return packed(
        "output",
        Output,
        output_option(f"{default} in the current folder"),
        Option(REPORTS, "--report PATH", "Write plan and figures as JSON, even if refused."),
        Option(REPORTS, "--html PATH", "Write a page with all figures, even if refused."),
        Option(OUTPUT, "--json as_json", "Print the report as JSON, even if refused."),
        Option(OUTPUT, "-v --verbose", "Show all reasons, plans and regions."),
        Option(OUTPUT, "-q --quiet", "Show no progress and no tables."),
    )


def check_files(model: Path, output: Path, outputs: Mapping[str, Path | None], read: tuple[object, ...] = ()) -> None:
    """Refuse options that name the same file, before anything runs; see `Output.named`."""
    from onnxq.system.publish import check_output, data_file

    check_output(output, model, read)
    written = {output.resolve(): "the output", data_file(output).resolve(): "the data of the output"}
    for name, path in outputs.items():
        if path is None:
            continue
        check_output(path, model, read)
        owner = written.setdefault(path.resolve(), name)
        if owner.startswith("-") and owner != name:
            raise click.UsageError(f"{owner} and {name} are both {path}; give one of them another name")
        if owner != name:
            raise click.UsageError(f"{name} {path} is {owner} itself; give another name")
