"""Runs of calibration: samples, storage, stages and descriptions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import reduce
from pathlib import Path

import numpy as np
import onnx
import pytest
from observations import observe, statistic, statistics, wanted, with_outputs
from onnx import TensorProto, helper, numpy_helper

from onnxq.calibration import activations as module
from onnxq.calibration import instrumented
from onnxq.calibration.accumulators import ChannelMeans, Range, Request
from onnxq.calibration.activations import Activations
from onnxq.calibration.collect import collect
from onnxq.calibration.histogram import Histogram
from onnxq.calibration.instrumented import InstrumentedRunError
from onnxq.calibration.kinds import KINDS
from onnxq.calibration.provenance import Provenance, instruction_set, sample_digest
from onnxq.calibration.segments import Stage, stages
from onnxq.calibration.statistics import (
    CalibrationStatistics,
    StatisticsSum,
    load_statistics,
    merge_files,
    save_statistics,
)
from onnxq.errors import CandidateError, DataError, ModelError, OutputError, RunError
from onnxq.runtime.sessions import open_session, run, runtime_version
from tests.conftest import Build

WEIGHT = np.array([[2, 0], [0, -3]], np.float32)


def model() -> onnx.ModelProto:
    """Return x -> MatMul(w) -> h -> Relu -> y, a chain that onnxruntime would fuse or fold were it not tapped."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 2]) for name in "xy")
    graph = helper.make_graph(nodes, "g", [x], [y], [numpy_helper.from_array(WEIGHT, "w")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def sample(*rows: list[float]) -> dict[str, np.ndarray]:
    return {"x": np.array(rows, np.float32)}


SAMPLES = [sample([1, 1]), sample([2, 0], [-1, 4]), sample([0, 0])]
ROWS = np.concatenate([entry["x"] for entry in SAMPLES])


def observed(statistics: CalibrationStatistics, tensor: str, arrays: Iterable[np.ndarray]) -> bool:
    """Return whether evidence of a tensor is that of one array a sample."""
    pairs = zip(arrays, SAMPLES, strict=True)
    parts = (observe({tensor: array}, wanted([tensor]), sample_digest(one)) for array, one in pairs)
    return statistics.of(tensor) == reduce(CalibrationStatistics.plus, parts).of(tensor)


def test_node_outputs_inputs_outputs_and_initializers_are_observed() -> None:
    seen = collect(model(), SAMPLES, wanted("hxyw"))
    assert seen.samples == tuple(sorted(map(sample_digest, SAMPLES)))
    assert list(seen.statistics) == wanted("hxyw")
    inputs = [entry["x"] for entry in SAMPLES]
    assert observed(seen, "h", [x @ WEIGHT for x in inputs])
    assert observed(seen, "x", inputs)
    assert observed(seen, "y", [np.maximum(x @ WEIGHT, 0) for x in inputs])
    assert observed(seen, "w", [WEIGHT] * 3)


def test_a_model_that_is_already_tapped_is_observed_alike() -> None:
    tapped = with_outputs(model(), ["h"])
    assert collect(tapped, SAMPLES, wanted(["h"])) == collect(model(), SAMPLES, wanted(["h"]))


def test_shards_merge_to_the_whole_in_any_order() -> None:
    whole = collect(model(), SAMPLES, wanted(["h", "y"]))
    first = collect(model(), SAMPLES[:1], wanted(["h", "y"]))
    second = collect(model(), SAMPLES[1:], wanted(["h", "y"]))
    assert first.merge(second) == whole == second.merge(first)


def test_progress_counts_samples() -> None:
    seen: list[tuple[int, int]] = []
    collect(model(), SAMPLES, wanted(["h"]), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_large_tensors_are_counted_at_a_selection_unless_all_are_wanted() -> None:
    large = [{"x": np.random.default_rng(0).normal(size=(1000, 2)).astype(np.float32)}]
    limited, exact = (
        collect(model(), large, wanted(["h"], "histogram", elements=count)).of("h").need(Histogram).whole
        for count in (100, 0)
    )
    assert (limited.minimum, limited.maximum) == (exact.minimum, exact.maximum)
    assert (exact.counts.sum(), limited.counts.sum() <= 101) == (2000, True)


def test_external_data_is_found_and_nothing_is_written(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(model(), path, save_as_external_data=True, size_threshold=0, location="m.data")
    before = {entry.name: entry.stat().st_mtime_ns for entry in tmp_path.iterdir()}
    assert set(before) == {"m.onnx", "m.data"}
    assert collect(path, SAMPLES, wanted(["h"])) == collect(model(), SAMPLES, wanted(["h"]))
    assert {entry.name: entry.stat().st_mtime_ns for entry in tmp_path.iterdir()} == before


def test_nothing_to_tap_still_counts_samples() -> None:
    seen = collect(model(), SAMPLES, [])
    assert (len(seen.samples), dict(seen.statistics)) == (3, {})


def test_empty_tensors_are_counted_as_nothing() -> None:
    seen = collect(model(), [{"x": np.zeros((0, 2), np.float32)}, SAMPLES[0]], wanted(["h"]))
    assert seen.of("h").need(Range).count == 2


def test_an_unknown_tensor_is_a_model_error() -> None:
    with pytest.raises(ModelError, match="Tensor 'hh' is not in the main graph"):
        collect(model(), SAMPLES, wanted(["hh"]))


def test_a_tensor_that_overflows_names_itself_and_the_sample() -> None:
    with pytest.raises(DataError, match="Tensor 'h' holds 2 NaN or infinite values of 2 in sample 1"):
        collect(model(), [SAMPLES[0], sample([3e38, 3e38])], wanted(["h"]))


def test_a_sample_that_does_not_run_gives_the_reason() -> None:
    with pytest.raises(DataError, match=r"sample 1 cannot be run by onnxruntime: .*x.*; check shapes"):
        collect(model(), [SAMPLES[0], {"x": np.zeros((1, 3), np.float32)}], wanted(["h"]))


def test_a_model_that_does_not_load_is_a_model_error(tmp_path: Path) -> None:
    broken = model()
    broken.graph.node[1].op_type = "NoSuchOperator"
    with pytest.raises(ModelError, match=r"the model cannot be loaded by onnxruntime: .*NoSuchOperator"):
        collect(broken, SAMPLES, wanted(["h"]))
    (tmp_path / "m.onnx").write_bytes(b"\xff\xff not a model")
    with pytest.raises(ModelError, match=r"m.onnx is not an ONNX model"):
        collect(tmp_path / "m.onnx", SAMPLES, wanted(["h"]))
    with pytest.raises(ModelError, match=r"gone.onnx cannot be read: No such file"):
        collect(tmp_path / "gone.onnx", SAMPLES, wanted(["h"]))


def test_missing_external_data_is_a_model_error(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(model(), path, save_as_external_data=True, size_threshold=0, location="m.data")
    (tmp_path / "m.data").unlink()
    with pytest.raises(ModelError, match="the model cannot be loaded by onnxruntime"):
        collect(path, SAMPLES, wanted(["h"]))


def picking() -> onnx.ModelProto:
    """Return ids, keep, names -> h = table[ids] * keep, y = h + (names == "a")."""
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"]),
        helper.make_node("Cast", ["keep"], ["share"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["rows", "share"], ["h"]),
        helper.make_node("Equal", ["names", "a"], ["same"]),
        helper.make_node("Cast", ["same"], ["bonus"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["h", "bonus"], ["y"]),
    ]
    kinds = {"ids": TensorProto.INT64, "keep": TensorProto.BOOL, "names": TensorProto.STRING}
    inputs = [helper.make_tensor_value_info(name, kind, ["N"]) for name, kind in kinds.items()]
    stored = [
        numpy_helper.from_array(np.float32([0, -5, 1e30, 2]), "table"),
        helper.make_tensor("a", TensorProto.STRING, [1], [b"a"]),
    ]
    graph = helper.make_graph(
        nodes, "g", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N"])], stored
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)


def picked(*rows: tuple[int, bool, str]) -> dict[str, np.ndarray]:
    ids, keep, names = zip(*rows, strict=True) if rows else ((), (), ())
    return {"ids": np.array(ids, np.int64), "keep": np.array(keep, bool), "names": np.array(names, str)}


def test_integers_booleans_strings_and_empty_arrays_come_in() -> None:
    samples = [picked((1, True, "a"), (3, True, "b")), picked(), picked((2, False, "b"))]
    seen = collect(picking(), samples, wanted(["h", "y"]))
    assert seen.of("h").need(Range) == statistic(np.float32([-5, 2, 0]), "range")
    assert seen.of("y").need(Range) == statistic(np.float32([-4, 2, 0]), "range")
    assert (len(seen.samples), seen.provenance) == (3, Provenance("", runtime_version(), (instruction_set(),)))


def test_a_huge_range_zeros_and_constants_are_kept() -> None:
    zeros, constant, huge = ([(0, True, "b")] * 3, [(1, True, "b")] * 3, [(2, True, "b"), (1, True, "b")])
    for rows, ends in ((zeros, (0, 0)), (constant, (-5, -5)), (huge, (-5, float(np.float32(1e30))))):
        seen = collect(picking(), [picked(*rows)], wanted(["h"])).of("h").need(Range)
        assert (seen.minimum, seen.maximum, seen.count) == (*ends, len(rows))


def test_an_input_that_is_no_float_cannot_be_observed() -> None:
    with pytest.raises(DataError, match=r"Tensor 'ids' is int64, expected a float type"):
        collect(picking(), [picked((1, True, "a"))], wanted(["ids"]))


def test_a_sample_that_is_there_twice_counts_twice() -> None:
    twice = collect(model(), [SAMPLES[0], SAMPLES[0]], wanted(["h"]))
    once = collect(model(), SAMPLES[:1], wanted(["h"]))
    assert twice == once.plus(once)


def test_other_tensors_that_are_computed_do_not_show() -> None:
    whole = collect(model(), SAMPLES, wanted(["h", "x"]))
    assert collect(model(), SAMPLES, wanted(["x"]), others=["h", "x", "y"]) == whole.select(wanted(["x"]))


def test_a_sample_that_the_float_model_does_not_run_is_told_of() -> None:
    with pytest.raises(RunError, match="sample 1 cannot be run") as caught:
        collect(model(), [SAMPLES[0], {"x": np.ones((1, 3), np.float32)}], wanted("h"))
    assert not isinstance(caught.value, InstrumentedRunError)


def test_an_instrumented_model_that_fails_is_not_told_of_as_a_bad_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object, index: int, **more: object) -> list[object]:
        raise RunError(f"sample {index} cannot be run by onnxruntime") from RuntimeError("no kernel")

    monkeypatch.setattr(instrumented, "run", fail)
    with pytest.raises(CandidateError, match=r"the float model runs sample 0, but not with .*\(no kernel\)") as caught:
        collect(model(), SAMPLES, wanted("h"))
    assert "cannot be run" not in str(caught.value)


CHAIN = """(float[N,4] x) => (float[N,2] y) {
    a = MatMul(x, w0)
    b = Relu(a)
    c = MatMul(b, w1)
    d = Add(c, bias)
    e = Add(d, x)
    y = MatMul(e, w2)
}"""


X = np.random.default_rng(3).standard_normal((3, 4)).astype(np.float32)


@pytest.fixture
def chain(build: Build) -> onnx.ModelProto:
    return build(CHAIN, w0=(4, 4), w1=(4, 4), bias=(4,), w2=(4, 2))


def through(parts: tuple[Stage, ...], values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run stages one after the other."""
    for stage in parts:
        with stage:
            values = values | stage.run(values)
    return values


@pytest.mark.parametrize("cuts", [[], ["b"], ["b", "d"], ["a", "b", "c", "d", "e", "y"], ["x", "e"]])
@pytest.mark.parametrize("optimize", [True, False])
def test_stages_together_are_the_model(chain: onnx.ModelProto, cuts: list[str], optimize: bool) -> None:
    parts = stages(chain, cuts, optimize=optimize)
    assert len(parts) == 1 + len({"a", "b", "c", "d", "e"} & set(cuts))
    expected = run(open_session(chain, optimize=optimize), {"x": X})[0]
    assert through(parts, {"x": X})["y"] == pytest.approx(expected, rel=1e-6)


def test_a_stage_says_what_it_needs_and_what_later_ones_need(chain: onnx.ModelProto) -> None:
    parts = stages(chain, ["b", "d"])
    assert [part.inputs for part in parts] == [("x",), ("b",), ("x", "d")]
    assert [part.outputs for part in parts] == [("b",), ("d",), ("y",)]
    assert [set(part.kept) for part in parts] == [{"x", "b"}, {"x", "d"}, set()]


def test_tensors_between_cuts_can_be_observed(chain: onnx.ModelProto) -> None:
    parts = stages(chain, ["b"], observed=["a", "c", "x"])
    assert [part.outputs for part in parts] == [("a", "b"), ("c", "y")]
    assert set(parts[1].run({"x": X, "b": X}, outputs=["c"])) == {"c"}


def test_weights_of_files_stay_there(chain: onnx.ModelProto, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    expected = run(open_session(chain), {"x": X})[0]
    onnx.save(chain, path, save_as_external_data=True, size_threshold=0, location="weights")
    parts = stages(path, ["b", "d"])
    assert through(parts, {"x": X})["y"] == pytest.approx(expected, rel=1e-6)


def test_bodies_stay_whole() -> None:
    def branch(kind: str) -> onnx.GraphProto:
        made = helper.make_tensor_value_info("inner", TensorProto.FLOAT, None)
        return helper.make_graph([helper.make_node(kind, ["a", "w"], ["inner"])], kind, [], [made])

    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("If", ["flag"], ["b"], then_branch=branch("Add"), else_branch=branch("Sub")),
        helper.make_node("Neg", ["b"], ["y"]),
    ]
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [2]),
        helper.make_tensor_value_info("flag", TensorProto.BOOL, []),
    ]
    weight = onnx.numpy_helper.from_array(np.float32([1, 1]), "w")
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])]
    graph = helper.make_graph(nodes, "g", inputs, outputs, [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    parts = stages(model, ["a", "b"])
    values = {"x": np.float32([3, 4]), "flag": np.array(True)}
    assert through(parts, values)["y"].tolist() == [-4, -5]


def test_what_is_no_tensor_of_numbers_is_not_carried_across_a_cut(build: Build) -> None:
    model = build(
        """(float[2] x) => (float[2] y) {
        s = SequenceConstruct(x, x)
        a = Relu(x)
        zero = Constant <value = int64 {0}> ()
        b = SequenceAt(s, zero)
        c = Add(a, b)
        y = Neg(c)
        }"""
    )
    parts = stages(model, ["a", "c"])
    assert [part.outputs for part in parts] == [("a", "b"), ("c",), ("y",)]
    assert through(parts, {"x": np.float32([1, -1])})["y"].tolist() == [-2, 1]


def test_what_a_stage_lacks_or_does_not_know_is_told(chain: onnx.ModelProto) -> None:
    first, _ = stages(chain, ["b"])
    with pytest.raises(DataError, match="Tensor 'x' is not among the values"):
        first.run({})
    with pytest.raises(DataError, match="invalid dimensions"):
        first.run({"x": X[:, :1]})
    with pytest.raises(ModelError, match="Tensor 'z' is not in the main graph"):
        stages(chain, ["z"])


def test_files_that_are_no_models_are_told(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        stages(tmp_path / "none.onnx", [])
    (tmp_path / "text.onnx").write_text("no model")
    with pytest.raises(ModelError, match="is not an ONNX model"):
        stages(tmp_path / "text.onnx", [])


def test_a_closed_stage_can_be_run_again(chain: onnx.ModelProto) -> None:
    (stage,) = stages(chain, [])
    with stage:
        first = stage.run({"x": X})["y"]
    assert stage.run({"x": X})["y"].tolist() == first.tolist()


PROVENANCE = Provenance("model", "onnxruntime 1.2.3", ("aarch64", "x86_64 avx2"))


def saved(sample: str = "ab", **tensors: list[float]) -> CalibrationStatistics:
    return replace(
        statistics({name: np.float64(one) for name, one in tensors.items()}, sample=sample), provenance=PROVENANCE
    )


EVERY_KIND = observe(
    {"x": np.random.default_rng(0).normal(size=(2, 3, 4)), "y": np.zeros((0, 3))},
    [Request.of(tensor, kind, 1) for tensor in "xy" for kind in KINDS],
    "cd",
)


CASES = [
    CalibrationStatistics(),
    saved(a=[0.1, 1e-300, -7], b=[], c=[-1e4, -9e9, 1], d=[1e30]),
    saved("3", a=[1]).merge(saved("4", a=[2])),
    EVERY_KIND,
]


@pytest.mark.parametrize("case", CASES)
def test_evidence_survives_a_file_exactly(case: CalibrationStatistics, tmp_path: Path) -> None:
    save_statistics(case, tmp_path / "s.npz")
    loaded = load_statistics(tmp_path / "s.npz")
    assert loaded == case
    assert loaded.provenance == case.provenance
    assert [path.name for path in tmp_path.iterdir()] == ["s.npz"]


def test_equal_evidence_is_equal_bytes_whatever_the_order_of_its_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_statistics(saved(a=[1], b=[2]), tmp_path / "a.npz")
    monkeypatch.setattr("time.time", lambda: 4e9)
    save_statistics(saved(b=[2], a=[1]), tmp_path / "b.npz")
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


def test_numpy_reads_the_file_without_pickles(tmp_path: Path) -> None:
    save_statistics(saved(a=[1, 2]), tmp_path / "s.npz")
    with np.load(tmp_path / "s.npz", allow_pickle=False) as arrays:
        header = json.loads(arrays["header"].tobytes())
        assert arrays["histogram.counts"].sum() == 2
    assert header["samples"] == ["ab"]


def test_a_place_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"s.npz cannot be written: No such file"):
        save_statistics(CalibrationStatistics(), tmp_path / "gone" / "s.npz")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_one_sentence_and_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "s.npz"
    save_statistics(saved(a=[1]), path)
    (tmp_path / f".s.npz.{os.getpid()}.tmp").symlink_to("/dev/full")
    with pytest.raises(OutputError, match=r"s.npz cannot be written: No space left on device; free disk space"):
        save_statistics(saved(a=[2]), path)
    assert load_statistics(path) == saved(a=[1])
    assert [entry.name for entry in tmp_path.iterdir()] == ["s.npz"]


def test_a_file_is_on_the_disk_before_it_takes_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(os, "fsync", lambda number: seen.append(sorted(path.name for path in tmp_path.iterdir())))
    save_statistics(saved(a=[1]), tmp_path / "s.npz")
    assert seen == [[f".s.npz.{os.getpid()}.tmp"], ["s.npz"]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda header: header | {"format": "onnxq statistics 6"},
            "'onnxq statistics 6', in which statistics have other names, expected 'onnxq statistics 9'",
        ),
        (lambda header: header | {"statistics": header["statistics"][:1]}, "arrays are longer than their statistics"),
        (lambda header: header | {"statistics": header["statistics"] * 2}, "does not hold calibration statistics"),
        (lambda header: header | {"samples": 7}, "does not hold calibration statistics"),
        (lambda header: header | {"provenance": {}}, "does not hold calibration statistics"),
    ],
    ids=["format", "less", "more", "samples", "provenance"],
)
def test_a_header_that_is_not_ours_is_one_sentence(
    change: Callable[[dict[str, list[object]]], dict[str, object]], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "s.npz"
    save_statistics(saved(a=[1, 2], b=[1]), path)
    with np.load(path) as arrays:
        content = dict(arrays)
    header = change(json.loads(content["header"].tobytes()))
    np.savez(path, **(content | {"header": np.frombuffer(json.dumps(header).encode(), np.uint8)}))
    with pytest.raises(DataError, match=message):
        load_statistics(path)


def test_files_merge_in_any_order_and_are_checked(tmp_path: Path) -> None:
    for name, one in (("a", saved("1", x=[1])), ("b", saved("2", x=[2])), ("c", saved("3", y=[3]))):
        save_statistics(one, tmp_path / name)
    a, b, c = (tmp_path / name for name in "abc")
    assert merge_files([a, b]) == merge_files([b, a]) == saved("1", x=[1]).merge(saved("2", x=[2]))
    with pytest.raises(DataError, match="c and the files before it differ in 6 statistics, such as histogram of 'x'"):
        merge_files([a, c])
    with pytest.raises(DataError, match="a: Both hold the same 1 samples"):
        merge_files([a, a])


def test_a_file_that_is_not_there_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone.npz cannot be read: No such file or directory; check its path$"):
        load_statistics(tmp_path / "gone.npz")


ARRAYS = {
    "floats": np.arange(6, dtype=np.float32).reshape(2, 3),
    "scalar": np.array(5, np.int64),
    "empty": np.zeros((0, 4), np.float32),
    "flags": np.array([True, False]),
}


@pytest.mark.parametrize("memory", [0, 20, 1 << 20])
def test_what_is_put_is_there(memory: int, tmp_path: Path) -> None:
    with Activations(memory, tmp_path) as held:
        held.put(0, ARRAYS)
        held.put(3, {"floats": ARRAYS["floats"] + 1})
        found = held.of(0)
        assert {name: (a.dtype, a.shape, a.tolist()) for name, a in found.items()} == {
            name: (a.dtype, a.shape, a.tolist()) for name, a in ARRAYS.items()
        }
        assert held.of(3)["floats"].tolist() == [[1, 2, 3], [4, 5, 6]]
        assert set(held.of(0, ["scalar", "unknown"])) == {"scalar"}
        assert held.of(1) == {}
    assert list(tmp_path.iterdir()) == []


def test_only_what_memory_has_no_room_for_is_written(tmp_path: Path) -> None:
    def files() -> int:
        return len(list(tmp_path.glob("*/*.npy")))

    with Activations(100, tmp_path) as held:
        for sample in range(4):
            held.put(sample, {"a": np.full(10, sample, np.float32)})
        assert files() == 2
        held.put(0, {"a": np.zeros(10, np.float32)})
        assert files() == 2
        held.put(2, {"a": np.zeros(10, np.float32)})
        assert files() == 2
        held.keep({"b"})
        assert files() == 0
        held.put(0, {"b": np.zeros(25, np.float32)})
        assert files() == 0


def test_only_what_is_kept_stays(tmp_path: Path) -> None:
    with Activations(0, tmp_path) as held:
        for sample in range(2):
            held.put(sample, {name: np.ones(1) for name in "abc"})
        held.keep({"b", "d"})
        assert [set(held.of(sample)) for sample in range(2)] == [{"b"}, {"b"}]
        assert len(list(tmp_path.glob("*/*.npy"))) == 2


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.np, "save", full)
    with Activations(0, tmp_path) as held, pytest.raises(OutputError, match="No space left on device; free disk space"):
        held.put(0, ARRAYS)


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    killed = (
        "import os, signal, sys, numpy, pathlib; from onnxq.calibration.activations import Activations; "
        "held = Activations(0, pathlib.Path(sys.argv[1])); held.put(0, {'a': numpy.ones(3)}); "
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", killed, tmp_path], check=False)
    (left,) = tmp_path.iterdir()
    with Activations(0, tmp_path) as held:
        held.put(0, {"a": np.ones(3)})
        assert not left.exists()
    assert list(tmp_path.iterdir()) == []


def one_sample(digest: str, **tensors: list[float]) -> CalibrationStatistics:
    return statistics({name: np.float64(values) for name, values in tensors.items()}, sample=digest)


def test_evidence_merges_by_request_and_keeps_its_samples_in_order() -> None:
    a, b = one_sample("b", a=[1.0], b=[2.0]), one_sample("a", b=[4.0], c=[5.0])
    merged = a.merge(b)
    assert merged == b.merge(a)
    assert merged.samples == ("a", "b")
    assert (merged.of("b").need(Range).minimum, merged.of("b").need(Range).maximum) == (2, 4)
    assert merged.of("c") == b.of("c")


def test_evidence_shows_as_a_line() -> None:
    assert repr(CalibrationStatistics()) == "CalibrationStatistics(0 samples, 0 tensors: nothing)"
    assert repr(one_sample("a", x=[1.0], y=[2.0])).startswith("CalibrationStatistics(1 samples, 2 tensors: range")
    assert len(repr(one_sample("a", x=[1.0]))) < 120


def test_the_same_sample_is_not_merged_twice_but_may_be_run_twice() -> None:
    one = one_sample("a", x=[1.0])
    with pytest.raises(DataError, match="Both hold the same 1 samples, such as 'a', expected each sample once"):
        one.merge(one)
    twice = one.plus(one)
    assert (twice.samples, twice.of("x").need(Range).count) == (("a", "a"), 2)


def test_a_total_is_the_sum_and_never_holds_more_than_it_and_what_is_added() -> None:
    requests = [Request.of(f"t{number}", "channel-means", 0) for number in range(8)]

    def seen(digest: str) -> CalibrationStatistics:
        sums = {request: ChannelMeans(1 << 14, np.ones(1 << 14)) for request in requests}
        return CalibrationStatistics((digest,), sums)

    tracemalloc.start()
    total, bytes_of_one = StatisticsSum(seen("a")), tracemalloc.get_traced_memory()[0]
    for digest in "bcd":
        tracemalloc.reset_peak()
        total.add(seen(digest))
        assert tracemalloc.get_traced_memory()[1] < 2.7 * bytes_of_one
    tracemalloc.stop()
    assert total.statistics == seen("d").plus(seen("c")).plus(seen("b")).plus(seen("a"))


def test_joining_keeps_the_statistics_of_both() -> None:
    joined = one_sample("5", a=[1.0]).join(one_sample("5", b=[2.0]))
    assert joined == one_sample("5", a=[1.0], b=[2.0])
    assert joined.select(one for one in joined.statistics if one.tensor == "b") == one_sample("5", b=[2.0])


def test_what_is_known_of_a_tensor_is_found_by_its_kind_and_axis() -> None:
    found = observe({"x": np.float32([[1, 2]])}, [Request("x", "range"), Request("x", "channel-means", 1)]).of("x")
    assert found.need(Range).maximum == 2
    assert found.find(ChannelMeans, 0) is None
    assert found.find(ChannelMeans, 1).means.tolist() == [1, 2]
    with pytest.raises(DataError, match="statistics of tensor 'x' hold no histogram, expected one; calibrate again"):
        found.need(Histogram)
    with pytest.raises(DataError, match="statistics of tensor 'y' hold no range"):
        CalibrationStatistics().of("y").need(Range)
