"""Predicates under which a rewrite is sound."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from model_texts import model, named_graph, node_named
from onnx import ModelProto, helper, numpy_helper

from onnxq.errors import ModelError
from onnxq.ir import Node, Variable, as_graph, constant
from onnxq.rewrite import OpsetPatternBuilder
from onnxq.rewrite.patterns import find
from onnxq.rewrite.soundness import (
    Uses,
    affine_of,
    has_kernel,
    keeps_digits,
    may_widen,
    rank,
    reduces_last_axis,
    stays_in_range,
    stored,
)
from onnxq.runtime.sessions import open_session

# Soundness ------------------------------------------------------------------------------------------------------------

LARGEST = float(np.finfo(np.float32).max)
DENORMAL = 1e-40


@pytest.mark.parametrize(
    ("factors", "dtype", "holds"),
    [
        (([0.5, 2.0], 3.0), np.float32, True),
        (([1e30], 1e30), np.float32, False),
        (([1e30], 1e30), np.float64, True),
        (([300.0], 300.0), np.float16, False),
        (([1e-20], 1e-20), np.float32, False),
        (([1.0, 1e-30], 1e-10), np.float32, False),
        (([1e-3], 1e-3), np.float16, False),
        (([1e-200], 1e-200), np.float64, False),
        (([0.0, 1.0], 1e-10), np.float32, True),
        (([1.0], 0.0), np.float32, True),
        # What was denormal before may stay so.
        (([DENORMAL, 1.0], 0.5), np.float32, True),
        (([np.nan], 1.0), np.float32, False),
        (([np.inf], 0.5), np.float32, False),
    ],
)
def test_a_product_is_stored_if_it_is_finite_and_normal(factors: Any, dtype: type, holds: bool) -> None:
    first, second = (np.asarray(factor, np.float64) for factor in factors)
    made = stored(first * second, dtype, first, second)
    assert (made is not None) == holds
    if made is not None:
        assert made.dtype == dtype
        np.testing.assert_array_equal(made, (first * second).astype(dtype))


def test_a_sum_is_stored_if_it_is_finite() -> None:
    assert stored([1e-40], np.float32) is not None
    assert stored([4e38], np.float32) is None


@pytest.mark.parametrize(
    ("factor", "dtype", "stays"),
    [
        (2.0**32, np.float32, True),
        (2.0**33, np.float32, False),
        (-(2.0**-32), np.float32, True),
        (2.0**-33, np.float32, False),
        (16, np.float16, True),
        (1 / 32, np.float16, False),
        (1e50, np.float64, True),
        (0, np.float16, True),
        (np.nan, np.float32, False),
        (-np.inf, np.float32, False),
    ],
)
def test_factors_near_1_stay_in_range(factor: float, dtype: type, stays: bool) -> None:
    assert stays_in_range([1.0, factor], dtype) == stays


def test_shifts_that_take_digits() -> None:
    assert keeps_digits([-4.0], np.float16)
    assert not keeps_digits([8.0], np.float16)
    assert keeps_digits([1e8], np.float64)


def norm(**attributes: Any) -> Node:
    parameters = [constant(name, np.array(values, np.float32)) for name, values in
                  {"s": [2, 3], "b": [1, 0], "m": [4, 0], "v": [4, 1]}.items()]  # fmt: skip
    return Node("BatchNormalization", "n", attributes, [Variable("x"), *parameters], [Variable("y")])


def test_the_affine_map_of_a_normalization() -> None:
    factor, shift = affine_of(norm(epsilon=0.0))
    np.testing.assert_allclose([factor, shift], [[1, 3], [-3, 0]])


def test_a_normalization_without_one() -> None:
    assert affine_of(norm(training_mode=1)) == "it is in training mode"
    assert affine_of(norm(spatial=0)) == "it has a scale for each value"
    computed = norm()
    computed.inputs[3] = Variable("m")
    assert affine_of(computed) == "its parameters are not constant"
    square = norm()
    for index in range(1, 5):
        square.inputs[index] = constant(f"p{index}", np.ones((2, 2), np.float32))
    assert affine_of(square) == "its parameters are no vectors of one length"


DECIDING = [
    "y = Floor(d)",
    "r = Relu(d) y = Ceil(r)",
    "a = Add(d, x) b = Mul(a, k) c = Reshape(b, t) y = Round(c)",
    "s = Softmax(d) y = ArgMax(s)",
    "y = Cast<to = 7>(d)",
    "h = Cast<to = 10>(d) y = Cast<to = 9>(h)",
    "g = Greater(d, k) y = Where(g, x, d)",
    "e = Exp(d) y = Less(e, x)",
    "c = Clip(d, k) m = Neg(c) y = NonZero(m)",
    "p = Concat<axis = 0>(d, x) y, i = TopK(p, one)",
    "y = QuantizeLinear(d, k)",
    "y = Sign(d)",
    "y = Mod<fmod = 1>(d, k)",
    "y = ThresholdedRelu(d)",
    "s = CumSum(d, one) y = Floor(s)",
    "s = ReduceProd(d) a = Asinh(s) b = Sinh(a) c = Tan(b) y = Round(c)",
    "r = Reshape(d, t) p = LpPool<kernel_shape = [1]>(r) y = Ceil(p)",
    "s = SequenceEmpty() q = SequenceInsert(s, d) e = SequenceAt(q, n) y = Floor(e)",
    "g = com.microsoft.Gelu(d) h = com.microsoft.FastGelu(g) q = com.microsoft.QuickGelu(h) y = Floor(q)",
    "y = com.microsoft.QuantizeLinear(d, k, z)",
    "y = ai.onnx.ml.Binarizer(d)",
    "r = Relu(d) y = my.own.Operator(x, r)",
    "y = com.microsoft.Unique(d)",
    "o = Optional(d) e = OptionalGetElement(o) y = Floor(e)",
    "y = CastLike(d, n)",
    "c = my.own.Operator(x) y = CastLike(d, c)",
    "y = OneHot(d, n, x)",
    'y = GridSample<mode = "nearest">(x, d)',
    'y = Resize<mode = "nearest">(x, , d)',
    "y = MaxRoiPool<pooled_shape = [1, 1]>(x, d)",
    "c = Less(d, z) y = If(c) <then_branch = a () => (p) { p = Neg(x) }, else_branch = b () => (q) { q = Abs(x) }>",
    "y = If(f) <then_branch = a () => (p) { p = Floor(d) }, else_branch = b () => (q) { q = Abs(x) }>",
    "v = If(f) <then_branch = a () => (p) { p = Neg(d) }, else_branch = b () => (q) { q = Abs(x) }> y = Floor(v)",
    "v = Loop(n, , d) <body = l (i, c, s) => (c2, s2) { c2 = Identity(c) s2 = Neg(s) }> y = Floor(v)",
    "y = Loop(n, , d) <body = l (i, c, s) => (c2, s2) { c2 = Identity(c) s2 = Floor(s) }>",
    "y = Loop(n, , x) <body = l (i, c, s) => (c2, s2) { c2 = Less(z, d) s2 = Neg(s) }>",
]
NOT_DECIDING = [
    "y = Relu(d)",
    "y = MatMul(d, w)",
    "m = MatMul(d, w) y = Floor(m)",
    "s = Shape(d) y = Cast<to = 1>(s)",
    "y = IsNaN(d)",
    "y = Cast<to = 11>(d)",
    "h = Cast<to = 10>(d) y = Cast<to = 1>(h)",
    "y = Where(f, x, d)",
    'y = GridSample<mode = "nearest">(d, x)',
    "y = GridSample(x, d)",
    'y = Resize<mode = "nearest">(d, , x)',
    "g = com.microsoft.Attention(d, w) y = Floor(g)",
    "g = com.microsoft.MatMulNBits(d, w, k) y = Floor(g)",
    "c = my.own.Operator(x) y = Add(d, c)",
    "y = If(f) <then_branch = a () => (p) { p = Neg(d) }, else_branch = b () => (q) { q = Floor(x) }>",
    "v, u = If(f) <then_branch = a () => (p, r) { p = Neg(d) r = Neg(x) }, else_branch = b () => (q, o) "
    "{ q = Abs(x) o = Abs(x) }> y = Floor(u)",
]


def with_quotient(body: str) -> Any:
    inputs = "float[1, 4] x, float[] k, float[4, 4] w, int64[2] t, int64[1] one, float[] z, bool f, int64[] n"
    return named_graph(model(f"g ({inputs}) => (y) {{ [quotient] d = Div(x, k) {body} }}"))


@pytest.mark.parametrize(
    ("body", "decides"), [*((body, True) for body in DECIDING), *((body, False) for body in NOT_DECIDING)]
)
def test_what_reaches_a_discrete_operator(body: str, decides: bool) -> None:
    graph = with_quotient(body)
    (made,) = node_named(graph, "quotient").outputs
    assert Uses(graph).decides([made]) == decides


def test_tensors_made_later_are_followed() -> None:
    graph = with_quotient("r = Relu(d) y = Ceil(r)")
    uses = Uses(graph)
    assert not uses.decides([graph.outputs[0]])
    late = Variable("late")
    later = Variable("later")
    Node("Neg", "n", {}, [late], [later])
    relu = next(node for node in graph.nodes if node.op == "Relu")
    assert not uses.decides([late])
    relu.inputs[0] = later
    assert uses.decides([late])


def test_long_chains_are_followed_without_recursion() -> None:
    chain = " ".join(f"t{index + 1} = Neg(t{index})" for index in range(3000))
    graph = named_graph(model(f"g (float[4] t0) => (float[4] y) {{ {chain} y = Floor(t3000) }}"))
    uses = Uses(graph)
    assert all(uses.decides(node.outputs) for node in graph.nodes[:-1])


def test_matrices_of_the_extents_of_a_table() -> None:
    made = model(
        "g (int64[2] i, float[2, 4] x) => (float[2, 4] r, float[2, 6] y) { r = Gather(t, i) y = MatMul(x, w) }",
        t=np.ones((6, 4), np.float32), w=np.ones((4, 6), np.float32),
    )  # fmt: skip
    uses = Uses(named_graph(made))
    assert uses.is_like_a_table(constant("w", np.ones((4, 6))))
    assert not uses.is_like_a_table(constant("w", np.ones((4, 7))))


# Each operator of the table with what it reads, and the opset from which on it is made.
KERNELS = {
    "AveragePool": ([(1, 2, 4, 4)], {"kernel_shape": [2, 2]}, 7),
    "Clip": ([(2, 2), ()], {}, 11),
    "Conv": ([(1, 2, 4, 4), (2, 2, 1, 1)], {}, 7),
    "ConvTranspose": ([(1, 2, 4, 4), (2, 2, 1, 1)], {}, 7),
    "Erf": ([(2,)], {}, 9),
    "Gelu": ([(2,)], {}, 20),
    "Gemm": ([(2, 2), (2, 2), (2,)], {}, 7),
    "GlobalAveragePool": ([(1, 2, 4, 4)], {}, 7),
    "HardSigmoid": ([(2,)], {}, 7),
    "HardSwish": ([(2,)], {}, 14),
    "LayerNormalization": ([(2, 4), (4,)], {}, 17),
    "LeakyRelu": ([(2,)], {}, 16),
    "MatMul": ([(2, 2), (2, 2)], {}, 9),
    "Max": ([(2,), ()], {}, 12),
    "Min": ([(2,), ()], {}, 12),
    "Mul": ([(2,), ()], {}, 7),
    "PRelu": ([(2,), (2,)], {}, 16),
    "Relu": ([(2,)], {}, 7),
}


def of_one_operator(op: str, dtype: type, opset: int) -> ModelProto:
    shapes, attributes, _ = KERNELS[op]
    arrays = [np.ones(shape, dtype) for shape in shapes]
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    names = [f"i{index}" for index in range(len(arrays))]
    graph = helper.make_graph(
        [helper.make_node(op, names, ["y"], **attributes)], "g",
        [helper.make_tensor_value_info("i0", kind, list(shapes[0]))], [helper.make_tensor_value_info("y", kind, None)],
        [numpy_helper.from_array(array, name) for array, name in zip(arrays[1:], names[1:], strict=True)],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("op", KERNELS)
def test_the_table_of_kernels_is_that_of_the_runtime(op: str, dtype: type) -> None:
    loads = {}
    for opset in range(KERNELS[op][2], 24):
        try:
            open_session(of_one_operator(op, dtype, opset), threads=1, optimize=False)
        except ModelError:
            loads[opset] = False
        else:
            loads[opset] = True
    claimed = {opset: has_kernel(op, np.dtype(dtype), opset) for opset in loads}
    assert not [opset for opset, there in claimed.items() if there and not loads[opset]]
    # Some versions in between have a kernel; an operator that is made at any version needs all.
    assert all(claimed.values()) == all(loads.values())


# Ranks ----------------------------------------------------------------------------------------------------------------


def test_rank_is_that_of_the_shape_where_there_is_one() -> None:
    assert rank(Variable("x", np.float32, ["N", None])) == 2
    assert rank(Variable("x", np.float32, [])) == 0
    assert rank(Variable("x", np.float32)) is None
    assert rank(constant("c", np.zeros((1, 2)))) == 2


@pytest.mark.parametrize(
    ("shape", "factor", "wider"),
    [("[3]", (1,), False), ("[3]", (1, 1), True), ("[]", (), False), ("[]", (1,), True), ("[2, 3]", (1, 1), False)],
)
def test_constants_of_more_dimensions_widen(shape: str, factor: tuple[int, ...], wider: bool) -> None:
    graph = as_graph(model(f"g (float{shape} x) => (float[a, b] y) {{ y = Mul(x, f) }}", f=np.ones(factor, np.float32)))
    found = find(OpsetPatternBuilder("Example").Mul(OpsetPatternBuilder("Example").any("x"), 1.0), graph.nodes[0], 17)
    assert found is not None
    assert may_widen(found.nodes, found.x) == wider
    found.x.shape = None
    assert may_widen(found.nodes, found.x) == bool(factor)


@pytest.mark.parametrize(
    ("axes", "last"), [("<axes = [-1]>", True), ("<axes = [2]>", True), ("<axes = [1]>", False), ("", False)]
)
def test_the_last_axis_is_the_only_one_reduced(axes: str, last: bool) -> None:
    graph = as_graph(model(f"g (float[2, 3, N] x) => (float[a, b, c] y) {{ y = ReduceMean {axes} (x) }}"))
    assert reduces_last_axis(graph.nodes[0]) == last
    text = "g (float[2, 3, N] x, int64[1] k) => (float[a, b, c] y, float[a, b, c] z) {"
    graph = as_graph(model(f"{text} y = ReduceMean(x, w) z = ReduceMean(x, k) }}", opset=18, w=np.array([-1])))
    assert [reduces_last_axis(node) for node in graph.nodes] == [True, False]
    graph.nodes[0].inputs[0].shape = None
    assert reduces_last_axis(graph.nodes[0])
