"""Casts that do nothing go, and 16-bit floats become 32-bit ones."""

from __future__ import annotations

import numpy as np
import pytest
from model_texts import apply_once, difference, model, named_graph, nodes, outputs, sample, values
from onnx import ModelProto, TensorProto, helper, numpy_helper, shape_inference
from rule_cases import Case, Rule, table

from onnxq.ir import Graph, all_graphs, as_graph, constants, onnx_dtype, to_model
from onnxq.onnx_api import infer_shapes
from onnxq.passes import MergeCasts, ReplaceCastLike, WidenFloats
from onnxq.passes.casts import half_type

TYPES = {name.lower(): number for name, number in TensorProto.DataType.items()}
HALF = np.float16
merge, like = Rule(MergeCasts()), Rule(ReplaceCastLike())


def casts(source: str, through: str, left: str) -> Case:
    """A chain of casts, and the types of those that are left."""
    names, kept = through.split(), [TYPES[name] for name in left.split()]
    body = " ".join(f"t{place + 1} = Cast<to = {TYPES[name]}>(t{place})" for place, name in enumerate(names))
    last = {"bool": "Not"}.get(names[-1], "Abs")
    body = f"t0 = Identity(x) {body} y = {last}(t{len(names)})"
    if left == through:
        return merge(body, inputs=f"{source}[4] x", stays="", error=0.0)
    return merge(body, f"Identity {'Cast ' * len(kept)}{last}", inputs=f"{source}[4] x", error=0.0,
                 holds=lambda graph: [node.attrs["to"] for node in nodes(graph, "Cast")] == kept)  # fmt: skip


CASTS = [
    casts("float", "float", ""),
    casts("float", "double", "double"),
    casts("float16", "float double", "double"),
    casts("float16", "float int32", "int32"),
    casts("float", "double float", ""),
    casts("float", "float16 float", "float16 float"),
    casts("int32", "int64 int32", ""),
    casts("int32", "int64 float float", "float"),
    casts("int32", "float int32", "float int32"),
    casts("int64", "double int64", "double int64"),
    casts("uint8", "float int8", "float int8"),
    casts("uint8", "float int32", "int32"),
    casts("bool", "int64 float", "float"),
    casts("float", "bool float", "bool float"),
    casts("float", "int32 float", "int32 float"),
    merge("(float16[4] x) => (y, z) { a = Cast<to = 1>(x) y = Cast<to = 11>(a) z = Neg(a) }", "Cast Cast Neg",
          holds=lambda graph: [node.inputs[0].name for node in graph.nodes] == ["x", "x", "a"]),
    merge("a = local.F(x) b = Cast<to = 1>(a) y = Neg(b)", stays="the type of its input is not known"),
    merge("y = Cast<to = 1>(x)", stays="its output is an output of the graph"),
    *(like("y = CastLike(x, z)", "Cast", inputs="float[4] x, double[1] z", opset=opset, error=0.0,
           holds=lambda graph: graph.nodes[0].attrs["to"] == 11) for opset in (15, 19, 21)),
    like("a = local.F(x) y = CastLike(x, a)", stays="the type to cast to is not known"),
]  # fmt: skip


def halves(graph: Graph) -> set[str]:
    """The names of tensors of 16-bit floats."""
    tensors = [tensor for node in nodes(graph) for tensor in (*node.inputs, *node.outputs)]
    return {tensor.name for tensor in tensors if onnx_dtype(tensor) in (TensorProto.FLOAT16, TensorProto.BFLOAT16)}


def only(names: str, *, floats: int | None = None) -> object:
    """Only these are of 16 bits, and this many constants are floats of 32 bits."""

    def holds(graph: Graph) -> bool:
        infer_shapes(graph)
        types = [onnx_dtype(tensor) for tensor in constants(graph)]
        return halves(graph) == set(names) and (floats is None or types == [TensorProto.FLOAT] * floats)

    return holds


def bodies_are_wide(graph: Graph) -> bool:
    bodies = [scope for scope in all_graphs(graph) if scope.parent is not None]
    wide = (TensorProto.FLOAT, TensorProto.BOOL, TensorProto.INT64)
    return only("xyz")(graph) and all(
        onnx_dtype(tensor) in wide for body in bodies for tensor in (*body.inputs, *body.outputs)
    )


widen = Rule(WidenFloats(), "float16[4,8] x", w=values(8, 8, dtype=HALF), v=values(4, 8, dtype=HALF),
             u=values(8, 8), t=values(4, 8), k=values(4, dtype=HALF))  # fmt: skip
