"""What a search asks for is what a laboratory measures."""

from __future__ import annotations

from onnxq.search.profiling import PlanProfiler, PlanTester, Profiler
from search.table_laboratory import Table


def test_a_laboratory_and_that_of_the_tests_measure_all_that_is_asked() -> None:
    asked = {name for one in (PlanTester, Profiler) for name in vars(one) if not name.startswith("_")}
    assert {"plan", "sqnr", "noises", "times", "speeds"} <= asked
    for profiler in (PlanProfiler, Table):
        assert asked <= set(dir(profiler))
