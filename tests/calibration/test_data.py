"""Data: what is given to calibrate and judge by, checked when it is made."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from onnxq.calibration.data import Data
from onnxq.calibration.statistics import save_statistics
from onnxq.data.images import IMAGE_PRESETS
from onnxq.errors import DataError, OnnxqError
from onnxq.pipeline import calibrate, quantize

MODELS = Path(__file__).parents[2] / "models"
SAMPLES = MODELS / "data" / "calib.npz"
ONE = {"x": np.zeros((4, 32), np.float32)}


def test_a_path_or_samples_alone_stand_for_all_of_them() -> None:
    for given in ("calib", Path("calib"), [ONE], (sample for sample in [ONE])):
        assert Data.of(given).calibration is given
    data = Data("calib", limit=3)
    assert Data.of(data) is data


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"calibration": ONE}, r"the samples are one dictionary, expected a list of them, .* write \[sample\]"),
        ({"calibration": 3}, "the samples are of type int, expected a path or dictionaries of arrays by input name"),
        ({"calibration": b"calib"}, "the samples are of type bytes, expected a path"),
        ({"calibration": [], "validation": 3}, "the samples are of type int"),
        ({"calibration": [], "limit": 0}, "the limit of samples is 0, expected 1 or more"),
        ({"calibration": [], "limit": True}, "the limit of samples is True of type bool, expected a whole number"),
        ({"calibration": [], "images": 224}, r"images is 224 of type int, expected a preset's name, or ImageOptions"),
        ({"calibration": [], "images": "imagnet"}, "images is 'imagnet', expected one of .*; did you mean 'imagenet'"),
        ({"calibration": [], "chain": 3}, "the chain is 3 of type int, expected 'stateN=state'"),
        ({"calibration": [], "chain": "stateN"}, "Chain 'stateN' is not OUTPUT=INPUT"),
        ({"calibration": [], "statistics": 3}, r"statistics is 3 of type int, expected what calibrate\(\)"),
    ],
)
def test_what_no_sample_can_be_is_refused(given: dict[str, object], sentence: str) -> None:
    with pytest.raises(OnnxqError, match=sentence):
        Data(**given)  # type: ignore[arg-type]


def test_texts_stand_for_what_they_are_on_the_command_line(tmp_path: Path) -> None:
    evidence = calibrate(MODELS / "gru.onnx", Data(SAMPLES, limit=2))
    save_statistics(evidence, tmp_path / "s.npz")
    data = Data(SAMPLES, images="imagenet", chain=["aN=a", "bN=b"], statistics=tmp_path / "s.npz")
    assert data.image_options == IMAGE_PRESETS["imagenet"]
    assert data.chained == Data(SAMPLES, chain={"aN": "a", "bN": "b"}).chained == {"aN": "a", "bN": "b"}
    assert data.evidence == evidence
    assert (Data(SAMPLES).image_options, Data(SAMPLES).chained, Data(SAMPLES).evidence) == (None, {}, None)


def test_a_mistake_in_the_validation_is_told_as_one_in_the_samples(perceptron) -> None:
    with pytest.raises(DataError, match="input"):
        quantize(perceptron, Data([ONE], [{"other": ONE["x"]}]))


def test_the_result_is_judged_by_the_validation(perceptron, quantize_to, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    calm, wild = ([{"x": factor * generator.standard_normal((4, 32), np.float32)}] for factor in (1, 100))
    seen, unseen = (
        quantize_to(perceptron, tmp_path / "q.onnx", samples=Data(calm, validation)).report
        for validation in (None, wild * 3)
    )
    # Equal ones judge once.
    assert (seen.agreement.samples, unseen.agreement.samples) == (1, 1)
    assert seen.plan == unseen.plan
    assert unseen.agreement.worst_sqnr < 10 < seen.agreement.worst_sqnr
