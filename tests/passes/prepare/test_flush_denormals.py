"""FlushDenormals sets weights to zero that are no normal numbers, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from model_texts import apply_once, difference, model, named_graph, outputs, sample, values

from onnxq.ir import constants
from onnxq.passes import FlushDenormals
from onnxq.rewrite import Changes

SMALLEST = np.finfo(np.float32).smallest_normal


@pytest.mark.parametrize("small", [SMALLEST / 2, -SMALLEST / 2, np.finfo(np.float32).smallest_subnormal])
def test_denormal_weights_become_zero(small: np.float32) -> None:
    weight = values(6, 3, 1, 1)
    weight[2, 1], weight[4, 0], weight[0, 0] = small, SMALLEST, 0.0
    made = model("g (float[1, 3, 4, 4] x) => (float[1, 6, 4, 4] y) { y = Conv(x, w) }", w=weight)
    graph = named_graph(made)
    assert apply_once(FlushDenormals(), graph).changed == ("w",)
    [flushed] = constants(graph)
    assert (flushed.values[weight != small] == weight[weight != small]).all()
    assert (flushed.values[weight == small] == 0).all()
    assert flushed.values.dtype == np.float32
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) == 0


def test_normal_weights_stay_as_they_are() -> None:
    graph = named_graph(model("g (float[2, 3] x) => (float[2, 4] y) { y = MatMul(x, w) }", w=values(3, 4)))
    [before] = constants(graph)
    tensor_data = before.tensor_data
    assert FlushDenormals().apply(graph) == Changes()
    assert before.tensor_data is tensor_data


def test_what_keeps_a_divisor_from_zero_stays() -> None:
    text = "g (float[2, 3] x) => (float[2, 3] y) { d = Add(x, e) y = Div(x, d) }"
    graph = named_graph(model(text, e=np.full((2, 3), SMALLEST / 2, np.float32)))
    assert FlushDenormals().apply(graph) == Changes()


def test_weights_of_other_types_stay() -> None:
    text = "g (float16[2, 3] x) => (float16[2, 4] y) { y = MatMul(x, w) }"
    graph = named_graph(model(text, w=np.full((3, 4), 1e-6, np.float16)))
    assert FlushDenormals().apply(graph) == Changes()
