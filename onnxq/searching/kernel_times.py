"""How long each node of a model takes: the runtime's own profile, traced back to the nodes of the prepared model."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import onnx

from onnxq.errors import ModelError
from onnxq.graph import Graph, Node, scopes
from onnxq.operators import Role, operator_of
from onnxq.runtime import open_session, run
from onnxq.samples.inputs import Sample

_SUFFIX = "_kernel_time"
# What the runtime appends to the names of nodes that it puts in the place of others.
_RENAMED = re.compile(r"(_token_\d+|_nchwc|/duplicated|/MatMulAddFusion)+$")
# What the passes call the nodes around the codes of a tensor, and the runtime those that it adds.
_BORDER = re.compile(r"(\.(quantize|dequantize|dequantized|share)(\.\d+)?|_d?q)+$")
_CODERS = frozenset({"DequantizeLinear", "QuantizeLinear", "Sum"})
_LAYOUTS = frozenset({"ReorderInput", "ReorderOutput", "Transpose"})
# The time of these holds the time of the nodes in their bodies, which have events of their own.
_HOLDERS = frozenset({"If", "Loop", "Scan"})
_LOOPS = frozenset({"Loop", "Scan"})
# It takes about 50 microseconds to read an event of a profile, and onnxruntime drops what comes after a million.
_MOST_EVENTS = 100_000


@dataclass(frozen=True)
class Kernel:
    """One node of the graph, or of a body, that runs.

    Attributes:
        name: of the executed node.
        op_type: its operator.
        inputs: names of its inputs.
        outputs: names of its outputs.
        nanoseconds: time of a run, all iterations of a loop together: the median over repetitions, averaged over the
            samples, of which those count as zero that do not take its branch.
        elements: size of its first output, all iterations together, averaged likewise.
    """

    name: str
    op_type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nanoseconds: float
    elements: float


@dataclass(frozen=True)
class NodeTimes:
    """Times of a run by nodes and tensors of the prepared model, in nanoseconds.

    Attributes:
        nodes: by node; the time of a kernel that several were fused into counts at the one that holds a weight.
        borders: time of QuantizeLinear, DequantizeLinear and changes of layout, by tensor.
        elements: size of the output of nodes that run.
        rest: time of kernels that could not be traced to a node.
    """

    nodes: Mapping[str, float]
    borders: Mapping[str, float]
    elements: Mapping[str, float]
    rest: float

    @property
    def total(self) -> float:
        """The time of all kernels."""
        return sum(self.nodes.values()) + sum(self.borders.values()) + self.rest


def profile_kernels(model: Path, samples: Sequence[Sample], folder: Path, *, repeats: int) -> tuple[Kernel, ...]:
    """Run a model under the runtime's profiler.

    Args:
        model: the file.
        samples: each is run ``repeats`` times, and the first of all once more before that; fewer times, and fewer of
            them, where the profile would grow too long.
        folder: where the runtime writes its files, which are removed again.
        repeats: at least one.

    Returns:
        The kernels in order of execution, those of bodies behind the node that holds them; none where a single run
        makes too many events, as long loops do.

    Raises:
        ModelError: onnxruntime refuses the model.
        DataError: a sample cannot be run.
    """
    with TemporaryDirectory(dir=folder) as scratch:
        optimized = Path(scratch) / "profiled.onnx"
        session = open_session(model, optimized_copy=optimized, profile=Path(scratch) / "profile")
        try:
            graph = onnx.load(optimized, load_external_data=False).graph
            runs_affordable = _MOST_EVENTS // max(_events_of_a_run(graph, model, samples[0], Path(scratch)), 1)
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


def _events_of_a_run(graph: onnx.GraphProto, model: Path, sample: Sample, folder: Path) -> int:
    """Return how many events a run of what the runtime made of a model makes; with loops only a run tells."""
    nodes = list(_all_nodes(graph))
    if not any(node.op_type in _LOOPS for node in nodes):
        return len(nodes)
    session = open_session(model, profile=folder / "counted")
    run(session, sample)
    with Path(session.end_profiling()).open("rb") as lines:
        return sum(1 for _ in lines)


def _all_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Yield the nodes of a graph and its bodies, a body's behind the node that holds it."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs):
                yield from _all_nodes(body)


def _events(profile: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the events of a profile, one a line: loops make too many of them to hold at once."""
    with profile.open(encoding="utf-8") as lines:
        yield from (json.loads(line.rstrip().rstrip(",")) for line in lines if line.startswith("{"))


