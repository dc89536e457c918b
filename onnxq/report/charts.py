"""Charts of a report as plain values: nodes, the chain of their regions, causes, and SQNR along the depth."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from onnxq.config.scheme import Mode
from onnxq.evaluation.layers import Layer
from onnxq.numerics.affine import decibels, ratio_of_sqnr, sqnr_of_ratio
from onnxq.planning.plan import Activation, Decision
from onnxq.report.formatting import milliseconds, plural
from onnxq.report.report import Report, describe_spec
from onnxq.search.results import Point

# Of a page's chain: more links could not be distinguished, or hit with a finger.
_MOST_LINKS = 120
_SHOWN_NODES = 3
_HARDLY_ANY = 0.01
_PART = "part of another"
# Decibels over which the colour of an error fades.
_FADE = 40.0


@dataclass(frozen=True)
class NodeView:
    """A node of the prepared model.

    Attributes:
        formats: of its weights.
        ranges: format and range of the activation that it multiplies, if that is quantized.
        float_milliseconds: time in the float model; None if not measured.
        milliseconds: time in the quantized model; None if not measured.
        sqnr: SQNR in decibels of the worst output with this node alone quantized; None if not measured.
        kernel: operators of its kernels, or that it is part of another; empty if not known.
    """

    name: str
    op_type: str
    mode: Mode
    reason: str
    formats: str
    ranges: str
    float_milliseconds: float | None
    milliseconds: float | None
    sqnr: float | None
    kernel: str


@dataclass(frozen=True)
class Link:
    """Neighbouring nodes of one mode, a block of the chain; in models of many regions, of several modes.

    Attributes:
        mode: of most of them.
        first: index of the first node.
        nodes: number of nodes.
        tooltip: mode, nodes, time, and the lowest SQNR of one of them alone.
        grow: relative width: by time, or by nodes if no node was timed.
        time: mean time of a node beside that of the slowest link, 0 to 1.
        error: of its node of the lowest SQNR, 0 to 1.
    """

    mode: Mode
    first: int
    nodes: int
    tooltip: str
    grow: float
    time: float
    error: float


@dataclass(frozen=True)
class Cause:
    """Why nodes do not run as integer kernels.

    Attributes:
        count: number of nodes with this reason.
        examples: the first of them.
        stake: what they cost in float, and the SQNR they would leave if quantized, measured in this run.
    """

    reason: str
    count: int
    examples: tuple[str, ...]
    stake: str


def node_views(report: Report) -> tuple[NodeView, ...]:
    """Return every node in graph order."""
    times = {time.node: time for time in report.performance.times}
    sqnrs = sqnr_by_node(report)
    by_tensor, ran = report.plan.by_tensor, report.performance.ran

    def view(decision: Decision) -> NodeView:
        time = times.get(decision.node)
        return NodeView(
            decision.node,
            decision.op_type,
            decision.mode,
            f"{decision.reason} ({decision.figures})" if decision.figures else decision.reason,
            ", ".join(dict.fromkeys(describe_spec(weight.spec) for weight in decision.weights)),
            _range(by_tensor.get(decision.data)),
            time.float_milliseconds if time else None,
            time.milliseconds if time else None,
            sqnrs.get(decision.node),
            ran.get(decision.node, _PART) if ran else "",
        )

    return tuple(map(view, report.plan.decisions))


def sqnr_by_node(report: Report) -> Mapping[str, float]:
    """Return the SQNR in decibels of the worst output with each node alone quantized, in its own mode if measured."""
    modes = {decision.node: decision.mode for decision in report.plan.decisions}
    worst: dict[str, float] = {}
    for sensitivity in report.search.sensitivities:
        if sensitivity.mode is modes.get(sensitivity.node) or sensitivity.node not in worst:
            worst[sensitivity.node] = sensitivity.sqnr
    return worst


def chain(nodes: Sequence[NodeView]) -> tuple[Link, ...]:
    """Return the network as a chain of regions of one mode; very many regions are merged with their neighbours."""
    runs = [list(run) for _, run in groupby(enumerate(nodes), key=lambda pair: pair[1].mode)]
    each = math.ceil(len(runs) / _MOST_LINKS) or 1
    regions = [[pair for run in runs[start : start + each] for pair in run] for start in range(0, len(runs), each)]
    times = [_sum(node.milliseconds for _, node in region) for region in regions]
    sqnrs = [min((node.sqnr for _, node in region if node.sqnr is not None), default=None) for region in regions]
    timed = any(time is not None for time in times)
    slowest = max(((time or 0.0) / len(region) for time, region in zip(times, regions, strict=True)), default=0.0)
    worst = min((sqnr for sqnr in sqnrs if sqnr is not None and math.isfinite(sqnr)), default=0.0)
    links = []
    for region, time, sqnr in zip(regions, times, sqnrs, strict=True):
        modes = [node.mode for _, node in region]
        mode, (first, start) = max(dict.fromkeys(modes), key=modes.count), region[0]
        tooltip = f"{mode}: {plural(len(region), 'node')} from {start.name}"
        tooltip += f", {milliseconds(time)}" if time is not None else ""
        tooltip += f", lowest SQNR alone {decibels(sqnr)}" if sqnr is not None else ""
        grow = (time or 0.0) * 1e3 if timed else len(region)
        mean = (time or 0.0) / len(region) / (slowest or 1.0)
        error = 0.0 if sqnr is None else min(max((worst + _FADE - sqnr) / _FADE, 0.0), 1.0)
        links.append(Link(mode, first, len(region), tooltip, round(max(grow, 1.0), 1), round(mean, 3), round(error, 3)))
    return tuple(links)


def _sum(times: Iterable[float | None]) -> float | None:
    """Return the sum of the times that were measured; None if none was."""
    measured = [time for time in times if time is not None]
    return sum(measured) if measured else None


def causes(nodes: Sequence[NodeView], report: Report) -> tuple[Cause, ...]:
    """Return why nodes are not static, the cause of most nodes first."""
    by_name = {node.name: node for node in nodes}
    grouped: dict[str, list[NodeView]] = {}
    for decision in report.plan.decisions:
        if decision.mode is not Mode.STATIC:
            grouped.setdefault(decision.reason, []).append(by_name[decision.node])
    total = sum(node.float_milliseconds or 0.0 for node in nodes)
    groups = (
        Cause(reason, len(held), tuple(node.name for node in held[:_SHOWN_NODES]), _stake(held, total))
        for reason, held in grouped.items()
    )
    return tuple(sorted(groups, key=lambda cause: -cause.count))


def _stake(nodes: Sequence[NodeView], total: float) -> str:
    """Describe the time of these nodes, and the lowest SQNR of one of them alone."""
    times = [node.float_milliseconds for node in nodes if node.float_milliseconds is not None]
    sqnrs = [node.sqnr for node in nodes if node.sqnr is not None and math.isfinite(node.sqnr)]
    parts = []
    if sqnrs:
        parts.append(f"if it alone is quantized, the lowest SQNR is {decibels(min(sqnrs))}")
    if times and total:
        share = sum(times) / total
        little = ": little to win" if share < _HARDLY_ANY else ""
        parts.append(f"in float they take {milliseconds(sum(times))}, {share:.1%} of the model{little}")
    return "; ".join(parts)


@dataclass(frozen=True)
class Depth:
    """The quantization error at a node in graph order.

    Attributes:
        index: of the node.
        name: of the node.
        alone: SQNR in decibels of the worst output with this node alone quantized.
        together: the same for all nodes up to this one, if their errors add.
    """

    index: int
    name: str
    alone: float
    together: float


def sqnr_along(nodes: Sequence[NodeView]) -> tuple[Depth, ...]:
    """Return the SQNR of nodes that were measured alone, in graph order, and of their sum.

    The energies of independent errors add: an SQNR of ``d`` decibels adds ``10 ** (-d / 10)``. Nodes in float add
    nothing.
    """
    quantized = [
        (index, node.name, node.sqnr)
        for index, node in enumerate(nodes)
        if node.mode is not Mode.FLOAT and node.sqnr is not None and math.isfinite(node.sqnr)
    ]
    sums = accumulate(ratio_of_sqnr(sqnr) for _, _, sqnr in quantized)
    return tuple(
        Depth(index, name, sqnr, sqnr_of_ratio(energy))
        for (index, name, sqnr), energy in zip(quantized, sums, strict=True)
    )


def node_rows(nodes: Sequence[NodeView]) -> Iterator[list[object]]:
    """Yield each node's fields; text that nodes share is an index into `shared_words`."""
    words = {word: index for index, word in enumerate(shared_words(nodes))}
    for node in nodes:
        figures = map(_figure, (node.float_milliseconds, node.milliseconds, node.sqnr))
        yield [node.name, *(words[word] for word in _words(node)), *figures]


