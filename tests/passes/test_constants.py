"""What depends on constants alone is computed; constants stand where passes look for them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
from model_texts import (
    Array,
    apply_once,
    difference,
    model,
    named_graph,
    node_named,
    nodes,
    ops,
    outputs,
    sample,
    values,
)
from odd_models import with_overridable_initializers
from onnx import ModelProto, helper, numpy_helper

from onnxq.algorithms.encode import encode
from onnxq.config.presets import PRESETS, preset_named
from onnxq.config.scheme import Mode, Rule, Scheme
from onnxq.ir import Graph, Node, Tensor, Variable, as_graph, constant, constants, to_model
from onnxq.ir.computed_data import DerivedTensor
from onnxq.lowering import AllowedOps, minimum_opset
from onnxq.onnx_api import infer_shapes
from onnxq.passes import (
    CompressWeights,
    DropNoOps,
    FixInitializers,
    FlushDenormals,
    FoldConstants,
    LiftConstants,
    NameNodes,
    RemoveUnused,
)
from onnxq.planning.planner import make_plan
from onnxq.rewrite import Changes, Pipeline
from onnxq.runtime.targets import target_named

# FoldedModels ---------------------------------------------------------------------------------------------------------


def fold(made: ModelProto, *, infer: bool = True) -> tuple[Graph, Changes]:
    """Apply the pass, check that the outputs stay and that a second time there is nothing to do."""
    graph = as_graph(made)
    if infer:
        infer_shapes(graph)
    changes = FoldConstants().apply(graph)
    again = FoldConstants().apply(graph)
    assert not again
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) <= 1e-6
    return graph, changes


def value(graph: Graph, name: str) -> Array:
    (found,) = (tensor for tensor in constants(graph) if tensor.name == name)
    return found.values


# FoldConstants --------------------------------------------------------------------------------------------------------


def test_a_chain_of_shape_arithmetic_becomes_one_initializer() -> None:
    made = model(
        """g (float[N, 4, 4] x) => (float[N, 16] y) {
            s = Shape(w)  f = Gather(s, zero)  u = Unsqueeze(f, zeros)  d = Mul(u, two)  h = Div(d, two)
            to = Concat <axis = 0> (minus, h)  [last] y = Reshape(x, to)
        }""",
        w=values(16, 3), zero=np.array(0), zeros=np.array([0]), two=np.array(2), minus=np.array([-1]),
    )  # fmt: skip
    graph, changes = fold(made)
    assert changes == Changes(("to",))
    assert ops(graph) == ["Reshape"]
    assert value(graph, "to").tolist() == [-1, 16]


@pytest.mark.parametrize(
    ("attributes", "expected"), [("", [2, 3, 5]), ("<start = 1>", [3, 5]), ("<start = -3, end = -1>", [2, 3])]
)
def test_the_shape_of_a_constant_is_known(attributes: str, expected: list[int]) -> None:
    made = model(f"g (int64[K] x) => (int64[K] y) {{ s = Shape {attributes} (w) y = Add(x, s) }}", w=values(2, 3, 5))
    graph = as_graph(made)
    assert FoldConstants().apply(graph) == Changes(("s",))
    assert value(graph, "s").tolist() == expected


def test_the_shape_of_an_input_is_not_folded_even_when_it_is_declared() -> None:
    graph, changes = fold(model("g (float[2, 3] x) => (int64[2] y) { s = Shape(x) y = Mul(s, s) }"))
    assert not changes
    assert ops(graph) == ["Shape", "Mul"]


def test_tensors_keep_their_names_and_types() -> None:
    graph, _ = fold(model("g (float16[4] x) => (float16[4] y) { s = Cast <to = 10> (w) y = Add(x, s) }", w=values(4)))
    (folded,) = nodes(graph)[0].inputs[1:]
    assert (folded.name, folded.dtype) == ("s", np.float16)


def test_a_node_that_fails_keeps_only_itself_and_what_depends_on_it() -> None:
    made = model(
        """g (float[4] x) => (float[4] y, float[4] z) {
            good = Mul(w, w)  y = Add(x, good)
            [bad] broken = Reshape(w, five)  [behind] worse = Neg(broken)
            four = Shape(w)  [shaped] flat = Reshape(worse, four)  z = Add(x, flat)
        }""",
        w=values(4), five=np.array([5]),
    )  # fmt: skip
    graph = as_graph(made)
    changes = FoldConstants().apply(graph)
    assert changes.changed == ("good", "four")
    assert [name for name, _ in changes.skipped] == ["bad", "behind", "shaped"]
    assert ops(graph) == ["Add", "Reshape", "Neg", "Reshape", "Add"]


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ("d = Sub(w, c) k = Cast <to = 7> (d)", ["Sub", "Cast", "Neg"]),
        ("d = Sub(w, c) e = Neg(d) k = Floor(e)", ["Sub", "Neg", "Floor", "Neg"]),
        ("d = Sub(w, c) i = Cast <to = 7> (d) k = Neg(i)", ["Neg", "Neg"]),
        ("d = Sub(w, c) k = Neg(d)", ["Neg", "Neg"]),
    ],
)
def test_half_floats_that_decide_are_not_rounded_where_onnxruntime_does_not(body: str, left: list[str]) -> None:
    made = model(
        f"g (float[1] x) => (k, float[1] y) {{ {body} y = Neg(x) }}",
        w=np.array([-30000], np.float16), c=np.array([-1.5], np.float16),
    )  # fmt: skip
    graph, _ = fold(made)
    assert ops(graph) == left


def test_quantization_is_kept() -> None:
    made = model(
        """g (float[4] x) => (float[4] y) {
            q = QuantizeLinear(w, s, z)  d = DequantizeLinear(q, s, z)  y = Add(x, d)
        }""",
        w=values(4), s=np.array(0.1, np.float32), z=np.array(3, np.uint8),
    )  # fmt: skip
    graph, changes = fold(made)
    assert not changes
    assert ops(graph) == ["QuantizeLinear", "DequantizeLinear", "Add"]


@pytest.mark.parametrize(
    "operator",
    ["RandomNormal <shape = [4]> ()", "RandomUniform <shape = [4]> ()", "RandomNormalLike(w)", "RandomUniformLike(w)"],
)
def test_random_numbers_stay_random(operator: str) -> None:
    graph = as_graph(model(f"g (float[4] x) => (float[4] y) {{ r = {operator} y = Add(x, r) }}", w=values(4)))
    assert not FoldConstants().apply(graph)
    assert ops(graph)[0].startswith("Random")


def test_a_node_that_makes_a_graph_output_stays_and_reads_folded_tensors() -> None:
    made = model(
        "g (float[4] x) => (float[4] y, float[4] k) { a = Mul(w, w) b = Neg(a) k = Exp(b) y = Add(x, a) }", w=values(4)
    )
    graph, changes = fold(made)
    assert changes.changed == ("a", "b")
    assert ops(graph) == ["Exp", "Add"]


def test_what_depends_on_a_constant_graph_output_is_folded() -> None:
    made = model("g (float[4] x) => (float[4] y, float[4] k) { k = Exp(w) m = Neg(k) y = Add(x, m) }", w=values(4))
    graph, changes = fold(made)
    assert changes.changed == ("m",)
    assert ops(graph) == ["Exp", "Add"]


def test_a_node_with_a_graph_output_keeps_all_its_outputs() -> None:
    made = model(
        """g (float[2] x) => (float[2] y, float[2] k) {
            v = Neg(w)  k, a = Split <axis = 0> (v, parts)  y = Add(x, a)
        }""",
        w=values(4), parts=np.array([2, 2]),
    )  # fmt: skip
    graph, changes = fold(made)
    assert changes.changed == ("v",)
    assert ops(graph) == ["Split", "Add"]
    assert [tensor.name for tensor in nodes(graph, "Split")[0].outputs] == ["k", "a"]


def test_all_outputs_of_a_node_become_constant_when_only_one_feeds_a_node_that_stays() -> None:
    made = model(
        """g (float[2] x) => (float[2] y, float[2] k) {
            a, b = Split <axis = 0> (w, parts)  k = Neg(b)  y = Add(x, a)
        }""",
        w=values(4), parts=np.array([2, 2]),
    )  # fmt: skip
    graph, changes = fold(made)
    assert changes.changed == ("a", "b")
    assert ops(graph) == ["Neg", "Add"]


def test_bodies_are_folded_with_what_they_capture() -> None:
    made = model(
        """g (float[4] x, bool c) => (float[4] y) {
            k = Mul(w, w)
            y = If (c) <
                then_branch = yes () => (float[4] t) { a = Mul(k, k) b = Neg(a) t = Add(x, b) },
                else_branch = no () => (float[4] e) { e = Neg(k) }>
        }""",
        w=values(4),
    )
    graph, changes = fold(made)
    assert changes.changed == ("k", "b")
    assert ops(graph) == ["If", "Add", "Neg"]
    assert difference(outputs(graph, sample(made, 1)), outputs(made, sample(made, 1))) <= 1e-6


def test_a_node_with_bodies_is_never_folded_itself() -> None:
    made = model(
        """g (float[4] x) => (float[4] y) {
            k = If (yes) <
                then_branch = t () => (float[4] a) { a = Mul(w, w) },
                else_branch = e () => (float[4] b) { b = Neg(w) }>
            y = Add(x, k)
        }""",
        w=values(4), yes=np.array(True),
    )  # fmt: skip
    graph, changes = fold(made)
    assert not changes
    assert ops(graph) == ["If", "Add", "Mul", "Neg"]


def test_custom_operators_are_left() -> None:
    made = model("g (float[4] x) => (float[4] y) { k = local.f(w) y = Add(x, k) }", w=values(4))
    assert not FoldConstants().apply(as_graph(made))


def test_strings_are_left() -> None:
    made = model(
        "g (string[1] x) => (bool[1] y) { k = Identity(w) y = Equal(x, k) }", opset=19, w=np.array(["é"], object)
    )
    graph = as_graph(made)
    assert not FoldConstants().apply(graph)
    assert ops(graph) == ["Identity", "Equal"]


def test_small_floats_are_no_floats_of_numpy() -> None:
    quantized = np.arange(64).astype(ml_dtypes.float8_e5m2)
    made = model("g (float[64] x) => (float[64] y) { k = Cast <to = 1> (w) y = Add(x, k) }", opset=19, w=quantized)
    assert not FoldConstants().apply(as_graph(made))


def test_a_few_small_integers_are_cast() -> None:
    graph, changes = fold(
        model("g (float[4] x) => (float[4] y) { k = Cast <to = 1> (w) y = Add(x, k) }", w=np.arange(4, dtype=np.int8))
    )
    assert changes.changed == ("k",)
    assert ops(graph) == ["Add"]


def test_weights_that_were_stored_as_float16_become_float32() -> None:
    made = model(
        "g (float[N, 32] x) => (float[N, 32] y) { k = Cast <to = 1> (w) y = MatMul(x, k) }",
        w=values(32, 32, dtype=np.float16),
    )
    graph, changes = fold(made)
    assert changes.changed == ("k",)
    assert value(graph, "k").dtype == np.float32


def test_constants_and_identities_are_folded_through_when_they_are_gone() -> None:
    made = model(
        """g (float[4] x) => (float[4] y) {
            k = Constant <value_floats = [1.0, 2.0, 3.0, 4.0]> ()  i = Identity(k)  s = Mul(i, i)  y = Add(x, s)
        }"""
    )
    graph = as_graph(made)
    Pipeline((NameNodes(), LiftConstants(), DropNoOps(), FoldConstants())).apply(graph)
    assert value(graph, "s").tolist() == [1, 4, 9, 16]
    assert ops(graph) == ["Add"]


def test_what_a_caller_may_feed_is_not_folded() -> None:
    text = "g (float[4] x) => (float[4] y) { k = Neg(w) s = Add(k, v) t = Mul(v, v) a = Add(x, s) y = Add(a, t) }"
    made = model(text, w=values(4), v=values(4))
    made.graph.input.append(onnx.helper.make_tensor_value_info("w", 1, [4]))
    graph, changes = fold(made)
    assert changes.changed == ("t",)
    fed = sample(made) | {"w": np.float32([1, 2, 3, 4])}
    assert difference(outputs(graph, fed), outputs(made, fed)) <= 1e-6


W, AXES, NONE = constant("w", values(4)), constant("a", np.array([0])), Variable("")


@pytest.mark.parametrize(
    ("op", "inputs", "attributes"),
    [
        ("Add", [W], {}),
        ("Add", [W, AXES], {}),
        ("Cast", [W], {}),
        ("Cast", [W], {"to": "x"}),
        ("Cast", [W], {"to": [1]}),
        ("Cast", [W], {"to": 999}),
        ("Concat", [], {"axis": 0}),
        ("ConstantOfShape", [NONE], {}),
        ("Gather", [W], {}),
        ("Reshape", [W], {}),
        ("Reshape", [W, W, W], {}),
        ("Shape", [], {}),
        ("Slice", [W, AXES], {}),
        ("Squeeze", [NONE, AXES], {}),
        ("Transpose", [NONE], {}),
        ("Transpose", [W], {"perm": [0, 0]}),
        ("Transpose", [W], {"perm": "x"}),
        ("Unsqueeze", [W], {}),
    ],
)
def test_damaged_nodes_are_left(op: str, inputs: list[Tensor], attributes: dict[str, object]) -> None:
    x, k, y = (Variable(name, np.dtype(np.float32), [4]) for name in "xky")
    graph = Graph([Node(op, "bad", attributes, inputs, [k]), Node("Add", "", {}, [x, k], [y])], [x], [y], opset=17)
    assert not FoldConstants().apply(graph).changed
    assert ops(graph) == [op, "Add"]


def test_a_chain_of_thousands_is_folded_in_linear_time() -> None:
    chain = " ".join(f"k{i + 1} = {('Neg', 'Exp', 'Mul')[i % 3]}(k{i}{', k0' * (i % 3 == 2)})" for i in range(6000))
    graph = as_graph(model(f"g (float[1] x) => (float[1] y) {{ {chain} y = Add(x, k6000) }}", k0=values(1)))
    assert FoldConstants().apply(graph).changed == ("k6000",)
    assert ops(graph) == ["Add"]


# Sizes of folded constants --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operator", "feeds"),
    [
        ("ConstantOfShape(bomb)", {}),
        ("Tile(small, times)", {"small": values(4), "times": np.array([2**32])}),
        ("Expand(small, wide)", {"small": values(1), "wide": np.array([2**34])}),
        ("Range(zero, bombs, one)", {"zero": np.array(0), "bombs": np.array(2**34), "one": np.array(1)}),
        ("Pad(small, pads)", {"small": values(4), "pads": np.array([0, 2**34])}),
        ("HannWindow(bombs)", {"bombs": np.array(2**34)}),
        (
            "OneHot(index, bombs, pair)",
            {"index": np.array([1]), "bombs": np.array(2**34), "pair": np.array([0.0, 1.0])},
        ),
    ],
)
@pytest.mark.parametrize("inferred", [True, False])
def test_a_small_file_cannot_make_a_huge_result(operator: str, feeds: dict[str, Array], inferred: bool) -> None:
    made = model(
        f"g (int64[1] x) => (int64[1] y) {{ [bomb] b = {operator} s = Shape(b) t = Slice(s, o, p) y = Add(x, t) }}",
        bomb=np.array([2**20, 2**20]), o=np.array([0]), p=np.array([1]), **feeds,
    )  # fmt: skip
    graph = as_graph(made)
    if inferred:
        infer_shapes(graph)
    changes = FoldConstants().apply(graph)
    assert "b" not in changes.changed
    assert "bomb" in dict(changes.skipped)
    assert node_named(graph, "bomb").op == operator.split("(")[0]


@pytest.mark.parametrize("inferred", [True, False])
def test_results_above_the_limit_are_left(inferred: bool) -> None:
    made = model(
        "g (float[64] x) => (float[64, 64] y) { [big] b = Mul(r, c) y = Add(x, b) }", r=values(64), c=values(64, 1)
    )
    for largest, folds in ((64 * 64 * 8, True), (64 * 64 * 4 - 1, False)):
        graph = as_graph(made)
        if inferred:
            infer_shapes(graph)
        changes = FoldConstants(largest=largest).apply(graph)
        assert bool(changes) is folds
        assert ("big" in dict(changes.skipped)) is not folds


def test_many_results_together_stay_below_the_limit() -> None:
    many = " ".join(f"[big{i}] b{i} = ConstantOfShape(s) x{i + 1} = Add(x{i}, b{i})" for i in range(9))
    made = model(f"g (float[64] x) => (float[64] x9) {{ x0 = Identity(x) {many} }}", s=np.array([64]))
    graph = as_graph(made)
    infer_shapes(graph)
    changes = FoldConstants(largest=64 * 4 * 4).apply(graph)
    assert changes.changed == ("b0", "b1", "b2", "b3")
    assert {reason for _, reason in changes.skipped} == {"its result and those before it make the model too large"}


def test_a_product_of_unknown_shape_is_left_when_it_may_be_too_large() -> None:
    made = model(
        'g (float[64] x) => (float[a, b] y) { [outer] o = Einsum<equation = "i,j->ij">(v, v) y = Add(x, o) }',
        v=values(64),
    )
    assert FoldConstants(largest=64 * 64 * 8).apply(as_graph(made)).changed == ("o",)
    assert dict(FoldConstants(largest=64 * 64 * 4).apply(as_graph(made)).skipped) == {
        "outer": "its result of up to 4096 elements is too large"
    }


def test_stored_weights_are_not_inflated() -> None:
    made = model("g (float[N, 32] x) => (float[N, 32] y) { [dot] y = MatMul(x, w) }", w=values(32, 32))
    graph = as_graph(made)
    infer_shapes(graph)
    plan = make_plan(graph, preset_named("int8-storage"), target_named("onnxruntime-cpu"))
    CompressWeights(plan, encode(plan, graph)).apply(graph)
    RemoveUnused().apply(graph)
    infer_shapes(graph)
    changes = FoldConstants().apply(graph)
    assert changes == Changes((), (("w.numbers.cast", "decodes a stored weight"),))
    assert ops(graph) == ["Cast", "Mul", "MatMul"]
    assert max(tensor.nbytes for tensor in constants(graph)) == 32 * 32


@pytest.mark.parametrize("preset", PRESETS)
def test_no_format_of_stored_weights_is_inflated(preset: str) -> None:
    weight = PRESETS[preset].rules[0].weight
    assert weight is not None
    opset = minimum_opset(weight, "MatMul", AllowedOps.QDQ, folded=True)
    if opset > onnx.defs.onnx_opset_version():
        pytest.skip(f"the installed onnx has no {weight.format}")
    text = "g (float[N, 64] x) => (float[N, 96] y) { [dot] y = MatMul(x, w) }"
    graph = as_graph(model(text, opset=max(opset, 17), w=values(64, 96)))
    infer_shapes(graph)
    stored = Scheme((Rule(Mode.STORAGE, weight=weight),))
    plan = make_plan(graph, stored, target_named("onnxruntime-cpu"))
    CompressWeights(plan, encode(plan, graph)).apply(graph)
    RemoveUnused().apply(graph)
    infer_shapes(graph)
    before = sum(tensor.tensor_data.nbytes for tensor in constants(graph))
    FoldConstants().apply(graph)
    RemoveUnused().apply(graph)
    assert sum(tensor.tensor_data.nbytes for tensor in constants(graph)) <= before < 64 * 96 * 2
    assert not FoldConstants().apply(graph)


TIED = "g (int64[2] i) => (float[2, {rows}] y) {{ h = Gather(w, i) t = Transpose<perm=[1, 0]>(w) y = MatMul(h, t) }}"


@pytest.mark.parametrize("infer", [True, False])
def test_a_table_that_is_also_looked_up_is_transposed_whatever_its_size(infer: bool) -> None:
    made = model(TIED.format(rows=600), w=values(600, 64))
    graph = as_graph(made)
    if infer:
        infer_shapes(graph)
    assert FoldConstants(largest=1000).apply(graph).changed == ("t",)
    assert ops(graph) == ["Gather", "MatMul"]
    (turned,) = (tensor for tensor in constants(graph) if tensor.name == "t")
    assert isinstance(turned.tensor_data, DerivedTensor)
    np.testing.assert_array_equal(turned.values, values(600, 64).T)


def test_layouts_of_one_weight_cannot_make_a_model_many_times_as_large() -> None:
    turns = " ".join(f"[turn{i}] t{i} = Transpose(w) a{i + 1} = MatMul(a{i}, t{i})" for i in range(9))
    graph = as_graph(model(f"g (float[128, 128] a0) => (float[128, 128] a9) {{ {turns} }}", w=values(128, 128)))
    changes = FoldConstants(largest=1000).apply(graph)
    assert len(changes.changed) == 2
    assert {reason for _, reason in changes.skipped} == {"its result and those before it make the model too large"}


def test_codes_that_are_stored_once_are_not_stored_again_in_another_order() -> None:
    quantized = np.arange(64 * 64).astype(np.int8).reshape(64, 64)
    made = model(
        """g (int64[2] i, uint8[2, 64] x) => (int8[2, 64] y, int32[2, 64] z) {
            y = Gather(c, i)  [turn] t = Transpose(c)  z = MatMulInteger(x, t)
        }""",
        c=quantized,
    )  # fmt: skip
    changes = FoldConstants().apply(as_graph(made))
    assert changes == Changes((), (("turn", "shows a stored weight in another order"),))


def test_bytes_are_counted_by_type() -> None:
    made = model(
        "g (int64[K] x) => (int64[K] y) { [wide] e = Expand(b, s) c = Cast<to = 7>(e) y = Add(x, c) }",
        b=np.array([True]), s=np.array([1000]),
    )  # fmt: skip
    graph = as_graph(made)
    infer_shapes(graph)
    changes = FoldConstants(largest=1100).apply(graph)
    assert changes.changed == ("e",)


STORED = {
    "wide": np.array([16, 4096]), "row": values(4096), "table": values(16, 8), "index": np.arange(4096) % 16,
    "w": values(256, 256), "down": values(256, 4), "up": values(4, 256), "half": values(256, 256).astype(np.float16),
    "s": values(256), "one": np.array([1]), "few": np.arange(40) % 16,
}  # fmt: skip


@pytest.mark.parametrize(
    ("body", "folded"),
    [
        ("c = Expand(row, wide)  y = Add(x, c)", False),
        ("c = ConstantOfShape(wide)  y = Add(x, c)", False),
        ("c = Gather(table, index)  d = Neg(c)  y = Add(x, d)", False),
        ("c = Gather(table, few)  y = Add(x, c)", True),
        ("c = Expand(row, wide)  d = ReduceMax(c)  y = Add(x, d)", True),
        ("c = MatMul(down, up)  d = Add(w, c)  e = Mul(d, s)  y = Add(x, e)", True),
        ("c = MatMul(down, up)  y = Add(x, c)", False),
        ("c = Mul(w, s)  d = Mul(w, w)  e = Add(c, d)  f = Transpose(e)  y = Add(x, f)", True),
        ("c = Mul(w, s)  d = Add(x, w)  y = Add(c, d)", False),
        ("c = Cast <to = 1> (half)  y = Add(x, c)", True),
        ("c = Transpose(w)  d = Add(x, w)  y = Add(c, d)", True),
    ],
)
def test_what_is_stored_counts_against_the_constants_that_go(body: str, folded: bool) -> None:
    made = model(f"g (float[1] x) => (float y) {{ {body} }}", **STORED)
    made.graph.output[0].type.tensor_type.ClearField("shape")
    graph = as_graph(made)
    infer_shapes(graph)
    before = ops(graph)
    changes = FoldConstants(growth=10_000).apply(graph)
    assert set(ops(graph)) == ({"Add"} if folded else set(before))
    assert bool(changes) is folded
    assert bool(changes.skipped) is not folded
    if folded:
        inputs = sample(made)
        assert difference(outputs(graph, inputs), outputs(made, inputs)) <= 1e-6
    assert not FoldConstants(growth=10_000).apply(graph)


def test_a_body_does_not_read_what_is_too_large_around_it() -> None:
    made = model(
        """g (bool b, float[1] x) => (float y) {
            c = Expand(row, wide)
            y = If (b) <then_branch = one () => (float[16, 4096] t) { d = Neg(c)  t = Add(d, x) },
                        else_branch = two () => (float[16, 4096] e) { e = Add(c, x) }>
        }""",
        **STORED,
    )
    made.graph.output[0].type.tensor_type.ClearField("shape")
    graph = as_graph(made)
    infer_shapes(graph)
    assert FoldConstants(growth=10_000).apply(graph).changed == ()
    assert sorted(ops(graph)) == ["Add", "Add", "Expand", "If", "Neg"]


# LiftConstants --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attribute", "expected"),
    [
        ("value = float[2, 2] {1.0, 2.0, 3.0, 4.0}", np.array([[1, 2], [3, 4]], np.float32)),
        ("value = int64 {7}", np.array(7)),
        ("value_float = 1.5", np.array(1.5, np.float32)),
        ("value_floats = [1.5, 2.5]", np.array([1.5, 2.5], np.float32)),
        ("value_int = 3", np.array(3)),
        ("value_ints = [3, -4]", np.array([3, -4])),
    ],
)
def test_lifts_numbers_with_type_and_shape(attribute: str, expected: np.ndarray) -> None:
    kind = "float" if expected.dtype == np.float32 else "int64"
    made = model(f"g ({kind}[2] x) => ({kind}[A, B] y) {{ k = Constant <{attribute}> () y = Add(x, k) }}")
    made.graph.output[0].type.tensor_type.ClearField("shape")
    graph = as_graph(made)
    assert LiftConstants().apply(graph) == Changes(("k",))
    assert ops(graph) == ["Add"]
    (lifted,) = constants(graph)
    np.testing.assert_array_equal(lifted.values, expected, strict=True)
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) == 0


@pytest.mark.parametrize("attribute", ['value_string = "é"', 'value_strings = ["é"]', 'value = string[1] {"é"}'])
def test_lifts_text(attribute: str) -> None:
    made = model(f"g (string[1] x) => (bool[1] y) {{ k = Constant <{attribute}> () y = Equal(x, k) }}", opset=19)
    graph = as_graph(made)
    assert LiftConstants().apply(graph) == Changes(("k",))
    for text, same in (("é", True), ("e", False)):
        assert outputs(graph, {"x": np.array([text], object)})["y"].tolist() == [same]


def test_leaves_sparse_values() -> None:
    made = model("g (float[4] x) => (float[4] y) { [sparse] k = Constant () y = Add(x, k) }")
    numbers = numpy_helper.from_array(values(2), "v")
    sparse = helper.make_sparse_tensor(numbers, numpy_helper.from_array(np.array([0, 2]), "i"), [4])
    made.graph.node[0].attribute.append(helper.make_attribute("sparse_value", sparse))
    graph = as_graph(made)
    assert LiftConstants().apply(graph) == Changes((), (("k", "holds sparse values"),))
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) == 0


def test_leaves_outputs_of_the_model() -> None:
    made = model(
        """g (float[2] x) => (float[2] y, float[2] k) {
            k = Constant <value_floats = [1.0, 2.0]> ()  y = Add(x, k)
        }"""
    )
    graph = as_graph(made)
    assert LiftConstants().apply(graph) == Changes((), (("k", "is an output of its graph"),))
    assert outputs(graph, sample(made))["k"].tolist() == [1, 2]


def test_lifts_into_the_body_that_holds_the_node_and_leaves_outputs_of_bodies() -> None:
    made = model(
        """g (float[2] x, bool c) => (float[2] y) {
            y = If (c) <
                then_branch = yes () => (float[2] t) { a = Constant <value_floats = [3.0, 4.0]> () t = Add(x, a) },
                else_branch = no () => (float[2] e) { e = Constant <value_floats = [1.0, 2.0]> () }>
        }"""
    )
    graph = as_graph(made)
    assert LiftConstants().apply(graph) == Changes(("a",), (("e", "is an output of its graph"),))
    assert not graph.initializers
    branches = to_model(graph).graph.node[0].attribute
    assert [[tensor.name for tensor in branch.g.initializer] for branch in branches] == [["a"], []]
    for seed in (0, 1):
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) == 0


def test_a_constant_that_a_body_captures_is_declared_around_it() -> None:
    made = model(
        """g (float[2] x, bool c) => (float[2] y) {
            k = Constant <value_floats = [3.0, 4.0]> ()
            y = If (c) <
                then_branch = yes () => (float[2] t) { t = Add(x, k) },
                else_branch = no () => (float[2] e) { e = Mul(x, k) }>
        }"""
    )
    graph = as_graph(made)
    assert LiftConstants().apply(graph).changed == ("k",)
    assert [tensor.name for tensor in graph.initializers] == ["k"]
    assert difference(outputs(graph, sample(made, 1)), outputs(made, sample(made, 1))) == 0


def test_a_constant_that_nothing_reads_goes_with_its_node() -> None:
    graph = as_graph(model("g (float[2] x) => (float[2] y) { k = Constant <value_int = 3> () y = Neg(x) }"))
    assert LiftConstants().apply(graph).changed == ("k",)
    assert [node.op_type for node in to_model(graph).graph.node] == ["Neg"]
    assert not nodes(graph, "Constant")


# FixInitializers ------------------------------------------------------------------------------------------------------

LAYER = "g (float[4, 8] x) => (float[4, 8] y) { a = MatMul(x, w) y = Mul(a, s) }"
ALONE = "g (float[4, 8] x) => (float[4, 8] y) { y = MatMul(x, w) }"
SCALE = "g (float[4, 8] x) => (float[4, 8] y) { c = Constant<value_float = 2.0>() a = Mul(x, s) y = Mul(a, c) }"


def layer() -> ModelProto:
    return model(LAYER, w=values(8, 8), s=np.full(8, 2, np.float32))


@pytest.mark.parametrize(
    ("made", "old", "changed", "left"),
    [
        (with_overridable_initializers(layer()), False, {"w", "s"}, set()),
        (with_overridable_initializers(layer(), "s"), False, set(), {"s"}),
        (with_overridable_initializers(layer(), "s"), True, {"s"}, set()),
        (with_overridable_initializers(model(SCALE, s=np.full(8, 2, np.float32))), False, set(), {"s"}),
        (with_overridable_initializers(model(ALONE, w=values(8, 8))), False, set(), {"w"}),
        (layer(), False, set(), set()),
    ],
    ids=["all", "some", "some of an old file", "no weights", "a single one", "none"],
)
def test_inputs(made: ModelProto, old: bool, changed: set[str], left: set[str]) -> None:
    made.ir_version = 3 if old else made.ir_version
    graph = as_graph(made)
    changes = apply_once(FixInitializers(), graph)
    assert set(changes.changed) == changed
    assert {name for name, _ in changes.skipped} == left
    assert [one.name for one in to_model(graph).graph.input] == ["x", *sorted(left)]


# FlushDenormals -------------------------------------------------------------------------------------------------------

SMALLEST = np.finfo(np.float32).smallest_normal


@pytest.mark.parametrize("small", [SMALLEST / 2, -SMALLEST / 2, np.finfo(np.float32).smallest_subnormal])
def test_denormal_weights_become_zero(small: np.float32) -> None:
    weight = values(6, 3, 1, 1)
    weight[2, 1], weight[4, 0], weight[0, 0] = small, SMALLEST, 0.0
    made = model("g (float[1, 3, 4, 4] x) => (float[1, 6, 4, 4] y) { y = Conv(x, w) }", w=weight)
    graph = named_graph(made)
    assert apply_once(FlushDenormals(), graph).changed == ("w",)
    [flushed] = constants(graph)
    assert (flushed.values[weight != small] == weight[weight != small]).all()
    assert (flushed.values[weight == small] == 0).all()
    assert flushed.values.dtype == np.float32
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) == 0


def test_normal_weights_stay_as_they_are() -> None:
    graph = named_graph(model("g (float[2, 3] x) => (float[2, 4] y) { y = MatMul(x, w) }", w=values(3, 4)))
    [before] = constants(graph)
    tensor_data = before.tensor_data
    assert FlushDenormals().apply(graph) == Changes()
    assert before.tensor_data is tensor_data


def test_what_keeps_a_divisor_from_zero_stays() -> None:
    text = "g (float[2, 3] x) => (float[2, 3] y) { d = Add(x, e) y = Div(x, d) }"
    graph = named_graph(model(text, e=np.full((2, 3), SMALLEST / 2, np.float32)))
    assert FlushDenormals().apply(graph) == Changes()


def test_weights_of_other_types_stay() -> None:
    text = "g (float16[2, 3] x) => (float16[2, 4] y) { y = MatMul(x, w) }"
    graph = named_graph(model(text, w=np.full((3, 4), 1e-6, np.float16)))
    assert FlushDenormals().apply(graph) == Changes()
