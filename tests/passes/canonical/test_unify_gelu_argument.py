"""Arguments of GELU in one spelling."""

from __future__ import annotations

import math

import numpy as np
import pytest
from model_texts import apply_once, difference, model, named_graph, ops, outputs, sample

from onnxq.passes import UnifyGeluArgument

NUMBERS = {
    "inverse": math.sqrt(0.5),
    "one": 1,
    "two": 2,
    "three": 3,
    "cubic": 0.044715,
    "slope": math.sqrt(2 / math.pi),
}
SQUARES = ("q = Mul(x, cubic) k = Mul(q, x)", "q = Mul(x, x) k = Mul(cubic, q)", "q = Pow(x, two) k = Mul(q, cubic)")
FACTORED = (
    "s = Mul(x, slope) a = Mul(s, i)",
    "s = Mul(slope, i) a = Mul(x, s)",
    "s = Mul(i, x) a = Mul(s, slope)",
)
CUBES = (
    "q = Mul(x, x) c = Mul(q, x) k = Mul(c, cubic)",
    "q = Pow(x, two) c = Mul(x, q) k = Mul(cubic, c)",
    "q = Mul(x, x) c = Mul(cubic, x) k = Mul(c, q)",
    "q = Mul(cubic, x) c = Mul(x, q) k = Mul(x, c)",
    "q = Mul(x, x) c = Mul(q, cubic) k = Mul(c, x)",
)
TANH = (
    *(f"{square} i = Add(k, one) {end}" for square in SQUARES for end in FACTORED),
    *(f"{cube} s = Add(x, k) a = Mul(s, slope)" for cube in CUBES),
)


@pytest.mark.parametrize("body", [f"{argument} y = Tanh(a)" for argument in TANH] + ["a = Mul(inverse, x) y = Erf(a)"])
def test_every_spelling_becomes_one(body: str) -> None:
    numbers = {name: np.array(number, np.float32) for name, number in NUMBERS.items()}
    made = model(f"g (float[2, N] x) => (float[2, N] y) {{ {body} }}", **numbers)
    graph = named_graph(made)
    apply_once(UnifyGeluArgument(), graph)
    assert ops(graph) == (["Div", "Erf"] if "Erf" in body else ["Pow", "Mul", "Add", "Mul", "Tanh"])
    for seed in (0, 1):
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) < 1e-6


def test_constants_that_widen_the_data_stay() -> None:
    made = model(
        "g (float[] x) => (float[1] y) { a = Mul(x, inverse) y = Erf(a) }",
        inverse=np.full(1, math.sqrt(0.5), np.float32),
    )
    ((_, reason),) = UnifyGeluArgument().apply(named_graph(made)).skipped
    assert reason == "its constants may have more dimensions than its data"
