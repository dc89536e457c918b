"""GPTQ: weights as matrices, rounding whose errors cancel, and which weights get it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from conftest import PlanOf
from hypothesis import given
from hypothesis import strategies as st
from observations import observe
from onnx import ModelProto, numpy_helper

from onnxq.algorithms import gptq
from onnxq.algorithms.encode import encode_with
from onnxq.algorithms.encoders import encode_array as encode
from onnxq.algorithms.encoders import weight_requests
from onnxq.algorithms.encoding_config import DEFAULT_CONFIG, EncodingConfig
from onnxq.algorithms.encodings import EncodingCache
from onnxq.algorithms.equalization import ChannelScales, Equalization, WeightRescaling
from onnxq.algorithms.gptq import Gptq, WeightMatrices, round_by_gptq
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.config.scheme import Mode
from onnxq.ir import Graph, as_graph, is_constant
from onnxq.numerics.affine import QTensor, QuantParams
from onnxq.numerics.formats import FORMATS
from onnxq.numerics.spec import Granularity, Method, QuantSpec
from onnxq.ops import operator_of
from onnxq.planning.plan import Activation, Decision, Mean, Plan, Weight
from onnxq.runtime.sessions import open_session, run


@pytest.mark.parametrize(
    ("matrices", "shape", "view"),
    [
        (WeightMatrices.of_product((4, 6)), (4, 6), lambda values: values.T[None]),
        (WeightMatrices.of_product((4, 6), transposed=True), (4, 6), lambda values: values[None]),
        (WeightMatrices.of_convolution((6, 2, 3, 3), 3), (6, 2, 3, 3), lambda values: values.reshape(3, 2, 18)),
        (WeightMatrices.of_cell((2, 12, 5)), (2, 12, 5), lambda values: values),
    ],
    ids=["product", "transposed", "a matrix for each group", "a matrix for each direction"],
)
def test_a_weight_has_a_row_for_each_output(
    matrices: WeightMatrices, shape: tuple[int, ...], view: Callable[[np.ndarray], np.ndarray]
) -> None:
    values = np.arange(np.prod(shape)).reshape(shape)
    np.testing.assert_array_equal(matrices.view(values), view(values))
    np.testing.assert_array_equal(matrices.back(matrices.view(values), shape), values)


# Rounding errors cancel in sums, whatever the format, the blocks and the data; what cannot be used does no harm.

SMALL = [name for name, format in FORMATS.items() if format.bits <= 8]
GRANULARITIES = [Granularity.TENSOR, Granularity.CHANNEL, (32,), (5,), (3, 7)]
COLUMNS, ROWS = 70, 12


def rounded(weight: np.ndarray, name: str = "int4", granularity: object = (32,), **choices: object) -> QTensor:
    spec = QuantSpec(name, granularity, FORMATS[name].signed, **choices)
    return encode(weight, spec, channel_axis=1, reduction_axis=0)


def weight_of(seed: int, columns: int = COLUMNS, rows: int = ROWS) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(columns, rows)).astype(np.float32)


def gram_of(seed: int, columns: int = COLUMNS, samples: int = 500) -> np.ndarray:
    generator = np.random.default_rng(seed)
    data = generator.normal(size=(samples, columns)) @ generator.normal(size=(columns, columns)) + 1.0
    return (data.T @ data / samples)[None]


def lost(weight: np.ndarray, tensor: QTensor, gram: np.ndarray) -> np.ndarray:
    """Return what the errors of each column of a product's weight cost."""
    errors = (weight - tensor.dequantize()).T.astype(np.float64)
    return np.asarray(((errors @ gram[0]) * errors).sum(1))


