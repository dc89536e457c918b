"""A table that rows are looked up in, and that a product reads transposed, is stored once whatever becomes of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper

from onnxq.config.scheme import Mode
from onnxq.evaluation.goal import Goal
from onnxq.ir import constants
from onnxq.pipeline.dequantization import dequantize
from onnxq.pipeline.optimization import optimize
from onnxq.pipeline.quantization import quantize
from onnxq.pipeline.request import Budget
from onnxq.planning.plan import Plan
from onnxq.runtime.sessions import open_session, run

ROWS, WIDTH = 2000, 128
HEADS = {
    "transposed": "t = Transpose <perm = [1, 0]> (w)  y = MatMul(g, t)",
    "gemm": "f = Reshape(g, flat)  q = Gemm <transB = 1> (f, w)  y = Reshape(q, whole)",
    "behind reshapes": """i = Identity(w)  r = Reshape(i, cut)  s = Reshape(r, table)
        t = Transpose <perm = [1, 0]> (s)  y = MatMul(g, t)""",
}
SAMPLES = [{"ids": np.random.default_rng(seed).integers(0, ROWS, (2, 3))} for seed in range(4)]


@pytest.fixture(scope="module", params=HEADS.values(), ids=HEADS)
def tied(request: pytest.FixtureRequest, build: Callable[..., ModelProto]) -> ModelProto:
    """A language model without anything between its embedding and its head."""
    shapes = {"flat": [-1, WIDTH], "whole": [2, 3, ROWS], "cut": [ROWS // 2, 2, WIDTH], "table": [ROWS, WIDTH]}
    used = {name: np.array(shape) for name, shape in shapes.items() if f", {name})" in request.param}
    table = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
    text = f"(int64[2,3] ids) => (float[2,3,{ROWS}] y) {{ h = Gather(w, ids)  g = Tanh(h)  {request.param} }}"
    return build(text, w=table, **used)


@pytest.mark.parametrize(
    ("scheme", "emit", "most", "least", "kernel"),
    [
        ("int8", "qdq", 0.265, 35, ("MatMulIntegerToFloat", "QGemm")),
        ("int8-storage", "qdq", 0.265, 35, ("MatMul", "Gemm")),
        ("int8-dynamic", "qdq", 0.265, 35, ("DynamicQuantizeMatMul",)),
        ("int8-block32", "qdq", 0.29, 35, ("MatMulNBits",)),
        ("int8-block32", "ort", 0.29, 35, ("MatMulNBits",)),
        ("int4-block32", "qdq", 0.165, 15, ("MatMulNBits",)),
        ("int4-block32", "ort", 0.165, 15, ("MatMulNBits",)),
    ],
)
def test_one_set_of_codes_is_stored_and_multiplied(
    tied: ModelProto,
    tmp_path: Path,
    quantize_to: Callable[..., object],
    running_graph: Callable[[Path], onnx.GraphProto],
    scheme: str,
    emit: str,
    most: float,
    least: float,
    kernel: tuple[str, ...],
) -> None:
    path = tmp_path / "tied.onnx"
    quantize_to(tied, path, scheme=scheme, emit=emit, samples=SAMPLES)
    assert path.stat().st_size <= most * tied.ByteSize()
    stored = onnx.load(path).graph.initializer
    assert sum(len(tensor.raw_data) >= ROWS * WIDTH // 2 for tensor in stored) == 1
    operators = Counter(node.op_type for node in running_graph(path).node)
    assert sum(operators[name] for name in kernel) == 1, operators
    assert not operators["Transpose"], operators
    (expected,), (found,) = (run(open_session(model), SAMPLES[0]) for model in (tied, path))
    nsr = np.square(found - expected).sum() / np.square(expected).sum()
    assert 10 * np.log10(1 / nsr) >= least

    (table,) = (tensor for tensor in constants(dequantize(path)) if tensor.nbytes >= ROWS * WIDTH)
    assert (table.shape, table.dtype) == ((ROWS, WIDTH), np.float32)


@pytest.mark.parametrize(
    ("scheme", "accuracy", "most"),
    [("int8", "equalization", 0.27), ("int4-block32", "awq", 0.2), ("int4-block32", "fast", 0.3)],
)
def test_no_accuracy_method_unties_a_table(
    build: Callable[..., ModelProto], tmp_path: Path, scheme: str, accuracy: str, most: float
) -> None:
    """The channels in front of the head differ in size, so that factors would help the head's copy of the table."""
    numbers = np.random.default_rng(0)
    table = (0.3 * numbers.normal(size=(ROWS, WIDTH))).astype(np.float32)
    model = build(
        f"""(int64[2,3] ids) => (float[2,3,{ROWS}] y) {{
            h = Gather(w, ids) n = LayerNormalization <axis = -1> (h, s)
            t = Transpose <perm = [1, 0]> (w) y = MatMul(n, t)
        }}""",
        w=table, s=np.exp(1.2 * numbers.normal(size=WIDTH)).astype(np.float32),
    )  # fmt: skip
    budget = Budget("off", accuracy, latency_seconds=0)
    quantize(model, SAMPLES, tmp_path / "tied.onnx", scheme=scheme, goal=Goal(force=True), budget=budget)
    stored = onnx.load(tmp_path / "tied.onnx").graph.initializer
    assert sum(len(tensor.raw_data) >= ROWS * WIDTH // 2 for tensor in stored) == 1
    assert (tmp_path / "tied.onnx").stat().st_size <= most * model.ByteSize()


def test_one_table_is_left_of_the_float_model(tied: ModelProto, tmp_path: Path) -> None:
    done = optimize(tied, tmp_path / "optimized.onnx", latency_seconds=0)
    assert not done.left_out
    assert (tmp_path / "optimized.onnx").stat().st_size <= tied.ByteSize() + 256


def test_tables_that_a_caller_may_feed_stay_what_they_are(tied: ModelProto, plan_of: Callable[..., Plan]) -> None:
    fed = ModelProto()
    fed.CopyFrom(tied)
    fed.graph.input.append(helper.make_tensor_value_info("w", 1, [ROWS, WIDTH]))
    for scheme in ("int8", "int8-dynamic", "int4-block32", "int8-storage", "burn-q8s"):
        plan = plan_of(fed, scheme=scheme)
        assert not any(decision.weights for decision in plan.decisions)
        assert all(decision.mode is Mode.FLOAT for decision in plan.decisions)
