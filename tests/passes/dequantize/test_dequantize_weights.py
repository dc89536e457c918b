"""Weights back to floats: subgraphs of constants, and packed blocks."""

from __future__ import annotations

from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from model_texts import Array, apply_once, difference, model, named_graph, node_named, ops, outputs, sample, values
from onnx import TensorProto, defs, helper, numpy_helper
from rule_cases import Case, Rule, check_valid, table

from onnxq.errors import ModelError
from onnxq.ir import Constant, Graph, Node, Variable, as_graph, constant, constants, to_model
from onnxq.passes import DequantizeWeights, RemoveUnused, UnpackBlockWeights
from onnxq.passes.dequantize.weights import _DECODING, DequantizedResult, DequantSubgraphs

BYTES = np.arange(12, dtype=np.int8).reshape(4, 3)
RECENT = pytest.mark.skipif(defs.onnx_opset_version() < 25, reason="an old onnxruntime without these kernels")

# DequantSubgraphs -----------------------------------------------------------------------------------------------------


def subgraphs(body: str) -> Graph:
    return named_graph(
        model(
            f"(float[4, 3] x, int64[2] i, int64[5] j) => (y) {{ {body} }}", opset=18,
            domains='"my.own" : 1, "com.microsoft" : 1', c=BYTES, s=np.array(0.5, np.float32),
            w=np.ones((4, 3), np.float32), u=np.arange(4, dtype=np.uint32), four=np.array(4, np.uint32), shape=[3, 4],
        )
    )  # fmt: skip


def results(body: str) -> dict[str, DequantizedResult]:
    graph = subgraphs(body)
    return {result.tensor.name: result for result in DequantSubgraphs.of(graph).results(graph.opset)}


def loaded(result: DequantizedResult) -> Any:
    assert result.tensor_data is not None
    return result.tensor_data.load()


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("a = DequantizeLinear(c, s)  y = Add(a, x)", {"a": "c"}),
        ("a = Cast <to = 1> (c)  b = Mul(a, s)  y = Add(b, x)", {"b": "c"}),
        ("a = Cast <to = 1> (c)  b = Mul(a, s)  d = Add(b, x)  y = Add(a, d)", {"a": "c", "b": "c"}),
        ('a = BitShift <direction = "RIGHT"> (u, four)  b = Cast <to = 1> (a)  y = Mul(b, s)', {"y": "u"}),
        ("a = Mul(w, s)  y = Add(a, x)", {}),
        ("a = Cast <to = 1> (shape)  y = Mul(a, s)", {}),
        ("a = Add(x, x)  y = Mul(a, s)", {}),
        ("a = Cast <to = 7> (c)  b = Cast <to = 7> (x)  d = Add(a, b)  y = Cast <to = 1> (d)", {}),
        ("a = Cast <to = 1> (c)  b = my.own.Odd(a)  y = Add(b, x)", {"a": "c"}),
        ("a = com.microsoft.DequantizeLinear(c, s)  y = Add(a, x)", {"a": "c"}),
        ("a = RandomNormalLike(w)  b = Cast <to = 1> (c)  d = Add(a, b)  y = Add(d, x)", {"b": "c"}),
        # The scales of kernels on blocks count, though they are no quantized values.
        ("a = Mul(w, s)  y = com.microsoft.MatMulNBits(x, c, a)", {"a": ""}),
    ],
)
def test_results_are_floats_from_quantized_values_that_the_rest_reads(body: str, expected: dict[str, str]) -> None:
    decoded = {name: result.quantized for name, result in results(body).items()}
    assert decoded == expected


