from __future__ import annotations

import pytest

from onnxq import errors


@pytest.mark.parametrize("name", ["DataError", "FidelityError", "ModelError", "OutputError", "SchemeError"])
def test_every_error_is_an_onnxq_error(name: str) -> None:
    assert issubclass(getattr(errors, name), errors.OnnxqError)


def test_the_nearest_name_is_suggested_only_when_there_is_one() -> None:
    assert errors.nearest("minmx", ["minmax", "mse"]) == "; did you mean 'minmax'?"
    assert errors.nearest("zzz", ["minmax", "mse"]) == ""
    assert errors.nearest("x", []) == ""
