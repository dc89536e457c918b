"""Padding, pooling and convolutions."""

from __future__ import annotations

import numpy as np
import pytest
from model_texts import apply_once, difference, model, named_graph, nodes, ops, outputs, sample, values
from onnx import ModelProto

from onnxq.config.presets import PRESETS
from onnxq.ir import Graph, as_graph
from onnxq.onnx_api import infer_shapes
from onnxq.passes import (
    ConvolvePooled,
    ConvolveTransposed,
    FoldPads,
    ResolveAutomaticPadding,
    UseGlobalAveragePool,
)
from onnxq.passes.preparing.preparation import integer_steps, prepare_for_integers
from onnxq.rewrite import Changes
from onnxq.runtime.targets import target_named

# FoldPads -------------------------------------------------------------------------------------------------------------

IMAGE = np.array([0, 0, 1, 0, 0, 0, 2, 1])


def fold(made: ModelProto) -> tuple[Graph, Changes]:
    graph = as_graph(made)
    infer_shapes(graph)
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
        (padded("y = ConvTranspose(p, u)"), " does not crop the padding"),
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


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ("p = Pad(x, pads) y = AveragePool<kernel_shape = [3, 3]>(p)", 2),
        ("t = Abs(x) p = Pad(t, pads) y = MaxPool<kernel_shape = [3, 3]>(p)", 3),  # nothing is inferred of t
        ("p = Pad(x, pads) y = Conv(p, w)", 1),
    ],
)
def test_pools_of_what_may_be_empty_keep_their_padding(body: str, left: int) -> None:
    used = {"w": values(6, 4, 3, 3)} if "w)" in body else {}
    text = f"g (float[1, 4, H, 6] x) => (float[1, c, h, v] y) {{ {body} }}"
    made = model(text, pads=np.array([0, 0, 1, 0, 0, 0, 2, 2]), **used)
    graph = as_graph(made)
    FoldPads().apply(graph)
    assert len(graph.nodes) == left
    feed = {"x": np.zeros((1, 4, 0, 6), np.float32)}
    assert difference(outputs(graph, feed), outputs(made, feed)) == 0


# ResolveAutomaticPadding ----------------------------------------------------------------------------------------------

WINDOWS = [
    ("Conv", "", "(x, w)"),
    ("Conv", "strides = [2, 3],", "(x, w)"),
    ("Conv", "strides = [4, 4],", "(x, w)"),
    ("AveragePool", "kernel_shape = [3, 2], strides = [2, 2],", "(x)"),
    ("AveragePool", "kernel_shape = [3, 2], count_include_pad = 1,", "(x)"),
    ("MaxPool", "kernel_shape = [2, 4], strides = [1, 3],", "(x)"),
]


@pytest.mark.parametrize("way", ["SAME_UPPER", "SAME_LOWER", "VALID"])
@pytest.mark.parametrize(("op", "attributes", "operands"), WINDOWS)
def test_the_pads_mean_the_same(op: str, attributes: str, operands: str, way: str) -> None:
    text = f"""g (float[N, 4, 9, 8] x) => (float[N, c, h, w] y) {{
        y = {op}<{attributes} auto_pad = "{way}">{operands} }}"""
    made = model(text, **({"w": values(6, 4, 3, 2)} if op == "Conv" else {}))
    graph = as_graph(made)
    assert ResolveAutomaticPadding().apply(graph)
    assert "auto_pad" not in nodes(graph)[0].attrs
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) == 0
    assert not ResolveAutomaticPadding().apply(graph)


