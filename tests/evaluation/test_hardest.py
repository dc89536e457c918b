"""The samples that a model is least faithful on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from conftest import Build

from onnxq.evaluation.verification import hardest

COUNT = 6


@pytest.fixture(scope="module")
def files(build: Build, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model that returns its input, its sign and its logarithm, and one that clips the input at 2."""
    folder = tmp_path_factory.mktemp("hardest")
    text = """(float[1,4] x) => (float[1,4] y, bool[1,4] positive, float[1,4] logarithm) {{
        seen = {} (x{}) y = Identity(seen) logarithm = Log(seen) zero = Sub(seen, seen) positive = Greater(seen, zero)
    }}"""
    reference, candidate = build(text.format("Identity", "")), build(text.format("Min", ", two"), two=np.float32([2]))
    onnx.save(reference, folder / "reference.onnx")
    onnx.save(candidate, folder / "candidate.onnx")
    return folder / "reference.onnx", folder / "candidate.onnx"


def samples(**special: float) -> list[dict[str, np.ndarray]]:
    values = [special.get(f"of_{place}", 1.0) for place in range(COUNT)]
    return [{"x": np.full((1, 4), value, np.float32)} for value in values]


@pytest.mark.parametrize(
    ("special", "most", "expected"),
    [
        ({}, 3, []),
        ({"of_4": 2.5}, 3, [4]),
        ({"of_1": 9.0, "of_3": 3.0, "of_4": 20.0}, 2, [1, 4]),
        ({"of_0": 5.0, "of_5": 5.0}, 1, [0]),
        # Infinities of the reference, of a silent sample's logarithm, are no noise.
        ({"of_0": 0.0, "of_2": 3.0}, 3, [2]),
    ],
)
def test_those_with_most_noise_are_found(
    special: dict[str, float], most: int, expected: list[int], files: tuple[Path, Path]
) -> None:
    assert hardest(*files, samples(**special), most) == expected


def test_what_is_not_finite_is_hardest(files: tuple[Path, Path]) -> None:
    reference, candidate = files
    # The other way round zero becomes no number nowhere, so minus infinity does it: its clipped sibling is finite.
    given = samples(of_1=3.0)
    given[3]["x"][:] = np.inf
    assert hardest(candidate, reference, given, 1) == [3]


def test_without_samples_there_is_none(files: tuple[Path, Path]) -> None:
    assert hardest(*files, [], 3) == []
