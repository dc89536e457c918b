"""The command that goes back to floats. Heavy imports wait until it runs."""

from __future__ import annotations

from pathlib import Path

import click

from onnxq.cli.options import FILE, WRITING_EXIT_CODES


@click.command(short_help="Turn a quantized model back into a float model.", epilog=WRITING_EXIT_CODES)
@click.argument("model", type=FILE)
@click.option(
    "-o",
    "--output",
    type=FILE,
    help="File to write.  [default: MODEL.float.onnx in the current folder]",
)
def dequantize(model: Path, output: Path | None) -> None:
    """Turn a quantized MODEL, of onnxq or onnxruntime, back into a plain float model.

    Weights become exactly what their codes mean. Prints the name of the written file on stdout.
    """
    from onnxq.commands import dequantization

    chosen = output or Path(f"{model.stem}.float.onnx")
    dequantization.dequantize(model, chosen)
    click.echo(chosen)
