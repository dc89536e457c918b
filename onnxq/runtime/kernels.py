"""Measure the time of each kernel of a model, from onnxruntime's profile and the graph that it ran."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped,unused-ignore]

from onnxq.data.inputs import Sample
from onnxq.errors import ModelError
from onnxq.ir.protos import node_protos
from onnxq.runtime.sessions import Session, copy_without_weights, open_session, run

_SUFFIX = "_kernel_time"
# Their time includes the nodes of their subgraphs, which have events of their own.
_HOLDERS = frozenset({"If", "Loop", "Scan"})
_LOOPS = frozenset({"Loop", "Scan"})
# Reading an event of a profile takes about 15 microseconds, and so does writing it. More events than _ENOUGH_EVENTS
# do not improve the times, except for _FEWEST_RUNS runs. More than _MOST_EVENTS take too long.
_ENOUGH_EVENTS, _FEWEST_RUNS, _MOST_EVENTS = 40_000, 3, 100_000


@dataclass(frozen=True)
class Kernel:
    """One executed node of a graph or subgraph.

    Attributes:
        name: name of the executed node.
        nanoseconds: time of one run, with all iterations of a loop: the median over repetitions, averaged over samples.
            Samples that do not take its branch count as zero.
        elements: size of its first output over all iterations, averaged in the same manner.
    """

    name: str
    op_type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nanoseconds: float
    elements: float


def profile_kernels(
    model: Path, samples: Sequence[Sample], folder: Path, *, repeats: int, threads: int | None = None
) -> tuple[Kernel, ...]:
    """Run a model under the runtime's profiler.

    Args:
        model: the file.
        samples: each is run ``repeats`` times, after one warm-up run of the first. There are fewer runs and fewer
            samples if the profile would grow too long.
        folder: for temporary files, which are removed again.
        repeats: at least one.
        threads: threads of an operator; None leaves the choice to onnxruntime.

    Returns:
        The kernels in order of execution, those of subgraphs after the node that contains them. There are none if a
        single run makes too many events, as long loops do.

    Raises:
        ModelError: onnxruntime refuses the model.
        DataError: a sample cannot be run.
    """
    with TemporaryDirectory(dir=folder) as scratch:
        optimized = Path(scratch) / "profiled.onnx"
        session = open_session(model, threads=threads, optimized_copy=optimized, profile=Path(scratch) / "profile")
        try:
            graph = onnx.load(optimized, load_external_data=False).graph
            runs_affordable = _affordable(_events_of_a_run(graph, model, samples[0], Path(scratch)))
            repeats = min(repeats, max((runs_affordable - 1) // len(samples), 1))
            samples = samples[: runs_affordable - 1] if runs_affordable > 1 else ()
            for sample in samples[:1]:
                run(session, sample)
            for sample in samples:
                for _ in range(repeats):
                    run(session, sample)
            runs = _runs(_events(Path(session.end_profiling())))
        except (OSError, ValueError) as error:
            raise ModelError(f"the profile of {model} cannot be read: {error}; measure without a search") from error
    return tuple(_kernels(graph, runs[1:], repeats))


def loaded_kernels(model: Path) -> tuple[Kernel, ...]:
    """Return the kernels of a model without running it: times and sizes are 0.

    Raises:
        ModelError: onnxruntime refuses the model.
    """
    with TemporaryDirectory() as scratch:
        optimized = copy_without_weights(Path(scratch))
        open_session(model, optimized_copy=optimized)
        return saved_kernels(optimized)


def saved_kernels(optimized: Path) -> tuple[Kernel, ...]:
    """Return the kernels of an optimized graph that a session saved; see `loaded_kernels`."""
    nodes = node_protos(onnx.load(optimized, load_external_data=False).graph.node)
    return tuple(_kernel(node, 0.0, 0.0) for node in nodes)


def ran_operators(session: Session, model: Path) -> Counter[str]:
    """End the profile of a session, and return the number of kernels that ran, by operator.

    Unlike a session that saves its optimized graph, one that is profiled keeps no second copy of the weights.

    Args:
        session: opened with a profile; it has run a sample.
        model: its file.
    """
    return Counter(node.op_type for node in _called_alike(model, Path(session.end_profiling())).node)


def read_profile(ran: bytes | Path, profile: Path, repeats: int) -> tuple[Kernel, ...]:
    """Return the kernels of a profile that another process recorded.

    Args:
        ran: the graph that ran, without its weights. If the runtime does not provide it, the file of the model, whose
            node names the kernels have.
        profile: events of one warm-up run and then of ``repeats`` runs of each sample.
        repeats: at least one.

    Raises:
        ModelError: the profile or graph cannot be read.
    """
    try:
        runs = _runs(_events(profile))
        graph = _called_alike(ran, profile) if isinstance(ran, Path) else onnx.load_model_from_string(ran).graph
    except (DecodeError, KeyError, OSError, ValueError) as error:
        raise ModelError(f"the profile cannot be read: {error}; measure without a search") from error
    return tuple(_kernels(graph, runs[1:], repeats))


def _called_alike(model: Path, profile: Path) -> onnx.GraphProto:
    nodes = {node.name: node for node in node_protos(onnx.load(model, load_external_data=False).graph.node)}
    ran = {}
    for event in _events(profile):
        name = event["name"].removesuffix(_SUFFIX)
        if event["cat"] == "Node" and name != event["name"]:
            like = nodes.get(name, onnx.NodeProto())
            ran[name] = onnx.NodeProto(
                name=name, op_type=event["args"]["op_name"], input=like.input, output=like.output
            )
    return onnx.GraphProto(node=ran.values())


def _affordable(events: int) -> int:
    """Return the number of runs that are profiled, for the events of one run.

    >>> _affordable(100), _affordable(11_000), _affordable(45_000), _affordable(70_000)
    (400, 3, 2, 1)
    """
    most = _MOST_EVENTS // max(events, 1)
    return max(_ENOUGH_EVENTS // max(events, 1), min(most, _FEWEST_RUNS))


def _events_of_a_run(graph: onnx.GraphProto, model: Path, sample: Sample, folder: Path) -> int:
    # With loops, only a run shows the number.
    nodes = list(node_protos(graph.node))
    if not any(node.op_type in _LOOPS for node in nodes):
        return len(nodes)
    session = open_session(model, profile=folder / "counted")
    run(session, sample)
    with Path(session.end_profiling()).open("rb") as lines:
        return sum(1 for _ in lines)


def _events(profile: Path) -> Iterator[Mapping[str, Any]]:
    # One event a line: loops make too many of them to hold at once.
    with profile.open(encoding="utf-8") as lines:
        yield from (json.loads(line.rstrip().rstrip(",")) for line in lines if line.startswith("{"))


def _runs(events: Iterable[Mapping[str, Any]]) -> list[dict[str, tuple[float, float]]]:
    runs: list[dict[str, tuple[float, float]]] = []
    current: dict[str, tuple[float, float]] = {}
    for event in events:
        name = event["name"]
        if name == "model_run":
            runs.append(current)
            current = {}
        elif event["cat"] == "Node" and name.endswith(_SUFFIX) and event["args"].get("op_name") not in _HOLDERS:
            shapes = [
                math.prod(shape) for types in event["args"].get("output_type_shape", ()) for shape in types.values()
            ]
            time, elements = current.get(name.removesuffix(_SUFFIX), (0.0, 0.0))
            current[name.removesuffix(_SUFFIX)] = (
                time + event["dur"] * 1e3,
                elements + float(shapes[0] if shapes else 0),
            )
    return runs


def _kernels(
    graph: onnx.GraphProto, runs: Sequence[Mapping[str, tuple[float, float]]], repeats: int
) -> Iterator[Kernel]:
    for node in node_protos(graph.node):
        samples = [
            [times[node.name] for times in runs[start : start + repeats] if node.name in times]
            for start in range(0, len(runs), repeats)
        ]
        if any(samples):
            times = [statistics.median(time for time, _ in sample) if sample else 0.0 for sample in samples]
            sizes = [sample[0][1] if sample else 0.0 for sample in samples]
            yield _kernel(node, statistics.fmean(times), statistics.fmean(sizes))


def _kernel(node: onnx.NodeProto, nanoseconds: float, elements: float) -> Kernel:
    return Kernel(node.name, node.op_type, tuple(node.input), tuple(node.output), nanoseconds, elements)
