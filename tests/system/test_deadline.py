"""Deadlines: what is left until then, and earlier ones."""

from __future__ import annotations

import math

import pytest

from onnxq.system import deadline as deadline_module
from onnxq.system.deadline import NEVER, Deadline


def test_parts_of_what_is_left_end_before_what_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(deadline_module.time, "monotonic", lambda: now[0])
    whole = Deadline.within(10.0)
    part = whole.part(1 / 2, reserved=4.0)
    assert (whole.left, part.left, whole.part(1 / 2, reserved=20.0).left) == (10.0, 3.0, 0.0)
    now[0] += 5
    assert (whole.left, part.left) == (5.0, 0.0)


def test_what_never_ends_has_parts_that_never_end() -> None:
    assert NEVER.left == NEVER.part(1 / 3, reserved=60.0).left == math.inf
    assert Deadline.within(math.inf) == NEVER
