"""Rewrite models with ``onnxq optimize``, onnxsim and onnxslim, and see what each left and what it is worth.

    python benchmarks/networks/export.py NETWORKS     # in an environment of its own, see there
    python benchmarks/rewrite.py --models DIR --data DIR --networks NETWORKS [--backend] [PART OF A NAME ...]

MODELS/NAME.onnx is run on DATA/NAME/calib (or on the folder whose name its own starts with); ``--backend`` adds the
small models that onnx ships. Nodes are counted in all scopes, local functions inlined, Constant aside. The other two
tools are installed into ``--peers`` when it is not there yet, and run in processes of their own that may die or take
too long: a row "failed". The exports of one network are then quantized without any search and without what exporters
wrote about nodes, and timed by turns, float and integer models alike. Everything is timed with one thread. When all
three groups run whole, the tables go to ``--output`` too.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import inliner, numpy_helper

Sample = Mapping[str, NDArray[Any]]
Outputs = Mapping[str, Sequence[Any]]

PEERS = ("onnxsim", "onnxslim")
TOOLS = ("onnxq", *PEERS)
PEER_PACKAGES = ("onnxsim==0.8.*", "onnxslim", "onnxruntime", "onnx")
BACKEND_FOLDERS = ("light", "simple", "pytorch-converted", "pytorch-operator")
_FOLDERS = re.compile(r"""(?<![\w.:/])/(?:[^\s/'\"]+/)+""")
_CACHE = Path.home() / ".cache" / "onnxq-benchmarks" / "peers"
SAMPLES = 4
ROUNDS = 4
MOST_NODES_OF_BEST, SHARE_AT_BEST = 1.1, 0.8
LARGEST_DIFFERENCE = 1e-5
SPREAD_OF_EXPORTS = 1.05
TIME_OF_ONNXSIM = 2.0

# Calls the tool and prints what each call took: all but the first without imports, and with warm caches.
CALLS = """
import sys, time
calls, tool, source, target = sys.argv[1:]
if tool == "onnxsim":
    import onnx, onnxsim
    def rewrite(): onnx.save(onnxsim.simplify(onnx.load(source))[0], target)
elif tool == "onnxslim":
    import onnxslim
    def rewrite(): onnxslim.slim(source, target)
else:
    from onnxq.cli.main import cli
    def rewrite():
        cli(["optimize", source, "-o", target, "--latency-seconds", "0", "--unverified"], standalone_mode=False)
for _ in range(int(calls)):
    start = time.perf_counter()
    rewrite()
    print("took", time.perf_counter() - start, flush=True)
"""


@dataclass(frozen=True)
class Case:
    """A model and a few samples to run it on."""

    group: str
    name: str
    path: Path
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class Rewritten:
    """What a tool made of a model, or why there is nothing.

    Attributes:
        nodes: of all scopes.
        bytes: of the file.
        difference: largest of any output, relative to the output's largest value; 0 where the original does not run.
        process: seconds of the whole process.
        call: seconds of the second call in one process; NaN when it was not timed.
        speed: how many times as fast as the original the result is; NaN when it was not timed.
        failure: a sentence, or nothing.
    """

    nodes: int = 0
    bytes: int = 0
    difference: float = math.nan
    process: float = math.nan
    call: float = math.nan
    speed: float = math.nan
    failure: str = ""

    @property
    def accurate(self) -> bool:
        """Whether there is a result whose outputs differ by rounding only."""
        return not self.failure and self.difference <= LARGEST_DIFFERENCE


@dataclass(frozen=True)
class Row:
    """One model, rewritten by each tool."""

    group: str
    model: str
    nodes: int
    bytes: int
    tools: Mapping[str, Rewritten]

    @property
    def of_best(self) -> float:
        """Our nodes as a share of those of the better of the others, or of the original's when neither is faithful."""
        if self.tools["onnxq"].failure:
            return math.inf
        ours = self.tools["onnxq"].nodes
        theirs = [self.tools[peer].nodes for peer in PEERS if self.tools[peer].accurate]
        best = min(theirs, default=self.nodes)
        return ours / best if best else math.inf if ours else 1.0


@dataclass(frozen=True)
class Export:
    """One export of a network, quantized without search."""

    network: str
    export: str
    failure: str = ""
    sqnr: float = math.nan
    bytes: int = 0
    float_bytes: int = 0
    integer_kernels: int = 0
    float_heavy: int = 0
    float_seconds: float = math.nan
    seconds: float = math.nan


@dataclass
class Tables:
    """What was found, in the order it was found."""

    rows: list[Row] = field(default_factory=list)
    exports: list[Export] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, help="folder of models")
    parser.add_argument("--data", type=Path, help="folder of their samples")
    parser.add_argument("--networks", type=Path, help="what benchmarks/networks/export.py wrote")
    parser.add_argument("--backend", action="store_true", help="also the small models that onnx ships")
    parser.add_argument("--peers", type=Path, default=_CACHE, help="environment of the others")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that a tool may take")
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="time for each latency comparison; 0 leaves them out"
    )
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "rewrite.md")
    parser.add_argument("--json", type=Path)
    parser.add_argument("names", nargs="*", help="parts of the names of the models to run")
    options = parser.parse_args()
    if options.models and not options.data:
        sys.exit("--models needs --data, the folder of their samples")
    cases = [case for case in _cases(options) if not options.names or any(part in case.name for part in options.names)]
    if not cases:
        sys.exit("there are no such models")
    python = _peers(options.peers)
    found = Tables()
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            found.rows.append(rewrite(case, python, Path(folder), options.timeout, options.seconds))
            print(_progress(found.rows[-1]), file=sys.stderr, flush=True)
        networks = {case.path.parent: case.samples for case in cases if case.group == "networks"}
        for network, samples in networks.items():
            found.exports += quantize(network, samples, Path(folder), options.timeout, options.seconds)
            print(f"quantized {network.name}", file=sys.stderr, flush=True)
    text = report(found, python)
    print(text)
    if options.models and options.networks and options.backend and not options.names:
        options.output.write_text(text + "\n")
    if options.json:
        options.json.write_text(json.dumps(asdict(found), indent=2) + "\n")


