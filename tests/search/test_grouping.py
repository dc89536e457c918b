"""What methods of accuracy ask of groups of samples is known from the run in which these were calibrated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from conftest import Build

from onnxq.algorithms.encoding_config import USUAL
from onnxq.algorithms.equalization import Setting, sites
from onnxq.calibration import workers
from onnxq.calibration.collect import collect_apart
from onnxq.calibration.methods import FIRST_RANGES
from onnxq.config.effort import FAST, FULL, Accuracy
from onnxq.config.presets import preset_named
from onnxq.data.dataset import Selection
from onnxq.data.samples import evenly
from onnxq.ir import as_graph
from onnxq.runtime.targets import target_named
from onnxq.search import activation_methods
from onnxq.search.activation_methods import refit_equalization, with_equalization
from onnxq.search.cross_validation import ALL, AlgorithmResult, CrossValidator, observe_groups, split_groups
from onnxq.search.evaluator import PlanEvaluator
from onnxq.search.prepared_model import PreparedModel, open_prepared_model
from onnxq.system.resources import silent

TEXT = "(float[1,6,8,8] x) => (float[1,3,8,8] y) {s = Sqrt(x) a = Conv(s, w) r = Relu(a) y = Conv(r, u)}"
COUNT = 21
# With all effort more of them judge than with little.
MANY = 84


@pytest.fixture
def model(build: Build) -> onnx.ModelProto:
    return build(TEXT, w=(8, 6, 1, 1), u=(3, 8, 1, 1))


def bench_of(model: onnx.ModelProto, folder: Path) -> PreparedModel:
    folder.mkdir()
    return open_prepared_model(as_graph(model), preset_named("int8"), target_named("onnxruntime-cpu"), folder)


@pytest.mark.parametrize(("accuracy", "count"), [(FAST, COUNT), (FULL, MANY)])
def test_nothing_runs_again_and_nothing_is_other_than_where_it_does(
    model: onnx.ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accuracy: Accuracy, count: int
) -> None:
    generator = np.random.default_rng(1)
    samples = [{"x": generator.uniform(0, 1, (1, 6, 8, 8)).astype(np.float32)} for _ in range(count)]
    found = []
    for name in ("apart", "grouped"):
        bench = bench_of(model, tmp_path / name)
        plan = bench.plan({})
        if name == "grouped":
            observe_groups(bench, plan, samples, accuracy, FIRST_RANGES, silent)
            monkeypatch.setattr(workers, "observe_shard", None)
        evidence = bench.calibrate(plan, samples, silent)
        evaluator = PlanEvaluator.of(bench, bench.prepared, list(evenly(samples, accuracy.judges(count))), evidence)
        validator = CrossValidator(evaluator, samples)
        held_out = validator.held_out_evaluator(plan).evidence
        migrated = with_equalization(validator, plan, AlgorithmResult(USUAL, evidence), accuracy)
        found.append((evidence, held_out, migrated.recipe.key, [len(validator.groups[group]) for group in ALL]))
    assert found[0] == found[1]


def test_for_factors_of_more_samples_only_these_run(
    model: onnx.ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = np.random.default_rng(1)
    samples = [{"x": generator.uniform(0, 1, (1, 6, 8, 8)).astype(np.float32)} for _ in range(COUNT)]
    known, more = samples[:-2], Selection(samples, [COUNT - 2, COUNT - 1])
    found = []
    for name in ("apart", "grouped"):
        bench = bench_of(model, tmp_path / name)
        plan = bench.plan({})
        if name == "grouped":
            observe_groups(bench, plan, known, FAST, FIRST_RANGES, silent)
            monkeypatch.setattr(activation_methods, "collect_apart", partial(only_of, more, collect_apart))
        groups = (*split_groups(known, FAST.judges(len(known))), more)
        settings = dict.fromkeys(sites(bench.graph, plan).found, Setting(1.0, 1.0, 0.0))
        basis = AlgorithmResult(USUAL, bench.calibrate(plan, samples, silent), settings)
        found.append(refit_equalization(bench, groups, plan, basis).key)
    assert found[0] == found[1]


def only_of(
    samples: Selection,
    collect: Callable[..., Any],
    model: Path,
    runs: Sequence[Sequence[Selection]],
    *rest: Any,
    **named: Any,
) -> Any:
    assert {place for parts in runs for part in parts for place in part.places} == set(samples.places)
    return collect(model, runs, *rest, **named)


def test_more_samples_than_are_judged_by_are_calibrated_as_usual(model: onnx.ModelProto, tmp_path: Path) -> None:
    bench = bench_of(model, tmp_path / "bench")
    samples = [{"x": np.zeros((1, 6, 8, 8), np.float32)}] * 513
    observe_groups(bench, bench.plan({}), samples, FAST, FIRST_RANGES, silent)
    evidence = bench.calibrate(bench.plan({}), samples[:2], silent)
    validator = CrossValidator(PlanEvaluator.of(bench, bench.prepared, samples[:2], evidence), samples)
    assert not bench.grouped.parts(validator.groups, ())
