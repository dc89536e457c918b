"""Casts that do nothing go, and 16-bit floats become 32-bit ones."""

from __future__ import annotations

import numpy as np
import pytest
from model_texts import apply_once, difference, model, named_graph, nodes, ops, outputs, sample, values
from onnx import ModelProto, TensorProto, helper, numpy_helper, shape_inference

from onnxq.ir import Graph, all_graphs, as_graph, constants, onnx_dtype, to_model
from onnxq.onnx_api import infer_shapes
from onnxq.passes import MergeCasts, ReplaceCastLike, WidenFloats
from onnxq.passes.casts import half_type

# MergeCasts -----------------------------------------------------------------------------------------------------------

TYPES = {name.lower(): number for name, number in TensorProto.DataType.items()}


@pytest.mark.parametrize(
    ("source", "casts", "left"),
    [
        ("float", ["float"], []),
        ("float", ["double"], ["double"]),
        ("float16", ["float", "double"], ["double"]),
        ("float16", ["float", "int32"], ["int32"]),
        ("float", ["double", "float"], []),
        ("float", ["float16", "float"], ["float16", "float"]),
        ("int32", ["int64", "int32"], []),
        ("int32", ["int64", "float", "float"], ["float"]),
        ("int32", ["float", "int32"], ["float", "int32"]),
        ("int64", ["double", "int64"], ["double", "int64"]),
        ("uint8", ["float", "int8"], ["float", "int8"]),
        ("uint8", ["float", "int32"], ["int32"]),
        ("bool", ["int64", "float"], ["float"]),
        ("float", ["bool", "float"], ["bool", "float"]),
        ("float", ["int32", "float"], ["int32", "float"]),
    ],
)
def test_casts(source: str, casts: list[str], left: list[str]) -> None:
    body = " ".join(f"t{place + 1} = Cast<to = {TYPES[to]}>(t{place})" for place, to in enumerate(casts))
    last = {"bool": "Not"}.get(casts[-1], "Abs")
    made = model(f"g ({source}[4] x) => ({casts[-1]}[4] y) {{ t0 = Identity(x) {body} y = {last}(t{len(casts)}) }}")
    graph = named_graph(made)
    apply_once(MergeCasts(), graph)
    assert [node.attrs["to"] for node in graph.nodes if node.op == "Cast"] == [TYPES[name] for name in left]
    for seed in (0, 1):
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) == 0


def test_a_cast_that_others_read_stays_for_them() -> None:
    text = "g (float16[4] x) => (double[4] y, float[4] z) { a = Cast<to = 1>(x) y = Cast<to = 11>(a) z = Neg(a) }"
    graph = named_graph(model(text))
    assert MergeCasts().apply(graph).changed
    assert [node.inputs[0].name for node in graph.nodes] == ["x", "x", "a"]


def test_unknown_types_and_outputs_stay() -> None:
    graph = named_graph(
        model("g (float[4] x) => (float[4] y) { a = local.F(x) b = Cast<to = 1>(a) y = Cast<to = 1>(x) }")
    )
    reasons = [reason for _, reason in MergeCasts().apply(graph).skipped]
    assert reasons == ["the type of its input is not known", "its output is an output of the graph"]
    assert ops(graph) == ["F", "Cast", "Cast"]


# ReplaceCastLike ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("opset", [15, 19, 21])
def test_a_known_type_is_named(opset: int) -> None:
    made = model("g (float[4] x, double[1] z) => (double[4] y) { [cast] y = CastLike(x, z) }", opset=opset)
    graph = named_graph(made)
    apply_once(ReplaceCastLike(), graph)
    assert ops(graph) == ["Cast"]
    assert graph.nodes[0].attrs["to"] == 11
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) == 0


def test_an_unknown_type_stays() -> None:
    graph = named_graph(model("g (float[4] x) => (float[4] y) { a = local.F(x) [cast] y = CastLike(x, a) }"))
    assert ReplaceCastLike().apply(graph).skipped == (("cast", "the type to cast to is not known"),)


# WidenFloats ----------------------------------------------------------------------------------------------------------

HALF = np.float16
ROUNDED = 2e-3
"""Results of float16 are rounded to 11 bits after each node."""


def widened(made: ModelProto, seeds: tuple[int, ...] = (0, 1)) -> Graph:
    """Apply the pass; what the model is fed and gives stays, types and names included."""
    graph = as_graph(made)
    infer_shapes(graph)
    apply_once(WidenFloats(), graph)
    infer_shapes(graph)
    after = to_model(graph)
    assert list(after.graph.input) == list(made.graph.input)
    assert list(after.graph.output) == list(made.graph.output)
    for seed in seeds:
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) <= ROUNDED
    return graph


