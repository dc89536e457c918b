"""``python -m onnxq`` is the command ``onnxq``."""

from onnxq.cli import main

main()
