"""Codes in the ONNX type of their format, or in one that onnxruntime can read and that loses nothing."""

from __future__ import annotations

import numpy as np
import pytest

from onnxq.ir import Graph, Names
from onnxq.lowering import NodeBuilder
from onnxq.lowering.decode import native_numbers, stored_format
from onnxq.numerics.formats import FORMATS, QuantDType

SMALL = [format for format in FORMATS.values() if format.bits <= 8]


@pytest.mark.parametrize("format", SMALL, ids=lambda format: format.name)
def test_the_stored_format_has_every_value(format: QuantDType) -> None:
    stored = stored_format(format)
    if stored.is_float or not format.is_float:
        assert set(format.values[~np.isnan(format.values)]) <= set(stored.values)
    else:
        # Patterns are looked up in a table of all values.
        assert 2**stored.bits == len(format.values)


@pytest.mark.parametrize(
    ("name", "stored", "nbytes"),
    [
        ("float4e2m1", "uint4", 4),
        ("float6e2m3", "float8e4m3fn", 8),
        ("float6e3m2", "float8e4m3fn", 8),
        ("float8e5m2", "float8e5m2", 8),
        ("int2", "int2", 2),
    ],
)
@pytest.mark.parametrize("strict", [False, True])
def test_types_without_kernels_are_stored_in_others(name: str, stored: str, nbytes: int, strict: bool) -> None:
    format = FORMATS[name]
    chain = NodeBuilder("w", Names(Graph()))
    native_numbers(chain, format.round(np.linspace(-2, 2, 8)), format, strict=strict)
    codes = chain.nodes[0].inputs[0]
    assert codes.tensor_data.onnx_dtype == (format if strict else FORMATS[stored]).onnx_type
    assert codes.nbytes == (format.bits if strict else nbytes)