def made(weight: np.ndarray, plain: QTensor, gram: np.ndarray, damping: float = 0.01) -> QTensor:
    return round_by_gptq(weight, plain.parameters, plain.format, gram, WeightMatrices.of_product(weight.shape), damping)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_no_channel_loses_more_than_by_rounding_and_all_together_less(name: str, granularity: object) -> None:
    weight, gram = weight_of(0), gram_of(1)
    plain = rounded(weight, name, granularity)
    found = made(weight, plain, gram)
    before, after = lost(weight, plain, gram), lost(weight, found, gram)
    assert (after <= before * (1 + 1e-5)).all()
    assert after.sum() < 0.8 * before.sum()
    assert found.parameters is plain.parameters
    # A code that the format does not use, such as the -8 of narrow integers, is a value beyond its ends.
    values = found.format.values[found.values.view(np.uint8) & (2**found.format.bits - 1)]
    assert found.format.minimum <= values.min() <= values.max() <= found.format.maximum


@pytest.mark.parametrize("scale", ["float16", "ue4m3", "e8m0"])
def test_scales_of_any_format_and_two_levels_serve(scale: str) -> None:
    weight, gram = weight_of(4), gram_of(5)
    plain = rounded(weight, "float4e2m1", (16,), scale=scale, two_level=scale == "ue4m3", method=Method.MSE)
    found = made(weight, plain, gram)
    assert lost(weight, found, gram).sum() < lost(weight, plain, gram).sum()


@given(seed=st.integers(0, 10**6), columns=st.integers(1, 300), samples=st.integers(1, 40), damping=st.floats(0, 1))
def test_few_samples_and_any_damping_never_cost_more(seed: int, columns: int, samples: int, damping: float) -> None:
    weight, gram = weight_of(seed, columns, 3), gram_of(seed + 1, columns, samples)
    plain = rounded(weight, "int4-narrow", Granularity.CHANNEL)
    found = made(weight, plain, gram, damping)
    slack = 1e-5 * np.trace(gram[0]) * np.square(weight - plain.dequantize()).sum(0)
    assert (lost(weight, found, gram) <= lost(weight, plain, gram) + slack).all()


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_without_correlation_it_is_rounding(name: str, granularity: object) -> None:
    weight = weight_of(6)
    plain = rounded(weight, name, granularity)
    gram = np.diag(np.random.default_rng(7).uniform(0, 9, COLUMNS))[None]
    np.testing.assert_array_equal(made(weight, plain, gram).values, plain.values)


def spoiled(value: float) -> np.ndarray:
    gram = gram_of(8)
    gram[0, 3, 4] = gram[0, 4, 3] = value
    return gram


@pytest.mark.parametrize(
    "gram",
    [
        np.zeros((1, COLUMNS, COLUMNS)),
        spoiled(np.nan),
        spoiled(np.inf),
        -gram_of(8),
        np.full((1, COLUMNS, COLUMNS), np.nan),
        gram_of(8) * 1e306,
    ],
    ids=["zero", "one NaN", "one infinity", "negative", "all NaN", "too large to be added up"],
)
def test_what_is_no_gram_matrix_leaves_the_nearest_codes(gram: np.ndarray) -> None:
    weight = weight_of(9)
    plain = rounded(weight)
    np.testing.assert_array_equal(made(weight, plain, gram).values, plain.values)


@pytest.mark.parametrize("size", [1e-30, 1e30, 1e200])
def test_the_size_of_the_data_does_not_matter(size: float) -> None:
    weight, gram = weight_of(10), gram_of(11)
    plain = rounded(weight)
    wanted = made(weight, plain, gram).values
    assert (made(weight, plain, gram * size).values == wanted).mean() > 0.99


def test_matrices_that_are_hardly_definite_are_damped_more() -> None:
    weight, gram = weight_of(12), gram_of(13)
    gram[0, range(COLUMNS), range(COLUMNS)] -= 0.05 * np.trace(gram[0]) / COLUMNS
    plain = rounded(weight)
    assert lost(weight, made(weight, plain, gram, 0.0), gram).sum() < lost(weight, plain, gram).sum()


def test_terms_that_are_never_there_keep_their_nearest_codes() -> None:
    weight, gram = weight_of(14), gram_of(15)
    dead = np.arange(0, COLUMNS, 3)
    gram[0, dead], gram[0, :, dead] = 0, 0
    plain = rounded(weight)
    found = made(weight, plain, gram)
    np.testing.assert_array_equal(found.values[dead], plain.values[dead])
    assert (found.values != plain.values).any()


