"""FoldConstants makes no model much larger, and inflates no weights."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from model_texts import Array, difference, model, node_named, ops, outputs, sample, values

from onnxq.algorithms.encode import encode
from onnxq.config.presets import PRESETS, preset_named
from onnxq.config.scheme import Mode, Rule, Scheme
from onnxq.ir import as_graph, constants
from onnxq.lowering import AllowedOps, minimum_opset
from onnxq.onnx_api import infer_shapes
from onnxq.passes import FoldConstants, RemoveUnused, StoreWeights
from onnxq.planning.planner import make_plan
from onnxq.rewrite import Changes
from onnxq.rewrite.constant_folding import DerivedPayload
from onnxq.runtime.targets import target_named


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
    StoreWeights(plan, encode(plan, graph)).apply(graph)
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
    StoreWeights(plan, encode(plan, graph)).apply(graph)
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
    assert isinstance(turned.tensor_data, DerivedPayload)
    np.testing.assert_array_equal(turned.values, values(600, 64).T)


def test_layouts_of_one_weight_cannot_make_a_model_many_times_as_large() -> None:
    turns = " ".join(f"[turn{i}] t{i} = Transpose(w) a{i + 1} = MatMul(a{i}, t{i})" for i in range(9))
    graph = as_graph(model(f"g (float[128, 128] a0) => (float[128, 128] a9) {{ {turns} }}", w=values(128, 128)))
    changes = FoldConstants(largest=1000).apply(graph)
    assert len(changes.changed) == 2
    assert {reason for _, reason in changes.skipped} == {"its result and those before it make the model too large"}


def test_codes_that_are_stored_once_are_not_stored_again_in_another_order() -> None:
    codes = np.arange(64 * 64).astype(np.int8).reshape(64, 64)
    made = model(
        """g (int64[2] i, uint8[2, 64] x) => (int8[2, 64] y, int32[2, 64] z) {
            y = Gather(c, i)  [turn] t = Transpose(c)  z = MatMulInteger(x, t)
        }""",
        c=codes,
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
