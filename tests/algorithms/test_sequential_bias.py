from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rounded_parts import both_outputs

from onnxq.algorithms.codes import encode
from onnxq.algorithms.migration import Factors, Migration
from onnxq.algorithms.recipe import Recipe
from onnxq.algorithms.sequential_bias import (
    Layer,
    Rounded,
    layers_of,
    rounded_by,
    sequential_biases,
    told_from_chance,
    with_sequential_biases,
)
from onnxq.calibration.methods import Percentile
from onnxq.calibration.segments import stages
from onnxq.config.presets import PRESETS
from onnxq.ir import read_model, save
from onnxq.numerics.affine import Array, QTensor, parameters_from_range, quantize
from onnxq.numerics.formats import FORMATS
from onnxq.planning.planner import make_plan
from onnxq.preparing.preparation import prepare
from onnxq.runtime.sessions import open_session, run
from onnxq.runtime.targets import TARGETS
from onnxq.search.evaluator import Trials
from onnxq.search.workbench import open_workbench
from onnxq.system.resources import silent
from tests.conftest import Build

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
    parameters = parameters_from_range(array.min(), array.max(), FORMATS["uint2"], symmetric=False)
    return quantize(array, parameters, FORMATS["uint2"]).dequantize()


def four_bits(array: Array) -> QTensor:
    largest = np.abs(array).max()
    return quantize(array, parameters_from_range(-largest, largest, FORMATS["int4"], symmetric=True), FORMATS["int4"])


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


def channel_means(given: list[dict[str, Array]], name: str, axis: int) -> Array:
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
        wanted = channel_means(outputs(network, exact, own), layer.output, layer.axis)
        before = channel_means(outputs(network, rounded, {}), layer.output, layer.axis) - wanted
        after = channel_means(outputs(network, rounded, biases), layer.output, layer.axis) - wanted
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
    assert told_from_chance(np.full((samples, 1), 3.0) * elements[:, None], elements) == pytest.approx([3.0])
    assert (np.abs(told_from_chance(sums, elements)) <= np.abs(sums.sum(0) / elements.sum())).all()


@pytest.mark.parametrize("samples", [4, 8, 16])
def test_noise_is_hardly_corrected(samples: int) -> None:
    # A mean over draws: one of few samples with unlike elements may be taken for true by chance.
    draws = [noise_of(samples, seed) for seed in range(100)]
    kept = [
        np.square(told_from_chance(*draw)).sum() / np.square(draw[0].sum(0) / draw[1].sum()).sum() for draw in draws
    ]
    assert np.mean(kept) < 0.15


def test_samples_without_elements_say_nothing() -> None:
    assert told_from_chance(np.array([[4.0], [0.0], [6.0]]), np.array([2, 0, 3])) == pytest.approx([2.0])
    assert told_from_chance(np.array([[4.0], [0.0]]), np.array([2, 0])).tolist() == [0.0]


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
    bench = open_workbench(read_model(model), PRESETS[scheme], TARGETS["onnxruntime-cpu"], tmp_path)
    plan = bench.plan({})
    evidence = bench.calibrate(plan, SAMPLES, silent)
    codes = encode(plan, bench.graph, evidence)
    rounded = rounded_by(codes, plan, bench.graph)
    assert {"w2", "b2"} <= rounded.weights.keys()
    for exact, found in both_outputs(bench, plan, evidence, Recipe(), SAMPLES[:4], tmp_path):
        # Where sums are rounded otherwise, a value may fall to the next code.
        assert np.abs(found - exact).mean() < 0.01 * np.abs(exact).mean()


def test_channels_with_factors_are_told_as_the_float_model_has_them(network: onnx.ModelProto, tmp_path: Path) -> None:
    bench = open_workbench(read_model(network), PRESETS["int8"], TARGETS["onnxruntime-cpu"], tmp_path)
    plan = bench.plan({})
    evidence = bench.calibrate(plan, SAMPLES, silent)
    # The second convolution reads them, and the first makes them.
    factors = Factors(1, np.array([1, 0.5, 0.25, 1, 0.7, 0.3, 1, 0.9]))
    recipe = Recipe(migration=Migration({tensor: factors for tensor in ("a", "b") if tensor in plan.by_tensor}))
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
    bench = open_workbench(read_model(network), PRESETS["int8"], TARGETS["onnxruntime-cpu"], tmp_path)
    plan = bench.plan({})
    evidence = bench.calibrate(plan, SAMPLES, silent)
    narrow = Recipe(Percentile(90.0))
    codes = encode(plan, bench.graph, evidence, narrow)
    corrected = with_sequential_biases(narrow, plan, bench.graph, codes, bench.prepared, SAMPLES[::2])
    assert corrected.biases.keys() == layers_of(bench.graph, plan).keys()
    assert corrected.key != narrow.key
    save(bench.graph, tmp_path / "float.onnx")
    trials = Trials.of(bench, tmp_path / "float.onnx", SAMPLES[1::2], evidence)
    assert trials.noise(plan, corrected).sum() < 0.9 * trials.noise(plan, narrow).sum()


def test_without_layers_a_recipe_stays(build: Build, tmp_path: Path) -> None:
    model = build("(float[2,4] x) => (float[2,4] y) { y = MatMul(x, w) }", w=(4, 4))
    bench = open_workbench(read_model(model), PRESETS["int8"], TARGETS["onnxruntime-cpu"], tmp_path)
    plan, samples = bench.plan({}), [{"x": np.ones((2, 4), np.float32)}]
    codes = encode(plan, bench.graph, bench.calibrate(plan, samples, silent))
    recipe = Recipe()
    assert with_sequential_biases(recipe, plan, bench.graph, codes, bench.prepared, samples) is recipe
