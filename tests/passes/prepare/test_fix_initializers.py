"""FixInitializers takes initializers off the inputs where exporters list all of them."""

from __future__ import annotations

import numpy as np
import pytest
from model_texts import apply_once, model, values
from odd_models import with_overridable_initializers
from onnx import ModelProto

from onnxq.ir import as_graph, to_model
from onnxq.passes import FixInitializers

LAYER = "g (float[4, 8] x) => (float[4, 8] y) { a = MatMul(x, w) y = Mul(a, s) }"
ALONE = "g (float[4, 8] x) => (float[4, 8] y) { y = MatMul(x, w) }"
SCALE = "g (float[4, 8] x) => (float[4, 8] y) { c = Constant<value_float = 2.0>() a = Mul(x, s) y = Mul(a, c) }"


def layer() -> ModelProto:
    return model(LAYER, w=values(8, 8), s=np.full(8, 2, np.float32))


@pytest.mark.parametrize(
    ("made", "old", "changed", "left"),
    [
        (with_overridable_initializers(layer()), False, {"w", "s"}, set()),
        (with_overridable_initializers(layer(), "s"), False, set(), {"s"}),
        (with_overridable_initializers(layer(), "s"), True, {"s"}, set()),
        (with_overridable_initializers(model(SCALE, s=np.full(8, 2, np.float32))), False, set(), {"s"}),
        (with_overridable_initializers(model(ALONE, w=values(8, 8))), False, set(), {"w"}),
        (layer(), False, set(), set()),
    ],
    ids=["all", "some", "some of an old file", "no weights", "a single one", "none"],
)
def test_inputs(made: ModelProto, old: bool, changed: set[str], left: set[str]) -> None:
    made.ir_version = 3 if old else made.ir_version
    graph = as_graph(made)
    changes = apply_once(FixInitializers(), graph)
    assert set(changes.changed) == changed
    assert {name for name, _ in changes.skipped} == left
    assert [one.name for one in to_model(graph).graph.input] == ["x", *sorted(left)]
