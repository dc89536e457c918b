"""Spellings of activation functions become one node, or the fastest nodes."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import onnx
import pytest
from model_texts import difference, model, named_graph, nodes, ops, outputs, sample, values
from rule_cases import Case, Rule, table

from onnxq.config.presets import preset_named
from onnxq.ir import as_graph, save
from onnxq.passes import (
    FuseGelu,
    JoinHardSwishes,
    MergeClamps,
    SplitPRelus,
    SplitSwishes,
    UnifyGeluArgument,
    UseHardSigmoid,
    UseLeakyRelu,
)
from onnxq.passes.activations import MAX_BROADCASTS, is_gelu_before_halving, rectified
from onnxq.passes.preparing.preparation import integer_steps, prepare_in_place
from onnxq.rewrite import RewriteRule
from onnxq.runtime.targets import target_named

RunningGraph = Callable[[Path], onnx.GraphProto]
MOST = np.finfo(np.float32).max

clamp = Rule(MergeClamps(), zero=0, small=-0.5, large=0.75, wide=np.full((1, 1), 0.75, np.float32), most=MOST,
             infinite=np.inf, below=-np.inf)  # fmt: skip
CLAMPS = [
    clamp("a = Max(x, small) y = Min(wide, a)", "Clip"),
    clamp("y = Max(zero, x)", "Relu"),
    clamp("y = Min(x, wide)", "Clip"),
    clamp("y = Clip(x, zero, infinite)", "Relu"),
    clamp("a = Exp(x) b = Max(a, below) y = Neg(b)", "Exp Neg"),
    clamp("a = Relu(x) y = Relu(a)", "Relu"),
    clamp("a = Relu(x) y = Clip(a, small, large)", "Clip"),
    clamp("a = Clip(x, , zero) y = Clip(a, small)", "Clip"),
    clamp("a = Clip(x, small, large) b = Relu(a) y = Min(b, zero)", "Clip"),
    clamp("a = Min(x, small) y = Relu(a)", "Clip"),
    clamp("a = Clip(x, zero, large) y = Clip(a, zero, most)", "Clip"),
    clamp("a = Relu(x) y = Clip<min = -1.0, max = 0.5>(a)", "Clip", opset=9,
          holds=lambda graph: graph.nodes[0].attrs == {"min": 0.0, "max": 0.5}),
    clamp("a = Relu(x) y = Min(a, large)", "Clip", opset=9,
          holds=lambda graph: graph.nodes[0].attrs == {"min": 0.0, "max": 0.75}),
    clamp("y = Clip(x, small, large)", stays="it is a Clip already"),
    clamp("y = Clip(x, zero)", stays="it is a Clip already"),
    clamp("y = Clip(x, zero, most)", stays="it is a Clip already"),
    clamp("y = Clip(x)", stays="it is a Clip already"),
    clamp("r = ReduceMax<keepdims = 0>(x) y = Clip(x, r)", stays="its limits are computed, or cross"),
    clamp("y = Clip(x, zero, small)", stays="its limits are computed, or cross"),
    clamp("y = Max(x, wide)", inputs="float[8] x", stays="its limit may raise the rank"),
    clamp("y = Max(x, k)", inputs="int64[8] x", k=np.array(0), stays="not known to be floating point"),
    clamp("a = Relu(x) b = Clip(a, small, large) c = Neg(a) y = Add(b, c)", stays=""),
]  # fmt: skip

gentle, steep, mixed = (
    np.linspace(*ends, 4, dtype=np.float32).reshape(4, 1, 1) for ends in [(0.1, 1), (1, 3), (0.5, 2)]
)
leaky = Rule(UseLeakyRelu(), "float[N, 4, 5, 5] x", tenth=0.1, alike=np.full((4, 1, 1), 0.2, np.float32),
             each=values(4, 1, 1), nil=np.zeros(1, np.float32), zero=0, two=2, quarter=0.25, gentle=gentle, steep=steep,
             mixed=mixed, quarters=np.full((1, 3, 1), 0.25, np.float32), flat=np.zeros((1, 1), np.float32))  # fmt: skip
LEAKY = [
    leaky("y = PRelu(x, tenth)", "LeakyRelu"),
    leaky("y = PRelu(x, alike)", "LeakyRelu"),
    leaky("y = PRelu(x, nil)", "LeakyRelu"),
    leaky("r = Relu(x) n = Neg(x) m = Relu(n) s = Mul(m, tenth) y = Sub(r, s)", "LeakyRelu"),
    leaky("s = Mul(x, tenth) y = Max(s, x)", "LeakyRelu"),
    # As Keras and MXNet write it.
    leaky("r = Relu(x) n = Neg(x) m = Relu(n) s = Mul(m, gentle) y = Sub(r, s)", "Mul Max"),
    leaky("r = Relu(x) n = Neg(x) m = Relu(n) s = Mul(m, steep) y = Add(s, r)", "Mul Max"),
    leaky("r = Relu(x) n = Neg(x) m = Relu(n) s = Mul(m, steep) y = Sub(r, s)", "Mul Min"),
    leaky("r = Relu(x) m = Min(x, zero) s = Mul(m, gentle) y = Add(r, s)", "Mul Max"),
    leaky("y = PRelu(x, each)", stays="each channel has a slope of its own"),
    leaky("s = Mul(x, two) y = Max(s, x)", stays="its slope is not between 0 and 1"),
    leaky("s = Mul(x, zero) y = Max(s, x)", stays="its slope is not between 0 and 1"),
    leaky("r = Relu(x) m = Min(x, zero) s = Mul(m, mixed) y = Add(r, s)", stays="its slopes lie on both sides of 1"),
    leaky("r = Relu(x) n = Neg(x) m = Relu(n) s = Mul(m, quarters) y = Sub(r, s)", inputs="float[1, 1, 4] x",
          stays="its slope is not known"),
    leaky("r = Relu(x) m = Min(x, flat) s = Mul(m, quarter) y = Add(r, s)", inputs="float[4] x",
          stays="a constant may"),
    leaky("r = Relu(x) n = Neg(x) m = Relu(n) s = Mul(m, each) y = Add(s, r)", inputs="float[N, C, 5, 5] x",
          runs=False, stays="its slope is not known to fit its data"),
]  # fmt: skip

split = Rule(SplitPRelus(), "float[N, 4, 5, 5] x", gentle=gentle, steep=steep, mixed=mixed)
PRELUS = [
    split("[p] y = PRelu(x, gentle)", "Mul Max", holds=lambda graph: graph.nodes[-1].name == "p"),
    split("y = PRelu(x, steep)", "Mul Min"),
    split("y = PRelu(x, mixed)", "Relu Min Mul Add"),
    split("y = PRelu(x, gentle)", opset=7, stays="its replacement needs opset 8"),
    split("y = PRelu(x, s)", inputs="float[N, 4, 5, 5] x, float[4, 1, 1] s", stays=""),
]

hard = Rule(UseHardSigmoid(), three=3, nil=0, six=6, sixth=1 / 6, ten=10, wide=np.full((1, 1), 3, np.float32))
CLIPPED = "u = Mul(x, ten) a = Add(u, three) c = Clip(a, nil, six)"
HARD = [
    hard(f"{CLIPPED} y = Div(c, six)", "Mul HardSigmoid"),
    hard(f"{CLIPPED} y = Mul(c, sixth)", "Mul HardSigmoid"),
    hard(f"{CLIPPED} d = Mul(u, c) y = Div(d, six)", "Mul HardSigmoid Mul"),
    hard(f"{CLIPPED} d = Mul(c, sixth) y = Mul(u, d)", "Mul HardSigmoid Mul"),
    hard(f"{CLIPPED} d = Div(u, six) y = Mul(d, c)", "Mul HardSigmoid Mul"),
    hard("u = Mul(x, ten) [swish] y = HardSwish(u)", "Mul HardSigmoid Mul",
         holds=lambda graph: graph.nodes[-1].name == "swish"),
    hard("u = Mul(x, ten) a = Add(u, three) c = Clip<min = 0.0, max = 6.0>(a) d = Mul(u, c) y = Div(d, six)",
         "Mul HardSigmoid Mul", opset=9),
    hard("a = Add(x, wide) c = Clip(a, nil, six) y = Div(c, six)", inputs="float[4] x",
         stays="a constant may raise the rank"),
    hard("a = Add(x, p) c = Clip(a, q, r) y = Div(c, r)", inputs="double[4] x", p=np.array(3.0), q=np.array(0.0),
         r=np.array(6.0), stays="its data is not known to"),
]  # fmt: skip

join = Rule(JoinHardSwishes(), "float[2, 3] x")
GATED = "s = Sin(x) g = HardSigmoid <alpha = %s, beta = 0.5> (s) y = Mul(%s, g)"
swish = Rule(SplitSwishes(), "float[2, 3] x")
SWISHES = [
    join(GATED % (1 / 6, "s"), "Sin HardSwish", opset=14),
    join(GATED % (1 / 6, "s"), opset=13, stays="HardSwish came with opset 14"),
    join(GATED % (0.2, "s"), opset=14, stays="its slope is not one sixth"),
    join(GATED % (1 / 6, "x"), opset=14, stays=""),
    hard("[swish] a = HardSwish(x) y = Neg(a)", "HardSigmoid Mul Neg",
         holds=lambda graph: [node.name for node in graph.nodes[:2]] == ["swish.gate", "swish"]),
    hard("""(bool c, float[2, 3] x) => (y) {
          y = If(c) <then_branch = t () => (a) { a = HardSwish(x) }, else_branch = e () => (b) { b = Neg(x) }> }""",
         "If HardSigmoid Mul Neg"),
    hard("y = local.HardSwish(x)", stays=""),
    swish("y = local.Swish(x)", opset=24, stays=""),
]  # fmt: skip

INVERSE, SLOPE = math.sqrt(0.5), math.sqrt(2 / math.pi)
NUMBERS = {"root": math.sqrt(2), "inverse": INVERSE, "one": 1, "half": 0.5, "two": 2, "three": 3, "cubic": 0.044715,
           "slope": SLOPE}  # fmt: skip
SQUARES = ("q = Mul(x, cubic) k = Mul(q, x)", "q = Mul(x, x) k = Mul(cubic, q)", "q = Pow(x, two) k = Mul(q, cubic)")
FACTORED = ("s = Mul(x, slope) a = Mul(s, i)", "s = Mul(slope, i) a = Mul(x, s)", "s = Mul(i, x) a = Mul(s, slope)")
CUBES = (
    "q = Mul(x, x) c = Mul(q, x) k = Mul(c, cubic)",
    "q = Pow(x, two) c = Mul(x, q) k = Mul(cubic, c)",
    "q = Mul(x, x) c = Mul(cubic, x) k = Mul(c, q)",
    "q = Mul(cubic, x) c = Mul(x, q) k = Mul(x, c)",
    "q = Mul(x, x) c = Mul(q, cubic) k = Mul(c, x)",
)
argument = Rule(UnifyGeluArgument(), "float[2, N] x", **NUMBERS)
ARGUMENTS = [
    *(argument(f"{square} i = Add(k, one) {end} y = Tanh(a)", "Pow Mul Add Mul Tanh")
      for square, end in product(SQUARES, FACTORED)),
    *(argument(f"{cube} s = Add(x, k) a = Mul(s, slope) y = Tanh(a)", "Pow Mul Add Mul Tanh") for cube in CUBES),
    argument("a = Mul(inverse, x) y = Erf(a)", "Div Erf"),
    argument("a = Mul(x, k) y = Erf(a)", inputs="float[] x", runs=False, k=np.full(1, INVERSE, np.float32),
             stays="its constants may have more dimensions than its data"),
]  # fmt: skip

# Each spelling, and whether onnxruntime knows it.
ERF = {
    "d = Div(x, root) e = Erf(d) p = Add(e, one) m = Mul(x, p) g = Mul(m, half)": True,
    "h = Mul(half, x) d = Div(x, root) e = Erf(d) p = Add(one, e) g = Mul(p, h)": True,
    "d = Div(x, root) e = Erf(d) p = Add(e, one) m = Mul(p, half) g = Mul(x, m)": False,
    "d = Mul(x, inverse) e = Erf(d) p = Add(e, one) m = Mul(p, x) g = Mul(m, half)": False,
    "h = Mul(x, half) d = Mul(inverse, x) e = Erf(d) p = Add(e, one) g = Mul(h, p)": False,
    "d = Mul(x, inverse) e = Erf(d) p = Add(e, one) m = Mul(half, p) g = Mul(m, x)": False,
}
TANH = {
    f"{front} t = Tanh(a) p = Add(t, one) {end}": front.startswith("c = Pow") and end.startswith("h")
    for front, end in product(
        (
            "c = Pow(x, three) k = Mul(c, cubic) s = Add(x, k) a = Mul(s, slope)",
            "q = Mul(x, x) c = Mul(q, x) k = Mul(cubic, c) s = Add(k, x) a = Mul(slope, s)",
            "k = Mul(x, cubic) q = Mul(k, x) i = Add(q, one) s = Mul(x, slope) a = Mul(s, i)",
            "q = Pow(x, two) k = Mul(q, cubic) i = Add(one, k) j = Mul(i, slope) a = Mul(x, j)",
        ),
        ("h = Mul(x, half) g = Mul(h, p)", "m = Mul(x, p) g = Mul(m, half)", "m = Mul(p, half) g = Mul(x, m)"),
    )
}
gelu = Rule((FuseGelu(), UnifyGeluArgument()), "float[2, N, 8] x", **NUMBERS)
DIVIDED, CUBED = next(iter(ERF)), next(iter(TANH))
GELUS = [
    *(gelu(f"{body} y = Neg(g)", "Gelu Neg", opset=20, holds=lambda graph: graph.nodes[0].attrs == {}) for body in ERF),
    *(gelu(f"{body} y = Neg(g)", "Gelu Neg", opset=20,
           holds=lambda graph: graph.nodes[0].attrs == {"approximate": "tanh"}) for body in TANH),
    *(gelu(f"{body.replace(*twins)} y = Neg(g)", step=FuseGelu(), opset=20, stays="") for body, twins in [
        (DIVIDED, ("Div(x, root)", "Div(x, two)")), (DIVIDED, ("Add(e, one)", "Add(e, half)")),
        (DIVIDED, ("Mul(x, p)", "Mul(e, p)")), (CUBED, ("Pow(x, three)", "Pow(x, two)"))]),
    gelu(f"{DIVIDED} y = Neg(g)", step=FuseGelu(), inputs="float[] x", opset=20, runs=False,
         half=np.full(1, 0.5, np.float32), stays="its constants may have more dimensions than its data"),
]  # fmt: skip


@table(CLAMPS, LEAKY, PRELUS, HARD, SWISHES, ARGUMENTS, GELUS)
def test_rules(case: Case) -> None:
    case.check()


@pytest.mark.parametrize("body", [*ERF, *TANH])
def test_before_opset_20_gelu_becomes_what_onnxruntime_fuses(
    body: str, tmp_path: Path, running_graph: RunningGraph
) -> None:
    case = gelu(f"{body} y = Neg(g)", opset=14)
    graph = named_graph(case.made)
    assert bool(case.step.apply(graph)) != {**ERF, **TANH}[body]
    assert [reason for _, reason in FuseGelu().apply(graph).skipped] == ["ONNX has Gelu from opset 20 on"]
    save(graph, tmp_path / "model.onnx")
    running = running_graph(tmp_path / "model.onnx")
    assert [node.op_type for node in running.node] == ["Gelu" if body in ERF else "FastGelu", "Neg"]
    assert difference(outputs(graph, sample(case.made)), outputs(case.made, sample(case.made))) < 1e-6


@pytest.mark.parametrize("opset", [10, 17])
@pytest.mark.parametrize(
    "body", ["y = Max(x, zero)", "y = Min(x, zero)", "y = Max(x, small)", "y = Max(x, infinite)", "y = Max(x, least)",
             "y = Min(x, most)", "a = Relu(x) y = Min(a, most)", "a = Min(x, large) y = Max(a, small)"],
)  # fmt: skip
@pytest.mark.parametrize(("type_name", "dtype"), [("float", np.float32), ("float16", np.float16)])
def test_infinite_values_and_limits(body: str, opset: int, type_name: str, dtype: type[np.floating]) -> None:
    limits = {**clamp.shared, "least": np.finfo(dtype).min, "most": np.finfo(dtype).max}
    used = {name: np.asarray(limit).astype(dtype) for name, limit in limits.items() if f" {name})" in body}
    made = model(f"({type_name}[5] x) => ({type_name}[5] y) {{ {body} }}", opset=opset, **used)
    graph = named_graph(made)
    MergeClamps().apply(graph)
    x = np.array([-np.inf, -3, np.nan, 3, np.inf], dtype)
    np.testing.assert_array_equal(outputs(graph, {"x": x})["y"], outputs(made, {"x": x})["y"])


@pytest.mark.parametrize(
    ("slope", "attributes", "expected"),
    [
        (1.0, "", ["Sigmoid", "Mul"]),
        (1.0, " <alpha = 1.0>", ["Sigmoid", "Mul"]),
        (1.702, " <alpha = 1.702>", ["Mul", "Sigmoid", "Mul"]),
    ],
)
def test_the_gate_and_the_product_say_what_swish_says(slope: float, attributes: str, expected: list[str]) -> None:
    """onnxruntime has no kernel of Swish to compare with."""
    made = swish(f"[swish] y = Swish{attributes} (x)", opset=24).made
    graph = named_graph(made)
    assert SplitSwishes().apply(graph).changed == ("swish",)
    assert ops(graph) == expected
    assert graph.nodes[-1].name == "swish"
    x = sample(made)["x"].astype(np.float64)
    np.testing.assert_allclose(outputs(graph, sample(made))["y"], x / (1 + np.exp(-slope * x)), rtol=1e-5, atol=1e-6)


def test_a_slope_of_unknown_type_is_left() -> None:
    graph = as_graph(swish("[swish] y = Swish <alpha = 1.702> (x)", opset=24).made)
    graph.inputs[0].dtype = None
    assert SplitSwishes().apply(graph).skipped == (("swish", "the type of its data is not known"),)


def test_a_damaged_hard_swish_is_left() -> None:
    graph = named_graph(hard("y = HardSwish(x)").made)
    nodes(graph)[0].inputs = []
    assert not UseHardSigmoid().apply(graph)


WRITTEN_OUT = "r = Relu(x) n = Neg(x) m = Relu(n) s = Mul(m, falling) y = Add(r, s)"


@pytest.mark.parametrize(
    ("case", "target", "expected"),
    [
        (join(GATED % (1 / 6, "s"), opset=14), "openvino", ["Sin", "HardSwish"]),
        (join("s = Sin(x) y = HardSwish(s)", opset=14), "openvino", ["Sin", "HardSwish"]),
        (join(GATED % (1 / 6, "s"), opset=14), "onnxruntime-cpu", ["Sin", "HardSigmoid", "Mul"]),
        (split("y = PRelu(x, gentle)"), "openvino", ["PRelu"]),
        (split("y = PRelu(x, gentle)"), "onnxruntime-cpu", ["Mul", "Max"]),
        (split(WRITTEN_OUT, falling=-gentle), "openvino", ["Mul", "Max"]),
        (split(WRITTEN_OUT, falling=-gentle), "onnxruntime-cpu", ["Mul", "Max"]),
    ],
    ids=str,
)
def test_every_export_gets_the_form_of_its_runtime_and_keeps_it(case: Case, target: str, expected: list[str]) -> None:
    graph = named_graph(case.made)
    steps = integer_steps(preset_named("int8"), target_named(target))
    prepare_in_place(graph, steps)
    assert ops(graph) == expected
    first = [(node.name, node.outputs[0].name) for node in graph.nodes]
    prepare_in_place(graph, steps, opset=21)
    assert [(node.name, node.outputs[0].name) for node in graph.nodes] == first
    assert graph.opset >= 21


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("e = Erf(x) a = Add(e, one) y = Mul(x, a)", True),
        ("e = Tanh(x) a = Add(one, e) y = Mul(a, x)", True),
        ("e = Exp(x) a = Add(e, one) y = Mul(x, a)", False),
        ("e = Erf(x) y = Mul(x, e)", False),
        ("e = Erf(x) a = Add(e, one) y = Add(x, a)", False),
        ("y = Mul(x, one)", False),
    ],
)
def test_gelu_before_halving(body: str, expected: bool) -> None:
    graph = as_graph(gelu(body).made)
    assert is_gelu_before_halving(graph.outputs[0]) == expected
    assert not is_gelu_before_halving(graph.inputs[0])


class Rectify(RewriteRule):
    def pattern(self, op):
        return op.PRelu(op.any("x"), op.constant("slope"))

    def rewrite(self, new, match):
        return rectified(new, match.x, match.slope.values)


@pytest.mark.parametrize(
    "slope", [[-2, 0, 1], [-2, -1, 1], [1, 1, 1], [1, 2, 3], [-1, 1, 2], [0, 0.5, 1.5], [0, 0, 0], [-0.5, 2, 1]]
)
@pytest.mark.parametrize("large", [1.0, 1e38, np.inf])
def test_each_sign_gets_its_slope(slope: list[float], large: float) -> None:
    made = model("(float[4, 3] x) => (y) { y = PRelu(x, k) }", opset=MAX_BROADCASTS, k=np.array(slope, np.float32))
    graph = named_graph(made)
    assert Rectify().apply(graph)
    x = np.array([[-3, -0.25, -1], [2, 1, 3], [-1, -1, -1], [1, np.nan, 0.5]], np.float32) * np.float32(large)
    np.testing.assert_allclose(outputs(graph, {"x": x})["y"], outputs(made, {"x": x})["y"], rtol=1e-6)
