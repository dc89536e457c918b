from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from pathlib import Path

import numpy as np
import onnx
import pytest
from observations import statistic, wanted
from onnx import TensorProto, helper, numpy_helper

from onnxq.calibration import workers as shards
from onnxq.calibration.accumulators import Range
from onnxq.calibration.collect import CalibrationCheckpoint, collect, collect_apart
from onnxq.calibration.histogram import Histogram
from onnxq.calibration.instrument import add_outputs
from onnxq.calibration.provenance import Provenance, instruction_set, sample_digest
from onnxq.calibration.statistics import CalibrationStatistics, observe
from onnxq.calibration.workers import InstrumentedRunError, Processes, Threads, Workers
from onnxq.data.dataset import Subset
from onnxq.errors import CandidateError, DataError, ModelError, RunError
from onnxq.runtime.sessions import runtime_version

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


def observed(evidence: CalibrationStatistics, tensor: str, arrays: Iterable[np.ndarray]) -> bool:
    """Return whether evidence of a tensor is that of one array a sample."""
    pairs = zip(arrays, SAMPLES, strict=True)
    parts = (observe({tensor: array}, wanted([tensor]), sample_digest(one)) for array, one in pairs)
    return evidence.of(tensor) == reduce(CalibrationStatistics.plus, parts).of(tensor)


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
    tapped = add_outputs(model(), ["h"])
    assert collect(tapped, SAMPLES, wanted(["h"])) == collect(model(), SAMPLES, wanted(["h"]))


def test_shards_merge_to_the_whole_in_any_order() -> None:
    whole = collect(model(), SAMPLES, wanted(["h", "y"]))
    first = collect(model(), SAMPLES[:1], wanted(["h", "y"]))
    second = collect(model(), SAMPLES[1:], wanted(["h", "y"]))
    assert first.merge(second) == whole == second.merge(first)


@pytest.mark.parametrize("workers", [Threads(1), Threads(3), Processes(2)], ids=str)
def test_the_workers_do_not_show(workers: Workers) -> None:
    many = [sample(row) for row in np.random.default_rng(0).normal(size=(40, 2)).tolist()]
    assert collect(model(), many, wanted(["h", "x"]), workers=workers) == collect(model(), many, wanted(["h", "x"]))


def test_parts_are_seen_apart_and_together_are_the_whole() -> None:
    requests, apart = [*wanted("h"), *wanted("x")], wanted("h")
    parts = [Subset(SAMPLES, places) for places in ([0], [2], [1])]
    runs = list(collect_apart(model(), [parts[:2], parts[2:]], requests, apart))
    assert [together for together, _ in runs] == [
        collect(model(), some, requests) for some in (SAMPLES[::2], [SAMPLES[1]])
    ]
    assert [one for _, each in runs for one in each] == [collect(model(), part, apart) for part in parts]
    assert not any(one.statistics for _, each in collect_apart(model(), [parts], requests) for one in each)


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
    with pytest.raises(ModelError, match=r"m.onnx is no ONNX model"):
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


@pytest.mark.parametrize("workers", [Threads(2), Processes(1)], ids=str)
def test_integers_booleans_strings_and_empty_arrays_come_in(workers: Workers) -> None:
    samples = [picked((1, True, "a"), (3, True, "b")), picked(), picked((2, False, "b"))]
    ledger = CalibrationCheckpoint("model", CalibrationStatistics(), lambda total: None)
    seen = collect(picking(), samples, wanted(["h", "y"]), workers=workers, ledger=ledger)
    assert seen.of("h").need(Range) == statistic(np.float32([-5, 2, 0]), "range")
    assert seen.of("y").need(Range) == statistic(np.float32([-4, 2, 0]), "range")
    assert (len(seen.samples), seen.provenance.model) == (3, "model")


