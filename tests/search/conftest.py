"""What it takes to choose for a small model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.config.presets import PRESETS
from onnxq.evaluation.verification import Verifier
from onnxq.ir import load
from onnxq.runtime.targets import TARGETS
from onnxq.search.context import ModelPaths, SearchContext
from onnxq.search.evaluator import CandidateSamples
from onnxq.search.prepared_model import open_prepared_model
from onnxq.system.resources import silent

MODELS = Path(__file__).parents[2] / "models"


@pytest.fixture
def context(tmp_path: Path) -> SearchContext:
    float_model, samples = MODELS / "gru.onnx", [{"image": np.zeros((1, 1, 28, 28), np.float32)}] * 2
    bench = open_prepared_model(load(float_model), PRESETS["int8"], TARGETS["onnxruntime-cpu"], tmp_path)
    files = ModelPaths(float_model, tmp_path / "out.onnx", external_data=False)
    split = CandidateSamples(float_model, bench.prepared, samples, 2)
    return SearchContext(
        bench, files, samples, Verifier(float_model, samples, 1.0), CalibrationStatistics(), silent, split
    )
