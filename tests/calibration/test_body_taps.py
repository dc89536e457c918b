"""Tensors of bodies reach the main graph with all their values, and nothing else changes."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from observations import wanted
from onnx import ModelProto

from calibration.tapped_bodies import (
    BRANCHES,
    IF_IN_LOOP,
    LOOP,
    SCAN,
    STEPS,
    Arrays,
    X,
    carried_values,
    in_loop,
    model,
    ran,
    tapped,
)
from onnxq.calibration.accumulators import Range
from onnxq.calibration.calibrate import Collection, calibrate_tensors, measure_tensor_bytes
from onnxq.calibration.collect import collect
from onnxq.calibration.instrument import expose_body_sizes, expose_body_tensors
from onnxq.calibration.segments import segments
from onnxq.errors import ModelError
from onnxq.ir import read_model, to_model
from onnxq.preparing.preparation import prepare


@pytest.mark.parametrize(("runs", "values"), [(True, {"a": [-1, -2, -3], "b": []}), (False, {"a": [], "b": [2, 4, 6]})])
def test_the_branch_that_runs_gives_values_and_the_other_none(runs: bool, values: dict[str, list[float]]) -> None:
    assert tapped(model(BRANCHES), {"x": X, "c": np.array(runs)}, "a", "b") == values


def test_several_taps_of_one_branch_and_its_own_output_are_told_apart() -> None:
    found = tapped(model(BRANCHES), {"x": X, "c": np.array(False)}, "d", "b", "v", "u")
    assert found == {"d": [-2, -4, -6], "b": [2, 4, 6], "v": [-1, -2, -3], "u": []}


@pytest.mark.parametrize(
    ("count", "values"),
    [
        (3, {"s": [1, 2, 3, -2, -4, -6, 1, 2, 3], "a": [2, 4, 6, -1, -2, -3, 2, 4, 6]}),
        (0, {"s": [], "a": []}),
    ],
)
def test_a_loop_gives_the_values_of_all_iterations(count: int, values: dict[str, list[float]]) -> None:
    assert tapped(model(LOOP, go=True), {"x": X, "n": np.array(count)}, "s", "a") == values


def test_a_long_loop_gives_all_values_in_order() -> None:
    text = """(int64 n, float[1] x) => (float[1] y) {
        y = Loop (n, go, x) <body = b (int64 i, bool g, float[1] s) => (bool h, float[1] t) {
            h = Identity(g) a = Add(s, x) t = Neg(s)
        }>
    }"""
    found = tapped(model(text, go=True), {"x": np.float32([1]), "n": np.array(3000)}, "a")
    assert found == {"a": [2, 0] * 1500}


def test_a_tensor_may_change_its_size_between_iterations() -> None:
    text = """(float[p] x, int64 n) => (float[q] y) {
        y = Loop (n, go, x) <body = b (int64 i, bool go_in, float[r] s) => (bool go_out, float[w] t) {
            go_out = Identity(go_in) a = Neg(s) t = Concat <axis = 0> (s, a)
        }>
    }"""
    sample = {"x": np.float32([1]), "n": np.array(3)}
    assert tapped(model(text, go=True), sample, "a") == {"a": [-1, -1, 1, -1, 1, 1, -1]}


def test_a_scan_gives_the_values_of_all_steps() -> None:
    found = tapped(model(SCAN), {"x": X, "xs": STEPS}, "a", "e")
    assert found == {"a": [2, 3, 4, 0, -1, -2], "e": [1, 1, 1, 2, 2, 2]}


def test_a_branch_inside_a_loop_gives_values_when_it_runs() -> None:
    found = tapped(model(IF_IN_LOOP, go=True, zero=0), {"x": X, "n": np.array(3)}, "a", "b")
    assert found == {"a": [-1, -2, -3], "b": [2, 4, 6, -1, -2, -3]}


def test_bodies_may_be_nested_deeply() -> None:
    loop = IF_IN_LOOP[IF_IN_LOOP.index("y =") : -1].replace("y = Loop", "m = Loop")
    text = f"""(float[3] x, int64 n, bool c) => (float[3] y) {{
        y = If (c) <
            then_branch = outer () => (float[3] m) {{ {loop} }},
            else_branch = other () => (float[3] w) {{ w = Neg(x) }}>
    }}"""
    made = model(text, go=True, zero=0)
    found = tapped(made, {"x": X, "n": np.array(2), "c": np.array(True)}, "a", "b", "s", "w")
    assert found == {"a": [-1, -2, -3], "b": [2, 4, 6], "s": [1, 2, 3, 1, 2, 3], "w": []}
    assert tapped(made, {"x": X, "n": np.array(2), "c": np.array(False)}, "a", "w") == {"a": [], "w": [-1, -2, -3]}


def test_a_loop_inside_a_loop_and_a_scan_inside_a_scan_give_all_values() -> None:
    inner = """t = Loop (n, go, s) <body = c (int64 j, bool g, float[3] p) => (bool h, float[3] q) {
        h = Identity(g) a = Add(p, x) q = Neg(a)
    }>"""
    found = tapped(model(in_loop(inner), go=True), {"x": X, "n": np.array(2)}, "a")
    assert found == {"a": [2, 4, 6, -1, -2, -3, 2, 4, 6, -1, -2, -3]}
    text = """(float[3] x, float[k,3] xs) => (float[3] y) {
        y = Scan (x, xs) <num_scan_inputs = 1, body = b (float[3] s, float[3] e) => (float[3] t) {
            t = Scan (s, xs) <num_scan_inputs = 1, body = c (float[3] p, float[3] f) => (float[3] q) {
                a = Add(p, f) q = Add(a, e)
            }>
        }>
    }"""
    found = tapped(model(text), {"x": np.zeros(3, np.float32), "xs": STEPS}, "a")
    assert found["a"][::3] == [1, 4, 6, 10]


def test_a_scan_inside_an_if_gives_flat_values() -> None:
    scan = SCAN[SCAN.index("y, z =") : -1].replace("y, z =", "m, z =")
    text = f"""(float[3] x, float[k,3] xs, bool c) => (float[3] y) {{
        y = If (c) <
            then_branch = yes () => (float[3] m) {{ {scan} }},
            else_branch = no () => (float[3] w) {{ w = Neg(x) }}>
    }}"""
    assert tapped(model(text), {"x": X, "xs": STEPS, "c": np.array(True)}, "a") == {"a": [2, 3, 4, 0, -1, -2]}


def test_names_of_the_model_are_not_taken() -> None:
    made = model(BRANCHES.replace("b =", "a_tap =").replace("(b)", "(a_tap)"))
    for branch in (attribute.g for attribute in made.graph.node[0].attribute):
        for node in branch.node:
            for names in (node.input, node.output):
                names[:] = [name.replace("a_tap", "a/tap1") for name in names]
    assert tapped(made, {"x": X, "c": np.array(True)}, "a", "a/tap1") == {"a": [-1, -2, -3], "a/tap1": []}


def test_other_tensors_are_computed_and_their_values_stay_inside() -> None:
    made = model(LOOP, go=True)
    carried = expose_body_tensors(made, ["a"], ["s"])
    carried.graph.output.extend(value for value in carried.graph.value_info if value.name in ("a", "s"))
    found = ran(carried, {"x": X, "n": np.array(2)})
    assert (found["a"].size, found["s"].size) == (6, 0)


def test_a_model_without_taps_in_bodies_is_not_copied() -> None:
    made = model(LOOP, go=True)
    assert expose_body_tensors(made, ["y", "x", "go", "unknown"]) is made


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
def test_what_cannot_be_carried_out_is_refused(text: str, message: str) -> None:
    with pytest.raises(ModelError) as caught:
        expose_body_tensors(model(text), ["a"])
    assert str(caught.value) == message


# --- what it costs --------------------------------------------------------------------------------------------------


def operators(made: ModelProto) -> set[str]:
    """Return the operators of a model and its bodies."""
    pending, found = [made.graph], set()
    while pending:
        graph = pending.pop()
        found |= {node.op_type for node in graph.node}
        pending += [attribute.g for node in graph.node for attribute in node.attribute if attribute.HasField("g")]
    return found


def test_a_tensor_of_one_known_size_is_stacked_by_the_loop() -> None:
    made = to_model(prepare(read_model(model(LOOP, go=True))))
    assert "SequenceInsert" not in operators(expose_body_tensors(made, ["s", "a"]))
    found = tapped(made, {"x": X, "n": np.array(3)}, "s", "a")
    assert found == {"s": [1, 2, 3, -2, -4, -6, 1, 2, 3], "a": [2, 4, 6, -1, -2, -3, 2, 4, 6]}
    assert tapped(made, {"x": X, "n": np.array(0)}, "s", "a") == {"s": [], "a": []}


def test_tensors_of_known_and_unknown_sizes_leave_one_loop() -> None:
    text = """(float[1] x, float[2] e, int64 n) => (float[q] y, float[2] z) {
        y, z = Loop (n, go, x, e) <body = b (int64 i, bool go_in, float[r] s, float[2] f)
            => (bool go_out, float[w] t, float[2] g) {
            go_out = Identity(go_in) a = Neg(s) t = Concat <axis = 0> (s, a) c = Neg(f) g = Add(c, e)
        }>
    }"""
    made = to_model(prepare(read_model(model(text, go=True))))
    assert "SequenceInsert" in operators(expose_body_tensors(made, ["a", "c"]))
    assert "SequenceInsert" not in operators(expose_body_tensors(made, ["c"], ["a"]))
    found = tapped(made, {"x": np.float32([1]), "e": np.float32([1, 2]), "n": np.array(3)}, "a", "c")
    assert found == {"a": [-1, -1, 1, -1, 1, 1, -1], "c": [-1, -2, 0, 0, -1, -2]}


def test_a_state_that_is_declared_as_small_and_grows_is_not_stacked() -> None:
    text = """(float[1] x, int64 n) => (float[q] y) {
        y = Loop (n, go, x) <body = b (int64 i, bool go_in, float[1] s) => (bool go_out, float[w] t) {
            go_out = Identity(go_in) a = Neg(s) t = Concat <axis = 0> (s, a)
        }>
    }"""
    made = model(text, go=True)
    carried = expose_body_tensors(made, ["s"])
    assert "SequenceInsert" in operators(carried)
    carried.graph.output.extend(value for value in carried.graph.value_info if value.name == "s")
    found = ran(carried, {"x": np.float32([1]), "n": np.array(3)})
    assert found["s"].tolist() == [1, 1, -1, 1, -1, -1, 1]


@pytest.mark.parametrize(
    ("text", "constants", "sample", "sizes"),
    [
        (BRANCHES, {}, {"x": X, "c": np.array(True)}, {"a": 12, "b": 0, "v": 0}),
        (LOOP, {"go": True}, {"x": X, "n": np.array(3)}, {"s": 36, "a": 36}),
        (LOOP, {"go": True}, {"x": X, "n": np.array(0)}, {"s": 0, "a": 0}),
        (SCAN, {}, {"x": X, "xs": STEPS}, {"a": 24, "e": 24}),
        (IF_IN_LOOP, {"go": True, "zero": 0}, {"x": X, "n": np.array(3)}, {"a": 12, "b": 24, "y": 0}),
    ],
    ids=["If", "Loop", "idle Loop", "Scan", "If in Loop"],
)
def test_sizes_are_asked_for_without_values(
    text: str, constants: dict[str, object], sample: Arrays, sizes: dict[str, int], tmp_path
) -> None:
    made = model(text, **constants)
    onnx.save(made, tmp_path / "model.onnx")
    assert measure_tensor_bytes(tmp_path / "model.onnx", sample, list(sizes)) == sizes
    sized, inner = expose_body_sizes(made, sizes)
    assert set(inner) == set(sizes) - {"y"}
    onnx.checker.check_model(sized, full_check=True)
    kinds = {graph_value.type.tensor_type.elem_type for graph_value in carried_values(sized)}
    assert kinds == {onnx.TensorProto.INT64}


# --- statistics ---------------------------------------------------------------------------------------------------


def test_statistics_of_bodies_are_those_of_their_values() -> None:
    samples = [{"x": X * scale, "n": np.array(count)} for scale, count in ((1, 3), (2, 0), (-1, 1))]
    seen = collect(model(IF_IN_LOOP, go=True, zero=0), samples, wanted(["y", "a", "b"]))
    ranges = {name: seen.of(name).need(Range) for name in seen.by_tensor}
    assert {name: (one.count, one.minimum, one.maximum) for name, one in ranges.items()} == {
        "y": (9, 1, 6),
        "a": (6, -3, 3),
        "b": (6, -3, 6),
    }


def test_a_body_that_never_ran_has_seen_nothing() -> None:
    seen = collect(model(BRANCHES), [{"x": X, "c": np.array(True)}], wanted(["a", "b"]))
    assert [seen.of(name).need(Range).count for name in "ab"] == [3, 0]


def test_a_tapped_tensor_that_is_nowhere_is_told() -> None:
    with pytest.raises(ModelError, match="Tensor 'aa' is not in the main graph"):
        segments(model(BRANCHES), ["aa"])


def test_a_memory_budget_takes_passes_over_bodies_too(tmp_path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(model(LOOP, go=True), path)
    samples = [{"x": X * scale, "n": np.array(4)} for scale in (1, 2)]
    assert measure_tensor_bytes(path, samples[0], ["s", "a", "y"]) == {"s": 48, "a": 48, "y": 0}
    whole = calibrate_tensors(path, samples, wanted(["s", "a"]), Collection())
    alone = [calibrate_tensors(path, samples, wanted([name]), Collection()) for name in ("s", "a")]
    assert whole == alone[0].join(alone[1]).select(wanted(["s", "a"]))
