"""OpenVINO as an engine; needs the extra ``openvino``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from model_zoo import recurrent_layers
from onnx import ModelProto

from onnxq import Budget, quantize
from onnxq.config.scheme import Granularity, Mode, QuantSpec, Rule, Scheme
from onnxq.errors import EngineError
from onnxq.runtime.engines import open_engine

pytest.importorskip("openvino")


def test_it_runs_times_and_profiles_by_the_names_of_nodes(build: Callable[..., ModelProto], tmp_path: Path) -> None:
    model = build(
        "(float[1,8,8,8] x) => (float[1,8,8,8] y) { [first] a = Conv <pads = [1,1,1,1]> (x, w0) [clamp] y = Relu(a) }",
        w0=(8, 8, 3, 3),
    )
    onnx.save(model, tmp_path / "model.onnx")
    sample = {"x": np.random.default_rng(0).standard_normal((1, 8, 8, 8)).astype(np.float32)}
    with open_engine("openvino-f32") as engine, open_engine("onnxruntime") as known:
        assert engine.version.startswith("openvino 20")
        assert engine.version.endswith(" in f32")
        first, second = (engine.load(tmp_path / "model.onnx", 1) for _ in range(2))
        expected = known.load(tmp_path / "model.onnx").run(sample)[0]
        assert first.outputs == ("y",)
        assert np.allclose(first.run(sample)[0], expected, atol=1e-5)
        assert sum(map(len, engine.time((first, second), [sample], 0.0))) == 1
        made = {name for one in engine.profile(tmp_path / "model.onnx", [sample], tmp_path, 2) for name in one.outputs}
        assert {"first", "y"} <= made


def test_its_version_says_what_it_computes_in_by_itself() -> None:
    with open_engine("openvino") as engine:
        assert engine.version.endswith((" in f32", " in bf16", " in f16"))


def test_a_model_is_known_by_its_bytes_wherever_it_lies(build: Callable[..., ModelProto], tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("first.onnx", "second.onnx")]
    sample = {"x": np.full(4, -2.0, np.float32)}
    made = {op: build(f"(float[4] x) => (float[4] y) {{ y = {op}(x) }}") for op in ("Abs", "Relu")}
    with open_engine("openvino-f32") as engine:

        def answers(*written: str) -> list[float]:
            for path, op in zip(paths, written, strict=True):
                onnx.save(made[op], path)
            engine.profile(paths[1], [sample], tmp_path, 1)
            return [float(engine.load(path).run(sample)[0][0]) for path in paths]

        assert answers("Abs", "Abs") == [2.0, 2.0]
        assert answers("Relu", "Abs") == [0.0, 2.0]
        paths[0].unlink()
        assert answers("Abs", "Relu") == [2.0, 0.0]


def test_what_it_refuses_is_told_in_its_words(build: Callable[..., ModelProto], tmp_path: Path) -> None:
    model = build("(float[4] x) => (float[4] y) { y = Unknown(x) }")
    onnx.save(model, tmp_path / "model.onnx")
    with open_engine("openvino") as engine, pytest.raises(EngineError, match=r"engine openvino cannot load .*Unknown"):
        engine.load(tmp_path / "model.onnx")


@pytest.mark.parametrize(
    ("mode", "kernel"), [("storage", "FullyConnected"), ("weight-only", "FullyConnectedCompressed")]
)
def test_only_products_that_are_to_multiply_codes_do(
    build: Callable[..., ModelProto], tmp_path: Path, mode: str, kernel: str
) -> None:
    model = build("(float[16, 256] x) => (float[16, 256] y) { a = MatMul(x, w) y = Relu(a) }", w=(256, 256))
    sample = {"x": np.random.default_rng(0).standard_normal((16, 256)).astype(np.float32)}
    scheme = Scheme((Rule(Mode(mode), weight=QuantSpec("int8-narrow", granularity=Granularity.CHANNEL)),))
    budget = Budget(search="off", accuracy="off", latency_seconds=0, engine="openvino-f32")
    quantize(model, [sample] * 4, tmp_path / "model.onnx", scheme=scheme, target="openvino", budget=budget)
    with open_engine("openvino-f32") as engine:
        kernels = engine.profile(tmp_path / "model.onnx", [sample], tmp_path, 2)
    assert [one.op_type for one in kernels if one.op_type.startswith("FullyConnected")] == [kernel]


@pytest.mark.parametrize(("channels", "kernel"), [(4, "Convolution"), (16, "ConvolutionBackpropData")])
def test_a_transposed_convolution_of_codes_computes_what_stands_behind_it(
    build: Callable[..., ModelProto], tmp_path: Path, channels: int, kernel: str
) -> None:
    model = build(
        f"(float[1,8,8,8] x) => (float[1,{channels},16,16] y) {{"
        "[first] a = Conv(x, w0) r = Relu(a) [up] b = ConvTranspose <strides = [2,2]> (r, w1) y = Sigmoid(b) }",
        w0=(8, 8, 1, 1),
        w1=(8, channels, 2, 2),
    )
    path, random = tmp_path / "model.onnx", np.random.default_rng(0)
    samples = [{"x": random.standard_normal((1, 8, 8, 8)).astype(np.float32)} for _ in range(4)]
    budget = Budget(search="off", accuracy="off", latency_seconds=0.0, engine="openvino-f32")
    report = quantize(model, samples, path, target="openvino", budget=budget).report
    assert report.accuracy.on_engines[0].agreement.worst_sqnr > 30
    with open_engine("openvino-f32") as engine:
        kernels = engine.profile(path, samples[:1], tmp_path, 1)
    assert [one.op_type for one in kernels if "up" in one.outputs] == [kernel]
    assert "Sigmoid" not in {one.op_type for one in kernels}


def test_recurrent_cells_with_stored_codes_are_loaded(tmp_path: Path) -> None:
    made = recurrent_layers()
    onnx.save(made, tmp_path / "float.onnx")
    samples = [{"x": np.random.default_rng(seed).standard_normal((4, 2, 8)).astype(np.float32)} for seed in range(4)]
    budget = Budget(search="off", accuracy="off", latency_seconds=0, engine="openvino-f32")
    report = quantize(tmp_path / "float.onnx", samples, scheme="int8-storage", target="openvino", budget=budget).report
    assert report.accuracy.on_engines[0].agreement.worst_sqnr > 30
