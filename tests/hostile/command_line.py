"""A folder to run bad input in, and how a run of the command line ends."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx import ModelProto, TensorProto, helper


@dataclass(frozen=True)
class Ended:
    """How a run of the command line ended."""

    code: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Place:
    """A folder with a sound model and sound samples, and an empty folder for the output."""

    root: Path

    @property
    def model(self) -> Path:
        return self.root / "models" / "model.onnx"

    @property
    def calib(self) -> Path:
        return self.root / "calib"

    @property
    def output(self) -> Path:
        return self.root / "out" / "quantized.onnx"

    def files(self) -> dict[str, bytes | None]:
        return {
            str(path.relative_to(self.root)): path.read_bytes() if path.is_file() else None
            for path in self.root.rglob("*")
            if "__pycache__" not in path.parts
        }


Run = Callable[..., Ended]


def quantize_arguments(place: Place, *more: object, model: Path | None = None, calib: Path | None = None) -> list[str]:
    arguments = ["quantize", model or place.model, "--calib", calib or place.calib, "-o", place.output]
    return [str(argument) for argument in (*arguments, "--latency-seconds", 0, *more)]


def refused(ended: Ended) -> str:
    """Check that a run ended with one sentence, after the line of its start at most, and return it."""
    assert (ended.code, ended.stdout) == (2, "")
    sentence = re.sub(r"^Reading .* \.\.\.\n", "", ended.stderr)
    assert sentence.startswith("onnxq: ")
    assert sentence.count("\n") == 1
    assert sentence.endswith("\n")
    assert "Traceback" not in sentence
    return sentence


def edit(change: Callable[[ModelProto], object]) -> Callable[[Place], None]:
    def edited(place: Place) -> None:
        model = onnx.load(place.model)
        change(model)
        onnx.save(model, place.model)

    return edited


def stored(model: ModelProto, value: float) -> None:
    values = onnx.numpy_helper.to_array(model.graph.initializer[0]).copy()
    values[3, 5] = value
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(values, model.graph.initializer[0].name))


def quantized_pair(model: ModelProto) -> None:
    model.graph.initializer.append(helper.make_tensor("scale", TensorProto.FLOAT, [], [0.1]))
    for node in model.graph.node:
        node.input[0] = "dequantized" if node.input[0] == "x" else node.input[0]
    pair = [
        helper.make_node("QuantizeLinear", ["x", "scale"], ["codes"], "pair"),
        helper.make_node("DequantizeLinear", ["codes", "scale"], ["dequantized"]),
    ]
    nodes = [*pair, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
