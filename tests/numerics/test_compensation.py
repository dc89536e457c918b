"""Rounding errors cancel in sums, whatever the format, the blocks and the data; what cannot be used does no harm."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxq.algorithms.encoders import encode_array as encode
from onnxq.numerics import compensation
from onnxq.numerics.compensation import Moments, compensated
from onnxq.numerics.formats import FORMATS
from onnxq.numerics.matrices import Matrices
from onnxq.numerics.numerics import QTensor
from onnxq.numerics.spec import Granularity, Method, Spec

SMALL = [name for name, format in FORMATS.items() if format.bits <= 8]
PERS = [Granularity.TENSOR, Granularity.CHANNEL, (32,), (5,), (3, 7)]
COLUMNS, ROWS = 70, 12


def rounded(weight: np.ndarray, name: str = "int4", per: object = (32,), **choices: object) -> QTensor:
    spec = Spec(name, per, FORMATS[name].signed, **choices)
    return encode(weight, spec, channel_axis=1, reduction_axis=0)


def weight_of(seed: int, columns: int = COLUMNS, rows: int = ROWS) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(columns, rows)).astype(np.float32)


def gram_of(seed: int, columns: int = COLUMNS, samples: int = 500) -> np.ndarray:
    generator = np.random.default_rng(seed)
    data = generator.normal(size=(samples, columns)) @ generator.normal(size=(columns, columns)) + 1.0
    return (data.T @ data / samples)[None]


def lost(weight: np.ndarray, tensor: QTensor, gram: np.ndarray) -> np.ndarray:
    """Return what the errors of each column of a product's weight cost."""
    errors = (weight - tensor.dequantize()).T.astype(np.float64)
    return np.asarray(((errors @ gram[0]) * errors).sum(1))


def made(weight: np.ndarray, plain: QTensor, gram: np.ndarray, damping: float = 0.01) -> QTensor:
    return compensated(
        weight, plain.parameters, plain.format, Moments(gram), Matrices.of_product(weight.shape), damping
    )


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("per", PERS, ids=str)
def test_no_channel_loses_more_than_by_rounding_and_all_together_less(name: str, per: object) -> None:
    weight, gram = weight_of(0), gram_of(1)
    plain = rounded(weight, name, per)
    found = made(weight, plain, gram)
    before, after = lost(weight, plain, gram), lost(weight, found, gram)
    assert (after <= before * (1 + 1e-5)).all()
    assert after.sum() < 0.8 * before.sum()


@pytest.mark.parametrize("name", SMALL)
def test_codes_are_of_the_format_and_parameters_stay(name: str) -> None:
    weight = weight_of(2)
    plain = rounded(weight, name)
    found = made(weight, plain, gram_of(3))
    assert found.codes.dtype == plain.codes.dtype
    assert found.codes.shape == weight.shape
    assert found.parameters is plain.parameters
    # A code that the format does not use, such as the -8 of narrow integers, is a value beyond its ends.
    values = found.format.values[found.codes.view(np.uint8) & (2**found.format.bits - 1)]
    assert values.min() >= found.format.minimum
    assert values.max() <= found.format.maximum


@pytest.mark.parametrize("scale", ["float16", "ue4m3", "e8m0"])
def test_scales_of_any_format_and_two_levels_serve(scale: str) -> None:
    weight, gram = weight_of(4), gram_of(5)
    plain = rounded(weight, "float4e2m1", (16,), scale=scale, two_level=scale == "ue4m3", method=Method.MSE)
    found = made(weight, plain, gram)
    assert lost(weight, found, gram).sum() < lost(weight, plain, gram).sum()


@given(seed=st.integers(0, 10**6), columns=st.integers(1, 300), samples=st.integers(1, 40), damping=st.floats(0, 1))
def test_few_samples_and_any_damping_never_cost_more(seed: int, columns: int, samples: int, damping: float) -> None:
    weight, gram = weight_of(seed, columns, 3), gram_of(seed + 1, columns, samples)
    plain = rounded(weight, "int4-narrow", Granularity.CHANNEL)
    found = made(weight, plain, gram, damping)
    slack = 1e-5 * np.trace(gram[0]) * np.square(weight - plain.dequantize()).sum(0)
    assert (lost(weight, found, gram) <= lost(weight, plain, gram) + slack).all()


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("per", PERS, ids=str)
def test_without_correlation_it_is_rounding(name: str, per: object) -> None:
    weight = weight_of(6)
    plain = rounded(weight, name, per)
    gram = np.diag(np.random.default_rng(7).uniform(0, 9, COLUMNS))[None]
    np.testing.assert_array_equal(made(weight, plain, gram).codes, plain.codes)


def spoiled(value: float) -> np.ndarray:
    gram = gram_of(8)
    gram[0, 3, 4] = gram[0, 4, 3] = value
    return gram


@pytest.mark.parametrize(
    "gram",
    [
        np.zeros((1, COLUMNS, COLUMNS)),
        spoiled(np.nan),
        spoiled(np.inf),
        -gram_of(8),
        np.full((1, COLUMNS, COLUMNS), np.nan),
        gram_of(8) * 1e306,
    ],
    ids=["zero", "one NaN", "one infinity", "negative", "all NaN", "too large to be added up"],
)
def test_what_is_no_gram_matrix_leaves_the_nearest_codes(gram: np.ndarray) -> None:
    weight = weight_of(9)
    plain = rounded(weight)
    np.testing.assert_array_equal(made(weight, plain, gram).codes, plain.codes)


