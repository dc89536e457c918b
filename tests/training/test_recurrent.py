"""Recurrent cells give in torch what they give in onnxruntime, and pass gradients through time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import Build

from onnxq.ir import Node
from onnxq.training.operators import RECURRENT, Call, is_plain
from training.modules import difference

GATES = {"GRU": 3, "LSTM": 4, "RNN": 1}


@pytest.mark.parametrize("op", GATES)
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("more", ["", "lengths", "starts"])
def test_torch_gives_what_onnxruntime_gives(op: str, direction: str, more: str, build: Build) -> None:
    count, rows = 2 if direction == "bidirectional" else 1, GATES[op] * 4
    lengths = "l" if more == "lengths" else ""
    starts = ", s, s" if more == "starts" and op == "LSTM" else ", s" if more == "starts" else ""
    text = f"""(float[5,2,3] x) => (float[?] y, float[?] h) {{
        l = Constant<value = int32[2] {{5, 3}}>()
        y, h = {op}<hidden_size = 4, direction = "{direction}">(x, w, r, b, {lengths}{starts}) }}"""
    model = build(text, w=(count, rows, 3), r=(count, rows, 4), b=(count, 2 * rows), s=(count, 2, 4))
    for output in model.graph.output:
        output.type.tensor_type.ClearField("shape")
    sample = {"x": np.random.default_rng(0).standard_normal((5, 2, 3)).astype(np.float32)}
    assert difference(model, sample) < 1e-5


def test_the_reset_gate_may_come_behind_the_product(build: Build) -> None:
    text = "(float[5,2,3] x) => (float[5,1,2,4] y) { y = GRU<hidden_size = 4, linear_before_reset = 1>(x, w, r, b) }"
    sample = {"x": np.random.default_rng(0).standard_normal((5, 2, 3)).astype(np.float32)}
    assert difference(build(text, w=(1, 12, 3), r=(1, 12, 4), b=(1, 24)), sample) < 1e-5


def test_gradients_reach_the_first_step() -> None:
    x = torch.randn(6, 1, 3, requires_grad=True)
    call = Call(Node("GRU", attrs={"hidden_size": 2}), (x, torch.randn(1, 6, 3), torch.randn(1, 6, 2)), 17)
    RECURRENT["GRU"](call)[1].sum().backward()
    assert x.grad is not None
    assert float(x.grad[0].abs().sum()) > 0


@pytest.mark.parametrize(
    "attributes", [{"clip": 1.0}, {"activations": ["Affine", "Tanh"]}, {"activation_alpha": [0.1]}]
)
def test_cells_that_are_not_written_here_are_left_to_onnxruntime(attributes: dict[str, object]) -> None:
    assert not is_plain(Call(Node("GRU", attrs=attributes), (), 17))
