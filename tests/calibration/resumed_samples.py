"""Samples of a run that is killed or fails in the middle."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnx
from observations import wanted

from onnxq.calibration.calibrate import Collection, calibrate_tensors
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.data.inputs import Sample

MODEL = Path(__file__).parents[2] / "models" / "resnet.onnx"
CALIB = MODEL.parent / "data" / "calib.npz"
SAMPLES: list[Sample] = [{"image": image[None]} for image in np.load(CALIB)["image"][:48]]
TAPS = [node.output[0] for node in onnx.load(MODEL).graph.node if node.op_type in ("Conv", "Relu")]
INTERRUPTED = 24


class ReadingFailedError(Exception):
    pass


class Failing(list[Sample]):
    """Samples of which reading all fails in the middle, once a first sample has been asked for."""

    def __iter__(self):  # type: ignore[no-untyped-def]
        for index, sample in enumerate(super().__iter__()):
            if index == INTERRUPTED:
                raise ReadingFailedError
            yield sample


def whole(taps: list[str] = TAPS, samples: list[Sample] = SAMPLES) -> CalibrationStatistics:
    return calibrate_tensors(MODEL, samples, wanted(taps), Collection())


def reused(path: Path, notices: list[str], **changes: object) -> CalibrationStatistics:
    given = {"samples": SAMPLES, "requests": wanted(TAPS), "model": MODEL, "collection": Collection()} | changes
    given["collection"] = dataclasses.replace(given["collection"], reuse=path, notice=notices.append)  # type: ignore[type-var]
    return calibrate_tensors(**given)  # type: ignore[arg-type]
