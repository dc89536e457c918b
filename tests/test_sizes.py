"""Written models are no larger than they need be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto

import onnxq

Build = Callable[..., ModelProto]


def stored_values(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(
    ("width", "scheme", "most"),
    [
        (1, "int8", 0.27),
        (2, "int8", 0.27),
        (4, "int8", 0.27),
        (8, "int8", 0.39),
        (16, "int8", 0.33),
        (1, "int8-storage", 0.27),
        (1, "int8-dynamic", 0.27),
        (1, "int8-block32", 0.27),
        (1, "int4-block32", 0.66),
        (2, "int4-block32", 0.66),
        (1, "float8-e4m3", 0.27),
    ],
)
def test_a_table_of_short_rows_has_no_scales_that_outweigh_its_codes(
    width: int,
    scheme: str,
    most: float,
    build: Build,
    quantize_to: Callable[..., Any],
    tmp_path: Path,
) -> None:
    model = build(
        f"(int64[2,39] i) => (float[2,{width}] y) {{ e = Gather(t, i)  y = ReduceSum <keepdims = 0> (e, axis) }}",
        t=stored_values(0, 20_000, width), axis=np.array([1]),
    )  # fmt: skip
    samples = [{"i": np.random.default_rng(seed).integers(0, 20_000, (2, 39))} for seed in range(4)]
    quantize_to(model, tmp_path / "small.onnx", scheme=scheme, samples=samples)
    assert (tmp_path / "small.onnx").stat().st_size <= most * model.ByteSize()
    onnx.checker.check_model(tmp_path / "small.onnx", full_check=True)


@pytest.mark.parametrize("scheme", ["int8", "int8-storage", "int8-dynamic"])
def test_a_product_with_one_number_for_each_column_does_not_grow(
    scheme: str, build: Build, quantize_to: Callable[..., Any], tmp_path: Path
) -> None:
    model = build("(float[8,1] x) => (float[8,6000] y) { y = MatMul(x, w) }", w=stored_values(0, 1, 6000))
    quantize_to(model, tmp_path / "small.onnx", scheme=scheme)
    assert (tmp_path / "small.onnx").stat().st_size <= 0.35 * model.ByteSize()


REPEATED = {
    "ConstantOfShape": "z = ConstantOfShape(large)  c = Add(x, z)  y = MatMul(c, w)",
    "Expand": "z = Expand(row, large)  c = Add(x, z)  y = MatMul(c, w)",
    "Tile": "z = Tile(row, times)  c = Add(x, z)  y = MatMul(c, w)",
    "Gather": "z = Gather(row, index)  c = Add(x, z)  y = MatMul(c, w)",
}


@pytest.mark.parametrize("body", REPEATED.values(), ids=REPEATED)
@pytest.mark.parametrize("how", ["optimized", "quantized"])
def test_what_repeats_one_row_or_number_stays_small(
    how: str, body: str, build: Build, quantize_to: Callable[..., Any], tmp_path: Path
) -> None:
    stored = {
        "large": np.array([2000, 256]), "row": stored_values(1, 1, 256),
        "times": np.array([2000, 1]), "index": np.zeros(2000, np.int64), "w": stored_values(2, 256, 64),
    }  # fmt: skip
    used = {name: array for name, array in stored.items() if f"{name})" in body or f"({name}," in body}
    model = build(f"(float[2000,256] x) => (float[2000,64] y) {{ {body} }}", **used)
    if how == "optimized":
        onnxq.optimize(model, tmp_path / "small.onnx", unverified=True, latency_seconds=0)
    else:
        quantize_to(model, tmp_path / "small.onnx")
    # Indices of 8 bytes stay what they are.
    most = stored["w"].nbytes // (1 if how == "optimized" else 2) + (17_000 if "Gather" in body else 0)
    assert (tmp_path / "small.onnx").stat().st_size <= most + 2000
    onnx.checker.check_model(tmp_path / "small.onnx", full_check=True)
