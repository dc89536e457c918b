"""Random models that onnxruntime's quantizers wrote compute the same when they are dequantized."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper
from quantized_at_random import float_model, quantized_at_random, samples_of

from onnxq.ops import ALREADY_QUANTIZED
from onnxq.pipeline.dequantization import dequantize
from onnxq.runtime.sessions import open_session, run

WITHIN = {8: 0.2, 16: 0.01}
"""Rounding of the five to twelve activations of a model, by the bits that they have, relative to the largest answer."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def ops_of(path: Path) -> list[str]:
    return [node.op_type for node in onnx.load(path).graph.node]


def error(quantized: Path, found: Path, sample: dict[str, np.ndarray]) -> float:
    expected, answer = (run(open_session(path, threads=1, optimize=False), sample)[0] for path in (quantized, found))
    assert expected.shape == answer.shape
    return float(np.abs(expected - answer).max() / max(float(np.abs(expected).max()), 1e-3))


@pytest.mark.parametrize("seed", range(60))
def test_a_random_model_that_onnxruntime_quantized_computes_the_same(seed: int, tmp_path: Path) -> None:
    model = float_model(seed)
    samples = samples_of(model, seed)
    quantized, bits = quantized_at_random(model, samples, seed, tmp_path)
    if not ALREADY_QUANTIZED & set(ops_of(quantized)):
        return
    dequantize(quantized, tmp_path / "back.onnx")
    onnx.checker.check_model(tmp_path / "back.onnx", full_check=True)
    assert not ALREADY_QUANTIZED & set(ops_of(tmp_path / "back.onnx"))
    assert error(quantized, tmp_path / "back.onnx", samples[0]) <= WITHIN[bits]


@pytest.mark.parametrize("seed", range(12))
def test_a_random_product_or_table_in_blocks_computes_the_same(seed: int, tmp_path: Path) -> None:
    pytest.importorskip("onnx_ir")
    from onnxruntime.quantization import QuantFormat
    from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, MatMulNBitsQuantizer

    random = np.random.default_rng(seed)
    rows, columns = (int(random.integers(17, 80)) for _ in range(2))
    stored = {"t": (20, rows), "w": (rows, columns), "v": (columns, 8)}
    nodes = [
        helper.make_node("Gather", ["t", "x"], ["a"]),
        helper.make_node("MatMul", ["a", "w"], ["b"]),
        helper.make_node("Relu", ["b"], ["c"]),
        helper.make_node("MatMul", ["c", "v"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.INT64, ["n", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3, 8])],
        [numpy_helper.from_array(random.normal(size=size).astype(np.float32), name) for name, size in stored.items()],
    )
    model: ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    form = [QuantFormat.QDQ, QuantFormat.QOperator][seed % 2]
    settings = DefaultWeightOnlyQuantConfig(
        block_size=int(random.choice([16, 32, 64])),
        is_symmetric=bool(random.random() < 0.5),
        bits=4 if form is QuantFormat.QDQ or random.random() < 0.5 else 8,
        quant_format=form,
        op_types_to_quantize=("MatMul",) if form is QuantFormat.QDQ else ("MatMul", "Gather"),
    )
    quantizer = MatMulNBitsQuantizer(model, algo_config=settings)
    quantizer.process()
    onnx.save(quantizer.model.model, tmp_path / "quantized.onnx")
    dequantize(tmp_path / "quantized.onnx", tmp_path / "back.onnx")
    onnx.checker.check_model(tmp_path / "back.onnx", full_check=True)
    assert ops_of(tmp_path / "back.onnx") == ["Gather", "MatMul", "Relu", "MatMul"]
    sample = {"x": random.integers(0, 20, (4, 3))}
    assert error(tmp_path / "quantized.onnx", tmp_path / "back.onnx", sample) <= 1e-5
