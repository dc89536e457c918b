from __future__ import annotations

from onnxq.search.choosers import CHOOSERS
from onnxq.search.effort import METHODS


def test_all_methods_are_carried_out() -> None:
    # Tables are a matter of plans.
    assert (*CHOOSERS,) == tuple(name for name in METHODS if name != "tables")
