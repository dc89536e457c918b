"""Instrumented models show tensors at any depth, and compute what they computed."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import onnx
import pytest
from model_texts import model
from numpy.typing import NDArray
from observations import wanted, with_outputs
from onnx import ModelProto

from onnxq.calibration.accumulators import ChannelRanges, Range, Request
from onnxq.calibration.collect import collect
from onnxq.calibration.instrument import ChannelAxis, added_outputs, expose_body_tensors, tensor_types
from onnxq.errors import ModelError
from onnxq.ir import read_model, to_model
from onnxq.ir.protos import subgraph_protos
from onnxq.passes.preparing.preparation import prepare
from onnxq.runtime.sessions import open_session, output_names, run

Sample = dict[str, NDArray[Any]]
X = np.float32([1, 2, 3])
STEPS = np.float32([[1, 1, 1], [2, 2, 2]])


def outputs(made: ModelProto, sample: Sample) -> Sample:
    session = open_session(made, threads=1)
    return dict(zip(output_names(session), run(session, sample), strict=True))


def exposed(made: ModelProto, sample: Sample, names: str) -> dict[str, list[float]]:
    """Return the values of tensors, and check that the model stays valid and gives what it gave."""
    onnx.checker.check_model(made, full_check=True)
    before = made.SerializeToString(deterministic=True)
    carried = expose_body_tensors(made, names.split())
    assert made.SerializeToString(deterministic=True) == before
    onnx.checker.check_model(carried, full_check=True)
    carried.graph.output.extend(value for value in carried.graph.value_info if value.name in names.split())
    values = outputs(carried, sample)
    for name, expected in outputs(made, sample).items():
        np.testing.assert_array_equal(values[name], expected, strict=True)
    return {name: values[name].reshape(-1).tolist() for name in names.split()}


BRANCHES = """(float[3] x, bool c) => (float[3] y) {
    y = If (c) <
        then_branch = t () => (float[3] u) { a = Neg(x) u = Abs(a) },
        else_branch = e () => (float[3] v) { b = Add(x, x) d = Neg(b) v = Add(d, x) }>
}"""
LOOP = """(float[3] x, int64 n) => (float[3] y, float[k,3] z) {
    y, z = Loop (n, go, x) <body = b (int64 i, bool go_in, float[3] s) => (bool go_out, float[3] t, float[3] o) {
        go_out = Identity(go_in) a = Add(s, x) t = Neg(a) o = Abs(a)
    }>
}"""
LONG = """(int64 n, float[1] x) => (float[1] y) {
    y = Loop (n, go, x) <body = b (int64 i, bool g, float[1] s) => (bool h, float[1] t) {
        h = Identity(g) a = Add(s, x) t = Neg(s)
    }>
}"""
GROWING = """(float[p] x, int64 n) => (float[q] y) {
    y = Loop (n, go, x) <body = b (int64 i, bool go_in, float[r] s) => (bool go_out, float[w] t) {
        go_out = Identity(go_in) a = Neg(s) t = Concat <axis = 0> (s, a)
    }>
}"""
SCAN = """(float[3] x, float[k,3] xs) => (float[3] y, float[k,3] z) {
    y, z = Scan (x, xs) <num_scan_inputs = 1, scan_output_directions = [1],
        body = b (float[3] s, float[3] e) => (float[3] t, float[3] o) { a = Add(s, e) t = Neg(a) o = Abs(a) }>
}"""
NESTED_SCAN = """(float[3] x, float[k,3] xs) => (float[3] y) {
    y = Scan (x, xs) <num_scan_inputs = 1, body = b (float[3] s, float[3] e) => (float[3] t) {
        t = Scan (s, xs) <num_scan_inputs = 1, body = c (float[3] p, float[3] f) => (float[3] q) {
            a = Add(p, f) q = Add(a, e)
        }>
    }>
}"""


def in_loop(body: str) -> str:
    """Return a model that computes ``t`` from ``s`` in every iteration."""
    return f"""(float[3] x, int64 n) => (float[3] y) {{
        y = Loop (n, go, x) <body = b (int64 i, bool go_in, float[3] s) => (bool go_out, float[3] t) {{
            go_out = Identity(go_in) {body}
        }}>
    }}"""


def in_branch(text: str, result: str, inputs: str) -> str:
    """Return a model with the nodes of a text in a branch of an If."""
    nodes = re.sub(r"\by( = |, z)", rf"{result}\1", text[text.index("{") + 1 : text.rindex("}")])
    return f"""({inputs}, bool c) => (float[3] y) {{
        y = If (c) <
            then_branch = outer () => (float[3] {result}) {{ {nodes} }},
            else_branch = other () => (float[3] w) {{ w = Neg(x) }}>
    }}"""


IF_IN_LOOP = in_loop(
    """even = Equal(i, zero)
    t = If (even) <
        then_branch = yes () => (float[3] u) { a = Neg(s) u = Abs(a) },
        else_branch = no () => (float[3] v) { b = Add(s, x) v = Neg(b) }>"""
)
LOOP_IN_LOOP = in_loop(
    """t = Loop (n, go, s) <body = c (int64 j, bool g, float[3] p) => (bool h, float[3] q) {
        h = Identity(g) a = Add(p, x) q = Neg(a)
    }>"""
)
IF_LOOP_IF = in_branch(IF_IN_LOOP, "m", "float[3] x, int64 n")
SCAN_IN_IF = in_branch(SCAN, "m", "float[3] x, float[k,3] xs")
ONE = np.float32([1])


def fed(x: NDArray[Any] = X, **more: Any) -> Sample:
    return {"x": x, **{name: np.asarray(value) for name, value in more.items()}}


@pytest.mark.parametrize(
    ("text", "sample", "values"),
    [
        (BRANCHES, fed(c=True), {"a": [-1, -2, -3], "b": []}),
        (BRANCHES, fed(c=False), {"a": [], "b": [2, 4, 6], "d": [-2, -4, -6], "v": [-1, -2, -3], "u": []}),
        # A name that the exposure would give is taken.
        (BRANCHES.replace("b = ", "flat = ").replace("(b)", "(flat)"), fed(c=False), {"a": [], "flat": [2, 4, 6]}),
        (LOOP, fed(n=3), {"s": [1, 2, 3, -2, -4, -6, 1, 2, 3], "a": [2, 4, 6, -1, -2, -3, 2, 4, 6]}),
        (LOOP, fed(n=0), {"s": [], "a": []}),
        (LONG, fed(ONE, n=3000), {"a": [2, 0] * 1500}),
        (GROWING, fed(ONE, n=3), {"a": [-1, -1, 1, -1, 1, 1, -1]}),
        # The state is declared as small as it starts.
        (GROWING.replace("float[r] s", "float[1] s"), fed(ONE, n=3), {"s": [1, 1, -1, 1, -1, -1, 1]}),
        (SCAN, fed(xs=STEPS), {"a": [2, 3, 4, 0, -1, -2], "e": [1, 1, 1, 2, 2, 2]}),
        (IF_IN_LOOP, fed(n=3), {"a": [-1, -2, -3], "b": [2, 4, 6, -1, -2, -3]}),
        (IF_LOOP_IF, fed(n=2, c=True), {"a": [-1, -2, -3], "b": [2, 4, 6], "s": [1, 2, 3] * 2, "w": []}),
        (IF_LOOP_IF, fed(n=2, c=False), {"a": [], "w": [-1, -2, -3]}),
        (LOOP_IN_LOOP, fed(n=2), {"a": [2, 4, 6, -1, -2, -3] * 2}),
        (NESTED_SCAN, fed(np.zeros(3, np.float32), xs=STEPS), {"a": [1, 1, 1, 4, 4, 4, 6, 6, 6, 10, 10, 10]}),
        (SCAN_IN_IF, fed(xs=STEPS, c=True), {"a": [2, 3, 4, 0, -1, -2]}),
    ],
)
def test_tensors_of_bodies_give_all_values_of_a_run(text: str, sample: Sample, values: dict[str, list[float]]) -> None:
    constants = {name: value for name, value in (("go", True), ("zero", np.int64(0))) if name in text}
    made = model(text, **{name: np.asarray(value) for name, value in constants.items()})
    assert exposed(made, sample, " ".join(values)) == values


def test_a_model_without_such_tensors_in_bodies_is_not_copied() -> None:
    made = model(LOOP, go=np.array(True))
    assert expose_body_tensors(made, ["y", "x", "go", "unknown"]) is made


def operators(made: ModelProto) -> set[str]:
    return {node.op_type for graph in subgraph_protos(made.graph) for node in graph.node}


def test_tensors_of_one_known_size_are_stacked_and_others_joined_by_one_loop() -> None:
    text = """(float[1] x, float[2] e, int64 n) => (float[q] y, float[2] z) {
        y, z = Loop (n, go, x, e) <body = b (int64 i, bool go_in, float[r] s, float[2] f)
            => (bool go_out, float[w] t, float[2] g) {
            go_out = Identity(go_in) a = Neg(s) t = Concat <axis = 0> (s, a) c = Neg(f) g = Add(c, e)
        }>
    }"""
    made = to_model(prepare(read_model(model(text, go=np.array(True)))))
    assert "SequenceInsert" in operators(expose_body_tensors(made, ["a", "c"]))
    assert "SequenceInsert" not in operators(expose_body_tensors(made, ["c"]))
    values = exposed(made, fed(ONE, e=np.float32([1, 2]), n=3), "a c")
    assert values == {"a": [-1, -1, 1, -1, 1, 1, -1], "c": [-1, -2, 0, 0, -1, -2]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            """(float[3] x, float[k,3] xs, bool c) => (float[3] y) {
                y = Scan (x, xs) <num_scan_inputs = 1, body = b (float[3] s, float[3] e) => (float[3] t) {
                    [choice] t = If (c) <
                        then_branch = yes () => (float[3] u) { a = Neg(s) u = Abs(a) },
                        else_branch = no () => (float[3] v) { v = Neg(e) }>
                }>
            }""",
            "Tensors in If node 'choice' inside a Scan cannot be calibrated, expected as many values in each of its "
            "steps; leave them out",
        ),
        (
            """(seq(float[3]) x) => (seq(float[3]) y) {
                [map] y = SequenceMap (x) <body = b (float[3] s) => (float[3] t) { a = Neg(s) t = Abs(a) }>
            }""",
            "Tensors in the body of SequenceMap node 'map' cannot be calibrated, expected a body of If, Loop, Scan; "
            "leave them out",
        ),
    ],
)
def test_tensors_that_cannot_be_exposed_are_refused(text: str, message: str) -> None:
    with pytest.raises(ModelError) as caught:
        expose_body_tensors(model(text), ["a"])
    assert str(caught.value) == message


# Statistics of bodies.


def test_statistics_of_bodies_are_those_of_their_values() -> None:
    samples = [fed(X * scale, n=count) for scale, count in ((1, 3), (2, 0), (-1, 1))]
    made = model(IF_IN_LOOP, go=np.array(True), zero=np.array(0))
    statistics = collect(made, samples, wanted("yab"))
    ranges = [statistics.of(name).need(Range) for name in "yab"]
    assert [(one.count, one.minimum, one.maximum) for one in ranges] == [(9, 1, 6), (6, -3, 3), (6, -3, 6)]
    for name in "yab":
        assert collect(made, samples, wanted(name), others="yab") == statistics.select(wanted(name))
    never = collect(model(BRANCHES), [fed(c=True)], wanted("ab"))
    assert [never.of(name).need(Range).count for name in "ab"] == [3, 0]


CHANNELS = """(float[2,3,4] x, bool c) => (float[2,3,4] y) { y = If (c) <
    then_branch = yes () => (float[2,3,4] t) { inner = Neg(x) t = Relu(inner) },
    else_branch = no () => (float[2,3,4] e) { e = Identity(x) }>
}"""


@pytest.mark.parametrize("runs", [True, False])
def test_channels_of_a_body_are_told_apart(runs: bool) -> None:
    made = expose_body_tensors(model(CHANNELS), ["inner"], {"inner": ChannelAxis(1, 3, 3)})
    x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    statistics = collect(made, [fed(x, c=runs)], [Request("inner", "channel-ranges", 1)])
    ranges = statistics.of("inner").find(ChannelRanges, 1)
    expected = np.stack([(-x).min((0, 2)), (-x).max((0, 2))], 1)
    np.testing.assert_array_equal(ranges.ends, expected if runs else np.zeros((0, 2)))


# Tensors of the main graph.

LAYERS = "(float[N,2] x) => (float[N,2] y) { h = MatMul(x, w) hidden = Relu(h) c = Exp(w) y = Add(hidden, c) }"


def layers(text: str = LAYERS, **options: Any) -> ModelProto:
    return model(text, w=np.eye(2, dtype=np.float32), **options)


def test_tensors_become_outputs_of_a_copy_with_their_declared_or_inferred_types() -> None:
    made = layers()
    instrumented = with_outputs(made, ["h", "c", "y", "h", "w"])
    assert [value.name for value in instrumented.graph.output] == ["y", "h", "c", "w"]
    assert [value.name for value in made.graph.output] == ["y"]
    onnx.checker.check_model(instrumented, full_check=True)
    assert {value.type.tensor_type.elem_type for value in added_outputs(made, "hcwx")} == {onnx.TensorProto.FLOAT}
    half = model(LAYERS.replace("float", "float16"), w=np.eye(2, dtype=np.float16))
    assert {value.type.tensor_type.elem_type for value in added_outputs(half, "hcwx")} == {onnx.TensorProto.FLOAT16}
    declared = onnx.helper.make_tensor_value_info("h", onnx.TensorProto.FLOAT, ["N", "K"])
    made.graph.value_info.append(declared)
    assert added_outputs(made, ["h"]) == [declared]
    assert set(tensor_types(made)) == {"x", "w", "h", "hidden", "c", "y"}


CUSTOM = LAYERS.replace("MatMul", "mine.Product")


@pytest.mark.parametrize(
    ("text", "options", "name", "message"),
    [
        (LAYERS, {}, "hiden", r"Tensor 'hiden' is not in the main graph.*did you mean 'hidden'"),
        (BRANCHES, {}, "a", "Tensor 'a' is not in the main graph, expected the output of a node, an input or an"),
        (CUSTOM, {"domains": '"mine" : 1'}, "h", "Tensor 'h' has no element type and none can be inferred, expected"),
        (CUSTOM, {}, "h", "Tensor 'h' has no element type"),
    ],
    ids=["a typing error", "in a body", "of a custom operator", "where inference fails"],
)
def test_tensors_that_cannot_be_outputs_are_told(text: str, options: Any, name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        added_outputs(layers(text, **options), [name])
