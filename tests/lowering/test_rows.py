"""Rows that are looked up quantized equal the rows of the decoded table, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from onnx import TensorProto

from lowering.combinations import STORED
from onnxq.algorithms.encoders import encode_array
from onnxq.config.scheme import Granularity, QuantSpec, Storage
from onnxq.ir import Graph, Names, Node, Variable, to_model
from onnxq.lowering import NodeBuilder, decode_rows
from onnxq.lowering.decode import is_packed
from onnxq.numerics.affine import QTensor
from onnxq.numerics.formats import format_named
from onnxq.runtime.sessions import open_session, run

TABLE = np.random.default_rng(0).normal(size=(50, 40)).astype(np.float32)
INT64 = np.dtype(np.int64)


def table(spec: QuantSpec) -> QTensor:
    return encode_array(TABLE, spec, channel_axis=0, reduction_axis=-1)


def rows(spec: QuantSpec, indices: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], list[Node]]:
    """What onnxruntime looks up when the extents of the indices are only known at run time, and the nodes."""
    chain = NodeBuilder("w", Names(Graph()))
    given = Variable("i", indices.dtype, [None] * indices.ndim)
    found = decode_rows(chain, table(spec), spec, given, indices.ndim, TensorProto.FLOAT)
    found.dtype = np.dtype(np.float32)
    model = to_model(Graph(chain.nodes, [given], [found], "rows", opset=25))
    (values,) = run(open_session(model), {"i": indices})
    return values, chain.nodes


@pytest.mark.parametrize("per", [Granularity.TENSOR, Granularity.CHANNEL, (8,), (16,), (64,)], ids=str)
@pytest.mark.parametrize("format", STORED)
def test_rows_are_those_of_the_decoded_table(format: str, per: Granularity | tuple[int, ...]) -> None:
    spec = QuantSpec(format, per, symmetric=not format.startswith("u"))
    indices = np.array([[0, 49, -1], [7, 7, -50]])
    found, _ = rows(spec, indices)
    np.testing.assert_array_equal(found, table(spec).dequantize()[indices], strict=True)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 0), (2, 1, 3, 2)])
@pytest.mark.parametrize("storage", Storage)
def test_indices_have_any_rank_and_extent(shape: tuple[int, ...], storage: Storage) -> None:
    spec = QuantSpec("int4", (16,), storage=storage)
    indices = np.random.default_rng(0).integers(-50, 50, shape)
    found, _ = rows(spec, np.asarray(indices, INT64))
    np.testing.assert_array_equal(found, table(spec).dequantize()[indices], strict=True)


@pytest.mark.parametrize("format", STORED)
def test_the_table_is_never_decoded_as_a_whole(format: str) -> None:
    _, nodes = rows(QuantSpec(format, (8,), symmetric=not format.startswith("u")), np.array([3]))
    first = next(node for node in nodes if node.op == "Gather" and node.inputs[1].name == "i")
    assert first.inputs[0].shape[0] == len(TABLE)
    assert first.inputs[0].nbytes * 8 >= TABLE.size * min(format_named(format).bits, 8)
    assert all(
        node.inputs[0].shape is None or node.inputs[0].shape[0] != len(TABLE) for node in nodes if node.op == "Mul"
    )


@pytest.mark.parametrize(
    ("format", "storage", "words"),
    [
        ("int4", Storage.NATIVE, True),
        ("float4e2m1", Storage.NATIVE, True),
        ("int8", Storage.NATIVE, False),
        ("int8", Storage.WORDS, True),
        ("float6e2m3", Storage.NATIVE, False),
    ],
)
def test_parts_of_bytes_are_packed(format: str, storage: Storage, words: bool) -> None:
    assert is_packed(QuantSpec(format, storage=storage), format_named(format)) is words
