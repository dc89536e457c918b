"""The command line with a sound model and sound samples, to be spoiled."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from hostile.command_line import Ended, Place, Run
from onnxq.cli import main as cli


@pytest.fixture
def place(tmp_path: Path, perceptron: ModelProto, samples_for, monkeypatch: pytest.MonkeyPatch) -> Place:
    place = Place(tmp_path)
    for folder in (place.model.parent, place.calib, place.output.parent, tmp_path / "current"):
        folder.mkdir()
    onnx.save(perceptron, place.model)
    for index, sample in enumerate(samples_for(perceptron, 3)):
        np.savez(place.calib / f"{index}.npz", **sample)
    monkeypatch.chdir(tmp_path / "current")
    return place


@pytest.fixture
def onnxq(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs the command line in this process."""

    def onnxq(*arguments: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["onnxq", *map(str, arguments)])
        capsys.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        printed = capsys.readouterr()
        return Ended(code, printed.out, printed.err)

    return onnxq


@pytest.fixture
def spawn() -> Iterator[Run]:
    def spawn(*arguments: object) -> Ended:
        command = [sys.executable, "-m", "onnxq", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return Ended(done.returncode, done.stdout, done.stderr)

    return spawn
