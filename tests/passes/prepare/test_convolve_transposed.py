"""ConvolveTransposed computes the places of a window as channels, where a runtime pads channels to blocks."""

from __future__ import annotations

import numpy as np
import pytest
from model_texts import apply_once, difference, model, named_graph, ops, outputs, sample

from onnxq.config.presets import PRESETS
from onnxq.passes import ConvolveTransposed
from onnxq.preparing.preparation import integer_steps, prepare_for_integers
from onnxq.runtime.targets import target_named

WEIGHT = ", ".join(map(str, np.random.default_rng(0).normal(size=24).round(2)))
TEXT = f"""g (float[1, 3, 4, 5] x) => (float[1, 2, H, W] y)
<float[3, 2, 2, 2] w = {{{WEIGHT}}}, float[2] b = {{1, -2}}> {{ %s }}"""
PLAIN = "y = ConvTranspose<strides = [2, 2]>(x, w, b)"


@pytest.mark.parametrize("activation", ["LeakyRelu", "Relu", "Sigmoid", "Tanh"])
def test_an_activation_is_computed_before_the_places_are_laid_out(activation: str) -> None:
    made = model(TEXT % f"z = ConvTranspose<strides = [2, 2]>(x, w, b) y = {activation}(z)")
    graph = named_graph(made)
    assert apply_once(ConvolveTransposed(), graph)
    assert ops(graph) == ["Conv", activation, "DepthToSpace"]
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 1e-6


@pytest.mark.parametrize(
    "layer",
    [
        PLAIN,
        "y = ConvTranspose<strides = [2, 2], pads = [0, 0, 0, 0], dilations = [1, 1], group = 1>(x, w)",
        "z = ConvTranspose<strides = [2, 2], kernel_shape = [2, 2]>(x, w, b) y = Abs(z)",
    ],
    ids=["alone", "all said", "before another"],
)
def test_few_channels_become_a_convolution(layer: str) -> None:
    made = model(TEXT % layer)
    graph = named_graph(made)
    assert apply_once(ConvolveTransposed(), graph)
    assert ops(graph)[:2] == ["Conv", "DepthToSpace"]
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 1e-6


@pytest.mark.parametrize(
    "attributes",
    [
        "strides = [1, 1]",
        "strides = [2, 1]",
        "strides = [3, 3]",
        "strides = [2, 2], pads = [1, 0, 0, 0]",
        "strides = [2, 2], output_padding = [1, 1]",
        "strides = [2, 2], dilations = [2, 2]",
        "strides = [2, 2], output_shape = [8, 10]",
    ],
)
def test_other_windows_stay(attributes: str) -> None:
    graph = named_graph(model(TEXT % f"y = ConvTranspose<{attributes}>(x, w, b)"))
    assert not apply_once(ConvolveTransposed(), graph)
    assert ops(graph) == ["ConvTranspose"]


@pytest.mark.parametrize(("target", "wanted"), [("openvino", "Conv"), ("onnxruntime-cpu", "ConvTranspose")])
def test_it_is_for_runtimes_that_pad_channels(target: str, wanted: str) -> None:
    made = model(TEXT % PLAIN)
    graph = named_graph(made)
    prepare_for_integers(graph, integer_steps(PRESETS["int8"], target_named(target)))
    assert wanted in ops(graph)
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 1e-6
