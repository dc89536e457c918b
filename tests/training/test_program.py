"""Graphs run in torch: bodies, operators that only onnxruntime knows, and what cannot be run."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import Build

from onnxq.errors import DataError, ModelError
from onnxq.ir import as_graph, constants
from onnxq.training.program import Program
from training.modules import difference

X = {"x": np.array([[1.0, -2.0, 3.0]], np.float32)}
LOOP = """(float[1,3] x) => (float[1,3] y, float[?] s) {
    n = Constant<value = int64 {4}>()  t = Constant<value = bool {1}>()
    y, s = Loop (n, t, x) <body = b (int64 i, bool c, float[1,3] v) => (bool d, float[1,3] w, float[1,3] v) {
        d = Identity(c)  h = Tanh(v)  w = Add(h, x) }>
}"""
SCAN = """(float[1,3] x) => (float[3] y, float[?] s) {
    z = Constant<value = float[3] {0, 0, 0}>()
    y, s = Scan <num_scan_inputs = 1, body = b (float[3] a, float[3] r) => (float[3] u, float[3] v) {
        u = Add(a, r)  v = Identity(u) }> (z, x)
}"""
BRANCH = """(float[1,3] x) => (float[1,3] y) {
    m = ReduceMax<keepdims = 0>(x)  l = Constant<value = float {2.0}>()  c = Greater(m, l)
    y = If (c) <then_branch = a () => (float[1,3] u) { u = Neg(x) },
                else_branch = b () => (float[1,3] v) { v = Abs(x) }>
}"""


@pytest.mark.parametrize("text", [LOOP, SCAN, BRANCH])
def test_bodies_give_what_onnxruntime_gives(text: str, build: Build) -> None:
    model = build(text)
    for output in model.graph.output[1:]:
        output.type.tensor_type.ClearField("shape")
    assert difference(model, X) < 1e-6


def run(program: Program, x: torch.Tensor) -> dict[str, torch.Tensor]:
    held = {tensor: torch.from_numpy(np.array(tensor.values)) for tensor in constants(program.graph)}
    return program.run({"x": x}, held, lambda node, index, value: value, lambda node, index, value: value)


def test_gradients_pass_loops(build: Build) -> None:
    x = torch.ones(1, 3, requires_grad=True)
    run(Program(as_graph(build(LOOP))), x)["y"].sum().backward()
    assert x.grad is not None
    assert bool((x.grad > 1).all())


def test_onnxruntime_computes_what_torch_does_not_and_no_gradient_passes(build: Build) -> None:
    model = build("(float[1,3] x) => (float[1,3] y) { [n] h = Hardmax(x)  [m] y = Mul(h, x) }")
    program, x = Program(as_graph(model)), torch.tensor([[1.0, -2.0, 3.0]], requires_grad=True)
    for _ in range(2):
        found = run(program, x)["y"]
    assert found.tolist() == [[0, 0, 3]]
    assert [node.name for node in program.sessions] == ["n"]
    found.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[0, 0, 1]]


def test_an_input_that_is_missing_is_named(build: Build) -> None:
    program = Program(as_graph(build("(float[3] z) => (float[3] y) { y = Relu(z) }")))
    with pytest.raises(DataError, match="input 'z' is missing, found x; feed it"):
        run(program, torch.zeros(3))


def test_what_torch_cannot_compute_is_named(build: Build) -> None:
    program = Program(as_graph(build("(float[A] x) => (float[A] y) { [a] y = Add(x, w) }", w=(3,))))
    with pytest.raises(DataError, match=r"torch cannot compute the Add 'a': The size of tensor a .*; check the sample"):
        run(program, torch.zeros(2))


def test_scans_along_other_axes_are_refused(build: Build) -> None:
    text = SCAN.replace("num_scan_inputs = 1,", "num_scan_inputs = 1, scan_input_axes = [1],")
    with pytest.raises(ModelError, match="scans along another axis than the first"):
        run(Program(as_graph(build(text))), torch.zeros(1, 3))