def test_a_huge_range_zeros_and_constants_are_kept() -> None:
    zeros, constant, huge = ([(0, True, "b")] * 3, [(1, True, "b")] * 3, [(2, True, "b"), (1, True, "b")])
    for rows, ends in ((zeros, (0, 0)), (constant, (-5, -5)), (huge, (-5, float(np.float32(1e30))))):
        seen = collect(picking(), [picked(*rows)], wanted(["h"])).of("h").need(Range)
        assert (seen.minimum, seen.maximum, seen.count) == (*ends, len(rows))


def test_an_input_that_is_no_float_cannot_be_observed() -> None:
    with pytest.raises(DataError, match=r"Tensor 'ids' is int64, expected a float type"):
        collect(picking(), [picked((1, True, "a"))], wanted(["ids"]))


def test_a_sample_that_changes_between_two_readings_is_noticed() -> None:
    earlier = collect(
        model(),
        SAMPLES[:1],
        wanted(["h"]),
        ledger=CalibrationCheckpoint("m", CalibrationStatistics(), lambda total: None),
    )
    assert earlier.provenance == Provenance("m", runtime_version(), (instruction_set(),))
    with pytest.raises(DataError, match="1 samples of the earlier statistics are not there, expected samples to stay"):
        collect(model(), SAMPLES[1:], wanted(["h"]), ledger=CalibrationCheckpoint("m", earlier, lambda total: None))


def test_samples_that_were_run_before_are_passed_over_wherever_they_are() -> None:
    whole = collect(model(), SAMPLES, wanted(["h"]))
    for kept in ([2], [0, 2], [1], [2, 0, 1]):
        earlier = collect(model(), [SAMPLES[index] for index in kept], wanted(["h"]))
        seen: list[tuple[int, int]] = []
        found = collect(
            model(),
            SAMPLES,
            wanted(["h"]),
            progress=lambda done, total, seen=seen: seen.append((done, total)),
            ledger=CalibrationCheckpoint("", earlier, lambda total: None),
        )
        assert found == whole
        assert seen == [(count, 3) for count in range(len(kept) + 1, 4)]


def test_a_sample_that_is_there_twice_counts_twice() -> None:
    twice = collect(model(), [SAMPLES[0], SAMPLES[0]], wanted(["h"]))
    once = collect(model(), SAMPLES[:1], wanted(["h"]))
    assert twice == once.plus(once)
    assert (
        collect(model(), [SAMPLES[0]] * 2, wanted(["h"]), ledger=CalibrationCheckpoint("", once, lambda total: None))
        == twice
    )


def test_other_tensors_that_are_computed_do_not_show() -> None:
    whole = collect(model(), SAMPLES, wanted(["h", "x"]))
    assert collect(model(), SAMPLES, wanted(["x"]), others=["h", "x", "y"]) == whole.select(wanted(["x"]))


@pytest.mark.parametrize("workers", [Threads(1), Processes(1)])
def test_a_sample_that_the_float_model_does_not_run_is_told_of(workers: Workers) -> None:
    with pytest.raises(RunError, match="sample 1 cannot be run") as caught:
        collect(model(), [SAMPLES[0], {"x": np.ones((1, 3), np.float32)}], wanted("h"), workers=workers)
    assert not isinstance(caught.value, InstrumentedRunError)


def test_an_instrumented_model_that_fails_is_not_told_of_as_a_bad_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object, index: int, **more: object) -> list[object]:
        raise RunError(f"sample {index} cannot be run by onnxruntime") from RuntimeError("no kernel")

    monkeypatch.setattr(shards, "run", fail)
    with pytest.raises(CandidateError, match=r"the float model runs sample 0, but not with .*\(no kernel\)") as caught:
        collect(model(), SAMPLES, wanted("h"), workers=Threads(1))
    assert "cannot be run" not in str(caught.value)
    parts = [[Subset(SAMPLES, [2])]]
    with pytest.raises(CandidateError, match="the float model runs sample 2"):
        list(collect_apart(model(), parts, wanted("h")))
