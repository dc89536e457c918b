"""``python -m onnxq``, and the command ``onnxq``."""

from __future__ import annotations

import os


def main() -> None:
    """Run the command line so that a crash of onnxruntime ends in a sentence."""
    # Products of Gram matrices are many, small, and asked for by several threads at once, where threads that each
    # starts of its own keep others waiting: three times the processor time. It has to be said before numpy is there.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from onnxq.system.isolation import run_isolated

    run_isolated(_command_line)


def _command_line() -> None:
    from onnxq.cli.main import main as command_line

    command_line()


if __name__ == "__main__":
    main()
