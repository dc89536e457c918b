"""Operators between convolutions, each decided as the table of operators says."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from convolutions import between_convolutions

from onnxq.config.scheme import Mode
from onnxq.evaluation.verification import count_kernels
from onnxq.ops import OPERATORS, Role

STATIC, STORAGE, FLOAT = Mode.STATIC, Mode.STORAGE, Mode.FLOAT
# --- every row of the table -----------------------------------------------------------------------------------------

I64 = np.int64

# What stands between two convolutions, the decision on the node [n], and constants.
ROWS = {
    "Conv": ("[n] b = Conv(a, k)", STATIC, {"k": (8, 8, 1, 1)}),
    "ConvTranspose": ("[n] b = ConvTranspose(a, k)", STORAGE, {"k": (8, 8, 2, 2)}),
    "Gemm": (
        "[f] f = Flatten(a) [n] g = Gemm(f, k) [r] b = Reshape(g, s)",
        STATIC,
        {"k": (512, 8), "s": np.array([1, 8, 1, 1])},
    ),
    "MatMul": ("[n] b = MatMul(a, k)", STATIC, {"k": (8, 8)}),
    "LSTM": (
        "[r] f = Reshape(a, s) [n] g, h = LSTM <hidden_size = 8> (f, k, l) [q] b = Reshape(h, t)",
        STORAGE,
        {"k": (1, 32, 64), "l": (1, 32, 8), "s": np.array([8, 1, 64]), "t": np.array([1, 8, 1, 1])},
    ),
    "GRU": (
        "[r] f = Reshape(a, s) [n] g, h = GRU <hidden_size = 8> (f, k, l) [q] b = Reshape(h, t)",
        STORAGE,
        {"k": (1, 24, 64), "l": (1, 24, 8), "s": np.array([8, 1, 64]), "t": np.array([1, 8, 1, 1])},
    ),
    "RNN": (
        "[r] f = Reshape(a, s) [n] g, h = RNN <hidden_size = 8> (f, k, l) [q] b = Reshape(h, t)",
        STORAGE,
        {"k": (1, 8, 64), "l": (1, 8, 8), "s": np.array([8, 1, 64]), "t": np.array([1, 8, 1, 1])},
    ),
    "Gather": ("[n] b = Gather <axis = 2> (a, k)", STATIC, {"k": np.array([0, 2])}),
    "Add": ("[n] b = Add(a, a)", STATIC, {}),
    "Mul": ("[n] b = Mul(a, a)", STATIC, {}),
    "AveragePool": ("[n] b = AveragePool <kernel_shape = [2,2]> (a)", STATIC, {}),
    "GlobalAveragePool": ("[n] b = GlobalAveragePool(a)", STATIC, {}),
    "LeakyRelu": ("[n] b = LeakyRelu(a)", STATIC, {}),
    "Sigmoid": ("[n] b = Sigmoid(a)", STATIC, {}),
    "HardSigmoid": ("[n] b = HardSigmoid(a)", STATIC, {}),
    "Softmax": ("[n] b = Softmax(a)", STATIC, {}),
    "Tanh": ("[n] b = Tanh(a)", FLOAT, {}),
    "Concat": ("[n] b = Concat <axis = 2> (a, a)", STATIC, {}),
    "DepthToSpace": ("[n] d = DepthToSpace <blocksize = 2> (a) [c] b = Concat <axis = 1> (d, d, d, d)", STATIC, {}),
    "Expand": ("[n] b = Expand(a, k)", STATIC, {"k": np.array([2, 8, 8, 8])}),
    "Flatten": (
        "[n] f = Flatten <axis = 2> (a) [c] g = Concat <axis = 0> (f, f) [r] b = Reshape(g, k)",
        STATIC,
        {"k": np.array([2, 8, 8, 8])},
    ),
    "MaxPool": ("[n] b = MaxPool <kernel_shape = [2,2]> (a)", STATIC, {}),
    "Pad": ('[n] b = Pad <mode = "reflect"> (a, k)', FLOAT, {"k": np.array([0, 0, 1, 1, 0, 0, 1, 1])}),
    "ReduceMax": ("[n] b = ReduceMax <axes = [2, 3]> (a)", STATIC, {}),
    "Reshape": (
        "[n] f = Reshape(a, k) [c] g = Concat <axis = 1> (f, f) [r] b = Reshape(g, l)",
        STATIC,
        {"k": np.array([8, 64]), "l": np.array([2, 8, 8, 8])},
    ),
    "Resize": ('[n] b = Resize <mode = "nearest"> (a, , k)', STATIC, {"k": np.array([1, 1, 2, 2], np.float32)}),
    "Slice": ("[n] b = Slice(a, k, l, l)", STATIC, {"k": np.array([0]), "l": np.array([2])}),
    "SpaceToDepth": ("[n] d = SpaceToDepth <blocksize = 2> (a) [s] b = DepthToSpace <blocksize = 2> (d)", FLOAT, {}),
    "Split": ("[n] p, q = Split <axis = 1> (a, k) [c] b = Concat <axis = 1> (q, p)", STATIC, {"k": np.array([4, 4])}),
    "Squeeze": (
        "[u] u = Unsqueeze(a, k) [c] v = Concat <axis = 0> (u, u) [n] b = Squeeze(v, k)",
        STATIC,
        {"k": np.array([1])},
    ),
    "Tile": ("[n] b = Tile(a, k)", STATIC, {"k": np.array([1, 1, 2, 2])}),
    "Transpose": ("[n] b = Transpose <perm = [0,1,3,2]> (a)", STATIC, {}),
    "Unsqueeze": (
        "[n] u = Unsqueeze(a, k) [c] v = Concat <axis = 0> (u, u) [s] b = Squeeze(v, k)",
        STATIC,
        {"k": np.array([1])},
    ),
    "Clip": ("[n] b = Clip(a, k, l)", STATIC, {"k": np.array(0, np.float32), "l": np.array(6, np.float32)}),
    "Relu": ("[n] b = Relu(a)", STATIC, {}),
}


def test_the_rows_are_those_of_the_table() -> None:
    planned = {op for (domain, op), row in OPERATORS.items() if not domain and row.role is not Role.FLOAT}
    assert set(ROWS) == planned


@pytest.mark.parametrize("op", list(ROWS))
def test_each_operator_between_convolutions_is_decided(
    op: str, build, plan_of, quantize_to, lonely_pairs, tmp_path: Path
) -> None:
    middle, mode, weights = ROWS[op]
    model = between_convolutions(build, middle, **weights)
    plan = plan_of(model)
    assert plan.by_node["n"].mode is mode
    assert plan.by_node["n"].op_type == op
    assert plan.by_node["first"].mode is plan.by_node["last"].mode is STATIC
    assert all(decision.reason for decision in plan.decisions)
    quantize_to(model, tmp_path / "q.onnx")
    assert lonely_pairs(tmp_path / "q.onnx") == []
    heavy = Counter(
        one.op_type for one in plan.decisions if one.mode is not STATIC and one.op_type in ("ConvTranspose",)
    )
    assert count_kernels(tmp_path / "q.onnx").heavy_float == heavy["ConvTranspose"]
