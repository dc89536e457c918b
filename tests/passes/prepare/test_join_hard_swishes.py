"""JoinHardSwishes writes HardSigmoid times its data as HardSwish, which came with opset 14."""

from __future__ import annotations

import pytest
from model_texts import apply_once, difference, model, named_graph, ops, outputs, sample

from onnxq.config.presets import PRESETS
from onnxq.passes import JoinHardSwishes
from onnxq.preparing.preparation import integer_steps, prepare_for_integers
from onnxq.runtime.targets import target_named

TEXT = "g (float[2, 3] x) => (float[2, 3] y) { s = Sin(x) g = HardSigmoid <alpha = %s, beta = 0.5> (s) y = Mul(%s, g) }"


def test_an_old_model_is_brought_to_its_opset() -> None:
    made = model(TEXT % (1 / 6, "s"), opset=11)
    graph = named_graph(made)
    assert apply_once(JoinHardSwishes(), graph)
    assert (graph.opset, ops(graph)) == (14, ["Sin", "HardSwish"])
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 1e-6


@pytest.mark.parametrize(("slope", "factor"), [(0.2, "s"), (1 / 6, "x")])
def test_other_products_are_left(slope: float, factor: str) -> None:
    graph = named_graph(model(TEXT % (slope, factor), opset=11))
    assert not apply_once(JoinHardSwishes(), graph)
    assert graph.opset == 11


def test_a_model_that_cannot_be_converted_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxq.passes.activations._OPSET", 99)
    graph = named_graph(model(TEXT % (1 / 6, "s"), opset=11))
    (left,) = JoinHardSwishes().apply(graph).skipped
    assert "99" in left[1]
    assert graph.opset == 11


@pytest.mark.parametrize(
    ("target", "wanted"), [("openvino", ["HardSwish"]), ("onnxruntime-cpu", ["HardSigmoid", "Mul"])]
)
def test_it_is_for_runtimes_that_compute_it_in_the_kernel_before(target: str, wanted: list[str]) -> None:
    graph = named_graph(model(TEXT % (1 / 6, "s"), opset=11))
    steps = integer_steps(PRESETS["int8"], target_named(target))
    prepare_for_integers(graph, steps)
    assert ops(graph)[1:] == wanted
    before = graph.opset
    prepare_for_integers(graph, steps, opset=21)
    assert ops(graph)[1:] == wanted
    assert graph.opset > before
