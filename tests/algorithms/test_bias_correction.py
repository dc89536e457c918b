"""Bias correction by the means of the data."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from onnx import ModelProto, numpy_helper, parser

from onnxq.algorithms import encode as node_codes
from onnxq.algorithms.encode import encode_with
from onnxq.algorithms.encoders import encode_weight
from onnxq.algorithms.encodings import Encodings
from onnxq.config.scheme import Granularity, Method, Mode, QuantSpec
from onnxq.ir import Graph, read_model, to_model
from onnxq.numerics.affine import Array, QuantParams
from onnxq.onnx_api import infer_shapes
from onnxq.passes import (
    CompressWeights,
    DecodeWeights,
    NameNodes,
    QuantizeDynamically,
    QuantizeWeights,
    ReplaceWithContrib,
)
from onnxq.planning.plan import Decision, Plan
from onnxq.planning.planner import with_corrections
from onnxq.planning.weights import weight_at
from onnxq.rewrite import Pass
from onnxq.runtime.sessions import open_session, run

# Few bits make errors that no rounding of float32 hides.
COARSE = QuantSpec("int4-narrow", granularity=Granularity.CHANNEL)
SEARCHED = QuantSpec("int4-narrow", granularity=Granularity.CHANNEL, method=Method.MSE)
BLOCKS = QuantSpec("int4", granularity=(32,))
# Finer than any data, so that the rounding of biases to quantized values hides nothing either.
SCALES = {"x": QuantParams(np.array(1e-6, np.float32), None)}

Means = Mapping[str, Array]
PASSES: Mapping[str, tuple[Mode, QuantSpec, Callable[[Plan, Encodings], Pass]]] = {
    "static": (Mode.STATIC, COARSE, QuantizeWeights),
    "dynamic": (Mode.DYNAMIC, COARSE, QuantizeDynamically),
    "storage": (Mode.STORAGE, SEARCHED, CompressWeights),
    "weight-only": (Mode.WEIGHT_ONLY, COARSE, DecodeWeights),
    "contrib": (Mode.WEIGHT_ONLY, BLOCKS, ReplaceWithContrib),
}
CONVOLUTIONS = {
    "pointwise": ("y = Conv <kernel_shape=[1, 1]>(x, w, b)", (1, 6, 5, 5), (8, 6, 1, 1), (8,), 1),
    "grouped": ("y = Conv <group=3>(x, w, b)", (1, 6, 4, 4), (9, 2, 4, 4), (9,), 1),
    "transposed": ("y = ConvTranspose <strides=[2, 2]>(x, w, b)", (1, 6, 5, 5), (6, 8, 2, 2), (8,), 1),
    "without bias": ("y = Conv(x, w)", (1, 6, 5, 5), (8, 6, 1, 1), (8,), 1),
    "transposed without bias": ("y = ConvTranspose(x, w)", (1, 6, 5, 5), (6, 8, 1, 1), (8,), 1),
    "grouped transposed": (
        "y = ConvTranspose <group=3, strides=[2, 1]>(x, w, b)",
        (1, 6, 5, 5),
        (6, 4, 2, 1),
        (12,),
        1,
    ),
    "grouped transposed without bias": ("y = ConvTranspose <group=2>(x, w)", (1, 6, 5, 5), (6, 4, 1, 1), (8,), 1),
    "depthwise transposed without bias": ("y = ConvTranspose <group=6>(x, w)", (1, 6, 3, 3), (6, 1, 1, 1), (6,), 1),
    "depthwise": ("y = Conv <group=6>(x, w, b)", (1, 6, 3, 3), (6, 1, 3, 3), (6,), 1),
}
MATRICES = {
    "gemm": ("y = Gemm(x, w, b)", (5, 6), (6, 8), (8,), -1),
    "transposed gemm": ("y = Gemm <transB=1>(x, w, b)", (5, 6), (8, 6), (8,), -1),
    "gemm and row": ("y = Gemm(x, w, b)", (5, 6), (6, 8), (1, 8), -1),
    "matmul and add": ("p = MatMul(x, w)  y = Add(p, b)", (2, 5, 6), (6, 8), (8,), -1),
    "add and matmul": ("p = MatMul(x, w)  y = Add(b, p)", (2, 5, 6), (6, 8), (1, 1, 8), -1),
}
PRODUCTS = CONVOLUTIONS | MATRICES


def model(text: str, **weights: Array) -> ModelProto:
    made = parser.parse_model(f'<ir_version: 8, opset_import: ["" : 21]> main {text}')
    made.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    return made


def named_graph(made: ModelProto) -> Graph:
    graph = read_model(made)
    NameNodes().apply(graph)
    infer_shapes(graph)
    return graph


def output_of(made: ModelProto, data: Array) -> Array:
    return np.asarray(run(open_session(made, threads=1, optimize=False), {"x": data}, ("y",))[0])


def product(kind: str) -> tuple[ModelProto, Array, int]:
    """Return a model of one product, data with means far from zero, and the axis of its channels."""
    text, data, weight, bias, axis = PRODUCTS[kind]
    random = np.random.default_rng(7)
    made = model(
        f"(float{list(data)} x) => (float[{', '.join('N' * len(data))}] y) {{ {text} }}",
        w=random.normal(0, 1, weight).astype(np.float32),
        b=random.normal(0, 1, bias).astype(np.float32),
    )
    # Multiples of the scale that the range of all data gives; where a kernel covers several places, all hold the mean.
    means = np.array([255, 100, 130, 201, 90, 222]) * (3 / 255)
    return made, np.broadcast_to(means[:, None, None] if axis == 1 else means, data).astype(np.float32), axis


def channel_means(array: Array, axis: int) -> Array:
    return np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1).mean(1, dtype=np.float64)


def plan_of(graph: Graph, mode: Mode = Mode.STORAGE, spec: QuantSpec = COARSE) -> Plan:
    decisions = []
    for node in graph.nodes:
        if node.op in ("Conv", "ConvTranspose", "Gemm", "MatMul"):
            bias = 2 if mode is Mode.STATIC and len(node.inputs) > 2 else None
            weights = (weight_at(node, 1, spec),)
            decisions.append(Decision(node.name, node.op, mode, "", weights, bias=bias, data=node.inputs[0].name))
    return Plan(tuple(with_corrections(graph, decisions)), (), "scheme", "onnxruntime-cpu")


def encoded(made: ModelProto, how: str, means: Means) -> ModelProto:
    """Return the model with quantized values for weights; applied twice, the pass changes nothing."""
    mode, spec, step_of = PASSES[how]
    graph = named_graph(made)
    plan = plan_of(graph, mode, spec)
    step = step_of(plan, encode_with(plan, graph, SCALES, means))
    assert step.apply(graph)
    once = to_model(graph)
    assert not step.apply(graph)
    assert to_model(graph) == once
    return once


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        (how, kind)
        for how in PASSES
        for kind in (PRODUCTS if how in ("static", "storage") else MATRICES)
        # Its operator takes a vector only.
        if (how, kind) != ("contrib", "gemm and row")
    ],
)
def test_the_mean_of_each_output_channel_stays(how: str, kind: str) -> None:
    made, data, axis = product(kind)
    out = 1 if kind in CONVOLUTIONS else -1
    expected = channel_means(output_of(made, data), out)

    plain, corrected = (
        np.abs(channel_means(output_of(encoded(made, how, means), data), out) - expected).max()
        for means in ({}, {"x": channel_means(data, axis)})
    )
    assert plain > 0.05
    # The kernel of MatMulNBits rounds data too.
    assert corrected < (0.03 if how == "contrib" else 2e-5)


@pytest.mark.parametrize("kind", [kind for kind in PRODUCTS if not {"add", "without"} & set(kind.split())])
def test_a_scale_that_a_large_bias_raises_is_the_one_whose_errors_count(kind: str) -> None:
    made, data, axis = product(kind)
    bias = numpy_helper.to_array(made.graph.initializer[1]).copy()
    # Of one channel, but all channels have its scale, of about 1.
    bias[..., 0] = 1.3e7
    made.graph.initializer[1].CopyFrom(numpy_helper.from_array(bias, "b"))
    out = 1 if kind in CONVOLUTIONS else -1
    expected = channel_means(output_of(made, data), out)
    parameters = {"x": QuantParams(np.array(3 / 255, np.float32), None)}

    def errors(means: Means) -> Array:
        graph = named_graph(made)
        plan = plan_of(graph, Mode.STATIC, QuantSpec("int4-narrow"))
        QuantizeWeights(plan, encode_with(plan, graph, parameters, means)).apply(graph)
        return np.abs(channel_means(output_of(to_model(graph), data), out) - expected)[1:]

    assert errors({}).max() > 0.5
    # Half a code of the bias.
    assert errors({"x": channel_means(data, axis)}).max() < 0.007


@pytest.mark.parametrize("bias", ["", ", b"])
@pytest.mark.parametrize("group", [1, 2, 3, 6])
def test_inside_overlapping_kernels_the_mean_of_transposed_groups_stays(group: int, bias: str) -> None:
    text = f"y = ConvTranspose <group={group}, strides=[2, 3], pads=[1, 0, 1, 2]>(x, w{bias})"
    random = np.random.default_rng(group)
    made = model(
        f"(float[1,6,12,12] x) => (float[1,N,H,W] y) {{ {text} }}",
        w=random.normal(0, 1, (6, 5, 5, 4)).astype(np.float32),
        b=random.normal(0, 1, 5 * group).astype(np.float32),
    )
    means = random.uniform(1, 3, 6).astype(np.float32)
    data = np.broadcast_to(means[:, None, None], (1, 6, 12, 12)).astype(np.float32)
    # A whole number of strides, to each of which all taps give.
    inside = (slice(None), slice(None), slice(6, 16), slice(6, 18))
    expected = channel_means(output_of(made, data)[inside], 1)
    plain, corrected = (
        np.abs(channel_means(output_of(encoded(made, "storage", known), data)[inside], 1) - expected).max()
        for known in ({}, {"x": channel_means(data, 1)})
    )
    assert plain > 0.05
    assert corrected < 2e-5


SHARED = "(float[3,4] x) => (float[3,4] y) { h = Gemm(x, w, b)  y = Gemm(h, w, b) }"


@pytest.mark.parametrize("how", ["static", "storage", "weight-only"])
def test_a_bias_that_two_nodes_share_becomes_one_for_each_and_is_corrected_once(how: str) -> None:
    made = model(SHARED, w=np.random.default_rng(7).normal(0, 1, (4, 4)).astype(np.float32), b=np.ones(4, np.float32))
    mode, _, step_of = PASSES[how]
    graph = named_graph(made)
    plan = plan_of(graph, mode)
    wanted = (one for one in plan.requests if one.kind == "channel-means")
    assert {one.tensor: one.axis for one in wanted} == {"x": -1, "h": -1}
    means = {"x": np.full(4, 2.0), "h": np.full(4, -3.0)}
    step = step_of(plan, encode_with(plan, graph, dict.fromkeys("xh", SCALES["x"]), means))
    step.apply(graph)
    biases = [node.inputs[2] for node in graph.nodes if node.op == "Gemm"]
    assert not step.apply(graph)

    assert [node.inputs[2] for node in graph.nodes if node.op == "Gemm"] == biases
    first, second = (bias.inputs[0].inputs[0] if how == "static" else bias for bias in biases)
    names = ["b.corrected", "b.corrected.1"]
    assert [first.name, second.name] == ([f"{name}.codes" for name in names] if how == "static" else names)
    if how != "static":
        np.testing.assert_allclose((first.values - 1) / 2, (second.values - 1) / -3, rtol=1e-5)


def test_a_weight_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*given: object) -> object:
        calls.append(given)
        return encode_weight(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(node_codes, "encode_weight", counted)
    made, data, axis = product("gemm")
    encoded(made, "storage", {"x": channel_means(data, axis)})
    assert len(calls) == 1


def test_float16_biases_stay_float16() -> None:
    made = model(
        "(float16[3,4] x) => (float16[3,4] y) { y = Gemm(x, w, b) }",
        w=np.random.default_rng(7).normal(0, 1, (4, 4)).astype(np.float16),
        b=np.ones(4, np.float16),
    )
    graph = named_graph(made)
    plan = plan_of(graph)
    CompressWeights(plan, encode_with(plan, graph, {}, {"x": np.full(4, 2.0)})).apply(graph)
    product = next(node for node in graph.nodes if node.op == "Gemm")
    assert product.inputs[2].name == "b.corrected"
    assert product.inputs[2].values.dtype == np.float16
