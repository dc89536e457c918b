"""Codes in 32-bit words are the bytes that ONNX stores, where rows fill their words."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto

from onnxq.ir import Graph, Names, Variable, to_model
from onnxq.lowering import NodeBuilder
from onnxq.lowering.decode import (
    codes_from_words,
    numbers_from_words,
    numbers_in,
    numbers_in_bytes,
    store_bytes,
    store_words,
)
from onnxq.numerics.formats import FORMATS
from onnxq.numerics.packing import pack
from onnxq.runtime.sessions import open_session, run

FILLING = [format for format in FORMATS.values() if format.bits in (2, 4, 8)]


def new_chain() -> NodeBuilder:
    return NodeBuilder("w", Names(Graph()))


def all_codes(name: str) -> np.ndarray:
    """Every bit pattern, and some more so that the last word is not full."""
    format = FORMATS[name]
    patterns = np.concatenate([np.arange(2**format.bits), np.arange(3)]).astype(np.uint8)
    if not format.is_float and format.signed:
        half = 2 ** (format.bits - 1)
        patterns = (patterns ^ half) - np.uint8(half)
    return patterns.view(format.dtype)[None]


@pytest.mark.parametrize("name", [format.name for format in FILLING])
def test_every_pattern_leaves_its_word_as_the_number_it_is(name: str) -> None:
    chain = new_chain()
    found = numbers_from_words(chain, all_codes(name), FORMATS[name])
    found.dtype = np.dtype(np.float32)
    model = to_model(Graph(chain.nodes, outputs=[found], name="words", opset=18))
    (values,) = run(open_session(model), {})
    codebook = FORMATS[name].codebook
    expected = all_codes(name) if codebook is None else np.float32(codebook.numbers)[all_codes(name)]
    np.testing.assert_array_equal(values, expected.astype(np.float32))


def test_full_words_are_the_bytes_of_the_onnx_type() -> None:
    codes = np.array([[-8, -7, -1, 0, 1, 2, 6, 7]], np.int8)
    stored = store_words(new_chain(), codes, FORMATS["int4"])
    assert stored.values.tolist() == [[0x76210F98]]
    assert stored.values.tobytes() == pack(codes, FORMATS["int4"]).tobytes()


def test_words_that_are_looked_up_keep_their_leading_axes() -> None:
    chain = new_chain()
    found = numbers_in(chain, Variable("rows", np.dtype(np.uint32), ["a", "b", 2]), (0, 0, 13), FORMATS["uint4"])
    found.dtype = np.dtype(np.float32)
    rows = np.arange(12, dtype=np.uint32).reshape(2, 3, 2)
    graph = Graph(chain.nodes, [chain.nodes[0].inputs[0]], [found], "rows", opset=18)
    (values,) = run(open_session(to_model(graph)), {"rows": rows})
    assert values.shape == (2, 3, 13)
    np.testing.assert_array_equal(values[..., 0], rows[..., 0])


@pytest.mark.parametrize("name", ["int4", "uint4", "int2", "uint2", "float4e2m1"])
def test_codes_come_out_of_bytes_as_they_went_in(name: str) -> None:
    chain, format = new_chain(), FORMATS[name]
    codes = all_codes(name)[..., :-1]
    found = numbers_in_bytes(chain, store_bytes(chain, codes, format), codes.shape, format)
    found.dtype = np.dtype(np.float32)
    (values,) = run(open_session(to_model(Graph(chain.nodes, outputs=[found], name="bytes", opset=18))), {})
    expected = format.values[codes.view(np.uint8)] if format.is_float else codes
    np.testing.assert_array_equal(values, expected)


def test_nothing_is_shifted_out_that_a_division_would_round() -> None:
    chain = new_chain()
    numbers_in_bytes(chain, store_bytes(chain, all_codes("int4"), FORMATS["int4"]), (0, 16), FORMATS["int4"])
    shift = next(node for node in chain.nodes if node.op == "BitShift")
    mask, shifts = shift.inputs[0].inputs[0].inputs[1].values, shift.inputs[1].values
    assert not (mask % (1 << shifts)).any()


def test_typed_codes_have_the_type_of_the_format() -> None:
    chain = new_chain()
    codes_from_words(chain, all_codes("int4"), FORMATS["int4"])
    assert chain.nodes[-1].attrs == {"to": TensorProto.INT4}