@pytest.mark.parametrize(
    ("size", "attributes", "reason"),
    [
        ("H, 8", 'kernel_shape = [2, 2], auto_pad = "SAME_UPPER"', "the size of its data or kernel is not known"),
        ("9, 8", 'kernel_shape = [2, 2], auto_pad = "SAME_UPPER", ceil_mode = 1', "it rounds up"),
        ("9, 8", 'kernel_shape = [2, 2], auto_pad = "SAME_UPPER", dilations = [2, 2]', "its window has gaps"),
    ],
)
def test_what_is_not_known_stays(size: str, attributes: str, reason: str) -> None:
    text = f"g (float[N, 4, {size}] x) => (float[N, c, h, w] y) {{ [pool] y = MaxPool<{attributes}>(x) }}"
    changes = ResolveAutomaticPadding().apply(as_graph(model(text)))
    assert (changes.changed, changes.skipped) == ((), (("pool", reason),))


# UseGlobalAveragePool -------------------------------------------------------------------------------------------------


def pooled(
    body: str, data: str = "N, 4, 5, 6", result: str = "N, 4", opset: int = 17, **more: np.ndarray
) -> tuple[Graph, Changes]:
    made = model(f"g (float[{data}] x) => (float[{result}] y) {{ {body} }}", opset=opset, **more)
    graph = named_graph(made)
    changes = UseGlobalAveragePool().apply(graph)
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 1e-6
    assert not UseGlobalAveragePool().apply(graph)
    return graph, changes


@pytest.mark.parametrize(
    ("body", "more"),
    [
        ("y = ReduceMean<axes = [2, 3], keepdims = 0>(x)", {}),
        ("y = ReduceMean<axes = [-1, -2], keepdims = 0>(x)", {}),
        ("m = ReduceMean<axes = [-1, -2]>(x) y = Flatten(m)", {}),
        ("m = ReduceMean<axes = [2, 3]>(x) y = Squeeze(m, axes)", {"axes": [3, -2]}),
        ("m = AveragePool<kernel_shape = [5, 6], strides = [5, 6]>(x) y = Reshape(m, to)", {"to": [-1, 4]}),
        ('m = AveragePool<kernel_shape = [5, 6], auto_pad = "VALID">(x) y = Reshape(m, to)', {"to": [0, -1]}),
        ("m = GlobalAveragePool(x) y = Reshape(m, to)", {"to": [0, 4]}),
        ("m = GlobalAveragePool(x) y = Reshape<allowzero = 1>(m, to)", {"to": [-1, 4]}),
    ],
)
def test_all_forms_end_as_one(body: str, more: dict[str, list[int]]) -> None:
    graph, _ = pooled(body, **{name: np.array(values) for name, values in more.items()})
    assert ops(graph) == ["GlobalAveragePool", "Flatten"]


def test_images_of_another_rank() -> None:
    axes = np.array([2, 3, 4])
    graph, _ = pooled("y = ReduceMean<keepdims = 0>(x, axes)", "N, 4, 5, 6, 7", opset=18, axes=axes)
    assert ops(graph) == ["GlobalAveragePool", "Flatten"]
    graph, _ = pooled("m = AveragePool<kernel_shape = [5]>(x) y = Squeeze(m, axes)", "N, 4, 5", axes=np.array([2]))
    assert ops(graph) == ["GlobalAveragePool", "Flatten"]


def test_a_mean_over_the_features_of_a_sequence_stays() -> None:
    _, changes = pooled("y = ReduceMean<axes = [2], keepdims = 0>(x)", "N, 4, 5")
    assert changes.skipped[0][1] == "its data may be a sequence"


@pytest.mark.parametrize("restore", ["Reshape(f, to)", "Unsqueeze(f, axes)"])
def test_axes_that_are_restored_are_not_dropped(restore: str) -> None:
    body = f"m = ReduceMean<axes = [2, 3], keepdims = 0>(x) f = Flatten(m) s = {restore} y = Mul(x, s)"
    used = {"to": np.array([-1, 4, 1, 1])} if "to" in restore else {"axes": np.array([2, 3])}
    graph, _ = pooled(body.replace("f = Flatten(m) ", "").replace("(f", "(m"), result="N, 4, 5, 6", **used)
    assert ops(graph) == ["GlobalAveragePool", "Mul"]


