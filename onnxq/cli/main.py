"""The command line: its commands, and how an error ends it. Heavy imports wait until a command runs."""

from __future__ import annotations

import gc
import logging
import sys
import warnings
from functools import partial

import click

from onnxq.cli.help import SectionedGroup
from onnxq.cli.options import BELOW_GOAL, EXIT_CODES
from onnxq.errors import names_options
from onnxq.version import VERSION

_BAD_INPUT = 2

# Commands and their modules in onnxq.cli; only the module of the command that runs is imported.
_SECTIONS = {
    "Quantize": dict.fromkeys(("quantize", "train"), "quantize"),
    "Compare": dict.fromkeys(("compare", "bench"), "compare"),
    "Verify": dict.fromkeys(("verify", "certify"), "certificate"),
    "Look inside": dict.fromkeys(("inspect", "sensitivity", "report"), "inspect"),
    "Calibrate": {"calibrate": "calibrate"},
    "Rewrite": dict.fromkeys(("optimize", "run", "dequantize"), "rewrite"),
}


@click.group(
    cls=SectionedGroup,
    sections=_SECTIONS,
    epilog=EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(VERSION)
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.pass_context
def cli(context: click.Context, debug: bool) -> None:
    """Quantize ONNX models, and verify the result against the float model.

    Start with: onnxq quantize MODEL --calib SAMPLES
    """
    context.call_on_close(partial(names_options.reset, names_options.set(True)))


def main() -> None:
    """Run the command line and exit; an error prints one sentence on stderr, and a bug asks for a report."""
    debug = "--debug" in sys.argv[1:]
    # --debug may be anywhere on the command line.
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    # Graphs are millions of small objects that live as long as the command, so most garbage collections find nothing.
    gc.set_threshold(100_000, 50, 100)
    _show_warnings()
    if debug:
        _show_failures()
    elif not sys.warnoptions:
        # Warnings of Python are for developers; a user's own module still shows its warnings.
        warnings.filterwarnings("ignore", module=r"(onnxq|numpy)(\.|$)")
    try:
        cli.main(arguments, prog_name="onnxq", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("onnxq: stopped; nothing was written", err=True)
        sys.exit(130)
    except Exception as error:
        if debug:
            raise
        _exit_with_sentence(error)


# Loggers whose warnings are printed at once. All other warnings are in the report, which the closing table shows.
_PRINTED_AT_ONCE = ("onnxq.calibration.data", "onnxq.evaluation.verification", "onnxq.search.times")


def _show_warnings() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("onnxq: %(message)s"))
    for name in _PRINTED_AT_ONCE:
        logging.getLogger(name).addHandler(handler)


def _show_failures() -> None:
    """Print the tracebacks of failures that are tolerated."""
    log = logging.getLogger("onnxq.system.failures")
    log.addHandler(logging.StreamHandler())
    log.setLevel(logging.DEBUG)


def _exit_with_sentence(error: Exception) -> None:
    from onnxq.errors import OnnxqError
    from onnxq.report import AccuracyError

    if isinstance(error, OnnxqError):
        click.echo(f"onnxq: {error}", err=True)
        sys.exit(BELOW_GOAL if isinstance(error, AccuracyError) else _BAD_INPUT)
    click.echo(
        f"onnxq: a fault in onnxq ({type(error).__name__}: {error}); run again with --debug and report it", err=True
    )
    sys.exit(1)
