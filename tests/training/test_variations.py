"""Few samples become more: images at other places, and inputs beside those of others."""

from __future__ import annotations

import numpy as np
import pytest

from onnxq.training.variations import varied
from training.modules import images

ROWS, COLUMNS = 20, 32


def test_few_images_are_shifted_and_mirrored_and_stay_themselves_first() -> None:
    some = [{"x": image["x"], "i": np.array([3])} for image in images(5, (1, 3, ROWS, COLUMNS))]
    found = list(varied(some, seed=0))
    assert len(varied(some, seed=0)) == len(found) == 65
    assert [one["x"].tobytes() for one in found[:5]] == [one["x"].tobytes() for one in some]
    assert len({one["x"].tobytes() for one in found}) > 60
    for place, one in enumerate(found):
        before = some[place % 5]["x"]
        np.testing.assert_array_equal(np.sort(one["x"].reshape(3, -1)), np.sort(before.reshape(3, -1)))
        assert one["i"].tolist() == [3]


def test_a_seed_gives_the_same_variations() -> None:
    first, again, other = (
        [one["x"].tobytes() for one in varied(images(2, (1, 3, ROWS, COLUMNS)), seed)] for seed in (0, 0, 1)
    )
    assert first == again != other


def test_images_of_one_sample_stay_on_each_other() -> None:
    image = images(1, (1, 3, ROWS, COLUMNS))[0]["x"]
    for one in varied([{"x": image, "mask": image > 0, "double": 2 * image}], 0):
        np.testing.assert_array_equal(one["double"], 2 * one["x"])
        np.testing.assert_array_equal(one["mask"], one["x"] > 0)


@pytest.mark.parametrize("shape", [(1, 64), (1, 3, 8, 64, 64), (1, 3, 8, 8)])
def test_what_is_no_image_stays(shape: tuple[int, ...]) -> None:
    some = images(3, shape)
    assert varied(some, 0) is some


def test_inputs_of_floats_meet_those_of_other_samples() -> None:
    some = [{"x": np.full((1, 5), place / 1), "i": np.array([place]), "y": np.eye(2) * place} for place in (1, 3)]
    found = list(varied(some, 0))
    assert len(found) == len(varied(some, 0)) == 192
    assert [one["x"].tolist() for one in found[:2]] == [one["x"].tolist() for one in some]
    assert all(one["i"].tolist() == [1 + 2 * (place % 2)] for place, one in enumerate(found))
    assert {(one["x"].max(), one["y"].max()) for one in found} == {(1, 1), (1, 3), (3, 1), (3, 3)}


def test_only_those_of_equal_shapes_meet() -> None:
    some = [{"x": np.full(length, length / 1), "y": np.ones(length)} for length in (2, 2, 3)]
    assert {(one["x"].shape, one["y"].shape) for one in varied(some, 0)} == {((2,), (2,)), ((3,), (3,))}
    alone, tokens = some[1:], [{"x": np.array([place]), "y": np.array([0.5])} for place in range(3)]
    assert varied(alone, 0) is alone
    assert varied(tokens, 0) is tokens


def test_images_of_several_shapes_stay() -> None:
    some = [images(1, (1, 3, ROWS, columns))[0] for columns in (COLUMNS, COLUMNS + 8)]
    assert varied(some, 0) is some


def test_many_images_are_enough() -> None:
    some = images(64, (1, 1, ROWS, COLUMNS))
    assert varied(some, 0) is some


def test_channels_may_come_last() -> None:
    (image,) = images(1, (1, ROWS, COLUMNS, 3))
    for one in varied([image], 0):
        colours = one["x"].reshape(-1, 3)
        assert {tuple(row) for row in colours.tolist()} == {tuple(row) for row in image["x"].reshape(-1, 3).tolist()}
