"""How many cores there are, on systems that say which of them a process may use and on others, and work on all."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from onnxq.system.cores import available_cores, each_at_once


def test_those_count_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {1, 3, 4}, raising=False)
    assert available_cores() == 3


@pytest.mark.parametrize(("counted", "cores"), [(8, 8), (None, 1)])
def test_all_count_where_the_system_says_no_more(
    counted: int | None, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: counted)
    assert available_cores() == cores


def test_as_many_are_worked_on_at_once_as_there_are_cores_and_come_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxq.system.cores.available_cores", lambda: 2)
    both = threading.Barrier(2, timeout=10)

    def work(given: int) -> int:
        # Alone it would wait for ever.
        both.wait()
        return -given

    assert list(each_at_once(work, [3, 1, 2, 0])) == [-3, -1, -2, 0]


def test_no_more_are_taken_than_are_worked_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxq.system.cores.available_cores", lambda: 2)
    taken = []

    def given() -> Iterator[int]:
        for one in range(100):
            taken.append(one)
            yield one

    found = each_at_once(abs, given())
    assert (next(found), taken) == (0, [0, 1, 2])


def test_what_work_raises_is_raised_in_its_place() -> None:
    found = each_at_once(lambda one: 1 // one, [1, 0, 1])
    assert next(found) == 1
    with pytest.raises(ZeroDivisionError):
        next(found)