ROUNDED = 2e-3
"""Results of float16 are rounded to 11 bits after each node."""
WIDENED = [
    widen("(float16[4,8] x) => (float16[4,8] y) { h = MatMul(x, w) y = Relu(h) }", "Cast MatMul Relu Cast",
          error=ROUNDED, holds=only("xy", floats=1)),
    # A norm in float32 in the middle of float16, as mixed precision writes it.
    widen("a = MatMul(x, w) b = Cast <to = 1> (a) c = Softmax(b) d = Cast <to = 10> (c) y = MatMul(d, w)",
          "Cast MatMul Softmax MatMul Cast", error=ROUNDED),
    # A cast that makes the output stays where it is.
    widen("h = MatMul(x, u) n = Add(h, t) y = Cast <to = 10> (n)", inputs="float[4,8] x", error=ROUNDED, stays=""),
    widen("(float16[4,8] x) => (y, z) { y = Add(x, v) h = Mul(y, v) z = Neg(h) }",
          error=ROUNDED, holds=lambda graph: only("xyz")(graph) and not any(out.outputs for out in graph.outputs)),
    # Attributes that name types follow.
    widen("""(float16[4,8] x, int64[2] s) => (float16[4,8] y, float16[a,b] f) {
          r = RandomNormalLike <dtype = 10> (x) e = EyeLike <dtype = 10> (x) n = Add(r, e) y = Add(n, x)
          f = ConstantOfShape <value = float16[1] {2}> (s) }""",
          runs=False,
          holds=lambda graph: only("xyf", floats=1)(graph)
          and [node.attrs["dtype"] for node in nodes(graph) if "dtype" in node.attrs] == [TensorProto.FLOAT] * 2),
    # Bodies are widened with what they are given and give.
    widen("""(float16[4,8] x, bool c, int64 n) => (float16[4,8] y, float16[4,8] z) {
          y = If (c) <then_branch = t1 () => (float16[4,8] u1) { u1 = MatMul(x, w) },
                      else_branch = e () => (float16[4,8] v1) { v1 = Identity(x) }>
          z = Loop (n, , x) <body = b (int64 i, bool g, float16[4,8] s) => (bool h, float16[4,8] q) {
              h = Identity(g) a = Cast <to = 10> (i) q = Add(s, a) }> }""",
          error=ROUNDED, holds=bodies_are_wide,
          feed={"x": values(4, 8, dtype=HALF), "c": np.array(True), "n": np.array(3)}),
    # An initializer that a caller may feed keeps its type.
    widen("(float16[4] x, float16[4] k) => (float16[4] y) { y = Add(x, k) }", "Cast Cast Add Cast", error=ROUNDED,
          holds=lambda graph: [onnx_dtype(tensor) for tensor in graph.initializers] == [TensorProto.FLOAT16]),
    widen("h = local.Own(x) y = Add(h, v)", stays="may need floats of 16"),
    widen("(seq(float16[4]) s, int64 i) => (float16[4] y) { h = SequenceAt(s, i) y = Add(h, k) }", runs=False,
          stays="s is no tensor"),
    # Sequences of other types may be returned.
    widen("(float16[4] x, float[4] s) => (float16[4] y, seq(float[4]) q) { y = Add(x, k) q = SequenceConstruct(s) }",
          runs=False),
    # Casts that are there to round stay.
    widen("""(float[4,8] x) => (y, z) { a = Cast <to = 10> (x) b = Identity(a) y = Cast <to = 1> (b)
          h = Cast <to = 10> (x) p = MatMul(h, w) z = Cast <to = 1> (p) }""",
          error=ROUNDED, holds=lambda graph: [node.outputs[0].name for node in nodes(graph)
                                              if node.attrs.get("to") == TensorProto.FLOAT16] == ["a"]),
    # So do those whose input has no known type.
    widen("a = com.microsoft.ExpandDims(x, axis) b = Cast <to = 16> (a) y = Cast <to = 1> (b)", inputs="float[4,8] x",
          axis=np.array(0, np.int32), domains='"com.microsoft" : 1', error=0.0, stays=""),
]  # fmt: skip


@table(CASTS, WIDENED)
def test_rules(case: Case) -> None:
    graph = case.check()
    written = to_model(graph).graph
    assert [(info.name, info.type.tensor_type.elem_type) for info in written.input] == [
        (info.name, info.type.tensor_type.elem_type) for info in case.made.graph.input
    ]


