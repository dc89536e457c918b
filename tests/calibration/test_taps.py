"""Instrumented models show tensors at any depth, and compute what they computed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import observations
import onnx
import pytest
from conftest import Build
from observations import wanted, with_outputs
from onnx import GraphProto, ModelProto, TensorProto, helper, numpy_helper

from calibration.tapped_bodies import (
    BRANCHES,
    IF_IN_LOOP,
    LOOP,
    SCAN,
    STEPS,
    X,
    in_loop,
    instrumented,
    model,
    ran,
)
from onnxq.calibration.accumulators import ChannelRanges, Range, Request
from onnxq.calibration.collect import collect
from onnxq.calibration.data import ChainedSamples, Data, parse_chain, samples_of, with_optional
from onnxq.calibration.histogram import Histogram
from onnxq.calibration.instrument import (
    ChannelAxis,
    added_outputs,
    append_outputs,
    expose_body_tensors,
    expose_channels,
    made_inside,
    names_made,
)
from onnxq.calibration.seeded import SeededSession, draws, put_seeds
from onnxq.calibration.segments import segments
from onnxq.data.dataset import Origin, Subset, origin_of
from onnxq.data.inputs import Sample, model_inputs
from onnxq.data.samples import is_truncated, open_samples
from onnxq.errors import ModelError, SchemeError
from onnxq.ir import read_model, to_model
from onnxq.passes.preparing.preparation import prepare
from onnxq.runtime.sessions import open_session, output_names, run


def two_layers(dtype: int = TensorProto.FLOAT) -> onnx.ModelProto:
    """x -> MatMul(w) -> h -> Relu -> r -> Add(Constant c) -> y, with no value_info."""
    w = numpy_helper.from_array(np.eye(2, dtype=helper.tensor_dtype_to_np_dtype(dtype)), "w")
    c = numpy_helper.from_array(np.ones(2, dtype=helper.tensor_dtype_to_np_dtype(dtype)))
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("Constant", [], ["c"], value=c),
        helper.make_node("Add", ["r", "c"], ["y"]),
    ]
    x = helper.make_tensor_value_info("x", dtype, ["N", 2])
    y = helper.make_tensor_value_info("y", dtype, ["N", 2])
    graph = helper.make_graph(nodes, "g", [x], [y], [w])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def names(outputs: list[onnx.ValueInfoProto]) -> list[str]:
    return [output.name for output in outputs]


def test_taps_become_outputs_of_a_copy() -> None:
    model = two_layers()
    instrumented = with_outputs(model, ["h", "r"])
    assert names(list(instrumented.graph.output)) == ["y", "h", "r"]
    assert names(list(model.graph.output)) == ["y"]
    onnx.checker.check_model(instrumented, full_check=True)


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT, TensorProto.FLOAT16])
def test_element_types_are_inferred_where_the_model_has_none(dtype: int) -> None:
    outputs = added_outputs(two_layers(dtype), ["h", "c", "w", "x"])
    assert [output.type.tensor_type.elem_type for output in outputs] == [dtype] * 4


def test_known_types_are_kept_as_the_model_has_them() -> None:
    model = two_layers()
    known = helper.make_tensor_value_info("h", TensorProto.FLOAT, ["N", "K"])
    model.graph.value_info.append(known)
    assert added_outputs(model, ["h"]) == [known]


def test_outputs_and_repeated_names_are_added_once() -> None:
    assert names(added_outputs(two_layers(), ["y", "h", "h"])) == ["h"]


def test_a_name_that_is_not_there_gets_a_suggestion() -> None:
    model = two_layers()
    model.graph.node[0].output[0] = model.graph.node[1].input[0] = "hidden"
    with pytest.raises(ModelError, match=r"Tensor 'hiden' is not in the main graph.*did you mean 'hidden'"):
        added_outputs(model, ["hiden"])


def test_a_tensor_of_a_custom_operator_has_no_type() -> None:
    model = two_layers()
    model.graph.node[0].domain = "my.domain"
    model.opset_import.append(helper.make_opsetid("my.domain", 1))
    with pytest.raises(ModelError, match="Tensor 'h' has no element type"):
        added_outputs(model, ["h"])


def test_where_inference_fails_nothing_has_a_type() -> None:
    model = two_layers()
    model.graph.node[0].domain = "ai.onnx"
    model.graph.node[1].domain = "nowhere"
    with pytest.raises(ModelError, match="Tensor 'h' has no element type"):
        added_outputs(model, ["h"])


def test_a_tensor_inside_a_body_is_not_in_the_main_graph() -> None:
    model = two_layers()
    body = helper.make_graph(
        [helper.make_node("Neg", ["r"], ["inner"])], "b", [], [helper.make_tensor_value_info("inner", 1, None)]
    )
    model.graph.node.append(helper.make_node("If", ["cond"], ["z"], then_branch=body, else_branch=body))
    with pytest.raises(ModelError, match="Tensor 'inner' is not in the main graph"):
        added_outputs(model, ["inner"])


def test_kept_tensors_give_their_size_only() -> None:
    model = two_layers()
    kept = onnx.ModelProto.FromString(append_outputs(model.SerializeToString(), added_outputs(model, ["h"]), ["r"]))
    assert names(list(kept.graph.output)) == ["y", "h", "r/size"]
    onnx.checker.check_model(kept, full_check=True)


@pytest.mark.parametrize(("runs", "values"), [(True, {"a": [-1, -2, -3], "b": []}), (False, {"a": [], "b": [2, 4, 6]})])
def test_the_branch_that_runs_gives_values_and_the_other_none(runs: bool, values: dict[str, list[float]]) -> None:
    assert instrumented(model(BRANCHES), {"x": X, "c": np.array(runs)}, "a", "b") == values


def test_several_taps_of_one_branch_and_its_own_output_are_told_apart() -> None:
    found = instrumented(model(BRANCHES), {"x": X, "c": np.array(False)}, "d", "b", "v", "u")
    assert found == {"d": [-2, -4, -6], "b": [2, 4, 6], "v": [-1, -2, -3], "u": []}


@pytest.mark.parametrize(
    ("count", "values"),
    [
        (3, {"s": [1, 2, 3, -2, -4, -6, 1, 2, 3], "a": [2, 4, 6, -1, -2, -3, 2, 4, 6]}),
        (0, {"s": [], "a": []}),
    ],
)
def test_a_loop_gives_the_values_of_all_iterations(count: int, values: dict[str, list[float]]) -> None:
    assert instrumented(model(LOOP, go=True), {"x": X, "n": np.array(count)}, "s", "a") == values


def test_a_long_loop_gives_all_values_in_order() -> None:
    text = """(int64 n, float[1] x) => (float[1] y) {
        y = Loop (n, go, x) <body = b (int64 i, bool g, float[1] s) => (bool h, float[1] t) {
            h = Identity(g) a = Add(s, x) t = Neg(s)
        }>
    }"""
    found = instrumented(model(text, go=True), {"x": np.float32([1]), "n": np.array(3000)}, "a")
    assert found == {"a": [2, 0] * 1500}


def test_a_tensor_may_change_its_size_between_iterations() -> None:
    text = """(float[p] x, int64 n) => (float[q] y) {
        y = Loop (n, go, x) <body = b (int64 i, bool go_in, float[r] s) => (bool go_out, float[w] t) {
            go_out = Identity(go_in) a = Neg(s) t = Concat <axis = 0> (s, a)
        }>
    }"""
    sample = {"x": np.float32([1]), "n": np.array(3)}
    assert instrumented(model(text, go=True), sample, "a") == {"a": [-1, -1, 1, -1, 1, 1, -1]}


def test_a_scan_gives_the_values_of_all_steps() -> None:
    found = instrumented(model(SCAN), {"x": X, "xs": STEPS}, "a", "e")
    assert found == {"a": [2, 3, 4, 0, -1, -2], "e": [1, 1, 1, 2, 2, 2]}


def test_a_branch_inside_a_loop_gives_values_when_it_runs() -> None:
    found = instrumented(model(IF_IN_LOOP, go=True, zero=0), {"x": X, "n": np.array(3)}, "a", "b")
    assert found == {"a": [-1, -2, -3], "b": [2, 4, 6, -1, -2, -3]}


def test_bodies_may_be_nested_deeply() -> None:
    loop = IF_IN_LOOP[IF_IN_LOOP.index("y =") : -1].replace("y = Loop", "m = Loop")
    text = f"""(float[3] x, int64 n, bool c) => (float[3] y) {{
        y = If (c) <
            then_branch = outer () => (float[3] m) {{ {loop} }},
            else_branch = other () => (float[3] w) {{ w = Neg(x) }}>
    }}"""
    made = model(text, go=True, zero=0)
    found = instrumented(made, {"x": X, "n": np.array(2), "c": np.array(True)}, "a", "b", "s", "w")
    assert found == {"a": [-1, -2, -3], "b": [2, 4, 6], "s": [1, 2, 3, 1, 2, 3], "w": []}
    assert instrumented(made, {"x": X, "n": np.array(2), "c": np.array(False)}, "a", "w") == {
        "a": [],
        "w": [-1, -2, -3],
    }


def test_a_loop_inside_a_loop_and_a_scan_inside_a_scan_give_all_values() -> None:
    inner = """t = Loop (n, go, s) <body = c (int64 j, bool g, float[3] p) => (bool h, float[3] q) {
        h = Identity(g) a = Add(p, x) q = Neg(a)
    }>"""
    found = instrumented(model(in_loop(inner), go=True), {"x": X, "n": np.array(2)}, "a")
    assert found == {"a": [2, 4, 6, -1, -2, -3, 2, 4, 6, -1, -2, -3]}
    text = """(float[3] x, float[k,3] xs) => (float[3] y) {
        y = Scan (x, xs) <num_scan_inputs = 1, body = b (float[3] s, float[3] e) => (float[3] t) {
            t = Scan (s, xs) <num_scan_inputs = 1, body = c (float[3] p, float[3] f) => (float[3] q) {
                a = Add(p, f) q = Add(a, e)
            }>
        }>
    }"""
    found = instrumented(model(text), {"x": np.zeros(3, np.float32), "xs": STEPS}, "a")
    assert found["a"][::3] == [1, 4, 6, 10]


def test_a_scan_inside_an_if_gives_flat_values() -> None:
    scan = SCAN[SCAN.index("y, z =") : -1].replace("y, z =", "m, z =")
    text = f"""(float[3] x, float[k,3] xs, bool c) => (float[3] y) {{
        y = If (c) <
            then_branch = yes () => (float[3] m) {{ {scan} }},
            else_branch = no () => (float[3] w) {{ w = Neg(x) }}>
    }}"""
    assert instrumented(model(text), {"x": X, "xs": STEPS, "c": np.array(True)}, "a") == {"a": [2, 3, 4, 0, -1, -2]}


def test_names_of_the_model_are_not_taken() -> None:
    made = model(BRANCHES.replace("b =", "a_tap =").replace("(b)", "(a_tap)"))
    for branch in (attribute.g for attribute in made.graph.node[0].attribute):
        for node in branch.node:
            for names in (node.input, node.output):
                names[:] = [name.replace("a_tap", "a/tap1") for name in names]
    assert instrumented(made, {"x": X, "c": np.array(True)}, "a", "a/tap1") == {"a": [-1, -2, -3], "a/tap1": []}


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
    found = instrumented(made, {"x": X, "n": np.array(3)}, "s", "a")
    assert found == {"s": [1, 2, 3, -2, -4, -6, 1, 2, 3], "a": [2, 4, 6, -1, -2, -3, 2, 4, 6]}
    assert instrumented(made, {"x": X, "n": np.array(0)}, "s", "a") == {"s": [], "a": []}


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
    found = instrumented(made, {"x": np.float32([1]), "e": np.float32([1, 2]), "n": np.array(3)}, "a", "c")
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


TEXT = """(float[2,n] x, bool c) => (float[2,n] y) {
    s = Sin(x)
    y = If(c) <then_branch = t () => (float[2,n] a) { a = If(c) <
        then_branch = u () => (float[2,n] b) { b = Neg(s) }, else_branch = v () => (float[2,n] d) { d = Abs(s) }> },
        else_branch = e () => (float[2,n] f) { f = Exp(s) }>
}"""


def graph(build: Build) -> GraphProto:
    return build(TEXT).graph


def test_names_are_those_of_a_graph_or_of_what_is_inside(build: Build) -> None:
    assert names_made(graph(build)) == {"x", "c", "s", "y"}
    assert made_inside(graph(build)) == {"a", "b", "d", "f"}


BRANCHES_OF_CHANNELS = """(float[2,3,4] x, bool c) => (float[2,3,4] y)
{ y = If (c) <then_branch = yes () => (float[2,3,4] t) { inner = Neg(x) t = Relu(inner) },
              else_branch = no () => (float[2,3,4] e) { e = Identity(x) }> }"""


def test_channels_of_a_body_are_told_apart(build: Build) -> None:
    model = build(BRANCHES_OF_CHANNELS)
    instrumented, matrices = expose_channels(model, {"inner": ChannelAxis(1, 3, 3)})
    x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    request = Request(matrices["inner"], "channel-ranges", 1)
    found = collect(instrumented, [{"x": x, "c": np.array(True)}], [request])
    ends = found.of(request.tensor).find(ChannelRanges, 1).ends
    np.testing.assert_array_equal(ends, np.stack([(-x).min((0, 2)), (-x).max((0, 2))], 1))


def test_a_body_that_does_not_run_gives_nothing(build: Build) -> None:
    instrumented, matrices = expose_channels(build(BRANCHES_OF_CHANNELS), {"inner": ChannelAxis(1, 3, 3)})
    x = np.zeros((2, 3, 4), np.float32)
    request = Request(matrices["inner"], "channel-ranges", 1)
    found = collect(instrumented, [{"x": x, "c": np.array(False)}], [request])
    seen = found.of(request.tensor).find(ChannelRanges, 1)
    assert seen is None or not len(seen.ends)


def running_sum(dtype: int = TensorProto.FLOAT, dims: tuple[object, ...] = ("N", 2)) -> onnx.ModelProto:
    """Return total = x + before, y = -total: the state is the sum of all samples so far."""
    nodes = [helper.make_node("Add", ["x", "before"], ["total"]), helper.make_node("Neg", ["total"], ["y"])]
    inputs, outputs = (
        [helper.make_tensor_value_info(name, dtype, dims) for name in names]
        for names in (("x", "before"), ("y", "total"))
    )
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


CHAIN = {"total": "before"}
ROWS = [{"x": np.float32([[1, 10]])}, {"x": np.float32([[2, 20]])}, {"x": np.float32([[4, -50]])}]


def befores(samples: object) -> list[list[float]]:
    return [sample["before"].ravel().tolist() for sample in samples]  # type: ignore[attr-defined]


def test_the_output_of_a_sample_is_the_input_of_the_next() -> None:
    samples = ChainedSamples(ROWS, running_sum(), CHAIN)
    assert len(samples) == 3
    assert origin_of(Subset(samples, [0, 2]), 1) == Origin(2)
    assert befores(samples) == befores(samples) == [[0, 0], [1, 10], [3, 30]]


def test_the_first_sample_may_bring_its_state() -> None:
    started = [{**ROWS[0], "before": np.float32([[100, 0]])}, *ROWS[1:]]
    assert befores(ChainedSamples(started, running_sum(), CHAIN)) == [[100, 0], [101, 10], [103, 30]]


def test_statistics_are_those_of_the_stream() -> None:
    samples = ChainedSamples(ROWS, running_sum(), CHAIN)
    seen = collect(running_sum(), samples, wanted(["total"])).of("total")
    assert (seen.need(Range).minimum, seen.need(Range).maximum) == (-20, 30)
    totals = observations.seen(np.float32([1, 10, 3, 30, 7, -20]))
    assert seen.need(Histogram) == totals.need(Histogram)


def test_each_folder_and_each_file_of_several_samples_starts_anew(tmp_path: Path) -> None:
    inputs = with_optional(model_inputs(running_sum(dims=(1, 2))), CHAIN)
    for name in ("a/1", "a/2", "b/1"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        np.savez(tmp_path / f"{name}.npz", x=ROWS[0]["x"])
    for name in ("c", "d"):
        np.savez(tmp_path / f"{name}.npz", x=np.concatenate([row["x"] for row in ROWS]))
    samples = ChainedSamples(open_samples(tmp_path, inputs), running_sum(), CHAIN)
    streams = [[[0, 0], [1, 10]], [[0, 0]], [[0, 0], [1, 10], [3, 30]], [[0, 0], [1, 10], [3, 30]]]
    assert befores(samples) == [before for stream in streams for before in stream]


def test_samples_of_a_file_are_chained_and_limited_where_that_is_said(tmp_path: Path) -> None:
    onnx.save(running_sum(dims=(1, 2)), tmp_path / "model.onnx")
    rows = tmp_path / "rows.npz"
    np.savez(rows, x=np.concatenate([row["x"] for row in ROWS]))
    assert befores(samples_of(tmp_path / "model.onnx", Data(rows, chain=CHAIN))) == [[0, 0], [1, 10], [3, 30]]
    limited = samples_of(tmp_path / "model.onnx", Data(rows, limit=2, chain=CHAIN))
    assert befores(limited) == [[0, 0], [1, 10]]
    assert is_truncated(limited)
    assert len(samples_of(tmp_path / "model.onnx", [{**row, "before": row["x"]} for row in ROWS])) == 3


@pytest.mark.parametrize("suffix", ["npy", "npz"])
def test_files_may_leave_the_state_out(suffix: str, tmp_path: Path) -> None:
    inputs = with_optional(model_inputs(running_sum(dims=(1, 2))), CHAIN)
    rows = np.concatenate([row["x"] for row in ROWS])
    path = tmp_path / f"rows.{suffix}"
    np.save(path, rows) if suffix == "npy" else np.savez(path, x=rows)
    assert [sample["x"].tolist() for sample in open_samples(path, inputs)] == [row["x"].tolist() for row in ROWS]
    np.savez(tmp_path / "with.npz", x=rows[:1], before=rows[:1])
    (sample,) = open_samples(tmp_path / "with.npz", inputs)
    assert set(sample) == {"x", "before"}


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["total"], "'total' is not OUTPUT=INPUT"),
        (["=before"], "is not OUTPUT=INPUT"),
        (["a=c", "b=c"], "'b=c' names an output or input again"),
        (["a=b", "a=c"], "'a=c' names an output or input again"),
    ],
)
def test_a_wrong_chain_is_told_why(texts: list[str], message: str) -> None:
    with pytest.raises(SchemeError, match=message):
        parse_chain(texts)


def test_names_that_are_not_there_get_a_suggestion() -> None:
    inputs = model_inputs(running_sum())
    with pytest.raises(SchemeError, match="ends in 'befor', expected an input of the model; did you mean 'before'"):
        with_optional(inputs, {"total": "befor"})
    with pytest.raises(SchemeError, match="begins with 'totl', expected an output of the model; did you mean 'total'"):
        ChainedSamples(ROWS, running_sum(), {"totl": "before"})
    with pytest.raises(SchemeError, match="Every input is chained"):
        with_optional(inputs, {"total": "before", "y": "x"})


@pytest.mark.parametrize("dtype", [TensorProto.INT64, TensorProto.DOUBLE, TensorProto.FLOAT])
def test_a_state_that_is_not_given_is_zero_of_its_type(dtype: int) -> None:
    plain = np.dtype(helper.tensor_dtype_to_np_dtype(dtype))
    (sample,) = ChainedSamples([{"x": np.ones((1, 2), plain)}], running_sum(dtype), CHAIN)
    assert sample["before"].dtype == plain
    assert sample["before"].tolist() == [[0, 0]]


def cache(past: str) -> onnx.ModelProto:
    """Return attention over a cache of keys, which grows by those of each sample."""
    return onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 17]>
        g (float[batch, new, 4] x, float{past} keys) => (float[batch, new, 4] y, float[batch, all, 4] keysN) {{
            keysN = Concat <axis = 1> (keys, x)
            turned = Transpose <perm = [0, 2, 1]> (keysN)
            products = MatMul (x, turned)
            weights = Softmax <axis = -1> (products)
            y = MatMul (weights, keysN)
        }}""")


