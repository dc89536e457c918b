"""Every preset on small trained models: what dequantize gives back computes what the quantized model does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import MODELS
from numpy.typing import NDArray

from onnxq.config.presets import PRESETS
from onnxq.config.scheme import Mode
from onnxq.evaluation.goal import Goal
from onnxq.pipeline.dequantization import dequantize
from onnxq.pipeline.quantization import quantize
from onnxq.pipeline.request import Budget
from onnxq.runtime.sessions import open_session, run

# Only where data stays float can a float model compute the same.
FLOAT_DATA = [name for name, scheme in PRESETS.items() if scheme.rules[0].mode in (Mode.WEIGHT_ONLY, Mode.STORAGE)]
ROUNDED_DATA = [name for name in PRESETS if name not in FLOAT_DATA]
SUMS = 2e-6
"""Sums of float32 products in another order, relative to the largest output."""


def outputs(model: Path, images: NDArray[np.float32], *, optimize: bool) -> NDArray[np.float32]:
    (found,) = run(open_session(model, threads=1, optimize=optimize), {"image": images})
    return found


def differences(name: str, preset: str, folder: Path) -> dict[str, float]:
    """Quantize and dequantize a model; return how far the two are apart, unoptimised and as they would run."""
    images = np.load(MODELS / "data" / "calib.npz")["image"][:4]
    quantized, back = folder / "quantized.onnx", folder / "back.onnx"
    quantize(
        MODELS / name,
        [{"image": images}],
        quantized,
        scheme=preset,
        goal=Goal(force=True),
        budget=Budget(search="off", latency_seconds=0),
    )
    dequantize(quantized, back)
    found = {}
    for kind, optimize in (("as written", False), ("as run", True)):
        one, other = (outputs(path, images, optimize=optimize) for path in (quantized, back))
        found[kind] = float(np.abs(one - other).max() / np.abs(other).max())
    return found


@pytest.mark.parametrize("preset", FLOAT_DATA)
@pytest.mark.parametrize(
    "name",
    ["gru.onnx", *(pytest.param(f"{name}.onnx", marks=pytest.mark.slow) for name in ("vit", "resnet", "mobilenet"))],
)
def test_the_float_model_computes_what_the_codes_of_the_weights_mean(name: str, preset: str, tmp_path: Path) -> None:
    found = differences(name, preset, tmp_path)
    assert found["as written"] <= SUMS
    # By default onnxruntime rounds the data of a product with quantized values to 8 bits.
    assert found["as run"] <= 0.02


@pytest.mark.parametrize("preset", ROUNDED_DATA)
def test_where_data_is_rounded_too_the_float_model_differs_by_that_noise_alone(preset: str, tmp_path: Path) -> None:
    assert SUMS < differences("gru.onnx", preset, tmp_path)["as written"] <= 0.02