# Which models


def _cases(options: argparse.Namespace) -> Iterator[Case]:
    """Yield the models of all groups that were asked for."""
    if options.models:
        for path in sorted(options.models.glob("*.onnx")):
            folders = [entry for entry in options.data.iterdir() if path.stem.startswith(entry.name)]
            if folders:
                data = max(folders, key=lambda folder: len(folder.name)) / "calib"
                samples = tuple(_arrays(file) for file in sorted(data.glob("*.npz"))[:SAMPLES])
                yield Case("zoo", path.stem, path, samples)
    if options.networks:
        for path in sorted(options.networks.glob("*/*.onnx")):
            stacked = _arrays(path.parent / "calib.npz")
            samples = tuple({name: values[index] for name, values in stacked.items()} for index in range(SAMPLES))
            yield Case("networks", f"{path.parent.name}/{path.stem}", path, samples)
    if options.backend:
        shipped = Path(onnx.__file__).parent / "backend" / "test" / "data"
        for group in BACKEND_FOLDERS:
            for path in sorted(chain((shipped / group).glob("*.onnx"), (shipped / group).glob("*/model.onnx"))):
                name = path.parent.name if path.name == "model.onnx" else path.stem
                yield Case("backend", f"{group}/{name}", path, (_shipped_sample(path),))


def _arrays(path: Path) -> Sample:
    with np.load(path) as found:
        return {name: found[name] for name in found.files}


def _shipped_sample(path: Path) -> Sample:
    """Return the inputs stored beside a model, or made-up images where there are none."""
    graph = onnx.load(path).graph
    initializers = {tensor.name for tensor in graph.initializer}
    entries = [entry for entry in graph.input if entry.name not in initializers]
    stored = {int(file.stem.split("_")[1]): file for file in path.parent.glob("test_data_set_0/input_*.pb")}
    sample = {}
    for index, entry in enumerate(entries):
        if index in stored:
            proto = onnx.TensorProto.FromString(stored[index].read_bytes())
            sample[entry.name] = numpy_helper.to_array(proto)
        else:
            shape = [dim.dim_value or 1 for dim in entry.type.tensor_type.shape.dim]
            sample[entry.name] = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    return sample


# What each tool makes of them


def _peers(folder: Path) -> Path:
    """Return the interpreter that has the other tools, installing them when there is none."""
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.exists():
        venv.create(folder, with_pip=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *PEER_PACKAGES], check=True)
    return python.absolute()


