"""What a page shows of a report, as plain values: nodes, the chain of their regions, causes, noise along the depth."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from onnxq.config.scheme import Granularity, Mode, Spec
from onnxq.planning.plan import Activation, Decision
from onnxq.report.figures import decibels, milliseconds
from onnxq.report.report import Report

# Of a page's chain: more could not be told apart, nor hit with a finger.
_MOST_LINKS = 120
_SHOWN_NODES = 3
_HARDLY_ANY = 0.01
_PART = "part of another"


@dataclass(frozen=True)
class NodeView:
    """A node of the prepared model.

    Attributes:
        name: of the node.
        op_type: its operator.
        mode: what happens to it.
        reason: why.
        formats: of its weights, then of what it makes.
        ranges: the range of what it multiplies, where that is codes.
        float_milliseconds: time in the float model; None where it was not measured.
        milliseconds: time in the quantized model; None likewise.
        noise: SQNR in decibels of the worst output with this node alone as codes; None where it was not measured.
        kernel: what runs for it, in words; empty where that is not known.
    """

    name: str
    op_type: str
    mode: Mode
    reason: str
    formats: str
    ranges: str
    float_milliseconds: float | None
    milliseconds: float | None
    noise: float | None
    kernel: str


@dataclass(frozen=True)
class Link:
    """Neighbouring nodes of one mode, or of several in models of many nodes.

    Attributes:
        mode: of most of them.
        first: index of the first node.
        nodes: how many there are.
        milliseconds: their time in the quantized model; None where it was not measured.
        noise: the lowest SQNR in decibels of one of them alone; None likewise.
    """

    mode: Mode
    first: int
    nodes: int
    milliseconds: float | None
    noise: float | None


@dataclass(frozen=True)
class Cause:
    """Why nodes do not run as integer kernels.

    Attributes:
        reason: in words.
        count: how many nodes it holds for.
        examples: the first of them.
        stake: what these nodes cost as they are, and what they would as codes, with figures of this run.
    """

    reason: str
    count: int
    examples: tuple[str, ...]
    stake: str


def node_views(report: Report) -> tuple[NodeView, ...]:
    """Return every node in graph order."""
    times = {one.node: one for one in report.performance.times}
    noises = noise_of(report)
    by_tensor, ran = report.plan.by_tensor, report.performance.ran

    def view(one: Decision) -> NodeView:
        time = times.get(one.node)
        return NodeView(
            one.node,
            one.op_type,
            one.mode,
            f"{one.reason} ({one.figures})" if one.figures else one.reason,
            ", ".join(dict.fromkeys(_format(weight.spec) for weight in one.weights)),
            _range(by_tensor.get(one.data)),
            time.float_milliseconds if time else None,
            time.milliseconds if time else None,
            noises.get(one.node),
            ran.get(one.node, _PART) if ran else "",
        )

    return tuple(map(view, report.plan.decisions))


def noise_of(report: Report) -> Mapping[str, float]:
    """Return the SQNR in decibels of the worst output with each node alone as codes, in its own mode where known."""
    modes = {one.node: one.mode for one in report.plan.decisions}
    found: dict[str, float] = {}
    for one in report.search.sensitivities:
        if one.mode is modes.get(one.node) or one.node not in found:
            found[one.node] = one.sqnr
    return found


def chain(nodes: Sequence[NodeView]) -> tuple[Link, ...]:
    """Return the network as a chain of regions of one mode; of very many, neighbours are taken together."""
    runs = [list(run) for _, run in groupby(enumerate(nodes), key=lambda pair: pair[1].mode)]
    each = math.ceil(len(runs) / _MOST_LINKS) or 1
    taken = ([pair for run in runs[start : start + each] for pair in run] for start in range(0, len(runs), each))
    return tuple(_link(pairs[0][0], [node for _, node in pairs]) for pairs in taken)


def _link(first: int, nodes: Sequence[NodeView]) -> Link:
    modes = [node.mode for node in nodes]
    times = [node.milliseconds for node in nodes if node.milliseconds is not None]
    noises = [node.noise for node in nodes if node.noise is not None]
    most = max(dict.fromkeys(modes), key=modes.count)
    return Link(most, first, len(nodes), sum(times) if times else None, min(noises, default=None))


def causes(nodes: Sequence[NodeView], report: Report) -> tuple[Cause, ...]:
    """Return why nodes are not static, the cause of most nodes first."""
    by_name = {node.name: node for node in nodes}
    grouped: dict[str, list[NodeView]] = {}
    for one in report.plan.decisions:
        if one.mode is not Mode.STATIC:
            grouped.setdefault(one.reason, []).append(by_name[one.node])
    total = sum(node.float_milliseconds or 0.0 for node in nodes)
    found = (
        Cause(reason, len(held), tuple(node.name for node in held[:_SHOWN_NODES]), _stake(held, total))
        for reason, held in grouped.items()
    )
    return tuple(sorted(found, key=lambda cause: -cause.count))


def _stake(nodes: Sequence[NodeView], total: float) -> str:
    """Say what time these nodes take, and what noise they would bring."""
    times = [node.float_milliseconds for node in nodes if node.float_milliseconds is not None]
    noises = [node.noise for node in nodes if node.noise is not None and math.isfinite(node.noise)]
    told = []
    if noises:
        told.append(f"as codes the noisiest alone leaves {decibels(min(noises))}")
    if times and total:
        share = sum(times) / total
        little = ": little to win" if share < _HARDLY_ANY else ""
        told.append(f"in float they take {milliseconds(sum(times))}, {share:.1%} of the model{little}")
    return "; ".join(told)


@dataclass(frozen=True)
class Depth:
    """Noise at a node of the graph's order.

    Attributes:
        index: of the node.
        name: of the node.
        alone: SQNR in decibels of the worst output with this node alone as codes.
        together: the same of all nodes up to this one, if their noise adds.
    """

    index: int
    name: str
    alone: float
    together: float


def noise_along(nodes: Sequence[NodeView]) -> tuple[Depth, ...]:
    """Return the noise of nodes whose codes were measured alone, in graph order, and what it adds up to.

    Independent errors add in energy, so SQNRs of ``d`` decibels add as ``10 ** (-d / 10)``. Nodes in float add nothing.
    """
    coded = [
        (index, node.name, node.noise)
        for index, node in enumerate(nodes)
        if node.mode is not Mode.FLOAT and node.noise is not None and math.isfinite(node.noise)
    ]
    sums = accumulate(10 ** (-noise / 10) for _, _, noise in coded)
    return tuple(
        Depth(index, name, noise, -10 * math.log10(energy))
        for (index, name, noise), energy in zip(coded, sums, strict=True)
    )


def node_rows(nodes: Sequence[NodeView]) -> Iterator[list[object]]:
    """Yield each node's fields; the words that many nodes share stand once, see `shared_words`."""
    words = {word: index for index, word in enumerate(shared_words(nodes))}
    for node in nodes:
        figures = map(_figure, (node.float_milliseconds, node.milliseconds, node.noise))
        yield [node.name, *(words[word] for word in _words(node)), *figures]


def shared_words(nodes: Sequence[NodeView]) -> tuple[str, ...]:
    """Return the operators, modes, reasons, formats, ranges and kernels, each once."""
    return tuple(dict.fromkeys(word for node in nodes for word in _words(node)))


def _words(node: NodeView) -> tuple[str, ...]:
    return node.op_type, str(node.mode), node.reason, node.formats, node.ranges, node.kernel


def _figure(value: float | None) -> float | None:
    """Return a figure in as many digits as a page tells apart; None where there is none to show."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")


def _format(spec: Spec) -> str:
    per = str(spec.per) if isinstance(spec.per, Granularity) else "x".join(map(str, spec.per))
    return f"{spec.format} per {per}" if isinstance(spec.per, Granularity) else f"{spec.format} blocks of {per}"


def _range(activation: Activation | None) -> str:
    if activation is None:
        return ""
    known = activation.known_range
    where = f" {known[0]:.4g} to {known[1]:.4g}" if known else ""
    return f"{activation.spec.format}{where}{f' by {activation.ranges}' if activation.ranges else ''}"