def test_bfloat16_is_widened() -> None:
    made = model("(bfloat16[4,8] x) => (bfloat16[4,8] y) { y = MatMul(x, w) }")
    weight = helper.make_tensor("w", TensorProto.BFLOAT16, [8, 8], values(8, 8).reshape(-1))
    made.graph.initializer.append(weight)
    graph = named_graph(made)
    assert half_type(graph) == TensorProto.BFLOAT16
    apply_once(WidenFloats(), graph)
    assert half_type(graph) == 0
    assert [node.op for node in graph.nodes] == ["Cast", "MatMul", "Cast"]
    np.testing.assert_array_equal(constants(graph)[0].values, numpy_helper.to_array(weight).astype(np.float32))


def test_a_model_of_float32_stays_as_it_is() -> None:
    made = model("(float[4] x) => (float[4] y) { h = Cast <to = 1> (x) y = Add(h, w) }", w=values(4))
    graph = as_graph(made)
    assert not WidenFloats().apply(graph)
    assert to_model(graph) == made


COMPOSITES = {
    "split": "q = SplitToSequence <axis = 0> (a, parts) y = SequenceAt(q, one)",
    "construct": "q = SequenceConstruct(a, a) y = ConcatFromSequence <axis = 0> (q)",
    "empty": "e = SequenceEmpty <dtype = 10> () q = SequenceInsert(e, a) y = SequenceAt(q, none)",
    "optional": "q = Optional(a) y = OptionalGetElement(q)",
    "branches": """q = If (c) <then_branch = t () => (seq(float16[2, 4]) u) { u = SequenceConstruct(a) },
        else_branch = f () => (seq(float16[2, 4]) v) { v = SequenceConstruct(a, a) }> y = SequenceAt(q, none)""",
    "loop": """s = SequenceConstruct(a) q = Loop (two, yes, s) <body = l (int64 i, bool g, seq(float16[2, 4]) r) =>
        (bool h, seq(float16[2, 4]) k) { h = Identity(g) k = SequenceInsert(r, a) }> y = SequenceAt(q, one)""",
}


@pytest.mark.parametrize("name", COMPOSITES)
def test_sequences_and_optionals_inside_are_widened_whose_types_the_model_declares(name: str) -> None:
    made = model(
        f"(float16[4, 4] x, bool c) => (float16[m, 4] y) {{ a = MatMul(x, w) {COMPOSITES[name]} }}",
        opset=18, w=values(4, 4, dtype=HALF),
        parts=[2, 2], one=np.array(1), none=np.array(0), two=np.array(2), yes=np.array(True),
    )  # fmt: skip
    declared: ModelProto = shape_inference.infer_shapes(made)
    (composite,) = (info for info in declared.graph.value_info if info.name == "q")
    assert composite.type.WhichOneof("value") != "tensor_type"
    graph = as_graph(declared)
    infer_shapes(graph)
    assert WidenFloats().apply(graph)
    for seed in (0, 1):
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) <= ROUNDED


def test_the_type_that_an_optional_has_as_an_attribute_is_widened() -> None:
    made = widen("a = Neg(x) q = Optional(a) y = OptionalGetElement(q)", opset=18, inputs="float16[4] x").made
    typed = helper.make_attribute("type", helper.make_tensor_type_proto(TensorProto.FLOAT16, [4]))
    made.graph.node[1].attribute.append(typed)
    graph = named_graph(made)
    assert apply_once(WidenFloats(), graph)
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) <= ROUNDED


@pytest.mark.parametrize("back", [10, 1])
def test_a_rounding_to_the_other_16_bit_type_stays_in_front_of_what_it_decides(back: int) -> None:
    kind = {10: "float16", 1: "float"}[back]
    made = model(
        f"""(float16[4] x) => ({kind}[4] y, float16[4] z) {{
            z = Mul(x, k) a = Cast <to = 16> (x) c = Concat <axis = 0> (a)
            b = Cast <to = {back}> (c) y = Floor(b) }}""",
        k=values(1, dtype=HALF),
    )
    graph = named_graph(made)
    assert WidenFloats().apply(graph)
    feed = {"x": np.array([-1.002, -0.1, 1.999, 2.998], HALF)}
    np.testing.assert_array_equal(outputs(graph, feed)["y"], outputs(made, feed)["y"])