def rewrite(case: Case, peers: Path, folder: Path, timeout: float, seconds: float) -> Row:
    """Rewrite a model with each tool and compare the results with it."""
    try:
        expected: Outputs | None = outputs_of(case.path, case.samples)
    # onnxruntime has no kernel for some of what onnx ships; nodes are counted all the same.
    except Exception:  # noqa: BLE001
        expected = None
    results = {tool: folder / f"{tool}.onnx" for tool in TOOLS}
    for target in results.values():
        target.unlink(missing_ok=True)
    found = {tool: _run_tool(tool, case, expected, peers, results[tool], timeout) for tool in TOOLS}
    sound = {tool: path for tool, path in results.items() if not found[tool].failure}
    if seconds and expected is not None and case.group != "backend":
        times = interleaved([case.path, *sound.values()], case.samples, seconds)
        speeds = {tool: times[0] / taken for tool, taken in zip(sound, times[1:], strict=True)}
        found = {tool: replace(result, speed=speeds.get(tool, math.nan)) for tool, result in found.items()}
    return Row(case.group, case.name, count_nodes(case.path), case.path.stat().st_size, found)


def _run_tool(tool: str, case: Case, expected: Outputs | None, peers: Path, target: Path, timeout: float) -> Rewritten:
    start = time.perf_counter()
    failure = _called(_command(tool, case.path, target, peers), timeout)[1]
    process = time.perf_counter() - start
    if failure:
        return Rewritten(process=process, failure=failure)
    call = math.nan
    if case.group != "backend":
        # All tools are called in the same way here, so that imports and the start of a process are left out of each.
        python = sys.executable if tool == "onnxq" else str(peers)
        program = [python, "-c", CALLS, "2", tool, str(case.path), str(target)]
        output, failure = _called(program, timeout)
        if failure:
            return Rewritten(process=process, failure=failure)
        call = [float(line.split()[1]) for line in output.splitlines() if line.startswith("took ")][-1]
    try:
        nodes = count_nodes(target)
        difference = 0.0 if expected is None else largest_difference(expected, outputs_of(target, case.samples))
    # What the tools write may break anything that reads it.
    except Exception as error:  # noqa: BLE001
        return Rewritten(process=process, call=call, failure=f"{type(error).__name__}: {_short(str(error))}")
    return Rewritten(nodes, target.stat().st_size, difference, process, call)


def _command(tool: str, source: Path, target: Path, peers: Path) -> list[str]:
    """Return the command that rewrites a file: ours as users type it, the others' as a program of two lines."""
    if tool == "onnxq":
        return [
            sys.executable,
            "-m",
            "onnxq",
            "optimize",
            str(source),
            "-o",
            str(target),
            "--latency-seconds",
            "0",
            "--unverified",
        ]
    return [str(peers), "-c", CALLS, "1", tool, str(source), str(target)]


def _called(command: Sequence[str], timeout: float) -> tuple[str, str]:
    """Run a command and return its output, and in a sentence why it failed if it did."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout)
    except subprocess.TimeoutExpired:
        return "", f"no answer in {timeout:.0f} s"
    said = run.stderr.strip().splitlines() or [""]
    return run.stdout, f"exit {run.returncode}: {_short(said[-1])}" if run.returncode else ""


def _short(message: str) -> str:
    """Return the beginning of a message, with no folder of this machine in it."""
    return _FOLDERS.sub("", message)[:120]


# What the results are worth


def count_nodes(path: Path) -> int:
    """Count the nodes of all scopes, local functions inlined, Constant aside."""
    model = onnx.load(path, load_external_data=False)
    if model.functions:
        model = inliner.inline_local_functions(model)
    return sum(node.op_type != "Constant" for node in _nodes(model.graph))


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for body in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from _nodes(body)


def _session(path: Path, threads: int = 1) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _feed(session: onnxruntime.InferenceSession, sample: Sample) -> dict[str, NDArray[Any]]:
    wanted = {entry.name for entry in session.get_inputs()}
    return {name: values for name, values in sample.items() if name in wanted}


def outputs_of(path: Path, samples: Sequence[Sample]) -> Outputs:
    """Run a model and return each output's arrays, one for each sample."""
    session = _session(path)
    runs = [session.run(None, _feed(session, sample)) for sample in samples]
    return {entry.name: [run[index] for run in runs] for index, entry in enumerate(session.get_outputs())}


