"""Quantize a decoder of 3 GiB through the command line and watch its memory, and its time beside inference.

    python benchmarks/size.py [PRESET ...] [--gibibytes G] [--samples N] [--tokens N] [--rounds N] [--output FILE]
    python benchmarks/size.py int4-block32 --peer --rounds 3 --option=--search=off --option=--accuracy=off \
        --option=--latency-seconds=0 --option=--force

The model is generated into a temporary folder, with its weights as external data, and deleted afterwards. Each preset
runs in a process of its own, with the options that a user gets by default. Three peaks are shown: anonymous memory,
which is what the machine must have; file pages, which the kernel drops when memory is short because the file still
holds them; and the highest resident set, which counts both, as the kernel keeps it. Times are told beside that of a
process that loads the float model and runs it over the samples, in the same run. With ``--peer`` onnxruntime's
MatMulNBitsQuantizer writes 4-bit weights in blocks of 32 of the same model between the presets; it verifies nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx
from onnx import GraphProto, NodeProto, TensorProto, helper

PRESETS = ("int8-storage", "int8")
HIDDEN = 2048
INNER = 5632
VOCABULARY = 4096
TOKENS, SAMPLES = 16, 4
INFERENCE = """
import sys
import numpy
import onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
for tokens in numpy.load(sys.argv[2])["tokens"]:
    session.run(None, {"tokens": tokens[None]})
"""
PEER_NAME = "MatMulNBitsQuantizer"
PEER = """
import sys
import onnx
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
quantizer = MatMulNBitsQuantizer(onnx.load(sys.argv[1]), block_size=32, is_symmetric=True)
quantizer.process()
quantizer.model.save_model_to_file(sys.argv[2], True)
"""
BLOCK_BYTES = 4 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER)
POLL_SECONDS = 0.01
MEBIBYTE = 1 << 20
BAR = 2 << 10


@dataclass(frozen=True)
class Memory:
    """Memory of a process in MiB: anonymous, file pages, both together, and the highest that both have been."""

    anonymous: float = 0.0
    files: float = 0.0
    resident: float = 0.0

    def highest(self, other: Memory) -> Memory:
        return Memory(*(max(*pair) for pair in zip(asdict(self).values(), asdict(other).values(), strict=True)))


@dataclass(frozen=True)
class Run:
    """How one preset went."""

    preset: str
    seconds: float
    code: int
    peak: Memory
    written: float
    said: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="*", default=PRESETS, metavar="PRESET")
    parser.add_argument("--gibibytes", type=float, default=3.0, help="size of the weights")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="how many samples there are")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="how many tokens each of them has")
    parser.add_argument("--folder", type=Path, help="where the model is generated and deleted; needs twice its size")
    parser.add_argument(
        "--option", action="append", default=[], help="an option more for the command, such as --option=--accuracy=off"
    )
    parser.add_argument("--rounds", type=int, default=1, help="how often each preset runs, in turns")
    parser.add_argument(
        "--peer",
        nargs="?",
        const=sys.executable,
        metavar="PYTHON",
        help="run onnxruntime's quantizer in turns with the presets, in a Python that has onnx_ir",
    )
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="onnxq-size-", dir=options.folder) as name:
        folder = Path(name)
        wanted = int(options.gibibytes * 2**30)
        if shutil.disk_usage(folder).free < 2 * wanted:
            sys.exit(f"{folder} has no room for twice {options.gibibytes:g} GiB")
        write_model(folder / "model.onnx", wanted, options.tokens)
        write_samples(folder / "samples.npz", options.samples, options.tokens)
        size = sum(path.stat().st_size for path in folder.glob("model.onnx*")) / MEBIBYTE
        inference = inferred(folder)
        message = f"{options.samples} samples of {options.tokens} tokens take {inference:.1f} s"
        print(machine(), f"model: {size:,.0f} MiB of external data; {message}", sep="\n", flush=True)
        output = folder / "output" / "model.onnx"
        commands = {name: command_line(folder, name, output, options.option) for name in options.presets}
        if options.peer is not None:
            commands[PEER_NAME] = [options.peer, "-c", PEER, str(folder / "model.onnx"), str(output)]
        columns = "preset | seconds | beside inference | exit code | anonymous | file pages | resident | written"
        print(f"| {columns} |\n" + "|---" * 8 + "|")
        runs = []
        for name, command in [*commands.items()] * options.rounds:
            runs.append(watched(folder, name, command, output))
            print(row(runs[-1], inference), flush=True)
    if options.output is not None:
        figures = {
            "machine": machine(),
            "model_mebibytes": size,
            "inference_seconds": inference,
            "options": options.option,
        }
        options.output.write_text(json.dumps({**figures, "runs": [asdict(run) for run in runs]}, indent=2) + "\n")


def row(run: Run, inference: float) -> str:
    memory = " | ".join(f"{value:,.0f} MiB" for value in asdict(run.peak).values())
    verdict = "" if run.peak.anonymous <= BAR else f" ABOVE {BAR:,} MiB of anonymous memory"
    said = f" {run.said}" if run.code else ""
    times = f"{run.seconds:.1f} | {run.seconds / inference:.1f}"
    return f"| {run.preset} | {times} | {run.code}{said} | {memory} | {run.written:,.0f} MiB |{verdict}"


def machine() -> str:
    packages = ", ".join(f"{name} {version(name)}" for name in ("onnxq", "onnx", "onnxruntime", "numpy"))
    return (
        f"{platform.machine()}, {len(os.sched_getaffinity(0))} threads, Python {platform.python_version()}, {packages}"
    )


# --- the model ----------------------------------------------------------------------------------------------------


class Weights:
    """Streams weights to a data file: pieces of one short random array, from another place for each."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file, self._name = file, name
        self._random = np.random.default_rng(0)
        self._values = self._random.standard_normal(1 << 20).astype(np.float32)
        self.tensors: list[TensorProto] = []

    def add(self, name: str, *shape: int) -> str:
        """Write a tensor with standard deviation 1 / sqrt(rows) and return its name."""
        tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=shape, data_location=TensorProto.EXTERNAL)
        left = 4 * int(np.prod(shape))
        entries = {"location": self._name, "offset": self._file.tell(), "length": left}
        for key, value in entries.items():
            tensor.external_data.add(key=key, value=str(value))
        data = memoryview((self._values / np.float32(np.sqrt(shape[0]))).tobytes())
        start = 4 * int(self._random.integers(len(self._values)))
        while left:
            self._file.write(piece := data[start : start + left])
            left -= len(piece)
            start = 0
        self.tensors.append(tensor)
        return name


