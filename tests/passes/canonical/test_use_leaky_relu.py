"""UseLeakyRelu knows leaky rectifiers in all their forms."""

from __future__ import annotations

import numpy as np
import pytest
from model_texts import difference, model, named_graph, ops, outputs, sample, values

from onnxq.ir import Graph
from onnxq.passes import UseLeakyRelu
from onnxq.rewrite import Changes

CONSTANTS = {
    "tenth": np.array(0.1, np.float32),
    "alike": np.full((4, 1, 1), 0.2, np.float32),
    "each": values(4, 1, 1),
    "nil": np.zeros(1, np.float32),
    "zero": np.array(0, np.float32),
    "gentle": np.geomspace(0.125, 1, 4, dtype=np.float32).reshape(4, 1, 1),
    "steep": np.linspace(1, 3, 4, dtype=np.float32).reshape(4, 1, 1),
    "mixed": np.linspace(0.5, 2, 4, dtype=np.float32).reshape(4, 1, 1),
    "two": np.array(2, np.float32),
}


def use(body: str) -> tuple[Graph, Changes]:
    used = {name: array for name, array in CONSTANTS.items() if f", {name}" in body}
    made = model(f"g (float[N, 4, 5, 5] x) => (float[N, 4, 5, 5] y) {{ {body} }}", **used)
    graph = named_graph(made)
    changes = UseLeakyRelu().apply(graph)
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 1e-6
    assert not UseLeakyRelu().apply(graph)
    return graph, changes


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("y = PRelu(x, tenth)", ["LeakyRelu"]),
        ("y = PRelu(x, alike)", ["LeakyRelu"]),
        ("y = PRelu(x, nil)", ["LeakyRelu"]),
        ("r = Relu(x) n = Neg(x) m = Relu(n) s = Mul(m, tenth) y = Sub(r, s)", ["LeakyRelu"]),
        ("s = Mul(x, tenth) y = Max(s, x)", ["LeakyRelu"]),
        # As Keras and MXNet write it.
        ("r = Relu(x) n = Neg(x) m = Relu(n) s = Mul(m, gentle) y = Sub(r, s)", ["Mul", "Max"]),
        ("r = Relu(x) n = Neg(x) m = Relu(n) s = Mul(m, steep) y = Add(s, r)", ["Mul", "Max"]),
        ("r = Relu(x) n = Neg(x) m = Relu(n) s = Mul(m, steep) y = Sub(r, s)", ["Mul", "Min"]),
        ("r = Relu(x) m = Min(x, zero) s = Mul(m, gentle) y = Add(r, s)", ["Mul", "Max"]),
    ],
)
def test_all_forms_are_known(body: str, expected: list[str]) -> None:
    assert ops(use(body)[0]) == expected


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("y = PRelu(x, each)", "each channel has a slope of its own"),
        ("s = Mul(x, two) y = Max(s, x)", "its slope is not between 0 and 1"),
        ("s = Mul(x, zero) y = Max(s, x)", "its slope is not between 0 and 1"),
        ("r = Relu(x) m = Min(x, zero) s = Mul(m, mixed) y = Add(r, s)", "its slopes lie on both sides of 1"),
    ],
)
def test_others_stay(body: str, reason: str) -> None:
    _, changes = use(body)
    assert not changes.changed
    assert changes.skipped[0][1].startswith(reason)


@pytest.mark.parametrize(
    ("data", "body", "constants", "reason"),
    [
        (
            "1, 1, 4",
            "m = Relu(n) s = Mul(m, c) y = Sub(r, s)",
            {"c": np.full((1, 3, 1), 0.25)},
            "its slope is not known",
        ),
        (
            "4",
            "m = Min(x, z) s = Mul(m, c) y = Add(r, s)",
            {"z": np.zeros((1, 1)), "c": np.array(0.25)},
            "a constant may",
        ),
    ],
)
def test_constants_that_widen_the_data_stay(
    data: str, body: str, constants: dict[str, np.ndarray], reason: str
) -> None:
    text = f"g (float[{data}] x) => (y) {{ r = Relu(x) n = Neg(x) {body} }}"
    made = model(text, **{name: array.astype(np.float32) for name, array in constants.items()})
    changes = UseLeakyRelu().apply(named_graph(made))
    assert not changes.changed
    assert changes.skipped[0][1].startswith(reason)


def test_a_slope_that_widens_the_data_stays() -> None:
    text = """g (float[N, C, 5, 5] x) => (float[N, 4, 5, 5] y) {
        r = Relu(x) n = Neg(x) m = Relu(n) s = Mul(m, each) y = Add(s, r) }"""
    changes = UseLeakyRelu().apply(named_graph(model(text, each=CONSTANTS["each"])))
    assert changes.skipped[0][1] == "its slope is not known to fit its data"