@pytest.mark.parametrize(
    "body",
    [
        # Whatever the names.
        """a = Cast <to = 1> (c)  b = Mul(a, s)  d = Cast <to = 1> (c)  e = Mul(d, s)  h = Mul(d, w)
           g = Add(b, x)  k = Add(e, g)  y = Add(h, k)""",
        # Whatever chooses the rows.
        """a = Gather(c, i)  b = Cast <to = 1> (a)  d = Gather(c, j)  e = Cast <to = 1> (d)  h = Cast <to = 1> (c)
           f = MatMul(b, x)  g = MatMul(e, x)  k = MatMul(h, x)  y = Concat <axis = 0> (f, g, k)""",
    ],
)
def test_equal_recipes_are_equal(body: str) -> None:
    decoded = results(body)
    assert decoded["b"].computation == decoded["e"].computation
    assert decoded["b"].computation != decoded["h"].computation


def test_nodes_that_nothing_reads_are_told_from_those_that_something_does() -> None:
    graph = subgraphs(
        "[dead] a = Cast <to = 1> (c)  [deader] b = Mul(a, s)  [live] d = Cast <to = 1> (c)  y = Add(d, x)"
    )
    assert {node.name for node in DequantSubgraphs.of(graph).unread()} == {"dead", "deader"}


def test_a_chain_of_thousands_takes_no_recursion() -> None:
    steps = "".join(f"a{i + 1} = Add(a{i}, a0) " for i in range(3000))
    decoded = results(f"a0 = Cast <to = 1> (c) {steps} y = Add(a3000, x)")
    np.testing.assert_array_equal(loaded(decoded["a3000"]), BYTES * np.float32(3001))


def test_onnx_has_every_operator_that_decoders_are_made_of() -> None:
    assert all(onnx.defs.has(op) for op in _DECODING)


# DequantizeWeights ----------------------------------------------------------------------------------------------------

GENERATOR = np.random.default_rng(0)
COLUMN_SCALES = np.linspace(0.001, 0.01, 24, dtype=np.float32)
FLOAT = np.dtype(np.float32)


def small(name: str, *shape: int) -> Array:
    patterns = GENERATOR.integers(0, 256, shape).astype(np.uint8)
    if name.startswith(("int", "uint")):
        return (patterns % 4).astype(getattr(ml_dtypes, name))
    return (GENERATOR.normal(size=shape) * 2).astype(np.float32).astype(getattr(ml_dtypes, name))


weight = Rule(
    DequantizeWeights(), "float[3, 16] x", then=RemoveUnused(),
    c=GENERATOR.integers(-127, 128, (16, 24)).astype(np.int8),
    words=GENERATOR.integers(0, 2**32, (16, 3), dtype=np.uint64).astype(np.uint32), s=0.01, cs=COLUMN_SCALES,
    flipped=GENERATOR.integers(-127, 128, (24, 16)).astype(np.int8),
    blocks=np.linspace(0.01, 0.02, 48, dtype=np.float32).reshape(2, 24),
    rows=np.linspace(0.01, 0.02, 48, dtype=np.float32).reshape(24, 2, 1), zeros=np.zeros(24, np.int8),
    z=np.arange(24, dtype=np.int8), half=8, whole=[16, 24], last=[-1], split=[24, 2, 8], joined=[24, 16],
    shifts=np.arange(0, 32, 4, dtype=np.uint32), mask=np.array(15, np.uint32), sign=np.array(8, np.uint32),
    bf=COLUMN_SCALES.astype(ml_dtypes.bfloat16), e5=small("float8_e5m2", 16, 24), e4=small("float8_e4m3fn", 2, 24),
    e8=np.full(24, 120, np.uint8).view(ml_dtypes.float8_e8m0fnu), u4=small("uint4", 16, 24),
    levels=np.linspace(-1, 1, 16, dtype=np.float32), floats=values(16, 24), three=np.array(3, np.int8),
)  # fmt: skip
# How the weight w is decoded, by the opset.
DECODERS = {
    "w = DequantizeLinear(c, s)": 17,
    "w = DequantizeLinear <axis = 1> (c, cs, z)": 17,
    "w = DequantizeLinear <axis = 0, block_size = 8> (c, blocks)": 21,
    "t = DequantizeLinear(e4, s)  w = DequantizeLinear <axis = 0, block_size = 8> (c, t)": 21,
    "w = com.microsoft.DequantizeLinear <axis = 1> (c, cs, zeros)": 17,
    "d = Cast <to = 1> (c)  w = Mul(d, cs)": 17,
    "d = Cast <to = 1> (c)  t = Cast <to = 1> (bf)  w = Mul(d, t)": 17,
    "d = Cast <to = 1> (e5)  t = Cast <to = 1> (e8)  w = Mul(d, t)": 24,
    "d = Cast <to = 1> (flipped)  e = Reshape(d, split)  f = Mul(e, rows)  g = Reshape(f, joined) w = Transpose(g)": 17,
    """a = Unsqueeze(words, last)  b = BitShift <direction = "RIGHT"> (a, shifts)  d = BitwiseAnd(b, mask)
       e = BitwiseXor(d, sign)  f = Cast <to = 1> (e)  g = Sub(f, half)  h = Reshape(g, whole)  w = Mul(h, cs)""": 18,
    "i = Cast <to = 6> (u4)  d = Gather(levels, i)  w = Mul(d, cs)": 21,
    "d = Cast <to = 1> (c)  e = Mul(d, cs)  w = Cast <to = 10> (e)": 17,
    "q = QuantizeLinear(floats, s, three)  w = DequantizeLinear(q, s, three)": 17,
}


