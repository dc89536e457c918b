"""Equal, repeated and 16-bit constants, and default attributes, take no space."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
from model_texts import Array, difference, named_graph, outputs, sample, values
from onnx import ModelProto, TensorProto, helper
from rule_cases import Case, Rule, table

from onnxq.ir import Graph, as_graph, constants, onnx_dtype
from onnxq.passes import DeduplicateTransposedWeights, NarrowConstants, RemoveUnused

TABLE = values(64, 48)
TURNED = np.ascontiguousarray(TABLE.T)


def keeps(*names: str) -> object:
    """The large constants that are left."""
    return lambda graph: [tensor.name for tensor in constants(graph) if tensor.nbytes > 2048] == list(names)


def fed(made: ModelProto) -> None:
    made.graph.input.append(helper.make_tensor_value_info("v", 1, [48, 64]))


share = Rule(DeduplicateTransposedWeights(), "float[3, 64] x", then=RemoveUnused(), w=TABLE, v=TURNED, flat=[-1])
BOTH = "(float[3, 64] x) => (a, y) { a = MatMul(x, w) f = Reshape(v, flat) y = Neg(f) }"
PLAIN = "(float[3, 64] x) => (a, y) { a = MatMul(x, w) y = Neg(v) }"
IN_BODIES = """(float[3, 48] x, bool c) => (y) { y = If (c) <
    then_branch = yes () => (t) { t = MatMul(x, v) }, else_branch = no () => (e) { e = MatMul(x, w) }> }"""
SHARED = [
    # Another shape or order comes from the first.
    *(share(BOTH, expected, v=np.ascontiguousarray(other), changed="v", error=0.0, holds=keeps("w"))
      for other, expected in [
          (TABLE, "MatMul Reshape Neg"),
          (TABLE.T, "Transpose MatMul Reshape Neg"),
          (TABLE.T.reshape(48, 1, 64), "Transpose Reshape MatMul Reshape Neg"),
          (TABLE.reshape(48, 64), "Reshape MatMul Reshape Neg"),
          (TABLE.reshape(1, 64, 48, 1), "Reshape MatMul Reshape Neg"),
          (TABLE.reshape(48, 64).T, "Reshape Transpose MatMul Reshape Neg")]),
    # The table that rows are looked up in is kept.
    share("(float[3, 48] x) => (y, z) { y = MatMul(x, v) z = Gather(w, i) }", "Transpose MatMul Gather", i=[3, 60],
          changed="v", holds=keeps("w")),
    # A body reads what the graph around it holds.
    share(IN_BODIES, w=TURNED[None], v=TURNED[None, None], changed="v", error=0.0),
    # The shapes that it makes are not stored by nodes themselves.
    share("y0 = MatMul(x, w) m = MatMul(y0, v) z = Neg(m) y = Neg(t)", step=DeduplicateTransposedWeights(1),
          v=TABLE.reshape(48, 64), t=TABLE.reshape(48, 64), error=0.0),
    # Equal bytes of another type, what is small, fixed by the model or fed by a caller.
    share(PLAIN.replace("Neg", "Abs"), v=TABLE.view(np.int32), stays=""),
    share(PLAIN, damage=fed, stays=""),
    share("(float[3, 64] x) => (y, float[48, 64] v) { y = MatMul(x, w) }", stays=""),
    share(PLAIN.replace("64", "8"), w=values(8, 8), v=values(8, 8).T.copy(), stays=""),
]  # fmt: skip


def of_half(*shape: int, dtype: type = np.float16) -> Array:
    return values(*shape).astype(dtype).astype(np.float32)


def stored_as(kind: int) -> object:
    return lambda graph: (
        {tensor.name: onnx_dtype(tensor) for tensor in constants(graph) if tensor.outputs} == {"w.narrow": kind}
    )


narrow = Rule(NarrowConstants(), "float[4,128] x", w=of_half(128))
TEXT = "h = Add(x, w) y = Mul(h, w)"
NARROWED = [
    narrow(TEXT, "Cast Add Mul", changed="w", error=0.0, holds=stored_as(TensorProto.FLOAT16)),
    narrow(TEXT, "Cast Add Mul", step=NarrowConstants(TensorProto.BFLOAT16), error=0.0,
           w=of_half(128, dtype=ml_dtypes.bfloat16), holds=stored_as(TensorProto.BFLOAT16)),
    narrow("""(float[4,128] x, bool c) => (y) { y = If (c) <then_branch = t () => (u) { u = Add(x, w) },
           else_branch = e () => (v) { v = Sub(x, w) }> }""", "Cast If Add Sub", error=0.0),
    # Other values, values that are too large, few values, scales, what may be fed and what is returned.
    narrow(TEXT, w=values(128), stays=""),
    narrow(TEXT, w=np.full(128, 1e6, np.float32), stays=""),
    narrow("y = Add(x, w)", inputs="float[4,64] x", w=of_half(64), stays=""),
    narrow("y = DequantizeLinear(x, w)", inputs="int8[4,128] x", stays=""),
    narrow("(float[4,128] x, float[128] w) => (y) { y = Add(x, w) }", stays=""),
    narrow("(float[4,128] x) => (y, float[128] w) { y = Neg(x) }", w=of_half(128), stays=""),
]  # fmt: skip


@table(SHARED, NARROWED)
def test_rules(case: Case) -> None:
    case.check()


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
    read = np.ascontiguousarray(quantized.T if turned else quantized)
    case = share("(int64[2] x) => (y, z) { y = Cast <to = 1> (c) z = Gather(w, x) }", opset=25, w=words, c=read)
    graph = as_graph(case.made)
    assert DeduplicateTransposedWeights().apply(graph).changed == ("c",)
    RemoveUnused().apply(graph)
    assert keeps("w")(graph)
    np.testing.assert_array_equal(outputs(graph, {"x": np.array([1, 2])})["y"], read.astype(np.float32))


def test_bodies_do_not_read_what_another_body_holds() -> None:
    """As LiftConstants leaves them, each in its own body."""
    made = share(IN_BODIES, w=TURNED[None], v=TURNED[None, None]).made
    graph: Graph = named_graph(made)
    for body in graph.nodes[0].subgraphs():
        weight = body.nodes[0].inputs[1]
        graph.initializers.remove(weight)
        body.initializers.append(weight)
    assert not DeduplicateTransposedWeights().apply(graph)
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) == 0
