"""Targets and what their runtimes can do, checked against what onnxruntime fuses."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxq.config.scheme import Mode
from onnxq.errors import SchemeError
from onnxq.lowering import is_kernel_block
from onnxq.numerics.formats import FORMATS
from onnxq.ops import OPERATORS, Role
from onnxq.runtime.sessions import open_session, run
from onnxq.runtime.targets import TARGETS, target_named

every_target = pytest.mark.parametrize("target", TARGETS.values(), ids=list(TARGETS))


@every_target
def test_a_row_names_formats_and_operators_that_exist(target) -> None:
    assert {target.activation.format, target.weight.format} <= set(FORMATS)
    bits = [FORMATS[spec.format].bits for spec in target.kernels.multiplied]
    assert bits == sorted(bits, reverse=True)
    assert all(is_kernel_block(spec.granularity) for spec in target.kernels.multiplied) or not target.is_onnxruntime
    # What is fused is multiplied or vanishes, but not both; scales of each run come in one way.
    fused, kernels = target.kernels.fused, target.kernels
    assert fused.float_output | fused.either_output <= fused.ops
    assert not fused.float_output & fused.either_output
    assert not fused.clamps & fused.ops
    assert all(OPERATORS["", op].role is not Role.WEIGHTED for op in fused.ops)
    assert all(OPERATORS["", op].role is Role.WEIGHTED for op in kernels.own_dynamic)
    assert not kernels.dynamic & kernels.own_dynamic


def test_each_target_wants_its_code_types() -> None:
    assert {name: (row.activation.format, row.activation.symmetric) for name, row in TARGETS.items()} == {
        "onnxruntime-cpu": ("uint8", False),
        "onnxruntime-cpu-arm": ("int8", False),
        "onnxruntime-node": ("uint8", False),
        "onnxruntime-web": ("uint8", False),
        "tensorrt": ("int8", True),
        "openvino": ("uint8", False),
        "qnn": ("uint8", False),
    }
    assert {target.weight.format for target in TARGETS.values()} == {"int8-narrow"}


# A product, the shapes of its data and weight, and the axis of its channels.
PRODUCTS = {
    "odd channels": ("Conv(x, w)", (1, 3, 6, 6), (4, 3, 3, 3), 0),
    "even channels": ("Conv(x, w)", (1, 8, 6, 6), (4, 8, 3, 3), 0),
    "a pixel": ("Conv(x, w)", (1, 17, 6, 6), (4, 17, 1, 1), 0),
    "a line": ("Conv(x, w)", (1, 5, 6), (4, 5, 3), 0),
    "groups": ("Conv <group = 2> (x, w)", (1, 8, 6, 6), (4, 4, 3, 3), 0),
    "several of a channel": ("Conv <group = 4> (x, w)", (1, 4, 6, 6), (8, 1, 3, 3), 0),
    "each channel by itself": ("Conv <group = 8> (x, w)", (1, 8, 6, 6), (8, 1, 3, 3), 0),
    "a matrix": ("MatMul(x, w)", (2, 15), (15, 4), 1),
    "a transposed matrix": ("Gemm <transB = 1> (x, w)", (2, 16), (4, 16), 0),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_the_largest_codes_are_exact_everywhere(name: str, build, quantize_to, tmp_path: Path) -> None:
    call, data, shape, axis = PRODUCTS[name]
    # Any two weights of a channel are too much for 16 bits, in every other one below zero.
    signs = np.array([1, -1] * shape[axis], np.float32)[: shape[axis]]
    weight = np.ones(shape, np.float32) * signs.reshape([-1 if place == axis else 1 for place in range(len(shape))])
    model = build(f"(float{list(data)} x) => (float[] y) {{ y = {call} }}", w=weight)
    sample = {"x": np.full(data, 5.0, np.float32)}
    ends = sample["x"].copy()
    ends.flat[0] = 0.0
    quantize_to(model, tmp_path / "q.onnx", samples=[{"x": ends}, sample])
    fast, plain = (run(open_session(tmp_path / "q.onnx", optimize=way), sample)[0] for way in (True, False))
    # Sums of integers are rounded to quantized values once, and those of floats may fall on the other side.
    assert np.abs(fast - plain).max() <= np.abs(plain).max() / 127


@pytest.fixture(scope="module")
def classifier(build) -> onnx.ModelProto:
    """Return a small CNN: a residual block, pooling and a product."""
    kernel = (8, 8, 3, 3)
    return build(
        """(float[1,8,8,8] x) => (float[1,10] y) {
        a = Conv <pads = [1,1,1,1]> (x, w0, b0)
        b = Relu(a)
        c = Conv <pads = [1,1,1,1]> (b, w1, b1)
        d = Add(c, b)
        e = Relu(d)
        f = MaxPool <kernel_shape = [2,2], strides = [2,2]> (e)
        g = Conv(f, w2)
        h = Relu(g)
        p = GlobalAveragePool(h)
        q = Flatten <axis = 1> (p)
        y = Gemm(q, w3, b3)
        }""",
        w0=kernel,
        b0=(8,),
        w1=kernel,
        b1=(8,),
        w2=kernel,
        w3=(8, 10),
        b3=(10,),
    )


@every_target
def test_the_plan_for_a_target_is_valid_and_means_the_same_on_a_cpu(
    target, classifier: onnx.ModelProto, quantize_to, samples_for, tmp_path: Path
) -> None:
    done = quantize_to(classifier, tmp_path / "q.onnx", target=target.name, samples=samples_for(classifier, 16))
    model = onnx.load(tmp_path / "q.onnx")
    onnx.checker.check_model(model, full_check=True)
    plan = done.report.plan
    assert plan.target == target.name
    products = {"Conv"} if target.kernels.prefers_convolutions else {"Conv", "Gemm"}
    assert {one.op_type for one in plan.decisions if one.weights and one.mode is Mode.STATIC} == products
    assert done.report.agreement.worst_sqnr > 28
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    quantizers = [node for node in model.graph.node if node.op_type == "QuantizeLinear"]
    dtypes = {stored[node.input[2]].dtype.name for node in quantizers}
    assert dtypes == {target.activation.format}
    if target.activation.symmetric:
        assert not any(stored[node.input[2]].any() for node in quantizers)
    biases = [values for values in stored.values() if values.dtype == np.int32]
    # One of them for a convolution that had none: it makes up for the rounding of the weight.
    assert len(biases) == (4 if target.reads.integer_bias else 0)


def test_quantizers_for_tensorrt_stand_in_front_of_weighted_layers_only(
    classifier: onnx.ModelProto, quantize_to, tmp_path: Path
) -> None:
    quantize_to(classifier, tmp_path / "q.onnx", target="tensorrt")
    graph = onnx.load(tmp_path / "q.onnx").graph
    readers = {name: node.op_type for node in graph.node for name in node.input}
    decoded = [readers[node.output[0]] for node in graph.node if node.op_type == "DequantizeLinear"]
    assert Counter(decoded) == {"Conv": 6, "Gemm": 2}


def test_an_unknown_target_is_told_with_the_nearest() -> None:
    sentence = r"^target 'onnxruntime-cpuu' is not one of .*; did you mean 'onnxruntime-cpu'\?$"
    with pytest.raises(SchemeError, match=sentence):
        target_named("onnxruntime-cpuu")


# Between two convolutions: a call of each operator, and the kernel that must run.
KERNELS = {
    "Add": ("m = Add(a, a)", "QLinearAdd"),
    "AveragePool": ("m = AveragePool <kernel_shape = [2,2]> (a)", "QLinearAveragePool"),
    "Concat": ("m = Concat <axis = 2> (a, a)", "QLinearConcat"),
    "DepthToSpace": ("d = DepthToSpace <blocksize = 2> (a) m = Concat <axis = 1> (d, d, d, d)", "DepthToSpace"),
    "Expand": ("m = Expand(a, shape)", "Expand"),
    "Gather": ("m = Gather <axis = 2> (a, index)", "Gather"),
    "GlobalAveragePool": ("m = GlobalAveragePool(a)", "QLinearGlobalAveragePool"),
    "HardSigmoid": ("m = HardSigmoid(a)", "QLinearAdd"),
    "LeakyRelu": ("m = LeakyRelu(a)", "QLinearLeakyRelu"),
    "MaxPool": ("m = MaxPool <kernel_shape = [2,2]> (a)", "MaxPool"),
    "Mul": ("m = Mul(a, a)", "QLinearMul"),
    "ReduceMax": ("m = ReduceMax <axes = [2, 3]> (a)", "ReduceMax"),
    "Reshape": ("f = Reshape(a, flat) c = Concat <axis = 0> (f, f) m = Reshape(c, twice)", "Reshape"),
    "Resize": ('m = Resize <mode = "nearest"> (a, , factors)', "Resize"),
    "Sigmoid": ("m = Sigmoid(a)", "QLinearSigmoid"),
    "Slice": ("m = Slice(a, start, end, axis)", "Slice"),
    "Softmax": ("m = Softmax <axis = 1> (a)", "QLinearSoftmax"),
    "Split": ("p, q = Split <axis = 1> (a, parts) m = Concat <axis = 1> (q, p)", "Split"),
    "Squeeze": ("u = Unsqueeze(a, axis) c = Concat <axis = 0> (u, u) m = Squeeze(c, axis)", "Squeeze"),
    "Tile": ("m = Tile(a, repeats)", "Tile"),
    "Transpose": ("m = Transpose <perm = [0,1,3,2]> (a)", "Transpose"),
    "Unsqueeze": ("u = Unsqueeze(a, axis) c = Concat <axis = 0> (u, u) m = Squeeze(c, axis)", "Unsqueeze"),
}

CONSTANTS = {
    "shape": np.array([2, 8, 8, 8]),
    "index": np.array([0, 2, 4]),
    "flat": np.array([1, 8, 64]),
    "twice": np.array([2, 8, 8, 8]),
    "factors": np.array([1, 1, 2, 2], np.float32),
    "start": np.array([2]),
    "end": np.array([6]),
    "axis": np.array([2]),
    "parts": np.array([4, 4]),
    "repeats": np.array([1, 1, 2, 2]),
}


# These stand in tests of their own, because they are no neighbours of convolutions.
ELSEWHERE = {"Conv", "Flatten", "Gemm", "MatMul"}


def test_every_fused_operator_is_tried() -> None:
    assert set(KERNELS) | ELSEWHERE == TARGETS["onnxruntime-cpu"].kernels.fused.ops


@pytest.mark.parametrize("op", list(KERNELS))
def test_what_the_table_calls_fused_runs_on_codes(op: str, build, quantize_to, running_graph, tmp_path: Path) -> None:
    call, kernel = KERNELS[op]
    kernel_shape = (8, 8, 1, 1)
    model = build(
        f"(float[1,8,8,8] x) => (float[A,B,C,D] y) {{ a = Conv(x, w0) {call} y = Conv(m, w1) }}",
        w0=kernel_shape,
        w1=kernel_shape,
        **{name: values for name, values in CONSTANTS.items() if re.search(rf"\b{name}\b", call)},
    )
    done = quantize_to(model, tmp_path / "q.onnx")
    assert {decision.mode for decision in done.report.plan.decisions} == {Mode.STATIC}
    running = Counter(node.op_type for node in running_graph(tmp_path / "q.onnx").node)
    assert running["QLinearConv"] == 2
    assert (running["QuantizeLinear"], running["DequantizeLinear"]) == (1, 1)
    assert not kernel or running[kernel] or running[f"Nhwc{kernel}"]
