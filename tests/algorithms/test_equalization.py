"""Equalization: groups of tensors, channel scales, and weights that make up for them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Build, PlanOf, RunningGraph
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxq.algorithms.activation_params import requests_for
from onnxq.algorithms.encoding_config import EncodingConfig
from onnxq.algorithms.equalization import (
    NOTHING,
    SMALLEST,
    ChannelScales,
    Equalization,
    EqualizationGroup,
    GroupChannels,
    WeightRescaling,
    channel_scales_of,
    costly_scales,
    equalization_of,
    find_groups,
    select_free_scales,
)
from onnxq.calibration.collect import collect
from onnxq.calibration.methods import MinMax
from onnxq.calibration.statistics import TensorStatistics
from onnxq.config.presets import preset_named
from onnxq.config.scheme import Mode, QuantSpec
from onnxq.ir import Node, as_graph, read_model
from onnxq.numerics.pairs import Pairs
from onnxq.passes.preparing.preparation import prepare
from onnxq.planning.plan import Demotion, Plan, Weight
from onnxq.runtime.sessions import open_session, run
from onnxq.runtime.targets import target_named
from onnxq.search.prepared_model import PreparedModel, open_prepared_model

INTEGER = {"QLinearConv", "QLinearAdd", "QLinearMul", "QGemm", "QLinearConcat", "MatMulIntegerToFloat", "MaxPool"}
INTEGER |= {"QLinearGlobalAveragePool", "QLinearAveragePool", "QLinearLeakyRelu"}

# Each kind of producer, reader and joining node, by what a failure should be called.
MODELS: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "Conv, Relu, Conv": (
        "(float[1,4,8,8] x) => (float[1,5,8,8] y) {a = Conv<pads=[1,1,1,1]>(x, w, b) r = Relu(a) y = Conv(r, u, c)}",
        {"w": (6, 4, 3, 3), "b": (6,), "u": (5, 6, 1, 1), "c": (5,)},
        (1, 4, 8, 8),
    ),
    "Clip and depthwise": (
        "(float[1,4,8,8] x) => (float[1,3,8,8] y) {a = Conv(x, w, b) r = Clip(a, zero, six)"
        " d = Conv<group=6, pads=[1,1,1,1]>(r, k, e) y = Conv(d, u, c)}",
        {"w": (6, 4, 1, 1), "b": (6,), "k": (6, 1, 3, 3), "e": (6,), "u": (3, 6, 1, 1), "c": (3,)}
        | {"zero": np.float32(0), "six": np.float32(6)},
        (1, 4, 8, 8),
    ),
    "groups": (
        "(float[1,4,8,8] x) => (float[1,6,8,8] y) {a = Conv(x, w, b) y = Conv<group=2>(a, u, c)}",
        {"w": (8, 4, 1, 1), "b": (8,), "u": (6, 4, 1, 1), "c": (6,)},
        (1, 4, 8, 8),
    ),
    "Add of two and pooling": (
        "(float[1,4,8,8] x) => (float[1,3] y) {a = Conv(x, w, b) d = Conv(x, u, c) s = Add(a, d)"
        " p = GlobalAveragePool(s) f = Flatten(p) y = Gemm<transB=1>(f, g, h)}",
        {"w": (6, 4, 1, 1), "b": (6,), "u": (6, 4, 1, 1), "c": (6,), "g": (3, 6), "h": (3,)},
        (1, 4, 8, 8),
    ),
    "Concat of channels": (
        "(float[1,4,8,8] x) => (float[1,3,8,8] y) {a = Conv(x, w, b) d = Conv(x, u, c) s = Concat<axis=1>(a, d)"
        " y = Conv(s, g, h)}",
        {"w": (2, 4, 1, 1), "b": (2,), "u": (4, 4, 1, 1), "c": (4,), "g": (3, 6, 1, 1), "h": (3,)},
        (1, 4, 8, 8),
    ),
    "float in between": (
        "(float[1,4,8,8] x) => (float[1,3,8,8] y, float[1,6,8,8] z) {a = Conv(x, w, b) z = Exp(a) y = Conv(a, g, h)}",
        {"w": (6, 4, 1, 1), "b": (6,), "g": (3, 6, 1, 1), "h": (3,)},
        (1, 4, 8, 8),
    ),
    "two readers": (
        "(float[1,4,8,8] x) => (float[1,3,8,8] y, float[1,64,6,6] z) {a = Conv(x, w, b) r = Relu(a) y = Conv(r, g, h)"
        " z = Conv(r, u, c)}",
        {"w": (6, 4, 1, 1), "b": (6,), "g": (3, 6, 1, 1), "h": (3,), "u": (64, 6, 3, 3), "c": (64,)},
        (1, 4, 8, 8),
    ),
    "MatMul of a float": (
        "(float[1,8,6] x) => (float[1,8,3] y) {r = Sqrt(x) a = MatMul(r, w) y = Add(a, b)}",
        {"w": (6, 3), "b": (3,)},
        (1, 8, 6),
    ),
}


def opened(build: Build, name: str, folder: Path) -> tuple[PreparedModel, list[dict[str, Any]]]:
    text, weights, shape = MODELS[name]
    graph = as_graph(build(text, opset=21, **weights))
    bench = open_prepared_model(graph, preset_named("int8"), target_named("onnxruntime-cpu"), folder)
    generator = np.random.default_rng(3)
    # Channels of very different size.
    scale = np.array([1, 0.1, 0.5, 0.02, 0.3, 1])[: shape[-1] if len(shape) == 3 else shape[1]]
    wide = scale if len(shape) == 3 else scale.reshape(-1, 1, 1)
    return bench, [{"x": np.abs(generator.standard_normal(shape) * wide).astype(np.float32)} for _ in range(4)]


def migration_for(bench: PreparedModel) -> Equalization:
    """Return factors for every site, which differ from channel to channel."""
    factors = {}
    for site in find_groups(bench.graph, bench.plan({})):
        values = np.where(site.free, np.linspace(0.3, 1.0, len(site.free)), 1.0)
        for name, channels in site.tensors.items():
            factors[name] = ChannelScales(channels.axis, values[channels.places])
    return Equalization(factors)


class Wide(MinMax):
    """A range that holds all values divided by any factor."""

    def __call__(self, seen: TensorStatistics, spec: QuantSpec) -> tuple[float, float]:
        low, high = super().__call__(seen, spec)
        return 4 * low, 4 * high


def _finer(weight: Weight) -> Weight:
    return replace(weight, spec=replace(weight.spec, format="int16"), pairs=Pairs.NONE)


def exact(plan: Plan) -> Plan:
    """Return a plan with quantized values of 16 bits, which kernels compute with in float."""
    activations = tuple(replace(one, spec=replace(one.spec, format="uint16")) for one in plan.activations)
    decisions = tuple(replace(one, weights=tuple(map(_finer, one.weights))) for one in plan.decisions)
    return replace(plan, activations=activations, decisions=decisions)


@pytest.mark.parametrize("name", MODELS)
def test_migration_keeps_what_a_model_computes_whichever_node_computes_in_float(
    build: Build, tmp_path: Path, name: str
) -> None:
    bench, samples = opened(build, name, tmp_path)
    equalization = migration_for(bench)
    assert equalization.factors
    path = tmp_path / "built.onnx"
    stored = [one.node for one in bench.plan({}).decisions if one.weights]
    for nodes in ([], *([node] for node in stored)):
        plan = exact(bench.plan({node: Demotion(Mode.STORAGE, "why") for node in nodes}))
        seen = collect(bench.prepared, samples, requests_for(plan, (MinMax(),)))
        bench.build(plan, seen, EncodingConfig(Wide(), equalization=equalization), path, external_data=False)
        for one, other in zip(
            run(open_session(bench.prepared), samples[0]), run(open_session(path), samples[0]), strict=True
        ):
            np.testing.assert_allclose(other, one, rtol=0, atol=1e-3 * float(np.abs(one).max()), err_msg=str(nodes))


@pytest.mark.parametrize("name", MODELS)
def test_as_many_kernels_compute_with_integers(
    build: Build, tmp_path: Path, name: str, running_graph: RunningGraph
) -> None:
    bench, samples = opened(build, name, tmp_path)
    plan = bench.plan({})
    seen = collect(bench.prepared, samples, requests_for(plan, (MinMax(),)))
    kernels = []
    for equalization in (NOTHING, migration_for(bench)):
        path = tmp_path / "built.onnx"
        bench.build(plan, seen, EncodingConfig(equalization=equalization), path, external_data=False)
        kernels.append(Counter(node.op_type for node in running_graph(path).node if node.op_type != "Mul"))
    assert kernels[0] == kernels[1]
    assert any(INTEGER & set(each) for each in kernels)


@given(st.integers(0, 1000), st.sampled_from([("Gemm", {"transB": 1}), ("Gemm", {}), ("MatMul", {}), ("Conv", {})]))
@settings(max_examples=30)
def test_a_weight_makes_up_for_the_factors_around_it(seed: int, kind: tuple[str, dict[str, int]]) -> None:
    generator = np.random.default_rng(seed)
    op, attributes = kind
    read, made = (ChannelScales(1, generator.uniform(0.25, 1, size)) for size in (5, 3))
    weight = generator.standard_normal((3, 5))
    stored = weight if op == "Conv" or attributes else weight.T
    found = WeightRescaling(read, made).weight(Node(op, "n", attributes), 1, stored)
    plain = found if op == "Conv" or attributes else found.T
    data = generator.standard_normal(5)
    np.testing.assert_allclose(plain @ (data / read.values) * made.values, weight @ data, rtol=1e-9, atol=1e-9)
    around, bias = WeightRescaling(read, made), generator.standard_normal(3)
    np.testing.assert_allclose(around.own_weight(Node(op, "n", attributes), 1, found), stored)
    np.testing.assert_allclose(around.own_bias(around.bias(bias)), bias)
    np.testing.assert_allclose(read.multiply(read.divide(data[None])), data[None])


def test_factors_of_tensors_without_codes_are_left_out() -> None:
    equalization = Equalization({"a": ChannelScales(1, np.ones(2)), "b": ChannelScales(1, np.ones(2))})
    assert list(equalization.select({"b"}).factors) == ["b"]
    assert equalization.key != equalization.select({"b"}).key


# Which tensors share factors, and which have none.


def found(build: Build, plan_of: PlanOf, text: str, **weights: Any) -> tuple[EqualizationGroup, ...]:
    model = build(text, **weights)
    graph = prepare(read_model(model))
    return find_groups(graph, plan_of(model))


CONVS = {"w": (6, 4, 1, 1), "u": (6, 4, 1, 1), "g": (3, 6, 1, 1)}


def test_an_add_joins_what_it_adds(build: Build, plan_of: PlanOf) -> None:
    text = "(float[1,4,8,8] x) => (float[1,3,8,8] y) {a = Conv(x, w) d = Conv(x, u) s = Add(a, d) y = Conv(s, g)}"
    joined = next(site for site in found(build, plan_of, text, **CONVS) if "s" in site.tensors)
    assert set(joined.tensors) == {"a", "d", "s"}
    assert joined.dense
    assert joined.free.all()


def test_a_depthwise_reader_loses_nothing(build: Build, plan_of: PlanOf) -> None:
    text = "(float[1,4,8,8] x) => (float[1,6,8,8] y) {a = Conv(x, w) y = Conv<group=6>(a, k)}"
    result = found(build, plan_of, text, w=(6, 4, 1, 1), k=(6, 1, 1, 1))
    assert not next(site for site in result if "a" in site.tensors).dense


def test_channels_of_a_concat_are_those_of_its_inputs(build: Build, plan_of: PlanOf) -> None:
    text = "(float[1,4,8,8] x) => (float[1,3,8,8] y) {a = Conv(x, w) d = Sigmoid(a) s = Concat<axis=1>(a, d)\
 y = Conv(s, g)}"
    result = found(build, plan_of, text, w=(6, 4, 1, 1), g=(3, 12, 1, 1))
    assert not any("a" in site.tensors for site in result)


@pytest.mark.parametrize(
    ("text", "weights", "tensor"),
    [
        ("(float[1,4,8,8] x) => (float[1,6,8,8] y) {a = Conv(x, w) s = Sigmoid(a) y = Conv(s, g)}",
         {"w": (6, 4, 1, 1), "g": (6, 6, 1, 1)}, "a"),
        ("(float[1,4,8,8] x) => (float[1,4,8,8] y) {a = Conv(x, w) y = Conv(a, w)}", {"w": (4, 4, 1, 1)}, "a"),
        ("(float[1,4,8,8] x) => (float[1,3,8,8] y) {a = Conv(x, w) s = Add(a, c) y = Conv(s, g)}",
         {"w": (6, 4, 1, 1), "c": (1, 1, 8, 8), "g": (3, 6, 1, 1)}, "a"),
        ("(float[1,4,8,8] x) => (float[1,3,8,8] y, float[1,6,8,3] z) {a = Conv(x, w) y = Conv(a, g) z = MatMul(a, m)}",
         {"w": (6, 4, 1, 1), "g": (3, 6, 1, 1), "m": (8, 3)}, "a"),
    ],
    ids=["an operator that is not linear", "a weight that two read", "what is added to all channels alike",
         "readers with channels along different axes"],
)  # fmt: skip
def test_what_takes_no_factors_blocks(
    build: Build, plan_of: PlanOf, text: str, weights: dict[str, Any], tensor: str
) -> None:
    result = found(build, plan_of, text, **weights)
    assert not any(tensor in site.tensors for site in result)


def test_places_count_each_factor_once(build: Build, plan_of: PlanOf) -> None:
    text = "(float[1,4,8,8] x) => (float[1,3] y) {a = Conv(x, w) p = MaxPool<kernel_shape=[4,4], strides=[4,4]>(a)\
 f = Flatten(p) y = Gemm(f, g)}"
    result = found(build, plan_of, text, w=(6, 4, 1, 1), g=(24, 3))
    site = next(site for site in result if "a" in site.tensors)
    np.testing.assert_array_equal(site.tensors["f"].places, np.repeat(site.tensors["a"].places, 4))


# Factors from what channels were seen to use.


def site(count: int, *, dense: bool = True) -> EqualizationGroup:
    channels = GroupChannels(1, 4, np.arange(count))
    return EqualizationGroup({"t": channels}, frozenset(), np.ones(count, bool), dense)


@pytest.mark.parametrize("shares", [[0.0, 0.0, 0.0], [1.0, np.nan, 0.5], [3.0, 0.1, 1e-9]])
@pytest.mark.parametrize("dense", [True, False])
def test_factors_are_usable_whatever_was_seen(shares: list[float], dense: bool) -> None:
    factors = channel_scales_of(site(3, dense=dense), np.array(shares))
    assert ((factors >= SMALLEST) & (factors <= 1)).all()


def test_a_reader_that_sums_over_channels_gets_the_milder_factors() -> None:
    shares = np.array([0.25, 1.0])
    assert channel_scales_of(site(2), shares).tolist() == [0.5, 1.0]
    assert channel_scales_of(site(2, dense=False), shares).tolist() == pytest.approx([0.25**0.7, 1.0])


def test_a_channel_of_which_nothing_was_seen_may_use_all() -> None:
    assert channel_scales_of(site(3), np.array([0.25, 0.0, 0.001])).tolist() == [0.5, 1.0, 1.0]


def test_sites_without_gain_have_no_factors() -> None:
    assert not equalization_of({site(2): np.ones(2)}).factors


# Factors that products take in on all sides are told from those that need nodes.

CHAIN = {"w": (6, 4, 1, 1), "u": (6, 6, 1, 1), "k": (6, 6, 1, 1)}

CASES: dict[str, tuple[str, set[str], set[str]]] = {
    "products on both sides": (
        "(float[1,4,8,8] x) => (float[1,6,8,8] y) {a = Conv(x, w) r = Relu(a) y = Conv(r, u)}",
        {"r"},
        {"r"},
    ),
    "a float reader": (
        "(float[1,4,8,8] x) => (float[1,6,8,8] y, float[1,6,8,8] z)\
 {a = Conv(x, w) r = Relu(a) y = Conv(r, u) z = Erf(r)}",
        {"r"},
        set(),
    ),
    "what an Add joins": (
        "(float[1,4,8,8] x) => (float[1,6,8,8] y, float[1,6,8,8] z)\
 {a = Conv(x, w) d = Conv(a, u) s = Add(a, d) y = Conv(s, k) z = Erf(s)}",
        {"a", "d", "s"},
        set(),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_factors_without_nodes_stay(name: str, build: Build, plan_of: PlanOf) -> None:
    text, tensors, kept = CASES[name]
    weights: dict[str, Any] = {one: shape for one, shape in CHAIN.items() if f", {one})" in text}
    model = build(text, **weights)
    factors = ChannelScales(1, np.array([0.5, 1.0] * 3))
    equalization = Equalization(dict.fromkeys(sorted(tensors), factors))
    graph, plan = prepare(read_model(model)), plan_of(model)
    assert set(select_free_scales(graph, plan, equalization).factors) == kept
    # What is left needs nodes, and stays together.
    assert costly_scales(graph, plan, equalization) == ([frozenset(tensors - kept)] if tensors - kept else [])
