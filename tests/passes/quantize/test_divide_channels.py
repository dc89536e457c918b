"""DivideChannels gives nodes the constants that divide what they make."""

from __future__ import annotations

import numpy as np
from conftest import Build
from model_texts import apply_once

from onnxq.algorithms.encodings import Codes
from onnxq.ir import as_graph
from onnxq.passes import DivideChannels

TEXT = "(float[2,4] x) => (float[2,4] y, float[2,4] z) {[one] y = Mul(x, s) [other] z = Mul(x, s)}"


def test_constants_are_replaced_where_they_differ(build: Build) -> None:
    graph = as_graph(build(TEXT, s=np.arange(4, dtype=np.float32)))
    codes = Codes(floats={("one", 1): np.ones(4, np.float32), ("other", 1): np.arange(4, dtype=np.float32)})
    assert apply_once(DivideChannels(codes), graph).changed == ("one",)
    one, other = (node.inputs[1] for node in graph.nodes)
    assert (one.name, other.name) == ("s.divided", "s")
    np.testing.assert_array_equal(one.values, np.ones(4))
    np.testing.assert_array_equal(other.values, np.arange(4))


def test_nothing_is_done_without_factors(build: Build) -> None:
    assert not apply_once(DivideChannels(Codes()), as_graph(build(TEXT, s=(4,))))
