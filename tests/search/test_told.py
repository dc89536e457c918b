"""What is told of a search is what was measured in it."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from onnx import ModelProto

from onnxq.runtime.targets import target_named
from onnxq.search.cost_model import CostModel
from onnxq.search.frontier import WeighedPlan, summarize_search
from onnxq.search.sensitivity import QuantizerId, Sensitivities
from onnxq.search.tradeoff import UNMEASURED, CostTradeoff, OptionSensitivities
from search.table_laboratory import NODES, Table, products_of


class Untimed(Table):
    """A laboratory whose times nobody took."""

    is_timed = False


def test_times_are_told_where_they_were_taken(build: Callable[..., ModelProto]) -> None:
    table = Table(products_of(build), dict.fromkeys(NODES, 9e5), dict.fromkeys(NODES, 3e5), {})
    full = table.plan({})
    costs = CostModel(table.graph, target_named("onnxruntime-cpu"), full, table.times(None), table.times(full))
    prices = CostTradeoff(costs)
    best = WeighedPlan(prices.planned(full, UNMEASURED), full, 0.0, frozenset(), sqnr=30.0, speed=2.0)
    noise = OptionSensitivities(
        Sensitivities(
            {QuantizerId("c0", is_node=True): np.array([0.01]), QuantizerId("c1", is_node=True): np.array([0.1])}
        )
    )
    told = summarize_search(best, [best], prices, noise, table)
    assert [(point.sqnr, point.is_float) for point in told.frontier] == [(30.0, False), (math.inf, True)]
    assert [one.node for one in told.sensitivities[:2]] == ["c1", "c0"]
    assert len(told.regions) == 1
    assert len(told.times) == len(NODES)
    estimated = summarize_search(best, [best], prices, noise, Untimed(**vars(table)))
    assert (estimated.frontier, estimated.regions, estimated.times) == ((), (), ())
    assert (estimated.plan, estimated.sensitivities) == (told.plan, told.sensitivities)
