"""Codebooks: the nearest number of a table."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from onnxq.numerics.formats import Codebook

BOOK = Codebook((-2.0, -0.5, 0.0, 1.0))


def codes(values: list[float]) -> list[int]:
    found = np.empty(len(values), np.uint8)
    BOOK.encode_into(np.array(values, np.float32), found)
    return found.tolist()


def test_a_book_of_four_numbers_has_codes_of_two_bits() -> None:
    assert (BOOK.bits, BOOK.zero) == (2, 2)
    assert (Codebook((0.0, 1.0, 2.0)).bits, Codebook((-1.0, 0.0)).bits) == (2, 1)


def test_every_number_has_its_code_and_what_is_beyond_saturates() -> None:
    assert codes([-2.0, -0.5, 0.0, 1.0]) == [0, 1, 2, 3]
    assert codes([-np.inf, -99.0, 99.0, np.inf]) == [0, 0, 3, 3]


def test_between_two_numbers_the_lower_one_wins() -> None:
    assert codes([-1.25, -0.25, 0.5, float(np.nextafter(np.float32(0.5), np.float32(1)))]) == [0, 1, 2, 3]


@given(st.floats(-4, 4, width=32))
def test_no_number_is_nearer(value: float) -> None:
    found = BOOK.numbers[codes([value])[0]]
    assert abs(found - value) == min(abs(number - value) for number in BOOK.numbers)