KEYS = {"keysN": "keys"}


def words(*counts: int) -> list[Sample]:
    generator = np.random.default_rng(0)
    return [{"x": generator.normal(size=(1, count, 4)).astype(np.float32)} for count in counts]


@pytest.mark.parametrize("past", ["[batch, past, 4]", "[unk__1, unk__2, 4]", "[other, past, 4]"])
def test_a_cache_starts_without_a_phantom(past: str, caplog: pytest.LogCaptureFixture) -> None:
    samples = ChainedSamples(words(3, 1, 2), cache(past), KEYS)
    assert [sample["keys"].shape for sample in samples] == [(1, 0, 4), (1, 3, 4), (1, 4, 4)]
    assert caplog.messages == []


def test_a_named_dimension_is_that_of_the_sample(caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"x": np.ones((5, 2), np.float32)}] * 2
    samples = ChainedSamples(rows, running_sum(), CHAIN)
    assert [sample["before"].shape for sample in samples] == [(5, 2), (5, 2)]
    assert caplog.messages == []


def test_statistics_of_a_cache_are_those_of_what_was_given() -> None:
    given = words(3, 1)
    found = collect(
        cache("[batch, past, 4]"), ChainedSamples(given, cache("[batch, past, 4]"), KEYS), wanted(["keys", "keysN"])
    )
    values = np.concatenate([sample["x"].ravel() for sample in given])
    assert found.of("keysN").need(Range).minimum == values.min()
    assert found.of("keysN").need(Range).maximum == values.max()
    assert found.of("keys").need(Range).maximum == given[0]["x"].max()


