"""What a search asks for is what a laboratory measures."""

from __future__ import annotations

from onnxq.search.profiling import Builds, Laboratory, Measures
from search.table_laboratory import Table


def test_a_laboratory_and_that_of_the_tests_measure_all_that_is_asked() -> None:
    asked = {name for one in (Builds, Measures) for name in vars(one) if not name.startswith("_")}
    assert {"plan", "sqnr", "noises", "times", "speeds"} <= asked
    for laboratory in (Laboratory, Table):
        assert asked <= set(dir(laboratory))
