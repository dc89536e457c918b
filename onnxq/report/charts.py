"""Where the marks of a chart stand, in the units of its drawing; the templates draw them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from onnxq.evaluation.layers import Layer
from onnxq.report.figures import decibels
from onnxq.report.views import Depth
from onnxq.search.search import Point

WIDTH, HEIGHT = 720, 300
# On the left there is room for the larger letters of narrow screens.
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 20, 16, 44
_TICKS = 5
_STEPS = (1.0, 2.0, 5.0, 10.0)
# Marks beyond cannot be told apart.
_MOST_MARKS = 240


@dataclass(frozen=True)
class Tick:
    """A line of the grid.

    Attributes:
        at: where it stands.
        text: what it says.
    """

    at: float
    text: str


@dataclass(frozen=True)
class Mark:
    """A point of a chart.

    Attributes:
        x: from the left.
        y: from the top.
        kind: how it is drawn.
        told: what it says when pointed at.
    """

    x: float
    y: float
    kind: str
    told: str


@dataclass(frozen=True)
class Chart:
    """A chart with two axes.

    Attributes:
        marks: its points.
        across: ticks of the horizontal axis.
        up: ticks of the vertical axis.
        lines: points of lines, by their class, as SVG takes them.
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
    """Return some five round numbers between two numbers.

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
    """Return the plans that were weighed: expected time across, SQNR of the worst output up.

    Args:
        points: of which those with neither a measured nor an expected SQNR are left out, and the float model likewise.
        wanted: SQNR in decibels that was asked for, drawn as a line; None draws none.

    Returns:
        The chart; None where there are no points.
    """
    found = [(one, one.predicted if one.sqnr is None else one.sqnr) for one in points if not one.is_float]
    shown = [(one, sqnr) for one, sqnr in found if sqnr is not None and math.isfinite(sqnr)]
    if not shown:
        return None
    times = [one.milliseconds for one in points]
    goals = [wanted] if wanted is not None and math.isfinite(wanted) else []
    across, up = _Scale.across(0.0, max(times)), _Scale.up([*goals, *(sqnr for _, sqnr in shown)])
    marks = [
        Mark(across(one.milliseconds), up(sqnr), _kind(one), _told(one, sqnr))
        for one, sqnr in sorted(shown, key=lambda pair: pair[0].chosen)
    ]
    floats = [one.milliseconds for one in points if one.is_float]
    lines = [("float", f"{across(ms):.1f},{_TOP} {across(ms):.1f},{HEIGHT - _BOTTOM}") for ms in floats]
    lines += [("wanted", f"{_LEFT},{up(goal):.1f} {WIDTH - _RIGHT},{up(goal):.1f}") for goal in goals]
    return Chart(tuple(marks), across.ticks("ms"), up.ticks("dB"), tuple(lines))


def _kind(point: Point) -> str:
    return "chosen" if point.chosen else "expected" if point.sqnr is None else "measured"


def _told(point: Point, sqnr: float) -> str:
    counts = (("static", point.static), ("dynamic", point.dynamic), ("weight-only", point.weight_only))
    nodes = ", ".join(f"{count} {mode}" for mode, count in counts if count) or "no integers"
    speed = "" if point.speed is None else f", {point.speed:.2f}x as fast"
    kind = {"chosen": "taken: ", "expected": "expected: ", "measured": ""}[_kind(point)]
    return f"{kind}{nodes}; {point.milliseconds:.3g} ms, {decibels(sqnr)}{speed}"


def noise_chart(depths: Sequence[Depth], nodes: int) -> Chart | None:
    """Return the noise of nodes along the depth: alone as points, added up as a line.

    Args:
        depths: the nodes that were measured.
        nodes: how many the model has.
    """
    if not depths:
        return None
    across = _Scale.across(0.0, max(nodes - 1, 1))
    up = _Scale.up([value for one in depths for value in (one.alone, one.together)])
    each = math.ceil(len(depths) / _MOST_MARKS)
    # Of neighbours that fall together the noisiest tells most.
    worst = [min(depths[start : start + each], key=lambda one: one.alone) for start in range(0, len(depths), each)]
    marks = tuple(
        Mark(across(one.index), up(one.alone), "measured", f"{one.name}: {decibels(one.alone)} alone") for one in worst
    )
    line = " ".join(f"{across(one.index):.1f},{up(one.together):.1f}" for one in depths[::each])
    last = f"{across(depths[-1].index):.1f},{up(depths[-1].together):.1f}"
    return Chart(marks, across.ticks(""), up.ticks("dB"), (("together", f"{line} {last}"),))


def layer_chart(layers: Sequence[Layer]) -> Chart | None:
    """Return the noise of layers in order of execution: isolated as points, accumulated as a line."""
    depths = [
        Depth(index, one.tensor, one.isolated, one.accumulated)
        for index, one in enumerate(layers)
        if math.isfinite(one.isolated) and math.isfinite(one.accumulated)
    ]
    return noise_chart(depths, len(layers))


@dataclass(frozen=True)
class _Scale:
    """From values to places."""

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
