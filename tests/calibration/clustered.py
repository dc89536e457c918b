"""What is calibrated on clusters, and what calibrating it here gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from onnxq.calibration.collect import CalibrationCheckpoint, collect
from onnxq.calibration.kinds import default_request
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.data.inputs import Sample

MODEL = Path(__file__).parents[2] / "models" / "resnet.onnx"
SAMPLES: list[Sample] = [{"image": image[None]} for image in np.load(MODEL.parent / "data" / "calib.npz")["image"][:64]]
TAPS = [default_request(name, kind) for name in ("image", "logits") for kind in ("range", "histogram")]


class Items:
    """The same samples as a map-style data set, which notes what is read of it in this process."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(SAMPLES)

    def __getitem__(self, place: int) -> Sample:
        self.read.append(place)
        return SAMPLES[place]


def ledger() -> CalibrationCheckpoint:
    return CalibrationCheckpoint("model", CalibrationStatistics(), lambda total: None)


def collected_here() -> CalibrationStatistics:
    return collect(MODEL, SAMPLES, TAPS, ledger=ledger())
