"""The command that goes back to floats. Heavy imports wait until it runs."""

from __future__ import annotations

from pathlib import Path

import click

_EPILOG = "Exit codes: 0 done, 1 a fault in onnxq, 2 bad input (nothing written)."


@click.command(epilog=_EPILOG)
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="File to write.  [default: MODEL.float.onnx in the current folder]",
)
def dequantize(model: Path, output: Path | None) -> None:
    """Turn a quantized MODEL, of onnxq or onnxruntime, back into a plain float model.

    Weights become exactly what their codes mean. Prints the written file on stdout.
    """
    from onnxq.dequantizing import dequantization

    chosen = output or Path(f"{model.stem}.float.onnx")
    dequantization.dequantize(model, chosen)
    click.echo(chosen)
