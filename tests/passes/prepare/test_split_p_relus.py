"""SplitPRelus writes PRelu as what chooses between its data and that times its slopes."""

from __future__ import annotations

import numpy as np
import pytest
from model_texts import apply_once, difference, model, named_graph, ops, outputs, sample

from onnxq.config.presets import preset_named
from onnxq.ir import Graph
from onnxq.passes import SplitPRelus
from onnxq.preparing.preparation import integer_steps, prepare_for_integers
from onnxq.runtime.targets import target_named

TEXT = "g (float[N, 4, 5, 5] x) => (float[N, 4, 5, 5] y) { [p] y = PRelu(x, slope) }"


def slopes(first: float, last: float) -> np.ndarray:
    return np.linspace(first, last, 4, dtype=np.float32).reshape(4, 1, 1)


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [(0.25, 1.0, ["Mul", "Max"]), (1.0, 3.0, ["Mul", "Min"]), (0.5, 2.0, ["Relu", "Min", "Mul", "Add"])],
)
def test_what_is_chosen_is_what_it_was(first: float, last: float, expected: list[str]) -> None:
    made = model(TEXT, slope=slopes(first, last))
    graph = named_graph(made)
    assert apply_once(SplitPRelus(), graph).changed == ("p",)
    assert ops(graph) == expected
    assert graph.nodes[-1].name == "p"
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 1e-6


def test_what_an_old_opset_cannot_say_stays() -> None:
    changes = apply_once(SplitPRelus(), named_graph(model(TEXT, opset=7, slope=slopes(0.5, 1.0))))
    assert changes.skipped == (("p", "what it would become came with opset 8"),)


def test_slopes_that_are_computed_stay() -> None:
    text = "g (float[N, 4, 5, 5] x, float[4, 1, 1] s) => (float[N, 4, 5, 5] y) { y = PRelu(x, s) }"
    assert not apply_once(SplitPRelus(), named_graph(model(text)))


@pytest.mark.parametrize(("target", "expected"), [("onnxruntime-cpu", ["Mul", "Max"]), ("openvino", ["PRelu"])])
def test_every_export_gets_the_form_of_its_runtime(target: str, expected: list[str]) -> None:
    steps = integer_steps(preset_named("int8"), target_named(target))

    def prepared(text: str, slope: np.ndarray) -> Graph:
        graph = named_graph(model(text, slope=slope))
        prepare_for_integers(graph, steps)
        return graph

    assert ops(prepared(TEXT, slopes(0.1, 0.4))) == expected
    written_out = "r = Relu(x) n = Neg(x) m = Relu(n) s = Mul(m, slope) y = Add(r, s)"
    other = prepared(f"g (float[N, 4, 5, 5] x) => (float[N, 4, 5, 5] y) {{ {written_out} }}", -slopes(0.1, 0.4))
    assert ops(other) == ["Mul", "Max"]
