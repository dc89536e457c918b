"""Channels of float data are divided where that costs no node, and the model computes what it did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Build

from onnxq.algorithms.awq import scalable_tensors
from onnxq.algorithms.encoding_config import EncodingConfig
from onnxq.algorithms.equalization import ChannelScales, Equalization
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.config.presets import preset_named
from onnxq.ir import as_graph
from onnxq.runtime.sessions import open_session, run
from onnxq.runtime.targets import DEFAULT_TARGET, target_named
from onnxq.search.prepared_model import open_prepared_model

NORM = "n = LayerNormalization(x, s, b)"
OUT = "(float[3,64] x) => (float[3,64] y)"
VECTORS: dict[str, Any] = {"s": (64,), "b": (64,)}
MATRIX = {"w": (64, 64)}

DIVISIBLE: dict[str, tuple[str, dict[str, Any]]] = {
    "normalization": (f"{OUT} {{{NORM} y = MatMul(n, w)}}", VECTORS | MATRIX),
    "normalization without a bias": (f"{OUT} {{n = LayerNormalization(x, s) y = MatMul(n, w)}}", {"s": (64,)} | MATRIX),
    "two readers": (
        f"{OUT} {{{NORM} a = MatMul(n, w) c = Gemm<transB=1>(n, u, d) y = Add(a, c)}}",
        VECTORS | MATRIX | {"u": (64, 64), "d": (64,)},
    ),
    "Mul": (
        f"{OUT} {{r = Relu(x) n = Mul(s, r) a = MatMul(n, w) c = MatMul(n, u) t = Tanh(c) y = Sub(a, t)}}",
        MATRIX | {"s": (1, 64), "u": (64, 64)},
    ),
}
NOT_DIVISIBLE: dict[str, tuple[str, dict[str, Any]]] = {
    "a float reader": (
        f"{OUT} {{{NORM} a = MatMul(n, w) t = Tanh(n) c = MatMul(t, u) y = Add(a, c)}}",
        VECTORS | MATRIX | {"u": (64, 64)},
    ),
    "a caller": (
        f"(float[3,64] x) => (float[3,64] y, float[3,64] n) {{{NORM} y = MatMul(n, w)}}",
        VECTORS | MATRIX,
    ),
    "another axis": (
        "(float[1,3,64] x) => (float[1,3,64] y) {n = LayerNormalization<axis=1>(x, s, b) y = MatMul(n, w)}",
        {"s": (3, 32), "b": (3, 32)} | MATRIX,
    ),
    "two tensors": (f"{OUT} {{r = Tanh(x) n = Mul(x, r) y = MatMul(n, w)}}", MATRIX),
    "one number": (f"{OUT} {{r = Relu(x) n = Mul(r, s) q = Tanh(n) y = MatMul(q, w)}}", {"s": (1,)} | MATRIX),
    "a weight of others": (f"{OUT} {{{NORM} a = MatMul(n, w) c = MatMul(x, w) y = Add(a, c)}}", VECTORS | MATRIX),
}


def bench_of(name: str, models: dict[str, tuple[str, dict[str, Any]]], build: Build, folder: Path, scheme: str) -> Any:
    text, weights = models[name]
    return open_prepared_model(
        as_graph(build(text, **weights)), preset_named(scheme), target_named(DEFAULT_TARGET), folder
    )


@pytest.mark.parametrize("name", DIVISIBLE)
@pytest.mark.parametrize("scheme", ["int8-block32", "nf4-block64"])
def test_what_is_divided_is_multiplied_again(name: str, scheme: str, build: Build, tmp_path: Path) -> None:
    bench = bench_of(name, DIVISIBLE, build, tmp_path, scheme)
    plan = bench.plan({})
    (tensor,) = scalable_tensors(bench.graph, plan)
    factors = np.exp2(np.random.default_rng(0).integers(-1, 2, 64))
    config = EncodingConfig(
        awq=Equalization({tensor: ChannelScales(1, factors), "elsewhere": ChannelScales(1, factors)})
    )
    samples = {"x": np.random.default_rng(1).normal(size=(3, 64)).astype(np.float32)}
    outputs = []
    for number, one in enumerate((EncodingConfig(), config)):
        built = bench.build(plan, CalibrationStatistics(), one, tmp_path / f"{number}.onnx", external_data=False)
        outputs.append(run(open_session(tmp_path / f"{number}.onnx"), samples)[0])
        assert len(built.nodes) == len(
            bench.build(plan, CalibrationStatistics(), EncodingConfig(), tmp_path / "p.onnx", external_data=False).nodes
        )
    wanted = run(open_session(bench.prepared), samples)[0]
    errors = [float(np.square(output - wanted).sum() / np.square(wanted).sum()) for output in outputs]
    assert max(errors) < (1e-3 if scheme == "int8-block32" else 0.1)
    assert errors[0] != errors[1]


@pytest.mark.parametrize("name", NOT_DIVISIBLE)
def test_what_others_read_undivided_is_left(name: str, build: Build, tmp_path: Path) -> None:
    bench = bench_of(name, NOT_DIVISIBLE, build, tmp_path, "int4-block32")
    assert not scalable_tensors(bench.graph, bench.plan({}))


def test_products_that_compute_with_integers_are_left(build: Build, tmp_path: Path) -> None:
    bench = bench_of("normalization", DIVISIBLE, build, tmp_path, "int8")
    assert not scalable_tensors(bench.graph, bench.plan({}))
