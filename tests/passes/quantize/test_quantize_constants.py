"""Equal, repeated and 16-bit constants, and default attributes, take no space."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
from model_texts import Array, apply_once, difference, model, ops, outputs, sample, values
from onnx import ModelProto, TensorProto, helper

from onnxq.ir import Graph, as_graph, constants, onnx_dtype, to_model
from onnxq.onnx_api import infer_shapes
from onnxq.passes import (
    DeduplicateTransposedWeights,
    NarrowConstants,
    RemoveUnused,
)
from onnxq.rewrite import Changes

TABLE = values(64, 48)


def store(made: ModelProto) -> tuple[Graph, Changes]:
    """Apply the pass, check that the outputs stay and that a second time there is nothing to do."""
    graph = as_graph(made)
    infer_shapes(graph)
    changes = DeduplicateTransposedWeights().apply(graph)
    assert not DeduplicateTransposedWeights().apply(graph)
    RemoveUnused().apply(graph)
    onnx.checker.check_model(to_model(graph), full_check=True)
    for seed in (0, 1):
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) == 0
    return graph, changes


def large(graph: Graph) -> list[str]:
    return [tensor.name for tensor in constants(graph) if tensor.nbytes > 2048]


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (TABLE, []),
        (TABLE.T, ["Transpose"]),
        (TABLE.T.reshape(48, 1, 64), ["Transpose", "Reshape"]),
        (TABLE.reshape(48, 64), ["Reshape"]),
        (TABLE.reshape(1, 64, 48, 1), ["Reshape"]),
        (TABLE.reshape(48, 64).T, ["Reshape", "Transpose"]),
    ],
    ids=["equal", "turned", "turned with an axis of one", "reshaped", "with axes of one", "reshaped and turned"],
)
def test_another_shape_or_order_comes_from_the_first(other: Array, expected: list[str]) -> None:
    made = model(
        "g (float[3, 64] x) => (float[3, 48] y, float[N] z) { y = MatMul(x, w) f = Reshape(v, flat) z = Neg(f) }",
        w=TABLE, v=np.ascontiguousarray(other), flat=np.array([-1]),
    )  # fmt: skip
    graph, changes = store(made)
    assert changes == Changes(("v",))
    assert large(graph) == ["w"]
    assert sorted(ops(graph)) == sorted([*expected, "MatMul", "Reshape", "Neg"])


def test_the_table_that_rows_are_looked_up_in_is_kept() -> None:
    made = model(
        "g (float[3, 48] x) => (float[3, 64] y, float[2, 48] z) { y = MatMul(x, t) z = Gather(w, i) }",
        t=np.ascontiguousarray(TABLE.T), w=TABLE, i=np.array([3, 60]),
    )  # fmt: skip
    graph, changes = store(made)
    assert changes == Changes(("t",))
    assert large(graph) == ["w"]


@pytest.mark.parametrize(("name", "bits"), [("int4", 4), ("uint4", 4), ("int2", 2), ("uint2", 2)])
@pytest.mark.parametrize("turned", [False, True])
def test_codes_are_taken_out_of_words(name: str, bits: int, turned: bool) -> None:
    if name.upper() not in onnx.TensorProto.DataType.keys():  # noqa: SIM118 - an enum, not a mapping
        pytest.skip(f"the installed onnx has no {name}")
    dtype = getattr(ml_dtypes, name)
    limits = ml_dtypes.iinfo(dtype)
    quantized = np.random.default_rng(0).integers(int(limits.min), int(limits.max) + 1, (256, 128)).astype(dtype)
    packed = onnx.numpy_helper.from_array(quantized, "c")
    words = np.frombuffer(packed.raw_data, np.uint32).reshape(256, 128 * bits // 32)
    read = quantized.T if turned else quantized
    made = model(
        "g (int64[2] x) => (float[a, b] y, uint32[2, n] z) { y = Cast <to = 1> (c) z = Gather(w, x) }",
        opset=25, ir_version=12, w=words,
    )  # fmt: skip
    made.graph.initializer.append(onnx.numpy_helper.from_array(np.ascontiguousarray(read), "c"))
    graph = as_graph(made)
    assert DeduplicateTransposedWeights().apply(graph).changed == ("c",)
    RemoveUnused().apply(graph)
    assert large(graph) == ["w"]
    found = outputs(graph, {"x": np.array([1, 2])})
    np.testing.assert_array_equal(found["y"], read.astype(np.float32))


def test_equal_bytes_of_another_type_are_left() -> None:
    made = model(
        "g (float[3, 64] x) => (float[3, 48] y, int32[64, 48] z) { y = MatMul(x, w) z = Abs(v) }",
        w=TABLE, v=TABLE.view(np.int32),
    )  # fmt: skip
    assert not store(made)[1]


def test_what_is_small_fixed_by_the_model_or_fed_by_a_caller_is_left() -> None:
    text = "g (float[3, 64] x) => (float[3, 48] y, float[48, 64] z) { y = MatMul(x, w) z = Neg(v) }"
    turned = np.ascontiguousarray(TABLE.T)
    fed = model(text, w=TABLE, v=turned)
    fed.graph.input.append(helper.make_tensor_value_info("v", 1, [48, 64]))
    assert not store(fed)[1]
    returned = model("g (float[3, 64] x) => (float[3, 48] y, float[48, 64] v) { y = MatMul(x, w) }", w=TABLE, v=turned)
    assert not DeduplicateTransposedWeights().apply(as_graph(returned))
    small = "g (float[3, 8] x) => (float[3, 8] y, float[8, 8] z) { y = MatMul(x, w) z = Neg(v) }"
    assert not store(model(small, w=values(8, 8), v=np.ascontiguousarray(values(8, 8).T)))[1]


IF = """g (float[3, 48] x, bool c) => (float[a, b, d] y) {
    y = If (c) <
        then_branch = yes () => (float[a, b, d] t) { t = MatMul(x, v) },
        else_branch = no () => (float[a, b, d] e) { e = MatMul(x, w) }>
}"""


def test_a_body_reads_what_the_graph_around_it_holds() -> None:
    made = model(IF, w=np.ascontiguousarray(TABLE.T)[None], v=np.ascontiguousarray(TABLE.T)[None, None])
    graph = as_graph(made)
    assert DeduplicateTransposedWeights().apply(graph).changed == ("v",)
    for seed in (0, 1):
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) == 0


def test_bodies_do_not_read_what_another_body_holds() -> None:
    """As LiftConstants leaves them, each in its own body."""
    graph = as_graph(model(IF, w=np.ascontiguousarray(TABLE.T)[None], v=TABLE.T[None, None].copy()))
    bodies = graph.nodes[0].subgraphs()
    for body in bodies:
        weight = body.nodes[0].inputs[1]
        graph.initializers.remove(weight)
        body.initializers.append(weight)
    assert not DeduplicateTransposedWeights().apply(graph)


def test_the_shapes_that_it_makes_are_not_stored_by_nodes_themselves() -> None:
    made = model(
        """g (float[3, 64] x) => (float[3, 48] y, float[3, 64] z, float[48, 64] u) {
        y = MatMul(x, w) m = MatMul(y, v) z = Neg(m) u = Neg(t) }""",
        w=TABLE, v=TABLE.reshape(48, 64), t=TABLE.reshape(48, 64),
    )  # fmt: skip
    graph = as_graph(made)
    infer_shapes(graph)
    assert DeduplicateTransposedWeights(1).apply(graph)
    assert not DeduplicateTransposedWeights(1).apply(graph)
    for seed in (0, 1):
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) == 0


# NarrowConstants stores floats in 16 bits where that loses nothing.

TEXT = "g (float[4,128] x) => (float[4,128] y) { h = Add(x, w) y = Mul(h, w) }"


def of_half(*shape: int, dtype: type = np.float16) -> Array:
    return values(*shape).astype(dtype).astype(np.float32)


def types(graph: Graph) -> dict[str, int]:
    """The types of the constants that nodes read."""
    return {tensor.name: onnx_dtype(tensor) for tensor in constants(graph) if tensor.outputs}


def test_what_was_float16_is_stored_so_once_and_decoded_to_the_same_bits() -> None:
    made = model(TEXT, w=of_half(128))
    graph = as_graph(made)
    assert apply_once(NarrowConstants(), graph).changed == ("w",)
    assert ops(graph) == ["Cast", "Add", "Mul"]
    assert types(graph) == {"w.narrow": TensorProto.FLOAT16}
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) == 0


def test_bfloat16_is_kept_as_such() -> None:
    graph = as_graph(model(TEXT, w=of_half(128, dtype=ml_dtypes.bfloat16)))
    apply_once(NarrowConstants(TensorProto.BFLOAT16), graph)
    assert types(graph) == {"w.narrow": TensorProto.BFLOAT16}


def test_constants_of_bodies_are_decoded_where_they_are_declared() -> None:
    made = model(
        """g (float[4,128] x, bool c) => (float[4,128] y) {
            y = If (c) <then_branch = t () => (float[4,128] u) { u = Add(x, w) },
                        else_branch = e () => (float[4,128] v) { v = Sub(x, w) }>
        }""",
        w=of_half(128),
    )
    graph = as_graph(made)
    apply_once(NarrowConstants(), graph)
    assert ops(graph) == ["Cast", "If", "Add", "Sub"]
    for seed in (0, 1):
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) == 0


@pytest.mark.parametrize(
    ("text", "stored"),
    [
        (TEXT, values(128)),
        (TEXT, np.full(128, 1e6, np.float32)),
        ("g (float[4,64] x) => (float[4,64] y) { y = Add(x, w) }", of_half(64)),
        ("g (float[4,128] x, float[128] w) => (float[4,128] y) { y = Add(x, w) }", of_half(128)),
        ("g (int8[4,128] x) => (float[4,128] y) { y = DequantizeLinear(x, w) }", of_half(128)),
        ("g (float[4,128] x) => (float[4,128] y, float[128] w) { y = Neg(x) }", of_half(128)),
    ],
    ids=["other values", "too large", "few values", "overridable", "scales", "an output"],
)
def test_the_rest_is_left(text: str, stored: Array) -> None:
    graph = as_graph(model(text, w=stored))
    assert not NarrowConstants().apply(graph)