def write_model(path: Path, size: int, length: int = TOKENS) -> None:
    """Write a decoder of blocks with about ``size`` bytes of weights as external data."""
    blocks = -(-size // BLOCK_BYTES)
    with path.with_name(path.name + ".data").open("wb") as file:
        weights = Weights(file, path.name + ".data")
        nodes = list(decoder(weights, blocks))
    small = {"ones": np.ones(HIDDEN, np.float32), "zeros": np.zeros(HIDDEN, np.float32)}
    small |= {"root": np.full((), HIDDEN**-0.5, np.float32)}
    stored = [*weights.tensors, *(onnx.numpy_helper.from_array(np.asarray(each), name) for name, each in small.items())]
    tokens = helper.make_tensor_value_info("tokens", TensorProto.INT64, [1, length])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, length, VOCABULARY])
    graph = GraphProto(name="decoder", node=nodes, initializer=stored, input=[tokens], output=[logits])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def decoder(weights: Weights, blocks: int) -> Iterator[NodeProto]:
    yield helper.make_node("Gather", [weights.add("embedding", VOCABULARY, HIDDEN), "tokens"], ["embedded"], "embed")
    before = "embedded"
    for block in range(blocks):
        yield from attention(weights, f"block{block}", before)
        yield from feed_forward(weights, f"block{block}")
        before = f"block{block}/output"
    yield normalize(before, "last/normal")
    yield helper.make_node("MatMul", ["last/normal", weights.add("head", HIDDEN, VOCABULARY)], ["logits"], "head")


def normalize(before: str, after: str) -> NodeProto:
    return helper.make_node("LayerNormalization", [before, "ones", "zeros"], [after], after, axis=-1)


def product(weights: Weights, before: str, after: str, *shape: int) -> NodeProto:
    return helper.make_node("MatMul", [before, weights.add(f"{after}/weight", *shape)], [after], after)


