"""RestoreOperators writes Relu, Clip and Add where their likes stand."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from model_texts import difference, model, ops, outputs, sample, values

from onnxq.ir import Graph, as_graph, to_model
from onnxq.passes import NameNodes, RestoreOperators

EXAMPLES = {
    "y = Max(x, zero)": ["Relu"],
    "y = Max(zero, x)": ["Relu"],
    "y = Max(x, one)": ["Clip"],
    "y = Min(x, six)": ["Clip"],
    "a = Max(x, zero)  y = Min(a, six)": ["Clip"],
    "a = Max(x, zero)  b = Neg(a)  y = Min(b, six)": ["Relu", "Neg", "Clip"],
    "a = Max(x, zero)  b = Min(a, six)  y = Add(a, b)": ["Relu", "Clip", "Add"],
    "a = Sum(x)  b = Neg(a)  y = Mul(a, b)": ["Neg", "Mul"],
    "y = Sum(x)": ["Identity"],
    "y = Sum(x, v)": ["Add"],
    "y = Sum(x, v, x)": ["Sum"],
    "y = Max(x, v)": ["Max"],
    "y = Max(x, one, zero)": ["Max"],
    "a = Cast <to = 7> (x)  b = Max(a, n)  y = Cast <to = 1> (b)": ["Cast", "Max", "Cast"],
}


def restored(body: str, opset: int = 17) -> tuple[onnx.ModelProto, Graph]:
    made = model(
        f"g (float[3, 4] x) => (float[3, 4] y) {{ {body} }}", opset=opset,
        zero=np.array(0, np.float32), one=np.array(1, np.float32), six=np.array(6, np.float32),
        v=values(3, 4), n=np.array(2),
    )  # fmt: skip
    graph = as_graph(made)
    NameNodes().apply(graph)
    RestoreOperators().apply(graph)
    assert not RestoreOperators().apply(graph)
    onnx.checker.check_model(to_model(graph), full_check=True)
    return made, graph


@pytest.mark.parametrize(("body", "expected"), EXAMPLES.items())
def test_the_known_operator_computes_the_same(body: str, expected: list[str]) -> None:
    made, graph = restored(body)
    assert ops(graph) == expected
    inputs = {name: 8 * array for name, array in sample(made).items()}
    assert difference(outputs(graph, inputs), outputs(made, inputs)) == 0


def test_clamps_of_old_models_are_left() -> None:
    assert ops(restored("y = Max(x, zero)", opset=10)[1]) == ["Max"]
