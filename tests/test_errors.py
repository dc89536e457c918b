from __future__ import annotations

import pytest

from onnxq import errors


@pytest.mark.parametrize("name", ["DataError", "ModelError", "OutputError", "SchemeError"])
def test_every_error_is_an_onnxq_error(name: str) -> None:
    assert issubclass(getattr(errors, name), errors.OnnxqError)


def test_the_nearest_name_is_suggested_only_when_there_is_one() -> None:
    assert errors.nearest("minmx", ["minmax", "mse"]) == "; did you mean 'minmax'?"
    assert errors.nearest("zzz", ["minmax", "mse"]) == ""
    assert errors.nearest("x", []) == ""


def test_a_message_with_names_made_to_hurt_is_one_printable_line_of_bounded_length() -> None:
    assert str(errors.ModelError("node 'a\nb\x1b[2J' is bad")) == "node 'a b [2J' is bad"
    assert len(str(errors.ModelError(f"node {'x' * 10_000} is bad"))) < 700
    assert str(errors.ModelError(f"node {'x' * 10_000} is bad")).endswith("xxx is bad")


def test_an_unknown_name_is_told_with_all_names_and_the_nearest() -> None:
    errors.check_name("preset", "int8", {"int8": 1})
    with pytest.raises(errors.SchemeError, match=r"^preset 'itn8' is not one of int8, mxfp4; did you mean 'int8'\?$"):
        errors.check_name("preset", "itn8", {"int8": 1, "mxfp4": 2})
