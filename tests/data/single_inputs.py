"""Entries of models with one input or two, and samples for them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from onnxq.data.samples import Input, Sample

FLOAT = np.dtype(np.float32)
X = Input("x", FLOAT, ("N", 2))
SINGLE = (Input("x", FLOAT, (1, 2)),)
PAIR = (Input("x", FLOAT, ("N", 2)), Input("n", np.dtype(np.int64), ()))


def rows(count: int) -> NDArray[np.float32]:
    return np.arange(2 * count, dtype=np.float32).reshape(count, 2)


def dicts(count: int) -> list[Sample]:
    return [{"x": row[None]} for row in rows(count)]


def firsts(samples: object) -> list[float]:
    return [float(sample["x"].flat[0]) for sample in samples]  # type: ignore[attr-defined]
