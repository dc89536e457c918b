"""CorrectBiases keeps the mean of each output channel where it is in float."""

from __future__ import annotations

import numpy as np
import pytest
from model_zoo import Array, model, named_graph, outputs
from onnx import ModelProto

from onnxq.graph import Graph, to_model
from onnxq.passes import Changes, CorrectBiases, StoreWeights
from onnxq.planning.corrections import with_corrections
from onnxq.planning.plan import Decision, Plan
from onnxq.planning.weight_plan import weight_at
from onnxq.scheme import Granularity, Mode, Spec

RANDOM = np.random.default_rng(7)
# Few bits make errors that no rounding of float32 hides.
COARSE = Spec("int4-narrow", per=Granularity.CHANNEL)
PRODUCTS = {
    "pointwise": ("y = Conv <kernel_shape=[1, 1]>(x, w, b)", (1, 6, 5, 5), (8, 6, 1, 1), (8,), 1),
    "grouped": ("y = Conv <group=3>(x, w, b)", (1, 6, 4, 4), (9, 2, 4, 4), (9,), 1),
    "depthwise": ("y = Conv <group=6>(x, w, b)", (1, 6, 3, 3), (6, 1, 3, 3), (6,), 1),
    "gemm": ("y = Gemm(x, w, b)", (5, 6), (6, 8), (8,), -1),
    "transposed gemm": ("y = Gemm <transB=1>(x, w, b)", (5, 6), (8, 6), (1, 8), -1),
    "matmul and add": ("p = MatMul(x, w)  y = Add(p, b)", (2, 5, 6), (6, 8), (8,), -1),
    "add and matmul": ("p = MatMul(x, w)  y = Add(b, p)", (2, 5, 6), (6, 8), (1, 1, 8), -1),
}


def product(kind: str) -> tuple[ModelProto, Array, int]:
    """Return a model of one product, data with means far from zero, and the axis of its channels."""
    text, data, weight, bias, axis = PRODUCTS[kind]
    made = model(
        f"main (float{list(data)} x) => (float[{', '.join('N' * len(data))}] y) {{ {text} }}",
        opset=21,
        w=RANDOM.normal(0, 1, weight).astype(np.float32),
        b=RANDOM.normal(0, 1, bias).astype(np.float32),
    )
    # Where a kernel covers several places, all of them hold the mean.
    places = data if weight[2:] in ((), (1, 1)) else (*data[:2], 1, 1)
    return made, np.broadcast_to(RANDOM.uniform(1, 3, places), data).astype(np.float32), axis


def channel_means(array: Array, axis: int) -> Array:
    return np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1).mean(1, dtype=np.float64)


def plan_of(graph: Graph) -> Plan:
    node = next(node for node in graph.nodes if node.op in ("Conv", "Gemm", "MatMul"))
    stored = Decision(node.name, node.op, Mode.STORAGE, "stored", (weight_at(node, 1, COARSE),))
    return Plan(tuple(with_corrections(graph, [stored])), (), "scheme", "target")


def stored(made: ModelProto, means: Array | None, axis: int) -> tuple[ModelProto, Changes]:
    graph = named_graph(made)
    plan = plan_of(graph)
    assert plan.means == {"x": axis}
    step = CorrectBiases(plan, {} if means is None else {"x": means})
    changes = step.apply(graph)
    assert not step.apply(graph)
    StoreWeights(plan).apply(graph)
    assert not step.apply(graph)
    return to_model(graph), changes


@pytest.mark.parametrize("kind", PRODUCTS)
def test_the_mean_of_each_output_channel_stays(kind: str) -> None:
    made, data, axis = product(kind)
    out = 1 if kind in ("pointwise", "grouped", "depthwise") else -1
    expected = channel_means(outputs(made, {"x": data})["y"], out)

    plain, left = stored(made, None, axis)
    corrected, changes = stored(made, channel_means(data, axis), axis)

    plain_error, error = (
        np.abs(channel_means(outputs(one, {"x": data})["y"], out) - expected).max() for one in (plain, corrected)
    )
    assert len(changes.changed) == 1
    assert [reason for _, reason in left.left] == ["no mean is known"]
    assert plain_error > 0.05
    assert error < 1e-5


def test_a_bias_that_two_nodes_share_becomes_one_for_each() -> None:
    weight = RANDOM.normal(0, 1, (4, 4)).astype(np.float32)
    made = model(
        "main (float[3,4] x) => (float[3,4] y) { h = Gemm(x, w, b)  y = Gemm(h, w, b) }",
        w=weight,
        b=np.ones(4, np.float32),
    )
    graph = named_graph(made)
    wanted = [Decision(n.name, n.op, Mode.STORAGE, "", (weight_at(n, 1, COARSE),)) for n in graph.nodes]
    plan = Plan(tuple(with_corrections(graph, wanted)), (), "scheme", "target")

    assert plan.means == {"x": -1, "h": -1}
    CorrectBiases(plan, {"x": np.full(4, 2.0), "h": np.full(4, -3.0)}).apply(graph)

    first, second = (node.inputs[2] for node in graph.nodes)
    assert (first.name, second.name) == ("b.corrected", "b.corrected.1")
    np.testing.assert_allclose((first.values - 1) / 2, (second.values - 1) / -3, rtol=1e-5)


def test_float16_biases_stay_float16() -> None:
    made = model(
        "main (float16[3,4] x) => (float16[3,4] y) { y = Gemm(x, w, b) }",
        w=RANDOM.normal(0, 1, (4, 4)).astype(np.float16),
        b=np.ones(4, np.float16),
    )
    graph = named_graph(made)
    CorrectBiases(plan_of(graph), {"x": np.full(4, 2.0)}).apply(graph)
    assert graph.nodes[0].inputs[2].values.dtype == np.float16
