"""What goes wrong in other quantizers does not go wrong here; each test is one thing that their users met."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper
from stored_values import initializers

from onnxq.config.scheme import Mode
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
    codes = next(array for array in initializers(tmp_path / "q.onnx").values() if array.dtype == np.int8)
    assert np.count_nonzero(codes) >= 0.98 * np.count_nonzero(weight)


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
    codes = [
        array for array in initializers(tmp_path / "q.onnx").values() if array.dtype == np.int8 and array.ndim == 2
    ]
    assert len(codes) == 1