@pytest.mark.parametrize("size", [1e-30, 1e30, 1e200])
def test_the_size_of_the_data_does_not_matter(size: float) -> None:
    weight, gram = weight_of(10), gram_of(11)
    plain = rounded(weight)
    wanted = made(weight, plain, gram).codes
    assert (made(weight, plain, gram * size).codes == wanted).mean() > 0.99


def test_matrices_that_are_hardly_definite_are_damped_more() -> None:
    weight, gram = weight_of(12), gram_of(13)
    gram[0, range(COLUMNS), range(COLUMNS)] -= 0.05 * np.trace(gram[0]) / COLUMNS
    plain = rounded(weight)
    assert lost(weight, made(weight, plain, gram, 0.0), gram).sum() < lost(weight, plain, gram).sum()


def test_terms_that_are_never_there_keep_their_nearest_codes() -> None:
    weight, gram = weight_of(14), gram_of(15)
    dead = np.arange(0, COLUMNS, 3)
    gram[0, dead], gram[0, :, dead] = 0, 0
    plain = rounded(weight)
    found = made(weight, plain, gram)
    np.testing.assert_array_equal(found.codes[dead], plain.codes[dead])
    assert (found.codes != plain.codes).any()


@pytest.mark.parametrize("bad", [np.nan, 0.0, 5.0 - 4.0 * np.eye(18)], ids=["no number", "zero", "indefinite"])
def test_bad_groups_do_not_spoil_good_ones(bad: np.ndarray | float) -> None:
    weight = np.random.default_rng(16).normal(size=(12, 2, 3, 3)).astype(np.float32)
    matrices = Matrices.of_convolution(weight.shape, 4)
    grams = np.concatenate([gram_of(seed, 18) for seed in range(4)])
    grams[1] = bad
    plain = encode(weight, Spec("int4", Granularity.CHANNEL), channel_axis=0, reduction_axis=1)
    found = compensated(weight, plain.parameters, plain.format, Moments(grams), matrices)
    np.testing.assert_array_equal(found.codes[3:6], plain.codes[3:6])
    alone = Matrices.of_product((3, 18), transposed=True)
    for group in (0, 2, 3):
        rows = slice(3 * group, 3 * group + 3)
        part = encode(weight[rows].reshape(3, 18), Spec("int4", Granularity.CHANNEL), channel_axis=0, reduction_axis=1)
        expected = compensated(
            weight[rows].reshape(3, 18), part.parameters, part.format, Moments(grams[group : group + 1]), alone
        )
        np.testing.assert_array_equal(found.codes[rows].reshape(3, 18), expected.codes)


def test_a_transposed_product_gets_the_same_codes() -> None:
    weight, gram = weight_of(17), gram_of(18)
    plain = rounded(weight)
    turned = np.ascontiguousarray(weight.T)
    codes = encode(turned, Spec("int4", (32,)), channel_axis=0, reduction_axis=1)
    matrices = Matrices.of_product(turned.shape, transposed=True)
    found = compensated(turned, codes.parameters, codes.format, Moments(gram), matrices)
    np.testing.assert_array_equal(found.codes.T, made(weight, plain, gram).codes)


@pytest.mark.parametrize("together", [1, 700, 4000])
def test_the_size_of_the_parts_changes_nothing(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = np.random.default_rng(19).normal(size=(24, 1, 5)).astype(np.float32)
    matrices = Matrices.of_convolution(weight.shape, 12)
    grams = np.concatenate([gram_of(seed, 5) for seed in range(12)])
    plain = encode(weight, Spec("int4", Granularity.CHANNEL), channel_axis=0, reduction_axis=1)
    wanted = compensated(weight, plain.parameters, plain.format, Moments(grams), matrices)
    monkeypatch.setattr(compensation, "_TOGETHER", together)
    found = compensated(weight, plain.parameters, plain.format, Moments(grams), matrices)
    assert (found.codes == wanted.codes).mean() > 0.98


def test_offsets_bring_the_moments_about_the_means() -> None:
    weight, generator = weight_of(22), np.random.default_rng(23)
    data = generator.normal(size=(300, COLUMNS)) @ generator.normal(size=(COLUMNS, COLUMNS)) + 5.0
    products, offsets = (data.T @ data)[None], data.sum(0)[None] / np.sqrt(300)
    centred = (data - data.mean(0)).T @ (data - data.mean(0))
    plain, matrices = rounded(weight), Matrices.of_product(weight.shape)
    found = compensated(weight, plain.parameters, plain.format, Moments(products, offsets), matrices)
    assert (found.codes == made(weight, plain, centred[None]).codes).mean() > 0.99
    assert lost(weight, found, centred[None]).sum() < lost(weight, made(weight, plain, products), centred[None]).sum()


def test_large_weights_take_seconds() -> None:
    weight, data = weight_of(20, 1024, 512), np.random.default_rng(21).normal(size=(2048, 1024)).astype(np.float32)
    plain = rounded(weight)
    gram = (data.T @ data)[None]
    start = time.perf_counter()
    found = made(weight, plain, gram)
    assert time.perf_counter() - start < 20
    assert lost(weight, found, gram.astype(np.float64)).sum() < lost(weight, plain, gram.astype(np.float64)).sum()