def largest_difference(expected: Outputs, found: Outputs) -> float:
    """Return the largest difference of any output, relative to the largest value of that output over the samples.

    Infinite when outputs have other names, types or shapes, or when what is no number differs.
    """
    if list(expected) != list(found):
        return math.inf
    return max((_relative(expected[name], found[name]) for name in expected), default=0.0)


def _relative(expected: Sequence[Any], found: Sequence[Any]) -> float:
    arrays = [(np.asarray(one), np.asarray(other)) for one, other in zip(expected, found, strict=True)]
    if any(one.shape != other.shape or one.dtype != other.dtype for one, other in arrays):
        return math.inf
    if any(one.dtype.kind not in "fiu" for one, _ in arrays):
        return 0.0 if all((one == other).all() for one, other in arrays) else math.inf
    one, other = (np.concatenate([pair[side].ravel().astype(np.float64) for pair in arrays]) for side in (0, 1))
    finite = np.isfinite(one)
    if not np.array_equal(one[~finite], other[~finite], equal_nan=True):
        return math.inf
    largest = np.abs(one[finite]).max(initial=0.0)
    apart = np.abs(one[finite] - other[finite]).max(initial=0.0)
    # NaN where there should be a number is as wrong as can be.
    return float(apart / largest if largest else apart) if np.isfinite(apart) else math.inf


def interleaved(paths: Sequence[Path], samples: Sequence[Sample], seconds: float, threads: int = 1) -> list[float]:
    """Return the median seconds of a run of each model, all run by turns and loaded anew in each round.

    Where its weights come to lie makes a model a few percent faster or slower for as long as it is loaded.
    """
    medians: list[list[float]] = [[] for _ in paths]
    for number in range(ROUNDS):
        sessions = [_session(path, threads) for path in paths]
        feeds = [[_feed(session, sample) for sample in samples] for session in sessions]
        for session, feed in zip(sessions, feeds, strict=True):
            session.run(None, feed[0])
        times: list[list[float]] = [[] for _ in paths]
        deadline, turn = time.perf_counter() + seconds * len(paths) / 2 / ROUNDS, number
        while time.perf_counter() < deadline or not times[0]:
            # None of them always runs behind the same other.
            order = np.random.default_rng(turn).permutation(len(paths)).tolist()
            for index in order:
                feed_now = feeds[index][turn % len(samples)]
                start = time.perf_counter()
                sessions[index].run(None, feed_now)
                times[index].append(time.perf_counter() - start)
            turn += 1
        for median, taken in zip(medians, times, strict=True):
            median.append(float(np.median(taken)))
    return [float(np.median(median)) for median in medians]


def quantize(network: Path, samples: Sequence[Sample], folder: Path, timeout: float, seconds: float) -> list[Export]:
    """Quantize each export of a network without search, and time them all by turns."""
    found: dict[Path, Export] = {}
    for path in sorted(network.glob("*.onnx")):
        target, written = folder / f"int8-{path.stem}.onnx", folder / "report.json"
        command = [sys.executable, "-m", "onnxq", "quantize", str(path), "--calib", str(network / "calib.npz")]
        command += ["-o", str(target), "--search", "off", "--latency-seconds", "0", "--force", "--report", str(written)]
        # What exporters write about nodes is up to a quarter of a small model, and differs from one to the next.
        command += ["--strip-metadata"]
        failure = _called(command, timeout)[1]
        if failure:
            found[path] = Export(network.name, path.stem, failure)
            continue
        said = json.loads(written.read_text())
        kernels, files = said["performance"]["kernels"], said["files"]
        sqnr = math.inf if said["worst_sqnr"] is None else said["worst_sqnr"]
        sizes = files["bytes"], files["float_bytes"]
        found[path] = Export(network.name, path.stem, "", sqnr, *sizes, kernels["integer"], kernels["heavy_float"])
    sound = [path for path, export in found.items() if not export.failure]
    if seconds and sound:
        models = [*sound, *(folder / f"int8-{path.stem}.onnx" for path in sound)]
        times = interleaved(models, samples, seconds * 2)
        for path, float_seconds, taken in zip(sound, times, times[len(sound) :], strict=False):
            found[path] = replace(found[path], float_seconds=float_seconds, seconds=taken)
    return list(found.values())


# What is told


@dataclass(frozen=True)
class Bar:
    """A claim, what was found, and whether it was met."""

    claim: str
    found: str
    met: bool


