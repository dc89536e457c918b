"""UseHardSwish knows HardSigmoid and HardSwish in all their forms."""

from __future__ import annotations

import numpy as np
import pytest
from model_texts import difference, model, named_graph, ops, outputs, sample

from onnxq.ir import Graph
from onnxq.passes import UseHardSwish
from onnxq.rewrite import Changes

NUMBERS = {"three": 3, "nil": 0, "six": 6, "sixth": 1 / 6, "ten": 10}


def use(body: str, opset: int = 17) -> tuple[Graph, Changes]:
    used = {name: np.array(value, np.float32) for name, value in NUMBERS.items() if f", {name}" in f"{body} , ten"}
    made = model(f"g (float[N, 8] x) => (float[N, 8] y) {{ u = Mul(x, ten) {body} }}", opset=opset, **used)
    graph = named_graph(made)
    changes = UseHardSwish().apply(graph)
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 1e-6
    assert not UseHardSwish().apply(graph)
    return graph, changes


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("a = Add(u, three) c = Clip(a, nil, six) y = Div(c, six)", ["HardSigmoid"]),
        ("a = Add(u, three) c = Clip(a, nil, six) y = Mul(c, sixth)", ["HardSigmoid"]),
        ("a = Add(u, three) c = Clip(a, nil, six) d = Mul(u, c) y = Div(d, six)", ["HardSwish"]),
        ("a = Add(u, three) c = Clip(a, nil, six) d = Mul(c, sixth) y = Mul(u, d)", ["HardSwish"]),
        ("a = Add(u, three) c = Clip(a, nil, six) d = Div(u, six) y = Mul(d, c)", ["HardSwish"]),
        ("h = HardSigmoid<alpha = 0.16666667, beta = 0.5>(u) y = Mul(h, u)", ["HardSwish"]),
    ],
)
def test_all_forms_are_known(body: str, expected: list[str]) -> None:
    assert ops(use(body)[0]) == ["Mul", *expected]


def test_old_models_have_two_nodes() -> None:
    graph, _ = use("a = Add(u, three) c = Clip<min = 0.0, max = 6.0>(a) d = Mul(u, c) y = Div(d, six)", opset=9)
    assert ops(graph) == ["Mul", "HardSigmoid", "Mul"]


@pytest.mark.parametrize(
    ("body", "opset", "reason"),
    [
        ("h = HardSigmoid<alpha = 0.16666667, beta = 0.5>(u) y = Mul(h, u)", 13, "HardSwish came with opset 14"),
        ("h = HardSigmoid(u) y = Mul(h, u)", 17, "its slope is not one sixth"),
    ],
)
def test_others_stay(body: str, opset: int, reason: str) -> None:
    _, changes = use(body, opset)
    assert not changes.changed
    assert changes.skipped[0][1] == reason


@pytest.mark.parametrize(
    ("dtype", "three", "reason"),
    [
        ("float", np.full((1, 1), 3), "a constant may raise the rank"),
        ("double", np.array(3), "its data is not known to"),
    ],
)
def test_what_would_have_another_rank_or_no_kernel_stays(dtype: str, three: np.ndarray, reason: str) -> None:
    kind = {"float": np.float32, "double": np.float64}[dtype]
    body = "a = Add(x, three) c = Clip(a, nil, six) y = Div(c, six)"
    numbers = {"three": three.astype(kind), "nil": kind(0), "six": kind(6)}
    made = model(f"g ({dtype}[4] x) => (y) {{ {body} }}", **{name: np.array(one) for name, one in numbers.items()})
    changes = UseHardSwish().apply(named_graph(made))
    assert not changes.changed
    assert changes.skipped[0][1].startswith(reason)
