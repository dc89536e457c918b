"""Padding, pooling and convolutions."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from model_texts import difference, named_graph, ops, outputs, sample, values
from onnx import ModelProto, helper
from rule_cases import Case, Rule, table

from onnxq.config.presets import PRESETS
from onnxq.ir import as_graph
from onnxq.passes import ConvolvePooled, ConvolveTransposed, FoldPads, ResolveAutomaticPadding, UseGlobalAveragePool
from onnxq.passes.preparing.preparation import integer_steps, prepare_in_place
from onnxq.runtime.targets import target_named

IMAGE = "float[N, 4, 8, 8] x"
pad = Rule(FoldPads(), IMAGE, pads=[0, 0, 1, 0, 0, 0, 2, 1], w=values(6, 4, 3, 3), v=values(6, 4, 3, 3, seed=1),
           u=values(4, 6, 3, 3), b=values(6), zero=0, one=1, least=-np.inf, nothing=[0] * 8)  # fmt: skip
PAD, POOL = "a = Abs(x) [pad] p = Pad(a, pads)", "p = Pad(a, pads) y = MaxPool<kernel_shape = [3, 3]>(p)"


def has_pads(*pads: int) -> object:
    return lambda graph: graph.nodes[-1].attrs["pads"] == list(pads) and graph.nodes[-1].outputs[0].name == "y"


def fed_pads(made: ModelProto) -> None:
    made.graph.input.append(helper.make_tensor_value_info("pads", 7, [8]))


PADS = [
    *(pad(f"{PAD} {window}", f"Abs {window.split()[2].partition('(')[0].partition('<')[0]}", holds=has_pads(*pads))
      for window, pads in [
          ("y = Conv(p, w)", [1, 0, 2, 1]),
          ("y = Conv<pads = [1, 1, 0, 0], strides = [2, 2]>(p, w, b)", [2, 1, 2, 1]),
          ('y = Conv<auto_pad = "VALID", dilations = [2, 2]>(p, w)', [1, 0, 2, 1]),
          ("y = AveragePool<kernel_shape = [3, 3]>(p)", [1, 0, 2, 1]),
          ("y = AveragePool<kernel_shape = [3, 3], pads = [1, 1, 0, 0], count_include_pad = 1>(p)", [2, 1, 2, 1]),
          ("y = MaxPool<kernel_shape = [3, 3], strides = [2, 2]>(p)", [1, 0, 2, 1]),
          ("y = MaxPool<kernel_shape = [3, 3], pads = [1, 1, 0, 0]>(p)", [2, 1, 2, 1]),
          ("y = ConvTranspose<pads = [2, 1, 3, 1]>(p, u)", [1, 1, 1, 0]),
          ("y = ConvTranspose<pads = [2, 0, 4, 2], strides = [2, 2]>(p, u, b)", [0, 0, 0, 0])]),
    *(pad(f"{PAD} {window}", stays=reason) for window, reason in [
        ('y = Conv<auto_pad = "SAME_UPPER">(p, w)', " pads by itself, by a size that is not known"),
        ("y = ConvTranspose(p, u)", " does not crop the padding"),
        ("y = AveragePool<kernel_shape = [2, 2]>(p)", " cannot pad as much as its kernel is wide"),
        ("y = AveragePool<kernel_shape = [3, 3], pads = [1, 1, 0, 0]>(p)", " pads too, and does not count that"),
        ("y = MaxPool<kernel_shape = [3, 3], ceil_mode = 1>(p)", " rounds up or skips elements"),
        ("y, i = MaxPool<kernel_shape = [3, 3]>(p) j = Neg(i)", "")]),
    pad('a = Abs(x) p = Pad<mode = "reflect">(a, pads) y = Conv(p, w)', stays="it pads by mode reflect"),
    pad("a = Abs(x) p = Pad(a, pads, one) y = Conv(p, w)", stays="it does not pad with zeros"),
    pad("a = Abs(x) p = Pad(a, pads) y = Conv(p, w)", pads=[0, 0, -1, 0, 0, 0, 2, 1], stays="it crops"),
    pad("a = Abs(x) p = Pad(a, pads) y = Conv(p, w)", pads=[1, 0, 1, 0, 0, 0, 2, 1],
        stays="it pads the batch or the channels"),
    pad(f"{PAD} y = Conv(p, w)", damage=fed_pads, stays="its pads are computed"),
    # Zeros are below what is never negative, and minus infinity is below all.
    pad(f"r = Relu(x) a = MaxPool<kernel_shape = [1, 1]>(r) {POOL}", "Relu MaxPool MaxPool"),
    pad(f"a = Clip(x, zero) {POOL}", "Clip MaxPool"),
    pad(f"a = Neg(x) {POOL.replace('pads)', 'pads, least)')}", "Neg MaxPool"),
    *(pad(f"{front} {POOL}", stays="its zeros may be the largest of")
      for front in ("a = Neg(x)", "a = Clip(x)", "a = Clip(x, , zero)", "r = Relu(x) a = Neg(r)")),
    pad("p = Pad(x, pads, , axes) y = Conv(p, w)", "Conv", opset=18, pads=[1, 2, 0, 1], axes=[-1, 2],
        holds=has_pads(2, 1, 1, 0)),
    pad("p = Pad<pads = [0, 0, 1, 0, 0, 0, 2, 1]>(x) y = Conv(p, w)", "Conv", opset=9, holds=has_pads(1, 0, 2, 1)),
    pad("p = Pad(x, pads) a = Conv(p, w) c = Conv(p, v) y = Add(a, c)", "Conv Conv Add"),
    pad("a = Abs(x) p = Pad(a, nothing) y = Neg(p)", "Abs Neg"),
    pad(f"""({IMAGE}, bool c) => (y) {{ y = If (c) <
        then_branch = yes () => (t) {{ p = Pad(x, pads) t = Conv(p, w) }},
        else_branch = no () => (e) {{ q = Pad(x, pads) k = Conv(q, w) e = Neg(k) }}> }}""", "If Conv Conv Neg"),
]  # fmt: skip

automatic = Rule(ResolveAutomaticPadding(), "float[N, 4, 9, 8] x", w=values(6, 4, 3, 2))
AUTOMATIC = [
    *(automatic(f'y = {op}<{attributes} auto_pad = "{way}">{operands}', op, error=0.0,
                holds=lambda graph: "auto_pad" not in graph.nodes[0].attrs)
      for way, (op, attributes, operands) in product(("SAME_UPPER", "SAME_LOWER", "VALID"), [
          ("Conv", "", "(x, w)"),
          ("Conv", "strides = [2, 3],", "(x, w)"),
          ("Conv", "strides = [4, 4],", "(x, w)"),
          ("AveragePool", "kernel_shape = [3, 2], strides = [2, 2],", "(x)"),
          ("AveragePool", "kernel_shape = [3, 2], count_include_pad = 1,", "(x)"),
          ("MaxPool", "kernel_shape = [2, 4], strides = [1, 3],", "(x)")])),
    automatic('y = MaxPool<kernel_shape = [2, 2], auto_pad = "SAME_UPPER">(x)', inputs="float[N, 4, H, 8] x",
              stays="the size of its data or kernel is not known"),
    automatic('y = MaxPool<kernel_shape = [2, 2], auto_pad = "SAME_UPPER", ceil_mode = 1>(x)', stays="it rounds up"),
    automatic('y = MaxPool<kernel_shape = [2, 2], auto_pad = "SAME_UPPER", dilations = [2, 2]>(x)', runs=False,
              stays="its window has gaps"),
]  # fmt: skip

mean = Rule(UseGlobalAveragePool(), "float[N, 4, 5, 6] x")
GLOBAL = "GlobalAveragePool Flatten"
MEANS = [
    mean("y = ReduceMean<axes = [2, 3], keepdims = 0>(x)", GLOBAL),
    mean("y = ReduceMean<axes = [-1, -2], keepdims = 0>(x)", GLOBAL),
    mean("m = ReduceMean<axes = [-1, -2]>(x) y = Flatten(m)", GLOBAL),
    mean("m = ReduceMean<axes = [2, 3]>(x) y = Squeeze(m, axes)", GLOBAL, axes=[3, -2]),
    mean("m = AveragePool<kernel_shape = [5, 6], strides = [5, 6]>(x) y = Reshape(m, to)", GLOBAL, to=[-1, 4]),
    mean('m = AveragePool<kernel_shape = [5, 6], auto_pad = "VALID">(x) y = Reshape(m, to)', GLOBAL, to=[0, -1]),
    mean("m = GlobalAveragePool(x) y = Reshape(m, to)", GLOBAL, to=[0, 4]),
    mean("m = GlobalAveragePool(x) y = Reshape<allowzero = 1>(m, to)", GLOBAL, to=[-1, 4]),
    mean("y = ReduceMean<keepdims = 0>(x, axes)", GLOBAL, inputs="float[N, 4, 5, 6, 7] x", opset=18, axes=[2, 3, 4]),
    mean("m = AveragePool<kernel_shape = [5]>(x) y = Squeeze(m, axes)", GLOBAL, inputs="float[N, 4, 5] x", axes=[2]),
    # Axes that are restored are not dropped, and a mean that keeps its axes is one node.
    mean("m = ReduceMean<axes = [2, 3], keepdims = 0>(x) s = Reshape(m, to) y = Mul(x, s)", "GlobalAveragePool Mul",
         to=[-1, 4, 1, 1]),
    mean("m = ReduceMean<axes = [2, 3], keepdims = 0>(x) s = Unsqueeze(m, axes) y = Mul(x, s)", "GlobalAveragePool Mul",
         axes=[2, 3]),
    mean("m = ReduceMean<axes = [2, 3]>(x) y = Mul(x, m)", "GlobalAveragePool Mul",
         holds=lambda graph: graph.nodes[0].outputs[0].shape == ["N", 4, 1, 1]),
    *(mean(body, stays=reason) for body, reason in [
        ("y = ReduceMean<axes = [1, 2], keepdims = 0>(x)", "it is not known to be over all axes"),
        ("y = ReduceMean<keepdims = 0>(x)", "it is not known to be over all axes of an image and no other"),
        ("y = AveragePool<kernel_shape = [5, 5]>(x)", "its window is not known to be the whole image"),
        ("y = AveragePool<kernel_shape = [5, 6], pads = [1, 0, 0, 0]>(x)", "it pads"),
        ("m = GlobalAveragePool(x) y = Squeeze(m)", "it may drop more axes")]),
    mean("m = GlobalAveragePool(x) y = Reshape(m, to)", to=[4, -1],
         stays="it is not known to keep batch and channels"),
    mean("y = ReduceMean<axes = [2], keepdims = 0>(x)", inputs="float[N, 4, 5] x", stays="its data may be a sequence"),
    # Sums stay exact, and other data stays.
    *(mean("y = ReduceMean<axes = [2, 3], keepdims = 0>(x)", inputs=f"{kind}[{data}] x", stays=reason, runs=data != "K")
      for kind, data, reason in [
          ("float", "N, 4, H, 6", "the size of its image is not known"),
          ("float", "N, C, 5, 6", "the number of its channels is not known"),
          ("float", "1, 2, 65, 65", "its image is large"),
          ("float", "K", ""),
          ("double", "N, 4, 5, 6", "")]),
]  # fmt: skip

pooled = Rule(ConvolvePooled(), "float[N, 3, 4, 4] x", w=values(2, 3), t=values(3, 2), b=values(2), one=values(1))
pooled_image = {"x": values(1, 3, 4, 4)}
POOLED = "p = GlobalAveragePool(x) f = Flatten(p) y = Gemm"
transposed = Rule(ConvolveTransposed(), "float[1, 3, 4, 5] x", w=values(3, 2, 2, 2), b=values(2))
CONVOLVED = [
    *(pooled(f"{POOLED}{operands}", "GlobalAveragePool Conv Flatten", inputs=f"float[{batch}, 3, 4, 4] x",
             feed=pooled_image)
      for operands, batch in product(("<transB = 1>(f, w, b)", "(f, t, b)", "<transB = 1>(f, w)"), ("1", "N"))),
    pooled(f"{POOLED}(f, t, b)", inputs="float[2, 3, 4, 4] x", stays=""),
    pooled(f"{POOLED}(f, t, one)", inputs="float[1, 3, 4, 4] x", stays=""),
    pooled(f"{POOLED}<alpha = 2.0>(f, t, b)", inputs="float[1, 3, 4, 4] x", stays=""),
    *(transposed(f"z = ConvTranspose<strides = [2, 2]>(x, w, b) y = {activation}(z)",
                 f"Conv {activation} DepthToSpace") for activation in ("LeakyRelu", "Relu", "Sigmoid", "Tanh")),
    transposed("y = ConvTranspose<strides = [2, 2]>(x, w, b)", "Conv DepthToSpace"),
    transposed("y = ConvTranspose<strides = [2, 2], pads = [0, 0, 0, 0], dilations = [1, 1], group = 1>(x, w)",
               "Conv DepthToSpace"),
    transposed("z = ConvTranspose<strides = [2, 2], kernel_shape = [2, 2]>(x, w, b) y = Abs(z)",
               "Conv DepthToSpace Abs"),
    *(transposed(f"y = ConvTranspose<{attributes}>(x, w, b)", stays="") for attributes in [
        "strides = [1, 1]", "strides = [2, 1]", "strides = [3, 3]", "strides = [2, 2], pads = [1, 0, 0, 0]",
        "strides = [2, 2], output_padding = [1, 1]", "strides = [2, 2], dilations = [2, 2]",
        "strides = [2, 2], output_shape = [8, 10]"]),
]  # fmt: skip


@table(PADS, AUTOMATIC, MEANS, CONVOLVED)
def test_rules(case: Case) -> None:
    case.check()


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ("p = Pad(x, pads) y = AveragePool<kernel_shape = [3, 3]>(p)", 2),
        ("t = Abs(x) p = Pad(t, pads) y = MaxPool<kernel_shape = [3, 3]>(p)", 3),  # nothing is inferred of t
        ("p = Pad(x, pads) y = Conv(p, w)", 1),
    ],
)
def test_pools_of_what_may_be_empty_keep_their_padding(body: str, left: int) -> None:
    made = pad(body, inputs="float[1, 4, H, 6] x", pads=[0, 0, 1, 0, 0, 0, 2, 2]).made
    graph = as_graph(made)
    FoldPads().apply(graph)
    assert len(graph.nodes) == left
    feed = {"x": np.zeros((1, 4, 0, 6), np.float32)}
    assert difference(outputs(graph, feed), outputs(made, feed)) == 0


@pytest.mark.parametrize(
    ("case", "target", "expected"),
    [
        (pooled(f"{POOLED}(f, t, b)", inputs="float[1, 3, 4, 4] x"), "openvino", "Conv"),
        (pooled(f"{POOLED}(f, t, b)", inputs="float[1, 3, 4, 4] x"), "onnxruntime-cpu", "Gemm"),
        (transposed("y = ConvTranspose<strides = [2, 2]>(x, w, b)"), "openvino", "Conv"),
        (transposed("y = ConvTranspose<strides = [2, 2]>(x, w, b)"), "onnxruntime-cpu", "ConvTranspose"),
    ],
    ids=str,
)
def test_each_runtime_gets_what_it_does_faster(case: Case, target: str, expected: str) -> None:
    graph = named_graph(case.made)
    steps = integer_steps(PRESETS["int8"], target_named(target))
    for opset in (None, 21):
        prepare_in_place(graph, steps, **({"opset": opset} if opset else {}))
        assert expected in ops(graph)
    assert difference(outputs(graph, sample(case.made)), outputs(case.made, sample(case.made))) < 1e-6
