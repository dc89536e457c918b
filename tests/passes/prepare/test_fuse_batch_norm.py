"""FuseBatchNorm folds exactly what is one factor and one shift for each channel, and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_zoo import Array, batch_norm, difference, model, node_named, nodes, ops, outputs, sample, values, variances
from onnx import ModelProto

from onnxq.graph import Changes, Graph, Pipeline
from onnxq.modelfile import as_graph
from onnxq.onnx_tools import infer_shapes
from onnxq.passes import DropNoOps, FuseBatchNorm, LiftConstants, NameNodes


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
    return dict(changes.left)


def test_leaves_a_producer_with_two_consumers() -> None:
    made = model(
        f"""g (float[N, 4, 5, 5] x) => (float[N, 6, 3, 3] y, float[N, 6, 3, 3] z) {{
            [conv] a = Conv(x, w)  [next] y = {BATCH_NORM}  z = Relu(a)
        }}""",
        w=values(6, 4, 3, 3), **PARAMETERS,
    )  # fmt: skip
    assert left(made) == {"next": "conv has another consumer"}


def test_leaves_a_producer_whose_result_is_a_graph_output() -> None:
    made = conv(2, BATCH_NORM, **PARAMETERS)
    made.graph.output.add(name="a").type.CopyFrom(made.graph.output[0].type)
    assert left(made) == {"next": "conv has another consumer"}


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
    assert left(made) == {"next": "the weight of conv is not constant"}


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
    assert FuseBatchNorm().apply(graph) == Changes((), (("next", "the weight or bias of conv would not be finite"),))


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
    assert changes == Changes((), (("next", "conv stands in the graph around it"),))
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
@settings(max_examples=25, deadline=None)
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
