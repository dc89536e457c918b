"""UnpackBlockWeights gives the float weights that onnxruntime's kernels on blocks multiply by."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from model_texts import Array, difference, node_named, ops, outputs
from onnx import defs, helper

from onnxq.errors import ModelError
from onnxq.ir import Constant, Graph, Node, Variable, as_graph, constant, to_model
from onnxq.passes import UnpackBlockWeights

DOMAIN = "com.microsoft"
RECENT = pytest.mark.skipif(defs.onnx_opset_version() < 25, reason="an old onnxruntime without these kernels")
ROWS, COLUMNS, BLOCK = 80, 6, 32
"""The last block of each column is partial."""


def kernel(op: str, data: Array, inputs: list[Array | None], **attributes: Any) -> Graph:
    """A model of one node; the data is its first input for products and its second for lookups."""
    fed = Variable("x", data.dtype, list(data.shape))
    given = [Variable("") if array is None else constant(f"i{n}", array) for n, array in enumerate(inputs)]
    given.insert(1 if op == "GatherBlockQuantized" else 0, fed)
    floats = [array.dtype for array in inputs if array is not None and array.dtype.name.startswith("float")]
    output = Variable("y", floats[-1] if op == "GatherBlockQuantized" else data.dtype)
    node = Node(op, "op", attributes, given, [output], DOMAIN)
    return Graph([node], [fed], [output], "g", opset=21, import_domains=[helper.make_opsetid(DOMAIN, 1)])


def unpacked(graph: Graph) -> Graph:
    copy = as_graph(to_model(graph))
    assert UnpackBlockWeights().apply(copy).changed == ("op",)
    assert not UnpackBlockWeights().apply(copy)
    return copy


def packed_bytes(*shape: int) -> Array:
    return np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)


# With 8 bits the kernel takes no float zero points.
@RECENT
@pytest.mark.parametrize(
    ("bits", "zero_points"),
    [(bits, kind) for bits in (2, 4, 8) for kind in ("none", "packed", "float") if (bits, kind) != (8, "float")],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_products_of_n_bits_multiply_by_the_same_weight_bit_for_bit(bits: int, dtype: Any, zero_points: str) -> None:
    blocks = -(-ROWS // BLOCK)
    generator = np.random.default_rng(1)
    zeros = {
        "none": None,
        "packed": packed_bytes(COLUMNS, -(-blocks * bits // 8)),
        "float": generator.uniform(0, 2**bits, (COLUMNS, blocks)).astype(dtype),
    }[zero_points]
    scales = generator.uniform(-0.1, 0.1, (COLUMNS, blocks)).astype(dtype)
    codes = packed_bytes(COLUMNS, blocks, BLOCK * bits // 8)
    # Each row of the product with the identity is a row of the weight.
    identity = np.eye(ROWS, dtype=dtype)
    graph = kernel(
        "MatMulNBits",
        identity,
        [codes, scales, zeros],
        K=ROWS,
        N=COLUMNS,
        bits=bits,
        block_size=BLOCK,
        accuracy_level=0,
    )
    found = unpacked(graph)
    assert ops(found) == ["MatMul"]
    weight = node_named(found, "op.float").inputs[1].values
    np.testing.assert_array_equal(weight, outputs(graph, {"x": identity})["y"], strict=True)
    data = generator.normal(size=(2, 3, ROWS)).astype(dtype)
    graph.inputs[0].shape = found.inputs[0].shape = [2, 3, ROWS]
    tolerance = 2e-6 if dtype == np.float32 else 2e-3
    assert difference(outputs(found, {"x": data}), outputs(graph, {"x": data})) <= tolerance


def test_the_bias_is_added() -> None:
    bias = np.linspace(-1, 1, COLUMNS, dtype=np.float32)
    inputs = [packed_bytes(COLUMNS, 3, 16), np.full((COLUMNS, 3), 0.1, np.float32), None, None, bias]
    data = np.random.default_rng(0).normal(size=(5, ROWS)).astype(np.float32)
    graph = kernel("MatMulNBits", data, inputs, K=ROWS, N=COLUMNS, bits=4, block_size=BLOCK)
    found = unpacked(graph)
    assert ops(found) == ["MatMul", "Add"]
    assert difference(outputs(found, {"x": data}), outputs(graph, {"x": data})) <= 2e-6


@RECENT
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_lookups_in_bytes_give_the_same_rows_bit_for_bit(bits: int, dtype: Any, shifted: bool) -> None:
    count, extent, block = 10, 48, 16
    zeros = packed_bytes(count, -(-3 * bits // 8)) if shifted else None
    scales = np.random.default_rng(1).uniform(-0.1, 0.1, (count, 3)).astype(dtype)
    indices = np.array([[3, 0], [9, 3]])
    graph = kernel(
        "GatherBlockQuantized", indices, [packed_bytes(count, extent * bits // 8), scales, zeros],
        bits=bits, block_size=block, gather_axis=0, quantize_axis=1,
    )  # fmt: skip
    found = unpacked(graph)
    assert ops(found) == ["Gather"]
    for name, expected in outputs(graph, {"x": indices}).items():
        np.testing.assert_array_equal(outputs(found, {"x": indices})[name], expected, strict=True)


@RECENT
@pytest.mark.parametrize(("quantized", "gathered"), [(1, 0), (0, 1), (-1, 0), (0, 0)])
@pytest.mark.parametrize("name", ["int4", "uint4", "float8_e4m3fn", "float4_e2m1fn"])
def test_lookups_in_small_types_give_the_same_rows_bit_for_bit(name: str, quantized: int, gathered: int) -> None:
    dtype, shape, block = np.dtype(getattr(ml_dtypes, name)), (32, 48), 16
    codes = np.random.default_rng(0).integers(0, 8, shape).astype(np.float32).astype(dtype)
    grid = tuple(extent // (block if axis == quantized % 2 else 1) for axis, extent in enumerate(shape))
    scales = np.random.default_rng(1).uniform(-0.1, 0.1, grid).astype(np.float32)
    zeros = None if "float" in name else np.random.default_rng(2).integers(0, 8, grid).astype(dtype)
    indices = np.array([3, 0, 31])
    graph = kernel(
        "GatherBlockQuantized", indices, [codes, scales, zeros],
        block_size=block, gather_axis=gathered, quantize_axis=quantized,
    )  # fmt: skip
    expected, found = outputs(graph, {"x": indices})["y"], outputs(unpacked(graph), {"x": indices})["y"]
    np.testing.assert_array_equal(found, expected, strict=True)


@pytest.mark.parametrize("quant_type", [0, 1])
def test_products_of_bitsandbytes_codes_multiply_by_the_same_weight_bit_for_bit(quant_type: int) -> None:
    rows, columns, block = 48, 5, 32
    largest = np.random.default_rng(1).uniform(0.1, 2, -(-rows * columns // block)).astype(np.float32)
    identity = np.eye(rows, dtype=np.float32)
    graph = kernel(
        "MatMulBnb4", identity, [packed_bytes(rows * columns // 2), largest],
        K=rows, N=columns, block_size=block, quant_type=quant_type,
    )  # fmt: skip
    found = unpacked(graph)
    weight = node_named(found, "op.float").inputs[1].values
    np.testing.assert_array_equal(weight, outputs(graph, {"x": identity})["y"], strict=True)


def test_a_weight_that_two_nodes_share_is_decoded_once() -> None:
    data = np.zeros((5, ROWS), np.float32)
    inputs: list[Array | None] = [packed_bytes(COLUMNS, 3, 16), np.full((COLUMNS, 3), 0.1, np.float32)]
    graph = kernel("MatMulNBits", data, inputs, K=ROWS, N=COLUMNS, bits=4, block_size=BLOCK)
    first = graph.nodes[0]
    graph.nodes.append(first.copy(first.inputs, [Variable("z", np.dtype(np.float32))]))
    graph.outputs.append(graph.nodes[1].outputs[0])
    first.inputs[1].name = "w.codes"
    UnpackBlockWeights().apply(graph)
    one, other = (node.inputs[1] for node in graph.nodes)
    assert one is other
    assert isinstance(one, Constant)
    assert one.name == "w"


@pytest.mark.parametrize("change", ["groups", "prepacked", "computed"])
def test_what_is_not_known_is_refused_by_name(change: str) -> None:
    inputs: list[Array | None] = [packed_bytes(COLUMNS, 3, 16), np.full((COLUMNS, 3), 0.1, np.float32)]
    attributes = {"weight_prepacked": 1} if change == "prepacked" else {}
    if change == "groups":
        inputs += [None, np.zeros(ROWS, np.int32)]
    graph = kernel("MatMulNBits", np.zeros((5, ROWS), np.float32), inputs, K=ROWS, N=COLUMNS, bits=4, block_size=BLOCK,
                   **attributes)  # fmt: skip
    if change == "computed":
        graph.nodes[0].inputs[2] = Variable("scales")
    message = "reads scales, which is computed" if change == "computed" else "has a weight in a layout of its own"
    with pytest.raises(ModelError, match=rf"node op \(MatMulNBits\) {message}"):
        UnpackBlockWeights().apply(graph)
