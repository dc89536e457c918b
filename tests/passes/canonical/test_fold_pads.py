"""FoldPads moves constant padding into the operator behind it, where that means the same."""

from __future__ import annotations

import numpy as np
import pytest
from model_texts import difference, model, nodes, ops, outputs, sample, values
from onnx import ModelProto

from onnxq.ir import Graph, as_graph
from onnxq.passes import FoldPads
from onnxq.rewrite import Changes

IMAGE = np.array([0, 0, 1, 0, 0, 0, 2, 1])


def fold(made: ModelProto) -> tuple[Graph, Changes]:
    graph = as_graph(made)
    changes = FoldPads().apply(graph)
    for seed in (0, 1):
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) < 1e-6
    assert not FoldPads().apply(graph)
    return graph, changes


def padded(
    window: str, pads: np.ndarray = IMAGE, attributes: str = "", between: str = "", **more: np.ndarray
) -> ModelProto:
    operands = "a, pads, value" if "value" in more else "a, pads"
    text = f"""g (float[N, 4, 8, 8] x) => (float[N, c, h, w] y) {{
        {between or "a = Abs(x)"} [pad] p = Pad{attributes}({operands}) {window} }}"""
    weights = {"w": values(6, 4, 3, 3), "u": values(4, 6, 3, 3), "b": values(6)}
    used = {name: array for name, array in weights.items() if f", {name}" in window}
    return model(text, pads=pads, **used, **more)


@pytest.mark.parametrize(
    ("window", "pads"),
    [
        ("y = Conv(p, w)", [1, 0, 2, 1]),
        ("y = Conv<pads = [1, 1, 0, 0], strides = [2, 2]>(p, w, b)", [2, 1, 2, 1]),
        ('y = Conv<auto_pad = "VALID", dilations = [2, 2]>(p, w)', [1, 0, 2, 1]),
        ("y = AveragePool<kernel_shape = [3, 3]>(p)", [1, 0, 2, 1]),
        ("y = AveragePool<kernel_shape = [3, 3], pads = [1, 1, 0, 0], count_include_pad = 1>(p)", [2, 1, 2, 1]),
        ("y = MaxPool<kernel_shape = [3, 3], strides = [2, 2]>(p)", [1, 0, 2, 1]),
        ("y = MaxPool<kernel_shape = [3, 3], pads = [1, 1, 0, 0]>(p)", [2, 1, 2, 1]),
        ("y = ConvTranspose<pads = [2, 1, 3, 1]>(p, u)", [1, 1, 1, 0]),
        ("y = ConvTranspose<pads = [2, 0, 4, 2], strides = [2, 2]>(p, u, b)", [0, 0, 0, 0]),
    ],
)
def test_padding_becomes_the_operators_own(window: str, pads: list[int]) -> None:
    graph, changes = fold(padded(window))
    assert ops(graph) == ["Abs", window.split()[2].partition("(")[0].partition("<")[0]]
    assert nodes(graph)[-1].attrs["pads"] == pads
    assert nodes(graph)[-1].outputs[0].name == "y"
    assert len(changes.changed) == 1


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (padded("y = Conv(p, w)", attributes='<mode = "reflect">'), "it pads by mode reflect"),
        (padded("y = Conv(p, w)", value=np.array(1, np.float32)), "it does not pad with zeros"),
        (padded("y = Conv(p, w)", np.array([0, 0, -1, 0, 0, 0, 2, 1])), "it crops"),
        (padded("y = Conv(p, w)", np.array([1, 0, 1, 0, 0, 0, 2, 1])), "it pads the batch or the channels"),
        (padded('y = Conv<auto_pad = "SAME_UPPER">(p, w)'), " pads by itself, by a size that is not known"),
        (padded("y = ConvTranspose(p, u)"), " does not crop what it would add"),
        (padded("y = AveragePool<kernel_shape = [2, 2]>(p)"), " cannot pad as much as its kernel is wide"),
        (
            padded("y = AveragePool<kernel_shape = [3, 3], pads = [1, 1, 0, 0]>(p)"),
            " pads too, and does not count that",
        ),
        (padded("y = MaxPool<kernel_shape = [3, 3], ceil_mode = 1>(p)"), " rounds up or skips elements"),
        (padded("y, i = MaxPool<kernel_shape = [3, 3]>(p) j = Neg(i)"), ""),
        (padded("y = MaxPool<kernel_shape = [3, 3]>(p)", between="a = Neg(x)"), "its zeros may be the largest of"),
    ],
)
def test_what_means_something_else_stays(made: ModelProto, reason: str) -> None:
    graph, changes = fold(made)
    assert "Pad" in ops(graph)
    assert any(reason in why for _, why in changes.skipped)