def decoded(case: Case) -> Graph:
    graph = named_graph(case.made)
    assert apply_once(case.step, graph)
    RemoveUnused().apply(graph)
    check_valid(to_model(graph))
    return graph


def stored(decoder: str, opset: int = 17, **options: Any) -> Case:
    kind = "float16" if "<to = 10>" in decoder else "float"
    return weight(f"{decoder} [dot] y = MatMul(x, w)", inputs=f"{kind}[3, 16] x", opset=opset,
                  domains='"com.microsoft" : 1', **options)  # fmt: skip


@pytest.mark.parametrize("decoder", DECODERS)
def test_the_weight_is_what_onnxruntime_decodes_bit_for_bit(decoder: str) -> None:
    case = stored(decoder, DECODERS[decoder])
    if DECODERS[decoder] > 23 and defs.onnx_opset_version() < 25:
        pytest.skip("an old onnxruntime")
    graph = decoded(case)
    assert ops(graph) == ["MatMul"]
    tensor = node_named(graph, "dot").inputs[1]
    assert isinstance(tensor, Constant)
    kind = TensorProto.FLOAT16 if tensor.dtype == np.float16 else TensorProto.FLOAT
    case.made.graph.output.append(helper.make_tensor_value_info("w", kind, [16, 24]))
    feed = sample(case.made)
    expected = outputs(case.made, feed)
    np.testing.assert_array_equal(tensor.values, expected["w"], strict=True)
    assert difference(outputs(graph, feed), {"y": expected["y"]}) <= (2e-6 if tensor.dtype == FLOAT else 1e-3)


@pytest.mark.parametrize("scale_type", ["float32", "bfloat16", "float8_e8m0fnu"])
@pytest.mark.parametrize("code_type", ["float4_e2m1fn", "int4", "float8_e4m3fn"])
def test_what_onnxruntime_has_no_kernel_for_is_decoded_by_definition(code_type: str, scale_type: str) -> None:
    numbers = small(code_type, 16, 24)
    scale = np.full((2, 24), 0.25, np.float32).astype(np.dtype(getattr(ml_dtypes, scale_type, scale_type)))
    kind = "bfloat16" if scale_type == "bfloat16" else "float"
    attributes = "axis = 0, block_size = 8" + (", output_dtype = 1" if "e8m0" in scale_type else "")
    body = f"w = DequantizeLinear <{attributes}> (c, s) [dot] y = MatMul(x, w)"
    graph = decoded(weight(body, inputs=f"{kind}[3, 16] x", opset=24, c=numbers, s=scale))
    tensor = node_named(graph, "dot").inputs[1]
    assert tensor.dtype == (ml_dtypes.bfloat16 if kind == "bfloat16" else FLOAT)
    np.testing.assert_array_equal(tensor.values.astype(np.float32), numbers.astype(np.float32) / 4)


