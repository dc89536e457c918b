"""Random quantized values, and the bits that onnxruntime computes from arrays."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from onnxq.ir import Graph, Node, Variable, constant, to_model
from onnxq.runtime.sessions import open_session, run

Array = NDArray[Any]


def dtype_named(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


def random_codes(dtype: np.dtype[Any], shape: tuple[int, ...], seed: int = 0) -> Array:
    generator = np.random.default_rng(seed)
    if dtype.name.startswith("float"):
        return generator.normal(size=shape).astype(dtype)
    limits = ml_dtypes.iinfo(dtype)
    return generator.integers(limits.min, int(limits.max) + 1, shape).astype(dtype)


def by_onnxruntime(op: str, inputs: list[Array], attributes: dict[str, Any], wanted: object = None) -> Array:
    """What onnxruntime computes; small types go in as initializers, and floats come out."""
    tensors = [constant(f"i{index}", array) for index, array in enumerate(inputs)]
    output = Variable("y", wanted if wanted is not None else inputs[-1].dtype)
    graph = Graph([Node(op, "n", attributes, tensors, [output])], [], [output], "g", opset=25)
    found: Array = run(open_session(to_model(graph), optimize=False), {})[0]
    return found


def assert_same_bits(found: Array, expected: Array) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    np.testing.assert_array_equal(found.view(f"u{found.itemsize}"), expected.view(f"u{expected.itemsize}"))
