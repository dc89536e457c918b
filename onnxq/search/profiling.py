"""What is measured of a model before plans are weighed: each node's time in each mode, and the noise of codes."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Set
from dataclasses import replace

from onnxq.config.scheme import Mode
from onnxq.ir import Graph
from onnxq.planning.plan import Demotion, Plan
from onnxq.runtime.targets import Target
from onnxq.search.alternatives import Offer, alternatives, takers, wishes
from onnxq.search.costs import Costs
from onnxq.search.kernel_times import UNTIMED
from onnxq.search.measures import Measures
from onnxq.search.prices import Noise
from onnxq.system.resources import Progress

# Nodes that take less of a run in float are not worth a model that tells what else than static they could be.
_SEEN = 0.05


def profile_costs(
    laboratory: Measures,
    graph: Graph,
    target: Target,
    stores: Mapping[str, Demotion],
    *,
    latest: float,
    progress: Progress,
) -> Costs:
    """Profile the float model, the one in which all is static, and one for each alternative that any node can take.

    Args:
        laboratory: builds and measures.
        graph: the prepared graph.
        target: the runtime.
        stores: demotions that leave no node an integer kernel.
        latest: value of the monotonic clock after which no more alternatives are profiled: each takes as long as the
            model runs.
        progress: told of the stage ``profile``.

    Returns:
        The costs. Alternatives are left out whose nodes take hardly any of the time, for which no model can be built,
        such as one at the opset that they need, and whose run makes too many events for a profile.
    """
    full = laboratory.plan({})
    asked = tuple(offers_of(laboratory, full, target, stores))
    total = 2 + len(asked)
    progress("profile", 0, total)
    floats = laboratory.times(None)
    progress("profile", 1, total)
    static = laboratory.times(full)
    offers = []
    for number, one in enumerate(asked, start=2):
        progress("profile", number, total)
        mode = one.alternative.mode
        already = frozenset(other.node for other in full.decisions if other.mode is mode and other.node in one.nodes)
        taken = sum(floats.nodes.get(node, 0.0) for node in one.nodes)
        if taken > _SEEN * floats.total and time.monotonic() < latest and laboratory.expresses(one.plan):
            offers.append(replace(one, times=laboratory.times(one.plan)))
        elif already:
            # What the scheme wants can only be weighed against float where it is an offer too.
            offers.append(Offer(one.alternative, full, already, static))
    return Costs(graph, target, full, floats, static, tuple(offer for offer in offers if offer.times.nodes))


def offers_of(laboratory: Measures, full: Plan, target: Target, stores: Mapping[str, Demotion]) -> Iterator[Offer]:
    """Yield each alternative that any node can take, with a plan in which all take it that can; nothing is timed."""
    for alternative in alternatives(target):
        wished = wishes(alternative, full, target)
        nodes = takers(alternative, laboratory.plan(wished), wished.keys())
        if nodes:
            plan = laboratory.plan({**stores, **{node: wished[node] for node in nodes}})
            yield Offer(alternative, plan, nodes, UNTIMED)


def measure_noise(
    laboratory: Measures,
    full: Plan,
    stores: Mapping[str, Demotion],
    asked: Mapping[Offer, Set[str]],
    runs: int,
) -> Noise:
    """Measure what codes add in noise, with as many runs as there are for each.

    Args:
        laboratory: builds and measures.
        full: what the scheme wants.
        stores: demotions that leave no node an integer kernel.
        asked: the nodes that are asked about as what they are offered; all are asked about as what the scheme wants.
        runs: how often to run a sample, see `measure_noises`.
    """
    # What the scheme wants dynamic can always be stored.
    dynamic = [one.node for one in full.decisions if one.mode is Mode.DYNAMIC]
    static = laboratory.plan({node: stores[node] for node in dynamic})
    own = len(static.activations) + sum(bool(one.weights) for one in static.decisions)
    each = runs / max(own + sum(map(len, asked.values())), 1)
    return Noise(
        laboratory.noises(static, None, math.ceil(own * each)),
        {
            offer.alternative: laboratory.noises(offer.plan, nodes, math.ceil(len(nodes) * each))
            for offer, nodes in asked.items()
        },
    )
