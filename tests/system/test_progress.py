from __future__ import annotations

from pathlib import Path

from onnxq.calibration.data import Data
from onnxq.pipeline import quantize
from onnxq.steps.budget import Budget
from onnxq.system.progress import silent

MODELS = Path(__file__).parents[2] / "models"


def test_silence_takes_what_progress_takes() -> None:
    assert silent("calibrate", 1, 2) is None  # type: ignore[func-returns-value]


def test_every_stage_is_told_and_counts_to_its_end() -> None:
    told: dict[str, list[tuple[int, int]]] = {}
    quantize(
        MODELS / "resnet.onnx",
        Data(MODELS / "data" / "calib.npz", limit=4),
        budget=Budget(latency=0, progress=lambda stage, done, total: told.setdefault(stage, []).append((done, total))),
    )
    assert told["calibrate"] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert {"calibrate", "search", "verify"} <= told.keys()