MEAN = """<ir_version: 8, opset_import: ["" : 17]>
    g (float[1, 2] x, float[p, 2] before) => (float[q, 2] y, float[q, 2] total) {
        sum = ReduceSum <keepdims = 0> (before)
        ones = Exp(before)
        count = ReduceSum <keepdims = 0> (ones)
        mean = Div(sum, count)
        total = Add(x, mean)
        y = Neg(total)
    }"""


@pytest.mark.parametrize(
    "model",
    [running_sum(dims=(None, 2)), onnx.parser.parse_model(MEAN)],
    ids=["nothing is added to", "the mean of nothing"],
)
def test_a_model_that_does_not_run_from_nothing_gets_one_element_and_says_so(
    model: onnx.ModelProto, caplog: pytest.LogCaptureFixture
) -> None:
    samples = ChainedSamples(ROWS, model, CHAIN)
    assert befores(samples) == befores(samples)
    assert befores(samples)[0] == [0, 0]
    (sentence,) = caplog.messages
    assert sentence.startswith(
        "chained input 'before' starts from zeros of shape [1, 2], because the model rejects an empty array; "
    )


def test_a_state_of_unknown_rank_has_to_be_brought() -> None:
    model = running_sum()
    model.graph.input[1].type.tensor_type.ClearField("shape")
    with pytest.raises(SchemeError, match=r"'before' float32\[any rank\] cannot start from zeros"):
        list(ChainedSamples(ROWS, model, CHAIN))
    brought = [{**ROWS[0], "before": np.float32([[100, 0]])}]
    assert befores(ChainedSamples(brought, model, CHAIN)) == [[100, 0]]


