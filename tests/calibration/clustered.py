"""What is calibrated in threads and on clusters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx

from onnxq.calibration.kinds import default_request
from onnxq.data.inputs import Sample, model_inputs
from onnxq.data.samples import Samples, open_samples

MODEL = Path(__file__).parents[2] / "models" / "resnet.onnx"
SAMPLES: list[Sample] = [{"image": image[None]} for image in np.load(MODEL.parent / "data" / "calib.npz")["image"][:64]]
TAPS = [default_request(name, kind) for name in ("image", "logits") for kind in ("range", "histogram")]


def files(folder: Path) -> Samples:
    """Write each sample to a file of its own."""
    for index, sample in enumerate(SAMPLES):
        np.savez(folder / f"{index}.npz", **sample)
    return open_samples(folder, model_inputs(onnx.load(MODEL)))
