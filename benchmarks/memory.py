"""Peak memory of quantize beside that of the float model, on models whose tensors are much larger than their weights.

    python benchmarks/memory.py [--model MODEL --data DATA] [--samples N]

Without a model, a network over 144,160 values of sound and a detector of images of 640 x 640 are made up. Two processes
are started: one runs the float model once over the largest sample, one is ``onnxq quantize`` with its defaults. The
last column is what quantize may take: 2.5 times the float model's peak and 500 MB.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import click
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

MOST_TIMES, MOST_BESIDE = 2.5, 500
RUN = """
import sys
from pathlib import Path
from onnxq.ir import load
from onnxq.onnx_api import weightless_model
from onnxq.runtime.sessions import open_session, run
from onnxq.data.samples import model_inputs, open_samples
from onnxq.data.inputs import sample_bytes
model = Path(sys.argv[1])
samples = open_samples(sys.argv[2], model_inputs(weightless_model(load(model))))
run(open_session(model), max(samples, key=sample_bytes))
"""


def speech() -> tuple[onnx.ModelProto, tuple[int, ...]]:
    """Return 28 convolutions over sound, and the shape of its input."""
    layers = [(1, 32, 1, 9), *[(32, 32, 1, 5)] * 9, (32, 64, 2, 4), *[(64, 64, 1, 3)] * 16, (64, 16, 1, 1)]
    return convolutions(layers, (1, 1, 144_160)), (1, 1, 144_160)


def detector() -> tuple[onnx.ModelProto, tuple[int, ...]]:
    """Return 29 convolutions over images with 86 MB of weights, and the shape of its input."""
    layers = [(3, 32, 2, 3), (32, 64, 1, 3), *[(64, 64, 1, 3)] * 5, (64, 128, 2, 3), *[(128, 128, 1, 3)] * 6]
    layers += [(128, 256, 2, 3), *[(256, 256, 1, 3)] * 6, (256, 512, 2, 3), *[(512, 512, 1, 3)] * 7, (512, 85, 1, 1)]
    return convolutions(layers, (1, 3, 640, 640)), (1, 3, 640, 640)


def convolutions(layers: list[tuple[int, int, int, int]], shape: tuple[int, ...]) -> onnx.ModelProto:
    """Return a chain of convolutions with Relu: channels in and out, stride, and length of the kernel."""
    random, axes, nodes, weights, given = np.random.default_rng(0), len(shape) - 2, [], [], "x"
    for place, (inside, outside, stride, kernel) in enumerate(layers):
        values = random.standard_normal((outside, inside, *[kernel] * axes)) * (2 / inside / kernel**axes) ** 0.5
        weights.append(numpy_helper.from_array(values.astype(np.float32), f"w{place}"))
        pads = [(kernel - 1) // 2] * axes + [kernel // 2] * axes
        found = "y" if place == len(layers) - 1 else f"c{place}"
        nodes.append(helper.make_node("Conv", [given, f"w{place}"], [found], pads=pads, strides=[stride] * axes))
        nodes[-1].name = f"conv{place}"
        if found != "y":
            nodes.append(helper.make_node("Relu", [found], [f"r{place}"], name=f"relu{place}"))
        given = f"r{place}"
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * len(shape))]
    graph = helper.make_graph(nodes, "made_up", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def peak(*command: object) -> float:
    """Return the most memory in MB that a process, or one that it waited for, has held."""
    process = subprocess.Popen([sys.executable, *map(str, command)], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise click.ClickException(f"{' '.join(map(str, command[:4]))} ended with {os.waitstatus_to_exitcode(status)}")
    return usage.ru_maxrss / 1024


def cases(folder: Path, count: int) -> Iterator[tuple[str, Path, Path]]:
    """Yield made-up models with as many samples."""
    for make in (speech, detector):
        model, shape = make()
        random, place = np.random.default_rng(1), folder / make.__name__
        (place / "calib").mkdir(parents=True)
        onnx.save(model, place / "model.onnx")
        for number in range(count):
            np.savez(place / "calib" / f"{number}.npz", x=random.standard_normal(shape).astype(np.float32))
        yield make.__name__, place / "model.onnx", place / "calib"


@click.command()
@click.option("--model", type=click.Path(exists=True, path_type=Path))
@click.option("--data", type=click.Path(exists=True, path_type=Path))
@click.option("--samples", default=8, show_default=True, help="Samples of the made-up models.")
@click.argument("names", nargs=-1)
def main(model: Path | None, data: Path | None, samples: int, names: tuple[str, ...]) -> None:
    """Print the peaks, and end with 1 where quantize takes more than it may."""
    exceeded = False
    with TemporaryDirectory() as folder:
        given = [(model.stem, model, data)] if model and data else cases(Path(folder), samples)
        click.echo("model      float    quantize  ratio  may take")
        for name, path, calib in given:
            if names and name not in names:
                continue
            plain = peak("-c", RUN, path, calib)
            output = Path(folder) / f"{name}.onnx"
            found = peak("-m", "onnxq", "quantize", path, "--calib", calib, "-o", output, "--force")
            most = MOST_TIMES * plain + MOST_BESIDE
            exceeded |= found > most
            click.echo(f"{name:10} {plain:5.0f} MB {found:6.0f} MB {found / plain:6.2f} {most:6.0f} MB")
    raise SystemExit(exceeded)


if __name__ == "__main__":
    main()
