"""Measure what graphs cost: the time to quantize long chains, and the memory to load and save a large model.

    python benchmarks/graph.py [--nodes N N] [--gibibytes G] [--profile]

Each figure comes from a process of its own. The chain alternates MatMul, 4x4 weights, with Relu; the whole command line
runs on it, without latency and search, which depend on the model and not on the number of its nodes. The time in which
onnxruntime loads models is shown apart. ``--profile`` runs the chains once more under cProfile and prints the functions
that take most, with how they grow.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import pstats
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

# Anything heavier is imported in the children only: on Linux a child's peak starts at its parent's.

WIDTH = 4
SAMPLES = 4
TENSOR_BYTES = 1 << 26
PROFILED = 30

GROWTH_BAR = 4.5
SECONDS_BAR = 60.0
MEBIBYTES_BAR = 150.0


@dataclass(frozen=True)
class Cost:
    """Seconds of a function in a short and in a long chain, by itself and with what it calls."""

    name: str
    own: tuple[float, float]
    total: tuple[float, float]


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] in CHILDREN:
        CHILDREN[sys.argv[1]](*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--nodes", type=int, nargs=2, default=(4_000, 16_000), metavar="N", help="lengths of the chains"
    )
    parser.add_argument("--gibibytes", type=float, default=1.5, help="size of the large model's weights")
    parser.add_argument("--profile", action="store_true", help="say which functions take the time")
    options = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory(prefix="onnxq-") as folder:
        report_time(Path(folder), *options.nodes)
        if options.profile:
            report_profile(Path(folder), *options.nodes)
    with tempfile.TemporaryDirectory(prefix="onnxq-") as folder:
        report_memory(Path(folder), options.gibibytes)


def report_time(folder: Path, short: int, long: int) -> None:
    """Quantize both chains through the command line and print their times and the growth."""
    whole, own = {}, {}
    for nodes in (short, long):
        _child("write-chain", folder / f"{nodes}.onnx", nodes)
        start = time.perf_counter()
        sessions, loading = json.loads(_child("quantize", *_options(folder, nodes)).splitlines()[-1])
        whole[nodes] = time.perf_counter() - start
        own[nodes] = whole[nodes] - loading
        print(f"quantize a chain of {nodes:,} nodes: {whole[nodes]:.1f} s,", end=" ")
        print(f"{loading:.1f} s of them onnxruntime loading {sessions} models", flush=True)
    for what, seconds in (("all", whole), ("all but onnxruntime loading models", own)):
        growth = seconds[long] / seconds[short]
        print(f"{what}: {growth:.2f} x for {long / short:g} x the nodes, {_verdict(growth, GROWTH_BAR, 'x')};", end=" ")
        print(f"{seconds[long]:.1f} s for the long chain, {_verdict(seconds[long], SECONDS_BAR, 's')}")
    print(flush=True)


def report_profile(folder: Path, short: int, long: int) -> None:
    """Quantize both chains under cProfile and print the functions that take most in the long one."""
    found = []
    for nodes in (short, long):
        profile = folder / f"{nodes}.profile"
        _run(sys.executable, "-m", "cProfile", "-o", str(profile), "-m", "onnxq", *_options(folder, nodes))
        found.append(_function_times(profile))
    before, after = found
    nothing = (0.0, 0.0)
    costs = [
        Cost(name, (before.get(name, nothing)[0], own), (before.get(name, nothing)[1], total))
        for name, (own, total) in after.items()
    ]
    for title, column in (("own time", "own"), ("time with what it calls", "total")):
        print(f"| function, by {title} | {short:,} nodes, s | {long:,} nodes, s | growth |\n|---|---|---|---|")
        for cost in sorted(costs, key=lambda cost: getattr(cost, column)[1], reverse=True)[:PROFILED]:
            few, many = getattr(cost, column)
            print(f"| {cost.name} | {few:.2f} | {many:.2f} | {many / few if few else float('inf'):.1f} |")
        print(flush=True)


def report_memory(folder: Path, gibibytes: float) -> None:
    """Print the peak memory of loading and saving a model of many large external tensors."""
    source, target = folder / "large.onnx", folder / "copy.onnx"
    _child("write-large", source, int(gibibytes * 2**30))
    baseline = float(_child("import-onnx"))
    start = time.perf_counter()
    peak = float(_child("load-and-save", source, target))
    seconds = time.perf_counter() - start
    sizes = [path.with_name(path.name + ".data").stat().st_size for path in (source, target)]
    assert sizes[0] <= sizes[1] < 1.01 * sizes[0], "every tensor has been copied"
    print(f"peak memory to import numpy and onnx: {baseline:.0f} MiB")
    print(f"peak memory to load and save {gibibytes:g} GiB: {peak:.0f} MiB, in {seconds:.1f} s;", end=" ")
    print(_verdict(peak, MEBIBYTES_BAR, "MiB"))


def machine() -> str:
    """Return what the figures depend on, in two lines."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    cpu = names[0] if names else platform.machine()
    packages = ("onnxq", "onnx", "onnxruntime", "onnx-graphsurgeon", "numpy")
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    return (
        f"{cpu}, threads {len(os.sched_getaffinity(0))}, load {os.getloadavg()[0]:.1f}, {platform.system()}\n"
        f"Python {platform.python_version()}, {versions}\n"
    )


