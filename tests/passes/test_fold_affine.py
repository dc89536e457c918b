"""Factors and shifts become a part of weights and biases."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_texts import (
    batch_norm,
    difference,
    named_graph,
    node_named,
    nodes,
    ops,
    outputs,
    sample,
    values,
    variances,
)
from onnx import ModelProto
from rule_cases import Case, Rule, table

from onnxq.ir import Graph, as_graph
from onnxq.onnx_api import infer_shapes
from onnxq.passes import (
    DropNoOps,
    FoldGemmFactors,
    FoldIntoBatchNorm,
    FoldIntoNextProduct,
    FoldScalesIntoProducts,
    FuseBatchNorm,
    LiftChannelFactors,
    LiftConstants,
    MergeScalesOfProduct,
    NameNodes,
)
from onnxq.rewrite import Pipeline, RewriteRules

HALF = np.float16
IMAGE, ROWS = "float[N, 4, 5, 5] x", "float[3, 4] x"
NORM = "BatchNormalization <epsilon = 0.01> (a, s, m, c, v)"
PARAMETERS = dict(zip("smcv", batch_norm("", 6).values(), strict=True))
ALONE = "no product with constant weight and bias feeds it alone"

# Each product, the inputs that it needs, and the shape of its weight.
PRODUCTS = [
    *((f"Conv <group = {groups}> (x, w{bias})", f"float[N, 4{', 5' * rank}] x", (6, 4 // groups, *[3] * rank))
      for rank, groups, bias in product((1, 2, 3), (1, 2), (", b", ""))),
    *((f"ConvTranspose <group = {groups}> (x, w{bias})", IMAGE, (4, 6 // groups, 3, 3))
      for groups, bias in product((1, 2), (", b", ""))),
    *((f"Gemm <transB = {turned}> (x, w{bias})", ROWS, (6, 4) if turned else (4, 6))
      for turned, bias in product((0, 1), (", b", ", flat", ""))),
]  # fmt: skip
fuse = Rule(
    FuseBatchNorm(), IMAGE, w=values(6, 4, 3, 3), b=values(6), flat=values(1, 6), k=values(6, 1, 1), **PARAMETERS
)
rows = Rule(FuseBatchNorm(), ROWS, w=values(4, 6), b=values(6), k=values(6) + np.float32(2), **PARAMETERS)
BEHIND = ("Mul(a, k)", "Mul(k, a)", "Div(a, k)", "Add(a, k)", "Add(k, a)", "Sub(a, k)")


def branches(then: str, outer: str = "h = Neg(x)") -> str:
    return f"""({IMAGE}, bool which) => (y) {{ {outer} y = If (which) <
        then_branch = yes () => (t) {{ {then} }}, else_branch = no () => (e) {{ e = Conv(x, w) }}> }}"""


def gives_back(made: ModelProto) -> None:
    made.graph.output.add(name="a").type.tensor_type.elem_type = 1


FUSED = [
    *(fuse(f"a = {text} y = {NORM}", text.split()[0], inputs=inputs, w=values(*shape))
      for text, inputs, shape in PRODUCTS),
    *(fuse(f"[conv] a = Conv(x, w, b) y = {behind}", "Conv", k=values(*shape) + np.float32(2))
      for behind, shape in product(BEHIND, [(6, 1, 1), (1, 6, 1, 1), (), (1,), (1, 1, 1, 1)])),
    *(rows(f"a = Gemm(x, w{bias}) y = {behind}", "Gemm") for behind, bias in product(BEHIND, (", b", ""))),
    rows(f"a = MatMul(x, w) [next] y = {NORM}", "MatMul Add", holds=lambda graph: graph.nodes[1].name == "next"),
    rows(f"a = MatMul(x, w) y = {NORM}", "MatMul", m=np.zeros(6, np.float32), c=np.zeros(6, np.float32)),
    rows("a = MatMul(x, w) y = Mul(a, k)", "MatMul"),
    fuse("[conv] a = Conv(x, w) [next] y = Mul(a, k)", "Conv",
         holds=lambda graph: graph.nodes[0].origins == (("conv", "Conv"), ("next", "Mul"))),
    fuse(f"a = Conv(x, w) d = Mul(a, k) e = Add(d, j) f = {NORM.replace('(a', '(e')} y = Div(f, k)", "Conv",
         j=values(1), k=values(6, 1, 1) + np.float32(3)),
    fuse(f"[conv] a = Conv(x, w, b) n = {NORM} [other] z = Conv(x, w, b) y = Add(n, z)", "Conv Conv Add",
         holds=lambda graph: [[tensor.name for tensor in node_named(graph, name).inputs] for name in ("other", "conv")]
         == [["x", "w", "b"], ["x", "w.fused", "b.fused"]]),
    fuse(branches(f"[conv] a = Conv(h, w) t = {NORM}"), "Neg If Conv Conv",
         holds=lambda graph: [node.inputs[1].name for node in nodes(graph, "Conv") if node.name != "conv"] == ["w"]),
]  # fmt: skip
NOT_FUSED = [
    fuse(branches(f"t = {NORM}", outer="a = Conv(x, w)"), stays=ALONE),
    fuse("a = Conv(x, w) y = Div(k, a)", stays=""),
    fuse("a = Conv(x, w) y = Sub(k, a)", stays=""),
    *(fuse("a = Conv(x, w) y = Mul(a, k)", k=values(*shape), stays="")
      for shape in [(3,), (1, 3), (3, 1), (6, 1, 3), (2, 1, 1, 1), (1, 1, 1, 1, 1)]),
    fuse("a = Conv(x, w) y = Mul(a, k)", w=values(1, 4, 3, 3), stays=""),
    rows("a = MatMul(x, w) y = Mul(a, k)", inputs="float[4] x", k=values(1, 6), stays=""),
    rows("a = MatMul(x, w) y = Add(a, k)", stays=""),
    fuse("a = Conv(x, w) y = Div(a, k)", k=np.zeros((6, 1, 1), np.float32), runs=False, stays=""),
    fuse(f"a = Conv(x, w) n = {NORM} z = Relu(a) y = Add(n, z)", stays=ALONE),
    fuse(f"a = Conv(x, w) y = {NORM}", damage=gives_back, runs=False, stays=ALONE),
    fuse("a = Conv(x, w) y, c2, v2 = BatchNormalization <training_mode = 1> (a, s, m, c, v)", runs=False,
         stays="it is in training mode"),
    fuse(f"({IMAGE}, float[6, 4, 3, 3] f) => (y) {{ a = Conv(x, f) y = {NORM} }}", stays=ALONE),
    fuse(f"a = Conv(x, w) t = Exp(k) y = {NORM.replace(', s', ', t')}", k=values(6), runs=False,
         stays="its parameters are not constant"),
    rows(f"a = Gemm <alpha = 2.0> (x, w) y = {NORM}", stays="has alpha or beta"),
    rows(f"a = Gemm(x, w, b) y = {NORM}", inputs="float[6, 4] x", b=values(6, 1),
         stays="is not one value for each channel"),
    rows(f"a = MatMul(x, w) y = {NORM}", inputs="float[2, 6, 4] x", stays="its channel axis is not the last one"),
    fuse(f"a = Conv(x, w) y = {NORM}", inputs="float16[N, 4, 5, 5] x", runs=False,
         w=values(6, 4, 3, 3, dtype=HALF, scale=100), s=np.full(6, 60_000, HALF),
         **{name: PARAMETERS[name].astype(HALF) for name in "mcv"}, stays="its factors are too far from 1"),
    # Only damaged models have these.
    *(fuse(f"a = {text} y = Mul(a, k)", inputs="float[4, 8, 1, 1] x", w=values(*weight), b=values(*bias), k=values(1),
           runs=False, stays="")
      for text, weight, bias in [("Gemm(x, w)", (8,), (8,)), ("Conv(x, w, b)", (8, 8, 1, 1), (8, 8, 1, 1)),
                                 ("Conv <group = 3> (x, w)", (8, 8, 1, 1), (8,)),
                                 ("ConvTranspose <group = 0> (x, w, b)", (8, 8, 1, 1), (8,))]),
    fuse("a = Conv(x, w) y = BatchNormalization(a, s, c, m, v)", m=values(6, 4), runs=False, stays=""),
]  # fmt: skip

norm = Rule(FoldIntoBatchNorm(), IMAGE, half=0.5, eight=8, each=values(4, 1, 1), wide=values(5),
            **batch_norm("p", 4), **batch_norm("q", 4))  # fmt: skip
FRONT = "a = BatchNormalization(x, ps, pb, pm, pv)"
DOUBLES = {name: array.astype(np.float64) for name, array in (batch_norm("p", 4) | batch_norm("q", 4)).items()}
INTO_NORMS = [
    norm(f"{FRONT} y = Mul(a, half)", "BatchNormalization"),
    norm(f"{FRONT} b = Mul(a, each) y = Add(b, each)", "BatchNormalization"),
    norm(f"{FRONT} y = BatchNormalization<epsilon = 0.01>(a, qs, qb, qm, qv)", "BatchNormalization"),
    norm(f"{FRONT} b = BatchNormalization(a, qs, qb, qm, qv) c = Mul(b, each) y = Add(c, half)", "BatchNormalization"),
    norm(f"{FRONT} y = Mul(a, wide)", stays="its constant does not vary along the channels alone"),
    norm(f"{FRONT} b = Mul(a, each) c = Add(b, a) y = Neg(c)", stays=""),
    norm(f"{FRONT} y = Mul(a, eight)", ps=np.full(4, 2e35, np.float32), pv=np.zeros(4, np.float32), runs=False,
         stays="its scale or bias would leave the range"),
    norm(f"{FRONT} y = Mul(a, each)", inputs="float[] x", runs=False, stays="the type of its data is not known",
         damage=lambda made: made.graph.input[0].type.tensor_type.ClearField("shape")),
    # The default of epsilon is a float32; beside a small variance its last digits show.
    norm(f"{FRONT} y = BatchNormalization(a, qs, qb, qm, qv)", "BatchNormalization", inputs="double[2, 4, 5, 5] x",
         error=1e-12, **DOUBLES | {"qv": np.full(4, 1e-4)}),
]  # fmt: skip

into_next = Rule(
    FoldIntoNextProduct(), "float[N, 4, 8, 8] x", half=0.5, one=1, each=values(4, 1, 1), last=values(4),
    w=values(6, 4, 3, 3), grouped=values(6, 2, 3, 3), up=values(4, 3, 3, 3), m=values(4, 5), b=values(6), d=values(5),
    turned=values(5, 4), square=values(4, 4, 1, 1), column=values(2, 1), channels=values(1, 4, 1, 1),
    **batch_norm("p", 4),
)  # fmt: skip
OF_FOUR = "a = BatchNormalization(e, ps, pb, pm, pv)"
INTO_NEXT = [
    *(into_next(f"e = Exp(x) {body}", "Exp " + body.partition("y = ")[2].partition("(")[0].partition("<")[0],
                inputs=inputs)
      for inputs, bodies in {
          "float[N, 4, 8, 8] x": [
              "a = Mul(e, half) y = Conv<pads = [1, 1, 1, 1]>(a, w)",
              "a = Mul(each, e) y = Conv<pads = [1, 0, 1, 0]>(a, w, b)",
              "a = Mul(e, each) y = Conv<group = 2>(a, grouped, b)", "a = Add(e, each) y = Conv<group = 2>(a, grouped)",
              "a = Add(e, half) y = Conv(a, w, b)", f"{OF_FOUR} y = Conv(a, w)",
              "a = Mul(e, each) y = ConvTranspose<group = 2>(a, up, b)"],
          "float[N, 4] x": [
              "a = Mul(e, last) y = Gemm(a, m, d)", "a = Mul(e, last) y = Gemm<alpha = 2.0, beta = 3.0>(a, m, d)",
              "a = Add(e, last) y = Gemm(a, m, d)", f"{OF_FOUR} y = Gemm(a, m)", "a = Mul(e, last) y = MatMul(a, m)",
              "a = Add(e, last) y = Gemm<transB = 1>(a, turned)"],
      }.items() for body in bodies),
    *(into_next(f"e = Exp(x) {body}", stays=reason) for body, reason in [
        ("a = Add(e, each) y = Conv<pads = [1, 1, 1, 1]>(a, w)", "pads"),
        (f'{OF_FOUR} y = Conv<auto_pad = "SAME_UPPER">(a, w)', "pads"),
        ("a = Add(e, half) y = ConvTranspose(a, up)", "would have to shift its border"),
        ("a = Mul(e, half) k = Conv(a, w) l = Conv(e, w) y = Add(k, l)", "others read the weight"),
        ("a = Mul(e, half) k = Conv(a, w) s = ReduceMax(a) y = Add(k, s)", "")]),
    into_next("c = ConvTranspose(x, square) a = Mul(c, half) y = Conv(a, w)", stays="the node before can take it"),
    *(into_next(f"e = Exp(x) {body}", inputs="float[N, 4] x", stays=reason) for body, reason in [
        ("f = Erf(e) g0 = Add(f, one) h = Mul(e, g0) a = Mul(h, half) y = MatMul(a, m)", "it is a part of Gelu"),
        ("a = Add(e, last) y = Gemm<alpha = 2.0>(a, m, d)", "has alpha or beta")]),
    into_next("e = Exp(x) a = Mul(e, column) y = Gemm(a, m)", inputs="float[2, 4] x", stays="vary along the channels"),
    *(into_next(f"e = Exp(x) {body}", inputs=f"float[{data}] x", runs=False,
                stays="its data is not known to have these channels before")
      for data, body in [("1, 1, 8, 8", "a = Mul(e, channels) y = Conv(a, w)"),
                         ("N, C, 8, 8", "a = Mul(e, channels) y = Conv(a, w)"),
                         ("4, 8, 8", "a = Mul(e, channels) y = Conv(a, w)"),
                         ("N, 1", "a = Mul(e, last) y = MatMul(a, m)"), ("N, 1", "a = Add(e, last) y = Gemm(a, m)")]),
]  # fmt: skip

lift = Rule(LiftChannelFactors(), "float[N, 3, 8, 8] x", w=values(4, 3, 3, 3), v=values(5, 3, 3, 3),
            u=values(3, 2, 3, 3), half=0.5, last=values(6))  # fmt: skip
lift_and_fuse = RewriteRules((LiftChannelFactors(), FuseBatchNorm()))
JOINED = "p = Conv(x, w) q = Conv(x, v) j = Concat<axis = 1>(p, q)"
NORM_BEHIND = "BatchNormalization(j, ns, nb, nm, nv)"
POOLS = {
    "MaxPool<kernel_shape = [2, 2], pads = [1, 0, 0, 0]>(p)": "MaxPool",
    "AveragePool<kernel_shape = [2, 2], pads = [1, 0, 0, 0]>(p)": "AveragePool",
    "GlobalAveragePool(p)": "GlobalAveragePool",
    "GlobalMaxPool(p)": "GlobalMaxPool",
}


def lifted(body: str, channels: int, expected: str = "", **options: Any) -> Case:
    constants = {"each": values(channels, 1, 1), **batch_norm("n", channels), "ns": variances(channels)}
    return lift(body, expected, **{name: array for name, array in constants.items() if f"{name}" in body}, **options)


LIFTED = [
    *(lifted(f"{JOINED} y = {behind}", 9, "Conv Conv Concat", step=lift_and_fuse, error=5e-6)
      for behind in (NORM_BEHIND, "Mul(j, each)", "Add(each, j)", "Mul(j, half)")),
    *(lifted(f"p = ConvTranspose(x, u) j = {pool} y = {behind}", 2, f"ConvTranspose {op}", step=lift_and_fuse,
             error=5e-6)
      for (pool, op), behind in product(POOLS.items(), (NORM_BEHIND, "Mul(j, half)", "Add(j, each)"))),
    lifted(f"r = Relu(x) q = Conv<pads = [1, 1, 1, 1]>(x, v) j = Concat<axis = 1>(r, q) y = {NORM_BEHIND}", 8,
           stays="not all that"),
    lifted(f"p = Conv(x, v) j = Concat<axis = 1>(p, p) k = {NORM_BEHIND} y = Add(k, j)", 10, stays=""),
    lifted(f"{JOINED} y = Mul(j, last)", 9, stays="its constants do not vary along the channels alone"),
    lifted("p = Conv(x, v) j = MaxPool<kernel_shape = [2, 2]>(p) y = Mul(j, each)", 5,
           stays="not all of its factors are positive"),
    lifted("p = Conv(x, v) j = AveragePool<kernel_shape = [2, 2], count_include_pad = 1>(p) y = Add(j, each)", 5,
           stays=" counts padding"),
]  # fmt: skip

scale = Rule(FoldScalesIntoProducts(), "float[8, 8] x", w=values(8, 8), v=values(8, 8, seed=1), b=values(8), f=0.3,
             zero=0, wide=np.ones((1, 1, 1, 1), np.float32), to=[2, 4, 8])  # fmt: skip
heads = Rule(FoldScalesIntoProducts(), "float[2, N, 8] x", wq=values(8, 8), bq=values(8), wk=values(8, 8, seed=1),
             bk=values(8, seed=1), to=[0, 0, 2, 4], root=2)  # fmt: skip
ATTENTION = """qm = MatMul(x, wq) q = Add(bq, qm) km = MatMul(x, wk) k = Add(km, bk)
    qr = Reshape(q, to) kr = Reshape(k, to)
    qt = Transpose <perm = [0, 2, 1, 3]> (qr) kt = Transpose <perm = [0, 2, 3, 1]> (kr)
    s = MatMul(qt, kt) d = Div(s, root) y = Softmax(d)"""
LINES = "MatMul Add MatMul Add Reshape Reshape Transpose Transpose MatMul"


def scales_the_query(graph: Graph) -> bool:
    """The query takes the scale, and other names for what has other values; the product has that of the Div."""
    names = [node.outputs[0].name for node in graph.nodes]
    halved = np.allclose(graph.nodes[0].inputs[1].values, values(8, 8) / 2)
    halved &= np.allclose(graph.nodes[1].inputs[0].values, values(8) / 2)
    return halved and {"k", "km", "kr", "kt"} < set(names) and not {"q", "qm", "qr", "qt", "s"} & set(names) and (
        names[-2:] == ["d", "y"]
    )  # fmt: skip


SCALES = [
    heads(ATTENTION, f"{LINES} Softmax", holds=scales_the_query),
    heads(ATTENTION.replace("d = Div", "other = Neg(q) d = Div"),
          f"{LINES} Neg Softmax"),
    scale("p = Gemm(x, w, b) r = Reshape(p, to) m = Mul(f, r) y = Neg(m)", "Gemm Reshape Neg"),
    scale("p = Gemm <alpha = 3.0, beta = 2.0> (x, w, b) r = Reshape(p, to) m = Mul(f, r) y = Neg(m)",
          "Gemm Reshape Neg"),
    scale("p = MatMul(x, w) r = Reshape(p, to) m = Mul(r, f) n = Mul(m, f) y = Neg(n)", "MatMul Reshape Neg"),
    scale("p = MatMul(w, x) r = Reshape(p, to) m = Div(r, f) y = Neg(m)", "MatMul Reshape Neg"),
    *(scale(body, stays="") for body in [
        "p = MatMul(x, w) r = Neg(p) m = Mul(r, f) y = Neg(m)",
        "p = MatMul(x, w) r = Reshape(p, to) m = Mul(r, f) y = Add(m, r)",
        "p = MatMul(x, w) other = MatMul(w, x) r = Reshape(p, to) m = Mul(r, f) y = Neg(m)",
        "p = MatMul(x, w) r = Reshape(p, to) m = Mul(r, zero) y = Neg(m)",
        "p = MatMul(x, w) r = Reshape(p, to) m = Mul(r, wide) y = Neg(m)",
        "p = MatMul(x, w) r = Reshape(p, to) m = Div(f, r) y = Neg(m)",
        "p = MatMul(x, w) a = Add(p, x) r = Reshape(a, to) m = Mul(r, f) y = Neg(m)",
        "p = MatMul(x, w) r = Reshape(p, to) y = Mul(r, f)"]),
    # In a body, and not across its border.
    scale("""(float[2, 8] x, bool k) => (y) { p = MatMul(x, w) t = Transpose(p)
          y = If (k) <then_branch = yes () => (b0) { m = MatMul(x, v) r = Transpose(m) a = Mul(r, f) b0 = Neg(a) },
                      else_branch = no () => (d) { c = Mul(t, f) d = Neg(c) }> }""",
          "MatMul Transpose If MatMul Transpose Neg Mul Neg"),
]  # fmt: skip

gemm = Rule(FoldGemmFactors(), "float[N, 8] x, float[4] k", w=values(8, 4), t=values(4, 8), b=values(4))
GEMMS = [
    *(gemm(f"y = Gemm <{attributes}> {operands}", expected, inputs=f"float[{data}] x, float[4] k",
           holds=lambda graph: set(graph.nodes[-1].attrs) <= {"transB"})
      for attributes, operands, data, expected in [
          ("alpha = 0.5", "(x, w, b)", "N, 8", "Gemm"),
          ("beta = 0.25", "(x, w, b)", "N, 8", "Gemm"),
          ("beta = 0.0", "(x, w, b)", "N, 8", "Gemm"),
          ("beta = 0.0", "(x, w, k)", "N, 8", "Gemm"),
          ("alpha = 2.0, beta = 1.0", "(x, w, k)", "N, 8", "Gemm"),
          ("alpha = 2.0, beta = 3.0, transB = 1", "(x, t, b)", "N, 8", "Gemm"),
          ("alpha = 0.5, transA = 1", "(x, w, b)", "8, N", "Transpose Gemm"),
          ("transA = 1, transB = 1", "(x, t, b)", "8, N", "Transpose Gemm")]),
    gemm("y = Gemm <beta = 0.5> (x, w, k)", stays="its beta scales a bias that is computed at run time"),
    gemm("y = Gemm <transB = 0> (x, w, b)", stays="it has no alpha, beta or transA"),
    gemm("r = Gather(t, i) y = Gemm <alpha = 2.0, transB = 1> (x, t)", inputs="int64[N] i, float[8, 8] x", runs=False,
         stays="its weight is a table that is looked up too"),
]  # fmt: skip

merge = Rule(MergeScalesOfProduct(), "float[2, 3, 4] q, float[2, 4, 3] k", s=np.full(1, 0.35, np.float32))
SCALED = "a = Mul(q, s) b = Mul(s, k) y = MatMul(a, b)"
LARGE = {name: array * np.float32(2e19) for name, array in sample(merge(SCALED).made).items()}
MERGED = [
    merge(SCALED, "Mul MatMul"),
    # The product stays in range where it did.
    merge(SCALED, "Mul MatMul", feed=LARGE),
    merge(SCALED, inputs="float16[2, 3, 4] q, float16[2, 4, 3] k", s=np.full(1, 1e-3, HALF), runs=False,
          stays="a scale is too far from 1"),
    merge(SCALED, s=np.full(1, 1e-10, np.float32), stays="a scale is too far from 1"),
    merge(SCALED, s=np.full(1, 1.5, np.float32), stays="neither of its scales makes its data smaller"),
    merge(SCALED, s=np.full((1, 1, 1, 1), 0.35, np.float32), stays="a scale may have more dimensions than its data"),
]  # fmt: skip


@table(FUSED, NOT_FUSED, INTO_NORMS, INTO_NEXT, LIFTED, SCALES, GEMMS, MERGED)
def test_rules(case: Case) -> None:
    case.check()


def test_omitted_outputs_of_the_normalization_do_not_stay_with_the_add() -> None:
    made = rows(f"a = MatMul(x, w) [next] y = {NORM}", opset=9).made
    expected = outputs(made, sample(made))
    made.graph.node[1].output.extend([""] * 4)
    graph = named_graph(made)
    assert FuseBatchNorm().apply(graph).changed == ("next",)
    assert [tensor.name for tensor in node_named(graph, "next").outputs] == ["y"]
    assert difference(outputs(graph, sample(made)), expected) <= 2e-6


def test_parameters_come_through_constant_and_identity_nodes() -> None:
    made = fuse("""e = Constant <value_floats = [1.5, 2.5]> ()  f = Identity(e)  s2 = Identity(f)
        a = Conv(x, w)  i = Identity(a)  y = BatchNormalization(i, s2, e, m, v)""",
        w=values(2, 4, 3, 3), m=values(2), v=np.ones(2, np.float32),
    ).made  # fmt: skip
    graph = as_graph(made)
    Pipeline((NameNodes(), LiftConstants(), DropNoOps(), FuseBatchNorm())).apply(graph)
    assert ops(graph) == ["Conv"]
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) <= 2e-6


CHAIN: Any = st.lists(st.tuples(st.sampled_from(["Mul", "Div", "Add", "Sub"]), st.booleans()), min_size=1, max_size=6)


@given(chain=CHAIN, groups=st.sampled_from([1, 2, 4]), seed=st.integers(0, 1000))
@settings(max_examples=25)
def test_any_chain_of_scales_and_shifts_folds_into_the_conv(
    chain: list[tuple[str, bool]], groups: int, seed: int
) -> None:
    steps = "".join(f" t{i + 1} = {op}(t{i}, k{i})" for i, (op, _) in enumerate(chain))
    constants = {
        f"k{i}": np.float32(1.5) + values(*((8, 1, 1) if wide else ()), seed=seed + i, scale=0.1)
        for i, (_, wide) in enumerate(chain)
    }
    body = f"t0 = Conv <group = {groups}> (x, w) {steps} y = Neg(t{len(chain)})"
    fuse(body, "Conv Neg", inputs="float[N, 8, 5, 5] x", w=values(8, 8 // groups, 3, 3, seed=seed), **constants).check()


@pytest.mark.parametrize("behind", ["Add(a, c)", "BatchNormalization(a, c, c, c, c)"])
@pytest.mark.parametrize("damaged", ["conv", "next"])
@pytest.mark.parametrize("inputs", [1, 7])
def test_leaves_nodes_with_a_wrong_number_of_inputs(behind: str, damaged: str, inputs: int) -> None:
    constant = values(6, 1, 1) if "Add" in behind else variances(6)
    graph = as_graph(fuse(f"[conv] a = Conv(x, w, b) [next] y = {behind}", c=constant).made)
    infer_shapes(graph)
    node = node_named(graph, damaged)
    node.inputs = (list(node.inputs) + [node.inputs[-1]] * 7)[:inputs]
    FuseBatchNorm().apply(graph)
    assert damaged in [node.name for node in nodes(graph)]