@pytest.mark.parametrize(("stored_as", "name"), [("kernel.codes", "kernel"), ("x.codes", "w")])
def test_a_weight_takes_its_old_name_where_that_is_free(stored_as: str, name: str) -> None:
    case = stored("d = Cast <to = 1> (c)  w = Mul(d, cs)")
    case.made.graph.node[0].input[0] = case.made.graph.initializer[0].name = stored_as
    assert node_named(decoded(case), "dot").inputs[1].name == name


ROWS = "int64[N, 3] i"
INDICES = {"i": np.array([[0, 15, 3], [-1, 7, 7]])}
row = Rule(
    DequantizeWeights(), ROWS, then=RemoveUnused(), c=weight.shared["c"], s=0.01, cs=COLUMN_SCALES, turned=[2, 3, 24],
    bs=np.linspace(1, 2, 3, dtype=np.float32)[:, None], rs=np.linspace(0.1, 0.2, 16, dtype=np.float32)[:, None],
    split=[0, 0, 3, 8], whole=[0, 0, 24], places=np.linspace(1, 2, 144, dtype=np.float32).reshape(2, 3, 24), one=[1],
    t=np.array([1, 2], np.float32).reshape(2, 1, 1), flat=[-1, 24], end=[99], none=[0], more=[0, 0, 1, 0],
    quarter=0.25, three=np.array(3, np.int8), single=[1, -1], large=[5000, 16, 24],
)  # fmt: skip
GATHERED = [
    # Decoding rows becomes choosing rows of the decoded table.
    *(row(body, "Gather", error=0.0, feed=INDICES,
          holds=lambda graph: [tensor.shape for tensor in constants(graph) if tensor.outputs] == [(16, 24)])
      for body in [
        "a = Gather(c, i)  b = Cast <to = 1> (a)  y = Mul(b, s)",
        "a = Gather(c, i)  b = Cast <to = 1> (a)  r = Gather(rs, i)  y = Mul(b, r)",
        "a = Gather(c, i)  y = DequantizeLinear(a, s)",
        "a = Gather(c, i)  y = DequantizeLinear <axis = -1> (a, cs)",
        "a = Gather(c, i)  b = Cast <to = 1> (a)  d = Reshape(b, split)  e = Mul(d, bs)  y = Reshape(e, whole)"]),
    # What depends on more than the index of a row is left behind decoded rows.
    *(row(f"a = Gather(c, i)  b = Cast <to = 1> (a) {body}", f"{left} Gather", inputs="int64[2, 3] i", error=0.0,
          feed=INDICES, changed="b") for body, left in [
        ("d = Reshape(b, turned)  y = Mul(d, places)", "Reshape Mul"),
        ("y = Mul(b, places)", "Mul"),
        ("y = Mul(b, t)", "Mul"),
        ("d = Reshape(b, flat)  e = Slice(d, one, end, none)  f = Pad(e, more)  y = Reshape(f, turned)",
         "Reshape Slice Pad Reshape")]),
    # The largest part of a decoder goes whose values can take its place.
    *(row(body, expected, inputs="int64[1, 3] i", error=0.0, feed={"i": np.array([[0, 15, 3]])}) for body, expected in [
        ("d = DequantizeLinear(c, s)  g = Gather(d, i)  y = Reshape(g, single)", "Reshape Gather"),
        ("d = DequantizeLinear(c, s)  n = Squeeze(i)  y = Gather(d, n)", "Squeeze Gather"),
        ("d = DequantizeLinear(c, s)  y = Expand(d, large)", "Expand"),
        ("""d = DequantizeLinear(c, s)  g = Gather(d, i)  q = QuantizeLinear(g, quarter, three)  r = Transpose(q)
            y = DequantizeLinear(r, quarter, three)""", "QuantizeLinear Transpose DequantizeLinear Gather"),
        ("d = Cast <to = 1> (c)  e = Mul(d, s)  f = Cast <to = 7> (e)  y = Gather(f, i)", "Cast Gather")]),
]  # fmt: skip
plain = Rule(DequantizeWeights(), "float[2, 2] x", then=RemoveUnused(), n=[0, 1], m=np.array([[1, 0]], np.uint8),
             f=values(4, 4), h=values(2, 2).astype(ml_dtypes.bfloat16), ones=np.ones((1, 1), np.int8),
             many=[3000, 3000])  # fmt: skip
