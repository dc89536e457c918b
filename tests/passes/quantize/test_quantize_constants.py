"""Equal, repeated and 16-bit constants, and default attributes, take no space."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from model_texts import Array, apply_once, difference, model, named_graph, nodes, ops, outputs, sample, values
from onnx import ModelProto, TensorProto, helper

from onnxq.ir import Graph, as_graph, constants, onnx_dtype, to_model
from onnxq.onnx_api import infer_shapes
from onnxq.passes import (
    DeduplicateTransposedWeights,
    DropDefaults,
    ExpandConstants,
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


# ExpandConstants stores once what a constant repeats along an axis.


def expanded(made: ModelProto) -> tuple[Graph, Changes]:
    """Apply the pass, and check that the outputs stay and that a second time there is nothing to do."""
    graph = named_graph(made)
    changes = ExpandConstants().apply(graph)
    assert not ExpandConstants().apply(graph)
    RemoveUnused().apply(graph)
    onnx.checker.check_model(to_model(graph), full_check=True)
    for name, output in outputs(made, sample(made)).items():
        np.testing.assert_array_equal(outputs(graph, sample(made))[name], output, strict=True)
    return graph, changes


def stored(graph: Graph) -> int:
    return sum(tensor.nbytes for tensor in constants(graph) if tensor.outputs)


ROW = values(1, 64)
NOT_A_NUMBER = np.full((64, 128), np.nan, np.float32)
SIGNS = np.where(np.arange(64)[:, None] % 2, np.float32(0), np.float32(-0.0)) * np.ones((64, 128), np.float32)


@pytest.mark.parametrize(
    ("constant", "most"),
    [
        (np.zeros((64, 128), np.float32), 24),
        (np.full((64, 128), 2.5, np.float32), 24),
        (NOT_A_NUMBER, 24),
        (np.repeat(ROW, 128, 0), 280),
        (np.repeat(ROW.T, 128, 1), 280),
        (np.broadcast_to(values(8, 1, 16), (8, 64, 16)), 540),
        (SIGNS, 280),
        (np.full((64, 64), -1e4, np.float64), 24),
    ],
    ids=["zeros", "a number", "NaN", "rows", "columns", "the axis between", "zeros of both signs", "doubles"],
)
def test_what_repeats_is_stored_once(constant: Array, most: int) -> None:
    kind = {"float32": "float", "float64": "double"}[constant.dtype.name]
    made = model(f"g ({kind}[1] x) => ({kind} y) {{ y = Mul(w, x) }}", w=np.ascontiguousarray(constant))
    made.graph.output[0].type.tensor_type.ClearField("shape")
    graph, changes = expanded(made)
    assert changes.changed == ("w",)
    assert sorted(ops(graph)) == ["Expand", "Mul"]
    assert stored(graph) <= most


@pytest.mark.parametrize(
    ("body", "constant"),
    [
        ("y = Mul(w, x)", values(64, 128)),
        ("y = Mul(w, x)", np.zeros((8, 8), np.float32)),
        ("y = Mul(w, x)", np.repeat(values(2, 64), 64, 0)),
        ("v = QuantizeLinear(x, s)  y = DequantizeLinear <axis = 0> (codes, w)", np.ones(8192, np.float32)),
        ("y = Identity(w)", np.ones(8192, np.float32)),
    ],
    ids=["ordinary", "small", "repeated otherwise", "scales of codes", "an output"],
)
def test_others_are_left(body: str, constant: Array) -> None:
    made = model(
        f"g (float[1] x) => (float y) {{ {body} }}",
        w=constant, s=np.array(1, np.float32), codes=np.zeros(8192, np.int8),
    )  # fmt: skip
    made.graph.output[0].type.tensor_type.ClearField("shape")
    assert not ExpandConstants().apply(named_graph(made))


def test_what_a_body_reads_is_expanded_around_it() -> None:
    made = model(
        """g (bool c, float[1] x) => (float[64, 128] y) {
            y = If (c) <then_branch = one () => (float[64, 128] t) { t = Add(w, x) },
                        else_branch = two () => (float[64, 128] e) { e = Sub(w, x) }>
        }""",
        w=np.zeros((64, 128), np.float32),
    )
    graph, _ = expanded(made)
    assert [node.op for node in graph.nodes] == ["Expand", "If"]


@pytest.mark.parametrize(
    "body",
    [
        "y = MatMul(x, w)",
        "y = MatMul(w, u)",
        "y = Gemm <transB = 1> (x, u, w)",
        "s = Unsqueeze(x, a)  r, h, c = LSTM <hidden_size = 32> (s, w, v)  y = Squeeze(h, a)",
        "y = Conv(x, w)",
    ],
    ids=["product", "constant data of a product", "bias", "cell", "convolution"],
)
def test_weights_and_biases_stay_initializers(body: str) -> None:
    shapes = {
        "Conv": (128, 64, 1, 1),
        "LSTM": (1, 128, 64),
        "w, u": (64, 128),
        "Gemm": (1, 4096),
        "MatMul(x": (64, 128),
    }
    shape = next(shape for name, shape in shapes.items() if name in body)
    made = model(
        f"g (float x) => (float y) {{ {body} }}",
        w=np.zeros(shape, np.float32), u=values(4096, 64), v=values(1, 128, 32), a=np.array([0]),
    )  # fmt: skip
    assert not ExpandConstants().apply(as_graph(made))


def test_onnxruntime_folds_them(tmp_path: Path, running_graph: Callable[[Path], onnx.GraphProto]) -> None:
    made = model(
        "g (float[512, 2048] x) => (float[512, 2048] y) { y = Mul(x, w) }", w=np.full((512, 2048), 0.25, np.float32)
    )
    graph = named_graph(made)
    ExpandConstants().apply(graph)
    RemoveUnused().apply(graph)
    onnx.save(to_model(graph), tmp_path / "small.onnx")
    assert (tmp_path / "small.onnx").stat().st_size < 1000
    assert [node.op_type for node in running_graph(tmp_path / "small.onnx").node] == ["Mul"]


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


# DropDefaults leaves out what operators do anyway, and nothing else.


@pytest.mark.parametrize(
    ("node", "left"),
    [
        ("Conv<dilations=[1,1], group=1, kernel_shape=[3,3], pads=[0,0,0,0], strides=[1,1]>(x, w)", {"kernel_shape"}),
        ("Conv<dilations=[1,2], group=1, pads=[0,0,1,1], strides=[2,1]>(x, w)", {"dilations", "pads", "strides"}),
        ("Conv<auto_pad='NOTSET'>(x, w)".replace("'", '"'), set()),
        ("Conv<auto_pad='SAME_UPPER'>(x, w)".replace("'", '"'), {"auto_pad"}),
        ("MaxPool<ceil_mode=0, kernel_shape=[2,2], pads=[0,0,0,0], storage_order=0>(x)", {"kernel_shape"}),
        ("HardSigmoid<alpha=0.2, beta=0.5>(x)", set()),
        ("HardSigmoid<alpha=0.16, beta=0.5>(x)", {"alpha"}),
        ("Softmax<axis=-1>(x)", set()),
        ("Softmax<axis=1>(x)", {"axis"}),
        ("Transpose<perm=[0,1,2,3]>(x)", {"perm"}),
    ],
)
def test_attributes(node: str, left: set[str]) -> None:
    made = model(f"g (float[1,3,6,6] x) => (float[a,b,c,d] y) {{ y = {node} }}", w=values(4, 3, 3, 3))
    graph = named_graph(made)
    apply_once(DropDefaults(), graph)
    (found,) = nodes(graph)
    assert set(found.attrs) == left
    assert difference(outputs(to_model(graph), sample(made)), outputs(made, sample(made))) == 0


def test_what_the_opset_of_the_model_says_counts() -> None:
    for opset, left in ((11, {"axis"}), (13, set())):
        made = model("g (float[2,3,4] x) => (float[2,3,4] y) { y = Softmax<axis=-1>(x) }", opset=opset)
        graph = named_graph(made)
        DropDefaults().apply(graph)
        (found,) = nodes(graph)
        assert set(found.attrs) == left


def test_operators_of_other_domains_stay() -> None:
    made = model("g (float[2,3] x) => (float[2,3] y) { y = com.microsoft.QuickGelu<alpha=1.0>(x) }")
    assert DropDefaults().apply(named_graph(made)) == Changes()


def test_operators_that_the_opset_does_not_have_yet_stay() -> None:
    text = "g (float[2,3] x) => (float[2,3] y) { y = LayerNormalization<axis=-1, epsilon=0.00001>(x, s) }"
    made = model(text, opset=14, s=values(3))
    assert DropDefaults().apply(named_graph(made)) == Changes()
