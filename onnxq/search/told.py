"""What is told of a search that has ended."""

from __future__ import annotations

import math
from collections.abc import Sequence

from onnxq.search.candidates import Candidate, points
from onnxq.search.measures import Measures
from onnxq.search.prices import SILENT, Noise, Prices
from onnxq.search.regions import find_regions, node_times
from onnxq.search.search import Outcome, Point


def outcome_of(
    best: Candidate, weighed: Sequence[Candidate], prices: Prices, noise: Noise, laboratory: Measures
) -> Outcome:
    """Return what is told of a search.

    Args:
        best: what was chosen.
        weighed: all that was tried.
        prices: by which.
        noise: that was measured; silence where none was.
        laboratory: what measured.
    """
    costs = prices.costs
    alone = () if noise is SILENT else tuple(sorted(prices.sensitivities(noise), key=lambda one: one.sqnr))
    if not laboratory.is_timed:
        return Outcome(best.plan, alone, laboratory.measured)
    measured = costs.floats, laboratory.times(best.plan)
    regions, times = find_regions(costs.graph, best.plan, *measured), node_times(best.plan, *measured)
    floats = Point(0, 0, costs.floats.total / 1e6, math.inf, 1.0, is_float=True)
    frontier = tuple(sorted((*points(weighed, best), floats), key=lambda one: one.milliseconds))
    return Outcome(best.plan, alone, laboratory.measured, frontier, regions, times)