@pytest.mark.parametrize(
    ("between", "folds"),
    [
        ("r = Relu(x) a = MaxPool<kernel_shape = [1, 1]>(r)", True),
        ("a = Clip(x, zero)", True),
        ("a = Clip(x)", False),
        ("a = Clip(x, , zero)", False),
        ("r = Relu(x) a = Neg(r)", False),
    ],
)
def test_zeros_are_below_what_is_never_negative(between: str, folds: bool) -> None:
    zero = {"zero": np.array(0, np.float32)} if "zero" in between else {}
    graph, _ = fold(padded("y = MaxPool<kernel_shape = [3, 3]>(p)", between=between, **zero))
    assert ("Pad" not in ops(graph)) == folds


def test_a_maximum_of_minus_infinity_is_its_own_padding() -> None:
    made = padded("y = MaxPool<kernel_shape = [3, 3]>(p)", between="a = Neg(x)", value=np.array(-np.inf, np.float32))
    assert "Pad" not in ops(fold(made)[0])


def test_axes_name_what_is_padded() -> None:
    text = "g (float[N, 4, 8, 8] x) => (float[N, 6, h, w] y) { p = Pad(x, pads, , axes) y = Conv(p, w) }"
    made = model(text, opset=18, pads=np.array([1, 2, 0, 1]), axes=np.array([-1, 2]), w=values(6, 4, 3, 3))
    graph, _ = fold(made)
    assert nodes(graph)[0].attrs["pads"] == [2, 1, 1, 0]


def test_pads_are_attributes_in_old_models() -> None:
    text = """g (float[N, 4, 8, 8] x) => (float[N, 6, h, w] y) {
        p = Pad<pads = [0, 0, 1, 0, 0, 0, 2, 1]>(x) y = Conv(p, w) }"""
    graph, _ = fold(model(text, opset=9, ir_version=4, w=values(6, 4, 3, 3)))
    assert nodes(graph)[0].attrs["pads"] == [1, 0, 2, 1]


def test_each_reader_pads_for_itself() -> None:
    text = """g (float[N, 4, 8, 8] x) => (float[N, 6, h, w] y) {
        p = Pad(x, pads) a = Conv(p, w) b = Conv(p, v) y = Add(a, b) }"""
    graph, _ = fold(model(text, pads=IMAGE, w=values(6, 4, 3, 3), v=values(6, 4, 3, 3, seed=1)))
    assert ops(graph) == ["Conv", "Conv", "Add"]


def test_padding_by_nothing_goes() -> None:
    made = model(
        "g (float[N, 4] x) => (float[N, 4] y) { a = Abs(x) p = Pad(a, pads) y = Neg(p) }", pads=np.zeros(4, int)
    )
    assert ops(fold(made)[0]) == ["Abs", "Neg"]


def test_computed_and_overridable_pads_stay() -> None:
    made = padded("y = Conv(p, w)")
    made.graph.input.append(made.graph.input[0].__class__())
    made.graph.input[-1].name = "pads"
    made.graph.input[-1].type.tensor_type.elem_type = 7
    made.graph.input[-1].type.tensor_type.shape.dim.add().dim_value = 8
    graph = as_graph(made)
    changes = FoldPads().apply(graph)
    assert not changes
    assert ("pad", "its pads are computed") in changes.skipped


def test_inside_a_branch() -> None:
    text = """g (float[N, 4, 8, 8] x, bool c) => (float[N, 6, h, w] y) {
        y = If (c) <
            then_branch = yes () => (float[N, 6, h, w] t) { p = Pad(x, pads) t = Conv(p, w) },
            else_branch = no () => (float[N, 6, h, w] e) { q = Pad(x, pads) k = Conv(q, w) e = Neg(k) }> }"""
    graph, _ = fold(model(text, pads=IMAGE, w=values(6, 4, 3, 3)))
    assert ops(graph) == ["If", "Conv", "Conv", "Neg"]


@pytest.mark.parametrize(("window", "left"), [("AveragePool<kernel_shape = [3, 3]>(p)", 2), ("Conv(p, w)", 1)])
def test_pools_of_what_may_be_empty_keep_their_padding(window: str, left: int) -> None:
    used = {"w": values(6, 4, 3, 3)} if "w)" in window else {}
    text = f"g (float[1, 4, H, 6] x) => (float[1, c, h, v] y) {{ p = Pad(x, pads) y = {window} }}"
    made = model(text, pads=np.array([0, 0, 1, 0, 0, 0, 2, 2]), **used)
    graph = as_graph(made)
    FoldPads().apply(graph)
    assert len(graph.nodes) == left
    feed = {"x": np.zeros((1, 4, 0, 6), np.float32)}
    assert difference(outputs(graph, feed), outputs(made, feed)) == 0
