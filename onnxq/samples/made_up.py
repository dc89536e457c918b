"""Inputs that nobody gave: seeded values of the types and shapes that a model declares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from onnxq.samples.inputs import Input, Sample, is_floating, required

_LARGEST_DIM = 4
# Small integers are indices that exist, numbers of axes and lengths; zeros and ones are masks.
_LARGEST_INTEGERS = (3, 1)


def made_up_samples(inputs: Sequence[Input], count: int) -> Iterator[Sample]:
    """Yield samples that fit the inputs of a model, the same ones each time.

    Dims that are not fixed have 1 to 4 elements, equal where they have one name, and in every second sample all equal,
    for models that do not name dims that belong together. Floats are standard normal and integers small. A model may
    refuse some of them, or all.

    Args:
        inputs: what the model wants.
        count: how many.

    >>> wanted = Input("x", np.dtype(np.int64), ("N", 2))
    >>> [sample["x"].shape for sample in made_up_samples([wanted], 3)]
    [(3, 2), (2, 2), (2, 2)]
    """
    for seed in range(count):
        generator = np.random.default_rng(seed)
        common = int(generator.integers(1, _LARGEST_DIM + 1))
        dims: dict[str, int] = {}
        sample = {}
        for entry in required(inputs):
            shape = []
            for dim in entry.shape or ():
                drawn = common if seed % 2 else int(generator.integers(1, _LARGEST_DIM + 1))
                shape.append(dim if isinstance(dim, int) else dims.setdefault(dim, drawn) if dim else drawn)
            largest = _LARGEST_INTEGERS[seed // 2 % len(_LARGEST_INTEGERS)]
            sample[entry.name] = _values(generator, entry.dtype, tuple(shape), largest)
        yield sample


def _values(
    generator: np.random.Generator, dtype: np.dtype[np.generic], shape: tuple[int, ...], largest: int
) -> NDArray[np.generic]:
    if is_floating(dtype):
        return generator.standard_normal(shape).astype(dtype)
    if dtype.hasobject or dtype.kind in "SU":
        return np.full(shape, "text", dtype=object)
    if dtype.kind == "c":
        return (generator.standard_normal(shape) + 1j * generator.standard_normal(shape)).astype(dtype)
    return generator.integers(0, largest + 1, shape).astype(dtype)