# --- what runs in a process of its own ----------------------------------------------------------------------------


def write_chain(path: str, nodes: str) -> None:
    """Write a chain of ``nodes`` nodes, MatMul and Relu by turns, and its samples beside it."""
    import numpy as np
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    random = np.random.default_rng(0)
    layers = int(nodes) // 2
    # Columns that sum to 1 keep the values of any number of layers between the smallest and the largest input.
    weights = random.dirichlet(np.ones(WIDTH), (layers, WIDTH)).transpose(0, 2, 1).astype(np.float32)
    chain = []
    for layer in range(layers):
        chain.append(helper.make_node("MatMul", [f"x{layer}", f"w{layer}"], [f"y{layer}"], name=f"matmul{layer}"))
        chain.append(helper.make_node("Relu", [f"y{layer}"], [f"x{layer + 1}"], name=f"relu{layer}"))
    graph = helper.make_graph(
        chain,
        "chain",
        [helper.make_tensor_value_info("x0", TensorProto.FLOAT, [1, WIDTH])],
        [helper.make_tensor_value_info(f"x{layers}", TensorProto.FLOAT, [1, WIDTH])],
        [numpy_helper.from_array(weight, f"w{layer}") for layer, weight in enumerate(weights)],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    np.savez(Path(path).with_suffix(".npz"), x0=random.random((SAMPLES, WIDTH), np.float32))


def write_large(path: str, size: str) -> None:
    """Write a model of ``size`` bytes of external weights, a sum of as many tensors, one tensor at a time."""
    import numpy as np
    import onnx
    from onnx import TensorProto, helper

    count, elements = -(-int(size) // TENSOR_BYTES), TENSOR_BYTES // 4
    content = np.random.default_rng(0).random(elements, np.float32).tobytes()
    data = Path(path + ".data")
    weights = []
    with data.open("wb") as file:
        for index in range(count):
            weight = TensorProto(name=f"w{index}", data_type=TensorProto.FLOAT, dims=[elements])
            weight.data_location = TensorProto.EXTERNAL
            for key, value in (("location", data.name), ("offset", str(file.tell())), ("length", str(TENSOR_BYTES))):
                weight.external_data.add(key=key, value=value)
            weights.append(weight)
            file.write(content)
    inputs = ["x", *(weight.name for weight in weights)]
    graph = helper.make_graph(
        [helper.make_node("Sum", inputs, ["y"], name="sum")],
        "large",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [elements])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [elements])],
        weights,
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def quantize(*arguments: str) -> None:
    """Run the command line, then print how many sessions it opened and how many seconds that took."""
    import onnxruntime

    from onnxq.cli import main as cli

    seconds = []

    class TimedSession(onnxruntime.InferenceSession):  # type: ignore[misc, unused-ignore]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            start = time.perf_counter()
            super().__init__(*arguments, **options)
            seconds.append(time.perf_counter() - start)

    onnxruntime.InferenceSession = TimedSession
    sys.argv[1:] = arguments
    cli.main()
    print(json.dumps([len(seconds), sum(seconds)]))


def load_and_save(source: str, target: str) -> None:
    """Load a model, save it and print the peak memory of this process."""
    from onnxq.ir import load, save

    save(load(source), target)
    _print_peak()


def import_onnx() -> None:
    """Print the peak memory of a process that only imports what every user of ONNX files imports."""
    import numpy  # noqa: F401
    import onnx  # noqa: F401

    _print_peak()


CHILDREN: Mapping[str, Callable[..., None]] = {
    "write-chain": write_chain,
    "write-large": write_large,
    "quantize": quantize,
    "load-and-save": load_and_save,
    "import-onnx": import_onnx,
}


def _print_peak() -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(peak / (2**20 if sys.platform == "darwin" else 2**10))


# --- the processes ------------------------------------------------------------------------------------------------


def _options(folder: Path, nodes: int) -> list[str]:
    files = [str(folder / f"{nodes}.onnx"), "--calib", str(folder / f"{nodes}.npz"), "-o", str(folder / "q.onnx")]
    return ["quantize", *files, "--search", "off", "--force", "--latency-seconds", "0"]


def _child(name: str, *arguments: str | Path | int) -> str:
    return _run(sys.executable, str(Path(__file__)), name, *map(str, arguments))


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout


def _function_times(profile: Path) -> dict[str, tuple[float, float]]:
    """Return own and total seconds of every function by ``file:line(name)``."""
    found: dict[str, tuple[float, float]] = {}
    statistics: dict[tuple[str, int, str], tuple[int, int, float, float, object]] = pstats.Stats(str(profile)).stats  # type: ignore[attr-defined]
    for (file, line, name), (_, _, own, total, _) in statistics.items():
        known = found.get(label := _label(file, line, name), (0.0, 0.0))
        found[label] = known[0] + own, known[1] + total
    return found


def _label(file: str, line: int, name: str) -> str:
    if file in {"~", ""}:
        return name
    return f"{'/'.join(Path(file).parts[-3:])}:{line}({name})"


def _verdict(found: float, bar: float, unit: str) -> str:
    return f"within {bar:g} {unit}" if found <= bar else f"ABOVE the {bar:g} {unit} that are wanted"


if __name__ == "__main__":
    main()
