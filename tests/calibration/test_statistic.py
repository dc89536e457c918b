"""What all kinds do alike, held for every row of their table."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from observations import one_by_one, seen, statistic

from onnxq.calibration.accumulators import ChannelRanges, Range, TensorSample
from onnxq.calibration.kinds import KINDS
from onnxq.errors import DataError

AXES = {"channel-means": 1, "channel-ranges": 1, "hessian": 1}
ARRAYS = list(np.random.default_rng(0).normal(size=(5, 2, 4, 3)).astype(np.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_merges_in_any_order_and_survives_its_arrays(kind: str) -> None:
    whole, axis = one_by_one(ARRAYS, kind, AXES.get(kind)), AXES.get(kind)
    parts = [statistic(array, kind, axis, f"{index:032x}") for index, array in enumerate(ARRAYS)]
    nothing = KINDS[kind]()
    merged = nothing
    for part in parts[::-1]:
        merged = part.merge(merged)
    assert merged == whole == whole.merge(nothing) == nothing.merge(whole)
    assert parts[0] != whole
    assert KINDS[kind].restored(whole.arrays()) == whole
    assert KINDS[kind].restored(nothing.arrays()) == nothing


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_of_a_kind_have_one_dtype_each(kind: str) -> None:
    full, nothing = one_by_one(ARRAYS, kind, AXES.get(kind)).arrays(), KINDS[kind]().arrays()
    assert {name: array.dtype for name, array in full.items()} == {name: array.dtype for name, array in nothing.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_that_are_missing_or_too_many_are_refused(kind: str) -> None:
    arrays = dict(one_by_one(ARRAYS, kind, AXES.get(kind)).arrays())
    with pytest.raises(ValueError, match="arrays are"):
        KINDS[kind].restored(arrays | {"more": np.zeros(1)})


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float32, np.float64])
def test_every_float_type_is_observed(dtype: type[np.generic]) -> None:
    found = seen(np.array([[-1.5, 0], [2, 2]], dtype)).need(Range)
    assert (found.count, found.minimum, found.maximum) == (4, -1.5, 2)


@pytest.mark.parametrize("dtype", [np.int64, np.bool_, np.uint8])
def test_other_types_are_an_error(dtype: type[np.generic]) -> None:
    with pytest.raises(DataError, match=r"Tensor 't' is .* expected a float type"):
        seen(np.zeros(2, dtype))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_name_tensor_and_sample(bad: float) -> None:
    with pytest.raises(DataError, match="Tensor 'scores' holds 1 NaN or infinite values of 3 in sample 7"):
        _ = TensorSample("scores", np.float32([1, bad, 2]), index=7).ends


def test_a_scalar_and_a_strided_view_are_observed() -> None:
    assert seen(np.float32(2).reshape(())).need(Range).count == 1
    assert seen(np.arange(12, dtype=np.float32).reshape(3, 4).T[::2]).need(Range).count == 6


def test_what_lies_below_the_mask_is_taken_out_only_where_something_does_not() -> None:
    plain, masked = TensorSample("t", np.float32([1, 2])), TensorSample("t", np.float32([[1, -1e4], [2, 8192]]))
    assert plain.unmasked is plain.values
    assert (masked.unmasked.tolist(), masked.unmasked_ends) == ([1, 2], (1, 2))
    assert TensorSample("t", np.float32([9e3])).unmasked_ends == (np.inf, -np.inf)


def test_samples_select_different_places_and_each_always_the_same() -> None:
    array, digests = np.arange(1000.0), [f"{index:032x}" for index in range(8)]
    places = [array[TensorSample("t", array, digest).selection(1000, 100)].tolist() for digest in digests]
    assert len({tuple(one) for one in places}) == 8
    assert places[3] == array[TensorSample("t", array, digests[3]).selection(1000, 100)].tolist()
    assert all(90 <= len(one) <= 101 for one in places)
    assert TensorSample("t", array, digests[5]).selection(1000, None) == slice(0, None, 1)
    assert len(array[:1][TensorSample("t", array, "f" * 32).selection(1, 1)]) == 1
    assert len(array[TensorSample("t", array, "3e8").selection(1000, 1)]) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_what_arrays_gave_is_sound(kind: str) -> None:
    for found in (KINDS[kind](), statistic(ARRAYS[0], kind, AXES.get(kind)), one_by_one(ARRAYS, kind, AXES.get(kind))):
        found.check()


def test_what_holds_other_types_is_not() -> None:
    with pytest.raises(ValueError, match="the arrays of channel-ranges have other types than theirs"):
        ChannelRanges(np.zeros((1, 2), np.float32)).check()
