"""Sums of products are those of numpy, and of equal bits for any order, split and merge."""

from __future__ import annotations

import tracemalloc
import warnings
from dataclasses import replace
from functools import reduce
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from observations import one_by_one, statistic

from onnxq.calibration.hessian import HessianAccumulator
from onnxq.errors import DataError
from onnxq.runtime.sessions import open_session, run

RANDOM = np.random.default_rng(0)


def observed(array: NDArray[np.floating], axis: int = -1, rows: int = 0, **options: int | str) -> HessianAccumulator:
    found = statistic(array, "hessian", axis, rows=rows, **options)
    assert isinstance(found, HessianAccumulator)
    return found


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_rows_are_those_of_an_axis(axis: int, groups: int) -> None:
    array = RANDOM.normal(size=(6, 12, 9)).astype(np.float32)
    found = observed(array, axis, groups=groups)
    rows = np.moveaxis(array, axis, -1).reshape(-1, array.shape[axis])
    parts = np.split(rows.astype(np.float64), groups, axis=1)
    assert found.count == len(rows)
    for group, part in enumerate(parts):
        np.testing.assert_allclose(found.moments()[group], part.T @ part / len(rows), atol=2e-3)
        np.testing.assert_allclose(found.means()[group], part.mean(0), atol=1e-3)


