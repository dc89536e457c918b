"""What depends on constants alone is computed; constants stand where passes look for them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
from model_texts import Array, apply_once, difference, model, named_graph, node_named, ops, outputs, sample, values
from odd_models import with_overridable_initializers
from onnx import ModelProto, helper, numpy_helper
from rule_cases import Case, Rule, table

from onnxq.algorithms.encode import encode
from onnxq.config.presets import PRESETS, preset_named
from onnxq.config.scheme import Mode, Scheme
from onnxq.config.scheme import Rule as SchemeRule
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


def constant_of(graph: Graph, name: str) -> Array:
    (tensor,) = (tensor for tensor in constants(graph) if tensor.name == name)
    return tensor.values


def holds_constant(name: str, expected: list[float], dtype: type | None = None) -> object:
    return lambda graph: (
        constant_of(graph, name).tolist() == expected and (dtype is None or constant_of(graph, name).dtype == dtype)
    )


def fed_weight(made: ModelProto) -> None:
    made.graph.input.append(helper.make_tensor_value_info("w", 1, [4]))


fold = Rule(
    FoldConstants(), "float[4] x", w=values(4), v=values(4), wide=values(2, 3, 5), zero=np.array(0), zeros=[0],
    two=np.array(2), minus=[-1], parts=[2, 2], yes=True, tenth=0.1, three=np.array(3, np.uint8),
    low=np.array([-30000], np.float16), least=np.array([-1.5], np.float16), bytes=np.arange(4, dtype=np.int8),
    halves=values(32, 32, dtype=np.float16), code=np.arange(4096).astype(np.int8).reshape(64, 64),
)  # fmt: skip
CHAIN = " ".join(f"k{i + 1} = {('Neg', 'Exp', 'Mul')[i % 3]}(k{i}{', k0' * (i % 3 == 2)})" for i in range(6000))
FOLDED = [
    fold("""s = Shape(rows)  f = Gather(s, zero)  u = Unsqueeze(f, zeros)  d = Mul(u, two)  h = Div(d, two)
         to = Concat <axis = 0> (minus, h)  y = Reshape(x, to)""", "Reshape", inputs="float[N, 4, 4] x",
         rows=values(16, 3), changed="to", holds=holds_constant("to", [-1, 16])),
    *(fold(f"s = Shape {attributes} (wide) y = Add(x, s)", "Add", inputs=f"int64[{len(expected)}] x", changed="s",
           holds=holds_constant("s", expected))
      for attributes, expected in [("", [2, 3, 5]), ("<start = 1>", [3, 5]), ("<start = -3, end = -1>", [2, 3])]),
    # The shape of an input is not folded even when it is declared.
    fold("s = Shape(x) y = Mul(s, s)", inputs="float[2, 3] x", stays=""),
    fold("s = Cast <to = 10> (w) y = Add(x, s)", "Add", inputs="float16[4] x",
         holds=lambda graph: graph.nodes[0].inputs[1].name == "s" and graph.nodes[0].inputs[1].dtype == np.float16),
    # Half floats that decide are not rounded where onnxruntime does not round them.
    *(fold(f"(float[1] x) => (k, y) {{ {body} y = Neg(x) }}", left, **({"stays": ""} if left is None else {}))
      for body, left in [
          ("d = Sub(low, least) k = Cast <to = 7> (d)", None),
          ("d = Sub(low, least) e = Neg(d) k = Floor(e)", None),
          ("d = Sub(low, least) i = Cast <to = 7> (d) k = Neg(i)", "Neg Neg"),
          ("d = Sub(low, least) k = Neg(d)", "Neg Neg")]),
    fold("q = QuantizeLinear(w, tenth, three)  d = DequantizeLinear(q, tenth, three)  y = Add(x, d)", stays=""),
    *(fold(f"r = {operator} y = Add(x, r)", runs=False, stays="")
      for operator in ("RandomNormal <shape = [4]> ()", "RandomUniform <shape = [4]> ()", "RandomNormalLike(w)",
                       "RandomUniformLike(w)")),
    # Outputs of the graph stay with their node, and read folded tensors.
    fold("(float[4] x) => (y, k) { a = Mul(w, w) b = Neg(a) k = Exp(b) y = Add(x, a) }", "Exp Add", changed="a b"),
    fold("(float[4] x) => (y, k) { k = Exp(w) m = Neg(k) y = Add(x, m) }", "Exp Add", changed="m"),
    fold("(float[2] x) => (y, k) { v0 = Neg(w)  k, a = Split <axis = 0> (v0, parts)  y = Add(x, a) }", "Split Add",
         changed="v0", holds=lambda graph: [output.name for output in graph.nodes[0].outputs] == ["k", "a"]),
    fold("(float[2] x) => (y, k) { a, b = Split <axis = 0> (w, parts)  k = Neg(b)  y = Add(x, a) }", "Neg Add",
         changed="a b"),
    # Bodies are folded with what they capture, and a node with bodies never.
    fold("""(float[4] x, bool c) => (y) { k = Mul(w, w) y = If (c) <
         then_branch = t0 () => (t) { a = Mul(k, k) b = Neg(a) t = Add(x, b) },
         else_branch = e0 () => (e) { e = Neg(k) }> }""", "If Add Neg", changed="k b"),
    fold("""k = If (yes) <then_branch = t () => (a) { a = Mul(w, w) }, else_branch = e () => (b) { b = Neg(w) }>
         y = Add(x, k)""", stays=""),
    fold("k = local.f(w) y = Add(x, k)", stays=""),
    fold("k = Identity(s) y = Equal(x, k)", inputs="string[1] x", opset=19, s=np.array(["é"], object), runs=False,
         stays=""),
    # Floats of 8 bits stay codes; a few small integers do not, nor weights in float16.
    fold("k = Cast <to = 1> (f) y = Add(x, k)", inputs="float[64] x", opset=19,
         f=np.arange(64).astype(ml_dtypes.float8_e5m2), stays=""),
    fold("k = Cast <to = 1> (bytes) y = Add(x, k)", "Add", changed="k"),
    fold("k = Cast <to = 1> (halves) y = MatMul(x, k)", "MatMul", inputs="float[N, 32] x", changed="k",
         holds=lambda graph: constant_of(graph, "k").dtype == np.float32),
    # What a caller may feed is not folded.
    fold("k = Neg(w) s = Add(k, v) t = Mul(v, v) a = Add(x, s) y = Add(a, t)", "Neg Add Add Add", changed="t",
         damage=fed_weight, feed={"x": values(4, seed=1), "w": np.float32([1, 2, 3, 4])}),
    fold(f"{CHAIN} y = Add(x, k6000)", "Add", inputs="float[1] x", k0=values(1), changed="k6000", runs=False),
    # Codes that are stored once are not stored again in another order.
    fold("(int64[2] i, uint8[2, 64] x) => (y, z) { y = Gather(code, i) [turn] t = Transpose(code)"
         " z = MatMulInteger(x, t) }", runs=False, stays="shows a stored weight in another order"),
]  # fmt: skip

STORED = {
    "wide": [16, 4096], "row": values(4096), "rows": values(16, 8), "index": np.arange(4096) % 16,
    "w": values(256, 256), "down": values(256, 4), "up": values(4, 256), "half": values(256, 256).astype(np.float16),
    "s": values(256), "few": np.arange(40) % 16,
}  # fmt: skip
large = Rule(FoldConstants(growth=10_000), "float[1] x", **STORED)
LARGE = [
    *(large(body, "Add") for body in [
        "c = Gather(rows, few)  y = Add(x, c)",
        "c = Expand(row, wide)  d = ReduceMax(c)  y = Add(x, d)",
        "c = MatMul(down, up)  d = Add(w, c)  e = Mul(d, s)  y = Add(x, e)",
        "c = Mul(w, s)  d = Mul(w, w)  e = Add(c, d)  f = Transpose(e)  y = Add(x, f)",
        "c = Cast <to = 1> (half)  y = Add(x, c)"]),
    large("c = Transpose(w)  d = Add(x, w)  y = Add(c, d)", "Add Add"),
    *(large(body, stays=" ") for body in [
        "c = Expand(row, wide)  y = Add(x, c)",
        "c = ConstantOfShape(wide)  y = Add(x, c)",
        "c = Gather(rows, index)  d = Neg(c)  y = Add(x, d)",
        "c = MatMul(down, up)  y = Add(x, c)",
        "c = Mul(w, s)  d = Add(x, w)  y = Add(c, d)",
        # A body does not read what is too large around it.
        """(bool b, float[1] x) => (y) { c = Expand(row, wide) y = If (b) <
        then_branch = one () => (t) { d = Neg(c)  t = Add(d, x) },
        else_branch = two () => (e) { e = Add(c, x) }> }"""]),
]  # fmt: skip

lift = Rule(LiftConstants(), "float[2] x")
LIFTED = [
    *(lift(f"k = Constant <{attribute}> () y = Add(x, k)", "Add", inputs=f"{kind}[2] x", changed="k", error=0.0,
           holds=lambda graph, number=number: np.array_equal(constant_of(graph, "k"), number)
           and constant_of(graph, "k").dtype == number.dtype and constant_of(graph, "k").shape == number.shape)
      for attribute, kind, number in [
          ("value = float[2, 2] {1.0, 2.0, 3.0, 4.0}", "float", np.array([[1, 2], [3, 4]], np.float32)),
          ("value = int64 {7}", "int64", np.array(7)),
          ("value_float = 1.5", "float", np.array(1.5, np.float32)),
          ("value_floats = [1.5, 2.5]", "float", np.array([1.5, 2.5], np.float32)),
          ("value_int = 3", "int64", np.array(3)),
          ("value_ints = [3, -4]", "int64", np.array([3, -4]))]),
    *(lift(f"k = Constant <{attribute}> () y = Equal(x, k)", "Equal", inputs="string[1] x", opset=19, changed="k",
           feed={"x": np.array([text], object)})
      for attribute in ('value_string = "é"', 'value_strings = ["é"]', 'value = string[1] {"é"}') for text in "ée"),
    lift("(float[2] x) => (y, k) { k = Constant <value_floats = [1.0, 2.0]> ()  y = Add(x, k) }",
         stays="is an output of its graph"),
    lift("k = Constant <value_int = 3> () y = Neg(x)", "Neg", changed="k"),
    # Constants stand in the body that holds their node, or around what captures them.
    lift("""(float[2] x, bool c) => (y) { y = If (c) <
         then_branch = yes () => (t) { a = Constant <value_floats = [3.0, 4.0]> () t = Add(x, a) },
         else_branch = no () => (e) { e = Constant <value_floats = [1.0, 2.0]> () }> }""", "If Add Constant",
         changed="a", holds=lambda graph: not graph.initializers
         and [[tensor.name for tensor in branch.g.initializer] for branch in to_model(graph).graph.node[0].attribute]
         == [["a"], []]),
    lift("""(float[2] x, bool c) => (y) { k = Constant <value_floats = [3.0, 4.0]> () y = If (c) <
         then_branch = yes () => (t) { t = Add(x, k) }, else_branch = no () => (e) { e = Mul(x, k) }> }""",
         "If Add Mul", changed="k", holds=lambda graph: [tensor.name for tensor in graph.initializers] == ["k"]),
]  # fmt: skip

SMALLEST = np.finfo(np.float32).smallest_normal
flush = Rule(FlushDenormals(), "float[2, 3] x")


def denormal(small: np.float32) -> Case:
    weight = values(6, 3, 1, 1)
    weight[2, 1], weight[4, 0], weight[0, 0] = small, SMALLEST, 0.0
    expected = np.where(weight == small, np.float32(0), weight)
    return flush("y = Conv(x, w)", "Conv", inputs="float[1, 3, 4, 4] x", w=weight, changed="w", error=0.0,
                 holds=lambda graph: np.array_equal(constant_of(graph, "w"), expected))  # fmt: skip


FLUSHED = [
    *map(denormal, (SMALLEST / 2, -SMALLEST / 2, np.finfo(np.float32).smallest_subnormal)),
    flush("y = MatMul(x, w)", w=values(3, 4), stays=""),
    # Data that is zero beside the larger weights leaves the denormal ones to decide.
    flush(
        "a = MatMul(x, w) b = Cast <to = 9> (a) y = Not(b)",
        w=np.diag(np.array([1, SMALLEST / 2, 1], np.float32)),
        feed={"x": np.array([[0, 1, 0]] * 2, np.float32)},
        error=0.0,
        stays="",
    ),
    # It may keep a divisor from zero.
    flush("d = Add(x, e) y = Div(x, d)", e=np.full((2, 3), SMALLEST / 2, np.float32), stays=""),
    flush("y = MatMul(x, w)", inputs="float16[2, 3] x", w=np.full((3, 4), 1e-6, np.float16), stays=""),
]


@table(FOLDED, LARGE, LIFTED, FLUSHED)
def test_rules(case: Case) -> None:
    case.check()


def test_a_node_that_fails_keeps_only_itself_and_what_depends_on_it() -> None:
    made = model(
        """(float[4] x) => (float[4] y, float[4] z) {
            good = Mul(w, w)  y = Add(x, good)
            [bad] broken = Reshape(w, five)  [behind] worse = Neg(broken)
            four = Shape(w)  [shaped] flat = Reshape(worse, four)  z = Add(x, flat)
        }""",
        w=values(4), five=[5],
    )  # fmt: skip
    graph = as_graph(made)
    changes = FoldConstants().apply(graph)
    assert changes.changed == ("good", "four")
    assert [name for name, _ in changes.skipped] == ["bad", "behind", "shaped"]
    assert ops(graph) == ["Add", "Reshape", "Neg", "Reshape", "Add"]


def test_constants_and_identities_are_folded_through_when_they_are_gone() -> None:
    body = "k = Constant <value_floats = [1.0, 2.0, 3.0, 4.0]> ()  i = Identity(k)  s = Mul(i, i)  y = Add(x, s)"
    graph = as_graph(fold(body).made)
    Pipeline((NameNodes(), LiftConstants(), DropNoOps(), FoldConstants())).apply(graph)
    assert constant_of(graph, "s").tolist() == [1, 4, 9, 16]
    assert ops(graph) == ["Add"]


W, AXES, NONE = constant("w", values(4)), constant("a", np.array([0])), Variable("")


@pytest.mark.parametrize(
    ("op", "inputs", "attributes"),
    [
        ("Add", [W], {}),
        ("Add", [W, AXES], {}),
        *(("Cast", [W], {"to": to} if to else {}) for to in (None, "x", [1], 999)),
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


# Sizes of folded constants --------------------------------------------------------------------------------------------


def folded(made: ModelProto, inferred: bool = True, **limits: int) -> tuple[Graph, Changes]:
    graph = as_graph(made)
    if inferred:
        infer_shapes(graph)
    return graph, FoldConstants(**limits).apply(graph)


@pytest.mark.parametrize(
    ("operator", "feeds"),
    [
        ("ConstantOfShape(bomb)", {}),
        ("Tile(small, times)", {"small": values(4), "times": [2**32]}),
        ("Expand(small, wide)", {"small": values(1), "wide": [2**34]}),
        ("Range(zero, bombs, one)", {"zero": np.array(0), "bombs": np.array(2**34), "one": np.array(1)}),
        ("Pad(small, pads)", {"small": values(4), "pads": [0, 2**34]}),
        ("HannWindow(bombs)", {"bombs": np.array(2**34)}),
        ("OneHot(index, bombs, pair)", {"index": [1], "bombs": np.array(2**34), "pair": [0.0, 1.0]}),
    ],
)
@pytest.mark.parametrize("inferred", [True, False])
def test_a_small_file_cannot_make_a_huge_result(operator: str, feeds: dict[str, Array], inferred: bool) -> None:
    text = f"(int64[1] x) => (int64[1] y) {{ [bomb] b = {operator} s = Shape(b) t = Slice(s, o, p) y = Add(x, t) }}"
    graph, changes = folded(model(text, bomb=[2**20, 2**20], o=[0], p=[1], **feeds), inferred)
    assert "b" not in changes.changed
    assert "bomb" in dict(changes.skipped)
    assert node_named(graph, "bomb").op == operator.split("(")[0]


@pytest.mark.parametrize("inferred", [True, False])
@pytest.mark.parametrize(("largest", "folds"), [(64 * 64 * 8, True), (64 * 64 * 4 - 1, False)])
def test_results_above_the_limit_are_left(inferred: bool, largest: int, folds: bool) -> None:
    made = model("(float[64] x) => (y) { [big] b = Mul(r, c) y = Add(x, b) }", r=values(64), c=values(64, 1))
    _, changes = folded(made, inferred, largest=largest)
    assert bool(changes) is folds
    assert ("big" in dict(changes.skipped)) is not folds


TOGETHER = "its result and those before it make the model too large"
OUTER = '(float[64] x) => (y) { [outer] o = Einsum<equation = "i,j->ij">(v, v) y = Add(x, o) }'
EXPANDED = "(int64[K] x) => (y) { [wide] e = Expand(b, s) c = Cast<to = 7>(e) y = Add(x, c) }"
MANY = " ".join(f"[big{i}] b{i} = ConstantOfShape(s) x{i + 1} = Add(x{i}, b{i})" for i in range(9))
TURNS = " ".join(f"[turn{i}] t{i} = Transpose(w) a{i + 1} = MatMul(a{i}, t{i})" for i in range(9))


@pytest.mark.parametrize(
    ("made", "largest", "inferred", "changed", "reasons"),
    [
        (model(f"(float[64] x) => (x9) {{ x0 = Identity(x) {MANY} }}", s=[64]), 64 * 4 * 4, True,
         ("b0", "b1", "b2", "b3"), {TOGETHER}),
        # A product of unknown shape is left when it may be too large.
        (model(OUTER, v=values(64)), 64 * 64 * 8, False, ("o",), set()),
        (model(OUTER, v=values(64)), 64 * 64 * 4, False, (), {"its result of up to 4096 elements is too large"}),
        # Layouts of one weight cannot make a model many times as large.
        (model(f"(float[128, 128] a0) => (a9) {{ {TURNS} }}", w=values(128, 128)), 1000, False, ("t0", "t1"),
         {TOGETHER}),
        # Bytes are counted by type.
        (model(EXPANDED, b=np.array([True]), s=[1000]), 1100, True, ("e",), None),
    ],
    ids=["many results", "an outer product", "an outer product too large", "layouts of one weight", "bytes by type"],
)  # fmt: skip
def test_what_is_folded_stays_below_the_limit(
    made: ModelProto, largest: int, inferred: bool, changed: tuple[str, ...], reasons: set[str] | None
) -> None:
    _, changes = folded(made, inferred, largest=largest)
    assert changes.changed == changed
    assert reasons is None or {reason for _, reason in changes.skipped} == reasons


def compressed(scheme: Scheme, opset: int = 17) -> Graph:
    made = model("(float[N, 64] x) => (float[N, 96] y) { y = MatMul(x, w) }", opset=opset, w=values(64, 96))
    graph = named_graph(made)
    plan = make_plan(graph, scheme, target_named("onnxruntime-cpu"))
    CompressWeights(plan, encode(plan, graph)).apply(graph)
    RemoveUnused().apply(graph)
    infer_shapes(graph)
    return graph


@pytest.mark.parametrize("preset", PRESETS)
def test_no_format_of_stored_weights_is_inflated(preset: str) -> None:
    weight = PRESETS[preset].rules[0].weight
    assert weight is not None
    opset = minimum_opset(weight, "MatMul", AllowedOps.QDQ, folded=True)
    if opset > onnx.defs.onnx_opset_version():
        pytest.skip(f"the installed onnx has no {weight.format}")
    graph = compressed(Scheme((SchemeRule(Mode.STORAGE, weight=weight),)), max(opset, 17))
    before = sum(tensor.tensor_data.nbytes for tensor in constants(graph))
    FoldConstants().apply(graph)
    RemoveUnused().apply(graph)
    assert sum(tensor.tensor_data.nbytes for tensor in constants(graph)) <= before < 64 * 96 * 2
    assert not FoldConstants().apply(graph)


def test_the_cast_of_a_stored_weight_says_why_it_stays() -> None:
    graph = compressed(preset_named("int8-storage"))
    assert FoldConstants().apply(graph) == Changes((), (("w.numbers.cast", "decodes a stored weight"),))


@pytest.mark.parametrize("inferred", [True, False])
def test_a_table_that_is_also_looked_up_is_transposed_whatever_its_size(inferred: bool) -> None:
    text = "(int64[2] i) => (float[2, 600] y) { h = Gather(w, i) t = Transpose<perm=[1, 0]>(w) y = MatMul(h, t) }"
    graph, changes = folded(model(text, w=values(600, 64)), inferred, largest=1000)
    assert changes.changed == ("t",)
    assert ops(graph) == ["Gather", "MatMul"]
    (turned,) = (tensor for tensor in constants(graph) if tensor.name == "t")
    assert isinstance(turned.tensor_data, DerivedTensor)
    np.testing.assert_array_equal(turned.values, values(600, 64).T)


# Constants and inputs -------------------------------------------------------------------------------------------------


def test_leaves_sparse_values() -> None:
    made = model("(float[4] x) => (float[4] y) { [sparse] k = Constant () y = Add(x, k) }")
    numbers = numpy_helper.from_array(values(2), "v")
    sparse = helper.make_sparse_tensor(numbers, numpy_helper.from_array(np.array([0, 2]), "i"), [4])
    made.graph.node[0].attribute.append(helper.make_attribute("sparse_value", sparse))
    graph = as_graph(made)
    assert LiftConstants().apply(graph) == Changes((), (("k", "holds sparse values"),))
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) == 0


LAYER = "(float[4, 8] x) => (float[4, 8] y) { a = MatMul(x, w) y = Mul(a, s) }"
ALONE = "(float[4, 8] x) => (float[4, 8] y) { y = MatMul(x, w) }"
SCALE = "(float[4, 8] x) => (float[4, 8] y) { c = Constant<value_float = 2.0>() a = Mul(x, s) y = Mul(a, c) }"


@pytest.mark.parametrize(
    ("text", "fed", "old", "changed", "left"),
    [
        (LAYER, "ws", False, {"w", "s"}, set()),
        (LAYER, "s", False, set(), {"s"}),
        (LAYER, "s", True, {"s"}, set()),
        (SCALE, "s", False, set(), {"s"}),
        (ALONE, "w", False, set(), {"w"}),
        (LAYER, "", False, set(), set()),
    ],
    ids=["all", "some", "some of an old file", "no weights", "a single one", "none"],
)
def test_inputs(text: str, fed: str, old: bool, changed: set[str], left: set[str]) -> None:
    weights = {"w": values(8, 8), "s": np.full(8, 2, np.float32)}
    made = model(text, **{name: array for name, array in weights.items() if f", {name})" in text})
    if fed:
        with_overridable_initializers(made, *fed)
    made.ir_version = 3 if old else made.ir_version
    graph = named_graph(made)
    changes = apply_once(FixInitializers(), graph)
    assert set(changes.changed) == changed
    assert {name for name, _ in changes.skipped} == left
    assert [info.name for info in to_model(graph).graph.input] == ["x", *sorted(left)]
