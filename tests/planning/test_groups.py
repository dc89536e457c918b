from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from onnxq.planning.activations import Groups

PAIRS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=30)


@given(PAIRS)
def test_groups_are_the_connected_components(pairs: list[tuple[int, int]]) -> None:
    groups = Groups[int]()
    component = {item: {item} for item in range(13)}
    for first, second in pairs:
        groups.join(first, second)
        merged = component[first] | component[second]
        component.update(dict.fromkeys(merged, merged))
    for one in range(13):
        assert groups.find(one) in component[one]
        for other in range(13):
            assert (groups.find(one) == groups.find(other)) == (other in component[one])


@given(PAIRS, st.integers(0, 12), st.integers(0, 12))
def test_the_first_group_keeps_its_representative(pairs: list[tuple[int, int]], first: int, second: int) -> None:
    groups = Groups[int]()
    for pair in pairs:
        groups.join(*pair)
    before = groups.find(first)
    groups.join(first, second)
    assert groups.find(second) == groups.find(first) == before
