"""Spellings of activation functions become one node, or the fastest nodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from model_texts import apply_once, difference, model, named_graph, nodes, ops, outputs, sample, values
from onnx import ModelProto

from onnxq.config.presets import PRESETS, preset_named
from onnxq.ir import Graph, Node, as_graph, save
from onnxq.passes import (
    FuseGelu,
    JoinHardSwishes,
    MergeClamps,
    SplitHardSwishes,
    SplitPRelus,
    SplitSwishes,
    UnifyGeluArgument,
    UseHardSwish,
    UseLeakyRelu,
)
from onnxq.passes.activations import FIRST_OPSET, is_gelu_before_halving, rectified
from onnxq.passes.preparing.preparation import integer_steps, prepare_for_integers
from onnxq.rewrite import Changes, RewriteRule, RewriteRules
from onnxq.runtime.targets import target_named

# MergeClamps ----------------------------------------------------------------------------------------------------------

LIMITS = {
    "zero": np.array(0, np.float32),
    "small": np.array(-0.5, np.float32),
    "large": np.array(0.75, np.float32),
    "wide": np.array([[0.75]], np.float32),
    "most": np.finfo(np.float32).max,
    "infinite": np.array(np.inf, np.float32),
    "below": np.array(-np.inf, np.float32),
}


def merge(body: str, opset: int = 17, inputs: str = "float[N, 8] x") -> tuple[Graph, Changes]:
    used = {name: np.asarray(array) for name, array in LIMITS.items() if name in body and "<" not in body}
    made = model(f"g ({inputs}) => (float[N, 8] y) {{ {body} }}", opset=opset, **used)
    graph = named_graph(made)
    changes = MergeClamps().apply(graph)
    for seed in (0, 1):
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) == 0
    assert not MergeClamps().apply(graph)
    return graph, changes


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("a = Max(x, small) y = Min(wide, a)", ["Clip"]),
        ("y = Max(zero, x)", ["Relu"]),
        ("y = Min(x, wide)", ["Clip"]),
        ("y = Clip(x, zero, infinite)", ["Relu"]),
        ("a = Exp(x) b = Max(a, below) y = Neg(b)", ["Exp", "Neg"]),
        ("a = Relu(x) y = Relu(a)", ["Relu"]),
        ("a = Relu(x) y = Clip(a, small, large)", ["Clip"]),
        ("a = Clip(x, , zero) y = Clip(a, small)", ["Clip"]),
        ("a = Clip(x, small, large) b = Relu(a) y = Min(b, zero)", ["Clip"]),
        ("a = Min(x, small) y = Relu(a)", ["Clip"]),
        ("a = Clip(x, zero, large) y = Clip(a, zero, most)", ["Clip"]),
    ],
)
def test_limits_become_one(body: str, expected: list[str]) -> None:
    assert ops(merge(body)[0]) == expected


def test_limits_are_attributes_in_old_models() -> None:
    graph, _ = merge("a = Relu(x) y = Clip<min = -1.0, max = 0.5>(a)", opset=9)
    assert ops(graph) == ["Clip"]
    assert graph.nodes[0].attrs == {"min": 0.0, "max": 0.5}
    graph, _ = merge("a = Relu(x) y = Min(a, large)", opset=9)
    assert graph.nodes[0].attrs == {"min": 0.0, "max": 0.75}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("y = Clip(x, small, large)", "it is a Clip already"),
        ("y = Clip(x, zero)", "it is a Clip already"),
        ("y = Clip(x, zero, most)", "it is a Clip already"),
        ("y = Clip(x)", "it is a Clip already"),
        ("r = ReduceMax<keepdims = 0>(x) y = Clip(x, r)", "its limits are computed, or cross"),
        ("y = Clip(x, large, small)", "its limits are computed, or cross"),
    ],
)
def test_merge_clamps_others_stay(body: str, reason: str) -> None:
    _, changes = merge(body.replace("large, small", "zero, small"))
    assert not changes.changed
    assert changes.skipped[0][1] == reason


@pytest.mark.parametrize("opset", [10, 17])
@pytest.mark.parametrize(
    "body", ["y = Max(x, zero)", "y = Min(x, zero)", "y = Max(x, small)", "y = Max(x, infinite)", "y = Max(x, least)",
             "y = Min(x, most)", "a = Relu(x) y = Min(a, most)", "a = Min(x, large) y = Max(a, small)"],
)  # fmt: skip
@pytest.mark.parametrize(("type_name", "dtype"), [("float", np.float32), ("float16", np.float16)])
def test_infinite_values_and_limits(body: str, opset: int, type_name: str, dtype: type[np.floating]) -> None:
    limits = LIMITS | {"least": np.finfo(dtype).min, "most": np.finfo(dtype).max}
    used = {name: np.asarray(array).astype(dtype) for name, array in limits.items() if f" {name})" in body}
    made = model(f"g ({type_name}[5] x) => ({type_name}[5] y) {{ {body} }}", opset=opset, **used)
    graph = named_graph(made)
    MergeClamps().apply(graph)
    x = np.array([-np.inf, -3, np.nan, 3, np.inf], dtype)
    np.testing.assert_array_equal(outputs(graph, {"x": x})["y"], outputs(made, {"x": x})["y"])


def test_a_limit_that_raises_the_rank_stays() -> None:
    made = model("g (float[8] x) => (float[1, 8] y) { y = Max(x, wide) }", wide=LIMITS["wide"])
    assert MergeClamps().apply(named_graph(made)).skipped[0][1] == "its limit may raise the rank"


def test_whole_numbers_stay() -> None:
    made = model("g (int64[8] x) => (int64[8] y) { y = Max(x, zero) }", zero=np.array(0))
    assert (
        MergeClamps().apply(named_graph(made)).skipped[0][1]
        == "its data is constant, or not known to be floating point"
    )


def test_values_that_others_read_stay() -> None:
    graph, _ = merge("a = Relu(x) b = Clip(a, small, large) c = Neg(a) y = Add(b, c)")
    assert ops(graph) == ["Relu", "Clip", "Neg", "Add"]


# UseLeakyRelu ---------------------------------------------------------------------------------------------------------

CONSTANTS = {
    "tenth": np.array(0.1, np.float32),
    "alike": np.full((4, 1, 1), 0.2, np.float32),
    "each": values(4, 1, 1),
    "nil": np.zeros(1, np.float32),
    "zero": np.array(0, np.float32),
    "gentle": np.geomspace(0.125, 1, 4, dtype=np.float32).reshape(4, 1, 1),
    "steep": np.linspace(1, 3, 4, dtype=np.float32).reshape(4, 1, 1),
    "mixed": np.linspace(0.5, 2, 4, dtype=np.float32).reshape(4, 1, 1),
    "two": np.array(2, np.float32),
}


def use_leaky_relu(body: str) -> tuple[Graph, Changes]:
    used = {name: array for name, array in CONSTANTS.items() if f", {name}" in body}
    made = model(f"g (float[N, 4, 5, 5] x) => (float[N, 4, 5, 5] y) {{ {body} }}", **used)
    graph = named_graph(made)
    changes = UseLeakyRelu().apply(graph)
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 1e-6
    assert not UseLeakyRelu().apply(graph)
    return graph, changes


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("y = PRelu(x, tenth)", ["LeakyRelu"]),
        ("y = PRelu(x, alike)", ["LeakyRelu"]),
        ("y = PRelu(x, nil)", ["LeakyRelu"]),
        ("r = Relu(x) n = Neg(x) m = Relu(n) s = Mul(m, tenth) y = Sub(r, s)", ["LeakyRelu"]),
        ("s = Mul(x, tenth) y = Max(s, x)", ["LeakyRelu"]),
        # As Keras and MXNet write it.
        ("r = Relu(x) n = Neg(x) m = Relu(n) s = Mul(m, gentle) y = Sub(r, s)", ["Mul", "Max"]),
        ("r = Relu(x) n = Neg(x) m = Relu(n) s = Mul(m, steep) y = Add(s, r)", ["Mul", "Max"]),
        ("r = Relu(x) n = Neg(x) m = Relu(n) s = Mul(m, steep) y = Sub(r, s)", ["Mul", "Min"]),
        ("r = Relu(x) m = Min(x, zero) s = Mul(m, gentle) y = Add(r, s)", ["Mul", "Max"]),
    ],
)
def test_use_leaky_relu_all_forms_are_known(body: str, expected: list[str]) -> None:
    assert ops(use_leaky_relu(body)[0]) == expected


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("y = PRelu(x, each)", "each channel has a slope of its own"),
        ("s = Mul(x, two) y = Max(s, x)", "its slope is not between 0 and 1"),
        ("s = Mul(x, zero) y = Max(s, x)", "its slope is not between 0 and 1"),
        ("r = Relu(x) m = Min(x, zero) s = Mul(m, mixed) y = Add(r, s)", "its slopes lie on both sides of 1"),
    ],
)
def test_use_leaky_relu_others_stay(body: str, reason: str) -> None:
    _, changes = use_leaky_relu(body)
    assert not changes.changed
    assert changes.skipped[0][1].startswith(reason)


@pytest.mark.parametrize(
    ("data", "body", "constants", "reason"),
    [
        (
            "1, 1, 4",
            "m = Relu(n) s = Mul(m, c) y = Sub(r, s)",
            {"c": np.full((1, 3, 1), 0.25)},
            "its slope is not known",
        ),
        (
            "4",
            "m = Min(x, z) s = Mul(m, c) y = Add(r, s)",
            {"z": np.zeros((1, 1)), "c": np.array(0.25)},
            "a constant may",
        ),
    ],
)
def test_use_leaky_relu_constants_that_widen_the_data_stay(
    data: str, body: str, constants: dict[str, np.ndarray], reason: str
) -> None:
    text = f"g (float[{data}] x) => (y) {{ r = Relu(x) n = Neg(x) {body} }}"
    made = model(text, **{name: array.astype(np.float32) for name, array in constants.items()})
    changes = UseLeakyRelu().apply(named_graph(made))
    assert not changes.changed
    assert changes.skipped[0][1].startswith(reason)


def test_a_slope_that_widens_the_data_stays() -> None:
    text = """g (float[N, C, 5, 5] x) => (float[N, 4, 5, 5] y) {
        r = Relu(x) n = Neg(x) m = Relu(n) s = Mul(m, each) y = Add(s, r) }"""
    changes = UseLeakyRelu().apply(named_graph(model(text, each=CONSTANTS["each"])))
    assert changes.skipped[0][1] == "its slope is not known to fit its data"


# SplitPRelus ----------------------------------------------------------------------------------------------------------

SPLIT_P_RELUS_TEXT = "g (float[N, 4, 5, 5] x) => (float[N, 4, 5, 5] y) { [p] y = PRelu(x, slope) }"


def slopes(first: float, last: float) -> np.ndarray:
    return np.linspace(first, last, 4, dtype=np.float32).reshape(4, 1, 1)


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [(0.25, 1.0, ["Mul", "Max"]), (1.0, 3.0, ["Mul", "Min"]), (0.5, 2.0, ["Relu", "Min", "Mul", "Add"])],
)
def test_what_is_chosen_is_what_it_was(first: float, last: float, expected: list[str]) -> None:
    made = model(SPLIT_P_RELUS_TEXT, slope=slopes(first, last))
    graph = named_graph(made)
    assert apply_once(SplitPRelus(), graph).changed == ("p",)
    assert ops(graph) == expected
    assert graph.nodes[-1].name == "p"
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 1e-6


def test_what_an_old_opset_cannot_say_stays() -> None:
    changes = apply_once(SplitPRelus(), named_graph(model(SPLIT_P_RELUS_TEXT, opset=7, slope=slopes(0.5, 1.0))))
    assert changes.skipped == (("p", "its replacement needs opset 8"),)


def test_slopes_that_are_computed_stay() -> None:
    text = "g (float[N, 4, 5, 5] x, float[4, 1, 1] s) => (float[N, 4, 5, 5] y) { y = PRelu(x, s) }"
    assert not apply_once(SplitPRelus(), named_graph(model(text)))


@pytest.mark.parametrize(("target", "expected"), [("onnxruntime-cpu", ["Mul", "Max"]), ("openvino", ["PRelu"])])
def test_every_export_gets_the_form_of_its_runtime(target: str, expected: list[str]) -> None:
    steps = integer_steps(preset_named("int8"), target_named(target))

    def prepared(text: str, slope: np.ndarray) -> Graph:
        graph = named_graph(model(text, slope=slope))
        prepare_for_integers(graph, steps)
        return graph

    assert ops(prepared(SPLIT_P_RELUS_TEXT, slopes(0.1, 0.4))) == expected
    written_out = "r = Relu(x) n = Neg(x) m = Relu(n) s = Mul(m, slope) y = Add(r, s)"
    other = prepared(f"g (float[N, 4, 5, 5] x) => (float[N, 4, 5, 5] y) {{ {written_out} }}", -slopes(0.1, 0.4))
    assert ops(other) == ["Mul", "Max"]


# UseHardSwish ---------------------------------------------------------------------------------------------------------

USE_HARD_SWISH_NUMBERS = {"three": 3, "nil": 0, "six": 6, "sixth": 1 / 6, "ten": 10}


def use_hard_swish(body: str, opset: int = 17) -> tuple[Graph, Changes]:
    used = {
        name: np.array(value, np.float32)
        for name, value in USE_HARD_SWISH_NUMBERS.items()
        if f", {name}" in f"{body} , ten"
    }
    made = model(f"g (float[N, 8] x) => (float[N, 8] y) {{ u = Mul(x, ten) {body} }}", opset=opset, **used)
    graph = named_graph(made)
    changes = UseHardSwish().apply(graph)
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 1e-6
    assert not UseHardSwish().apply(graph)
    return graph, changes


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("a = Add(u, three) c = Clip(a, nil, six) y = Div(c, six)", ["HardSigmoid"]),
        ("a = Add(u, three) c = Clip(a, nil, six) y = Mul(c, sixth)", ["HardSigmoid"]),
        ("a = Add(u, three) c = Clip(a, nil, six) d = Mul(u, c) y = Div(d, six)", ["HardSwish"]),
        ("a = Add(u, three) c = Clip(a, nil, six) d = Mul(c, sixth) y = Mul(u, d)", ["HardSwish"]),
        ("a = Add(u, three) c = Clip(a, nil, six) d = Div(u, six) y = Mul(d, c)", ["HardSwish"]),
        ("h = HardSigmoid<alpha = 0.16666667, beta = 0.5>(u) y = Mul(h, u)", ["HardSwish"]),
    ],
)
def test_use_hard_swish_all_forms_are_known(body: str, expected: list[str]) -> None:
    assert ops(use_hard_swish(body)[0]) == ["Mul", *expected]


def test_old_models_have_two_nodes() -> None:
    graph, _ = use_hard_swish(
        "a = Add(u, three) c = Clip<min = 0.0, max = 6.0>(a) d = Mul(u, c) y = Div(d, six)", opset=9
    )
    assert ops(graph) == ["Mul", "HardSigmoid", "Mul"]


@pytest.mark.parametrize(
    ("body", "opset", "reason"),
    [
        ("h = HardSigmoid<alpha = 0.16666667, beta = 0.5>(u) y = Mul(h, u)", 13, "HardSwish came with opset 14"),
        ("h = HardSigmoid(u) y = Mul(h, u)", 17, "its slope is not one sixth"),
    ],
)
def test_use_hard_swish_others_stay(body: str, opset: int, reason: str) -> None:
    _, changes = use_hard_swish(body, opset)
    assert not changes.changed
    assert changes.skipped[0][1] == reason


@pytest.mark.parametrize(
    ("dtype", "three", "reason"),
    [
        ("float", np.full((1, 1), 3), "a constant may raise the rank"),
        ("double", np.array(3), "its data is not known to"),
    ],
)
def test_what_would_have_another_rank_or_no_kernel_stays(dtype: str, three: np.ndarray, reason: str) -> None:
    kind = {"float": np.float32, "double": np.float64}[dtype]
    body = "a = Add(x, three) c = Clip(a, nil, six) y = Div(c, six)"
    numbers = {"three": three.astype(kind), "nil": kind(0), "six": kind(6)}
    made = model(f"g ({dtype}[4] x) => (y) {{ {body} }}", **{name: np.array(one) for name, one in numbers.items()})
    changes = UseHardSwish().apply(named_graph(made))
    assert not changes.changed
    assert changes.skipped[0][1].startswith(reason)


# JoinHardSwishes ------------------------------------------------------------------------------------------------------

JOIN_HARD_SWISHES_TEXT = (
    "g (float[2, 3] x) => (float[2, 3] y) { s = Sin(x) g = HardSigmoid <alpha = %s, beta = 0.5> (s) y = Mul(%s, g) }"
)


def test_an_old_model_is_brought_to_its_opset() -> None:
    made = model(JOIN_HARD_SWISHES_TEXT % (1 / 6, "s"), opset=11)
    graph = named_graph(made)
    assert apply_once(JoinHardSwishes(), graph)
    assert (graph.opset, ops(graph)) == (14, ["Sin", "HardSwish"])
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 1e-6


@pytest.mark.parametrize(("slope", "factor"), [(0.2, "s"), (1 / 6, "x")])
def test_other_products_are_left(slope: float, factor: str) -> None:
    graph = named_graph(model(JOIN_HARD_SWISHES_TEXT % (slope, factor), opset=11))
    assert not apply_once(JoinHardSwishes(), graph)
    assert graph.opset == 11


def test_a_model_that_cannot_be_converted_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxq.passes.activations._OPSET", 99)
    graph = named_graph(model(JOIN_HARD_SWISHES_TEXT % (1 / 6, "s"), opset=11))
    (left,) = JoinHardSwishes().apply(graph).skipped
    assert "99" in left[1]
    assert graph.opset == 11


@pytest.mark.parametrize(
    ("target", "wanted"), [("openvino", ["HardSwish"]), ("onnxruntime-cpu", ["HardSigmoid", "Mul"])]
)
def test_it_is_for_runtimes_that_compute_it_in_the_kernel_before(target: str, wanted: list[str]) -> None:
    graph = named_graph(model(JOIN_HARD_SWISHES_TEXT % (1 / 6, "s"), opset=11))
    steps = integer_steps(PRESETS["int8"], target_named(target))
    prepare_for_integers(graph, steps)
    assert ops(graph)[1:] == wanted
    before = graph.opset
    prepare_for_integers(graph, steps, opset=21)
    assert ops(graph)[1:] == wanted
    assert graph.opset > before


# SplitHardSwishes -----------------------------------------------------------------------------------------------------


def test_the_gate_and_the_product_say_what_hard_swish_says() -> None:
    made = model("g (float[2, 3] x) => (float[2, 3] y) { [swish] a = HardSwish(x) y = Neg(a) }")
    graph = named_graph(made)
    assert apply_once(SplitHardSwishes(), graph) == Changes(("swish",))
    assert [(node.op, node.name) for node in graph.nodes[:2]] == [("HardSigmoid", "swish.gate"), ("Mul", "swish")]
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 1e-6


def test_hard_swish_in_a_body_is_split() -> None:
    made = model(
        """g (bool c, float[2, 3] x) => (float[2, 3] y) {
            y = If(c) <then_branch = t () => (float[2, 3] a) { a = HardSwish(x) },
                       else_branch = e () => (float[2, 3] b) { b = Neg(x) }>
        }"""
    )
    graph = named_graph(made)
    SplitHardSwishes().apply(graph)
    assert sorted(ops(graph)) == ["HardSigmoid", "If", "Mul", "Neg"]


def test_a_damaged_one_or_one_of_another_domain_is_left() -> None:
    graph = named_graph(model("g (float[2, 3] x) => (float[2, 3] y) { y = HardSwish(x) }"))
    nodes(graph)[0].domain = "mine"
    assert not apply_once(SplitHardSwishes(), graph)
    nodes(graph)[0].domain, nodes(graph)[0].inputs = "", []
    assert not apply_once(SplitHardSwishes(), graph)


def test_preparing_again_gives_the_same_names() -> None:
    gate = "HardSigmoid <alpha = 0.16666667, beta = 0.5> (a)"
    graph = named_graph(model(f"g (float[2, 3] x) => (float[2, 3] y) {{ a = Sin(x) g = {gate} y = Mul(a, g) }}"))
    prepare_for_integers(graph, (SplitHardSwishes(),))
    first = [(node.name, node.outputs[0].name) for node in graph.nodes]
    assert "HardSwish" not in ops(graph)
    prepare_for_integers(graph, (SplitHardSwishes(),), opset=21)
    assert [(node.name, node.outputs[0].name) for node in graph.nodes] == first


# SplitSwishes ---------------------------------------------------------------------------------------------------------

SPLIT_SWISHES_TEXT = "g (float[2, 3] x) => (float[2, 3] y) {{ [swish] y = Swish{} (x) }}"


@pytest.mark.parametrize(
    ("slope", "attributes", "expected"),
    [
        (1.0, "", ["Sigmoid", "Mul"]),
        (1.0, " <alpha = 1.0>", ["Sigmoid", "Mul"]),
        (1.702, " <alpha = 1.702>", ["Mul", "Sigmoid", "Mul"]),
    ],
)
def test_the_gate_and_the_product_say_what_swish_says(slope: float, attributes: str, expected: list[str]) -> None:
    made = model(SPLIT_SWISHES_TEXT.format(attributes), opset=24)
    graph = named_graph(made)
    assert apply_once(SplitSwishes(), graph).changed == ("swish",)
    assert ops(graph) == expected
    assert graph.nodes[-1].name == "swish"
    x = sample(made)["x"].astype(np.float64)
    np.testing.assert_allclose(outputs(graph, sample(made))["y"], x / (1 + np.exp(-slope * x)), rtol=1e-5, atol=1e-6)


def test_one_of_another_domain_is_left() -> None:
    graph = named_graph(model(SPLIT_SWISHES_TEXT.format(""), opset=24))
    node: Node = graph.nodes[0]
    node.domain = "mine"
    assert not apply_once(SplitSwishes(), graph)


def test_a_slope_of_unknown_type_is_left() -> None:
    graph = as_graph(model(SPLIT_SWISHES_TEXT.format(" <alpha = 1.702>"), opset=24))
    graph.inputs[0].dtype = None
    assert SplitSwishes().apply(graph).skipped == (("swish", "the type of its data is not known"),)


# UnifyGeluArgument ----------------------------------------------------------------------------------------------------

UNIFY_GELU_ARGUMENT_NUMBERS = {
    "inverse": math.sqrt(0.5),
    "one": 1,
    "two": 2,
    "three": 3,
    "cubic": 0.044715,
    "slope": math.sqrt(2 / math.pi),
}
SQUARES = ("q = Mul(x, cubic) k = Mul(q, x)", "q = Mul(x, x) k = Mul(cubic, q)", "q = Pow(x, two) k = Mul(q, cubic)")
FACTORED = (
    "s = Mul(x, slope) a = Mul(s, i)",
    "s = Mul(slope, i) a = Mul(x, s)",
    "s = Mul(i, x) a = Mul(s, slope)",
)
CUBES = (
    "q = Mul(x, x) c = Mul(q, x) k = Mul(c, cubic)",
    "q = Pow(x, two) c = Mul(x, q) k = Mul(cubic, c)",
    "q = Mul(x, x) c = Mul(cubic, x) k = Mul(c, q)",
    "q = Mul(cubic, x) c = Mul(x, q) k = Mul(x, c)",
    "q = Mul(x, x) c = Mul(q, cubic) k = Mul(c, x)",
)
UNIFY_GELU_ARGUMENT_TANH = (
    *(f"{square} i = Add(k, one) {end}" for square in SQUARES for end in FACTORED),
    *(f"{cube} s = Add(x, k) a = Mul(s, slope)" for cube in CUBES),
)


@pytest.mark.parametrize(
    "body", [f"{argument} y = Tanh(a)" for argument in UNIFY_GELU_ARGUMENT_TANH] + ["a = Mul(inverse, x) y = Erf(a)"]
)
def test_every_spelling_becomes_one(body: str) -> None:
    numbers = {name: np.array(number, np.float32) for name, number in UNIFY_GELU_ARGUMENT_NUMBERS.items()}
    made = model(f"g (float[2, N] x) => (float[2, N] y) {{ {body} }}", **numbers)
    graph = named_graph(made)
    apply_once(UnifyGeluArgument(), graph)
    assert ops(graph) == (["Div", "Erf"] if "Erf" in body else ["Pow", "Mul", "Add", "Mul", "Tanh"])
    for seed in (0, 1):
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) < 1e-6


def test_unify_gelu_argument_constants_that_widen_the_data_stay() -> None:
    made = model(
        "g (float[] x) => (float[1] y) { a = Mul(x, inverse) y = Erf(a) }",
        inverse=np.full(1, math.sqrt(0.5), np.float32),
    )
    ((_, reason),) = UnifyGeluArgument().apply(named_graph(made)).skipped
    assert reason == "its constants may have more dimensions than its data"


# FuseGelu -------------------------------------------------------------------------------------------------------------

GELU = RewriteRules((FuseGelu(), UnifyGeluArgument()))
RunningGraph = Callable[[Path], onnx.GraphProto]

ERF = {
    "div, half last": "d = Div(x, root) e = Erf(d) p = Add(e, one) m = Mul(x, p) g = Mul(m, half)",
    "div, half first": "h = Mul(half, x) d = Div(x, root) e = Erf(d) p = Add(one, e) g = Mul(p, h)",
    "div, half inside": "d = Div(x, root) e = Erf(d) p = Add(e, one) m = Mul(p, half) g = Mul(x, m)",
    "mul, half last": "d = Mul(x, inverse) e = Erf(d) p = Add(e, one) m = Mul(p, x) g = Mul(m, half)",
    "mul, half first": "h = Mul(x, half) d = Mul(inverse, x) e = Erf(d) p = Add(e, one) g = Mul(h, p)",
    "mul, half inside": "d = Mul(x, inverse) e = Erf(d) p = Add(e, one) m = Mul(half, p) g = Mul(m, x)",
}
ENDS = ("h = Mul(x, half) g = Mul(h, p)", "m = Mul(x, p) g = Mul(m, half)", "m = Mul(p, half) g = Mul(x, m)")
ARGUMENTS = {
    "pow": "c = Pow(x, three) k = Mul(c, cubic) s = Add(x, k) a = Mul(s, slope)",
    "cube": "q = Mul(x, x) c = Mul(q, x) k = Mul(cubic, c) s = Add(k, x) a = Mul(slope, s)",
    "factored": "k = Mul(x, cubic) q = Mul(k, x) i = Add(q, one) s = Mul(x, slope) a = Mul(s, i)",
    "square": "q = Pow(x, two) k = Mul(q, cubic) i = Add(one, k) j = Mul(i, slope) a = Mul(x, j)",
}
FUSE_GELU_TANH = {
    f"{name}, {index}": f"{argument} t = Tanh(a) p = Add(t, one) {end}"
    for name, argument in ARGUMENTS.items()
    for index, end in enumerate(ENDS)
}
KNOWN = {"div, half last", "div, half first", "pow, 0"}


def constants() -> Mapping[str, np.ndarray]:
    numbers = {
        "root": math.sqrt(2), "inverse": math.sqrt(0.5), "one": 1, "half": 0.5, "two": 2, "three": 3,
        "cubic": 0.044715, "slope": math.sqrt(2 / math.pi),
    }  # fmt: skip
    return {name: np.array(number, np.float32) for name, number in numbers.items()}


def spelled(body: str, opset: int) -> ModelProto:
    return model(f"g (float[2, N, 8] x) => (float[2, N, 8] y) {{ {body} y = Neg(g) }}", opset=opset, **constants())


@pytest.mark.parametrize("name", [*ERF, *FUSE_GELU_TANH])
def test_becomes_one_node(name: str) -> None:
    made = spelled({**ERF, **FUSE_GELU_TANH}[name], 20)
    graph = named_graph(made)
    apply_once(GELU, graph)
    assert ops(graph) == ["Gelu", "Neg"]
    assert graph.nodes[0].attrs == ({} if name in ERF else {"approximate": "tanh"})
    for seed in (0, 1):
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) < 1e-6


@pytest.mark.parametrize("name", [*ERF, *FUSE_GELU_TANH])
def test_before_opset_20_becomes_what_onnxruntime_fuses(name: str, tmp_path: Path, running_graph: RunningGraph) -> None:
    made = spelled({**ERF, **FUSE_GELU_TANH}[name], 14)
    graph = named_graph(made)
    changes = apply_once(GELU, graph)
    assert bool(changes) == (name not in KNOWN)
    assert [reason for _, reason in FuseGelu().apply(graph).skipped] == ["ONNX has Gelu from opset 20 on"]
    save(graph, tmp_path / "model.onnx")
    running = running_graph(tmp_path / "model.onnx")
    assert [node.op_type for node in running.node] == ["Gelu" if name in ERF else "FastGelu", "Neg"]
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 1e-6


@pytest.mark.parametrize(
    "body",
    [
        ERF["div, half last"].replace("Div(x, root)", "Div(x, two)"),
        ERF["div, half last"].replace("Add(e, one)", "Add(e, half)"),
        ERF["div, half last"].replace("Mul(x, p)", "Mul(e, p)"),
        FUSE_GELU_TANH["pow, 0"].replace("Pow(x, three)", "Pow(x, two)"),
    ],
)
def test_leaves_what_only_looks_alike(body: str) -> None:
    graph = named_graph(spelled(body, 20))
    assert not FuseGelu().apply(graph)


def test_leaves_constants_that_widen_the_data() -> None:
    made = model(
        f"g (float[] x) => (float[1] g) {{ {ERF['div, half last']} }}",
        opset=20, **constants() | {"half": np.full(1, 0.5, np.float32)},
    )  # fmt: skip
    (left,) = FuseGelu().apply(named_graph(made)).skipped
    assert left[1] == "its constants may have more dimensions than its data"


def test_works_in_a_body() -> None:
    body = ERF["mul, half last"].replace("g =", "t =")
    made = model(
        f"""g (float[4] x, bool c) => (float[4] y) {{
            y = If (c) <then_branch = yes () => (float[4] t) {{ {body} }},
                        else_branch = no () => (float[4] n) {{ n = Neg(x) }}> }}""",
        opset=20, **constants(),
    )  # fmt: skip
    graph = named_graph(made)
    apply_once(GELU, graph)
    assert ops(graph) == ["If", "Gelu", "Neg"]
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 1e-6


# GeluParts ------------------------------------------------------------------------------------------------------------


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
    graph = as_graph(model(f"g (float[4] x) => (float[4] y) {{ {body} }}", one=np.array(1, np.float32)))
    assert is_gelu_before_halving(graph.outputs[0]) == expected
    assert not is_gelu_before_halving(graph.inputs[0])


# Rectifiers -----------------------------------------------------------------------------------------------------------


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
    slopes = np.array(slope, np.float32)
    made = model("g (float[4, 3] x) => (float[4, 3] y) { y = PRelu(x, k) }", opset=FIRST_OPSET, ir_version=5, k=slopes)
    graph = named_graph(made)
    assert Rectify().apply(graph)
    x = np.array([[-3, -0.25, -1], [2, 1, 3], [-1, -1, -1], [1, np.nan, 0.5]], np.float32) * np.float32(large)
    np.testing.assert_allclose(outputs(graph, {"x": x})["y"], outputs(made, {"x": x})["y"], rtol=1e-6)
