"""Outputs that data decides, and outputs that are joined of parts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from conftest import Build
from onnx import ModelProto

from onnxq.evaluation.agreement import OutputAgreement, agreement_of
from onnxq.evaluation.outputs import DataDependentOutputs, OutputPart, joins, matched, paired, parts_of
from onnxq.evaluation.warnings import warn_weak_slices
from onnxq.ir import Graph, read_model
from onnxq.onnx_api import infer_shapes

WEIGHTS = {
    "w": (8, 8),
    "k": np.array([3]),
    "half": np.array([0.5], np.float32),
    "flat": np.array([-1]),
    "names": np.arange(8) + 100,
    "one": np.array([1]),
}


def decided(model: ModelProto) -> DataDependentOutputs:
    graph = read_model(model)
    infer_shapes(graph)
    return DataDependentOutputs(graph)


def entering(model: ModelProto) -> dict[str, list[str]]:
    return {output: [tensor.name for tensor in tensors] for output, tensors in decided(model).entering.items()}


def chosen(model: ModelProto) -> dict[str, list[str]]:
    """Return the scores of the choices before each output; those of one made of choices alone in brackets."""
    found = decided(model)
    names = {
        output: [score.name for choice in choices for score in choice.scores]
        for output, choices in found.chosen.items()
    }
    return {
        output: [f"[{one}]" for one in scores] if output in found.made_of_choices else scores
        for output, scores in names.items()
    }


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("y = Relu(h) z = Softmax(h)", {}),
        ("y, z = TopK(h, k)", {"y": ["h"], "z": ["[h]"]}),
        ("y = Relu(h) m = Greater(h, half) z = NonZero(m)", {"z": ["[h]"]}),
        ("m = Reshape(h, flat) above = Greater(m, half) y = Compress(x, above) z = Relu(h)", {"y": ["m"]}),
        # A condition may be asked twice, and be an output itself.
        (
            "m = Reshape(h, flat) z = Greater(m, half) y = Compress(names, z) a = Compress(h, z) b = NonZero(z)",
            {"y": ["[m]"]},
        ),
        # What is picked comes from elsewhere than what picks it.
        ("e = Exp(h) v, i = TopK(h, k) y = GatherElements<axis = 1>(e, i) z = Relu(v)", {"y": ["h"], "z": ["h"]}),
        # The number of elements is decided, whatever they are.
        ("m = Greater(h, half) n = NonZero(m) z = Shape(n) y = Relu(h)", {"z": ["[h]"]}),
        # One choice is made by another, and by floats that were chosen.
        (
            "l = ArgMax<axis = 1>(h) m = Equal(l, k) z = NonZero(m) v, i = TopK(h, k) y, j = TopK(v, one)",
            {"z": ["[h]"], "y": ["h", "v"]},
        ),
        # The inputs are the same for all models, and so is what they say.
        ("m = Greater(x, half) z = NonZero(m) y = Relu(h)", {}),
        ("m = Greater(x, half) above = Reshape(m, flat) y = Compress(h, above) z = Relu(h)", {}),
        ("s = Shape(h) c = ConstantOfShape(s) z = NonZero(c) y = Relu(h)", {}),
    ],
)
def test_choices_are_found_before_outputs(nodes: str, expected: dict[str, list[str]], build: Build) -> None:
    model = build(f"(float[4,8] x) => (y, z) {{ h = MatMul(x, w) {nodes} }}", **WEIGHTS)
    assert chosen(model) == expected


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("p = Softmax(h) z = ArgMax<axis = 1>(p) y = Relu(h)", {"z": ["p"]}),
        ("l = ArgMin<axis = 1>(h) z = Gather(names, l) y = Relu(h)", {"z": ["h"]}),
        ("v, i = TopK(h, k) z = ArgMax<axis = 1>(v) y = Relu(h)", {"z": ["v"]}),
        # Floats that labels look up, or that only the inputs decide, are compared themselves.
        ("l = ArgMax<axis = 1>(h) y = Gather(w, l) z = Shape(l)", {}),
        ("l = ArgMin<axis = 1>(h) f = Cast<to = 1>(l) z = Exp(f) y = Relu(h)", {}),
        ("l = ArgMax<axis = 1>(x) z = Gather(names, l) y = Relu(h)", {}),
    ],
)
def test_labels_are_decided_by_the_first_floats_in_front(
    nodes: str, expected: dict[str, list[str]], build: Build
) -> None:
    assert entering(build(f"(float[4,8] x) => (y, z) {{ h = MatMul(x, w) {nodes} }}", **WEIGHTS)) == expected


def test_outputs_whose_length_no_choice_tells_are_decided_by_the_floats_in_front(build: Build) -> None:
    model = build("(float[4,8] x) => (y, z) { h = MatMul(x, w) y, f, i, z = Unique(h) }", **WEIGHTS)
    assert entering(model) == {"y": ["h"], "z": ["h"]}
    assert chosen(model) == {}


def test_outputs_of_known_shapes_are_compared_whatever_was_counted(build: Build) -> None:
    model = build(
        """(float[4,8] x) => (y, float[8] z) {
            h = MatMul(x, w) y = Unique<axis = 0>(h) z = ReduceMax<axes = [0], keepdims = 0>(y)
        }""",
        **WEIGHTS,
    )
    assert entering(model) == {"y": ["h"]}


LOOP = """(float[4,8] x, int64 count) => (y) {{
    h = MatMul(x, w)
    {front}
    last, y = Loop({count}, always, h) <
        body = b (int64 i, bool on, float[4,8] s) => (bool more, float[4,8] t, float[4,8] seen) {{
            t = Relu(s) seen = Identity(t) {more}
        }}>
}}"""
LARGE = "largest = ReduceMax<keepdims = 0>(t)"


@pytest.mark.parametrize(
    ("front", "count", "more", "deciding"),
    [
        ("", "count", "more = Identity(on)", []),
        ("", "most", "more = Less(i, most)", []),
        # TensorFlow counts so.
        ("", "most", "f = Cast<to = 1>(i) more = Less(f, limit)", []),
        ("", "most", f"{LARGE} more = Less(largest, limit)", ["h"]),
        ("m = ReduceMax<keepdims = 0>(h) n = Cast<to = 7>(m)", "n", "more = Identity(on)", ["m", "h"]),
        ("s = Shape(h) first = Gather(s, nought)", "first", "more = Identity(on)", []),
    ],
)
def test_a_loop_decides_where_floats_say_when_it_ends(
    front: str, count: str, more: str, deciding: list[str], build: Build
) -> None:
    numbers = {"always": np.array(True), "most": np.array(5), "limit": np.float32(3), "nought": np.array(0)}
    model = build(LOOP.format(front=front, count=count, more=more), w=(8, 8), **numbers)
    assert entering(model) == ({"y": deciding} if deciding else {})


def test_operators_in_bodies_decide_too(build: Build) -> None:
    model = build(
        """(float[8] x, bool c) => (y) {
            h = Relu(x)
            y = If (c) <then_branch = t () => (u) { u = NonZero(h) }, else_branch = e () => (v) { v = NonZero(k) }>
        }""",
        k=np.array([2]),
    )
    assert entering(model) == {"y": ["h"]}


def test_weights_behind_what_was_decided_are_named(build: Build) -> None:
    text = "(float[4,8] x) => (y) { h = MatMul(x, w) c = Unique<axis = 0>(h) [late] y = MatMul(c, u) }"
    assert decided(build(text, u=(8, 2), **WEIGHTS)).weighted == ("late",)


def test_names_of_labels_are_no_weights(build: Build) -> None:
    text = "(float[4,8] x) => (z) { h = MatMul(x, w) l = ArgMax<axis = 1>(h) [late] z = Gather(names, l) }"
    assert decided(build(text, **WEIGHTS)).weighted == ()


def test_tensors_are_matched_by_name_behind_codes_and_else_by_place(build: Build) -> None:
    text = "(float[4,8] x) => (y) { h = MatMul(x, w) e = Exp(h) v, i = TopK(h, k) y = GatherElements<axis = 1>(e, i) }"
    quantized = """(float[4,8] x) => (y) {
        h = MatMul(x, w) q = QuantizeLinear(h, s, z) d = DequantizeLinear(q, s, z) other = Exp(d)
        v, i = TopK(d, k) y = GatherElements<axis = 1>(other, i)
    }"""
    scales = {"s": np.float32(0.1), "z": np.array(0, np.int8)}
    [wanted] = decided(build(text, **WEIGHTS)).choices
    [found] = decided(build(quantized, **WEIGHTS, **scales)).choices
    assert paired([wanted.named], [found]) == {wanted.named: found}
    assert matched(["h"], found.scores) == {"h": "d"}
    assert matched(["a"], found.scores) == {"a": "d"}
    assert matched(["a", "h"], found.scores) is None


def test_choices_are_paired_by_name_and_else_by_place(build: Build) -> None:
    text = "(float[4,8] x) => (y, z) {{ h = MatMul(x, w) v, {} = TopK(h, k) y, {} = TopK(v, one) z = Relu(h) }}"
    here, there, turned = (decided(build(text.format(*names), **WEIGHTS)).choices for names in ("ij", "pj", "ji"))
    wanted = [choice.named for choice in here]
    assert list(paired(wanted, there).values()) == [there[1], there[0]]
    assert {one.name: choice.chosen.name for one, choice in paired(wanted, turned).items()} == {"i": "i", "j": "j"}
    # Of one of two alone nobody knows which it is.
    assert [one.name for one in paired(wanted, there[1:])] == ["j"]


# Outputs that are joined of parts: which, and what one hides of another.


def found(model: object) -> dict[str, list[tuple[int, int, int]]]:
    graph: Graph = read_model(model)
    infer_shapes(graph)
    return {name: [(one.axis, one.start, one.stop) for one in parts] for name, parts in parts_of(graph).items()}


CASES = [
    ("y = Concat<axis = 1>(a, b)", [(1, 0, 4), (1, 4, 7)]),
    ("y = Concat<axis = -2>(a, b)", [(1, 0, 4), (1, 4, 7)]),
    ("j = Concat<axis = 1>(a, b) y = Transpose<perm = [0, 2, 1]>(j)", [(2, 0, 4), (2, 4, 7)]),
    ("j = Concat<axis = 1>(a, b) y = Reshape(j, apart)", [(1, 0, 4), (1, 4, 7)]),
    # Heads of different sizes of image, each of which joins boxes and scores.
    ("j = Concat<axis = 1>(a, b) k = Concat<axis = 1>(a, b) y = Concat<axis = 2>(j, k)", [(1, 0, 4), (1, 4, 7)]),
    ("j = Concat<axis = 1>(a, b) k = Concat<axis = 1>(b, a) y = Concat<axis = 2>(j, k)", [(2, 0, 8), (2, 8, 16)]),
    ("j = Concat<axis = 1>(a, b) y = Relu(j)", None),
    ("y = Add(a, a)", None),
]


@pytest.mark.parametrize(("nodes", "parts"), CASES)
def test_parts_are_followed_to_the_output(nodes: str, parts: list[tuple[int, int, int]] | None, build: Build) -> None:
    model = build(
        f"(float[1,4,8] x, float[1,3,8] z) => (y) {{ a = Relu(x) b = Sigmoid(z) {nodes} }}",
        apart=np.array([1, 7, 2, 4]),
    )
    assert found(model) == ({} if parts is None else {"y": parts})
    assert joins(model.graph) or parts is None


def test_noise_of_a_part_shows_beside_that_of_all() -> None:
    expected = np.concatenate([np.full((1, 4, 8), 100.0), np.full((1, 3, 8), 0.5)], axis=1).astype(np.float32)
    noisy = expected.copy()
    noisy[:, 4:] += 0.25
    parts = {"y": (OutputPart(1, 0, 4, "Mul boxes"), OutputPart(1, 4, 7, "Sigmoid scores"))}
    (output,) = agreement_of(["y"], [([expected], [noisy])], parts=parts).outputs
    assert [part.sqnr for part in output.parts] == [pytest.approx(float("inf")), pytest.approx(6.02, abs=0.01)]
    (sentence,) = warn_weak_slices([output], 20.0)
    assert sentence.startswith("output y has 6.0 dB in entries 4 to 6 of axis 1 (Sigmoid scores), but")
    assert sentence.endswith("or ask for --min-sqnr 68")


def test_what_is_faithful_or_refused_anyway_hides_nothing() -> None:
    part = OutputPart(1, 0, 4, "Mul boxes", 15.0)
    for whole, wanted in ((30.0, 10.0), (16.0, 20.0)):
        output = OutputAgreement("y", whole, None, 0.0, same_shapes=True, finite=True, compared=0, parts=(part,))
        assert not warn_weak_slices([output], wanted)


def test_a_part_that_is_silent_in_float_is_told_without_a_goal_that_would_help() -> None:
    part = OutputPart(0, 2, 4, "head", -math.inf)
    output = OutputAgreement("y", 66.0, None, 0.0, same_shapes=True, finite=True, compared=0, parts=(part,))
    (sentence,) = warn_weak_slices([output], 20.0)
    assert sentence.endswith("but 66.0 dB in all; evaluate with --metric")