def _runs(events: Iterable[Mapping[str, Any]]) -> list[dict[str, tuple[float, float]]]:
    """Return, for each run, nanoseconds and elements of the first output by executed node."""
    runs: list[dict[str, tuple[float, float]]] = []
    current: dict[str, tuple[float, float]] = {}
    for event in events:
        name = event["name"]
        if name == "model_run":
            runs.append(current)
            current = {}
        elif event["cat"] == "Node" and name.endswith(_SUFFIX) and event["args"].get("op_name") not in _HOLDERS:
            shapes = [
                math.prod(shape) for found in event["args"].get("output_type_shape", ()) for shape in found.values()
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
    for node in _all_nodes(graph):
        samples = [
            [found[node.name] for found in runs[start : start + repeats] if node.name in found]
            for start in range(0, len(runs), repeats)
        ]
        if any(samples):
            times = [statistics.median(time for time, _ in sample) if sample else 0.0 for sample in samples]
            sizes = [sample[0][1] if sample else 0.0 for sample in samples]
            yield Kernel(
                node.name,
                node.op_type,
                tuple(node.input),
                tuple(node.output),
                statistics.fmean(times),
                statistics.fmean(sizes),
            )


def trace_kernels(kernels: Sequence[Kernel], graph: Graph) -> NodeTimes:
    """Trace kernels back to the nodes and tensors that they stand for.

    A kernel stands for the node whose output it makes, or whose name it bears, and for all nodes in front of that one
    which no kernel stands for: these were fused into it, or have vanished.

    Args:
        kernels: of a model that was built from ``graph``, or of the graph's own.
        graph: the prepared model.

    Returns:
        The times.
    """
    everywhere = [node for scope in scopes(graph) for node in scope.nodes]
    makers = [(tensor.name, node) for node in everywhere for tensor in node.outputs if tensor.name]
    times_made = Counter(name for name, _ in makers)
    # Bodies may have tensors of the same name; their nodes have names of their own.
    by_tensor = {name: node for name, node in makers if times_made[name] == 1}
    by_name = {node.name: node for node in everywhere}
    tensors = {*by_tensor, *(tensor.name for scope in scopes(graph) for tensor in scope.inputs)}
    nodes: dict[Node, float] = defaultdict(float)
    elements: dict[Node, float] = {}
    borders: dict[str, float] = defaultdict(float)
    # Which tensor of the prepared model a tensor that only the running graph knows is another form of.
    alias: dict[str, str] = {}
    # Codes that each run computes the scale of, with the time that takes, and the nodes that share them.
    codes: dict[str, float] = {}
    sharing: dict[str, list[Node]] = defaultdict(list)
    rest = 0.0
    for kernel in kernels:
        name = _RENAMED.sub("", kernel.name)
        border = _BORDER.sub("", name)
        source = next((alias.get(one, one) for one in kernel.inputs if alias.get(one, one) in tensors), "")
        node = next((by_tensor[one] for one in kernel.outputs if one in by_tensor), None)
        if border != name and border in tensors and kernel.op_type in _CODERS:
            borders[border] += kernel.nanoseconds
            alias.update(dict.fromkeys(kernel.outputs, border))
            continue
        node = node or by_tensor.get(name) or by_name.get(name)
        if node is None and kernel.op_type in _LAYOUTS and source:
            borders[source] += kernel.nanoseconds
            alias.update(dict.fromkeys(kernel.outputs, source))
        elif node is None and kernel.op_type == "DynamicQuantizeLinear":
            codes[kernel.outputs[0]] = kernel.nanoseconds
        elif node is None:
            rest += kernel.nanoseconds
        else:
            nodes[node] += kernel.nanoseconds
            elements[node] = kernel.elements
            alias.update(dict.fromkeys(kernel.outputs, node.outputs[0].name))
            for one in codes.keys() & set(kernel.inputs):
                sharing[one].append(node)
    for one, time in codes.items():
        for node in sharing[one]:
            nodes[node] += time / len(sharing[one])
        rest += 0.0 if sharing[one] else time
    holders = _holders(everywhere, nodes.keys())
    spread: dict[str, float] = defaultdict(float)
    for node, time in nodes.items():
        fused = holders.get(node, [node])
        for one in fused:
            spread[one.name] += time / len(fused)
    sizes = {node.name: size for node, size in elements.items()}
    for node, fused in holders.items():
        sizes.update({one.name: elements[node] for one in fused if one.name not in sizes})
    return NodeTimes(dict(spread), dict(borders), sizes, rest)


def _holders(everywhere: Sequence[Node], running: Iterable[Node]) -> Mapping[Node, list[Node]]:
    """Map a running node to the nodes with weights that were fused into it, itself included when it has one."""
    known = set(running)
    stands_in: dict[Node, Node] = {node: node for node in known}
    for node in reversed(everywhere):
        if node not in known:
            consumers = [
                stands_in[consumer] for tensor in node.outputs for consumer in tensor.outputs if consumer in stands_in
            ]
            if consumers:
                stands_in[node] = consumers[0]
    found: dict[Node, list[Node]] = defaultdict(list)
    for node in everywhere:
        if node in stands_in and _weighs(node):
            found[stands_in[node]].append(node)
    return found


def _weighs(node: Node) -> bool:
    operator = operator_of(node)
    return operator is not None and operator.role in (Role.COMPUTE, Role.WEIGHTED)
