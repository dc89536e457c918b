"""The command that shows a saved report. Heavy imports wait until it runs."""

from __future__ import annotations

from pathlib import Path

import click

from onnxq.cli.options import FILE, READING_EXIT_CODES


@click.command(short_help="Show a saved report as a page, figures or colours.", epilog=READING_EXIT_CODES)
@click.argument("saved", metavar="REPORT", type=FILE)
@click.option(
    "-o", "--output", type=FILE, help="Page to write.  [default: REPORT with .html, unless other files are asked for]"
)
@click.option("--svg", "folder", type=FILE, help="Write the charts as SVG to this folder.")
@click.option(
    "--overlay", type=FILE, help="Write mode, time and noise of nodes for Model Explorer, as FILE with .mode and so on."
)
def report(saved: Path, output: Path | None, folder: Path | None, overlay: Path | None) -> None:
    """Show what quantize or plan kept with --report, as one page that needs no network.

    Prints the names of the written files on stdout.
    """
    from onnxq.report import load_report
    from onnxq.report.exports import save_figures, save_overlays
    from onnxq.report.page import save_html

    found = load_report(saved)
    if output is None and folder is None and overlay is None:
        output = saved.with_suffix(".html")
    if output is not None:
        if output.resolve() == saved.resolve():
            raise click.UsageError(f"--output {output} is the report itself; give another name")
        save_html(found, output)
        click.echo(output)
    written = save_figures(found, folder) if folder is not None else ()
    for file in (*written, *(save_overlays(found, overlay) if overlay is not None else ())):
        click.echo(file)