@pytest.mark.parametrize("bad", [np.nan, 0.0, 5.0 - 4.0 * np.eye(18)], ids=["no number", "zero", "indefinite"])
def test_bad_groups_do_not_spoil_good_ones(bad: np.ndarray | float) -> None:
    weight = np.random.default_rng(16).normal(size=(12, 2, 3, 3)).astype(np.float32)
    matrices = WeightMatrices.of_convolution(weight.shape, 4)
    grams = np.concatenate([gram_of(seed, 18) for seed in range(4)])
    grams[1] = bad
    plain = encode(weight, QuantSpec("int4", Granularity.CHANNEL), channel_axis=0, reduction_axis=1)
    found = round_by_gptq(weight, plain.parameters, plain.format, grams, matrices)
    np.testing.assert_array_equal(found.values[3:6], plain.values[3:6])
    alone = WeightMatrices.of_product((3, 18), transposed=True)
    for group in (0, 2, 3):
        rows = slice(3 * group, 3 * group + 3)
        part = encode(
            weight[rows].reshape(3, 18), QuantSpec("int4", Granularity.CHANNEL), channel_axis=0, reduction_axis=1
        )
        expected = round_by_gptq(
            weight[rows].reshape(3, 18), part.parameters, part.format, grams[group : group + 1], alone
        )
        np.testing.assert_array_equal(found.values[rows].reshape(3, 18), expected.values)


def test_a_transposed_product_gets_the_same_codes() -> None:
    weight, gram = weight_of(17), gram_of(18)
    plain = rounded(weight)
    turned = np.ascontiguousarray(weight.T)
    encodings = encode(turned, QuantSpec("int4", (32,)), channel_axis=0, reduction_axis=1)
    matrices = WeightMatrices.of_product(turned.shape, transposed=True)
    found = round_by_gptq(turned, encodings.parameters, encodings.format, gram, matrices)
    np.testing.assert_array_equal(found.values.T, made(weight, plain, gram).values)


