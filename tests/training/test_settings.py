"""What users say of training is checked before anything runs."""

from __future__ import annotations

from typing import Any

import pytest

from onnxq.errors import SchemeError
from onnxq.training.settings import Training


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"learn": ("weight",)},
            "'weight' is not one of weights, biases, scales, zero-points; did you mean 'weights'?",
        ),
        ({"learn": ()}, "nothing would be trained; name one or more"),
        ({"loss": "a.py:b", "labels": "l.npy"}, "a loss function is given no labels"),
        ({"epochs": 0}, "epochs: 0, expected a whole number above 0"),
        ({"batch": -1}, "the batch: -1, expected"),
        ({"rate": 0.0}, "the rate is 0.0, expected a finite number above 0"),
        ({"rate": float("nan")}, "the rate is nan"),
        ({"minutes": 0.0}, "the time in minutes is 0.0, expected a finite number above 0"),
        ({"blocks": "onyl"}, "blocks 'onyl' is not one of no, first, only; did you mean 'only'?"),
        (
            {"blocks": "only", "labels": "l.npy"},
            "blocks are trained towards the float model, not towards labels or a loss",
        ),
        ({"device": 0}, "the device is 0 of type int"),
        ({"labels": 3}, "the labels is 3 of type int"),
    ],
)
def test_what_contradicts_itself_is_told(given: dict[str, Any], told: str) -> None:
    with pytest.raises(SchemeError) as error:
        Training(**given)
    assert told in str(error.value)
