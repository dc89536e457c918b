"""Channels of tensors in bodies."""

from __future__ import annotations

import numpy as np
from conftest import Build

from onnxq.calibration.accumulators import ChannelRanges, Request
from onnxq.calibration.collect import collect
from onnxq.calibration.instrument import ChannelAxis, expose_channels

BRANCHES = """(float[2,3,4] x, bool c) => (float[2,3,4] y)
{ y = If (c) <then_branch = yes () => (float[2,3,4] t) { inner = Neg(x) t = Relu(inner) },
              else_branch = no () => (float[2,3,4] e) { e = Identity(x) }> }"""


def test_channels_of_a_body_are_told_apart(build: Build) -> None:
    model = build(BRANCHES)
    tapped, matrices = expose_channels(model, {"inner": ChannelAxis(1, 3, 3)})
    x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    request = Request(matrices["inner"], "channel-ranges", 1)
    found = collect(tapped, [{"x": x, "c": np.array(True)}], [request])
    ends = found.of(request.tensor).need(ChannelRanges, 1).ends
    np.testing.assert_array_equal(ends, np.stack([(-x).min((0, 2)), (-x).max((0, 2))], 1))


def test_a_body_that_does_not_run_gives_nothing(build: Build) -> None:
    tapped, matrices = expose_channels(build(BRANCHES), {"inner": ChannelAxis(1, 3, 3)})
    x = np.zeros((2, 3, 4), np.float32)
    request = Request(matrices["inner"], "channel-ranges", 1)
    found = collect(tapped, [{"x": x, "c": np.array(False)}], [request])
    seen = found.of(request.tensor).find(ChannelRanges, 1)
    assert seen is None or not len(seen.ends)
