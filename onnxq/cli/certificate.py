"""The commands that verify and certify a quantized model. Heavy imports wait until one runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnxq.cli.help import DATA, OUTPUT, SPEED, GroupedCommand, Option
from onnxq.cli.options import BELOW_GOAL, json_option, two_models
from onnxq.cli.output import output_option, print_json
from onnxq.cli.types import FILE

if TYPE_CHECKING:
    from onnxq.calibration.data import Data

_EXIT_CODES = "Exit codes: 0 done, 1 a fault in onnxq, 2 bad input, 3 wrong or no certificate."


@click.command(cls=GroupedCommand, short_help="Check a model against its certificate.", epilog=_EXIT_CODES)
@click.argument("model", type=FILE, required=False)
@Option(
    SPEED,
    "--engine NAME[:PLACE] engines",
    "Run on this engine, such as openvino or ssh:HOST. Repeatable.  [default: onnxruntime]",
    multiple=True,
)
@Option(DATA, "--float PATH reference", "Find the first node that differs from this float model.")
@Option(OUTPUT, "--write-checker PATH folder", "Write the checkers without onnxq to this folder.")
@json_option
def verify(
    model: Path | None, engines: tuple[str, ...], reference: Path | None, folder: Path | None, as_json: bool
) -> None:
    """Check that MODEL is the certified file, loads, and gives the outputs in its certificate.

    MODEL is a file, or a folder, in which every model is checked.

    --write-checker needs no MODEL: it writes onnxq_verify.py and onnxq-verify.mjs, to ship with applications.
    """
    from onnxq.certificate.checkers import write_checkers
    from onnxq.certificate.verifying import verify as verify_model
    from onnxq.pipeline.folders import models_of
    from onnxq.runtime.engines import DEFAULT_ENGINE

    if folder is not None:
        for file in write_checkers(folder):
            click.echo(file)
    if model is None:
        if folder is None:
            raise click.UsageError("give a MODEL to verify, or --write-checker with a folder")
        return
    models = models_of(model)
    if len(models) > 1 and reference is not None:
        raise click.UsageError(f"--float is about one model, and {model} holds {len(models)}; name one")
    verifications = {
        name: verify_model(file, engines=engines or (DEFAULT_ENGINE,), reference=reference)
        for name, file in models.items()
    }
    if as_json:
        print_json({name: verification.to_dict() for name, verification in verifications.items()})
    else:
        for name, verification in verifications.items():
            for sentence in verification.sentences:
                click.echo(f"{name}: {sentence}" if model.is_dir() else sentence)
    if not all(verification.right for verification in verifications.values()):
        raise SystemExit(BELOW_GOAL)


@click.command(cls=GroupedCommand, short_help="Certify a model that any tool quantized.", epilog=_EXIT_CODES)
@two_models
@output_option("replace CANDIDATE")
def certify(reference: Path, candidate: Path, data: Data, engine: str, output: Path | None, as_json: bool) -> None:
    """Write a certificate into CANDIDATE, which any tool quantized from the float model REFERENCE.

    The certificate gets the accuracy on the samples, and probes with inputs like them. With --engine, results of that
    engine count as right too. Prints the name of the written file.
    """
    from onnxq.certificate.making import certify as certify_model
    from onnxq.cli import tables
    from onnxq.runtime.engines import DEFAULT_ENGINE, open_engine
    from onnxq.system.records import to_plain

    with open_engine(engine) as runtime:
        engines = () if engine == DEFAULT_ENGINE else (runtime,)
        certificate = certify_model(reference, candidate, data, output, engines=engines)
    tables.print_images(reference, data, err=True)
    click.echo(json.dumps(to_plain(certificate), indent=2) if as_json else output or candidate)
