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
from hypothesis import given
from hypothesis import strategies as st
from onnx import ModelProto

from onnxq.calibration.data import Data, samples_of
from onnxq.errors import CandidateError, DataError, OnnxqError
from onnxq.evaluation.agreement import Agreement, OutputAgreement, agreement_of, compare, compare_files
from onnxq.evaluation.comparison import ComparisonSpec
from onnxq.evaluation.latency import bench
from onnxq.evaluation.reference import ReferenceModel
from onnxq.runtime.engine import LoadedModel, OnnxRuntime


def agree(expected: Any, found: Any) -> OutputAgreement:
    """Return the agreement of one output over one sample."""
    return agreement_of(["y"], [([expected], [found])]).outputs[0]


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_equal_outputs_have_no_noise() -> None:
    one = agree(floats(1, -2), floats(1, -2))
    assert (one.sqnr, one.largest_error, one.same_shapes, one.finite) == (math.inf, 0.0, True, True)


def test_sqnr_counts_all_elements_of_all_samples() -> None:
    pairs = [([floats(3, 4)], [floats(3, 4)]), ([floats(0, 0)], [floats(0, 0.5)])]
    one = agreement_of(["y"], pairs).outputs[0]
    assert one.sqnr == pytest.approx(20.0)
    assert one.largest_error == 0.5


def test_noise_without_signal_is_as_bad_as_it_gets() -> None:
    assert agree(floats(0, 0), floats(0, 1e-9)).sqnr == -math.inf
    assert agree(floats(0, 0), floats(0, 0)).sqnr == math.inf


@given(st.floats(1e-3, 1e3), st.integers(0, 2**32 - 1))
def test_sqnr_does_not_depend_on_units(factor: float, seed: int) -> None:
    generator = np.random.default_rng(seed)
    expected, nsr = generator.normal(size=20), generator.normal(size=20) / 50
    one, other = agree(expected, expected + nsr), agree(expected * factor, (expected + nsr) * factor)
    assert one.sqnr == pytest.approx(other.sqnr, abs=1e-6)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
def test_every_float_type_is_compared_in_double_precision(dtype: type) -> None:
    expected = np.array([100, 0, -100, 1], dtype)
    found = np.array([100, 0, -100, 2], dtype)
    assert agree(expected, found).sqnr == pytest.approx(10 * math.log10(20001), abs=0.01)


def test_large_values_do_not_overflow() -> None:
    assert agree(floats(3e38, -3e38), floats(3e38, -2.9e38)).sqnr == pytest.approx(32.6, abs=0.1)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_in_both_is_left_out(value: float) -> None:
    one = agree(floats(1, value, 2), floats(1, value, 2.2))
    assert one.finite
    assert one.sqnr == pytest.approx(10 * math.log10(5 / 0.04), abs=0.01)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_in_the_candidate_alone_is_unsound(value: float) -> None:
    agreement = agreement_of(["y"], [([floats(1, 2)], [floats(1, value)])])
    assert not agreement.outputs[0].finite
    assert not agreement.sound
    assert math.isfinite(agreement.outputs[0].largest_error)


def test_other_shapes_are_unsound() -> None:
    agreement = agreement_of(["y"], [([floats(1, 2)], [floats(1, 2).reshape(1, 2)])])
    assert not agreement.outputs[0].same_shapes
    assert not agreement.sound


def test_empty_outputs_agree() -> None:
    one = agree(np.zeros((0, 3), np.float32), np.zeros((0, 3), np.float32))
    assert (one.sqnr, one.agreement, one.same_shapes) == (math.inf, None, True)


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
    ],
)
def test_arg_max_is_compared_where_it_says_something(
    expected: np.ndarray, found: np.ndarray, share: float | None
) -> None:
    assert agree(expected, found).agreement == share


def test_integers_and_strings_are_compared_by_equality() -> None:
    one = agree(np.array([1, 2, 3, 4]), np.array([1, 2, 3, 5]))
    assert (one.sqnr, one.agreement) == (None, 0.75)
    assert agree(np.array(["a", "b"], object), np.array(["a", "c"], object)).agreement == 0.5
    assert agree(np.array([True]), np.array([True])).agreement == 1.0


def test_sequences_and_maps_are_compared_element_by_element() -> None:
    long = np.arange(5000, dtype=np.float32)
    changed = long.copy()
    changed[2500] += 1
    assert agree([long], [long]).sqnr == math.inf
    assert math.isfinite(agree([long], [changed]).sqnr or math.inf)
    assert not agree([long], [long, long]).same_shapes
    assert agree([{0: 0.25, 1: 0.75}], [{1: 0.75, 0: 0.25}]).sqnr == math.inf
    assert not agree([{0: 0.25}], [{1: 0.25}]).same_shapes
    assert agree(None, None).agreement == 1.0
    assert agree(None, floats(1)).agreement == 0.0