def test_a_mean_that_keeps_its_axes_is_one_node() -> None:
    graph, _ = pooled("m = ReduceMean<axes = [2, 3]>(x) y = Mul(x, m)", result="N, 4, 5, 6")
    assert ops(graph) == ["GlobalAveragePool", "Mul"]
    assert nodes(graph)[0].outputs[0].shape == ["N", 4, 1, 1]


@pytest.mark.parametrize(
    ("body", "result", "reason"),
    [
        ("y = ReduceMean<axes = [1, 2], keepdims = 0>(x)", "N, 6", "it is not known to be over all axes"),
        ("y = ReduceMean<keepdims = 0>(x)", "", "it is not known to be over all axes of an image and no other"),
        ("y = AveragePool<kernel_shape = [5, 5]>(x)", "N, 4, 1, 2", "its window is not known to be the whole image"),
        ("y = AveragePool<kernel_shape = [5, 6], pads = [1, 0, 0, 0]>(x)", "N, 4, 2, 1", "it pads"),
        ("m = GlobalAveragePool(x) y = Squeeze(m)", "N, 4", "it may drop more axes"),
        ("m = GlobalAveragePool(x) y = Reshape(m, to)", "4, N", "it is not known to keep batch and channels"),
    ],
)
def test_other_means_stay(body: str, result: str, reason: str) -> None:
    _, changes = pooled(body, result=result, **({"to": np.array([4, -1])} if "to" in body else {}))
    assert not changes.changed
    assert reason in changes.skipped[0][1]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ("N, 4, H, 6", "the size of its image is not known"),
        ("N, C, 5, 6", "the number of its channels is not known"),
        ("1, 2, 65, 65", "its image is large"),
    ],
)
def test_sums_stay_exact(data: str, reason: str) -> None:
    _, changes = pooled("y = ReduceMean<axes = [2, 3], keepdims = 0>(x)", data, "N, C")
    assert reason in changes.skipped[0][1]


@pytest.mark.parametrize(("data", "dtype"), [("K", "float"), ("N, 4, 5, 6", "double")])
def test_other_data_stays(data: str, dtype: str) -> None:
    text = f"g ({dtype}[{data}] x) => ({dtype}[N, C] y) {{ y = ReduceMean<axes = [2, 3], keepdims = 0>(x) }}"
    assert not UseGlobalAveragePool().apply(named_graph(model(text)))


# ConvolvePooled -------------------------------------------------------------------------------------------------------

CONVOLVE_POOLED_TEXT = """g (float[%s, 3, 4, 4] x) => (float[%s, 2] y)
<float[2, 3] w = {1, -2, 3, 4, 5, -6}, float[3, 2] t = {1, 2, 3, 4, 5, 6}, float[2] b = {1, 2}, float[1] one = {3}> {
    p = GlobalAveragePool(x) f = Flatten(p) y = Gemm%s
}"""


@pytest.mark.parametrize(
    "product", ["<transB = 1>(f, w, b)", "(f, t, b)", "<transB = 1>(f, w)"], ids=["transposed", "plain", "without bias"]
)
@pytest.mark.parametrize("batch", ["1", "N"])
def test_the_product_becomes_a_convolution_of_one_pixel(product: str, batch: str) -> None:
    made = model(CONVOLVE_POOLED_TEXT % (batch, batch, product))
    graph = named_graph(made)
    assert apply_once(ConvolvePooled(), graph)
    assert ops(graph) == ["GlobalAveragePool", "Conv", "Flatten"]
    given = {"x": np.random.default_rng(0).normal(size=(1, 3, 4, 4)).astype(np.float32)}
    assert difference(outputs(graph, given), outputs(made, given)) < 1e-6


@pytest.mark.parametrize(
    ("batch", "product"),
    [("2", "(f, t, b)"), ("1", "(f, t, one)"), ("1", "<alpha = 2.0>(f, t, b)")],
    ids=["several images", "one bias for all", "scaled"],
)
def test_other_products_stay(batch: str, product: str) -> None:
    graph = named_graph(model(CONVOLVE_POOLED_TEXT % (batch, batch, product)))
    assert not apply_once(ConvolvePooled(), graph)
    assert ops(graph) == ["GlobalAveragePool", "Flatten", "Gemm"]


