"""Bad samples on the command line: one sentence, the exit code, and nothing written anywhere."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable

import numpy as np
import pytest

from hostile.command_line import Place, Run, edit, quantize_arguments, refused, stored


def replace_samples(**arrays: object) -> Callable[[Place], None]:
    def replaced(place: Place) -> None:
        for path in place.calib.iterdir():
            path.unlink()
        if arrays:
            np.savez(place.calib / "sample.npz", **arrays)

    return replaced


def floats(*shape: int, value: float = 0.5) -> np.ndarray:
    return np.full(shape, value, np.float32)


def spoiled(value: float) -> np.ndarray:
    values = floats(4, 32)
    values[1, 2] = value
    return values


def pickled_npy(place: Place) -> None:
    replace_samples()(place)
    (place.calib / "sample.npy").write_bytes(pickle.dumps({"x": 1}))


def text_file(place: Place) -> None:
    replace_samples()(place)
    (place.calib / "sample.npz").write_text("not an archive")


BAD_SAMPLES = {
    "empty folder": (replace_samples(), r"expected \.npz, \.npy, image or input_N\.pb files"),
    "missing folder": (
        lambda place: place.calib.rename(place.root / "gone"),
        r"calib does not exist; give a file or folder",
    ),
    "wrong name": (replace_samples(input=floats(4, 32)), r"'input' is not an input of the model, expected 'x'"),
    "another name more": (replace_samples(x=floats(4, 32), y=floats(1)), r"'y' is not an input of the model"),
    "wrong type": (
        replace_samples(x=floats(4, 32).astype(np.float64)),
        r"'x' is float64, expected float32; save it as array\.astype",
    ),
    "integers": (replace_samples(x=floats(4, 32).astype(np.int64)), r"'x' is int64, expected float32"),
    "wrong extent": (replace_samples(x=floats(4, 31)), r"expected 32 and found 31 on axis 1"),
    "wrong rank": (replace_samples(x=floats(32)), r"rank 1, expected rank 2"),
    "too many axes": (replace_samples(x=floats(2, 3, 4, 32)), r"rank"),
    "NaN": (replace_samples(x=spoiled(np.nan)), r"'x' holds 1 NaN or infinite values of 128"),
    "infinity": (replace_samples(x=spoiled(-np.inf)), r"'x' holds 1 NaN or infinite values of 128"),
    "zero samples": (replace_samples(x=floats(0, 4, 32)), r"no samples"),
    "pickled objects": (
        replace_samples(x=np.array([{}], dtype=object)),
        r"pickled Python objects, which are never loaded",
    ),
    "a bare pickle": (pickled_npy, r"sample\.npy cannot be read"),
    "no archive": (text_file, r"sample\.npz cannot be read"),
}


@pytest.mark.parametrize("case", BAD_SAMPLES)
def test_bad_samples_are_one_sentence_and_no_file(case: str, place: Place, onnxq: Run) -> None:
    spoil, message = BAD_SAMPLES[case]
    spoil(place)
    before = place.files()
    sentence = refused(onnxq(*quantize_arguments(place)))
    assert re.search(message, sentence), sentence
    assert place.files() == before


def test_values_too_large_for_the_model_are_told(place: Place, onnxq: Run) -> None:
    large = floats(4, 32, value=3e38)
    large[0, 0] = 2e38
    replace_samples(x=large)(place)
    edit(lambda model: stored(model, 3e38))(place)
    before = place.files()
    assert "NaN or infinite" in refused(onnxq(*quantize_arguments(place)))
    assert place.files() == before
