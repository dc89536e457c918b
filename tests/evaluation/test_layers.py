"""Noise along the depth, beside the same parts of the models run by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from conftest import Build, QuantizeTo, Samples
from onnx import ModelProto
from onnx.utils import Extractor

from onnxq.algorithms.encoding_config import EncodingConfig, attach_encodings
from onnxq.algorithms.equalization import ChannelScales, Equalization
from onnxq.config.presets import PRESETS
from onnxq.errors import DataError
from onnxq.evaluation.layers import Layer, Layers, SampleSqnr, _LayerErrors, compare_layers
from onnxq.ir import as_graph
from onnxq.pipeline.quantization import quantize
from onnxq.pipeline.request import Budget
from onnxq.planning.plan import DIVIDED_KEY
from onnxq.runtime.sessions import open_session, run
from onnxq.runtime.targets import DEFAULT_TARGET, target_named
from onnxq.search.prepared_model import open_prepared_model
from onnxq.system.resources import silent


def saved(samples: Samples, folder: Path) -> Path:
    folder.mkdir()
    for index, sample in enumerate(samples):
        np.savez(folder / f"{index}.npz", **sample)
    return folder


def sqnr(expected: list[np.ndarray], found: list[np.ndarray]) -> float:
    signal = sum(np.square(one, dtype=np.float64).sum() for one in expected)
    nsr = sum(np.square(one - other, dtype=np.float64).sum() for one, other in zip(expected, found, strict=True))
    return float(10 * np.log10(signal / nsr))


@pytest.fixture
def compared(
    residual: ModelProto, quantize_to: QuantizeTo, samples_for: Callable[..., Samples], tmp_path: Path
) -> dict[str, Layer]:
    onnx.save(residual, tmp_path / "float.onnx")
    quantize_to(residual, tmp_path / "int8.onnx")
    data = saved(samples_for(residual), tmp_path / "data")
    found = compare_layers(tmp_path / "float.onnx", tmp_path / "int8.onnx", data)
    assert (found.samples, found.left) == (4, {})
    return {one.tensor: one for one in found.layers}


def test_every_layer_is_told_in_the_order_of_execution(compared: dict[str, Layer]) -> None:
    assert list(compared)[-1] == "y"
    reported = [(one.node, one.op_type) for one in compared.values()]
    assert reported.index(("left", "Conv")) < reported.index(("right", "Conv")) < reported.index(("last", "Conv"))
    assert compared["y"].isolated > compared["y"].accumulated > 20


def test_accumulated_noise_is_that_of_the_model_as_it_runs(
    compared: dict[str, Layer], residual: ModelProto, samples_for: Callable[..., Samples], tmp_path: Path
) -> None:
    samples = samples_for(residual)
    expected, found = (
        [run(open_session(path), sample, ["y"])[0] for sample in samples]
        for path in (tmp_path / "float.onnx", tmp_path / "int8.onnx")
    )
    assert compared["y"].accumulated == pytest.approx(sqnr(expected, found), abs=0.1)
    each = [sqnr([one], [other]) for one, other in zip(expected, found, strict=True)]
    assert [one.sample for one in compared["y"].worst] == sorted(range(4), key=each.__getitem__)[:3]
    assert compared["y"].worst[0].sqnr == pytest.approx(min(each), abs=0.1)


@pytest.mark.parametrize(("before", "tensor"), [("b", "c"), ("d", "e"), ("g", "y")])
def test_isolated_noise_is_that_of_a_part_which_is_fed_with_floats(
    before: str,
    tensor: str,
    compared: dict[str, Layer],
    residual: ModelProto,
    samples_for: Callable[..., Samples],
    tmp_path: Path,
) -> None:
    whole = ModelProto()
    whole.CopyFrom(residual)
    names = (name for name in (before, tensor) if name != "y")
    whole.graph.output.extend(onnx.helper.make_tensor_value_info(name, 1, None) for name in names)
    quantized = onnx.shape_inference.infer_shapes(onnx.load(tmp_path / "int8.onnx"))
    part = open_session(Extractor(quantized).extract_model([before], [tensor]), optimize=False)
    floats = [run(open_session(whole), sample, [before, tensor]) for sample in samples_for(residual)]
    found = [run(part, {before: fed})[0] for fed, _ in floats]
    assert compared[tensor].isolated == pytest.approx(sqnr([one for _, one in floats], found), abs=0.05)


def test_a_model_beside_itself_is_equal_everywhere(residual: ModelProto, samples_for, tmp_path: Path) -> None:
    onnx.save(residual, tmp_path / "float.onnx")
    data = saved(samples_for(residual, 1), tmp_path / "data")
    found = compare_layers(tmp_path / "float.onnx", tmp_path / "float.onnx", data)
    assert min(min(one.isolated, one.accumulated) for one in found.layers) > 120


def test_divided_channels_are_compared_where_a_plan_tells_their_factors(
    residual: ModelProto, samples_for: Callable[..., Samples], tmp_path: Path
) -> None:
    paths = tmp_path / "float.onnx", tmp_path / "int8.onnx"
    onnx.save(residual, paths[0])
    samples = samples_for(residual)
    bench = open_prepared_model(as_graph(residual), PRESETS["int8"], target_named(DEFAULT_TARGET), tmp_path)
    plan, factors = bench.plan({}), ChannelScales(1, np.linspace(0.3, 1.0, 8))
    statistics = bench.calibrate(plan, samples, silent)
    config = EncodingConfig(equalization=Equalization({"d": factors}))
    bench.build(plan, statistics, config, paths[1], external_data=False)
    plan = attach_encodings(plan, config, statistics)
    entries = {entry.key: entry.value for entry in onnx.load(paths[1]).metadata_props}
    assert json.loads(entries[DIVIDED_KEY]) == {"c": "d", "d": "d"}
    data = saved(samples, tmp_path / "data")
    alone, together = compare_layers(*paths, data), compare_layers(*paths, data, plan=plan)
    assert (alone.left.keys(), together.left) == ({"c", "d"}, {})
    assert {one.tensor for one in together.layers} == {one.tensor for one in alone.layers} | {"c", "d"}
    assert min(min(one.isolated, one.accumulated) for one in together.layers) > 10
    assert ({one.mode for one in together.layers}, {one.mode for one in alone.layers}) == ({"static"}, {""})
    # However the model is cut, its output is the same but for the rounding of kernels.
    assert together.layers[-1].accumulated == pytest.approx(alone.layers[-1].accumulated, abs=0.1)


def test_float_data_that_is_divided_is_compared_with_its_factors(build: Build, tmp_path: Path) -> None:
    loud = np.where(np.arange(64) % 32 == 3, 30.0, 1.0).astype(np.float32)
    text = "(float[8,64] x) => (float[8,48] y) { n = LayerNormalization(x, s, b) a = MatMul(n, w) y = Add(a, c) }"
    onnx.save(build(text, s=loud, b=(64,), w=(64, 48), c=(48,)), tmp_path / "float.onnx")
    generator = np.random.default_rng(0)
    samples = [{"x": generator.normal(size=(8, 64)).astype(np.float32)} for _ in range(32)]
    budget, path = Budget(search="off", accuracy="awq", latency_seconds=0), tmp_path / "int4.onnx"
    plan = quantize(tmp_path / "float.onnx", samples, path, scheme="int4-block32", budget=budget, goal=10).report.plan
    assert [one.tensor for one in plan.awq] == ["n"]
    data = saved(samples[:2], tmp_path / "data")
    assert set(compare_layers(tmp_path / "float.onnx", path, data).left) == {"n"}
    found = {one.tensor: one for one in compare_layers(tmp_path / "float.onnx", path, data, plan=plan).layers}
    assert found["n"].accumulated > 100
    assert found["y"].isolated == pytest.approx(found["y"].accumulated, abs=0.1)


def test_tensors_of_other_shapes_are_left(build: Build, tmp_path: Path) -> None:
    for name, axes in (("a", "[0, 1]"), ("b", "[1, 0]")):
        text = f"(float[2,3] x) => (float[N] y) {{ t = Transpose <perm = {axes}> (x) r = Relu(t) y = ReduceMax(r) }}"
        model = build(text.replace("ReduceMax(r)", "ReduceMax <axes = [0], keepdims = 0> (r)"))
        onnx.save(model, tmp_path / f"{name}.onnx")
    data = saved([{"x": np.ones((2, 3), np.float32)}], tmp_path / "data")
    found = compare_layers(tmp_path / "a.onnx", tmp_path / "b.onnx", data)
    assert found.layers == ()
    assert set(found.left) == {"t", "r", "y"}


def test_models_without_a_common_tensor_are_refused(build: Build, tmp_path: Path) -> None:
    for name in ("a", "b"):
        onnx.save(build(f"(float[2] x) => (float[2] {name}) {{ {name} = Relu(x) }}"), tmp_path / f"{name}.onnx")
    with pytest.raises(DataError, match="no tensor name in common"):
        compare_layers(tmp_path / "a.onnx", tmp_path / "b.onnx", [{"x": np.ones(2, np.float32)}])


def test_json_has_words_for_infinity() -> None:
    layer = Layer("t", "n", "Relu", "", math.inf, 20.0, (SampleSqnr(3, -math.inf),))
    plain = json.loads(json.dumps(Layers(1, (layer,), {"u": "why"}).to_dict(), allow_nan=False))
    assert plain["layers"][0] == {
        "tensor": "t",
        "node": "n",
        "op_type": "Relu",
        "mode": "",
        "isolated": "Infinity",
        "accumulated": 20.0,
        "worst": [{"sample": 3, "sqnr": "-Infinity"}],
    }


def test_infinite_values_inside_are_left_out_without_a_warning() -> None:
    errors = _LayerErrors(None)
    expected = np.array([-np.inf, 3.0, 4.0], np.float32)
    # The suite makes errors of numpy's warnings.
    errors.add(expected, expected, np.array([-np.inf, 3.0, 4.5], np.float32))
    assert errors.rows == [(25.0, 0.0, 0.25)]
