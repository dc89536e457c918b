"""No pass or rule changes what a model computes at its edges: ranges, limits, decisions, opsets, scopes and kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from model_texts import difference, model, named_graph, ops, outputs, values
from onnx import ModelProto

from onnxq.ir import to_model
from onnxq.passes import PASSES
from onnxq.passes.preparing.preparation import canonicalise
from onnxq.rewrite import Pass

HALF = np.float16
LARGEST = np.finfo(np.float32).max


def f32(*numbers: float) -> np.ndarray:
    return np.array(numbers, np.float32)


def image(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    return values(*shape, seed=seed, dtype=dtype, scale=1.0)


def same(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    """Infinite values and NaN lie in the same places, and the rest differs by rounding at most."""
    halves = any(array.dtype == HALF for array in expected.values())
    assert difference(found, expected) <= (2e-3 if halves else 2e-6)


def apply(names: str, made: ModelProto) -> ModelProto:
    """Apply passes by name, or the canonical form."""
    graph = named_graph(made)
    for name in names.split():
        if name == "canonical":
            changes = canonicalise(graph)
            assert not [one.changes.failed for one in changes if one.changes.failed]
            continue
        step: Pass = PASSES[name]()
        assert not step.apply(graph).failed
        assert not step.apply(graph)
    made_of = to_model(graph)
    onnx.checker.check_model(made_of, full_check=True)
    return made_of


NORM = {"s": f32(2, 0.5), "b": f32(1, -1), "m": f32(0.5, 0), "v": f32(4, 0.25)}
WIDE_NORM = {name: image(2, 2, 2, seed=index) ** 2 + 0.5 for index, name in enumerate("sbmv")}

CASES: dict[str, tuple[str, ModelProto, dict[str, np.ndarray]]] = {
    # Ranges of folded constants and of intermediate values.
    "scale of a normalization overflows": (
        "FoldAffineIntoNormalization",
        model("g (float16[1, 4] x) => (float16[1, 4] y) { n = LayerNormalization<axis = -1>(x, s) y = Mul(n, k) }",
              s=np.full(4, 300, HALF), k=np.array(300, HALF)), {"x": np.zeros((1, 4), HALF)}),
    "result of a normalization overflows": (
        "FoldAffineIntoNormalization",
        model("g (float16[1, 16] x) => (float16[1, 16] y) { n = LayerNormalization<axis = -1>(x, s, b) y = Mul(n, k) }",
              s=np.full(16, 200, HALF), b=np.full(16, -700, HALF), k=np.array(90, HALF)),
        {"x": np.eye(1, 16, dtype=HALF)}),
    "bias of a normalization underflows": (
        "FoldAffineIntoNormalization",
        model("g (float[1, 4] x) => (float[1, 4] y) { n = LayerNormalization<axis = -1>(x, s, b) y = Mul(n, k) }",
              s=f32(0, 0, 0, 0), b=f32(1e-20, 0, 0, 0), k=f32(1e-20)), {"x": image(1, 4)}),
    "unscaled product overflows": (
        "MergeScalesOfProduct",
        model("g (float[1, 1] a, float[1, 1] b) => (float[1, 1] y) { p = Mul(a, k) q = Mul(b, k) y = MatMul(p, q) }",
              k=np.float32(1e-10)), {"a": np.full((1, 1), 1e20, np.float32), "b": np.full((1, 1), 1e20, np.float32)}),
    "scaled weight of a Gemm underflows": (
        "FoldGemmFactors",
        model("g (float16[1, 4] x) => (float16[1, 1] y) { y = Gemm<alpha = 1e-6>(x, w) }",
              w=np.full((4, 1), 0.01, HALF)),
        {"x": np.full((1, 4), 6e4, HALF)}),
    "scaled bias of a Gemm overflows": (
        "FoldGemmFactors",
        model("g (float16[1, 4] x) => (float16[1, 1] y) { y = Gemm<beta = 8.0>(x, w, b) }",
              w=np.full((4, 1), -60000, HALF), b=np.full(1, 60000, HALF)), {"x": np.ones((1, 4), HALF)}),
    "factors that give one number lose what is between": (
        "MergeScalars", model("g (float[2] x) => (float[2] y) { a = Mul(x, k) y = Mul(a, j) }",
                              k=np.float32(1e-30), j=np.float32(1e25)), {"x": f32(1e-20, 1e-20)}),
    "weights that underflow beside others": (
        "FuseBatchNorm",
        model("g (float[1, 2] x) => (float[1, 1] y) { m = MatMul(x, w) y = Mul(m, k) }",
              w=f32(1, 1e-30).reshape(2, 1), k=np.float32(1e-9)), {"x": f32(0, 1e38).reshape(1, 2)}),
    "a variance of nearly nothing": (
        "FuseBatchNorm",
        model("g (float[1, 2, 2, 2] x) => (float[1, 2, 2, 2] y) { c = Conv(x, w) "
              "y = BatchNormalization<epsilon = 0.0>(c, s, b, m, v) }",
              w=f32(1e15, 0, 0, 1e15).reshape(2, 2, 1, 1), **{**NORM, "v": f32(1e-38, 1), "m": f32(0, 0)}),
        {"x": np.full((1, 2, 2, 2), 1e-15, np.float32)}),
    "a scale behind a product": (
        "FoldScalesIntoProducts",
        model("g (float[1, 2] x) => (float[1, 1] y) { m = MatMul(x, w) a = Mul(m, k) y = Neg(a) }",
              w=f32(1e-20, 1).reshape(2, 1), k=np.float32(1e-20)), {"x": f32(1e30, 0).reshape(1, 2)}),
    "a factor in front of a product": (
        "FoldIntoNextProduct",
        model("g (float[1, 2] x) => (float[1, 1] y) { r = Relu(x) a = Mul(r, k) y = MatMul(a, w) }",
              w=f32(1e-30, 1).reshape(2, 1), k=f32(1e-10, 1)), {"x": f32(1e38, 0).reshape(1, 2)}),
    "a large shift in front of a product": (
        "FoldIntoNextProduct",
        model("g (float[1, 1, 1, 2] x) => (float[1, 1, 1, 2] y) { r = Relu(x) a = Add(r, k) y = Conv(a, w) }",
              w=f32(3).reshape(1, 1, 1, 1), k=f32(-1e8).reshape(1, 1, 1, 1)),
        {"x": f32(1e8 + 8, 1e8 + 16).reshape(1, 1, 1, 2)}),
    "factors of another normalization": (
        "FoldIntoBatchNorm",
        model("g (float[1, 2, 1, 1] x) => (float[1, 2, 1, 1] y) "
              "{ n = BatchNormalization(x, s, b, m, v) y = Mul(n, k) }",
              **{**NORM, "s": f32(1e-25, 1)}, k=f32(1e-20, 1).reshape(2, 1, 1)),
        {"x": f32(1e30, 1).reshape(1, 2, 1, 1)}),
    "slopes on both sides of 1": (
        "SplitPRelus", model("g (float[1, 3] x) => (float[1, 3] y) { y = PRelu(x, k) }", k=f32(-0.5, 2, 0)),
        {"x": f32(-3e38, -1, 3e38).reshape(1, 3)}),
    "a slope of 0 and infinity": (
        "SplitPRelus", model("g (float[1, 4] x) => (float[1, 4] y) { y = PRelu(x, k) }", k=f32(0, 0.5, 0.5, 0)),
        {"x": f32(np.inf, -np.inf, np.inf, -1).reshape(1, 4)}),
    "GELU of what twice leaves the range": (
        "FuseGelu",
        model("g (float[2] x) => (float[2] y) "
              "{ d = Div(x, r) e = Erf(d) p = Add(e, one) q = Mul(p, half) y = Mul(q, x) }",
              r=np.float32(2**0.5), one=np.float32(1), half=np.float32(0.5)), {"x": f32(3e38, -1)}),
    # Limits.
    "the largest number is a limit": (
        "MergeClamps", model("g (float[1, 2] x) => (float[1, 2] y) { d = Add(x, x) m = Max(d, k) y = Softmax(m) }",
                             k=-LARGEST), {"x": np.full((1, 2), -3e38, np.float32)}),
    "a Clip without its upper limit has one": (
        "MergeClamps", model("g (float[3] x) => (float[3] y) { y = Clip(x, k) }", k=np.float32(0)),
        {"x": f32(np.inf, -np.inf, np.nan)}),
    "a limit of infinity": (
        "MergeClamps", model("g (float[2] x) => (float[2] y) { y = Max(x, k) }",
              k=np.float32(np.inf)), {"x": f32(1, 2)}),
    "minus infinity below a Min": (
        "MergeClamps", model("g (float[2] x) => (bool[2] y) { m = Min(x, k) y = IsInf(m) }", k=np.float32(5)),
        {"x": f32(-np.inf, 2)}),
    "infinity above a Max of an old opset": (
        "MergeClamps", model("g (float[2] x) => (float[2] y) { y = Max(x, k) }",
              opset=9, ir_version=5, k=np.float32(5)),
        {"x": f32(np.inf, 2)}),
    # Decisions.
    "a quotient behind which a Floor decides": (
        "UseAddAndMul", model("g (float[1] x) => (float[1] y) { d = Div(x, k) r = Relu(d) y = Floor(r) }",
              k=np.float32(41)),
        {"x": f32(41)}),
    "a quotient of which a body decides": (
        "UseAddAndMul",
        model("""g (float[1] x, bool c) => (float[1] y) { d = Div(x, k)
              y = If(c) <then_branch = a () => (p) { r = Relu(d) p = Floor(r) },
                         else_branch = b () => (q) { q = Neg(d) }> }""",
              k=np.float32(41)), {"x": f32(41), "c": np.array(True)}),
    "factors in front of whole numbers": (
        "MergeScalars", model("g (float[1] x) => (int64[1] y) { a = Mul(x, k) b = Mul(a, j) y = Cast<to = 7>(b) }",
                              k=np.float32(1 / 9), j=np.float32(21)), {"x": f32(27)}),
    "a scale behind which an ArgMax decides": (
        "FoldScalesIntoProducts FuseBatchNorm",
        model("g (float[1, 2] x) => (int64[1, 1] y) { m = MatMul(x, w) a = Mul(m, k) y = ArgMax<axis = 1>(a) }",
              w=f32(1.7861065, 1.7861066, 0, 0).reshape(2, 2), k=np.float32(0.2645693)),
        {"x": f32(1.5944831, 0).reshape(1, 2)}),
    # Shapes.
    "PRelu broadcasts its slope alone": (
        "DropExpands", model("g (float[1] x, float[4] s) => (float[4] y) { e = Expand(x, k) y = PRelu(e, s) }",
                             k=np.array([4])), {"x": f32(-1), "s": f32(1, 2, 3, 4)}),
    "PRelu of half precision": (
        "DropExpands", model("g (float16[3] x) => (float16[2, 3] y) { e = Expand(x, k) y = PRelu(e, s) }",
                             k=np.array([2, 3]), s=np.arange(6).reshape(2, 3).astype(HALF)),
        {"x": np.array([-1, 1, -2], HALF)}),
    "the slope of a PRelu is expanded in vain": (
        "DropExpands", model("g (float[2, 3] x, float[1] s) => (float[2, 3] y) { e = Expand(s, k) y = PRelu(x, e) }",
                             k=np.array([2, 3])), {"x": image(2, 3), "s": f32(0.5)}),
    # What the schema says at an opset.
    "Gemm needs a bias": (
        "FoldGemmFactors", model("g (float[1, 2] x) => (float[1, 2] y) { y = Gemm<beta = 0.0>(x, w, b) }", opset=9,
                                 ir_version=5, w=np.eye(2, dtype=np.float32), b=f32(1, 1)), {"x": image(1, 2)}),
    "DepthToSpace has no mode": (
        "ConvolveTransposed",
        model("g (float[1, 3, 4, 4] x) => (float[1, 1, 8, 8] y) "
              "{ y = ConvTranspose<kernel_shape = [2, 2], strides = [2, 2]>(x, w) }", opset=10, ir_version=5,
              w=image(3, 1, 2, 2)), {"x": image(1, 3, 4, 4)}),
    "a scale for each value": (
        "FoldIntoBatchNorm",
        model("g (float[1, 2, 2, 2] x) => (float[1, 2, 2, 2] y) { n = BatchNormalization<spatial = 0>(x, s, b, m, v) "
              "y = Mul(n, k) }", opset=8, ir_version=4, k=f32(1, 10).reshape(2, 1, 1), **WIDE_NORM),
        {"x": image(1, 2, 2, 2)}),
    "a shift behind a mean so large that both add up to rounding": (
        "FoldIntoBatchNorm",
        model("g (float[1, 2, 1, 1] x) => (float[1, 2, 1, 1] y) "
              "{ n = BatchNormalization(x, s, b, m, v) y = Add(n, c) }",
              c=np.float32(0.6), **NORM | {"m": f32(1e20, 0)}), {"x": f32(1e20, 1).reshape(1, 2, 1, 1)}),
    "two normalizations of other sizes": (
        "FoldIntoBatchNorm",
        model("g (float[1, 3, 2] x) => (float[1, 3, 2] y) { n = BatchNormalization<spatial = 0>(x, s, s, s, s) "
              "y = BatchNormalization(n, t, t, t, t) }", opset=8, ir_version=4,
              s=image(3, 2) ** 2 + 1, t=image(3) ** 2 + 1),
        {"x": image(1, 3, 2)}),
    "a scale for each value behind a product": (
        "FuseBatchNorm",
        model("g (float[1, 2, 1, 1] x) => (float[1, 2, 1, 1] y) { c = Conv(x, w) "
              "y = BatchNormalization<spatial = 0>(c, s, b, m, v) }", opset=8, ir_version=4,
              w=image(2, 2, 1, 1), **{name: array.reshape(2, 1, 1) for name, array in NORM.items()}),
        {"x": image(1, 2, 1, 1)}),
    # Kernels.
    "LeakyRelu of double precision": (
        "UseLeakyRelu",
        model("g (double[2] x) => (double[2] y) { r = Relu(x) m = Min(x, z) t = Mul(m, s) y = Add(r, t) }", opset=19,
              ir_version=9, z=np.float64(0), s=np.float64(0.5)), {"x": np.array([1.0, -2.0])}),
    "Clip of double precision of an old opset": (
        "MergeClamps", model("g (double[2] x) => (double[2] y) { m = Min(x, k) y = Relu(m) }", opset=8, ir_version=4,
                             k=np.float64(1)), {"x": np.array([3.0, -2.0])}),
    "a clamp of 16 bits that rounds in front of a decision": (
        "MergeClamps", model("g (float16[1, 1, 2, 2] x) => (int64[1, 1, 1, 1] y) "
                             "{ a = AveragePool<kernel_shape = [2, 2]>(x) m = Max(a, z) y = Cast<to = 7>(m) }",
                             z=np.float16(0)),
        {"x": np.array([[[[8872, 8872], [8872, 8880]]]], HALF)}),
    # Scopes.
    "an output of the graph that is constant": (
        "FoldConstants",
        model("""g (float[2] x, bool c) => (float t, float[2] y) { t = Add(one, two)
              y = If(c) <then_branch = a () => (float[2] p) { z = Clip(edge, t) p = Add(z, x) },
                         else_branch = b () => (float[2] q) { q = Neg(x) }> }""",
              one=np.float32(1), two=np.float32(2), edge=f32(0, 5)), {"x": f32(0, 0), "c": np.array(True)}),
    "what is constant in the graph around": (
        "FoldConstants",
        model("""g (float[2] x, bool c) => (float[2] y) { t = Add(one, two) u = Mul(t, two)
              y = If(c) <then_branch = a () => (float[2] p) { z = Add(u, t) p = Add(z, x) },
                         else_branch = b () => (float[2] q) { q = Mul(x, t) }> }""",
              one=np.float32(1), two=np.float32(2)), {"x": f32(1, 2), "c": np.array(True)}),
    # What a match reads may be made in it.
    "a root that is read again": (
        "DivideBySquareRoot", model("g (float[2] x) => (float[2] y) { s = Sqrt(x) r = Reciprocal(s) y = Mul(r, s) }"),
        {"x": f32(4, 9)}),
    "a scaled tensor that is scaled again": (
        "MergeScalesOfProduct", model("g (float[2, 2] x) => (float[2, 2] y) "
              "{ m = Mul(x, k) n = Mul(m, j) y = MatMul(n, m) }",
                                      k=np.float32(0.5), j=np.float32(3)), {"x": image(2, 2)}),
}  # fmt: skip


@pytest.mark.parametrize("title", CASES)
def test_a_step_changes_nothing_but_rounding(title: str) -> None:
    names, made, feed = CASES[title]
    with np.errstate(all="ignore"):
        expected = outputs(made, feed)
        same(outputs(apply(names, made), feed), expected)
        same(outputs(apply("canonical", made), feed), expected)


def test_widening_keeps_what_rounds_in_front_of_a_decision() -> None:
    made = model(
        """g (float[3] x) => (int64[3] y, float16[3] z) { h = Cast<to = 10>(x) m = Mul(h, k) y = Cast<to = 7>(h)
        z = Add(m, h) f = Floor(h) }""",
        k=np.array(2, HALF),
    )
    feed = {"x": f32(2048.9, 0.99999, -3)}
    widened = apply("WidenFloats", made)
    same(outputs(widened, feed), outputs(made, feed))
    assert "Floor" in [node.op_type for node in widened.graph.node]


def test_the_product_behind_a_factor_is_the_same_however_its_weight_is_stored() -> None:
    text = "g (float[1, 2] x) => (float[1, 2] y) {{ r = Relu(x) m = Mul(r, k) {} y = MatMul(m, w) }}"
    weight, factor = np.array([[1, 2], [3, 4]], np.float32), f32(2, 3)
    plain = model(text.format(""), k=factor, w=weight)
    turned = model(text.format("w = Transpose<perm = [1, 0]>(t)"), k=factor, t=weight.T.copy())
    for made in (plain, turned):
        once = named_graph(apply("canonical", made))
        assert ops(once) == ["Relu", "MatMul"]
        assert ops(named_graph(apply("canonical", to_model(once)))) == ["Relu", "MatMul"]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("m = Mul(r, k) y = MatMul(m, w)", ["Mul", "MatMul"]),
        ("m = MatMul(r, w) y = Mul(m, k)", ["MatMul", "Mul"]),
        ("m = MatMul(r, w) n = Mul(m, k) y = Neg(n)", ["MatMul", "Mul", "Neg"]),
    ],
)
def test_a_weight_that_is_tied_to_a_table_keeps_its_values(body: str, expected: list[str]) -> None:
    made = model(
        f"""g (int64[1, 2] i, float[1, 4] x) => (float[1, 2, 4] e, float[1, 6] y)
        {{ e = Gather(t, i) r = Relu(x) w = Transpose<perm = [1, 0]>(t) {body} }}""",
        t=values(6, 4), k=np.array(0.5, np.float32),
    )  # fmt: skip
    once = apply("canonical", made)
    again = apply("canonical", once)
    assert [node.op_type for node in again.graph.node] == ["Gather", "Relu", *expected]


def test_denormal_weights_stay_if_nothing_larger_is_beside_them() -> None:
    made = model("g (float[1, 2] x) => (float[1, 1] y) { y = MatMul(x, w) }", w=f32(1e-40, 2e-40).reshape(2, 1))
    feed = {"x": f32(1e38, 1e38).reshape(1, 2)}
    same(outputs(apply("FlushDenormals", made), feed), outputs(made, feed))


def test_a_dropout_in_training_mode_of_an_old_opset_stays() -> None:
    graph = named_graph(model("g (float[2] x) => (float[2] y) { d = Dropout(x) y = Neg(d) }", opset=6, ir_version=3))
    ((_, reason),) = PASSES["DropNoOps"]().apply(graph).skipped
    assert reason == "rules are for opset 7 and later, to which UpgradeOpset converts a model"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("factor", [np.inf, np.nan, 0.0])
def test_constants_that_are_no_numbers_change_nothing(factor: float) -> None:
    made = model(
        """g (float[1, 2] x) => (float[1, 2] y, float[1, 2] z, float[1, 2] u) {
        m = MatMul(x, w) y = Mul(m, k) a = Mul(x, k) b = Mul(a, nil) z = Relu(b)
        n = LayerNormalization<axis = -1>(x, nils, nils) u = Mul(n, k) }""",
        w=f32(1, 0, 0, np.inf).reshape(2, 2), k=np.float32(factor), nil=np.float32(0), nils=f32(0, 0),
    )  # fmt: skip
    feed = {"x": f32(1, 2).reshape(1, 2)}
    same(outputs(apply("canonical", made), feed), outputs(made, feed))
