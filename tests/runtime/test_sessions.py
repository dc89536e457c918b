"""Sessions, profiles and interleaved timing."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import ModelProto

from onnxq.errors import DataError, ModelError, OutputError
from onnxq.ir import read_model, save
from onnxq.runtime import interleaved_timing as turns
from onnxq.runtime import kernels as kernels_module
from onnxq.runtime import sessions
from onnxq.runtime.interleaved_timing import balanced_orders, time_interleaved
from onnxq.runtime.kernels import _kernels, _runs, loaded_kernels, profile_kernels, ran_operators, read_profile
from onnxq.runtime.sessions import (
    Memory,
    open_session,
    release_shared_memory,
    return_memory,
    run,
)


@pytest.fixture
def sample(perceptron: ModelProto, samples_for) -> dict[str, np.ndarray]:
    return samples_for(perceptron, 1)[0]


def test_a_model_is_the_same_as_message_bytes_and_file(
    perceptron: ModelProto, sample: dict[str, np.ndarray], tmp_path: Path
) -> None:
    onnx.save(perceptron, tmp_path / "model.onnx")
    sources = (perceptron, perceptron.SerializeToString(), tmp_path / "model.onnx")
    outputs = [run(open_session(source, threads=1), sample)[0] for source in sources]
    np.testing.assert_array_equal(outputs[0], outputs[1])
    np.testing.assert_array_equal(outputs[0], outputs[2])


def test_optimisation_can_be_left_out(build, tmp_path: Path) -> None:
    model = build("(float[2,3] x) => (float[2,3] y) { a = Identity(x) b = Identity(a) y = Relu(b) }")
    counts = []
    for optimize in (True, False):
        open_session(model, optimize=optimize, optimized_copy=tmp_path / "copy.onnx")
        counts.append(len(onnx.load(tmp_path / "copy.onnx").graph.node))
    assert counts == [1, 3]


def test_outputs_come_in_the_order_asked_for(build) -> None:
    model = build("(float[2] x) => (float[2] a, float[2] b) { a = Neg(x) b = Abs(x) }")
    session, sample = open_session(model), {"x": np.array([1, -2], np.float32)}
    assert [one.tolist() for one in run(session, sample, ["b", "a"])] == [[1, 2], [-1, 2]]
    assert len(run(session, sample)) == 2
    assert run(session, sample, []) == []


def of_domain(model: ModelProto, domain: str) -> None:
    model.graph.node[0].domain = domain
    model.opset_import.add(domain=domain, version=1)


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (None, r"^/.*bad\.onnx .*onnxruntime"),
        (lambda model: of_domain(model, "mine"), r"^the model .*Relu"),
        # Long reasons are cut.
        (lambda model: of_domain(model, "mine." + "long" * 200), r"^the model .*\.\.\."),
        (lambda model: setattr(model, "ir_version", 99), "onnxruntime: Unsupported model IR version: 99"),
    ],
)
def test_a_model_that_does_not_load_is_told_in_one_line(
    edit: Callable[[ModelProto], None] | None, sentence: str, build, tmp_path: Path
) -> None:
    source = build("(float[2] x) => (float[2] y) { y = Relu(x) }")
    if edit is None:
        source = tmp_path / "bad.onnx"
        source.write_bytes(b"no model at all")
    else:
        edit(source)
    with pytest.raises(ModelError, match=sentence) as caught:
        open_session(source)
    message = str(caught.value)
    assert len(message) < 500
    # Neither codes of onnxruntime nor places in its source.
    assert not [part for part in ("\n", "ONNXRuntimeError", ".cc", "::") if part in message]


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"x": np.zeros((4, 31), np.float32)},
        {"x": np.zeros((4, 32), np.float64)},
        {"x": np.zeros((4, 32), np.float32), "more": np.zeros(1, np.float32)},
        {"x": "text"},
    ],
)
def test_a_sample_that_does_not_run_is_told_in_one_line(broken: dict[str, object], perceptron: ModelProto) -> None:
    with pytest.raises(DataError, match=r"^the sample ") as caught:
        run(open_session(perceptron), broken)
    assert "\n" not in str(caught.value)


def test_a_run_that_fails_names_its_sample(build) -> None:
    model = build("(float[A] x, float[B] z) => (float[C] y) { y = Add(x, z) }")
    sample = {"x": np.zeros(2, np.float32), "z": np.zeros(3, np.float32)}
    with pytest.raises(DataError, match=r"^sample 7 .*"):
        run(open_session(model), sample, index=7)


def test_external_data_of_a_model_in_memory_is_found(
    perceptron: ModelProto, sample: dict[str, np.ndarray], tmp_path: Path
) -> None:
    copy = onnx.ModelProto()
    copy.CopyFrom(perceptron)
    onnx.save(copy, tmp_path / "model.onnx", save_as_external_data=True, location="model.data", size_threshold=0)
    session = open_session((tmp_path / "model.onnx").read_bytes(), external_folder=tmp_path)
    np.testing.assert_array_equal(run(session, sample)[0], run(open_session(perceptron), sample)[0])


@pytest.mark.parametrize("name", ["bfloat16", "float8e4m3fn", "float8e4m3fnuz", "float8e5m2", "float8e5m2fnuz"])
def test_types_that_numpy_lacks_go_in_and_come_out(name: str) -> None:
    text = f"({name}[2,3] x, float[2,3] s) => ({name}[2,3] y, float[2,3] z, float[2,3] t) "
    body = "{ y = Identity(x) z = Cast<to = 1>(x) t = Neg(s) }"
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> main {text}{body}')
    dtype = onnx.helper.tensor_dtype_to_np_dtype(model.graph.input[0].type.tensor_type.elem_type)
    values = np.arange(6, dtype=np.float32).reshape(3, 2).T.astype(dtype)
    sample = {"x": values, "s": np.ones((2, 3), np.float32)}
    same, cast, other = run(open_session(model), sample)
    assert same.dtype == dtype
    np.testing.assert_array_equal(same.astype(np.float32), values.astype(np.float32))
    np.testing.assert_array_equal(cast, values.astype(np.float32))
    np.testing.assert_array_equal(other, -sample["s"])
    assert [one.dtype for one in run(open_session(model), sample, ["z", "y"])] == [np.float32, dtype]


def test_a_sample_of_such_a_type_that_does_not_fit_is_told(build) -> None:
    model = build("(bfloat16[2] x) => (bfloat16[2] y) { y = Identity(x) }")
    with pytest.raises(DataError, match=r"^the sample .*x"):
        run(open_session(model), {"x": np.zeros(3, ml_dtypes.bfloat16)})


@pytest.mark.parametrize("mapped", [None, True, False])
def test_a_large_model_answers_the_same_from_its_files(
    mapped: bool | None, large: Path, perceptron: ModelProto, sample: dict[str, np.ndarray]
) -> None:
    expected = run(open_session(perceptron), sample)[0]
    np.testing.assert_allclose(run(open_session(large, mapped=mapped), sample)[0], expected, rtol=1e-5)


@pytest.mark.parametrize("much", [1, 1 << 28])
def test_for_a_few_runs_much_external_data_stays_in_its_file(
    much: int, build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("(float[2,1024] x) => (float[2,1024] y) { w = Mul(v, v) y = MatMul(x, w) }", v=(1024, 1024))
    save(read_model(model), tmp_path / "model.onnx", external_data=True)
    monkeypatch.setattr(sessions, "_WORTH_MAPPING", much)
    open_session(tmp_path / "model.onnx", few_runs=True, optimized_copy=tmp_path / "copy.onnx")
    operators = [node.op_type for node in onnx.load(tmp_path / "copy.onnx", load_external_data=False).graph.node]
    assert operators == (["Mul", "MatMul"] if much == 1 else ["MatMul"])


@pytest.mark.parametrize("mapped", [True, False])
def test_mapped_weights_are_not_decoded_ahead(mapped: bool, build, tmp_path: Path) -> None:
    model = build("(float[2,1024] x) => (float[2,1024] y) { w = Mul(v, v) y = MatMul(x, w) }", v=(1024, 1024))
    open_session(model, mapped=mapped, optimized_copy=tmp_path / "copy.onnx")
    operators = [node.op_type for node in onnx.load(tmp_path / "copy.onnx").graph.node]
    assert operators == (["Mul", "MatMul"] if mapped else ["MatMul"])


@pytest.mark.parametrize("full", ["copy.onnx", "copy.onnx.data"])
def test_an_optimised_copy_without_room_is_told(full: str, build, tmp_path: Path) -> None:
    model = build("(float[2,256] x) => (float[2,256] y) { y = MatMul(x, w) }", w=(256, 256))
    (tmp_path / full).symlink_to("/dev/full")
    with pytest.raises(OutputError, match=r"^the optimized model cannot be written to .*: the disk is full"):
        open_session(model, optimized_copy=tmp_path / "copy.onnx")


def test_sessions_that_share_memory_give_the_same_outputs(
    perceptron: ModelProto, sample: dict[str, np.ndarray]
) -> None:
    expected = run(open_session(perceptron, threads=1), sample)[0]
    first, second = (open_session(perceptron, threads=1, memory=Memory.SHARED) for _ in range(2))
    held = run(first, sample)[0]
    for _ in range(3):
        np.testing.assert_array_equal(run(second, sample)[0], expected)
    np.testing.assert_array_equal(held, expected)
    del first
    release_shared_memory()
    np.testing.assert_array_equal(run(second, sample)[0], expected)


def test_the_optimised_copy_holds_its_weights_in_a_file_beside_it(build, tmp_path: Path) -> None:
    model = build("(float[1,64] x) => (float[1,64] y) { y = MatMul(x, w) }", w=(64, 64))
    open_session(model, optimized_copy=tmp_path / "copy.onnx")
    assert (tmp_path / "copy.onnx").stat().st_size < 64 * 64
    assert [node.op_type for node in onnx.load(tmp_path / "copy.onnx").graph.node] == ["MatMul"]


def test_memory_can_be_returned_at_any_time(build) -> None:
    model = build("(float[1,4] x) => (float[1,4] y) { y = Relu(x) }")
    session = open_session(model)
    return_memory()
    assert run(session, {"x": np.float32([[-1, 0, 1, 2]])})[0].tolist() == [[0, 0, 1, 2]]


LARGE_ALLOCATIONS = """
import sys
import numpy as np
from onnxq.runtime.sessions import open_session
from onnxq.system.resources import resident_bytes
open_session(sys.stdin.buffer.read(), mapped=True)
# The C library would take allocations of this size from the heap from now on.
np.ones(1 << 24, np.uint8)
large, between = [], []
before = resident_bytes()
for _ in range(40):
    large.append(np.ones(1 << 21, np.uint8))
    between.append(np.ones(1 << 17, np.uint8))
