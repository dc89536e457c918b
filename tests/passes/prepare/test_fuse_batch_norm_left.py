"""What FuseBatchNorm leaves, and why."""

from __future__ import annotations

import numpy as np
import pytest
from model_texts import batch_norm, model, node_named, nodes, ops, values, variances
from normalized_products import BATCH_NORM, PARAMETERS, conv, dot, fuse
from onnx import ModelProto

from onnxq.ir import as_graph
from onnxq.passes import FuseBatchNorm
from onnxq.rewrite import Changes


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
