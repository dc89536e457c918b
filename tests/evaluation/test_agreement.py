"""How well two models agree: signal to noise, arg max, shapes, and values that are not finite."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from conftest import Build
from onnx import ModelProto

from evaluation.wrong_engine import Faulty
from onnxq.calibration.data import Data, samples_of
from onnxq.errors import CandidateError, DataError, OnnxqError
from onnxq.evaluation.agreement import Agreement, OutputAgreement, agreement_of, compare_files
from onnxq.evaluation.latency import bench
from onnxq.runtime.engine import LoadedModel, OnnxRuntime


def agree(expected: Any, found: Any) -> OutputAgreement:
    """Return the agreement of one output over one sample."""
    return agreement_of(["y"], [([expected], [found])]).outputs[0]


ODD = (np.nan, np.inf, -np.inf)


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


@pytest.mark.parametrize(
    ("expected", "found", "sqnr", "largest"),
    [
        (floats(1, -2), floats(1, -2), math.inf, 0.0),
        # All elements count.
        (floats(3, 4, 0, 0), floats(3, 4, 0, 0.5), 20.0, 0.5),
        (floats(0, 0), floats(0, 1e-9), -math.inf, 1e-9),
        (floats(0, 0), floats(0, 0), math.inf, 0.0),
        (floats(3e38, -3e38), floats(3e38, -2.9e38), 32.6, 1e37),
        (np.zeros((0, 3), np.float32), np.zeros((0, 3), np.float32), math.inf, 0.0),
        # What the float model does not know is left out.
        *((floats(1, odd, 2), floats(1, odd, 2.2), 20.97, 0.2) for odd in ODD),
        *(
            (np.array([100, 0, -100, 1], dtype), np.array([100, 0, -100, 2], dtype), 43.01, 1.0)
            for dtype in (np.float16, np.float32, np.float64, ml_dtypes.bfloat16)
        ),
    ],
)
def test_sqnr_is_the_energy_of_the_signal_over_that_of_the_error(
    expected: np.ndarray, found: np.ndarray, sqnr: float, largest: float
) -> None:
    one = agree(expected, found)
    assert one.sqnr == pytest.approx(sqnr, abs=0.1)
    assert one.largest_error == pytest.approx(largest, rel=0.01)
    assert (one.same_shapes, one.finite) == (True, True)


@pytest.mark.parametrize("found", [*(floats(1, odd) for odd in ODD), floats(1, 2).reshape(1, 2)])
def test_other_shapes_and_values_that_are_not_finite_are_unsound(found: np.ndarray) -> None:
    agreement = agreement_of(["y"], [([floats(1, 2)], [found])])
    (one,) = agreement.outputs
    assert not agreement.sound
    assert (one.same_shapes, one.finite) == (found.ndim == 1, found.ndim == 2)
    assert math.isfinite(one.largest_error)


@pytest.mark.parametrize(
    ("expected", "found", "share"),
    [
        (np.eye(4), np.eye(4) + 0.1, 1.0),
        (np.eye(4), np.eye(4)[::-1], 0.0),
        (np.eye(4), np.where(np.arange(4)[:, None] == 0, np.eye(4)[::-1], np.eye(4)), 0.75),
        (np.eye(4).reshape(2, 2, 4), np.eye(4).reshape(2, 2, 4), 1.0),
        (np.ones((4, 1)), np.ones((4, 1)), None),
        (np.ones(4), np.ones(4), None),
        (np.ones((1, 2, 2, 2)), np.ones((1, 2, 2, 2)), None),
        (np.array([1, 2, 3, 4]), np.array([1, 2, 3, 5]), 0.75),
        (np.array(["a", "b"], object), np.array(["a", "c"], object), 0.5),
        (np.array([True]), np.array([True]), 1.0),
        (None, None, 1.0),
        (None, floats(1), 0.0),
    ],
)
def test_labels_are_compared_where_there_are_any(expected: Any, found: Any, share: float | None) -> None:
    one = agree(expected, found)
    assert one.agreement == share
    assert (one.sqnr is None) == (expected is None or expected.dtype.kind != "f")


@pytest.mark.parametrize(
    ("expected", "found", "sqnr", "same_shapes"),
    [
        ([np.arange(5000.0)], [np.arange(5000.0)], math.inf, True),
        ([np.arange(5000.0)], [np.append(np.arange(4999.0), 5000)], 106.2, True),
        ([floats(1)], [floats(1), floats(1)], math.inf, False),
        ([{0: 0.25, 1: 0.75}], [{1: 0.75, 0: 0.25}], math.inf, True),
        ([{0: 0.25}], [{1: 0.25}], math.inf, False),
    ],
)
def test_sequences_and_maps_are_compared_element_by_element(
    expected: list[Any], found: list[Any], sqnr: float, same_shapes: bool
) -> None:
    one = agree(expected, found)
    assert (one.sqnr, one.same_shapes) == (pytest.approx(sqnr, abs=0.1), same_shapes)


def output(sqnr: float | None, agreement: float | None = None, compared: int = 200) -> OutputAgreement:
    return OutputAgreement("y", sqnr, agreement, 0.0, same_shapes=True, finite=True, compared=compared)


@pytest.mark.parametrize(
    ("outputs", "sqnr", "share"),
    [
        ((output(30.0), output(20.0, 0.9), output(math.inf, 0.95)), 20.0, 0.9),
        ((output(30.0), output(None, 1.0)), 30.0, 1.0),
        ((output(30.0), output(None, 0.5)), -12.5, 0.5),
        ((output(12.0), output(None, 0.98)), 12.0, 0.98),
        ((output(30.0),), 30.0, None),
        ((), math.inf, None),
    ],
)
def test_the_worst_output_counts(outputs: tuple[OutputAgreement, ...], sqnr: float, share: float | None) -> None:
    agreement = Agreement(1, outputs)
    assert (agreement.worst_sqnr, agreement.worst_agreement) == (pytest.approx(sqnr, abs=0.1), share)


@pytest.mark.parametrize(
    ("differing", "compared", "decibels"),
    [
        *((0, 64, math.inf), (1, 64, math.inf), (1, 1, math.inf), (2, 64, 25.37), (3, 64, 17.95), (64, 64, -18.10)),
        # Where there are many, chance matters little.
        *((1000, 100_000, 20.46), (100_000, 1_000_000, 0.05)),
    ],
)
def test_labels_count_as_the_noise_that_makes_as_many_differ(differing: int, compared: int, decibels: float) -> None:
    expected = np.arange(compared)
    one = agree(expected, np.where(expected < differing, -1, expected))
    assert (one.differing, one.compared) == (differing, compared)
    assert one.decibels == pytest.approx(decibels, abs=0.01)


def test_plain_values_are_valid_json() -> None:
    agreement = Agreement(2, (output(math.inf), output(-math.inf), output(12.5), output(None, 1.0)))
    plain = json.loads(json.dumps(agreement.to_dict(), allow_nan=False))
    assert plain["samples"] == 2
    assert [one["sqnr"] for one in plain["outputs"]] == [None, None, 12.5, None]


def test_no_samples_are_an_error() -> None:
    with pytest.raises(DataError, match="no samples to compare"):
        agreement_of(["y"], [])


@pytest.fixture
def compared(tmp_path: Path) -> Callable[..., Agreement]:
    """Return a function: two models and samples to their agreement."""

    def compared(one: ModelProto, other: ModelProto, samples: list[dict[str, np.ndarray]], **options: Any) -> Agreement:
        files = tmp_path / "one.onnx", tmp_path / "other.onnx"
        for model, path in zip((one, other), files, strict=True):
            onnx.save(model, path)
        return compare_files(*files, samples, **options)

    return compared


def test_outputs_are_matched_by_name(build, compared, samples_for) -> None:
    one, other, renamed = (
        build("(float[2,3] x) => (float[2,3] a, float[2,3] b) { a = Relu(x) b = Tanh(x) }"),
        build("(float[2,3] x) => (float[2,3] b, float[2,3] a) { a = Relu(x) b = Tanh(x) }"),
        build("(float[2,3] x) => (float[2,3] a, float[2,3] c) { a = Relu(x) c = Tanh(x) }"),
    )
    agreement = compared(one, other, samples_for(one))
    assert (agreement.samples, agreement.sound) == (4, True)
    assert [(one.name, one.sqnr) for one in agreement.outputs] == [("a", math.inf), ("b", math.inf)]
    with pytest.raises(CandidateError, match=r"the first has outputs \['a', 'b'\], the second \['a', 'c'\]"):
        compared(one, renamed, samples_for(one))


@pytest.mark.parametrize(("rows", "files"), [(2, 8), (1, 0)])
def test_what_counts_as_one_is_told(rows: int, files: int, build: Callable[..., ModelProto], tmp_path: Path) -> None:
    for name, factor in (("one", 1.0), ("other", 1.1)):
        text = "(float[N,4] x) => (float[N,4] y) { y = Mul(x, factor) }"
        onnx.save(build(text, factor=np.array([factor], np.float32)), tmp_path / f"{name}.onnx")
    (tmp_path / "data").mkdir()
    generator = np.random.default_rng(0)
    for file in range(8):
        np.savez(tmp_path / "data" / f"{file}.npz", x=generator.normal(0, 1 + file, (rows, 4)).astype(np.float32))
    data = Data(tmp_path / "data", batch=1)
    paths = tmp_path / "one.onnx", tmp_path / "other.onnx"
    agreement, by_itself = compare_files(*paths, data), compare_files(*paths, list(samples_of(paths[0], data)))
    assert (agreement.samples, agreement.files, by_itself.files) == (8 * rows, files, 0)
    assert agreement.to_dict()["files"] == files
    assert (by_itself.outputs[0].bound == agreement.outputs[0].bound) == (files == 0)
    # A file that is run as one sample is judged by its rows all the same.
    together = compare_files(*paths, tmp_path / "data")
    assert together.samples == 8
    assert together.outputs[0].bound == pytest.approx(agreement.outputs[0].bound)


def test_the_candidate_runs_on_the_engine_that_is_given(perceptron: ModelProto, compared, samples_for) -> None:
    agreement = compared(
        perceptron,
        perceptron,
        samples_for(perceptron, 3),
        engine=Faulty(lambda outputs: [2 * output for output in outputs]),
    )
    assert (agreement.samples, agreement.worst_sqnr) == (3, pytest.approx(0, abs=1e-5))


@pytest.mark.parametrize("measure", [compare_files, bench])
def test_a_model_whose_inputs_have_other_types_is_refused_with_both(
    measure: Callable[..., object], build: Build, tmp_path: Path
) -> None:
    paths = [tmp_path / f"{one}.onnx" for one in ("int64", "int32")]
    for path in paths:
        onnx.save(build(f"({path.stem}[4] ids) => (float[4] y) {{ y = Cast <to = 1> (ids) }}"), path)
    with pytest.raises(DataError, match=r"takes input 'ids' as int32, expected int64 as in .* onnxq verify"):
        measure(*paths, [{"ids": np.arange(4)}])


class Counting(OnnxRuntime):
    """onnxruntime, which counts the models that it loads and closes, and may fail to run them."""

    def __init__(self, *, fails: bool) -> None:
        super().__init__()
        self.loaded, self.closed, self.fails = 0, 0, fails

    def load(self, model: Path, threads: int | None = None) -> LoadedModel:
        loaded = super().load(model, threads)
        run = loaded.run

        def close() -> None:
            self.closed += 1

        self.loaded += 1
        loaded.close = close
        loaded.run = lambda sample: run({} if self.fails else sample)
        return loaded


@pytest.mark.parametrize(("fails", "count"), [(False, 2), (True, 1)])
def test_models_that_an_engine_loads_are_closed(fails: bool, count: int, build: Build, tmp_path: Path) -> None:
    text = (
        "(float[4,8] x) => (y) { s = MatMul(x, w) v, i = TopK<axis = 0>(s, k) j = Squeeze(i, axis) y = Gather(x, j) }"
    )
    onnx.save(build(text, w=np.ones((8, 1), np.float32), k=np.array([2]), axis=np.array([1])), tmp_path / "m.onnx")
    samples = [{"x": np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)}]
    engine = Counting(fails=fails)
    with pytest.raises(OnnxqError) if fails else nullcontext():
        compare_files(tmp_path / "m.onnx", tmp_path / "m.onnx", samples, engine=engine)
    assert engine.loaded == engine.closed == count
