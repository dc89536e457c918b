"""How many cores there are, on systems that say which of them a process may use and on others."""

from __future__ import annotations

import os

import pytest

from onnxq.cores import available_cores


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