@pytest.mark.parametrize(
    ("shape", "kernel", "attributes", "group"),
    [
        ((2, 4, 7, 6), (3, 2), {"pads": [1, 0, 2, 1], "strides": [2, 1]}, 1),
        ((1, 4, 9, 8), (3, 3), {"dilations": [2, 1], "pads": [1, 1, 1, 1]}, 2),
        ((2, 4, 11), (3,), {"strides": [3]}, 4),
    ],
)
def test_patches_are_what_a_convolution_multiplies(
    shape: tuple[int, ...], kernel: tuple[int, ...], attributes: dict[str, list[int]], group: int, build
) -> None:
    x = RANDOM.normal(size=shape).astype(np.float32)
    w = RANDOM.normal(size=(8, shape[1] // group, *kernel)).astype(np.float32)
    given = ", ".join(f"{name}=[{', '.join(map(str, one))}]" for name, one in attributes.items())
    dims = ",".join(map(str, shape))
    open_dims = ",".join("N" for _ in shape)
    text = f"(float[{dims}] x) => (float[{open_dims}] y) {{ y = Conv <group={group}, {given}>(x, w) }}"
    y = run(open_session(build(text, w=w)), {"x": x}, ("y",))[0].astype(np.float64)
    options = {name: ",".join(map(str, one)) for name, one in attributes.items()}
    found = observed(x, 1, groups=group, kernel=",".join(map(str, kernel)), **options)
    weights = w.reshape(group, 8 // group, -1).astype(np.float64)
    squares = np.einsum("goi,gij,goj->go", weights, found.moments(), weights).ravel()
    means = np.einsum("goi,gi->go", weights, found.means()).ravel()
    others = (0, *range(2, y.ndim))
    assert found.count == y.size // 8
    np.testing.assert_allclose(squares, (y**2).mean(others), rtol=0.01)
    np.testing.assert_allclose(means, y.mean(others), atol=0.01)


@given(st.integers(0, 2**32 - 1), st.integers(2, 6), st.data())
def test_any_order_and_split_gives_the_same_bits(seed: int, count: int, data: st.DataObject) -> None:
    generator = np.random.default_rng(seed)
    arrays = [
        generator.normal(size=(generator.integers(1, 30), 5)) * 10 ** generator.uniform(-1, 1) for _ in range(count)
    ]
    parts = [observed(array) for array in data.draw(st.permutations(arrays))]
    middle = data.draw(st.integers(0, count))
    left, right = (
        reduce(HessianAccumulator.merge, some, HessianAccumulator()) for some in (parts[:middle], parts[middle:])
    )
    whole = one_by_one(arrays, "hessian", -1)
    assert right.merge(left) == whole == left.multiplied().merge(right)
    assert right.merge(left).moments().tobytes() == whole.moments().tobytes()  # type: ignore[attr-defined]


def test_an_even_selection_of_rows_sees_all_of_the_tensor() -> None:
    places = np.array(list(product(range(40), range(40))), np.float32).reshape(1600, 2)
    found = observed(places, rows=100)
    assert 90 <= found.count <= 100
    np.testing.assert_allclose(found.means()[0], [19.5, 19.5], atol=1.5)


def test_4096_inputs_take_less_than_200_megabytes() -> None:
    array = RANDOM.normal(size=(128, 4096)).astype(np.float32)
    tracemalloc.start()
    total = HessianAccumulator()
    for _ in range(24):
        total = total.merge(observed(array))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (total.count, total.products.size > 0) == (24 * 128, True)
    assert peak < 200e6


@pytest.mark.parametrize("size", [255, 256, 257, 600])
def test_bands_make_the_whole(size: int) -> None:
    rows = RANDOM.integers(-100, 100, (300, size)).astype(np.float32)
    expected = rows.astype(np.float64).T @ rows / 300
    np.testing.assert_allclose(observed(rows).moments()[0], expected, rtol=1e-12)


def test_zeros_and_constants_have_a_gram() -> None:
    assert not observed(np.zeros((4, 3))).moments().any()
    assert observed(np.full((4, 3), 0.5)).moments().tolist() == [[[0.25] * 3] * 3]
    assert observed(np.full((4, 2), -1e-40, np.float32)).means() == pytest.approx(-1e-40, rel=1e-3)


@pytest.mark.parametrize(
    ("shape", "axis", "options", "message"),
    [
        ((2, 3), 2, {}, "'t' has 2 axes, expected axis 2"),
        ((2, 3), 1, {"groups": 2}, "'t' has 3 channels, expected a multiple of 2 groups"),
        ((2, 3), 1, {"kernel": "3"}, "'t' has 2 axes, expected 3 for a kernel of 1"),
        ((2, 3, 2), 1, {"kernel": "3"}, r"'t' is \(2,\) with pads, expected a kernel of \[3\] to fit"),
    ],
)
def test_what_does_not_fit_is_one_sentence(
    shape: tuple[int, ...], axis: int, options: dict[str, int | str], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        observed(np.ones(shape), axis, **options)
    with pytest.raises(DataError, match="has 3 and 2 channels"):
        observed(np.ones((1, 3))).merge(observed(np.ones((1, 2))))


def test_it_survives_its_arrays_and_says_what_it_holds() -> None:
    found = observed(RANDOM.normal(size=(7, 4)), groups=2)
    assert HessianAccumulator.restored(found.arrays()) == found
    assert found.note == "products of 7 rows of 2 values in 2 groups"
    with pytest.raises(ValueError, match="do not fit"):
        HessianAccumulator.restored(dict(found.arrays()) | {"products": np.zeros((2, 3))})


def test_its_digest_tells_other_rows_of_the_same_means_and_not_how_they_were_added_up() -> None:
    wide, narrow = np.array([[1.0, 1.0], [-1.0, -1.0]]), np.array([[1.0, -1.0], [-1.0, 1.0]])
    one, other = (statistic(rows, "hessian", -1, rows=0) for rows in (wide, narrow))
    assert isinstance(one, HessianAccumulator)
    assert isinstance(other, HessianAccumulator)
    assert one.means().tolist() == other.means().tolist()
    assert one.digest != other.digest
    assert one.merge(other).digest == other.merge(one).multiplied().digest


def test_sums_and_products_that_cannot_be_are_told() -> None:
    sound = observed(RANDOM.normal(size=(6, 4)))
    sound.check()
    whole = sound.multiplied()
    whole.check()
    for wrong in (
        replace(sound, count=5),
        replace(sound, exponents=sound.exponents[1:]),
        replace(sound, waiting=sound.waiting[:, :, 1:]),
        replace(whole, count=-1),
        replace(whole, sums=whole.sums[:, 1:]),
        replace(whole, products=whole.products * np.nan),
        replace(whole, products=np.zeros((1, 0))),
        replace(whole, products=-whole.products),
    ):
        with pytest.raises(ValueError, match=r"fit|finite|negative"):
            wrong.check()


def test_products_beyond_float32_are_infinite_there_without_a_warning() -> None:
    found = observed(np.float32([[1e20, 1.0], [-1e20, 2.0]]))
    with warnings.catch_warnings(action="error"):
        products = found.moments(np.float32)
    assert products[0, 0, 0] == np.inf
    assert np.isfinite(found.moments()).all()
