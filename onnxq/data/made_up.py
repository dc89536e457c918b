"""Inputs that nobody gave: seeded values of the types and shapes that a model declares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from onnxq.data.inputs import Input, Sample, is_floating, required

_LARGEST_DIM = 4
# Small integers are indices that exist, numbers of axes and lengths; zeros and ones are masks.
_INTEGERS = ((0, 3), (0, 1), (-2, 3))
_LARGE = 10.0
_SHARE_OF_ZEROS = 0.05


def made_up_samples(inputs: Sequence[Input], count: int) -> Iterator[Sample]:
    """Yield samples that fit the inputs of a model, the same ones each time.

    Dims that are not fixed are equal where they have one name and differ from all others. In every second sample all of
    them are equal, for models that do not name dims that belong together. One element is among the lengths. Floats are
    standard normal, some of them 0, and in every fourth sample 10 times as large. Integers are small, in some samples
    negative. A model may refuse some samples, or all.

    Args:
        inputs: what the model wants.
        count: how many.

    >>> wanted = Input("x", np.dtype(np.int64), ("N", 2))
    >>> [sample["x"].shape for sample in made_up_samples([wanted], 3)]
    [(3, 2), (2, 2), (3, 2)]
    """
    wanted = required(inputs)
    named = {dim for entry in wanted for dim in entry.shape or () if isinstance(dim, str)}
    free = len(named) + sum(dim is None for entry in wanted for dim in entry.shape or ())
    for seed in range(count):
        generator = np.random.default_rng(seed)
        common = int(generator.integers(1, _LARGEST_DIM + 1))
        lengths = [common] * free if seed % 2 else list(generator.permutation(max(free, _LARGEST_DIM)) + 1)
        by_name = dict(zip(sorted(named), map(int, lengths), strict=False))
        others = iter(lengths[len(named) :])
        sample = {}
        for entry in wanted:
            shape = [
                dim if isinstance(dim, int) else by_name[dim] if dim is not None else int(next(others))
                for dim in entry.shape or ()
            ]
            sample[entry.name] = _values(generator, entry.dtype, tuple(shape), seed)
        yield sample


def _values(
    generator: np.random.Generator, dtype: np.dtype[np.generic], shape: tuple[int, ...], seed: int
) -> NDArray[np.generic]:
    if is_floating(dtype):
        drawn = generator.standard_normal(shape) * (_LARGE if seed % 4 == 2 else 1.0)
        return np.where(generator.random(shape) < _SHARE_OF_ZEROS, 0.0, drawn).astype(dtype)
    if dtype.hasobject or dtype.kind in "SU":
        return np.full(shape, "text", dtype=object)
    if dtype.kind == "c":
        return (generator.standard_normal(shape) + 1j * generator.standard_normal(shape)).astype(dtype)
    least, most = _INTEGERS[seed % len(_INTEGERS)]
    return generator.integers(least if dtype.kind == "i" else 0, most + 1, shape).astype(dtype)
