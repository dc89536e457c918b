"""Which models are profiled before a search, so that every node's time in every mode is known."""

from __future__ import annotations

import time
from collections.abc import Mapping

from onnxq.graph import Graph
from onnxq.planning.plan import Demotion
from onnxq.progress import Progress
from onnxq.searching.alternatives import Offer, alternatives, takers, wishes
from onnxq.searching.costs import Costs
from onnxq.searching.measures import Measures
from onnxq.targets import Target


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
        The costs. Alternatives for which no model can be built, such as one at the opset that they need, and those
        whose run makes too many events for a profile, are left out.
    """
    full = laboratory.plan({})
    asked = []
    for alternative in alternatives(target):
        wished = wishes(alternative, full, target)
        nodes = takers(alternative, laboratory.plan(wished), wished.keys())
        if nodes:
            asked.append((alternative, laboratory.plan({**stores, **{node: wished[node] for node in nodes}}), nodes))
    total = 2 + len(asked)
    progress("profile", 0, total)
    floats = laboratory.times(None)
    progress("profile", 1, total)
    static = laboratory.times(full)
    offers = []
    for number, (alternative, plan, nodes) in enumerate(asked, start=2):
        progress("profile", number, total)
        already = frozenset(one.node for one in full.decisions if one.mode is alternative.mode and one.node in nodes)
        if time.monotonic() < latest and laboratory.expresses(plan):
            offers.append(Offer(alternative, plan, nodes, laboratory.times(plan)))
        elif already:
            # What the scheme wants can only be weighed against float where it is an offer too.
            offers.append(Offer(alternative, full, already, static))
    return Costs(graph, target, full, floats, static, tuple(offer for offer in offers if offer.times.nodes))