def attention(weights: Weights, block: str, before: str) -> Iterator[NodeProto]:
    yield normalize(before, f"{block}/normal")
    for part in ("query", "key", "value"):
        yield product(weights, f"{block}/normal", f"{block}/{part}", HIDDEN, HIDDEN)
    turned, scores = f"{block}/turned", f"{block}/scores"
    yield helper.make_node("Transpose", [f"{block}/key"], [turned], turned, perm=[0, 2, 1])
    yield helper.make_node("MatMul", [f"{block}/query", turned], [scores], scores)
    yield helper.make_node("Mul", [f"{block}/scores", "root"], [f"{block}/scaled"], f"{block}/scaled")
    yield helper.make_node("Softmax", [f"{block}/scaled"], [f"{block}/chances"], f"{block}/chances", axis=-1)
    inputs = [f"{block}/chances", f"{block}/value"]
    yield helper.make_node("MatMul", inputs, [f"{block}/mixed"], f"{block}/mixed")
    yield product(weights, f"{block}/mixed", f"{block}/attended", HIDDEN, HIDDEN)
    yield helper.make_node("Add", [before, f"{block}/attended"], [f"{block}/middle"], f"{block}/middle")


def feed_forward(weights: Weights, block: str) -> Iterator[NodeProto]:
    yield normalize(f"{block}/middle", f"{block}/normal2")
    for part in ("gate", "up"):
        yield product(weights, f"{block}/normal2", f"{block}/{part}", HIDDEN, INNER)
    yield helper.make_node("Sigmoid", [f"{block}/gate"], [f"{block}/open"], f"{block}/open")
    yield helper.make_node("Mul", [f"{block}/open", f"{block}/up"], [f"{block}/gated"], f"{block}/gated")
    yield product(weights, f"{block}/gated", f"{block}/down", INNER, HIDDEN)
    yield helper.make_node("Add", [f"{block}/middle", f"{block}/down"], [f"{block}/output"], f"{block}/output")


def write_samples(path: Path, count: int = SAMPLES, length: int = TOKENS) -> None:
    np.savez(path, tokens=np.random.default_rng(1).integers(0, VOCABULARY, (count, length)))


# --- the run ------------------------------------------------------------------------------------------------------


def inferred(folder: Path) -> float:
    """Return the seconds that a process takes to load the float model and run it over the samples."""
    start = time.perf_counter()
    files = [str(folder / name) for name in ("model.onnx", "samples.npz")]
    subprocess.run([sys.executable, "-c", INFERENCE, *files], check=True)
    return time.perf_counter() - start


def command_line(folder: Path, preset: str, output: Path, options: list[str]) -> list[str]:
    files = [str(folder / "model.onnx"), "--calib", str(folder / "samples.npz"), "-o", str(output)]
    return [sys.executable, "-m", "onnxq", "quantize", *files, "--preset", preset, *options]


def watched(folder: Path, name: str, command: list[str], output: Path) -> Run:
    """Run a command in a process of its own and watch that process and its children."""
    output.parent.mkdir()
    start, peak = time.perf_counter(), Memory()
    with (folder / "errors").open("w+") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=errors, env={**os.environ, "TMPDIR": name_of(folder)}
        )
        while process.poll() is None:
            peak = peak.highest(family_memory(process.pid))
            time.sleep(POLL_SECONDS)
        errors.seek(0)
        said = errors.read().strip().splitlines()
    seconds = time.perf_counter() - start
    written = sum(path.stat().st_size for path in output.parent.iterdir()) / MEBIBYTE
    shutil.rmtree(output.parent)
    run = Run(name, seconds, process.returncode, peak, written)
    return replace(run, said=said[-1]) if said and process.returncode else run


def name_of(folder: Path) -> str:
    (folder / "temporary").mkdir(exist_ok=True)
    return str(folder / "temporary")


def family_memory(pid: int) -> Memory:
    """Return the memory of a process and its children together; only one of them ever holds much."""
    total = memory_of(pid)
    for child in children_of(pid):
        other = family_memory(child)
        total = Memory(*(sum(pair) for pair in zip(asdict(total).values(), asdict(other).values(), strict=True)))
    return total


def children_of(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def memory_of(pid: int) -> Memory:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return Memory()
    kibibytes = {line.split(":")[0]: float(line.split()[1]) for line in lines if line.startswith(("Rss", "VmHWM"))}
    return Memory(*(kibibytes.get(key, 0.0) / 1024 for key in ("RssAnon", "RssFile", "VmHWM")))


if __name__ == "__main__":
    main()
