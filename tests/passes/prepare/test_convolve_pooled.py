"""ConvolvePooled multiplies what is left of an image by a convolution, for a runtime that does that faster."""

from __future__ import annotations

import numpy as np
import pytest
from model_texts import apply_once, difference, model, named_graph, ops, outputs, sample

from onnxq.config.presets import PRESETS
from onnxq.passes import ConvolvePooled
from onnxq.preparing.preparation import integer_steps, prepare_for_integers
from onnxq.runtime.targets import target_named

TEXT = """g (float[%s, 3, 4, 4] x) => (float[%s, 2] y)
<float[2, 3] w = {1, -2, 3, 4, 5, -6}, float[3, 2] t = {1, 2, 3, 4, 5, 6}, float[2] b = {1, 2}, float[1] one = {3}> {
    p = GlobalAveragePool(x) f = Flatten(p) y = Gemm%s
}"""


@pytest.mark.parametrize(
    "product", ["<transB = 1>(f, w, b)", "(f, t, b)", "<transB = 1>(f, w)"], ids=["transposed", "plain", "without bias"]
)
@pytest.mark.parametrize("batch", ["1", "N"])
def test_the_product_becomes_a_convolution_of_one_pixel(product: str, batch: str) -> None:
    made = model(TEXT % (batch, batch, product))
    graph = named_graph(made)
    assert apply_once(ConvolvePooled(), graph)
    assert ops(graph) == ["GlobalAveragePool", "Conv", "Flatten"]
    given = {"x": np.random.default_rng(0).normal(size=(1, 3, 4, 4)).astype(np.float32)}
    assert difference(outputs(graph, given), outputs(made, given)) < 1e-6


@pytest.mark.parametrize(
    ("batch", "product"),
    [("2", "(f, t, b)"), ("1", "(f, t, one)"), ("1", "<alpha = 2.0>(f, t, b)")],
    ids=["several images", "one bias for all", "scaled"],
)
def test_other_products_stay(batch: str, product: str) -> None:
    graph = named_graph(model(TEXT % (batch, batch, product)))
    assert not apply_once(ConvolvePooled(), graph)
    assert ops(graph) == ["GlobalAveragePool", "Flatten", "Gemm"]


@pytest.mark.parametrize(("target", "wanted"), [("openvino", "Conv"), ("onnxruntime-cpu", "Gemm")])
def test_it_is_for_runtimes_that_do_it_faster(target: str, wanted: str) -> None:
    made = model(TEXT % ("1", "1", "(f, t, b)"))
    graph = named_graph(made)
    steps = integer_steps(PRESETS["int8"], target_named(target))
    prepare_for_integers(graph, steps)
    assert wanted in ops(graph)
    prepare_for_integers(graph, steps, opset=21)
    assert wanted in ops(graph)
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 1e-6
