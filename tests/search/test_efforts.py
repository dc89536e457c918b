"""How much each kind of search measures."""

from __future__ import annotations

import pytest

from onnxq.errors import SchemeError
from onnxq.search.efforts import EFFORTS, effort_named


def test_full_measures_more_than_fast_and_off_nothing() -> None:
    fast, full = EFFORTS["fast"], EFFORTS["full"]
    assert EFFORTS["off"] is None
    assert fast is not None
    assert full is not None
    for name in ("noise", "tried", "grown", "timed", "refinements", "seconds"):
        assert getattr(full, name) > getattr(fast, name)


@pytest.mark.parametrize("name", list(EFFORTS))
def test_each_is_found_by_its_name(name: str) -> None:
    assert effort_named(name) is EFFORTS[name]


def test_an_unknown_effort_suggests_the_nearest() -> None:
    with pytest.raises(SchemeError, match="search 'fats' is not one of off, fast, full; did you mean 'fast'"):
        effort_named("fats")