def halves(graph: Graph) -> set[str]:
    """The names of tensors of 16-bit floats."""
    made = [tensor for node in nodes(graph) for tensor in (*node.inputs, *node.outputs)]
    return {tensor.name for tensor in made if onnx_dtype(tensor) in (TensorProto.FLOAT16, TensorProto.BFLOAT16)}


def test_inside_all_is_float32_between_two_casts() -> None:
    graph = widened(
        model(
            "g (float16[4,8] x) => (float16[4,8] y) { h = MatMul(x, w) y = Relu(h) }", w=values(8, 8, dtype=HALF)
        )
    )  # fmt: skip
    assert ops(graph) == ["Cast", "MatMul", "Relu", "Cast"]
    assert halves(graph) == {"x", "y"}
    assert [onnx_dtype(tensor) for tensor in constants(graph)] == [TensorProto.FLOAT]


def test_casts_that_an_exporter_put_go_away() -> None:
    """A norm in float32 in the middle of float16, as mixed precision writes it."""
    graph = widened(
        model(
            """g (float16[4,8] x) => (float16[4,8] y) {
                a = MatMul(x, w) b = Cast <to = 1> (a) c = Softmax(b) d = Cast <to = 10> (c) y = MatMul(d, w)
            }""",
            w=values(8, 8, dtype=HALF),
        )
    )
    assert ops(graph) == ["Cast", "MatMul", "Softmax", "MatMul", "Cast"]


def test_a_cast_that_makes_the_output_stays_where_it_is() -> None:
    graph = widened(
        model(
            "g (float[4,8] x) => (float16[4,8] y) { h = MatMul(x, v) k = Add(h, v2) y = Cast <to = 10> (k) }",
            v=values(8, 8), v2=values(4, 8),
        )
    )  # fmt: skip
    assert ops(graph) == ["MatMul", "Add", "Cast"]


def test_what_the_model_returns_may_be_read_inside() -> None:
    graph = widened(
        model(
            "g (float16[4,8] x) => (float16[4,8] y, float16[4,8] z) { y = Add(x, w) h = Mul(y, w) z = Neg(h) }",
            w=values(4, 8, dtype=HALF),
        )
    )
    assert halves(graph) == {"x", "y", "z"}
    assert all(not tensor.outputs for tensor in graph.outputs)


def test_attributes_that_name_types_follow() -> None:
    graph = as_graph(
        model(
            """g (float16[4,8] x, int64[2] s) => (float16[4,8] y, float16[a,b] f) {
                r = RandomNormalLike <dtype = 10> (x) e = EyeLike <dtype = 10> (x) k = Add(r, e) y = Add(k, x)
                f = ConstantOfShape <value = float16[1] {2}> (s)
            }"""
        )
    )
    infer_shapes(graph)
    apply_once(WidenFloats(), graph)
    infer_shapes(graph)
    assert halves(graph) == {"x", "y", "f"}
    assert [node.attrs["dtype"] for node in nodes(graph) if "dtype" in node.attrs] == [TensorProto.FLOAT] * 2
    assert [onnx_dtype(tensor) for tensor in constants(graph)] == [TensorProto.FLOAT]


def test_bodies_are_widened_with_what_they_are_given_and_give() -> None:
    graph = widened(
        model(
            """g (float16[4,8] x, bool c, int64 n) => (float16[4,8] y, float16[4,8] z) {
                y = If (c) <
                    then_branch = t () => (float16[4,8] u) { u = MatMul(x, w) },
                    else_branch = e () => (float16[4,8] v) { v = Identity(x) }>
                z = Loop (n, , x) <body = b (int64 i, bool g, float16[4,8] s) => (bool h, float16[4,8] q) {
                    h = Identity(g) a = Cast <to = 10> (i) q = Add(s, a) }>
            }""",
            w=values(8, 8, dtype=HALF),
        ),
        seeds=(),
    )
    assert halves(graph) == {"x", "y", "z"}
    bodies = [scope for scope in all_graphs(graph) if scope.parent is not None]
    floats = (TensorProto.FLOAT, TensorProto.BOOL, TensorProto.INT64)
    assert all(onnx_dtype(tensor) in floats for body in bodies for tensor in (*body.inputs, *body.outputs))
    inputs = {"x": values(4, 8, dtype=HALF), "c": np.array(True), "n": np.array(3)}
    outputs(graph, inputs)


def test_an_overridable_initializer_keeps_its_type() -> None:
    made = model(
        "g (float16[4] x, float16[4] k) => (float16[4] y) { y = Add(x, k) }",
        k=values(4, dtype=HALF),
    )
    graph = widened(made)
    assert ops(graph) == ["Cast", "Cast", "Add", "Cast"]
    assert [onnx_dtype(tensor) for tensor in graph.initializers] == [TensorProto.FLOAT16]


