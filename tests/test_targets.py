"""The table of targets, checked against what onnxruntime really fuses."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from onnxq.errors import SchemeError
from onnxq.formats import FORMATS
from onnxq.operators import OPERATORS, Role
from onnxq.scheme import Mode
from onnxq.targets import TARGETS, target_named

every_target = pytest.mark.parametrize("target", TARGETS.values(), ids=list(TARGETS))


@every_target
def test_a_row_names_formats_and_operators_that_exist(target) -> None:
    assert {target.activation, target.weight} <= set(FORMATS)
    assert target.float_output <= target.fused
    assert not target.clamps & target.fused
    assert all(OPERATORS[op].role is not Role.WEIGHTED for op in target.fused)


def test_the_only_target_is_onnxruntime_on_a_cpu() -> None:
    target = target_named("onnxruntime-cpu")
    assert (target.activation, target.weight) == ("uint8", "int8-narrow")


def test_an_unknown_target_is_told_with_the_nearest() -> None:
    with pytest.raises(SchemeError, match=r"^target 'onnxruntime' is not one of .*; did you mean 'onnxruntime-cpu'\?$"):
        target_named("onnxruntime")


KERNELS = {
    "Add": ("m = Add(a, a)", "QLinearAdd"),
    "AveragePool": ("m = AveragePool <kernel_shape = [2,2]> (a)", "QLinearAveragePool"),
    "Concat": ("m = Concat <axis = 2> (a, a)", "QLinearConcat"),
    "DepthToSpace": ("d = DepthToSpace <blocksize = 2> (a) m = Concat <axis = 1> (d, d, d, d)", "DepthToSpace"),
    "Expand": ("m = Expand(a, shape)", "Expand"),
    "Gather": ("m = Gather <axis = 2> (a, index)", "Gather"),
    "GlobalAveragePool": ("m = GlobalAveragePool(a)", "QLinearGlobalAveragePool"),
    "LeakyRelu": ("m = LeakyRelu(a)", "QLinearLeakyRelu"),
    "MaxPool": ("m = MaxPool <kernel_shape = [2,2]> (a)", "MaxPool"),
    "Mul": ("m = Mul(a, a)", "QLinearMul"),
    "ReduceMax": ("m = ReduceMax <axes = [2, 3]> (a)", "ReduceMax"),
    "Reshape": ("f = Reshape(a, flat) m = Reshape(f, back)", "Reshape"),
    "Resize": ('m = Resize <mode = "nearest"> (a, , factors)', "Resize"),
    "Sigmoid": ("m = Sigmoid(a)", "QLinearSigmoid"),
    "Slice": ("m = Slice(a, start, end, axis)", "Slice"),
    "Softmax": ("m = Softmax <axis = 1> (a)", "QLinearSoftmax"),
    "Split": ("p, q = Split <axis = 1> (a, parts) m = Concat <axis = 1> (q, p)", "Split"),
    "Squeeze": ("u = Unsqueeze(a, axis) m = Squeeze(u, axis)", ""),
    "Tile": ("m = Tile(a, repeats)", "Tile"),
    "Transpose": ("m = Transpose <perm = [0,1,3,2]> (a)", "Transpose"),
    "Unsqueeze": ("u = Unsqueeze(a, axis) f = Reshape(u, back) m = Mul(f, a)", "Unsqueeze"),
}
"""Between two convolutions: a call of each operator, and the kernel that must run."""

CONSTANTS = {
    "shape": np.array([2, 8, 8, 8]),
    "index": np.array([0, 2, 4]),
    "flat": np.array([1, 8, 64]),
    "back": np.array([1, 8, 8, 8]),
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
    assert set(KERNELS) | ELSEWHERE == TARGETS["onnxruntime-cpu"].fused


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