PLAIN = [
    # Constants of float models are left.
    *(plain(body, runs=False, stays="", holds=lambda graph: not DequantizeWeights().apply(graph).skipped) for body in [
        "a = Shape(x)  b = Gather(a, n)  d = Concat <axis = 0> (b, n)  e = Cast <to = 1> (d)  y = Add(e, e)",
        "a = Cast <to = 1> (n)  b = Mul(a, a)  y = Add(x, b)",
        "a = Cast <to = 9> (m)  y = Where(a, x, x)",
        "a = Cast <to = 7> (x)  y = Gather(f, a)",
        "a = Cast <to = 1> (h)  y = Add(x, a)"]),
    plain("a = Expand(ones, many)  b = Cast <to = 1> (a)  y = Add(x, b)", inputs="float[1] x", runs=False,
          stays="it is far larger than the constants that it is computed from"),
    # A weight that is returned is made by a node; bodies get weights that are decoded around or inside of them.
    weight("() => (y) { y = DequantizeLinear(c, s) }", "Identity", error=0.0),
    weight("""(float[3, 16] x, bool b) => (y) { w = DequantizeLinear(c, s) y = If (b) <
           then_branch = yes () => (t) { t = MatMul(x, w) },
           else_branch = no () => (e) { d = Cast <to = 1> (c)  v = Mul(d, s)  e = MatMul(x, v) }> }""",
           "If MatMul MatMul"),
]  # fmt: skip


@table(GATHERED, PLAIN)
def test_rules(case: Case) -> None:
    case.check()


def test_weights_that_are_decoded_alike_are_one() -> None:
    case = weight(
        """(float[3, 16] x) => (y, z, u) {
            v = DequantizeLinear(c, s)  [a] y = MatMul(x, v)
            w = DequantizeLinear(c, s)  [b] z = MatMul(x, w)
            t = DequantizeLinear(c, half)  [c] u = MatMul(x, t) }"""
    )
    graph = decoded(case)
    first, second, third = (node_named(graph, name).inputs[1] for name in "abc")
    assert first is second
    assert first is not third


def test_large_weights_are_not_kept_in_memory() -> None:
    integers = GENERATOR.integers(-127, 128, (512, 512)).astype(np.int8)
    body = "d = Cast <to = 1> (c)  w = Mul(d, half)  y = MatMul(x, w)"
    graph = decoded(weight(body, inputs="float[1, 512] x", c=integers, half=0.5))
    (tensor,) = (tensor for tensor in constants(graph) if tensor.outputs)
    assert type(tensor.tensor_data).__name__ == "LazyTensor"
    written = {tensor.name: tensor for tensor in to_model(graph).graph.initializer}["w"]
    np.testing.assert_array_equal(numpy_helper.to_array(written), integers.astype(np.float32) / 2)


# UnpackBlockWeights gives the float weights that onnxruntime's kernels on blocks multiply by. -------------------------

DOMAIN = "com.microsoft"
DEPTH, COLUMNS, BLOCK = 80, 6, 32
"""The last block of each column is partial."""


