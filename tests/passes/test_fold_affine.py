"""Factors and shifts become a part of weights and biases."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_texts import (
    Array,
    apply_once,
    batch_norm,
    difference,
    model,
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
from onnxq.rewrite import Changes, Pipeline

# NormalizedProducts ---------------------------------------------------------------------------------------------------


def fuse(made: ModelProto) -> tuple[Graph, Changes]:
    """Apply the pass, and check that the outputs stay."""
    graph = as_graph(made)
    infer_shapes(graph)
    changes = FuseBatchNorm().apply(graph)
    inputs = sample(made)
    assert difference(outputs(graph, inputs), outputs(made, inputs)) <= 2e-6
    return graph, changes


def conv(rank: int, behind: str, groups: int = 1, bias: bool = True, **weights: Array) -> ModelProto:
    """A Conv of 4 to 6 channels over ``rank`` spatial axes with a node behind it."""
    space, terms = ", ".join(["5"] * rank), "x, w, b" if bias else "x, w"
    weights |= {"w": values(6, 4 // groups, *[3] * rank)} | ({"b": values(6)} if bias else {})
    return model(
        f"""g (float[N, 4, {space}] x) => (float[N, 6, {", ".join(["3"] * rank)}] y) {{
            [conv] a = Conv <group = {groups}> ({terms})  [next] y = {behind}
        }}""",
        **weights,
    )


def dot(product: str, behind: str, **weights: Array) -> ModelProto:
    return model(f"g (float[3, 4] x) => (float[3, 6] y) {{ [dot] a = {product} [next] y = {behind} }}", **weights)


BATCH_NORM = "BatchNormalization <epsilon = 0.01> (a, s, m, c, v)"
PARAMETERS = dict(zip("smcv", batch_norm("", 6).values(), strict=True))


# FuseBatchNorm --------------------------------------------------------------------------------------------------------


def test_the_producer_stands_for_what_is_folded_into_it() -> None:
    graph, _ = fuse(conv(2, "Mul(a, f)", f=values(6, 1, 1)))
    assert node_named(graph, "conv").origins == (("conv", "Conv"), ("next", "Mul"))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_folds_into_a_conv_of_any_rank_and_grouping(rank: int, groups: int, bias: bool) -> None:
    graph, changes = fuse(conv(rank, BATCH_NORM, groups, bias, **PARAMETERS))
    assert changes == Changes(("next",))
    assert ops(graph) == ["Conv"]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("groups", [1, 2])
def test_folds_into_a_transposed_conv_whose_groups_have_channels_of_their_own(groups: int, bias: bool) -> None:
    made = model(
        f"""g (float[N, 4, 5, 5] x) => (float[N, 6, 7, 7] y) {{
            [conv] a = ConvTranspose <group = {groups}> (x, w{", b" * bias})  [next] y = {BATCH_NORM}
        }}""",
        w=values(4, 6 // groups, 3, 3), b=values(6), **PARAMETERS,
    )  # fmt: skip
    graph, changes = fuse(made)
    assert changes.changed == ("next",)
    assert ops(graph) == ["ConvTranspose"]


@pytest.mark.parametrize("bias", [None, (6,), (1, 6)])
@pytest.mark.parametrize("transposed", [0, 1])
def test_folds_into_a_gemm_either_way_round(transposed: int, bias: tuple[int, ...] | None) -> None:
    weights = PARAMETERS | {"w": values(*((6, 4) if transposed else (4, 6)))} | ({"b": values(*bias)} if bias else {})
    made = dot(f"Gemm <transB = {transposed}> (x, w{', b' if bias else ''})", BATCH_NORM, **weights)
    graph, changes = fuse(made)
    assert changes.changed == ("next",)
    assert ops(graph) == ["Gemm"]


def test_the_shift_behind_a_matmul_becomes_an_add() -> None:
    graph, changes = fuse(dot("MatMul(x, w)", BATCH_NORM, w=values(4, 6), **PARAMETERS))
    assert changes.changed == ("next",)
    assert ops(graph) == ["MatMul", "Add"]
    assert node_named(graph, "next").op == "Add"


def test_no_add_is_left_behind_a_matmul_when_nothing_is_shifted() -> None:
    weights = PARAMETERS | {"m": np.zeros(6, np.float32), "c": np.zeros(6, np.float32)}
    graph, _ = fuse(dot("MatMul(x, w)", BATCH_NORM, w=values(4, 6), **weights))
    assert ops(graph) == ["MatMul"]


def test_omitted_outputs_of_the_normalization_do_not_stay_with_the_add() -> None:
    made = model(
        f"g (float[3, 4] x) => (float[3, 6] y) {{ [dot] a = MatMul(x, w) [next] y = {BATCH_NORM} }}",
        opset=9, w=values(4, 6), **PARAMETERS,
    )  # fmt: skip
    expected = outputs(made, sample(made))
    made.graph.node[1].output.extend([""] * 4)
    graph = as_graph(made)
    infer_shapes(graph)
    assert FuseBatchNorm().apply(graph).changed == ("next",)
    assert [tensor.name for tensor in node_named(graph, "next").outputs] == ["y"]
    assert difference(outputs(graph, sample(made)), expected) <= 2e-6


@pytest.mark.parametrize("shape", [(6, 1, 1), (1, 6, 1, 1), (), (1,), (1, 1, 1, 1)])
@pytest.mark.parametrize("behind", ["Mul(a, k)", "Mul(k, a)", "Div(a, k)", "Add(a, k)", "Add(k, a)", "Sub(a, k)"])
def test_folds_arithmetic_with_a_constant_per_channel(behind: str, shape: tuple[int, ...]) -> None:
    graph, changes = fuse(conv(2, behind, k=values(*shape) + np.float32(2)))
    assert changes.changed == ("next",)
    assert ops(graph) == ["Conv"]


@pytest.mark.parametrize("behind", ["Mul(a, k)", "Div(a, k)", "Add(k, a)", "Sub(a, k)"])
@pytest.mark.parametrize("product", ["Gemm(x, w, b)", "Gemm(x, w)"])
def test_folds_arithmetic_behind_a_gemm(product: str, behind: str) -> None:
    graph, changes = fuse(dot(product, behind, w=values(4, 6), b=values(6), k=values(6) + np.float32(2)))
    assert changes.changed == ("next",)
    assert ops(graph) == ["Gemm"]


def test_folds_a_factor_behind_a_matmul_and_leaves_a_shift() -> None:
    weights = {"w": values(4, 6), "k": values(6)}
    assert ops(fuse(dot("MatMul(x, w)", "Mul(a, k)", **weights))[0]) == ["MatMul"]
    graph, changes = fuse(dot("MatMul(x, w)", "Add(a, k)", **weights))
    assert not changes
    assert ops(graph) == ["MatMul", "Add"]


def test_a_node_that_shares_the_weight_keeps_the_original() -> None:
    made = model(
        f"""g (float[N, 4, 5, 5] x) => (float[N, 6, 3, 3] y, float[N, 6, 3, 3] z) {{
            [conv] a = Conv(x, w, b)  [next] y = {BATCH_NORM}  [other] z = Conv(x, w, b)
        }}""",
        w=values(6, 4, 3, 3), b=values(6), **PARAMETERS,
    )  # fmt: skip
    graph, changes = fuse(made)
    assert changes.changed == ("next",)
    assert [tensor.name for tensor in node_named(graph, "other").inputs] == ["x", "w", "b"]
    assert [tensor.name for tensor in node_named(graph, "conv").inputs] == ["x", "w.fused", "b.fused"]


def branch(then: str, outer: str = "h = Neg(x)") -> ModelProto:
    return model(
        f"""g (float[N, 4, 5, 5] x, bool which) => (float[N, 6, 3, 3] y) {{
            {outer}
            [branch] y = If (which) <
                then_branch = yes () => (float[N, 6, 3, 3] t) {{ {then} }},
                else_branch = no () => (float[N, 6, 3, 3] e) {{ e = Conv(x, w) }}>
        }}""",
        w=values(6, 4, 3, 3), **PARAMETERS,
    )  # fmt: skip


def test_folds_inside_bodies_with_captured_weights() -> None:
    made = branch(f"[conv] a = Conv(h, w) [next] t = {BATCH_NORM}")
    graph, changes = fuse(made)
    assert changes.changed == ("next",)
    assert ops(graph).count("BatchNormalization") == 0
    (kept,) = (node for node in nodes(graph, "Conv") if node.name != "conv")
    assert kept.inputs[1].name == "w"


def test_leaves_a_normalization_in_a_body_whose_producer_stands_outside() -> None:
    made = branch(f"[next] t = {BATCH_NORM}", outer="[conv] a = Conv(x, w)")
    graph, changes = fuse(made)
    assert changes == Changes((), (("next", "no product with constant weight and bias feeds it alone"),))
    assert "BatchNormalization" in ops(graph)


def test_folds_parameters_that_come_through_constant_and_identity_nodes() -> None:
    made = model(
        """g (float[N, 4, 5, 5] x) => (float[N, 2, 3, 3] y) {
            k = Constant <value_floats = [1.5, 2.5]> ()  s = Identity(k)  s2 = Identity(s)
            [conv] a = Conv(x, w)  i = Identity(a)
            [next] y = BatchNormalization(i, s2, k, m, v)
        }""",
        w=values(2, 4, 3, 3), m=values(2), v=np.ones(2, np.float32),
    )  # fmt: skip
    graph = as_graph(made)
    done = Pipeline((NameNodes(), LiftConstants(), DropNoOps(), FuseBatchNorm())).apply(graph)
    assert done[-1].changes.changed == ("next",)
    assert ops(graph) == ["Conv"]
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) <= 2e-6


def test_folds_a_whole_chain_into_one_node() -> None:
    made = model(
        f"""g (float[N, 4, 5, 5] x) => (float[N, 6, 3, 3] y) {{
            a = Conv(x, w)  d = Mul(a, k)  e = Add(d, j)  f = {BATCH_NORM.replace("(a", "(e")}  y = Div(f, k)
        }}""",
        w=values(6, 4, 3, 3), k=values(6, 1, 1) + np.float32(3), j=values(1), **PARAMETERS,
    )  # fmt: skip
    graph, changes = fuse(made)
    assert len(changes.changed) == 4
    assert ops(graph) == ["Conv"]


CHAIN: Any = st.lists(st.tuples(st.sampled_from(["Mul", "Div", "Add", "Sub"]), st.booleans()), min_size=1, max_size=6)


@given(chain=CHAIN, groups=st.sampled_from([1, 2, 4]), seed=st.integers(0, 1000))
@settings(max_examples=25)
def test_any_chain_of_scales_and_shifts_folds_into_the_conv(
    chain: list[tuple[str, bool]], groups: int, seed: int
) -> None:
    steps = "".join(f" t{i + 1} = {op}(t{i}, k{i})" for i, (op, _) in enumerate(chain))
    weights = {
        f"k{i}": np.float32(1.5) + values(*((8, 1, 1) if wide else ()), seed=seed + i, scale=0.1)
        for i, (_, wide) in enumerate(chain)
    }
    made = model(
        f"g (float[N, 8, 5, 5] x) => (float[N, 8, 3, 3] y) {{ t0 = Conv <group = {groups}> (x, w) {steps}"
        f" y = Neg(t{len(chain)}) }}",
        w=values(8, 8 // groups, 3, 3, seed=seed), **weights,
    )  # fmt: skip
    graph, changes = fuse(made)
    assert len(changes.changed) == len(chain)
    assert ops(graph) == ["Conv", "Neg"]


# What FuseBatchNorm leaves --------------------------------------------------------------------------------------------


def test_leaves_a_constant_divided_by_data_and_one_minus_data() -> None:
    for behind in ("Div(k, a)", "Sub(k, a)"):
        assert not fuse(conv(2, behind, k=values(6, 1, 1)))[1]


@pytest.mark.parametrize("shape", [(3,), (1, 3), (3, 1), (6, 1, 3), (2, 1, 1, 1), (1, 1, 1, 1, 1)])
def test_leaves_a_constant_that_varies_along_another_axis_or_adds_one(shape: tuple[int, ...]) -> None:
    made = conv(2, "Mul(a, k)", k=values(*shape))
    del made.graph.output[0].type.tensor_type.shape.dim[:]
    made.graph.output[0].type.tensor_type.ClearField("shape")
    assert not fuse(made)[1]


def test_leaves_a_constant_that_widens_one_channel_to_many() -> None:
    made = model(
        "g (float[N, 4, 5, 5] x) => (float[N, 6, 3, 3] y) { [conv] a = Conv(x, w) [next] y = Mul(a, k) }",
        w=values(1, 4, 3, 3), k=values(6, 1, 1),
    )  # fmt: skip
    assert not fuse(made)[1]


def test_leaves_a_constant_that_adds_an_axis_to_a_product_of_vectors() -> None:
    made = model("g (float[4] x) => (float[1, 6] y) { a = MatMul(x, w) y = Mul(a, k) }", w=values(4, 6), k=values(1, 6))
    assert not fuse(made)[1]


def test_leaves_division_by_zero() -> None:
    made = conv(2, "Div(a, k)", k=np.zeros((6, 1, 1), np.float32))
    assert not FuseBatchNorm().apply(as_graph(made))


def left(made: ModelProto) -> dict[str, str]:
    """The reasons why nodes stay, after checking that all of them do."""
    graph, changes = fuse(made)
    assert not changes
    assert ops(graph) == [node.op_type for node in made.graph.node]
    return dict(changes.skipped)


def test_leaves_a_producer_with_two_consumers() -> None:
    made = model(
        f"""g (float[N, 4, 5, 5] x) => (float[N, 6, 3, 3] y, float[N, 6, 3, 3] z) {{
            [conv] a = Conv(x, w)  [next] y = {BATCH_NORM}  z = Relu(a)
        }}""",
        w=values(6, 4, 3, 3), **PARAMETERS,
    )  # fmt: skip
    assert left(made) == {"next": "no product with constant weight and bias feeds it alone"}


def test_leaves_a_producer_whose_result_is_a_graph_output() -> None:
    made = conv(2, BATCH_NORM, **PARAMETERS)
    made.graph.output.add(name="a").type.CopyFrom(made.graph.output[0].type)
    assert left(made) == {"next": "no product with constant weight and bias feeds it alone"}


def test_leaves_training_mode() -> None:
    made = model(
        """g (float[N, 4, 5, 5] x) => (float[N, 6, 3, 3] y, float[6] c2, float[6] v2) {
            [conv] a = Conv(x, w)
            [next] y, c2, v2 = BatchNormalization <training_mode = 1> (a, s, m, c, v)
        }""",
        w=values(6, 4, 3, 3), **PARAMETERS,
    )  # fmt: skip
    assert left(made) == {"next": "it is in training mode"}


def test_leaves_a_weight_that_is_fed() -> None:
    made = model(
        f"""g (float[N, 4, 5, 5] x, float[6, 4, 3, 3] w) => (float[N, 6, 3, 3] y) {{
            [conv] a = Conv(x, w)  [next] y = {BATCH_NORM}
        }}""",
        **PARAMETERS,
    )
    assert left(made) == {"next": "no product with constant weight and bias feeds it alone"}


def test_leaves_parameters_that_are_computed() -> None:
    made = conv(2, "BatchNormalization (a, s, m, c, v)", **PARAMETERS)
    made.graph.node[1].input[1] = "t"
    made.graph.node.insert(0, model("g (float[1] x) => (float[1] t) { t = Exp(s) }").graph.node[0])
    assert left(made) == {"next": "its parameters are not constant"}


def test_leaves_a_gemm_that_scales_or_whose_bias_varies_by_row() -> None:
    weights = PARAMETERS | {"w": values(4, 6), "b": values(6, 1)}
    scaled = dot("Gemm <alpha = 2.0> (x, w)", BATCH_NORM, **weights)
    assert left(scaled) == {"next": "dot has alpha or beta"}
    by_row = model(
        f"g (float[6, 4] x) => (float[6, 6] y) {{ [dot] a = Gemm(x, w, b) [next] y = {BATCH_NORM} }}", **weights
    )
    assert left(by_row) == {"next": "the bias of dot is not one value for each channel"}


def test_leaves_a_matmul_whose_channels_are_not_the_second_axis() -> None:
    made = model(
        f"g (float[2, 6, 4] x) => (float[2, 6, 6] y) {{ [dot] a = MatMul(x, w) [next] y = {BATCH_NORM} }}",
        w=values(4, 6), **PARAMETERS,
    )  # fmt: skip
    assert left(made) == {"next": "its channel axis is not the last one"}


def test_leaves_what_would_overflow_the_weights_type() -> None:
    half = {name: array.astype(np.float16) for name, array in PARAMETERS.items()}
    made = model(
        f"""g (float16[N, 4, 5, 5] x) => (float16[N, 6, 3, 3] y) {{
            [conv] a = Conv(x, w)  [next] y = {BATCH_NORM}
        }}""",
        w=values(6, 4, 3, 3, dtype=np.float16, scale=100), **(half | {"s": np.full(6, 60_000, np.float16)}),
    )  # fmt: skip
    graph = as_graph(made)
    assert FuseBatchNorm().apply(graph) == Changes((), (("next", "its factors are too far from 1"),))


@pytest.mark.parametrize(
    ("producer", "weight", "bias"),
    [
        ("Gemm(x, w)", (8,), (8,)),
        ("Conv(x, w, b)", (8, 8, 1, 1), (8, 8, 1, 1)),
        ("Conv <group = 3> (x, w)", (8, 8, 1, 1), (8,)),
        ("ConvTranspose <group = 0> (x, w, b)", (8, 8, 1, 1), (8,)),
    ],
)
def test_what_only_a_damaged_model_has_is_left(producer: str, weight: tuple[int, ...], bias: tuple[int, ...]) -> None:
    made = model(
        f"g (float[4,8,1,1] x) => (float[4,8,1,1] y) {{ h = {producer} y = Mul(h, k) }}",
        w=values(*weight), b=values(*bias), k=values(1),
    )  # fmt: skip
    assert not FuseBatchNorm().apply(as_graph(made))


def test_parameters_that_differ_in_shape_are_left() -> None:
    made = model(
        "g (float[4,8,1,1] x) => (float[4,8,1,1] y) { h = Conv(x, w) y = BatchNormalization(h, s, b, m, v) }",
        w=values(8, 8, 1, 1), **{**batch_norm("", 8), "m": values(8, 4)},
    )  # fmt: skip
    assert not FuseBatchNorm().apply(as_graph(made))


@pytest.mark.parametrize("behind", ["Add(a, c)", "BatchNormalization(a, c, c, c, c)"])
@pytest.mark.parametrize("damaged", ["conv", "next"])
@pytest.mark.parametrize("inputs", [1, 7])
def test_leaves_nodes_with_a_wrong_number_of_inputs(behind: str, damaged: str, inputs: int) -> None:
    graph = as_graph(conv(2, behind, c=values(6, 1, 1) if "Add" in behind else variances(6)))
    node = node_named(graph, damaged)
    while len(node.inputs) > inputs:
        node.inputs.pop()
    while len(node.inputs) < inputs:
        node.inputs.append(node.inputs[-1])
    FuseBatchNorm().apply(graph)
    assert damaged in [node.name for node in nodes(graph)]


# FoldIntoBatchNorm ----------------------------------------------------------------------------------------------------

FOLD_INTO_BATCH_NORM_CONSTANTS = {
    "half": np.array(0.5, np.float32),
    "each": values(4, 1, 1),
    "wide": values(5),
    "none": np.zeros(4, np.float32),
}
NORM_IN_FRONT = "a = BatchNormalization(x, ps, pb, pm, pv)"


def fold_into_norm(behind: str, size: str = "N, 4, 5, 5") -> tuple[Graph, Changes]:
    used = {
        name: array
        for name, array in (FOLD_INTO_BATCH_NORM_CONSTANTS | batch_norm("q", 4)).items()
        if f", {name}" in behind
    }
    made = model(
        f"g (float[{size}] x) => (float[{size}] y) {{ {NORM_IN_FRONT} {behind} }}",
        **used,
        **batch_norm("p", 4),
    )
    graph = named_graph(made)
    changes = FoldIntoBatchNorm().apply(graph)
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 2e-6
    assert not FoldIntoBatchNorm().apply(graph)
    return graph, changes


@pytest.mark.parametrize(
    "behind",
    [
        "y = Mul(a, half)",
        "b = Mul(a, each) y = Add(b, each)",
        "y = BatchNormalization<epsilon = 0.01>(a, qs, qb, qm, qv)",
        "b = BatchNormalization(a, qs, qb, qm, qv) c = Mul(b, each) y = Add(c, half)",
    ],
)
def test_one_is_left(behind: str) -> None:
    assert ops(fold_into_norm(behind)[0]) == ["BatchNormalization"]


@pytest.mark.parametrize(
    ("behind", "reason"),
    [
        ("y = Mul(a, wide)", "its constant does not vary along the channels alone"),
        ("b = Mul(a, each) c = Add(b, a) y = Neg(c)", ""),
    ],
)
def test_fold_into_batch_norm_others_stay(behind: str, reason: str) -> None:
    graph, changes = fold_into_norm(behind)
    assert len(ops(graph)) == 1 + behind.count("=")
    assert [why for _, why in changes.skipped] == ([reason] if reason else [])


def test_a_scale_that_overflows_beside_its_deviation_stays() -> None:
    parts = batch_norm("p", 4) | {"ps": np.full(4, 2e35, np.float32), "pv": np.zeros(4, np.float32)}
    text = f"g (float[1,4,5,5] x) => (float[1,4,5,5] y) {{ {NORM_IN_FRONT} y = Mul(a, eight) }}"
    changes = FoldIntoBatchNorm().apply(named_graph(model(text, eight=np.array(8, np.float32), **parts)))
    assert [why for _, why in changes.skipped] == ["its scale or bias would leave the range"]


def test_data_of_unknown_rank_stays() -> None:
    made = model(
        f"g (float x) => (float y) {{ {NORM_IN_FRONT} y = Mul(a, each) }}",
        each=FOLD_INTO_BATCH_NORM_CONSTANTS["each"],
        **batch_norm("p", 4),
    )
    for info in (*made.graph.input, *made.graph.output):
        info.type.tensor_type.ClearField("shape")
    assert FoldIntoBatchNorm().apply(named_graph(made)).skipped[0][1] == "the type of its data is not known"


def test_the_default_of_epsilon_is_a_float32() -> None:
    parts = {name: array.astype(np.float64) for name, array in (batch_norm("p", 4) | batch_norm("q", 4)).items()}
    # Beside a small variance the last digits of epsilon show.
    parts["qv"] = np.full(4, 1e-4)
    body = f"{NORM_IN_FRONT} y = BatchNormalization(a, qs, qb, qm, qv)"
    text = f"g (double[2, 4, 5, 5] x) => (double[2, 4, 5, 5] y) {{ {body} }}"
    made = model(text, **parts)
    graph = named_graph(made)
    assert FoldIntoBatchNorm().apply(graph)
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 1e-12


# FoldIntoNextProduct --------------------------------------------------------------------------------------------------

FOLD_INTO_NEXT_PRODUCT_CONSTANTS = {
    "half": np.array(0.5, np.float32),
    "one": np.array(1, np.float32),
    "each": values(4, 1, 1),
    "last": values(4),
    "w": values(6, 4, 3, 3),
    "grouped": values(6, 2, 3, 3),
    "up": values(4, 3, 3, 3),
    "m": values(4, 5),
    "b": values(6),
    "d": values(5),
    "turned": values(5, 4),
    "square": values(4, 4, 1, 1),
    "column": values(2, 1),
    **batch_norm("p", 4),
}
NORM_OF_FOUR = "a = BatchNormalization(e, ps, pb, pm, pv)"


def image(body: str, front: str = "e = Exp(x)") -> ModelProto:
    return _model("N, 4, 8, 8", "N, C, H, W", f"{front} {body}")


def rows(body: str) -> ModelProto:
    return _model("N, 4", "N, 5", f"e = Exp(x) {body}")


def _model(data: str, result: str, body: str) -> ModelProto:
    used = {
        name: array
        for name, array in FOLD_INTO_NEXT_PRODUCT_CONSTANTS.items()
        if f", {name}" in body or f"({name}," in body
    }
    return model(f"g (float[{data}] x) => (float[{result}] y) {{ {body} }}", **used)


def fold_into_next(made: ModelProto) -> tuple[Graph, Changes]:
    graph = named_graph(made)
    changes = FoldIntoNextProduct().apply(graph)
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 2e-6
    assert not FoldIntoNextProduct().apply(graph)
    return graph, changes


@pytest.mark.parametrize(
    "made",
    [
        image("a = Mul(e, half) y = Conv<pads = [1, 1, 1, 1]>(a, w)"),
        image("a = Mul(each, e) y = Conv<pads = [1, 0, 1, 0]>(a, w, b)"),
        image("a = Mul(e, each) y = Conv<group = 2>(a, grouped, b)"),
        image("a = Add(e, each) y = Conv<group = 2>(a, grouped)"),
        image("a = Add(e, half) y = Conv(a, w, b)"),
        image(f"{NORM_OF_FOUR} y = Conv(a, w)"),
        image("a = Mul(e, each) y = ConvTranspose<group = 2>(a, up, b)"),
        rows("a = Mul(e, last) y = Gemm(a, m, d)"),
        rows("a = Mul(e, last) y = Gemm<alpha = 2.0, beta = 3.0>(a, m, d)"),
        rows("a = Add(e, last) y = Gemm(a, m, d)"),
        rows(f"{NORM_OF_FOUR} y = Gemm(a, m)"),
        rows("a = Mul(e, last) y = MatMul(a, m)"),
    ],
)
def test_it_becomes_a_part_of_the_weight(made: ModelProto) -> None:
    graph, changes = fold_into_next(made)
    assert ops(graph) == ["Exp", made.graph.node[-1].op_type]
    assert len(changes.changed) == 1


def test_a_transposed_weight() -> None:
    made = rows("a = Add(e, last) y = Gemm<transB = 1>(a, turned)")
    assert ops(fold_into_next(made)[0]) == ["Exp", "Gemm"]


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (image("a = Add(e, each) y = Conv<pads = [1, 1, 1, 1]>(a, w)"), "pads"),
        (image(f'{NORM_OF_FOUR} y = Conv<auto_pad = "SAME_UPPER">(a, w)'), "pads"),
        (image("a = Add(e, half) y = ConvTranspose(a, up)"), "would have to shift its border"),
        (image("a = Mul(e, half) k = Conv(a, w) l = Conv(e, w) y = Add(k, l)"), "others read the weight"),
        (image("a = Mul(c, half) y = Conv(a, w)", "c = ConvTranspose(x, square)"), "the node before can take it"),
        (
            rows("f = Erf(e) g0 = Add(f, one) h = Mul(e, g0) a = Mul(h, half) y = MatMul(a, m)"),
            "it is a part of Gelu",
        ),
        (rows("a = Add(e, last) y = Gemm<alpha = 2.0>(a, m, d)"), "has alpha or beta"),
    ],
)
def test_what_is_no_part_of_it_stays(made: ModelProto, reason: str) -> None:
    graph, changes = fold_into_next(made)
    assert not changes.changed
    assert reason in changes.skipped[0][1]
    assert len(nodes(graph)) == len(made.graph.node)


def test_a_constant_of_another_axis_stays() -> None:
    made = rows("a = Mul(e, column) y = Gemm(a, m)")
    assert "vary along the channels" in fold_into_next(made)[1].skipped[0][1]


def test_values_that_others_read_stay() -> None:
    graph, _ = fold_into_next(image("a = Mul(e, half) k = Conv(a, w) s = ReduceMax(a) y = Add(k, s)"))
    assert ops(graph) == ["Exp", "Mul", "Conv", "ReduceMax", "Add"]


@pytest.mark.parametrize(
    ("data", "body", "constants"),
    [
        ("1, 1, 8, 8", "a = Mul(e, s) y = Conv(a, w)", {"s": values(1, 4, 1, 1), "w": values(6, 4, 3, 3)}),
        ("N, C, 8, 8", "a = Mul(e, s) y = Conv(a, w)", {"s": values(1, 4, 1, 1), "w": values(6, 4, 3, 3)}),
        ("4, 8, 8", "a = Mul(e, s) y = Conv(a, w)", {"s": values(1, 4, 1, 1), "w": values(6, 4, 3, 3)}),
        ("N, 1", "a = Mul(e, s) y = MatMul(a, m)", {"s": values(4), "m": values(4, 5)}),
        ("N, 1", "a = Add(e, s) y = Gemm(a, m)", {"s": values(4), "m": values(4, 5)}),
    ],
)
def test_constants_that_make_the_channels_stay(data: str, body: str, constants: dict[str, np.ndarray]) -> None:
    made = model(f"g (float[{data}] x) => (y) {{ e = Exp(x) {body} }}", **constants)
    changes = FoldIntoNextProduct().apply(named_graph(made))
    assert not changes.changed
    assert changes.skipped[0][1] == "its data is not known to have these channels before"


# LiftChannelFactors ---------------------------------------------------------------------------------------------------

WEIGHTS = {"w": values(4, 3, 3, 3), "v": values(5, 3, 3, 3), "u": values(3, 2, 3, 3), "half": np.array(0.5, np.float32)}
JOINED = "p = Conv(x, w) q = Conv(x, v) j = Concat<axis = 1>(p, q)"
NORM_BEHIND = "BatchNormalization(j, ns, nb, nm, nv)"


def lift(body: str, channels: int) -> tuple[Graph, Changes]:
    norm = batch_norm("n", channels) | {"ns": variances(channels)}
    more = {"each": values(channels, 1, 1), "last": values(6), **norm}
    used = {name: array for name, array in (WEIGHTS | more).items() if f", {name}" in body or f"({name}" in body}
    made = model(f"g (float[N, 3, 8, 8] x) => (float[N, C, H, W] y) {{ {body} }}", **used)
    graph = named_graph(made)
    changes = LiftChannelFactors().apply(graph)
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 2e-6
    assert not LiftChannelFactors().apply(graph)
    FuseBatchNorm().apply(graph)
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 5e-6
    return graph, changes


@pytest.mark.parametrize("behind", [NORM_BEHIND, "Mul(j, each)", "Add(each, j)", "Mul(j, half)"])
def test_the_joined_take_their_parts(behind: str) -> None:
    graph, _ = lift(f"{JOINED} y = {behind}", 9)
    assert ops(graph) == ["Conv", "Conv", "Concat"]
    assert [tensor.name for tensor in graph.outputs] == ["y"]


@pytest.mark.parametrize("behind", [NORM_BEHIND, "Mul(j, half)", "Add(j, each)"])
@pytest.mark.parametrize(
    "pool",
    [
        "MaxPool<kernel_shape = [2, 2], pads = [1, 0, 0, 0]>(p)",
        "AveragePool<kernel_shape = [2, 2], pads = [1, 0, 0, 0]>(p)",
        "GlobalAveragePool(p)",
        "GlobalMaxPool(p)",
    ],
)
def test_the_pooled_takes_all(pool: str, behind: str) -> None:
    graph, _ = lift(f"p = ConvTranspose(x, u) j = {pool} y = {behind}", 2)
    assert len(ops(graph)) == 2


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            f"r = Relu(x) q = Conv<pads = [1, 1, 1, 1]>(x, v) j = Concat<axis = 1>(r, q) y = {NORM_BEHIND}",
            "not all that",
        ),
        (f"p = Conv(x, v) j = Concat<axis = 1>(p, p) k = {NORM_BEHIND} y = Add(k, j)", ""),
        (f"{JOINED} y = Mul(j, last)", "its constants do not vary along the channels alone"),
        (
            "p = Conv(x, v) j = MaxPool<kernel_shape = [2, 2]>(p) y = Mul(j, each)",
            "not all of its factors are positive",
        ),
        (
            "p = Conv(x, v) j = AveragePool<kernel_shape = [2, 2], count_include_pad = 1>(p) y = Add(j, each)",
            " counts padding",
        ),
    ],
)
def test_lift_channel_factors_others_stay(body: str, reason: str) -> None:
    channels = 10 if "(p, p)" in body else 8 if "Relu" in body else 5
    _, changes = lift(body, channels)
    assert not changes.changed
    assert all(reason in why for _, why in changes.skipped)
    assert bool(changes.skipped) == bool(reason)


# FoldScalesIntoProducts -----------------------------------------------------------------------------------------------

ATTENTION = """g (float[2, N, 8] x) => (float[2, 2, N, N] y) {
    qm = MatMul(x, wq) q = Add(bq, qm) km = MatMul(x, wk) k = Add(km, bk)
    qr = Reshape(q, to) kr = Reshape(k, to)
    qt = Transpose <perm = [0, 2, 1, 3]> (qr) kt = Transpose <perm = [0, 2, 3, 1]> (kr)
    s = MatMul(qt, kt) d = Div(s, root) y = Softmax(d) }"""


def attention(text: str = ATTENTION) -> ModelProto:
    return model(
        text, wq=values(8, 8), bq=values(8), wk=values(8, 8, seed=1), bk=values(8, seed=1),
        to=np.array([0, 0, 2, 4]), root=np.array(2, np.float32),
    )  # fmt: skip


def test_the_scale_of_an_attention_goes_into_the_query() -> None:
    made = attention()
    graph = named_graph(made)
    apply_once(FoldScalesIntoProducts(), graph)
    assert "Div" not in ops(graph)
    assert np.allclose(graph.nodes[0].inputs[1].values, values(8, 8) / 2)
    assert np.allclose(graph.nodes[1].inputs[0].values, values(8) / 2)
    for seed in (0, 1):
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) < 2e-6


def test_tensors_whose_values_change_take_other_names() -> None:
    made = attention()
    graph = named_graph(made)
    FoldScalesIntoProducts().apply(graph)
    names = [node.outputs[0].name for node in graph.nodes]
    assert {"k", "km", "kr", "kt"} < set(names)
    assert not {"q", "qm", "qr", "qt", "s"} & set(names)
    # The product now has the value of the Div, and its name.
    assert names[-2:] == ["d", "y"]


def test_or_into_the_key_where_others_read_the_query() -> None:
    made = attention(ATTENTION.replace("d = Div", "other = Neg(q) d = Div"))
    graph = named_graph(made)
    apply_once(FoldScalesIntoProducts(), graph)
    assert "Div" not in ops(graph)
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 2e-6


@pytest.mark.parametrize(
    "text",
    [
        "p = Gemm(x, w, b) r = Reshape(p, to) m = Mul(f, r) y = Neg(m)",
        "p = Gemm <alpha = 3.0, beta = 2.0> (x, w, b) r = Reshape(p, to) m = Mul(f, r) y = Neg(m)",
        "p = MatMul(x, w) r = Reshape(p, to) m = Mul(r, f) n = Mul(m, f) y = Neg(n)",
        "p = MatMul(w, x) r = Reshape(p, to) m = Div(r, f) y = Neg(m)",
    ],
)
def test_every_kind_of_product_takes_it(text: str) -> None:
    made = model(
        f"g (float[8, 8] x) => (float[2, 4, 8] y) {{ {text} }}",
        w=values(8, 8), b=values(8), f=np.array(0.3, np.float32), to=np.array([2, 4, 8]),
    )  # fmt: skip
    graph = named_graph(made)
    apply_once(FoldScalesIntoProducts(), graph)
    assert not {"Mul", "Div"} & set(ops(graph))
    for seed in (0, 1):
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) < 2e-6


@pytest.mark.parametrize(
    "text",
    [
        "p = MatMul(x, w) r = Neg(p) m = Mul(r, f) y = Neg(m)",
        "p = MatMul(x, w) r = Reshape(p, to) m = Mul(r, f) y = Add(m, r)",
        "p = MatMul(x, w) other = MatMul(w, x) r = Reshape(p, to) m = Mul(r, f) y = Neg(m)",
        "p = MatMul(x, w) r = Reshape(p, to) m = Mul(r, zero) y = Neg(m)",
        "p = MatMul(x, w) r = Reshape(p, to) m = Mul(r, wide) y = Neg(m)",
        "p = MatMul(x, w) r = Reshape(p, to) m = Div(f, r) y = Neg(m)",
        "p = MatMul(x, w) a = Add(p, x) r = Reshape(a, to) m = Mul(r, f) y = Neg(m)",
        "p = MatMul(x, w) r = Reshape(p, to) y = Mul(r, f)",
    ],
)
def test_what_others_read_or_cannot_be_scaled_stays(text: str) -> None:
    made = model(
        f"g (float[8, 8] x) => (float[a, b, c] y) {{ {text} }}",
        w=values(8, 8), f=np.array(0.3, np.float32), zero=np.array(0, np.float32),
        wide=np.ones((1, 1, 1, 1), np.float32), to=np.array([2, 4, 8]),
    )  # fmt: skip
    assert not FoldScalesIntoProducts().apply(named_graph(made))


def test_works_in_a_body_and_not_across_its_border() -> None:
    made = model(
        """g (float[2, 8] x, bool k) => (float[8, 2] y) {
            p = MatMul(x, w) t = Transpose(p)
            y = If (k) <
                then_branch = yes () => (float[8, 2] b) {
                    m = MatMul(x, v) r = Transpose(m) a = Mul(r, f) b = Neg(a) },
                else_branch = no () => (float[8, 2] d) { c = Mul(t, f) d = Neg(c) }> }""",
        w=values(8, 8), v=values(8, 8, seed=1), f=np.array(0.5, np.float32),
    )  # fmt: skip
    graph = named_graph(made)
    assert len(apply_once(FoldScalesIntoProducts(), graph).changed) == 1
    assert ops(graph) == ["MatMul", "Transpose", "If", "MatMul", "Transpose", "Neg", "Mul", "Neg"]
    for seed in (0, 1):
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) < 2e-6


# FoldGemmFactors ------------------------------------------------------------------------------------------------------


def gemm(attributes: str, *, data: str = "N, 8", weight: tuple[int, ...] = (8, 4), bias: str = "b") -> ModelProto:
    return model(
        f"g (float[{data}] x, float[4] k) => (float[N, 4] y) {{ y = Gemm <{attributes}> (x, w, {bias}) }}",
        w=values(*weight), b=values(4),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (gemm("alpha = 0.5"), ["Gemm"]),
        (gemm("beta = 0.25"), ["Gemm"]),
        (gemm("beta = 0.0"), ["Gemm"]),
        (gemm("beta = 0.0", bias="k"), ["Gemm"]),
        (gemm("alpha = 2.0, beta = 1.0", bias="k"), ["Gemm"]),
        (gemm("alpha = 2.0, beta = 3.0, transB = 1", weight=(4, 8)), ["Gemm"]),
        (gemm("alpha = 0.5, transA = 1", data="8, N"), ["Transpose", "Gemm"]),
        (gemm("transA = 1, transB = 1", data="8, N", weight=(4, 8)), ["Transpose", "Gemm"]),
    ],
)
def test_factors_go(made: ModelProto, expected: list[str]) -> None:
    graph = named_graph(made)
    apply_once(FoldGemmFactors(), graph)
    assert ops(graph) == expected
    assert set(graph.nodes[-1].attrs) <= {"transB"}
    for seed in (0, 1):
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) < 2e-6


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (gemm("beta = 0.5", bias="k"), "its beta scales a bias that is computed at run time"),
        (gemm("transB = 0"), "it has no alpha, beta or transA"),
    ],
)
def test_a_refusal_has_its_reason(made: ModelProto, reason: str) -> None:
    assert [found for _, found in FoldGemmFactors().apply(named_graph(made)).skipped] == [reason]


def test_a_table_that_is_looked_up_is_not_copied() -> None:
    made = model(
        """g (int64[N] i, float[8, 4] x) => (float[8, 6] y) {
            r = Gather(w, i) y = Gemm <alpha = 2.0, transB = 1> (x, w) }""",
        w=values(6, 4),
    )
    ((_, reason),) = FoldGemmFactors().apply(named_graph(made)).skipped
    assert reason == "its weight is a table that is looked up too"


# MergeScalesOfProduct -------------------------------------------------------------------------------------------------

TEXT = "g (TYPE[2, 3, 4] q, TYPE[2, 4, 3] k) => (TYPE[2, 3, 3] y) { a = Mul(q, s) b = Mul(s, k) y = MatMul(a, b) }"


def test_two_scales_become_one() -> None:
    made = model(TEXT.replace("TYPE", "float"), s=np.full(1, 0.35, np.float32))
    graph = named_graph(made)
    apply_once(MergeScalesOfProduct(), graph)
    assert ops(graph) == ["Mul", "MatMul"]
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 2e-6


@pytest.mark.parametrize(
    ("scale", "dtype", "reason"),
    [
        (1e-3, np.float16, "a scale is too far from 1"),
        (1e-10, np.float32, "a scale is too far from 1"),
        (1.5, np.float32, "neither of its scales makes its data smaller"),
    ],
)
def test_scales_that_may_leave_the_range_stay(scale: float, dtype: type, reason: str) -> None:
    made = model(TEXT.replace("TYPE", np.dtype(dtype).name.replace("32", "")), s=np.full(1, scale, dtype))
    assert [why for _, why in MergeScalesOfProduct().apply(named_graph(made)).skipped] == [reason]


def test_the_product_stays_in_range_where_it_did() -> None:
    made = model(TEXT.replace("TYPE", "float"), s=np.full(1, 0.35, np.float32))
    graph = named_graph(made)
    MergeScalesOfProduct().apply(graph)
    feed = {name: array * np.float32(2e19) for name, array in sample(made).items()}
    assert np.isfinite(outputs(made, feed)["y"]).all()
    assert difference(outputs(graph, feed), outputs(made, feed)) < 2e-6


def test_wide_scales_stay() -> None:
    made = model(TEXT.replace("TYPE", "float").replace("y)", "z)", 0), s=np.full((1, 1, 1, 1), 0.35, np.float32))
    ((_, reason),) = MergeScalesOfProduct().apply(named_graph(made)).skipped
    assert reason == "a scale may have more dimensions than its data"
