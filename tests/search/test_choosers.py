from __future__ import annotations

from onnxq.config.effort import METHODS
from onnxq.search.refinement import CHOOSERS


def test_all_methods_are_carried_out() -> None:
    # Tables are a matter of plans.
    assert (*CHOOSERS,) == tuple(name for name in METHODS if name != "tables")
