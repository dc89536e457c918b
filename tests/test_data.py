"""Data: what is given to calibrate and judge by, checked when it is made."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from onnxq.data import Data
from onnxq.errors import DataError, OnnxqError
from onnxq.pipeline import quantize

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
        ({"calibration": [], "images": "crop"}, r"images is 'crop' of type str, expected ImageOptions\(...\)"),
        ({"calibration": [], "chain": ["stateN=state"]}, "the chain is .* of type list, expected inputs by output"),
        ({"calibration": [], "statistics": "s.npz"}, r"statistics is 's.npz' of type str, expected what calibrate\(\)"),
    ],
)
def test_what_no_sample_can_be_is_refused(given: dict[str, object], sentence: str) -> None:
    with pytest.raises(OnnxqError, match=sentence):
        Data(**given)  # type: ignore[arg-type]


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
    assert (seen.agreement.samples, unseen.agreement.samples) == (1, 3)
    assert seen.plan == unseen.plan
    assert unseen.agreement.worst_sqnr < 10 < seen.agreement.worst_sqnr
