"""FoldIntoBatchNorm takes factors and shifts into the BatchNormalization in front."""

from __future__ import annotations

import numpy as np
import pytest
from model_texts import batch_norm, difference, model, named_graph, ops, outputs, sample, values

from onnxq.ir import Graph
from onnxq.passes import FoldIntoBatchNorm
from onnxq.rewrite import Changes

CONSTANTS = {
    "half": np.array(0.5, np.float32),
    "each": values(4, 1, 1),
    "wide": values(5),
    "none": np.zeros(4, np.float32),
}
NORM = "a = BatchNormalization(x, ps, pb, pm, pv)"


def fold(behind: str, size: str = "N, 4, 5, 5") -> tuple[Graph, Changes]:
    used = {name: array for name, array in (CONSTANTS | batch_norm("q", 4)).items() if f", {name}" in behind}
    made = model(f"g (float[{size}] x) => (float[{size}] y) {{ {NORM} {behind} }}", **used, **batch_norm("p", 4))
    graph = named_graph(made)
    changes = FoldIntoBatchNorm().apply(graph)
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 2e-6
    assert not FoldIntoBatchNorm().apply(graph)
    return graph, changes


@pytest.mark.parametrize(
    "behind",
    [
        "y = Mul(a, half)",
        "b = Mul(a, each) y = Add(b, each)",
        "y = BatchNormalization<epsilon = 0.01>(a, qs, qb, qm, qv)",
        "b = BatchNormalization(a, qs, qb, qm, qv) c = Mul(b, each) y = Add(c, half)",
    ],
)
def test_one_is_left(behind: str) -> None:
    assert ops(fold(behind)[0]) == ["BatchNormalization"]


@pytest.mark.parametrize(
    ("behind", "reason"),
    [
        ("y = Mul(a, wide)", "its constant does not vary along the channels alone"),
        ("b = Mul(a, each) c = Add(b, a) y = Neg(c)", ""),
    ],
)
def test_others_stay(behind: str, reason: str) -> None:
    graph, changes = fold(behind)
    assert len(ops(graph)) == 1 + behind.count("=")
    assert [why for _, why in changes.skipped] == ([reason] if reason else [])


def test_data_of_unknown_rank_stays() -> None:
    made = model(
        f"g (float x) => (float y) {{ {NORM} y = Mul(a, each) }}", each=CONSTANTS["each"], **batch_norm("p", 4)
    )
    for info in (*made.graph.input, *made.graph.output):
        info.type.tensor_type.ClearField("shape")
    assert FoldIntoBatchNorm().apply(named_graph(made)).skipped[0][1] == "the type of its data is not known"


def test_the_default_of_epsilon_is_a_float32() -> None:
    parts = {name: array.astype(np.float64) for name, array in (batch_norm("p", 4) | batch_norm("q", 4)).items()}
    # Beside a small variance the last digits of epsilon show.
    parts["qv"] = np.full(4, 1e-4)
    text = f"g (double[2, 4, 5, 5] x) => (double[2, 4, 5, 5] y) {{ {NORM} y = BatchNormalization(a, qs, qb, qm, qv) }}"
    made = model(text, **parts)
    graph = named_graph(made)
    assert FoldIntoBatchNorm().apply(graph)
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 1e-12
