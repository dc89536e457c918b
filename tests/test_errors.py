from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from onnxq import (
    Budget,
    Data,
    Goal,
    bench,
    compare_files,
    errors,
    load_plan,
    load_report,
    load_scheme,
    load_statistics,
    save_plan,
)
from onnxq.calibration.methods import Fixed, Percentile
from onnxq.calibration.workers import Processes
from onnxq.data.inputs import Input, check_signature
from onnxq.errors import DataError, SchemeError
from onnxq.numerics.spec import QuantSpec
from onnxq.preparing.named_passes import as_passes


@pytest.mark.parametrize("name", ["DataError", "ModelError", "OutputError", "SchemeError"])
def test_every_error_is_an_onnxq_error(name: str) -> None:
    assert issubclass(getattr(errors, name), errors.OnnxqError)


def test_the_nearest_name_is_suggested_only_when_there_is_one() -> None:
    assert errors.did_you_mean("minmx", ["minmax", "mse"]) == "; did you mean 'minmax'?"
    assert errors.did_you_mean("zzz", ["minmax", "mse"]) == ""
    assert errors.did_you_mean("x", []) == ""


def test_a_message_with_names_made_to_hurt_is_one_printable_line_of_bounded_length() -> None:
    assert str(errors.ModelError("node 'a\nb\x1b[2J' is bad")) == "node 'a b [2J' is bad"
    assert len(str(errors.ModelError(f"node {'x' * 10_000} is bad"))) < 700
    assert str(errors.ModelError(f"node {'x' * 10_000} is bad")).endswith("xxx is bad")


def test_an_unknown_name_is_told_with_all_names_and_the_nearest() -> None:
    errors.check_name("preset", "int8", {"int8": 1})
    with pytest.raises(errors.SchemeError, match=r"^preset 'itn8' is not one of int8, mxfp4; did you mean 'int8'\?$"):
        errors.check_name("preset", "itn8", {"int8": 1, "mxfp4": 2})


def test_what_is_no_path_is_told_before_it_is_opened() -> None:
    readers: list[Callable[[Any], object]] = [load_plan, load_report, load_scheme, load_statistics]
    for called in (*readers, partial(save_plan, 5)):
        with pytest.raises(SchemeError, match=r"is 5 of type int, expected a"):
            called(5)
    models: list[Callable[..., object]] = [compare_files, bench]
    for called in models:
        for files in ((5, "x.onnx"), ("x.onnx", 5)):
            with pytest.raises(SchemeError, match="the file of a model is 5 of type int, expected a path"):
                called(*files, [])


@pytest.mark.parametrize(
    "made",
    [
        lambda: Budget(progress=None),
        lambda: Data("x", chain=[1]),
        lambda: Processes("2"),
        lambda: Percentile("a"),
        lambda: Fixed("a", 3),
        lambda: QuantSpec(5),
        lambda: as_passes(5),
        lambda: as_passes(None),
        lambda: Budget(threads=True),
    ],
)
def test_other_types_end_in_a_sentence(made: Callable[[], object]) -> None:
    with pytest.raises(SchemeError, match=r"(expected|is not one of)"):
        made()


def test_names_of_samples_that_are_no_texts_end_in_a_sentence() -> None:
    array = np.zeros(1, np.float32)
    with pytest.raises(DataError, match="1 is not an input of the model, expected 'x'"):
        check_signature({1: (array.dtype, array.shape)}, [Input("x", array.dtype, (1,))], "sample 0")


def test_numbers_of_numpy_are_taken_as_numbers() -> None:
    assert type(Budget(threads=np.int64(2)).threads) is int
    assert type(Goal(np.float32(20)).min_sqnr) is float
    assert type(Data("x", limit=np.int64(5)).limit) is int
    assert type(Percentile(np.float32(50)).percent) is float
