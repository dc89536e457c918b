"""What goes wrong in other quantizers does not go wrong here; each test is one thing that their users met."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper
from stored_values import initializers

from onnxq.calibration.methods import MinMax, Percentile
from onnxq.config.presets import PRESETS
from onnxq.config.scheme import Mode
from onnxq.errors import DataError
from onnxq.ir import read_model, to_model
from onnxq.passes.preparing.preparation import prepare
from onnxq.pipeline.quantization import quantize
from onnxq.pipeline.request import Budget
from onnxq.runtime.sessions import open_session, run

PADS = "<pads = [1,1,1,1]>"
KERNEL = (8, 8, 3, 3)


# --- weights --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("magnitude", [5.8e-3, 1e-5, 6e-8])
def test_small_float16_weights_do_not_become_zeros(magnitude: float, build, quantize_to, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    weight = (generator.uniform(-1, 1, (64, 64)) * magnitude).astype(np.float16)
    model = build("(float16[4,64] x) => (float16[4,64] y) { [n] y = MatMul(x, w) }", w=weight)
    quantize_to(model, tmp_path / "q.onnx")
    quantized = next(array for array in initializers(tmp_path / "q.onnx").values() if array.dtype == np.int8)
    assert np.count_nonzero(quantized) >= 0.98 * np.count_nonzero(weight)


@pytest.mark.parametrize("scheme", ["int8", "int8-storage"])
def test_weights_in_constant_nodes_are_weights(scheme: str, build, quantize_to, tmp_path: Path) -> None:
    model = build(f"(float[1,8,8,8] x) => (float[1,8,8,8] y) {{ [n] y = Conv {PADS} (x, w) }}", w=KERNEL)
    weight = model.graph.initializer.pop()
    model.graph.node.insert(0, helper.make_node("Constant", [], ["w"], value=weight))
    done = quantize_to(model, tmp_path / "q.onnx", scheme=scheme)
    assert [one.tensor for one in done.report.plan.by_node["n"].weights] == ["w"]
    arrays = initializers(tmp_path / "q.onnx").values()
    assert [array.shape for array in arrays if array.dtype == np.int8 and array.ndim == 4] == [KERNEL]
    assert not any(array.dtype == np.float32 and array.size == 576 for array in arrays)
    assert not any(node.op_type == "Constant" for node in onnx.load(tmp_path / "q.onnx").graph.node)


def test_no_float_copy_of_a_quantized_weight_stays_in_the_file(
    residual: ModelProto, quantize_to, tmp_path: Path
) -> None:
    quantize_to(residual, tmp_path / "q.onnx")
    assert {array.dtype.name for array in initializers(tmp_path / "q.onnx").values() if array.ndim > 1} == {"int8"}


def test_a_gemm_keeps_its_name_and_its_kind(perceptron: ModelProto, quantize_to, tmp_path: Path) -> None:
    quantize_to(perceptron, tmp_path / "q.onnx")
    kept = {node.name: node.op_type for node in onnx.load(tmp_path / "q.onnx").graph.node}
    assert (kept["first"], kept["second"]) == ("MatMul", "Gemm")


def test_a_huge_bias_does_not_overflow(build, quantize_to, tmp_path: Path) -> None:
    bias = np.array([0.1, 5e6, -5e6, 1.0], np.float32)
    weight = (np.random.default_rng(0).normal(size=(32, 4)) * 1e-4).astype(np.float32)
    model = build("(float[4,32] x) => (float[4,4] y) { [n] y = Gemm(x, w, b) }", w=weight, b=bias)
    quantize_to(model, tmp_path / "q.onnx")
    sample = {"x": np.random.default_rng(1).normal(size=(4, 32)).astype(np.float32)}
    found, expected = (run(open_session(one), sample)[0] for one in (tmp_path / "q.onnx", model))
    np.testing.assert_allclose(found[:, 1:3], expected[:, 1:3], rtol=1e-4)
    np.testing.assert_allclose(found[:, [0, 3]], expected[:, [0, 3]], atol=1e-2)


# --- graphs ---------------------------------------------------------------------------------------------------------


def test_a_custom_operator_in_front_of_a_split_does_not_hang(build, quantize_to, tmp_path: Path) -> None:
    model = build(
        f"""(float[1,8,4,4] x) => (float[1,8,4,4] y) {{
        [gelu] a = FastGelu(x)
        [split] p, q = Split <axis = 1> (a, k)
        [cat] b = Concat <axis = 1> (q, p)
        [n] y = Conv {PADS} (b, w)
        }}""",
        k=np.array([4, 4]),
        w=KERNEL,
    )
    model.graph.node[0].domain = "com.microsoft"
    model.opset_import.add(domain="com.microsoft", version=1)
    done = quantize_to(model, tmp_path / "q.onnx")
    # Without inferred types behind the custom operator nothing is guessed.
    assert done.report.plan.by_node["split"].mode is Mode.FLOAT
    assert all(one.reason for one in done.report.plan.decisions)


@pytest.mark.parametrize("opset", [9, 11, 12, 13, 17, 21])
def test_a_model_of_an_older_opset_is_converted_and_not_relabelled(
    opset: int, build, quantize_to, tmp_path: Path
) -> None:
    squeeze = "Squeeze <axes = [2,3]> (p)" if opset < 13 else "Squeeze(p, axes)"
    axes = {} if opset < 13 else {"axes": np.array([2, 3])}
    text = f"""(float[1,8,8,8] x) => (float[1,4] y) {{
        [c] a = Conv {PADS} (x, w) [p] p = GlobalAveragePool(a) [s] s = {squeeze} [g] y = Gemm(s, v, b)
    }}"""
    model = build(text, opset=opset, w=KERNEL, v=(8, 4), b=(4,), **axes)
    done = quantize_to(model, tmp_path / "q.onnx")
    assert done.report.agreement.worst_sqnr > 25
    assert {one.op_type for one in done.report.plan.decisions if one.mode is Mode.STATIC} >= {"Conv", "Gemm"}
    written = onnx.load(tmp_path / "q.onnx")
    onnx.checker.check_model(written, full_check=True)
    assert written.opset_import[0].version == max(opset, 13)


def test_weights_are_stored_without_touching_the_opset(build, quantize_to, tmp_path: Path) -> None:
    model = build(
        "(float[4,32] x) => (float[32] y) { [n] a = MatMul(x, w) y = ReduceMax <axes = [0], keepdims = 0> (a) }",
        opset=9,
        w=(32, 32),
    )
    quantize_to(model, tmp_path / "q.onnx", scheme="int8-storage")
    assert onnx.load(tmp_path / "q.onnx").opset_import[0].version == 9


def chain(count: int) -> ModelProto:
    """Return ``count`` matrix products with a Relu behind each."""
    nodes, weights = [], []
    for index in range(count):
        weights.append(numpy_helper.from_array(np.eye(4, dtype=np.float32), f"w{index}"))
        nodes.append(helper.make_node("MatMul", [f"t{index}", f"w{index}"], [f"m{index}"], f"n{index}"))
        nodes.append(helper.make_node("Relu", [f"m{index}"], [f"t{index + 1}"], f"r{index}"))
    value = helper.make_tensor_value_info
    ends = [value("t0", TensorProto.FLOAT, [4, 4])], [value(f"t{count}", TensorProto.FLOAT, [4, 4])]
    return helper.make_model(
        helper.make_graph(nodes, "chain", *ends, weights), opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )


def test_bookkeeping_grows_with_the_nodes_and_not_with_their_square(tmp_path: Path, quantize_to) -> None:
    def lines(count: int) -> int:
        """Count the lines of the project that run while a chain is quantized."""
        calls = 0

        def trace(frame, event, argument):
            nonlocal calls
            if "onnxq" not in frame.f_code.co_filename and "passes" not in frame.f_code.co_filename:
                return None
            calls += event == "line"
            return trace

        sys.settrace(trace)
        try:
            quantize_to(chain(count), tmp_path / f"{count}.onnx", samples=[{"t0": np.eye(4, dtype=np.float32)}])
        finally:
            sys.settrace(None)
        return calls

    small, large = lines(25), lines(100)
    assert small > 1000
    assert large < 4.4 * small


def test_shared_weights_and_names_that_look_taken_are_kept_apart(build, quantize_to, tmp_path: Path) -> None:
    text = """(float[4,32] x) => (float[4,32] y) {
        [first] w.codes = MatMul(x, w) [relu] w.scale = Relu(w.codes) [second] y = MatMul(w.scale, w)
    }"""
    text = text.replace("w.codes", "w_codes").replace("w.scale", "w_scale")
    model = build(text, w=(32, 32))
    for node in model.graph.node:
        node.input[:] = [name.replace("w_", "w.") for name in node.input]
        node.output[:] = [name.replace("w_", "w.") for name in node.output]
    done = quantize_to(model, tmp_path / "q.onnx")
    assert done.report.agreement.worst_sqnr > 25
    quantized = [
        array for array in initializers(tmp_path / "q.onnx").values() if array.dtype == np.int8 and array.ndim == 2
    ]
    assert len(quantized) == 1


# --- models that are quantized already, options, files ---------------------------------------------------------------


def test_a_model_may_be_given_by_its_bare_name(perceptron: ModelProto, samples_for, tmp_path: Path) -> None:
    onnx.save(perceptron, tmp_path / "model.onnx")
    np.savez(tmp_path / "calib.npz", **samples_for(perceptron, 1)[0])
    command = [
        sys.executable,
        "-m",
        "onnxq",
        "quantize",
        "model.onnx",
        "--calib",
        "calib.npz",
        "--latency-seconds",
        "0",
    ]
    environment = {**os.environ, "COLUMNS": "80"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "model.int8.onnx\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["calib.npz", "model.int8.onnx", "model.onnx"]


def test_external_data_stays_external_and_an_old_data_file_is_replaced(
    perceptron: ModelProto, samples_for, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onnxq.pipeline.prepare._ONE_FILE", 0)
    model = ModelProto()
    model.CopyFrom(perceptron)
    onnx.save(model, tmp_path / "model.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    for _ in range(2):
        quantize(
            tmp_path / "model.onnx", samples_for(perceptron), tmp_path / "q.onnx", budget=Budget(latency_seconds=0)
        )
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "model.onnx",
            "q.onnx",
            "q.onnx.data",
            "weights.bin",
        ]
    assert any(
        tensor.external_data for tensor in onnx.load(tmp_path / "q.onnx", load_external_data=False).graph.initializer
    )
    run(open_session(tmp_path / "q.onnx"), samples_for(perceptron, 1)[0])


def test_the_logging_of_an_application_is_left_alone(perceptron: ModelProto, samples_for, capfd) -> None:
    root = logging.getLogger()
    before = root.level, list(root.handlers)
    quantize(perceptron, samples_for(perceptron), budget=Budget(latency_seconds=0))
    assert (root.level, list(root.handlers)) == before
    assert capfd.readouterr() == ("", "")


def test_a_model_in_memory_is_not_changed(residual: ModelProto, samples_for) -> None:
    before = residual.SerializeToString(deterministic=True)
    quantize(residual, samples_for(residual), budget=Budget(latency_seconds=0))
    assert residual.SerializeToString(deterministic=True) == before


def test_preparing_twice_changes_nothing_more(residual: ModelProto) -> None:
    once = to_model(prepare(read_model(residual)))
    assert to_model(prepare(read_model(once))) == once


def activation_parameters(path: Path) -> dict[str, tuple[float, int]]:
    """Return scale and zero point of every tensor that a QuantizeLinear reads."""
    values = initializers(path)
    return {
        node.input[0]: (float(values[node.input[1]]), int(values[node.input[2]]))
        for node in onnx.load(path).graph.node
        if node.op_type == "QuantizeLinear"
    }


# --- calibration ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_activations_that_are_not_finite_are_an_error_and_no_infinite_scale(
    value: float, build, tmp_path: Path
) -> None:
    # The model itself makes the infinity: its input is finite, and so is one of its outputs.
    model = build(
        "(float[4,32] x) => (float[4,32] a, float[4,32] y) { a = MatMul(x, w) b = Add(a, k) y = MatMul(b, w) }",
        w=(32, 32),
        k=np.full(32, value, np.float32),
    )
    with pytest.raises(DataError, match=r"NaN or infinite values"):
        quantize(model, [{"x": np.eye(4, 32, dtype=np.float32)}], tmp_path / "q.onnx", budget=Budget(latency_seconds=0))
    assert list(tmp_path.iterdir()) == []


def test_samples_of_different_lengths_calibrate_together(build, tmp_path: Path) -> None:
    model = build("(float[N,L,32] x) => (float[N,L,16] y) { [n] y = MatMul(x, w) }", w=(32, 16))
    generator = np.random.default_rng(0)
    samples = [{"x": generator.normal(size=shape).astype(np.float32)} for shape in ((1, 3, 32), (2, 7, 32), (1, 1, 32))]
    scheme = replace(PRESETS["int8"], ranges=Percentile(99.9))
    done = quantize(model, samples, tmp_path / "q.onnx", scheme=scheme, budget=Budget(latency_seconds=0))
    assert done.report.plan.by_node["n"].mode is Mode.STATIC
    assert done.report.agreement.samples == 3


def test_samples_are_never_reused_for_another_run(build, tmp_path: Path) -> None:
    model = build("(float[4,32] x) => (float[4,16] y) { y = MatMul(x, w) }", w=(32, 16))
    scales = []
    for factor in (1.0, 100.0):
        samples = [{"x": np.linspace(-factor, factor, 128, dtype=np.float32).reshape(4, 32)}]
        scheme = replace(PRESETS["int8"], ranges=MinMax())
        quantize(model, samples, tmp_path / "q.onnx", scheme=scheme, budget=Budget(latency_seconds=0))
        scales.append(activation_parameters(tmp_path / "q.onnx")["x"][0])
    assert scales[1] == pytest.approx(100 * scales[0])


# --- scales ---------------------------------------------------------------------------------------------------------


def test_what_is_concatenated_has_one_scale(build, quantize_to, tmp_path: Path) -> None:
    model = build(
        f"""(float[1,8,8,8] x) => (float[1,8,8,8] y) {{
        a = Conv {PADS} (x, w0) b = Conv {PADS} (x, w1) c = Concat <axis = 1> (a, b) y = Conv {PADS} (c, w2)
        }}""",
        w0=KERNEL,
        w1=np.random.default_rng(3).normal(0, 0.01, KERNEL).astype(np.float32),
        w2=(8, 16, 3, 3),
    )
    quantize_to(model, tmp_path / "q.onnx")
    found = activation_parameters(tmp_path / "q.onnx")
    assert found["a"] == found["b"] == found["c"]
    assert found["c"] != found["x"]


def test_a_sigmoid_has_the_range_that_it_can_have(build, quantize_to, tmp_path: Path) -> None:
    model = build(
        f"""(float[1,8,8,8] x) => (float[1,8,8,8] y) {{
        a = Conv {PADS} (x, w0) s = Sigmoid(a) y = Conv {PADS} (s, w1)
        }}""",
        w0=np.full(KERNEL, 1e-3, np.float32),
        w1=KERNEL,
    )
    quantize_to(model, tmp_path / "q.onnx")
    scale, zero_point = activation_parameters(tmp_path / "q.onnx")["s"]
    assert (np.float32(scale), zero_point) == (np.float32(1 / 255), 0)


def test_a_clamp_around_zero_is_kept(build, quantize_to, tmp_path: Path) -> None:
    model = build(
        f"""(float[1,8,8,8] x) => (float[1,8,8,8] y) {{
        a = Conv {PADS} (x, w0) b = Clip(a, lo, hi) y = Conv {PADS} (b, w1)
        }}""",
        w0=np.random.default_rng(0).normal(0, 3, KERNEL).astype(np.float32),
        w1=KERNEL,
        lo=np.array(-1, np.float32),
        hi=np.array(1, np.float32),
    )
    quantize_to(model, tmp_path / "q.onnx")
    assert Counter(node.op_type for node in onnx.load(tmp_path / "q.onnx").graph.node)["Clip"] == 1


def test_nothing_is_written_beside_the_model(perceptron: ModelProto, samples_for, tmp_path: Path) -> None:
    models, outputs = tmp_path / "models", tmp_path / "outputs"
    models.mkdir()
    outputs.mkdir()
    onnx.save(perceptron, models / "model.onnx")
    models.chmod(0o555)
    try:
        quantize(models / "model.onnx", samples_for(perceptron), outputs / "q.onnx", budget=Budget(latency_seconds=0))
    finally:
        models.chmod(0o755)
    assert [path.name for path in models.iterdir()] == ["model.onnx"]
    assert [path.name for path in outputs.iterdir()] == ["q.onnx"]
