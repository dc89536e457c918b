"""FoldIntoNextProduct moves factors and shifts into the weights behind them."""

from __future__ import annotations

import numpy as np
import pytest
from model_texts import batch_norm, difference, model, named_graph, nodes, ops, outputs, sample, values
from onnx import ModelProto

from onnxq.ir import Graph
from onnxq.passes import FoldIntoNextProduct
from onnxq.rewrite import Changes

CONSTANTS = {
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
NORM = "a = BatchNormalization(e, ps, pb, pm, pv)"


def image(body: str, front: str = "e = Exp(x)") -> ModelProto:
    return _model("N, 4, 8, 8", "N, C, H, W", f"{front} {body}")


def rows(body: str) -> ModelProto:
    return _model("N, 4", "N, 5", f"e = Exp(x) {body}")


def _model(data: str, result: str, body: str) -> ModelProto:
    used = {name: array for name, array in CONSTANTS.items() if f", {name}" in body or f"({name}," in body}
    return model(f"g (float[{data}] x) => (float[{result}] y) {{ {body} }}", **used)


def fold(made: ModelProto) -> tuple[Graph, Changes]:
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
        image(f"{NORM} y = Conv(a, w)"),
        image("a = Mul(e, each) y = ConvTranspose<group = 2>(a, up, b)"),
        rows("a = Mul(e, last) y = Gemm(a, m, d)"),
        rows("a = Mul(e, last) y = Gemm<alpha = 2.0, beta = 3.0>(a, m, d)"),
        rows("a = Add(e, last) y = Gemm(a, m, d)"),
        rows(f"{NORM} y = Gemm(a, m)"),
        rows("a = Mul(e, last) y = MatMul(a, m)"),
    ],
)
def test_it_becomes_a_part_of_the_weight(made: ModelProto) -> None:
    graph, changes = fold(made)
    assert ops(graph) == ["Exp", made.graph.node[-1].op_type]
    assert len(changes.changed) == 1


def test_a_transposed_weight() -> None:
    made = rows("a = Add(e, last) y = Gemm<transB = 1>(a, turned)")
    assert ops(fold(made)[0]) == ["Exp", "Gemm"]


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (image("a = Add(e, each) y = Conv<pads = [1, 1, 1, 1]>(a, w)"), "pads"),
        (image(f'{NORM} y = Conv<auto_pad = "SAME_UPPER">(a, w)'), "pads"),
        (image("a = Add(e, half) y = ConvTranspose(a, up)"), "would have to shift its border"),
        (image("a = Mul(e, half) k = Conv(a, w) l = Conv(e, w) y = Add(k, l)"), "others read the weight"),
        (image("a = Mul(c, half) y = Conv(a, w)", "c = ConvTranspose(x, square)"), "what is in front can take it"),
        (
            rows("f = Erf(e) g0 = Add(f, one) h = Mul(e, g0) a = Mul(h, half) y = MatMul(a, m)"),
            "it is a part of Gelu",
        ),
        (rows("a = Add(e, last) y = Gemm<alpha = 2.0>(a, m, d)"), "has alpha or beta"),
    ],
)
def test_what_is_no_part_of_it_stays(made: ModelProto, reason: str) -> None:
    graph, changes = fold(made)
    assert not changes.changed
    assert reason in changes.skipped[0][1]
    assert len(nodes(graph)) == len(made.graph.node)


def test_a_constant_of_another_axis_stays() -> None:
    made = rows("a = Mul(e, column) y = Gemm(a, m)")
    assert "vary along the channels" in fold(made)[1].skipped[0][1]


def test_values_that_others_read_stay() -> None:
    graph, _ = fold(image("a = Mul(e, half) k = Conv(a, w) s = ReduceMax(a) y = Add(k, s)"))
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