@pytest.mark.parametrize(("target", "wanted"), [("openvino", "Conv"), ("onnxruntime-cpu", "Gemm")])
def test_it_is_for_runtimes_that_do_it_faster(target: str, wanted: str) -> None:
    made = model(CONVOLVE_POOLED_TEXT % ("1", "1", "(f, t, b)"))
    graph = named_graph(made)
    steps = integer_steps(PRESETS["int8"], target_named(target))
    prepare_for_integers(graph, steps)
    assert wanted in ops(graph)
    prepare_for_integers(graph, steps, opset=21)
    assert wanted in ops(graph)
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 1e-6


# ConvolveTransposed ---------------------------------------------------------------------------------------------------

WEIGHT = ", ".join(map(str, np.random.default_rng(0).normal(size=24).round(2)))
CONVOLVE_TRANSPOSED_TEXT = f"""g (float[1, 3, 4, 5] x) => (float[1, 2, H, W] y)
<float[3, 2, 2, 2] w = {{{WEIGHT}}}, float[2] b = {{1, -2}}> {{ %s }}"""
PLAIN = "y = ConvTranspose<strides = [2, 2]>(x, w, b)"


@pytest.mark.parametrize("activation", ["LeakyRelu", "Relu", "Sigmoid", "Tanh"])
def test_an_activation_is_computed_before_the_places_are_laid_out(activation: str) -> None:
    made = model(CONVOLVE_TRANSPOSED_TEXT % f"z = ConvTranspose<strides = [2, 2]>(x, w, b) y = {activation}(z)")
    graph = named_graph(made)
    assert apply_once(ConvolveTransposed(), graph)
    assert ops(graph) == ["Conv", activation, "DepthToSpace"]
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 1e-6


@pytest.mark.parametrize(
    "layer",
    [
        PLAIN,
        "y = ConvTranspose<strides = [2, 2], pads = [0, 0, 0, 0], dilations = [1, 1], group = 1>(x, w)",
        "z = ConvTranspose<strides = [2, 2], kernel_shape = [2, 2]>(x, w, b) y = Abs(z)",
    ],
    ids=["alone", "all said", "before another"],
)
def test_few_channels_become_a_convolution(layer: str) -> None:
    made = model(CONVOLVE_TRANSPOSED_TEXT % layer)
    graph = named_graph(made)
    assert apply_once(ConvolveTransposed(), graph)
    assert ops(graph)[:2] == ["Conv", "DepthToSpace"]
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 1e-6


@pytest.mark.parametrize(
    "attributes",
    [
        "strides = [1, 1]",
        "strides = [2, 1]",
        "strides = [3, 3]",
        "strides = [2, 2], pads = [1, 0, 0, 0]",
        "strides = [2, 2], output_padding = [1, 1]",
        "strides = [2, 2], dilations = [2, 2]",
        "strides = [2, 2], output_shape = [8, 10]",
    ],
)
def test_other_windows_stay(attributes: str) -> None:
    graph = named_graph(model(CONVOLVE_TRANSPOSED_TEXT % f"y = ConvTranspose<{attributes}>(x, w, b)"))
    assert not apply_once(ConvolveTransposed(), graph)
    assert ops(graph) == ["ConvTranspose"]


@pytest.mark.parametrize(("target", "wanted"), [("openvino", "Conv"), ("onnxruntime-cpu", "ConvTranspose")])
def test_it_is_for_runtimes_that_pad_channels(target: str, wanted: str) -> None:
    made = model(CONVOLVE_TRANSPOSED_TEXT % PLAIN)
    graph = named_graph(made)
    prepare_for_integers(graph, integer_steps(PRESETS["int8"], target_named(target)))
    assert wanted in ops(graph)
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 1e-6
