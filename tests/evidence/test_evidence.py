from __future__ import annotations

from functools import reduce

import numpy as np
import pytest

from onnxq.evidence.observer import observe
from onnxq.evidence.statistics import Accumulation, Statistics


def statistics(samples: int, **tensors: list[float]) -> Statistics:
    return Statistics(samples, {name: observe(np.array(values, np.float64)) for name, values in tensors.items()})


def test_statistics_merge_by_tensor_name() -> None:
    merged = statistics(1, a=[1], b=[2]).merge(statistics(2, b=[4], c=[5]))
    assert merged == statistics(3, a=[1], b=[2, 4], c=[5])


def test_joining_keeps_the_tensors_of_both() -> None:
    joined = statistics(2, a=[1]).join(statistics(2, b=[2]))
    assert joined == statistics(2, a=[1], b=[2])
    assert joined.select(["b"]) == statistics(2, b=[2])


@pytest.mark.parametrize("level", [1, 3, 1024])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 8, 13])
def test_accumulating_is_merging_one_by_one(count: int, level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxq.evidence.statistics._LEVEL", level)
    parts = [statistics(1, a=[float(index)], b=[-1.0, index / 3]) for index in range(count)]
    sum_of_parts = Accumulation()
    for index, part in enumerate(parts):
        sum_of_parts.add(part)
        assert sum_of_parts.total() == reduce(Statistics.merge, parts[: index + 1])
    assert sum_of_parts.total().samples == count
