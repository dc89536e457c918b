"""Bias correction: analytic by the means of the data, and sequential, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import ModelProto, numpy_helper, parser
from rounded_parts import both_outputs

from onnxq.algorithms import encode as node_codes
from onnxq.algorithms.bias_correction import (
    Layer,
    Rounded,
    layers_of,
    rounded_by,
    sequential_biases,
    shrink_means,
    with_sequential_biases,
)
from onnxq.algorithms.encode import encode, encode_with
from onnxq.algorithms.encoders import encode_weight
from onnxq.algorithms.encoding_config import EncodingConfig
from onnxq.algorithms.encodings import Encodings
from onnxq.algorithms.equalization import ChannelScales, Equalization
from onnxq.calibration.methods import Percentile
from onnxq.calibration.segments import stages
from onnxq.config.presets import PRESETS
from onnxq.config.scheme import Granularity, Method, Mode, QuantSpec
from onnxq.ir import Graph, read_model, save, to_model
from onnxq.numerics.affine import Array, QTensor, QuantParams, params_from_range, quantize
from onnxq.numerics.formats import FORMATS
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
from onnxq.planning.planner import make_plan, with_corrections
from onnxq.planning.weights import weight_at
from onnxq.preparing.preparation import prepare
from onnxq.rewrite import Pass
from onnxq.runtime.sessions import open_session, run
from onnxq.runtime.targets import TARGETS
from onnxq.search.evaluator import PlanEvaluator
from onnxq.search.prepared_model import open_prepared_model
from onnxq.system.resources import silent
from tests.conftest import Build

# Few bits make errors that no rounding of float32 hides.
COARSE = QuantSpec("int4-narrow", per=Granularity.CHANNEL)
SEARCHED = QuantSpec("int4-narrow", per=Granularity.CHANNEL, method=Method.MSE)
BLOCKS = QuantSpec("int4", per=(32,))
# Finer than any data, so that the rounding of biases to codes hides nothing either.
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
    """Return the model with codes for weights; applied twice, the pass changes nothing."""
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


LAYERS = (Layer("a", 1, "b0"), Layer("c", 1, "b1"), Layer("y", -1, "b2"))
FREE = ("w0", "w1", "w2", "b0", "b1", "b2")
GENERATOR = np.random.default_rng(5)
SAMPLES = [{"x": GENERATOR.random((1, 3, 6, 6), np.float32)} for _ in range(12)]


@pytest.fixture(scope="module")
def network(build: Build) -> onnx.ModelProto:
    return build(
        """(float[1,3,6,6] x) => (float[1,36,5] y) {
        a = Conv <pads = [1,1,1,1]> (x, w0, b0)
        b = Relu(a)
        c = Conv(b, w1, b1)
        shape = Constant <value = int64[3] {1, 4, 36}> ()
        d = Reshape(c, shape)
        e = Transpose <perm = [0,2,1]> (d)
        product = MatMul(e, w2)
        y = Add(product, b2)
        }""",
        w0=(8, 3, 3, 3),
        b0=(8,),
        w1=(4, 8, 1, 1),
        b1=(4,),
        w2=(4, 5),
        b2=(5,),
    )


def coarse(array: Array) -> Array:
    """Return what 3 bits leave of values."""
    parameters = params_from_range(array.min(), array.max(), FORMATS["uint2"], symmetric=False)
    return quantize(array, parameters, FORMATS["uint2"]).dequantize()


def four_bits(array: Array) -> QTensor:
    largest = np.abs(array).max()
    return quantize(array, params_from_range(-largest, largest, FORMATS["int4"], symmetric=True), FORMATS["int4"])


def rounded_of(model: onnx.ModelProto) -> Rounded:
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    codes = {name: four_bits(stored[name]) for name in ("w0", "w1", "w2")}
    return Rounded(codes | {name: stored[name] for name in ("b0", "b1", "b2")}, {"b": coarse, "c": coarse})


def outputs(model: onnx.ModelProto, rounded: Rounded, biases: Mapping[str, Array]) -> list[dict[str, Array]]:
    """Return what the layers give with rounded weights and data."""
    parts = stages(model, ["b", "c"], observed=["a"], free=FREE)
    found = []
    for sample in SAMPLES:
        values = dict(sample)
        for part in parts:
            weights = {**rounded.weights_of(part), **{name: biases[name] for name in part.weights if name in biases}}
            made = part.run(values, weights)
            values |= rounded.of(made)
            found.append({name: made[name] for name in made if name in ("a", "c", "y")})
    return found


def means_by_channel(given: list[dict[str, Array]], name: str, axis: int) -> Array:
    arrays = np.concatenate([one[name] for one in given if name in one])
    return arrays.mean(tuple(i for i in range(arrays.ndim) if i != axis % arrays.ndim), dtype=np.float64)


def corrected(model: onnx.ModelProto, samples: list[dict[str, Array]], layers: tuple[Layer, ...]) -> dict[str, Array]:
    parts = stages(model, ["b", "c"], observed=["a"], free=FREE)
    return sequential_biases(parts, samples, layers, rounded_of(model))


def test_every_channel_gets_the_mean_of_the_float_model(network: onnx.ModelProto) -> None:
    rounded, exact = rounded_of(network), Rounded({}, {})
    biases = corrected(network, SAMPLES, LAYERS)
    assert {name: (bias.dtype, bias.shape) for name, bias in biases.items()} == {
        name: (np.dtype(np.float32), (size,)) for name, size in (("b0", 8), ("b1", 4), ("b2", 5))
    }
    own = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in network.graph.initializer}
    for layer in LAYERS:
        wanted = means_by_channel(outputs(network, exact, own), layer.output, layer.axis)
        before = means_by_channel(outputs(network, rounded, {}), layer.output, layer.axis) - wanted
        after = means_by_channel(outputs(network, rounded, biases), layer.output, layer.axis) - wanted
        assert np.abs(after).max() < 0.1 * np.abs(before).max()


def test_the_output_gets_nearer_to_the_float_models(network: onnx.ModelProto) -> None:
    rounded = rounded_of(network)
    session = open_session(network)
    exact = [run(session, sample)[0] for sample in SAMPLES]

    def noise(biases: Mapping[str, Array]) -> float:
        made = [one["y"] for one in outputs(network, rounded, biases) if "y" in one]
        return float(sum(np.square(one - other).sum() for one, other in zip(exact, made, strict=True)))

    assert noise(corrected(network, SAMPLES[::2], LAYERS)) < 0.7 * noise({})


@pytest.mark.parametrize("samples", [[], SAMPLES[:1]])
def test_too_few_samples_change_no_bias(network: onnx.ModelProto, samples: list[dict[str, Array]]) -> None:
    rounded = rounded_of(network)
    for name, bias in corrected(network, samples, LAYERS).items():
        assert bias.tolist() == rounded.weights[name].tolist()


def test_layers_that_no_part_gives_are_left_alone(network: onnx.ModelProto) -> None:
    parts = stages(network, ["b"], free=FREE)
    assert set(sequential_biases(parts, SAMPLES, LAYERS, rounded_of(network))) == {"b2"}


def noise_of(samples: int, seed: int, channels: int = 400) -> tuple[Array, Array]:
    """Return sums of standard normal means, (samples, channels), and the elements of each sample."""
    generator = np.random.default_rng(seed)
    elements = generator.integers(1, 9, samples)
    return generator.standard_normal((samples, channels)) * elements[:, None], elements


@given(st.integers(4, 20), st.integers(0, 1000))
def test_a_steady_error_is_corrected_in_full_and_nothing_beyond_its_mean(samples: int, seed: int) -> None:
    sums, elements = noise_of(samples, seed)
    assert shrink_means(np.full((samples, 1), 3.0) * elements[:, None], elements) == pytest.approx([3.0])
    assert (np.abs(shrink_means(sums, elements)) <= np.abs(sums.sum(0) / elements.sum())).all()


@pytest.mark.parametrize("samples", [4, 8, 16])
def test_noise_is_hardly_corrected(samples: int) -> None:
    # A mean over draws: one of few samples with unlike elements may be taken for true by chance.
    draws = [noise_of(samples, seed) for seed in range(100)]
    kept = [np.square(shrink_means(*draw)).sum() / np.square(draw[0].sum(0) / draw[1].sum()).sum() for draw in draws]
    assert np.mean(kept) < 0.15


def test_samples_without_elements_say_nothing() -> None:
    assert shrink_means(np.array([[4.0], [0.0], [6.0]]), np.array([2, 0, 3])) == pytest.approx([2.0])
    assert shrink_means(np.array([[4.0], [0.0]]), np.array([2, 0])).tolist() == [0.0]


def test_the_layers_of_a_plan_are_those_with_a_bias_of_their_own(build: Build) -> None:
    model = build(
        """(float[1,3,6,6] x) => (float[1,3,5] y) {
        [first] a = Conv <pads = [1,1,1,1]> (x, w0, shared)
        [second] b = Conv <pads = [1,1,1,1]> (a, w0, shared)
        [third] c = Conv (b, w1, own)
        shape = Constant <value = int64[3] {1, 3, 36}> ()
        d = Reshape(c, shape)
        [product] e = MatMul(d, w2)
        [bias] f = Add(column, e)
        [last] y = MatMul(f, w3)
        }""",
        w0=(3, 3, 3, 3),
        shared=(3,),
        w1=(3, 3, 1, 1),
        own=(3,),
        w2=(36, 5),
        column=(5,),
        w3=(5, 5),
    )
    graph = prepare(read_model(model))
    plan = make_plan(graph, PRESETS["int8"], TARGETS["onnxruntime-cpu"])
    assert layers_of(graph, plan) == {"third": Layer("c", 1, "own"), "product": Layer("f", -1, "column")}


@pytest.fixture(scope="module")
def bare(build: Build) -> onnx.ModelProto:
    """Return convolutions of which the first ones have no bias before it is corrected."""
    return build(
        """(float[1,3,6,6] x) => (float[1,4,6,6] y) {
        a = Conv <pads = [1,1,1,1]> (x, w0)
        b = Relu(a)
        c = Conv <pads = [1,1,1,1]> (b, w1)
        y = Conv (c, w2, b2)
        }""",
        w0=(8, 3, 3, 3),
        w1=(4, 8, 3, 3),
        w2=(4, 4, 1, 1),
        b2=(4,),
    )


@pytest.mark.parametrize("name", ["network", "bare"])
@pytest.mark.parametrize("scheme", ["int8", "int8-per-tensor"])
def test_what_codes_make_of_a_model_is_what_the_quantized_model_computes(
    name: str, tmp_path: Path, scheme: str, request: pytest.FixtureRequest
) -> None:
    model: onnx.ModelProto = request.getfixturevalue(name)
    bench = open_prepared_model(read_model(model), PRESETS[scheme], TARGETS["onnxruntime-cpu"], tmp_path)
    plan = bench.plan({})
    evidence = bench.calibrate(plan, SAMPLES, silent)
    codes = encode(plan, bench.graph, evidence)
    rounded = rounded_by(codes, plan, bench.graph)
    assert {"w2", "b2"} <= rounded.weights.keys()
    for exact, found in both_outputs(bench, plan, evidence, EncodingConfig(), SAMPLES[:4], tmp_path):
        # Where sums are rounded otherwise, a value may fall to the next code.
        assert np.abs(found - exact).mean() < 0.01 * np.abs(exact).mean()


def test_channels_with_factors_are_told_as_the_float_model_has_them(network: onnx.ModelProto, tmp_path: Path) -> None:
    bench = open_prepared_model(read_model(network), PRESETS["int8"], TARGETS["onnxruntime-cpu"], tmp_path)
    plan = bench.plan({})
    evidence = bench.calibrate(plan, SAMPLES, silent)
    # The second convolution reads them, and the first makes them.
    factors = ChannelScales(1, np.array([1, 0.5, 0.25, 1, 0.7, 0.3, 1, 0.9]))
    recipe = EncodingConfig(
        migration=Equalization({tensor: factors for tensor in ("a", "b") if tensor in plan.by_tensor})
    )
    codes = encode(plan, bench.graph, evidence, recipe)
    assert codes.factors
    rounded = rounded_by(codes, plan, bench.graph)
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in network.graph.initializer}
    for name, values in rounded.weights.items():
        found = values.dequantize() if isinstance(values, QTensor) else values
        assert np.abs(found - stored[name]).max() < 0.02 * np.abs(stored[name]).max() + 0.01
    for exact, found in both_outputs(bench, plan, evidence, recipe, SAMPLES[:4], tmp_path):
        assert np.abs(found - exact).mean() < 0.01 * np.abs(exact).mean()


def test_a_recipe_with_corrected_biases_makes_a_model_nearer_to_float(network: onnx.ModelProto, tmp_path: Path) -> None:
    bench = open_prepared_model(read_model(network), PRESETS["int8"], TARGETS["onnxruntime-cpu"], tmp_path)
    plan = bench.plan({})
    evidence = bench.calibrate(plan, SAMPLES, silent)
    narrow = EncodingConfig(Percentile(90.0))
    codes = encode(plan, bench.graph, evidence, narrow)
    corrected = with_sequential_biases(narrow, plan, bench.graph, codes, bench.prepared, SAMPLES[::2])
    assert corrected.biases.keys() == layers_of(bench.graph, plan).keys()
    assert corrected.key != narrow.key
    save(bench.graph, tmp_path / "float.onnx")
    trials = PlanEvaluator.of(bench, tmp_path / "float.onnx", SAMPLES[1::2], evidence)
    assert trials.noise(plan, corrected).sum() < 0.9 * trials.noise(plan, narrow).sum()


def test_without_layers_a_recipe_stays(build: Build, tmp_path: Path) -> None:
    model = build("(float[2,4] x) => (float[2,4] y) { y = MatMul(x, w) }", w=(4, 4))
    bench = open_prepared_model(read_model(model), PRESETS["int8"], TARGETS["onnxruntime-cpu"], tmp_path)
    plan, samples = bench.plan({}), [{"x": np.ones((2, 4), np.float32)}]
    codes = encode(plan, bench.graph, bench.calibrate(plan, samples, silent))
    recipe = EncodingConfig()
    assert with_sequential_biases(recipe, plan, bench.graph, codes, bench.prepared, samples) is recipe


# Transposed convolutions in groups are corrected layer by layer as those of one group are.


@pytest.fixture(scope="module")
def grouped_network(build: Build) -> onnx.ModelProto:
    """Return transposed convolutions in groups, without a bias and with one."""
    return build(
        """(float[1,3,6,6] x) => (float[1,4,12,12] y) {
        [wide] a = ConvTranspose <group = 3, strides = [2,2]> (x, w0)
        b = Relu(a)
        [grouped] c = ConvTranspose <group = 2> (b, w1, b1)
        [last] y = Conv (c, w2, b2)
        }""",
        w0=(3, 96, 2, 2),
        w1=(288, 16, 1, 1),
        b1=(32,),
        w2=(4, 32, 1, 1),
        b2=(4,),
    )


@pytest.mark.parametrize("target", ["onnxruntime-cpu", "openvino"])
def test_what_codes_make_of_groups_is_what_the_quantized_model_computes(
    grouped_network: onnx.ModelProto, target: str, tmp_path: Path
) -> None:
    bench = open_prepared_model(read_model(grouped_network), PRESETS["int8"], TARGETS[target], tmp_path)
    plan = bench.plan({})
    assert layers_of(bench.graph, plan) == {"grouped": Layer("c", 1, "b1"), "last": Layer("y", 1, "b2")}
    evidence = bench.calibrate(plan, SAMPLES, silent)
    narrow = EncodingConfig(Percentile(90.0))
    codes = encode(plan, bench.graph, evidence, narrow)
    assert {name: bias.values.size for name, bias in codes.biases.items() if bias.values is not None} == {
        "wide": 288,
        "grouped": 32,
        "last": 4,
    }
    recipe = with_sequential_biases(narrow, plan, bench.graph, codes, bench.prepared, SAMPLES)
    assert recipe.biases.keys() == {"grouped", "last"}
    for exact, found in both_outputs(bench, plan, evidence, recipe, SAMPLES[:4], tmp_path):
        # Where sums are rounded otherwise, a value may fall to the next code.
        assert np.abs(found - exact).mean() < 0.01 * np.abs(exact).mean()