@pytest.mark.parametrize("together", [1, 700, 4000])
def test_the_size_of_the_parts_changes_nothing(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = np.random.default_rng(19).normal(size=(24, 1, 5)).astype(np.float32)
    matrices = WeightMatrices.of_convolution(weight.shape, 12)
    grams = np.concatenate([gram_of(seed, 5) for seed in range(12)])
    plain = encode(weight, QuantSpec("int4", Granularity.CHANNEL), channel_axis=0, reduction_axis=1)
    wanted = round_by_gptq(weight, plain.parameters, plain.format, grams, matrices)
    monkeypatch.setattr(gptq, "_TOGETHER", together)
    found = round_by_gptq(weight, plain.parameters, plain.format, grams, matrices)
    assert (found.values == wanted.values).mean() > 0.98


# Gram matrices are asked for where a weight's data is known, and their quantized values make products closer to float
# ones.

Build = Callable[..., ModelProto]
FOUR_BITS = QuantSpec("int4", (32,))
CHANNELS = QuantSpec("int8-narrow", Granularity.CHANNEL)
ALL = Gptq(rows=2000)
GPTQ = EncodingConfig(gptq=ALL)
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


def plan_for(graph: Graph, mode: Mode = Mode.STORAGE, spec: QuantSpec = FOUR_BITS) -> Plan:
    """Return a plan for the weights of the only node."""
    node = graph.nodes[0]
    operator = operator_of(node)
    assert operator is not None
    weights = tuple(
        Weight(index, node.inputs[index].name, spec, axes.channels(node), 0, axes.reduction(node))
        for index, axes in operator.weights.items()
        if is_constant(node.inputs[index])
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


def seen(model: ModelProto, graph: Graph, plan: Plan, gptq: Gptq = ALL) -> CalibrationStatistics:
    x, names = data_of(graph, 1), [output.name for output in graph.outputs]
    arrays = {"x": x, **dict(zip(names, run(open_session(model), {"x": x}, names), strict=True))}
    return observe(arrays, weight_requests(plan, graph, gptq), "0" * 32)


def nsr(text: str, model: ModelProto, graph: Graph, quantized: dict[tuple[str, int], QTensor], build: Build) -> float:
    """Return the squared error of the output that coded weights make of data that nobody has seen."""
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    decoded = {graph.nodes[0].inputs[index].name: found.dequantize() for (_, index), found in quantized.items()}
    x = {"x": data_of(graph, 2)}
    wanted, found = (run(open_session(one), x, None)[0] for one in (model, build(text, **{**stored, **decoded})))
    return float(np.square(found - wanted).sum())


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize(
    "spec", [FOUR_BITS, CHANNELS, QuantSpec("uint4", symmetric=False)], ids=lambda spec: spec.format
)
def test_products_come_closer_to_float_ones_on_new_data(name: str, spec: QuantSpec, build: Build) -> None:
    text, weights = OPERATORS[name]
    model = build(text, **weights)
    graph = as_graph(model)
    plan = plan_for(graph, spec=spec)
    statistics = seen(model, graph, plan)
    assert len(statistics.statistics) == len(plan.decisions[0].weights) == (2 if name == "GRU" else 1)
    found = [encode_with(plan, graph, {}, {}, statistics, config=one).weights for one in (DEFAULT_CONFIG, GPTQ)]
    before, after = (nsr(text, model, graph, quantized, build) for quantized in found)
    # One value a block is exact.
    assert after <= 0.8 * before


@pytest.mark.parametrize("name", ["MatMul", "Gemm", "Conv", "grouped Conv", "depthwise Conv"])
def test_errors_cancel_where_data_has_factors(name: str, build: Build) -> None:
    text, weights = OPERATORS[name]
    model = build(text, **weights)
    graph = as_graph(model)
    node, scales = graph.nodes[0], {"x": QuantParams(np.array(0.05, np.float32), None)}
    channels = node.inputs[0].shape[1]
    factors = ChannelScales(1, np.exp2(-np.random.default_rng(0).integers(0, 3, channels).astype(np.float64)))
    decisions = (replace(plan_for(graph, Mode.STATIC, CHANNELS).decisions[0], bias=None),)
    plan = Plan(decisions, (Activation("x", QuantSpec("int8"), "x"),), "s", "t")
    found = []
    for one in (DEFAULT_CONFIG, GPTQ):
        config = replace(one, equalization=Equalization({"x": factors}))
        encodings = encode_with(plan, graph, scales, {}, seen(model, graph, plan), config=config).weights
        values = WeightRescaling(factors).own_weight(node, 1, encodings["n", 1].dequantize())
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
    plan, scales = plan_for(graph, Mode.STATIC, CHANNELS), {"x": QuantParams(np.array(0.05, np.float32), None)}
    statistics = seen(model, graph, plan)
    plain, found = (encode_with(plan, graph, scales, {}, statistics, config=one) for one in (DEFAULT_CONFIG, GPTQ))
    before, after = plain.weights["n", 1], found.weights["n", 1]
    np.testing.assert_array_equal(before.parameters.scale, after.parameters.scale)
    assert (before.values != after.values).any()
    np.testing.assert_array_equal(plain.biases["n"].quantized.values, found.biases["n"].quantized.values)


def test_means_that_a_bias_makes_up_for_are_left_out(build: Build) -> None:
    text, weights = OPERATORS["Gemm"]
    model = build(text, **weights)
    graph = as_graph(model)
    plain = plan_for(graph)
    plan = replace(plain, decisions=(replace(plain.decisions[0], mean=Mean("x", -1)),))
    statistics, means = seen(model, graph, plan), {"x": data_of(graph, 1).mean(0, dtype=np.float64)}
    cache = EncodingCache()
    kept, left_out = (encode_with(plan, graph, {}, one, statistics, cache, GPTQ) for one in ({}, means))
    assert (kept.weights["n", 1].values != left_out.weights["n", 1].values).any()
    assert left_out.biases["n"].values is not None


@pytest.mark.parametrize(("scale", "factor"), [(1e20, 1.0), (1e20, 2.0**-90), (1.0, 2.0**-90), (1.0, 2.0**90)])
def test_data_whose_products_are_beyond_float32_leaves_the_nearest_codes(
    scale: float, factor: float, build: Build
) -> None:
    text, weights = OPERATORS["MatMul"]
    graph = as_graph(build(text, **weights))
    plan, scales = plan_for(graph, Mode.STATIC, CHANNELS), {"x": QuantParams(np.array(0.05, np.float32), None)}
    plan = replace(plan, activations=(Activation("x", QuantSpec("int8"), "x"),))
    statistics = observe({"x": np.float32(scale) * data_of(graph, 1)}, weight_requests(plan, graph, ALL), "0" * 32)
    equalization = Equalization({"x": ChannelScales(1, np.full(48, factor))})
    recipes = [replace(one, equalization=equalization) for one in (DEFAULT_CONFIG, GPTQ)]
    with warnings.catch_warnings(action="error"):
        plain, found = (encode_with(plan, graph, scales, {}, statistics, config=one).weights["n", 1] for one in recipes)
    np.testing.assert_array_equal(plain.values, found.values)


def test_codes_without_evidence_are_the_nearest(build: Build) -> None:
    text, weights = OPERATORS["MatMul"]
    graph = as_graph(build(text, **weights))
    plan = plan_for(graph)
    plain, found = (encode_with(plan, graph, {}, {}, config=one).weights["n", 1] for one in (DEFAULT_CONFIG, GPTQ))
    np.testing.assert_array_equal(plain.values, found.values)


@pytest.mark.parametrize(
    ("spec", "gptq"),
    [
        (QuantSpec("int16"), ALL),
        (QuantSpec("int8", method=Method.TORCH), ALL),
        (QuantSpec("int8-narrow", method=Method.BURN), ALL),
        (CHANNELS, Gptq(rows=9, bits=4)),
        (FOUR_BITS, Gptq(rows=9, memory=48 * 48 * 8 - 1)),
    ],
    ids=["16 bits", "PyTorch's", "Burn's", "more bits than wanted", "no memory"],
)
def test_some_weights_ask_for_nothing(spec: QuantSpec, gptq: Gptq, build: Build) -> None:
    text, weights = OPERATORS["MatMul"]
    graph = as_graph(build(text, **weights))
    assert weight_requests(plan_for(graph), graph, ALL)
    assert weight_requests(plan_for(graph, spec=spec), graph, gptq) == ()


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
    plan, cache = plan_for(graph), EncodingCache()
    statistics = seen(model, graph, plan)
    request = weight_requests(plan, graph, ALL)
    other = observe({"x": data_of(graph, 3)}, request, "1" * 32)
    first, again, second = (
        encode_with(plan, graph, {}, {}, one, cache, GPTQ).weights["n", 1] for one in (statistics, statistics, other)
    )
    assert first is again
    assert (first.values != second.values).any()


@pytest.mark.parametrize(("table", "requested"), [("tied", set()), ("own", {"embedded"})])
def test_a_head_that_is_tied_to_a_table_keeps_its_quantized_values(
    build: Build, plan_of: PlanOf, table: str, requested: set[str]
) -> None:
    # Rounded with its activations, the head would differ from the table, and the file would hold both.
    head = np.random.default_rng(0).normal(size=(64, 512)).astype(np.float32)
    rows = head.T if table == "tied" else head.T[::-1]
    model = build(
        "(int64[n] x) => (float[n,512] y) { [table] embedded = Gather(rows, x) [head] y = MatMul(embedded, head) }",
        rows=np.ascontiguousarray(rows),
        head=head,
    )
    plan = plan_of(model, scheme="int4-block32")
    assert {one.op_type for one in plan.decisions if one.weights} == {"Gather", "MatMul"}
    assert {one.tensor for one in weight_requests(plan, as_graph(model), ALL)} == requested