del large
print(resident_bytes() - before)
"""


@pytest.mark.skipif(sessions._of_c_library("mallopt") is None, reason="the C library has no such setting")
def test_the_system_gets_back_large_allocations_once_a_mapped_model_is_open(build) -> None:
    model = build("(float[1,4] x) => (float[1,4] y) { y = Relu(x) }")
    # The heap of this process may have free pieces that would be taken instead.
    command = [sys.executable, "-c", LARGE_ALLOCATIONS]
    done = subprocess.run(command, input=model.SerializeToString(), capture_output=True, check=True)
    assert int(done.stdout) < 20 << 20


@pytest.mark.parametrize(("turns", "runs"), [(3, 5), (100, 3), (300, 3), (450, 2), (3_000, 0)])
def test_a_long_loop_is_run_less_often_or_not_at_all(
    looping: ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turns: int, runs: int
) -> None:
    profiled = []
    monkeypatch.setattr(kernels_module, "_MOST_EVENTS", 4_000)
    monkeypatch.setattr(kernels_module, "_ENOUGH_EVENTS", 1_600)
    monkeypatch.setattr(kernels_module, "_runs", lambda events: profiled.extend(found := _runs(events)) or found)
    onnx.save(looping, tmp_path / "m.onnx")
    samples = [{"x": np.ones((1, 8), np.float32), "n": np.array(turns)}] * 2
    kernels = profile_kernels(tmp_path / "m.onnx", samples, tmp_path, repeats=2)
    assert len(profiled) == runs
    assert ("inner" in {one.name for one in kernels}) is (runs > 0)


def test_nodes_that_the_runtime_takes_out_make_no_events(
    build: Callable[..., ModelProto], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passing = " ".join(f"t{index + 1} = Identity(t{index})" for index in range(40))
    model = build(
        f"(float[1,8] x) => (float[1,8] y) {{ [first] t0 = MatMul(x, w0) {passing} y = Relu(t40) }}", w0=(8, 8)
    )
    onnx.save(model, tmp_path / "m.onnx")
    monkeypatch.setattr(kernels_module, "_MOST_EVENTS", 30)
    kernels = profile_kernels(tmp_path / "m.onnx", [{"x": np.ones((1, 8), np.float32)}], tmp_path, repeats=2)
    assert "first" in {one.name for one in kernels}


def test_a_profile_without_a_finished_run_has_no_kernels(perceptron: ModelProto) -> None:
    assert list(_kernels(perceptron.graph, [], 5)) == []


def test_what_was_written_elsewhere_and_is_no_profile_is_told(perceptron: ModelProto, tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text('{"cat": 1', encoding="utf-8")
    with pytest.raises(ModelError, match="the profile cannot be read"):
        read_profile(perceptron.SerializeToString(), tmp_path / "profile.json", 2)


def test_loaded_kernels_are_those_that_run(
    residual: ModelProto, samples_for: Callable[..., list], tmp_path: Path
) -> None:
    onnx.save(residual, tmp_path / "m.onnx")
    loaded = loaded_kernels(tmp_path / "m.onnx")
    ran = profile_kernels(tmp_path / "m.onnx", samples_for(residual, 1), tmp_path, repeats=1)
    # The names of what the runtime adds may be other ones each time.
    assert [(one.op_type, one.outputs) for one in loaded] == [(one.op_type, one.outputs) for one in ran]
    assert {one.nanoseconds for one in loaded} == {0.0}


def test_a_profiled_session_tells_the_operators_of_the_kernels_that_ran(
    residual: ModelProto, samples_for: Callable[..., list], tmp_path: Path
) -> None:
    onnx.save(residual, tmp_path / "m.onnx")
    session = open_session(tmp_path / "m.onnx", profile=tmp_path / "profile")
    for sample in samples_for(residual, 2):
        run(session, sample)
    expected = Counter(kernel.op_type for kernel in loaded_kernels(tmp_path / "m.onnx"))
    assert ran_operators(session, tmp_path / "m.onnx") == expected


def test_models_take_turns_and_go_on_where_they_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    now, runs = [0.0], []

    def run(model: str, sample: int) -> None:
        runs.append(f"{model}{sample}")
        now[0] += sample * (3 if model == "a" else 2)

    monkeypatch.setattr(turns.time, "perf_counter", lambda: now[0])
    pair = (lambda sample: run("a", sample)), (lambda sample: run("b", sample))
    assert time_interleaved(pair, [1, 5], 10.0) == [[(3, 2)], [(15, 10)]]
    assert runs == ["a1", "b1", "b1", "a1", "a5", "b5"]
    assert time_interleaved(pair, [1, 5], 0.0, turn=1) == [[], [(15, 10)]]
    [first, second] = time_interleaved(pair, [0.002, 0.01], 1e9, enough=3)
    assert len(first) + len(second) == 3
    # Of what takes long one turn is enough: the next round goes on with the other sample.
    assert time_interleaved(pair, [1, 5], 1e9, enough=3) == [[(3, 2)], []]
    assert time_interleaved(pair, [1, 5], 1e9, turn=1, enough=3) == [[], [(15, 10)]]


def test_models_of_little_time_run_more_often_than_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def run(sample: float) -> None:
        now[0] += sample

    monkeypatch.setattr(turns.time, "perf_counter", lambda: now[0])
    [found] = time_interleaved([run, run, run], [0.002], 10.0, enough=2)
    assert len(found) == 4
    assert {len(turn) for turn in found} == {3}


@pytest.mark.parametrize("count", range(1, 8))
def test_each_stands_in_each_place_and_behind_each_other_equally_often(count: int) -> None:
    orders = balanced_orders(count)
    places = Counter(place for order in orders for place in enumerate(order))
    behind = Counter(pair for order in orders for pair in pairwise(order))
    assert len(places) == count**2
    assert len(set(places.values())) == 1
    assert len(behind) == count * (count - 1)
    assert len(set(behind.values())) <= 1


def test_none_of_three_always_runs_between_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    now, last = [0.0], [""]

    def run(model: str) -> None:
        # What ran just now finds its weights in the caches.
        now[0] += 2.0 if model == last[0] else 3.0
        last[0] = model

    monkeypatch.setattr(turns.time, "perf_counter", lambda: now[0])
    runs = [lambda _, model=model: run(model) for model in "abc"]
    [found] = time_interleaved(runs, [0], 1e9, enough=60)
    assert len({sum(times) for times in zip(*found, strict=True)}) == 1
