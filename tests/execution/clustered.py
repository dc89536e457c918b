"""What is calibrated on clusters, and what calibrating it here gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from onnxq.evidence.evidence import Evidence
from onnxq.evidence.kinds import request_for
from onnxq.execution.runner import Ledger, collect
from onnxq.samples.inputs import Sample

MODEL = Path(__file__).parents[2] / "models" / "resnet.onnx"
SAMPLES: list[Sample] = [{"image": image[None]} for image in np.load(MODEL.parent / "data" / "calib.npz")["image"][:64]]
TAPS = [request_for(name, kind) for name in ("image", "logits") for kind in ("range", "histogram")]


def ledger() -> Ledger:
    return Ledger("model", Evidence(), lambda total: None)


def collected_here() -> Evidence:
    return collect(MODEL, SAMPLES, TAPS, ledger=ledger())
