"""Odd but legal models: each is quantized and answers as before, or is refused with one sentence."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from model_texts import model
from numpy.typing import NDArray
from odd_models import (
    CLASSIC,
    GENERATOR,
    annotated,
    product,
    renamed,
    reversed_nodes,
    twice_named,
    weight,
    with_function,
    with_optional_input,
    with_overridable_initializers,
    with_sparse,
    with_value_info,
)
from onnx import ModelProto, TensorProto, ValueInfoProto, helper

from onnxq import quantize
from onnxq.config.scheme import Mode
from onnxq.errors import ModelError, OnnxqError
from onnxq.evaluation.agreement import compare
from onnxq.evaluation.comparison import ComparisonSpec
from onnxq.evaluation.reference import ReferenceModel
from onnxq.pipeline.request import Budget
from onnxq.planning.plan import Plan

Case = Callable[[], ModelProto]


@pytest.fixture(autouse=True)
def same_weights() -> None:
    """Weights are the same whichever tests ran before."""
    GENERATOR.bit_generator.state = np.random.default_rng(0).bit_generator.state


def samples_of(made: ModelProto) -> list[dict[str, NDArray[Any]]]:
    stored = {tensor.name for tensor in made.graph.initializer} | {
        sparse.values.name for sparse in made.graph.sparse_initializer
    }
    generator = np.random.default_rng(1)

    def values(info: ValueInfoProto) -> NDArray[Any]:
        shape = [max(1, dim.dim_value) if dim.WhichOneof("value") else 2 for dim in info.type.tensor_type.shape.dim]
        if info.type.tensor_type.elem_type == TensorProto.STRING:
            return np.full(shape, "word", dtype=object)
        dtype = helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
        if dtype.kind == "f":
            return generator.standard_normal(shape).astype(dtype)
        return generator.integers(0, 2, shape).astype(dtype)

    inputs = [info for info in made.graph.input if info.name not in stored]
    return [{info.name: values(info) for info in inputs} for _ in range(4)]


def quantized(made: ModelProto, folder: Path, scheme: str = "int8", search: str = "fast") -> Plan:
    """Quantize, check the file, and return the plan."""
    source, output = folder / "float.onnx", folder / "quantized.onnx"
    source.write_bytes(made.SerializeToString())
    samples = samples_of(made)
    done = quantize(source, samples, output, scheme=scheme, budget=Budget(search, latency_seconds=0))
    views = ComparisonSpec.of(source, output)
    agreement = compare(ReferenceModel(source, views), views.open(output), samples)
    assert agreement.sound
    assert agreement.worst_sqnr >= 20
    written, given = onnx.load(output).graph, made.graph
    assert [info.name for info in written.output] == [info.name for info in given.output]
    # A weight that became quantized values can no longer be overridden by an input.
    assert {info.name for info in written.input} >= set(samples[0])
    assert any(decision.weights for decision in done.report.plan.decisions)
    return done.report.plan


@pytest.mark.parametrize("opset", range(7, 27))
def test_every_opset_is_quantized_to_integers(opset: int, tmp_path: Path) -> None:
    made = model(f"(float[1,4,8,8] x) => (float[1,8] y) {CLASSIC}", opset=opset, k=weight(8, 4, 3, 3), m=weight(512, 8))
    # What kernels take on a busy machine is no matter here.
    assert quantized(made, tmp_path, search="off").count(Mode.STATIC) == 4


@pytest.mark.parametrize("opset", [6, 7, 12])
def test_weights_are_stored_at_old_opsets(opset: int, tmp_path: Path) -> None:
    made = model(f"(float[1,4,8,8] x) => (float[1,8] y) {CLASSIC}", opset=opset, k=weight(8, 4, 3, 3), m=weight(512, 8))
    assert quantized(made, tmp_path, scheme="int8-storage").count(Mode.STORAGE) == 2


@pytest.mark.parametrize("ir", range(3, 14))
def test_every_version_of_the_file_format_is_quantized(ir: int, tmp_path: Path) -> None:
    made = product("a0 = Relu(a) y = Mul(a0, two)", ir_version=ir, opset=11, two=np.full(32, 2, np.float32))
    quantized(with_overridable_initializers(made), tmp_path)
    assert [one.name for one in onnx.load(tmp_path / "quantized.onnx").graph.input] == ["x"]
    assert onnx.load(tmp_path / "quantized.onnx").ir_version >= ir


def test_weights_that_a_caller_may_feed_are_none(tmp_path: Path) -> None:
    made = with_overridable_initializers(product("a0 = Relu(a) y = Mul(a0, two)", two=np.full(8, 2, np.float32)), "w")
    with pytest.raises(ModelError, match="its weight is an input that callers may feed; list it as an initializer"):
        quantized(made, tmp_path)


@pytest.mark.parametrize("scheme", ["int8", "int8-dynamic", "int8-storage"])
def test_the_weights_of_an_unrolled_recurrent_cell_are_quantized_once(scheme: str, tmp_path: Path) -> None:
    steps = "".join(
        f"""a{step} = Gemm(x, w, b)  c{step} = Gemm(h{step}, r)  d{step} = Add(a{step}, c{step})
            e{step} = Sigmoid(d{step})  f{step} = Tanh(d{step})  h{step + 1} = Mul(e{step}, f{step})"""
        for step in range(4)
    )
    made = model(
        f"(float[4,32] x, float[4,32] h0) => (float[4,32] h4) {{ {steps} }}",
        w=weight(32, 32), r=weight(32, 32), b=weight(32),
    )  # fmt: skip
    source, output = tmp_path / "float.onnx", tmp_path / "quantized.onnx"
    onnx.save(made, source)
    done = quantize(source, samples_of(made), output, scheme=scheme, budget=Budget(search="off", latency_seconds=0))
    # What each step makes of the same input is the same, and computed once.
    mode = {"int8": Mode.STATIC, "int8-dynamic": Mode.DYNAMIC, "int8-storage": Mode.STORAGE}[scheme]
    assert sum(one.mode is mode for one in done.report.plan.decisions if one.op_type == "Gemm") == 5
    stored = [tensor for tensor in onnx.load(output).graph.initializer if list(tensor.dims) == [32, 32]]
    assert [tensor.data_type for tensor in stored] == [TensorProto.INT8] * 2


CASES: dict[str, Case] = {
    "an initializer that is an input": lambda: with_overridable_initializers(
        product("b = Relu(a) y = Mul(b, s)", s=np.float32(2)), "s"
    ),
    "an input that is an output": lambda: product(
        "y = Relu(a)", head="(float[4,32] x) => (float[4,32] y, float[4,32] x)"
    ),
    "an initializer that is an output": lambda: product(
        "y = Relu(a)", head="(float[4,32] x) => (float[4,32] y, float[32,32] w)"
    ),
    "an output that other nodes read": lambda: product(
        "y = Relu(a) z = MatMul(y, w)", head="(float[4,32] x) => (float[4,32] y, float[4,32] z)"
    ),
    "omitted optional inputs": lambda: product("y = Clip(a, , six)", six=np.float32(6)),
    "omitted optional outputs": lambda: product("y, , k = LayerNormalization(a, g)", g=np.ones(32, "f")),
    "an output that is a sequence": lambda: product(
        "y = SequenceConstruct(a, x)", head="(float[4,32] x) => (seq(float[4,32]) y)"
    ),
    "an output that is optional": lambda: product(
        "y = Optional(a)", head="(float[4,32] x) => (optional(float[4,32]) y)"
    ),
    "a sequence inside": lambda: product("s = SequenceConstruct(a, x) y = SequenceAt(s, one)", one=np.array(1)),
    "strings beside numbers": lambda: product(
        "y = Relu(a) t = Identity(s)", head="(float[4,32] x, string[2] s) => (float[4,32] y, string[2] t)"
    ),
    "a stored text": lambda: product(
        "y = Relu(a) t = Identity(s)",
        head="(float[4,32] x) => (float[4,32] y, string[2] t)",
        s=np.array(["ä", "b"], object),
    ),
    "contrib operators": lambda: product(
        "g = com.microsoft.FastGelu(a) h = com.microsoft.Gelu(g) y = MatMul(h, v)",
        domains='"com.microsoft" : 1',
        v=weight(32, 32),
    ),
    "classic machine learning": lambda: product(
        'y = ai.onnx.ml.Normalizer<norm = "MAX">(a)', domains='"ai.onnx.ml" : 3'
    ),
    "names of all kinds": lambda: renamed(
        product("y = Relu(a)"), {"x": "in/put:0;1", "w": "Gewicht ä\N{SNOWMAN}", "a": "../a b", "y": " "}
    ),
    "a scalar weight": lambda: product("y = Mul(a, s)", s=np.float32(3)),
    "a product with a vector": lambda: product(
        "y = MatMul(a, v)", head="(float[4,32] x) => (float[4] y)", v=weight(32)
    ),
    "an empty tensor": lambda: product("y = Concat<axis = 0>(a, e)", e=np.zeros((0, 32), "f")),
    "an empty weight": lambda: product(
        "y = Relu(a) z = MatMul(x, e)", head="(float[4,32] x) => (float[4,32] y, float[4,0] z)", e=weight(32, 0)
    ),
    "a scalar from a reduction": lambda: product("m = ReduceMean<keepdims = 0>(a) y = Add(a, m)"),
    "nodes in any order": lambda: reversed_nodes(product("b = Relu(a) c = Neg(b) y = MatMul(c, v)", v=weight(32, 32))),
    "a wrong shape inside": lambda: annotated(product("y = Relu(a)"), [7, 7, 7]),
    "dimensions of minus one": lambda: annotated(product("y = Relu(a)"), [-1, 32]),
    "an input without a known batch": lambda: product("y = Relu(a)", head="(float[n,32] x) => (float[n,32] y)"),
    "an output of unknown rank": lambda: product("y = Relu(a)", head="(float[4,32] x) => (float y)"),
    "a weight for a table and a product": lambda: model(
        "(int64[4] i, float[4,32] x) => (float[4,32] y, float[4,32] z) { y = Gather(w, i) z = MatMul(x, w) }",
        w=weight(32, 32),
    ),
    "a weight for a product and both sides of a transposition": lambda: product(
        "b = Gemm<transB = 1>(a, w) y = MatMul(b, w)"
    ),
    "a weight for a product and a recurrent cell": lambda: model(
        """(float[4,1,32] x, float[4,32] z) => (float[4,1,1,8] y, float[4,32] q) {
            y = LSTM<hidden_size = 8>(x, w, r)  flat = Reshape(w, s)  q = MatMul(z, flat) }""",
        w=weight(1, 32, 32),
        r=weight(1, 32, 8),
        s=np.array([32, 32]),
    ),
    "one weight in two bodies": lambda: product(
        """t = ReduceSum<keepdims = 0>(x)  n = Less(t, zero)
        y = If(n) <then_branch = one () => (float[4,32] p) { p = MatMul(a, v) },
                   else_branch = two () => (float[4,32] q) { r = Relu(a) q = MatMul(r, v) }>""",
        zero=np.float32(0),
        v=weight(32, 32),
    ),
    "a weight that is data for another product": lambda: product("z = MatMul(w, w) y = MatMul(a, z)"),
    "the same tensor twice": lambda: product("y = Add(a, a)"),
    "constants as nodes": lambda: product("o = Constant<value_float = 2.0>() y = Mul(a, o)"),
    "unused parts": lambda: product("y = Relu(a) unused = MatMul(x, v)", v=weight(32, 32)),
    "sparse values": lambda: with_sparse(product("y = Add(a, v)")),
    "a domain that nobody uses": lambda: product("y = Relu(a)", domains='"nobody" : 7'),
    "one of several outputs constant": lambda: product(
        "p, q = Split<axis = 0>(c, halves) z = MatMul(a, p) y = Add(z, x)",
        c=weight(64, 32),
        halves=np.array([32, 32]),
    ),
    "activations that are minus infinity": lambda: product(
        "m = Where(k, a, low) s = Softmax(m) y = MatMul(s, v)",
        k=np.tril(np.ones((4, 32), bool)),
        low=np.float32(-np.inf),
        v=weight(32, 32),
    ),
    "half precision": lambda: model(
        "(float16[4,32] x) => (float16[4,32] y) { a = MatMul(x, w) y = Relu(a) }", w=weight(32, 32).astype(np.float16)
    ),
    "an input and an output of bfloat16": lambda: model(
        "(bfloat16[4,32] x) => (bfloat16[4,32] y) { f = Cast<to = 1>(x) a = MatMul(f, w) y = Cast<to = 16>(a) }",
        opset=21,
        ir_version=10,
        w=weight(32, 32),
    ),
    "an input of float8": lambda: model(
        "(float8e4m3fn[4,32] x) => (float[4,32] y) { f = Cast<to = 1>(x) y = MatMul(f, w) }",
        opset=21,
        ir_version=10,
        w=weight(32, 32),
    ),
    "a local function": lambda: with_function(product("y = mine.twice(a)", domains='"mine" : 1')),
}


@pytest.mark.parametrize("name", list(CASES))
def test_an_odd_model_is_quantized(name: str, tmp_path: Path) -> None:
    quantized(CASES[name](), tmp_path)


REFUSED: dict[str, tuple[Case, str]] = {
    "no nodes": (lambda: model("(float[4] x) => (float[4] x) { }"), "nothing to quantize.*no nodes"),
    "an input that is a sequence": (
        lambda: product(
            "y = Relu(a) n = SequenceLength(s)", head="(float[4,32] x, seq(float[4]) s) => (float[4,32] y)"
        ),
        "'s' is sequence, expected a tensor",
    ),
    "an input that is optional": (
        lambda: with_optional_input(product("y = Relu(a)")),
        "'o' is optional, expected a tensor",
    ),
    "double precision": (
        lambda: model("(double[4,32] x) => (double[4,32] y) { y = MatMul(x, w) }", w=weight(32, 32).astype(np.float64)),
        "nothing to quantize.*double",
    ),
    "an operator that nobody knows": (
        lambda: product("y = nobody.Knows(a)", domains='"nobody" : 1'),
        "onnxruntime: .*Knows",
    ),
    "a wrong type inside": (
        lambda: with_value_info(product("y = Relu(a)"), helper.make_tensor_value_info("a", TensorProto.INT64, [4, 32])),
        "Type Error|type",
    ),
    "two nodes of one name": (
        lambda: twice_named(product("b = Relu(a) y = MatMul(b, w)")),
        "onnxruntime: .*two nodes with same node name",
    ),
    "an opset that is not released": (lambda: product("y = Relu(a)", opset=99), "asks for ONNX opset 99"),
    "a file format that is not released": (lambda: product("y = Relu(a)", ir_version=99), "IR version 99"),
    "a type at the output that cannot be": (
        lambda: product("y = Relu(a)", head="(float[4,32] x) => (int64[4,32] y)"),
        "onnxruntime",
    ),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_cannot_be_quantized_is_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    build, sentence = REFUSED[name]
    source, output = tmp_path / "float.onnx", tmp_path / "quantized.onnx"
    source.write_bytes(build().SerializeToString())
    samples = [{"x": np.eye(4, 32, dtype=np.float32)}]
    with pytest.raises(OnnxqError) as caught:
        quantize(source, samples, output, budget=Budget(latency_seconds=0))
    assert re.search(sentence, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)
    assert not output.exists()
