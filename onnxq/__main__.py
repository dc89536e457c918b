"""``python -m onnxq``, and the command ``onnxq``."""

from __future__ import annotations

from onnxq.cli import main as cli
from onnxq.isolation import run_isolated


def main() -> None:
    """Run the command line so that a crash of onnxruntime ends in a sentence."""
    run_isolated(cli.main)


if __name__ == "__main__":
    main()