def shared_words(nodes: Sequence[NodeView]) -> tuple[str, ...]:
    """Return the operators, modes, reasons, formats, ranges and kernels, each once."""
    return tuple(dict.fromkeys(word for node in nodes for word in _words(node)))


def _words(node: NodeView) -> tuple[str, ...]:
    return node.op_type, str(node.mode), node.reason, node.formats, node.ranges, node.kernel


def _figure(value: float | None) -> float | None:
    """Return a number rounded to the digits that a page shows; None if there is none."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")


def _range(activation: Activation | None) -> str:
    if activation is None:
        return ""
    span = activation.known_range
    where = f" {span[0]:.4g} to {span[1]:.4g}" if span else ""
    return f"{activation.spec.format}{where}{f' by {activation.ranges}' if activation.ranges else ''}"


# Positions of the marks of a chart, in units of its drawing; the templates draw them.

WIDTH, HEIGHT = 720, 300
# The left margin fits the larger letters of narrow screens.
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 20, 16, 44
_TICKS = 5
_STEPS = (1.0, 2.0, 5.0, 10.0)
# More marks cannot be distinguished.
_MOST_MARKS = 240


@dataclass(frozen=True)
class Tick:
    """A line of the grid, with its position and text."""

    at: float
    text: str


@dataclass(frozen=True)
class Mark:
    """A point of a chart.

    Attributes:
        x: from the left.
        y: from the top.
        kind: CSS class.
        tooltip: tooltip.
    """

    x: float
    y: float
    kind: str
    tooltip: str


@dataclass(frozen=True)
class Chart:
    """A chart with two axes.

    Attributes:
        marks: its points.
        across: ticks of the horizontal axis.
        up: ticks of the vertical axis.
        lines: CSS class and SVG points of each line.
    """

    marks: tuple[Mark, ...]
    across: tuple[Tick, ...]
    up: tuple[Tick, ...]
    lines: tuple[tuple[str, str], ...] = ()
    width: int = WIDTH
    height: int = HEIGHT

    @property
    def frame(self) -> tuple[int, int, int, int]:
        """Left, top, right and bottom of the plot."""
        return _LEFT, _TOP, WIDTH - _RIGHT, HEIGHT - _BOTTOM


def ticks(low: float, high: float) -> tuple[float, ...]:
    """Return about five round numbers between two numbers.

    >>> ticks(0.0, 1.0)
    (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    """
    if not high > low:
        return (low,)
    rough = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in _STEPS if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return tuple(round(index * step, 12) for index in range(first, math.floor(high / step + 1e-9) + 1))


def frontier_chart(points: Sequence[Point], wanted: float | None = None) -> Chart | None:
    """Return the evaluated plans: expected time across, SQNR of the worst output up.

    Points without a measured or an expected SQNR, and the float model, get no mark.

    Args:
        points: the plans.
        wanted: the wanted SQNR in decibels, drawn as a line; None draws none.

    Returns:
        None if there are no points.
    """
    rated = [(point, point.predicted if point.sqnr is None else point.sqnr) for point in points if not point.is_float]
    shown = [(point, sqnr) for point, sqnr in rated if sqnr is not None and math.isfinite(sqnr)]
    if not shown:
        return None
    times = [point.milliseconds for point in points]
    goals = [wanted] if wanted is not None and math.isfinite(wanted) else []
    across, up = _Scale.across(0.0, max(times)), _Scale.up([*goals, *(sqnr for _, sqnr in shown)])
    marks = [
        Mark(across(point.milliseconds), up(sqnr), _kind(point), _tooltip(point, sqnr))
        for point, sqnr in sorted(shown, key=lambda pair: pair[0].chosen)
    ]
    floats = [point.milliseconds for point in points if point.is_float]
    lines = [("float", f"{across(ms):.1f},{_TOP} {across(ms):.1f},{HEIGHT - _BOTTOM}") for ms in floats]
    lines += [("wanted", f"{_LEFT},{up(goal):.1f} {WIDTH - _RIGHT},{up(goal):.1f}") for goal in goals]
    return Chart(tuple(marks), across.ticks("ms"), up.ticks("dB"), tuple(lines))


def _kind(point: Point) -> str:
    return "chosen" if point.chosen else "expected" if point.sqnr is None else "measured"


def _tooltip(point: Point, sqnr: float) -> str:
    counts = (("static", point.static), ("dynamic", point.dynamic), ("weight-only", point.weight_only))
    nodes = ", ".join(f"{count} {mode}" for mode, count in counts if count) or "no integers"
    speed = "" if point.speed is None else f", {point.speed:.2f}x as fast"
    kind = {"chosen": "taken: ", "expected": "expected: ", "measured": ""}[_kind(point)]
    return f"{kind}{nodes}; {point.milliseconds:.3g} ms, {decibels(sqnr)}{speed}"


def sqnr_chart(depths: Sequence[Depth], nodes: int) -> Chart | None:
    """Return the SQNR of nodes along the depth: alone as points, added up as a line.

    Args:
        depths: the nodes that were measured.
        nodes: number of nodes of the model.
    """
    if not depths:
        return None
    across = _Scale.across(0.0, max(nodes - 1, 1))
    up = _Scale.up([value for depth in depths for value in (depth.alone, depth.together)])
    each = math.ceil(len(depths) / _MOST_MARKS)
    # Of neighbours at the same place, the lowest matters most.
    worst = [min(depths[start : start + each], key=lambda depth: depth.alone) for start in range(0, len(depths), each)]
    marks = tuple(
        Mark(across(place.index), up(place.alone), "measured", f"{place.name}: {decibels(place.alone)} alone")
        for place in worst
    )
    line = " ".join(f"{across(depth.index):.1f},{up(depth.together):.1f}" for depth in depths[::each])
    last = f"{across(depths[-1].index):.1f},{up(depths[-1].together):.1f}"
    return Chart(marks, across.ticks(""), up.ticks("dB"), (("together", f"{line} {last}"),))


def layer_chart(layers: Sequence[Layer]) -> Chart | None:
    """Return the SQNR of layers in order of execution: isolated as points, accumulated as a line."""
    depths = [
        Depth(index, layer.tensor, layer.isolated, layer.accumulated)
        for index, layer in enumerate(layers)
        if math.isfinite(layer.isolated) and math.isfinite(layer.accumulated)
    ]
    return sqnr_chart(depths, len(layers))


@dataclass(frozen=True)
class _Scale:
    low: float
    high: float
    start: float
    end: float

    @classmethod
    def across(cls, low: float, high: float) -> _Scale:
        return cls(low, high * 1.04 or 1.0, _LEFT, WIDTH - _RIGHT)

    @classmethod
    def up(cls, values: Sequence[float]) -> _Scale:
        margin = max((max(values) - min(values)) * 0.12, 1.0)
        return cls(min(values) - margin, max(values) + margin, HEIGHT - _BOTTOM, _TOP)

    def __call__(self, value: float) -> float:
        return round(self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start), 1)

    def ticks(self, unit: str) -> tuple[Tick, ...]:
        return tuple(Tick(self(value), f"{value:g} {unit}".strip()) for value in ticks(self.low, self.high))