def test_bfloat16_is_widened() -> None:
    made = model("g (bfloat16[4,8] x) => (bfloat16[4,8] y) { y = MatMul(x, w) }")
    weight = helper.make_tensor("w", TensorProto.BFLOAT16, [8, 8], values(8, 8).reshape(-1))
    made.graph.initializer.append(weight)
    graph = as_graph(made)
    infer_shapes(graph)
    assert half_type(graph) == TensorProto.BFLOAT16
    apply_once(WidenFloats(), graph)
    assert half_type(graph) == 0
    assert ops(graph) == ["Cast", "MatMul", "Cast"]
    np.testing.assert_array_equal(constants(graph)[0].values, numpy_helper.to_array(weight).astype(np.float32))


def test_a_model_of_float32_stays_as_it_is() -> None:
    made = model("g (float[4] x) => (float[4] y) { h = Cast <to = 1> (x) y = Add(h, w) }", w=values(4))
    graph = as_graph(made)
    assert not WidenFloats().apply(graph)
    assert to_model(graph) == made


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("(seq(float16[4]) s, int64 i) => (float16[4] y) { h = SequenceAt(s, i) y = Add(h, w) }", "s is no tensor"),
        ("(float16[4] x) => (float16[4] y) { [n] h = local.Own(x) y = Add(h, w) }", "Own node n may need floats of 16"),
    ],
)
def test_what_may_need_16_bits_is_left(text: str, reason: str) -> None:
    graph = as_graph(model(f"g {text}", w=values(4, dtype=HALF)))
    changes = WidenFloats().apply(graph)
    assert not changes
    assert reason in changes.skipped[0][1]


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


@pytest.mark.parametrize("body", COMPOSITES.values(), ids=COMPOSITES)
def test_sequences_and_optionals_inside_are_widened_whose_types_the_model_declares(body: str) -> None:
    made = model(
        f"g (float16[4, 4] x, bool c) => (float16[m, 4] y) {{ a = MatMul(x, w) {body} }}",
        opset=18, w=values(4, 4, dtype=HALF),
        parts=np.array([2, 2]), one=np.array(1), none=np.array(0), two=np.array(2), yes=np.array(True),
    )  # fmt: skip
    declared = shape_inference.infer_shapes(made)
    assert any(
        info.name == "q" and info.type.WhichOneof("value") != "tensor_type" for info in declared.graph.value_info
    )
    graph = as_graph(declared)
    infer_shapes(graph)
    assert WidenFloats().apply(graph)
    for seed in (0, 1):
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) <= ROUNDED


def test_the_type_that_an_optional_has_as_an_attribute_is_widened() -> None:
    made = model(
        "g (float16[4] x) => (float16[4] y) { a = Neg(x) q = Optional(a) y = OptionalGetElement(q) }", opset=18
    )
    typed = helper.make_attribute("type", helper.make_tensor_type_proto(TensorProto.FLOAT16, [4]))
    made.graph.node[1].attribute.append(typed)
    widened(made)


def test_sequences_of_other_types_may_be_returned() -> None:
    graph = as_graph(
        model(
            """g (float16[4] x, float[4] s) => (float16[4] y, seq(float[4]) q) {
                y = Add(x, w) q = SequenceConstruct(s) }""",
            w=values(4, dtype=HALF),
        )
    )
    assert WidenFloats().apply(graph)


@pytest.mark.parametrize("back", [10, 1])
def test_a_rounding_to_the_other_16_bit_type_stays_in_front_of_what_it_decides(back: int) -> None:
    kind = {10: "float16", 1: "float"}[back]
    made = model(
        f"""g (float16[4] x) => ({kind}[4] y, float16[4] z) {{
            z = Mul(x, k) a = Cast <to = 16> (x) c = Concat <axis = 0> (a)
            b = Cast <to = {back}> (c) y = Floor(b) }}""",
        k=values(1, dtype=HALF),
    )
    graph = as_graph(made)
    infer_shapes(graph)
    assert WidenFloats().apply(graph)
    given = {"x": np.array([-1.002, -0.1, 1.999, 2.998], HALF)}
    np.testing.assert_array_equal(outputs(graph, given)["y"], outputs(made, given)["y"])


def test_casts_that_are_there_to_round_stay() -> None:
    graph = widened(
        model(
            """g (float[4,8] x) => (float[4,8] y, float[4,8] z) {
                a = Cast <to = 10> (x) b = Identity(a) y = Cast <to = 1> (b)
                h = Cast <to = 10> (x) p = MatMul(h, w) z = Cast <to = 1> (p)
            }""",
            w=values(8, 8, dtype=HALF),
        )
    )
    kept = [node for node in nodes(graph) if node.attrs.get("to") == TensorProto.FLOAT16]
    assert [node.outputs[0].name for node in kept] == ["a"]
