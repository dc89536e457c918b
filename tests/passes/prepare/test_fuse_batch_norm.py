"""FuseBatchNorm folds exactly what is one factor and one shift for each channel, and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_texts import difference, model, node_named, nodes, ops, outputs, sample, values
from normalized_products import BATCH_NORM, PARAMETERS, conv, dot, fuse
from onnx import ModelProto

from onnxq.ir import as_graph
from onnxq.onnx_api import infer_shapes
from onnxq.passes import DropNoOps, FuseBatchNorm, LiftConstants, NameNodes
from onnxq.rewrite import Changes, Pipeline


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