def report(found: Tables, python: Path) -> str:
    """Return all tables and bars as markdown."""
    lines = ["# Rewriting beside onnxsim and onnxslim", "", _ran_on(python), ""]
    lines += ["| bar | found | |", "|---|---|---|"]
    lines += [f"| {bar.claim} | {bar.found} | {'met' if bar.met else '**missed**'} |" for bar in bars(found)]
    for group, title in (("zoo", "Real models"), ("networks", "Networks, each exported two or three ways")):
        if rows := [row for row in found.rows if row.group == group]:
            lines += ["", f"## {title}", "", *_rewritten_table(rows)]
    if rows := [row for row in found.rows if row.group == "backend"]:
        lines += ["", "## Models that onnx ships", "", *_shipped(rows)]
    if found.exports:
        lines += ["", "## Exports of one network as int8 models, without search", "", *_exports_table(found.exports)]
    return "\n".join(lines)


def bars(found: Tables) -> list[Bar]:
    """Judge what was found; bars of groups that did not run are left out."""
    rows, holdout = found.rows, []
    if rows:
        at_best, worst = sum(row.of_best <= 1 for row in rows), max(rows, key=lambda row: row.of_best)
        claim = f"nodes at most those of the better of the two on {SHARE_AT_BEST:.0%} of the models"
        holdout.append(Bar(claim, f"{at_best} of {len(rows)}", at_best >= SHARE_AT_BEST * len(rows)))
        claim = f"and never more than {MOST_NODES_OF_BEST} times as many"
        over = sum(row.of_best > MOST_NODES_OF_BEST for row in rows)
        said = f"{over} above; most {worst.of_best:.2f}, {worst.model}"
        holdout.append(Bar(claim, said, worst.of_best <= MOST_NODES_OF_BEST))
        apart = {row.model: math.inf if row.tools["onnxq"].failure else row.tools["onnxq"].difference for row in rows}
        furthest = max(apart, key=lambda model: apart[model])
        claim = f"outputs within {LARGEST_DIFFERENCE:g} of their largest value"
        above = sum(not difference <= LARGEST_DIFFERENCE for difference in apart.values())
        said = f"{above} above; largest {apart[furthest]:.1e}, {furthest}"
        holdout.append(Bar(claim, said, not above))
    real = [row for row in rows if row.group == "zoo" and not row.tools["onnxsim"].failure]
    if real:
        ours, theirs = ([row.tools[tool] for row in real] for tool in ("onnxq", "onnxsim"))
        process = sum(one.process for one in ours) / sum(one.process for one in theirs)
        call = sum(one.call for one in ours) / sum(one.call for one in theirs)
        claim = f"optimize on the real models takes at most {TIME_OF_ONNXSIM:g} times as long as onnxsim"
        said = f"{process:.2f} as processes, {call:.2f} as calls, {len(real)} models"
        sound = not any(one.failure for one in ours)
        holdout.append(Bar(claim, said, sound and process <= TIME_OF_ONNXSIM))
    networks = {
        export.network: [one for one in found.exports if one.network == export.network] for export in found.exports
    }
    for kind, claim in (("seconds", "speed"), ("bytes", "size")):
        apart = {name: _spread([getattr(export, kind) for export in exports]) for name, exports in networks.items()}
        holdout += _all_within(f"exports of one network as int8 within 5 % in {claim}", apart, SPREAD_OF_EXPORTS)
    apart = {
        name: float("inf" if any(one.failure for one in exports) else len({one.integer_kernels for one in exports}))
        for name, exports in networks.items()
    }
    return holdout + _all_within("and with equally many integer kernels (different counts)", apart, 1)


def _all_within(claim: str, values: Mapping[str, float], most: float) -> list[Bar]:
    if not values:
        return []
    worst = max(values, key=lambda name: values[name])
    within = sum(value <= most for value in values.values())
    return [Bar(claim, f"{within} of {len(values)}; worst {values[worst]:.2f}, {worst}", within == len(values))]


def _spread(values: Sequence[float]) -> float:
    """Return the largest over the smallest, infinite when one is missing."""
    return max(values) / min(values) if all(value > 0 for value in values) else math.inf


