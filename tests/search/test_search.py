"""What nodes may become whose quantized values cost time or fidelity."""

from __future__ import annotations

import pytest
from onnx import ModelProto

from onnxq.config.scheme import Mode
from onnxq.planning.plan import Demotion
from onnxq.search.search import FINER, Demotions, as_stored, backward_elimination, slower, without_integers


def test_a_slow_model_keeps_no_integers_but_what_was_demoted_stays_so(residual: ModelProto, plan_of) -> None:
    def planner(demotions):
        return plan_of(residual, demotions=demotions)

    left = Demotion(Mode.FLOAT, "it hurts")
    decisions = without_integers(planner, planner({}), slower(0.5))({"left": left}).by_node
    assert decisions["right"].mode is Mode.STORAGE
    assert decisions["left"].mode is Mode.FLOAT


def test_storing_keeps_the_codes_that_were_found(residual: ModelProto, plan_of) -> None:
    finer = Demotion(Mode.WEIGHT_ONLY, "too coarse", weight=FINER, finer="coarse quantized values hurt")
    full = plan_of(residual, scheme="int4-block32")
    plan = plan_of(residual, scheme="int4-block32", demotions={"left": finer, "right": Demotion(Mode.FLOAT, "hurts")})
    stored = plan_of(residual, scheme="int4-block32", demotions=as_stored(plan, full, slower(0.5)))
    assert not stored.decodes
    assert (stored.by_node["right"].mode, stored.by_node["right"].reason) == (Mode.FLOAT, "hurts")
    assert stored.by_node["left"].weights[0].spec == plan.by_node["left"].weights[0].spec
    assert stored.by_node["left"].finer == "coarse quantized values hurt"
    assert stored.by_node["stem"].weights == plan.by_node["stem"].weights


# What turns out not to be needed is handed back, in few questions.

FINE, COARSE = Demotion(Mode.STORAGE, "fine"), Demotion(Mode.STORAGE, "coarse")
NODES = [f"n{index}" for index in range(16)]


@pytest.mark.parametrize("needed", [set(), {"n15"}, {"n3", "n9"}, set(NODES)])
@pytest.mark.parametrize("instead", [None, COARSE])
def test_only_what_is_needed_stays(needed: set[str], instead: Demotion | None) -> None:
    requested = []

    def is_enough(left: Demotions) -> bool:
        requested.append(left)
        return all(left.get(node) is FINE for node in needed)

    kept = backward_elimination(dict.fromkeys(NODES, FINE), dict.fromkeys(NODES, instead), is_enough, most=40)
    assert {node for node, one in kept.items() if one is FINE} == needed
    assert set(kept) == (set(NODES) if instead else needed)
    assert len(requested) <= (2 if not needed else 31)


def test_no_more_is_asked_than_may_be() -> None:
    requested = []
    kept = backward_elimination(
        dict.fromkeys(NODES, FINE), dict.fromkeys(NODES), lambda left: requested.append(left) or False, most=3
    )
    assert (len(kept), len(requested)) == (16, 3)