FED = {"x": np.full((4, 8), 0.5, np.float32)}


DRAWING = {
    "RandomNormal": "n = RandomNormal<shape = [4, 8]>() y = Add(x, n)",
    "RandomUniform": "n = RandomUniform<shape = [4, 8]>() y = Add(x, n)",
    "RandomNormalLike": "y = RandomNormalLike(x)",
    "RandomUniformLike": "y = RandomUniformLike(x)",
    "Bernoulli": "y = Bernoulli(x)",
    "Multinomial": "i = Multinomial<sample_size = 8>(x) y = Cast<to = 1>(i)",
    "Dropout": "y = Dropout(x, half, yes)",
}


def random_model(build: Build, op: str, seed: str = "") -> ModelProto:
    nodes = DRAWING[op].replace(f"{op}(", f"{op}<{seed}>(").replace("]>", f"], {seed}>") if seed else DRAWING[op]
    return build(f"(float[4,8] x) => (float[4,8] y) {{ {nodes} }}", half=np.array(0.5, np.float32), yes=np.array(True))


@pytest.mark.parametrize("op", DRAWING)
def test_every_run_of_every_copy_draws_the_same(op: str, build: Build) -> None:
    made = random_model(build, op)
    assert draws(made)
    plain = open_session(made)
    assert not np.array_equal(run(plain, FED)[0], run(plain, FED)[0])
    put_seeds(made)
    one, other = (SeededSession(lambda: open_session(made)) for _ in range(2))
    first = run(one, FED)[0]
    assert output_names(one) == ["y"]
    assert len(np.unique(first)) > 1
    for session in (one, other, one):
        np.testing.assert_array_equal(run(session, FED)[0], first)


def test_a_seed_of_the_model_stays(build: Build) -> None:
    made = random_model(build, "RandomNormal", "seed = 3.0")
    before = made.SerializeToString()
    put_seeds(made)
    assert made.SerializeToString() == before


def test_nodes_draw_apart(build: Build) -> None:
    made = build("(float[4,8] x) => (float[4,8] y, float[4,8] z) { y = RandomNormalLike(x) z = RandomNormalLike(x) }")
    put_seeds(made)
    one, other = run(open_session(made), FED)
    assert not np.array_equal(one, other)


def test_bodies_draw_too_and_a_dropout_only_in_training(build: Build) -> None:
    text = """(float[4,8] x, bool c) => (float[4,8] y) {{
        y = If (c) <then_branch = t () => (u) {{ u = {} }}, else_branch = e () => (v) {{ v = Relu(x) }}>
    }}"""
    inside = build(text.format("RandomNormalLike(x)"))
    assert draws(inside)
    put_seeds(inside)
    (drawing,) = inside.graph.node[0].attribute[0].g.node
    assert [attribute.name for attribute in drawing.attribute] == ["seed"]
    assert not draws(build(text.format("Dropout(x)")))
