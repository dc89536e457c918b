"""What turns out not to be needed is handed back, in few questions."""

from __future__ import annotations

import pytest

from onnxq.config.scheme import Mode
from onnxq.planning.plan import Demotion
from onnxq.search.search import Demotions, backward_elimination

FINE, COARSE = Demotion(Mode.STORAGE, "fine"), Demotion(Mode.STORAGE, "coarse")
NODES = [f"n{index}" for index in range(16)]


@pytest.mark.parametrize("needed", [set(), {"n15"}, {"n3", "n9"}, set(NODES)])
@pytest.mark.parametrize("instead", [None, COARSE])
def test_only_what_is_needed_stays(needed: set[str], instead: Demotion | None) -> None:
    asked = []

    def is_enough(left: Demotions) -> bool:
        asked.append(left)
        return all(left.get(node) is FINE for node in needed)

    kept = backward_elimination(dict.fromkeys(NODES, FINE), dict.fromkeys(NODES, instead), is_enough, most=40)
    assert {node for node, one in kept.items() if one is FINE} == needed
    assert set(kept) == (set(NODES) if instead else needed)
    assert len(asked) <= (2 if not needed else 31)


def test_no_more_is_asked_than_may_be() -> None:
    asked = []
    kept = backward_elimination(
        dict.fromkeys(NODES, FINE), dict.fromkeys(NODES), lambda left: asked.append(left) or False, most=3
    )
    assert (len(kept), len(asked)) == (16, 3)
