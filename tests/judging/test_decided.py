"""Which outputs the data decides, and by which floats."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import Build
from onnx import ModelProto

from onnxq.judging.decided import Decided, matched
from onnxq.modelfile import read_model
from onnxq.onnx_tools import infer_shapes

WEIGHTS = {
    "w": (8, 8),
    "k": np.array([3]),
    "half": np.array([0.5], np.float32),
    "flat": np.array([-1]),
    "names": np.arange(8) + 100,
}


def decided(model: ModelProto) -> Decided:
    graph = read_model(model)
    infer_shapes(graph)
    return Decided(graph)


def entering(model: ModelProto) -> dict[str, list[str]]:
    return {output: [tensor.name for tensor in tensors] for output, tensors in decided(model).entering.items()}


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("y = Relu(h) z = Softmax(h)", {}),
        ("y, z = TopK(h, k)", {"y": ["h"], "z": ["h"]}),
        ("y = Relu(h) m = Greater(h, half) z = NonZero(m)", {"z": ["h"]}),
        ("m = Reshape(h, flat) above = Greater(m, half) y = Compress(x, above) z = Relu(h)", {"y": ["m"]}),
        ("y, f, i, z = Unique(h)", {"y": ["h"], "z": ["h"]}),
        # What is picked comes from elsewhere than what picks it.
        ("e = Exp(h) v, i = TopK(h, k) y = GatherElements<axis = 1>(e, i) z = Relu(v)", {"y": ["e", "h"], "z": ["h"]}),
        # The number of elements is decided, whatever they are.
        ("m = Greater(h, half) n = NonZero(m) z = Shape(n) y = Relu(h)", {"z": ["h"]}),
        # The inputs are the same for all models, and so is what they say.
        ("m = Greater(x, half) z = NonZero(m) y = Relu(h)", {}),
        ("s = Shape(h) one = ConstantOfShape(s) z = NonZero(one) y = Relu(h)", {}),
        ("p = Softmax(h) z = ArgMax<axis = 1>(p) y = Relu(h)", {"z": ["p"]}),
        ("l = ArgMin<axis = 1>(h) z = Gather(names, l) y = Relu(h)", {"z": ["h"]}),
        # Floats that labels look up, or that only the inputs decide, are compared themselves.
        ("l = ArgMax<axis = 1>(h) y = Gather(w, l) z = Shape(l)", {}),
        ("l = ArgMax<axis = 1>(x) z = Gather(names, l) y = Relu(h)", {}),
    ],
)
def test_outputs_are_decided_by_the_first_floats_in_front(
    nodes: str, expected: dict[str, list[str]], build: Build
) -> None:
    assert entering(build(f"(float[4,8] x) => (y, z) {{ h = MatMul(x, w) {nodes} }}", **WEIGHTS)) == expected


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
            y = If (c) <then_branch = t () => (u) { a, u = TopK(h, k) }, else_branch = e () => (v) { v = Shape(h) }>
        }""",
        k=np.array([2]),
    )
    assert entering(model) == {"y": ["h"]}


def test_weights_behind_what_was_decided_are_named(build: Build) -> None:
    text = "(float[4,8] x) => (y) { h = MatMul(x, w) v, i = TopK(h, k) [late] y = MatMul(v, u) }"
    assert decided(build(text, u=(3, 2), **WEIGHTS)).weighted == ("late",)


def test_names_of_labels_are_no_weights(build: Build) -> None:
    text = "(float[4,8] x) => (z) { h = MatMul(x, w) l = ArgMax<axis = 1>(h) [late] z = Gather(names, l) }"
    assert decided(build(text, **WEIGHTS)).weighted == ()


def test_tensors_are_matched_by_name_behind_codes_and_else_by_place(build: Build) -> None:
    text = "(float[4,8] x) => (y) { h = MatMul(x, w) e = Exp(h) v, i = TopK(h, k) y = GatherElements<axis = 1>(e, i) }"
    coded = """(float[4,8] x) => (y) {
        h = MatMul(x, w) q = QuantizeLinear(h, s, z) d = DequantizeLinear(q, s, z) other = Exp(d)
        v, i = TopK(d, k) y = GatherElements<axis = 1>(other, i)
    }"""
    scales = {"s": np.float32(0.1), "z": np.array(0, np.int8)}
    wanted = entering(build(text, **WEIGHTS))["y"]
    found = decided(build(coded, **WEIGHTS, **scales)).entering["y"]
    assert matched(wanted, found) == {"e": "other", "h": "d"}
    assert matched(["e"], found) is None
    assert matched(["h"], found) == {"h": "d"}
    assert matched(["a", "b", "c"], found) is None