def kernel(op: str, data: Array, inputs: list[Array | None], **attributes: Any) -> Graph:
    """A model of one node; the data is its first input for products and its second for lookups."""
    fed = Variable("x", data.dtype, list(data.shape))
    tensors = [Variable("") if array is None else constant(f"i{n}", array) for n, array in enumerate(inputs)]
    tensors.insert(1 if op == "GatherBlockQuantized" else 0, fed)
    floats = [array.dtype for array in inputs if array is not None and array.dtype.name.startswith("float")]
    output = Variable("y", floats[-1] if op == "GatherBlockQuantized" else data.dtype)
    node = Node(op, "op", attributes, tensors, [output], DOMAIN)
    return Graph([node], [fed], [output], "g", opset=21, import_domains=[helper.make_opsetid(DOMAIN, 1)])


def n_bits(data: Array, *more: Array | None, stored: Array | None = None, scales: Array | None = None,
           bits: int = 4, **attributes: Any) -> Graph:  # fmt: skip
    """A MatMulNBits of DEPTH rows and COLUMNS columns."""
    parts = [
        packed(COLUMNS, -(-DEPTH // BLOCK), BLOCK * bits // 8) if stored is None else stored,
        np.full((COLUMNS, 3), 0.1, np.float32) if scales is None else scales,
    ]
    return kernel("MatMulNBits", data, [*parts, *more], K=DEPTH, N=COLUMNS, bits=bits, block_size=BLOCK, **attributes)


def unpacked(graph: Graph) -> Graph:
    copy = as_graph(to_model(graph))
    assert apply_once(UnpackBlockWeights(), copy).changed == ("op",)
    return copy


def packed(*shape: int) -> Array:
    return np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)


def assert_same_rows(graph: Graph, data: Array) -> Graph:
    """The unpacked model gives the same rows bit for bit."""
    floats = unpacked(graph)
    np.testing.assert_array_equal(outputs(floats, {"x": data})["y"], outputs(graph, {"x": data})["y"], strict=True)
    return floats


# With 8 bits the kernel takes no float zero points.
@RECENT
@pytest.mark.parametrize(
    ("bits", "zero_points"), [pair for pair in product((2, 4, 8), ("none", "packed", "float")) if pair != (8, "float")]
)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_products_of_n_bits_multiply_by_the_same_weight_bit_for_bit(bits: int, dtype: Any, zero_points: str) -> None:
    blocks = -(-DEPTH // BLOCK)
    generator = np.random.default_rng(1)
    zeros = {
        "none": None,
        "packed": packed(COLUMNS, -(-blocks * bits // 8)),
        "float": generator.uniform(0, 2**bits, (COLUMNS, blocks)).astype(dtype),
    }[zero_points]
    scales = generator.uniform(-0.1, 0.1, (COLUMNS, blocks)).astype(dtype)
    # Each row of the product with the identity is a row of the weight.
    identity = np.eye(DEPTH, dtype=dtype)
    graph = n_bits(identity, zeros, scales=scales, bits=bits, accuracy_level=0)
    floats = assert_same_rows(graph, identity)
    assert ops(floats) == ["MatMul"]
    data = generator.normal(size=(2, 3, DEPTH)).astype(dtype)
    graph.inputs[0].shape = floats.inputs[0].shape = [2, 3, DEPTH]
    tolerance = 2e-6 if dtype == np.float32 else 2e-3
    assert difference(outputs(floats, {"x": data}), outputs(graph, {"x": data})) <= tolerance


def test_the_bias_is_added() -> None:
    data = values(5, DEPTH)
    graph = n_bits(data, None, None, np.linspace(-1, 1, COLUMNS, dtype=np.float32))
    floats = unpacked(graph)
    assert ops(floats) == ["MatMul", "Add"]
    assert difference(outputs(floats, {"x": data}), outputs(graph, {"x": data})) <= 2e-6


@RECENT
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_lookups_in_bytes_give_the_same_rows_bit_for_bit(bits: int, dtype: Any, shifted: bool) -> None:
    count, extent, block = 10, 48, 16
    zeros = packed(count, -(-3 * bits // 8)) if shifted else None
    scales = np.random.default_rng(1).uniform(-0.1, 0.1, (count, 3)).astype(dtype)
    indices = np.array([[3, 0], [9, 3]])
    graph = kernel(
        "GatherBlockQuantized", indices, [packed(count, extent * bits // 8), scales, zeros],
        bits=bits, block_size=block, gather_axis=0, quantize_axis=1,
    )  # fmt: skip
    assert ops(assert_same_rows(graph, indices)) == ["Gather"]


@RECENT
@pytest.mark.parametrize(("quantized", "gathered"), [(1, 0), (0, 1), (-1, 0), (0, 0)])
@pytest.mark.parametrize("name", ["int4", "uint4", "float8_e4m3fn", "float4_e2m1fn"])
def test_lookups_in_small_types_give_the_same_rows_bit_for_bit(name: str, quantized: int, gathered: int) -> None:
    dtype, shape, block = np.dtype(getattr(ml_dtypes, name)), (32, 48), 16
    stored = np.random.default_rng(0).integers(0, 8, shape).astype(np.float32).astype(dtype)
    grid = tuple(extent // (block if axis == quantized % 2 else 1) for axis, extent in enumerate(shape))
    scales = np.random.default_rng(1).uniform(-0.1, 0.1, grid).astype(np.float32)
    zeros = None if "float" in name else np.random.default_rng(2).integers(0, 8, grid).astype(dtype)
    indices = np.array([3, 0, 31])
    graph = kernel("GatherBlockQuantized", indices, [stored, scales, zeros], block_size=block, gather_axis=gathered,
                   quantize_axis=quantized)  # fmt: skip
    assert_same_rows(graph, indices)


@pytest.mark.parametrize("quant_type", [0, 1])
def test_products_of_bitsandbytes_codes_multiply_by_the_same_weight_bit_for_bit(quant_type: int) -> None:
    rows, columns, block = 48, 5, 32
    largest = np.random.default_rng(1).uniform(0.1, 2, -(-rows * columns // block)).astype(np.float32)
    identity = np.eye(rows, dtype=np.float32)
    graph = kernel("MatMulBnb4", identity, [packed(rows * columns // 2), largest], K=rows, N=columns, block_size=block,
                   quant_type=quant_type)  # fmt: skip
    assert_same_rows(graph, identity)


def test_a_weight_that_two_nodes_share_is_decoded_once() -> None:
    graph = n_bits(np.zeros((5, DEPTH), np.float32))
    first = graph.nodes[0]
    graph.nodes.append(first.copy(first.inputs, [Variable("z", np.dtype(np.float32))]))
    graph.outputs.append(graph.nodes[1].outputs[0])
    first.inputs[1].name = "w.codes"
    UnpackBlockWeights().apply(graph)
    weights = [node.inputs[1] for node in graph.nodes]
    assert weights[0] is weights[1]
    assert isinstance(weights[0], Constant)
    assert weights[0].name == "w"


DATA = np.zeros((5, DEPTH), np.float32)


def computed_scales() -> Graph:
    graph = n_bits(DATA)
    graph.nodes[0].inputs[2] = Variable("scales")
    return graph


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (n_bits(DATA, None, np.zeros(DEPTH, np.int32)), "has a weight with an index of groups"),
        (n_bits(DATA, weight_prepacked=1), "has a weight with an index of groups"),
        (computed_scales(), "reads scales, which is computed"),
    ],
    ids=["groups", "prepacked", "computed"],
)
def test_what_is_not_known_is_refused_by_name(graph: Graph, message: str) -> None:
    with pytest.raises(ModelError, match=rf"node op \(MatMulNBits\) {message}"):
        UnpackBlockWeights().apply(graph)
