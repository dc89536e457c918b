"""What JSON has no word for."""

from __future__ import annotations

import json
import math

import pytest

from onnxq.json_values import plain


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (math.inf, None),
        (-math.inf, None),
        (math.nan, None),
        (0.5, 0.5),
        (True, True),
        ({"a": [math.nan, (1, "b")]}, {"a": [None, [1, "b"]]}),
    ],
)
def test_what_json_cannot_hold_is_null(value: object, expected: object) -> None:
    assert plain(value) == expected
    assert json.loads(json.dumps(plain(value), allow_nan=False)) == expected
