"""Arrays are shown to what is wanted of their tensor."""

from __future__ import annotations

import numpy as np
from observations import KINDS

from onnxq.calibration.accumulators import Range, Request
from onnxq.calibration.kinds import Observers
from onnxq.calibration.statistics import observe


def test_tensors_of_which_nothing_is_wanted_and_empty_arrays_are_passed_over() -> None:
    found = observe({"a": np.float32([1]), "b": np.array(["text"]), "c": np.zeros(0)}, [Request("c", "range")], "s")
    assert (found.samples, found.statistics) == (("s",), {Request("c", "range"): Range()})


def test_all_kinds_of_a_tensor_see_the_same_array_once(monkeypatch) -> None:
    looks = []
    monkeypatch.setattr("onnxq.calibration.accumulators.ends_of", lambda values: looks.append(1) or (0.0, 1.0))
    observers = Observers([Request.of("t", kind) for kind in KINDS])
    observers.add("t", np.float32([0, 1]), "ab")
    assert len(looks) == 1
    assert [request.kind for request in observers.statistics()] == list(KINDS)


def test_what_is_taken_begins_anew_and_the_rest_goes_on() -> None:
    apart, rest, parts = Request("t", "range"), Request("t", "histogram"), ([0.5, 2.0], [-1.0])
    observers = Observers([apart, rest])
    for part in parts:
        observers.add("t", np.float32(part))
        assert observers.taken([apart]) == observe({"t": np.float32(part)}, [apart]).statistics
    whole = observe({"t": np.float32([0.5, 2.0, -1.0])}, [rest]).statistics
    assert observers.statistics() == {apart: Range(), **whole}