def _rewritten_table(rows: Sequence[Row]) -> list[str]:
    header = ["model", "nodes", *TOOLS, "bytes of onnxq's", *(f"speed {tool}" for tool in TOOLS)]
    header += [f"difference {tool}" for tool in TOOLS] + [f"seconds {tool}" for tool in TOOLS]
    lines = [_line(header), _line(["---"] * len(header))]
    for row in rows:
        found = [row.tools[tool] for tool in TOOLS]
        ours = found[0]
        cells = [row.model, str(row.nodes), *(_nodes_cell(row, tool) for tool in TOOLS)]
        cells.append("-" if ours.failure else f"{ours.bytes / row.bytes:.3f}")
        cells += ["-" if math.isnan(one.speed) else f"{one.speed:.2f}" for one in found]
        cells += ["-" if one.failure else f"{one.difference:.1e}" for one in found]
        cells += [f"{one.process:.1f} / {one.call:.2f}" for one in found]
        lines.append(_line(cells))
    failures = [
        f"- {tool}, {row.model}: {row.tools[tool].failure}" for row in rows for tool in TOOLS if row.tools[tool].failure
    ]
    explained = (
        "Bold: fewest nodes. Speed: time of the original over that of the result. Seconds: process / second call."
    )
    return [*lines, "", explained, *([""] if failures else []), *failures]


def _shipped(rows: Sequence[Row]) -> list[str]:
    """Return the counts of all, and the models where we are behind or anything of ours is wrong."""
    total = len(rows)
    failed = ", ".join(f"{tool} {sum(bool(row.tools[tool].failure) for row in rows)}" for tool in TOOLS)
    wrong = ", ".join(
        f"{tool} {sum(not (row.tools[tool].failure or row.tools[tool].accurate) for row in rows)}" for tool in TOOLS
    )
    fewer, equal = sum(row.of_best < 1 for row in rows), sum(row.of_best == 1 for row in rows)
    lines = [
        f"{total} models. Failed: {failed}. Outputs too different: {wrong}. Nodes of onnxq beside the better of the"
    ]
    lines.append(f"others: fewer in {fewer}, as many in {equal}, more in {total - fewer - equal}.")
    header = ["model", "nodes", *TOOLS, "difference onnxq"]
    shown = [row for row in rows if row.of_best > 1 or not row.tools["onnxq"].accurate]
    if shown:
        lines += ["", _line(header), _line(["---"] * len(header))]
    for row in shown:
        ours = row.tools["onnxq"]
        cells = [row.model, str(row.nodes), *(_nodes_cell(row, tool) for tool in TOOLS)]
        lines.append(_line([*cells, ours.failure or f"{ours.difference:.1e}"]))
    return lines


def _nodes_cell(row: Row, tool: str) -> str:
    one = row.tools[tool]
    if one.failure:
        return "failed"
    fewest = min(other.nodes for other in row.tools.values() if not other.failure)
    return f"**{one.nodes}**" if one.nodes == fewest else str(one.nodes)


def _exports_table(exports: Sequence[Export]) -> list[str]:
    header = [
        "network",
        "export",
        "int8 ms",
        "float ms",
        "speed",
        "bytes",
        "of float",
        "integer kernels",
        "float heavy",
    ]
    header.append("SQNR dB")
    lines = [_line(header), _line(["---"] * len(header))]
    for one in exports:
        if one.failure:
            lines.append(_line([one.network, one.export, f"failed: {one.failure}", *[""] * (len(header) - 3)]))
            continue
        cells = [one.network, one.export, f"{1e3 * one.seconds:.2f}", f"{1e3 * one.float_seconds:.2f}"]
        cells += [f"{one.float_seconds / one.seconds:.2f}", str(one.bytes), f"{one.bytes / one.float_bytes:.3f}"]
        lines.append(_line([*cells, str(one.integer_kernels), str(one.float_heavy), f"{one.sqnr:.1f}"]))
    return lines


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _progress(row: Row) -> str:
    found = [f"{tool} {row.tools[tool].failure or row.tools[tool].nodes}" for tool in TOOLS]
    return f"{row.group} {row.model}: {row.nodes} nodes; " + ", ".join(found)


def _ran_on(python: Path) -> str:
    program = "from importlib.metadata import version; print(*(version(name) for name in ('onnxsim', 'onnxslim')))"
    theirs = subprocess.run([str(python), "-c", program], capture_output=True, text=True, check=True).stdout.split()
    named = ", ".join(f"{tool} {number}" for tool, number in zip(PEERS, theirs, strict=True))
    cores = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    return f"{named}, onnxruntime {version('onnxruntime')}, onnx {version('onnx')}, one thread; {cores}"


if __name__ == "__main__":
    main()
