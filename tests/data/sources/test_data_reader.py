"""Readers of onnxruntime's quantizer are taken as they are."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnxruntime.quantization import CalibrationDataReader

from onnxq.calibration.data import Data
from onnxq.data.inputs import Input
from onnxq.data.samples import open_samples

X = Input("x", np.dtype(np.float32), ("N", 2))


class Reader(CalibrationDataReader):  # type: ignore[misc]
    """As onnxruntime's examples write it, which cannot be rewound."""

    def __init__(self) -> None:
        self.feeds = iter({"x": np.full((1, 2), number, np.float32)} for number in range(5))

    def get_next(self) -> dict[str, Any] | None:
        return next(self.feeds, None)


class Rewindable(Reader):
    """One that is at its end, and can start again."""

    def __init__(self) -> None:
        self.feeds = iter([])

    def rewind(self) -> None:
        super().__init__()


def test_its_feeds_are_samples() -> None:
    for given in (Reader(), Rewindable()):
        samples = open_samples(Data(given).calibration, [X])
        assert [sample["x"].tolist() for sample in samples] == [[[number, number]] for number in range(5)]
