"""Gram matrices are asked for where a weight's data is known, and their codes make products closer to float ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from onnx import ModelProto, numpy_helper

from onnxq.algorithms.cache import CodesCache
from onnxq.algorithms.codes import encode_with
from onnxq.algorithms.compensating import Compensation
from onnxq.algorithms.encoders import weight_requests
from onnxq.algorithms.migration import Around, Factors, Migration
from onnxq.algorithms.recipe import USUAL, Recipe
from onnxq.calibration.evidence import Evidence
from onnxq.calibration.observing import observe
from onnxq.config.scheme import Granularity, Method, Mode, Spec
from onnxq.ir import Graph, as_graph, is_fixed
from onnxq.numerics.numerics import Parameters, QTensor
from onnxq.ops import operator_of
from onnxq.planning.plan import Activation, Decision, Mean, Plan, Weight
from onnxq.runtime.sessions import open_session, run

Build = Callable[..., ModelProto]
FOUR_BITS = Spec("int4", (32,))
CHANNELS = Spec("int8-narrow", Granularity.CHANNEL)
ALL = Compensation(rows=2000)
COMPENSATED = Recipe(compensation=ALL)
CHANNEL_COUNTS = (8, 48, 64)

OPERATORS: dict[str, tuple[str, dict[str, tuple[int, ...]]]] = {
    "MatMul": ("(float[999,48] x) => (float[999,24] y) { [n] y = MatMul(x, w) }", {"w": (48, 24)}),
    "Gemm": (
        "(float[999,48] x) => (float[999,24] y) { [n] y = Gemm <transB=1> (x, w, b) }",
        {"w": (24, 48), "b": (24,)},
    ),
    "of transposed data": (
        "(float[48,999] x) => (float[999,24] y) { [n] y = Gemm <transA=1> (x, w) }",
        {"w": (48, 24)},
    ),
    "Conv": (
        "(float[9,8,9,9] x) => (float[9,24,A,B] y) { [n] y = Conv <pads=[1, 1, 1, 1], strides=[2, 1]> (x, w, b) }",
        {"w": (24, 8, 3, 3), "b": (24,)},
    ),
    "grouped Conv": (
        "(float[9,8,9,9] x) => (float[9,24,A,B] y) { [n] y = Conv <group=4, dilations=[2, 1]> (x, w) }",
        {"w": (24, 2, 3, 3)},
    ),
    "depthwise Conv": (
        "(float[9,64,90] x) => (float[9,64,A] y) { [n] y = Conv <group=64> (x, w) }",
        {"w": (64, 1, 9)},
    ),
    "GRU": (
        "(float[12,90,48] x) => (float[12,1,90,16] y) { [n] y = GRU <hidden_size=16> (x, w, r) }",
        {"w": (1, 48, 48), "r": (1, 48, 16)},
    ),
}


def plan_for(graph: Graph, mode: Mode = Mode.STORAGE, spec: Spec = FOUR_BITS) -> Plan:
    """Return a plan for the weights of the only node."""
    node = graph.nodes[0]
    operator = operator_of(node)
    assert operator is not None
    weights = tuple(
        Weight(index, node.inputs[index].name, spec, axes.channels(node), 0, axes.reduction(node))
        for index, axes in operator.weights.items()
        if is_fixed(node.inputs[index])
    )
    bias = operator.bias if mode is Mode.STATIC else None
    return Plan((Decision(node.name, node.op, mode, "", weights, bias, "x"),), (), "s", "t")


def data_of(graph: Graph, seed: int) -> np.ndarray:
    """Return data of which a few causes make all channels, and that goes on from place to place."""
    shape = graph.inputs[0].shape
    axis = next(place for place, extent in enumerate(shape) if extent in CHANNEL_COUNTS)
    data = np.random.default_rng(seed).normal(size=shape)
    causes = np.random.default_rng(0).normal(size=(shape[axis], shape[axis])) / np.arange(1, shape[axis] + 1)
    mixed = np.moveaxis(np.tensordot(data, causes, (axis, 1)), -1, axis)
    return (mixed + 0.9 * np.roll(mixed, 1, -1) + 0.5).astype(np.float32)


def seen(model: ModelProto, graph: Graph, plan: Plan, compensation: Compensation = ALL) -> Evidence:
    x, names = data_of(graph, 1), [output.name for output in graph.outputs]
    arrays = {"x": x, **dict(zip(names, run(open_session(model), {"x": x}, names), strict=True))}
    return observe(arrays, weight_requests(plan, graph, compensation), "0" * 32)


def noise(text: str, model: ModelProto, graph: Graph, codes: dict[tuple[str, int], QTensor], build: Build) -> float:
    """Return the squared error of the output that coded weights make of data that nobody has seen."""
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    decoded = {graph.nodes[0].inputs[index].name: found.dequantize() for (_, index), found in codes.items()}
    x = {"x": data_of(graph, 2)}
    wanted, found = (run(open_session(one), x, None)[0] for one in (model, build(text, **{**stored, **decoded})))
    return float(np.square(found - wanted).sum())


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("spec", [FOUR_BITS, CHANNELS, Spec("uint4", symmetric=False)], ids=lambda spec: spec.format)
def test_products_come_closer_to_float_ones_on_new_data(name: str, spec: Spec, build: Build) -> None:
    text, weights = OPERATORS[name]
    model = build(text, **weights)
    graph = as_graph(model)
    plan = plan_for(graph, spec=spec)
    evidence = seen(model, graph, plan)
    assert len(evidence.statistics) == len(plan.decisions[0].weights) == (2 if name == "GRU" else 1)
    found = [encode_with(plan, graph, {}, {}, evidence, recipe=one).weights for one in (USUAL, COMPENSATED)]
    before, after = (noise(text, model, graph, codes, build) for codes in found)
    assert after < 0.8 * before


@pytest.mark.parametrize("name", ["MatMul", "Gemm", "Conv", "grouped Conv", "depthwise Conv"])
def test_errors_cancel_where_data_has_factors(name: str, build: Build) -> None:
    text, weights = OPERATORS[name]
    model = build(text, **weights)
    graph = as_graph(model)
    node, scales = graph.nodes[0], {"x": Parameters(np.array(0.05, np.float32), None)}
    channels = node.inputs[0].shape[1]
    factors = Factors(1, np.exp2(-np.random.default_rng(0).integers(0, 3, channels).astype(np.float64)))
    decisions = (replace(plan_for(graph, Mode.STATIC, CHANNELS).decisions[0], bias=None),)
    plan = Plan(decisions, (Activation("x", Spec("int8"), "x"),), "s", "t")
    found = []
    for one in (USUAL, COMPENSATED):
        recipe = replace(one, migration=Migration({"x": factors}))
        codes = encode_with(plan, graph, scales, {}, seen(model, graph, plan), recipe=recipe).weights
        values = Around(factors).own_weight(node, 1, codes["n", 1].dequantize())
        stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
        x = {"x": data_of(graph, 2)}
        built = build(text, **{**stored, "w": values})
        wanted, output = (run(open_session(made), x, None)[0] for made in (model, built))
        found.append(float(np.square(output - wanted).sum()))
    assert found[1] < 0.8 * found[0]


def test_a_static_weight_keeps_the_scale_that_its_bias_asks_for(build: Build) -> None:
    text, weights = OPERATORS["Gemm"]
    bias = np.linspace(0, 1e9, 24).astype(np.float32)
    model = build(text, w=weights["w"], b=bias)
    graph = as_graph(model)
    plan, scales = plan_for(graph, Mode.STATIC, CHANNELS), {"x": Parameters(np.array(0.05, np.float32), None)}
    evidence = seen(model, graph, plan)
    plain, found = (encode_with(plan, graph, scales, {}, evidence, recipe=one) for one in (USUAL, COMPENSATED))
    before, after = plain.weights["n", 1], found.weights["n", 1]
    np.testing.assert_array_equal(before.parameters.scale, after.parameters.scale)
    assert (before.codes != after.codes).any()
    np.testing.assert_array_equal(plain.biases["n"].codes.codes, found.biases["n"].codes.codes)


def test_means_that_a_bias_makes_up_for_are_left_out(build: Build) -> None:
    text, weights = OPERATORS["Gemm"]
    model = build(text, **weights)
    graph = as_graph(model)
    plain = plan_for(graph)
    plan = replace(plain, decisions=(replace(plain.decisions[0], mean=Mean("x", -1)),))
    evidence, means = seen(model, graph, plan), {"x": data_of(graph, 1).mean(0, dtype=np.float64)}
    cache = CodesCache()
    kept, left_out = (encode_with(plan, graph, {}, one, evidence, cache, COMPENSATED) for one in ({}, means))
    assert (kept.weights["n", 1].codes != left_out.weights["n", 1].codes).any()
    assert left_out.biases["n"].values is not None


@pytest.mark.parametrize(("scale", "factor"), [(1e20, 1.0), (1e20, 2.0**-90), (1.0, 2.0**-90), (1.0, 2.0**90)])
def test_data_whose_products_are_beyond_float32_leaves_the_nearest_codes(
    scale: float, factor: float, build: Build
) -> None:
    text, weights = OPERATORS["MatMul"]
    graph = as_graph(build(text, **weights))
    plan, scales = plan_for(graph, Mode.STATIC, CHANNELS), {"x": Parameters(np.array(0.05, np.float32), None)}
    plan = replace(plan, activations=(Activation("x", Spec("int8"), "x"),))
    evidence = observe({"x": np.float32(scale) * data_of(graph, 1)}, weight_requests(plan, graph, ALL), "0" * 32)
    migration = Migration({"x": Factors(1, np.full(48, factor))})
    recipes = [replace(one, migration=migration) for one in (USUAL, COMPENSATED)]
    with warnings.catch_warnings(action="error"):
        plain, found = (encode_with(plan, graph, scales, {}, evidence, recipe=one).weights["n", 1] for one in recipes)
    np.testing.assert_array_equal(plain.codes, found.codes)


def test_codes_without_evidence_are_the_nearest(build: Build) -> None:
    text, weights = OPERATORS["MatMul"]
    graph = as_graph(build(text, **weights))
    plan = plan_for(graph)
    plain, found = (encode_with(plan, graph, {}, {}, recipe=one).weights["n", 1] for one in (USUAL, COMPENSATED))
    np.testing.assert_array_equal(plain.codes, found.codes)


@pytest.mark.parametrize(
    ("spec", "compensation"),
    [
        (Spec("int16"), ALL),
        (Spec("int8", method=Method.TORCH), ALL),
        (Spec("int8-narrow", method=Method.BURN), ALL),
        (CHANNELS, Compensation(rows=9, bits=4)),
        (FOUR_BITS, Compensation(rows=9, memory=48 * 48 * 8 - 1)),
    ],
    ids=["16 bits", "PyTorch's", "Burn's", "more bits than wanted", "no memory"],
)
def test_some_weights_ask_for_nothing(spec: Spec, compensation: Compensation, build: Build) -> None:
    text, weights = OPERATORS["MatMul"]
    graph = as_graph(build(text, **weights))
    assert weight_requests(plan_for(graph), graph, ALL)
    assert weight_requests(plan_for(graph, spec=spec), graph, compensation) == ()


def test_nothing_is_asked_for_nodes_that_stay_float_or_share_a_weight(build: Build) -> None:
    text, weights = OPERATORS["MatMul"]
    graph = as_graph(build(text, **weights))
    assert weight_requests(plan_for(graph, Mode.FLOAT), graph, ALL) == ()
    shared = as_graph(
        build("(float[9,48] x) => (float[9,24] y, float[9,24] z) { [n] y = MatMul(x, w) z = MatMul(x, w) }", **weights)
    )
    assert weight_requests(plan_for(shared), shared, ALL) == ()


def test_codes_are_made_once_for_one_evidence_and_again_for_other(build: Build) -> None:
    text, weights = OPERATORS["MatMul"]
    model = build(text, **weights)
    graph = as_graph(model)
    plan, cache = plan_for(graph), CodesCache()
    evidence = seen(model, graph, plan)
    request = weight_requests(plan, graph, ALL)
    other = observe({"x": data_of(graph, 3)}, request, "1" * 32)
    first, again, second = (
        encode_with(plan, graph, {}, {}, one, cache, COMPENSATED).weights["n", 1] for one in (evidence, evidence, other)
    )
    assert first is again
    assert (first.codes != second.codes).any()