def output(sqnr: float | None, agreement: float | None = None, compared: int = 200) -> OutputAgreement:
    return OutputAgreement("y", sqnr, agreement, 0.0, same_shapes=True, finite=True, compared=compared)


def test_the_worst_output_counts() -> None:
    assert Agreement(1, (output(30.0), output(20.0, 0.9), output(math.inf, 0.95))).worst_sqnr == 20.0
    assert Agreement(1, (output(30.0), output(20.0, 0.9), output(math.inf, 0.95))).worst_agreement == 0.9
    assert Agreement(1, (output(30.0), output(None, 1.0))).worst_sqnr == 30.0
    assert Agreement(1, (output(30.0), output(None, 0.5))).worst_sqnr < 0
    assert Agreement(1, (output(12.0), output(None, 0.98))).worst_sqnr == 12.0
    assert Agreement(1, (output(30.0),)).worst_agreement is None
    assert Agreement(1, ()).worst_sqnr == math.inf


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

    def compared(one: ModelProto, other: ModelProto, samples: list[dict[str, np.ndarray]]) -> Agreement:
        files = tmp_path / "one.onnx", tmp_path / "other.onnx"
        for model, path in zip((one, other), files, strict=True):
            onnx.save(model, path)
        views = ComparisonSpec.of(*files)
        return compare(ReferenceModel(files[0], views), views.open(files[1]), samples)

    return compared


def test_models_are_compared_output_by_output(perceptron: ModelProto, compared, samples_for) -> None:
    agreement = compared(perceptron, perceptron, samples_for(perceptron, 3))
    assert (agreement.samples, [one.name for one in agreement.outputs]) == (3, ["y"])
    assert agreement.worst_sqnr == math.inf
    assert agreement.sound


def test_models_with_other_outputs_are_not_compared(perceptron: ModelProto, compared, build) -> None:
    other = build("(float[4,32] x) => (float[4,32] z) { z = Relu(x) }")
    with pytest.raises(CandidateError, match=r"the first has outputs \['y'\], the second \['z'\]"):
        compared(perceptron, other, [])


def test_outputs_in_another_order_are_matched_by_name(build, compared, samples_for) -> None:
    one = build("(float[2,3] x) => (float[2,3] a, float[2,3] b) { a = Relu(x) b = Tanh(x) }")
    other = build("(float[2,3] x) => (float[2,3] b, float[2,3] a) { a = Relu(x) b = Tanh(x) }")
    agreement = compared(one, other, samples_for(one))
    assert [(one.name, one.sqnr) for one in agreement.outputs] == [("a", math.inf), ("b", math.inf)]


def test_files_are_compared_on_samples_from_disk(perceptron: ModelProto, samples_for, tmp_path: Path) -> None:
    onnx.save(perceptron, tmp_path / "model.onnx")
    for index, sample in enumerate(samples_for(perceptron, 3)):
        np.savez(tmp_path / f"{index}.npz", **sample)
    agreement = compare_files(tmp_path / "model.onnx", tmp_path / "model.onnx", Data(tmp_path, limit=2))
    assert (agreement.samples, agreement.worst_sqnr) == (2, math.inf)


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
    agreement = compare_files(tmp_path / "one.onnx", tmp_path / "other.onnx", data)
    assert (agreement.samples, agreement.files) == (8 * rows, files)
    assert agreement.to_dict()["files"] == files
    views = ComparisonSpec.of(tmp_path / "one.onnx", tmp_path / "other.onnx")
    samples = list(samples_of(tmp_path / "one.onnx", data))
    by_itself = compare(ReferenceModel(tmp_path / "one.onnx", views), views.open(tmp_path / "other.onnx"), samples)
    assert by_itself.files == 0
    assert (by_itself.outputs[0].bound == agreement.outputs[0].bound) == (files == 0)
    # A file that is run as one sample is judged by its rows all the same.
    together = compare_files(tmp_path / "one.onnx", tmp_path / "other.onnx", tmp_path / "data")
    assert together.samples == 8
    assert together.outputs[0].bound == pytest.approx(agreement.outputs[0].bound)


class Doubling(OnnxRuntime):
    """onnxruntime, were it wrong by a factor of two."""

    def load(self, model: Path, threads: int | None = None) -> LoadedModel:
        loaded = super().load(model, threads)
        right = loaded.run
        loaded.run = lambda sample: [2 * output for output in right(sample)]
        return loaded


def test_the_candidate_runs_on_the_engine_that_is_given(perceptron: ModelProto, samples_for, tmp_path: Path) -> None:
    onnx.save(perceptron, tmp_path / "m.onnx")
    np.savez(tmp_path / "data.npz", x=np.stack([sample["x"] for sample in samples_for(perceptron, 3)]))
    agreement = compare_files(tmp_path / "m.onnx", tmp_path / "m.onnx", tmp_path / "data.npz", engine=Doubling())
    assert agreement.samples == 3
    assert agreement.worst_sqnr == pytest.approx(0, abs=1e-5)


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
