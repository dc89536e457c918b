"""The result of a quantization: written files and printed text."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnxq.cli.help import OUTPUT, REPORTS, Command, field, packed
from onnxq.cli.options import FILE
from onnxq.errors import OutputError

if TYPE_CHECKING:
    from onnxq.pipeline.quantization import Quantized
    from onnxq.report import Report


# Samples to compare layers on for a page; the error of a layer is much the same on all samples.
_LAYER_SAMPLES = 8


@dataclass(frozen=True)
class Reports:
    """Files that are written beside the model."""

    report: Path | None = None
    html: Path | None = None

    @property
    def files(self) -> dict[str, Path | None]:
        """The files by the options that name them."""
        return {"--report": self.report, "--html": self.html}

    @property
    def layers(self) -> int:
        """Number of samples to compare layers on; 0 without a page."""
        return 0 if self.html is None else _LAYER_SAMPLES

    def write(self, report: Report) -> None:
        """Write the requested files.

        Raises:
            OutputError: if a file cannot be written.
        """
        if self.report is not None:
            report.save(self.report)
        if self.html is not None:
            from onnxq.report.page import save_html

            save_html(report, self.html)


def with_command(report: Report) -> Report:
    """Return the report with the command line in it."""
    return replace(report, run=replace(report.run, command=("onnxq", *sys.argv[1:])))


def print_json(results: Mapping[str, object]) -> None:
    """Print the result of the only model as JSON, or the results of several models by name."""
    click.echo(json.dumps(results if len(results) > 1 else next(iter(results.values())), indent=2))


def print_start(model: Path, *, quiet: bool = False) -> None:
    """Print that the model is being read, before the imports and preparations that take seconds."""
    if not quiet:
        click.echo(f"Reading {model} ...", err=True)


# The output options of all commands that quantize


@dataclass(frozen=True)
class Output:
    """The values of the output options.

    Attributes:
        reports: files beside the model; they are written for a refused result too.
        as_json: True to print the report instead of the name of the written file.
        verbose: True to print all tables.
        quiet: True to print neither progress nor tables.
    """

    file: Path | None
    reports: Reports
    as_json: bool = False
    verbose: bool = False
    quiet: bool = False

    def named(self, name: str, model: Path, outputs: Mapping[str, Path | str | None], read: Iterable[object]) -> Path:
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
        file = self.file or Path(name)
        check_files(model, file, {**self.reports.files, **outputs}, tuple(read))
        return file

    def of(self, run: Callable[[], Quantized], plan: Path | None = None) -> Report:
        """Run a quantization, write and print its results, and return the report.

        `plan` is a file to write the plan to.

        Raises:
            AccuracyError: if the result misses the goal; reports are written and printed all the same.
            OutputError: if a report cannot be written; the message says where the model is.
        """
        return self.of_each(lambda: {"": run()}, plan)[""]

    def of_each(self, run: Callable[[], Mapping[str, Quantized]], plan: Path | None = None) -> Mapping[str, Report]:
        """Do the same for models by name. Files beside several models have the names of the models in theirs."""
        from onnxq.report import AccuracyError

        try:
            reports = {name: with_command(quantized.report) for name, quantized in run().items()}
        except AccuracyError as refused:
            refused.report = with_command(refused.report)
            self._keep(refused.report, plan)
            self._show(refused.report)
            if self.as_json:
                click.echo(refused.report.to_json())
            raise
        for name, report in reports.items():
            own, place = (self, plan) if len(reports) == 1 else (self._beside(name), _beside(plan, name))
            try:
                own._keep(report, place)
            except OutputError as error:
                written = f"; the model is there all the same, in {report.output}" if report.output else ""
                raise OutputError(f"{error}{written}") from error
            self._show(report)
        return reports

    def _beside(self, name: str) -> Output:
        files = self.reports
        return replace(self, reports=Reports(_beside(files.report, name), _beside(files.html, name)))

    def _show(self, report: Report) -> None:
        if not self.quiet:
            from onnxq.cli import terminal

            terminal.print_report(report, every=self.verbose)

    def _keep(self, report: Report, plan: Path | None) -> None:
        self.reports.write(report)
        if plan is not None:
            from onnxq.planning.plan_file import save_plan

            save_plan(report.plan, plan)


def _beside(file: Path | None, name: str) -> Path | None:
    return file and file.with_stem(f"{file.stem}.{name}")


def _build_output(
    output: Path | None,
    report: Path | None,
    html: Path | None,
    as_json: bool,
    verbose: bool,
    quiet: bool,
) -> Output:
    if verbose and quiet:
        raise click.UsageError("--verbose shows more and --quiet less; leave one of them out")
    return Output(output, Reports(report, html), as_json, verbose, quiet)


def output_options(default: str) -> Callable[[Command], Command]:
    """Return a decorator that adds the output options; the command receives ``output``.

    `default` is the name of the written file for the help.
    """
    return packed(
        "output",
        _build_output,
        {
            "output": field(
                "-o",
                "--output",
                group=OUTPUT,
                type=FILE,
                help=f"Write this file.  [default: {default} in the current folder]",
            ),
            "report": field(
                "--report", group=REPORTS, type=FILE, help="Write plan and figures as JSON, even if refused."
            ),
            "html": field("--html", group=REPORTS, type=FILE, help="Write a page with all figures, even if refused."),
            "as_json": field("--json", group=OUTPUT, is_flag=True, help="Print the report as JSON, even if refused."),
            "verbose": field(
                "-v", "--verbose", group=OUTPUT, is_flag=True, help="Show all reasons, plans and regions."
            ),
            "quiet": field("-q", "--quiet", group=OUTPUT, is_flag=True, help="Show no progress and no tables."),
        },
    )


def check_files(
    model: Path, output: Path, outputs: Mapping[str, Path | str | None], read: tuple[object, ...] = ()
) -> None:
    """Refuse options that name the same file, before anything runs; see `Output.named`."""
    from onnxq.system.publish import check_output, data_file

    check_output(output, model, read)
    written = {output.resolve(): "the output", data_file(output).resolve(): "the data of the output"}
    for name, path in outputs.items():
        if path is None:
            continue
        check_output(Path(path), model, read)
        owner = written.setdefault(Path(path).resolve(), name)
        if owner.startswith("-") and owner != name:
            raise click.UsageError(f"{owner} and {name} are both {path}; give one of them another name")
        if owner != name:
            raise click.UsageError(f"{name} {path} is {owner} itself; give another name")
