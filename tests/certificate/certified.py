"""Certified models for the tests: one of the project's, and small ones in ONNX's text form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
from model_texts import model

from onnxq import Budget, Data, quantize
from onnxq.certificate.certificate import Certificate
from onnxq.certificate.making import certify

MODELS = Path(__file__).parents[2] / "models"
CALIB = MODELS / "data" / "calib.npz"
PLAIN = Budget(search="off", accuracy="off", latency_seconds=0)


def certified_resnet(folder: Path) -> Path:
    """Quantize the project's ResNet, and return the file."""
    path = folder / "resnet.onnx"
    quantize(MODELS / "resnet.onnx", Data(CALIB, limit=16), path, budget=PLAIN)
    return path


def certified_text(
    folder: Path,
    text: str,
    samples: Sequence[Mapping[str, Any]],
    *,
    quantized: str = "",
    opset: int = 17,
    **weights: Any,
) -> tuple[Certificate, Path]:
    """Certify a model in ONNX's text form as made from itself, or from another one; return the file too."""
    paths = folder / "float.onnx", folder / "model.onnx"
    for path, one in zip(paths, (text, quantized or text), strict=True):
        onnx.save(model(one, opset=opset, **weights), path)
    return certify(*paths, [dict(one) for one in samples]), paths[1]
