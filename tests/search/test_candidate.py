"""Candidates: models that are built once, run on the search samples, and left out if they fail."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from conftest import MODELS, Samples
from onnx import ModelProto

from onnxq.algorithms.encoding_config import EncodingConfig
from onnxq.calibration.methods import Percentile
from onnxq.config.presets import preset_named
from onnxq.config.scheme import Mode
from onnxq.errors import ModelError, PassError
from onnxq.ir import load
from onnxq.planning.plan import Demotion, Plan
from onnxq.runtime.targets import target_named
from onnxq.search.candidate import Recipe, Workshop
from onnxq.search.prepared_model import open_prepared_model
from onnxq.system.failures import collect_failures
from onnxq.system.resources import silent
from search.laboratory import minmax

PATH = MODELS / "resnet.onnx"
IMAGES = np.load(MODELS / "data" / "calib.npz")["image"]


def samples(count: int) -> Samples:
    return [{"image": image[None]} for image in IMAGES[:count]]


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    model = open_prepared_model(load(PATH), preset_named("int8"), target_named("onnxruntime-cpu"), tmp_path)
    statistics = model.calibrate(model.plan({}), samples(8), silent)
    return Workshop.of(model, PATH, samples(8), statistics, "resnet.int8.onnx", count=8)


def demoted(workshop: Workshop, mode: Mode) -> Plan:
    full = workshop.model.plan({})
    return workshop.model.plan({one.node: Demotion(mode, "for the test") for one in full.decisions if one.weights})


def test_a_candidate_has_a_file_and_errors_of_its_own(workshop: Workshop) -> None:
    static, stored, floats = (
        workshop.measured(plan, minmax(workshop))
        for plan in (workshop.model.plan({}), demoted(workshop, Mode.STORAGE), demoted(workshop, Mode.FLOAT))
    )
    assert 15 < static.bound < stored.bound < 60 < 100 < floats.bound
    # The bound is below what was seen.
    assert static.bound < static.sqnr
    assert static.nsr.shape == (8, len(workshop.reference.views.names))
    assert stored.nsr.sum() < static.nsr.sum()
    assert stored.bytes < floats.bytes / 2
    assert len({one.path for one in workshop.tried.values()}) == 3
    assert {one.path.name for one in workshop.tried.values()} == {"resnet.int8.onnx"}
    assert set(static.quantized.values()) >= {one.tensor for one in static.plan.activations[:1]}
    # Only the file of a new candidate is removed, as others may rest on a known one.
    known = workshop.measured(static.plan, static.recipe, least=static.bound + 1.0)
    dynamic = workshop.measured(demoted(workshop, Mode.DYNAMIC), minmax(workshop), least=100.0)
    assert [one.path.exists() for one in (known, stored, floats, dynamic)] == [True, True, True, False]


def test_what_is_known_is_neither_built_nor_run_again(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, int]] = []
    workshop = replace(workshop, progress=lambda stage, done, total: told.append((stage, done)))
    plan = workshop.model.plan({})
    first = workshop.measured(plan, minmax(workshop), nanoseconds=1.0, expected=0.5)
    assert (told, first.nanoseconds, first.expected) == ([("search", 1)], 1.0, 0.5)
    # Reasons make no other model, and what is expected of it is renewed.
    again = workshop.model.plan({"nowhere": Demotion(Mode.FLOAT, "another reason")})
    known = workshop.measured(again, minmax(workshop), expected=0.25)
    assert (known.path, known.nanoseconds, known.expected) == (first.path, 1.0, 0.25)
    assert list(workshop.tried.values()) == [known]
    other = Recipe(EncodingConfig(Percentile(90.0)), workshop.statistics)
    assert workshop.measured(plan, other).bound != first.bound
    fewer = workshop.model.calibrate(plan, samples(1), silent)
    assert workshop.measured(plan, Recipe(EncodingConfig(), fewer)).bound != first.bound
    assert len(workshop.tried) == len({one.path for one in workshop.tried.values()}) == len(told) == 3


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("onnxq.search.prepared_model.PlanApplier.quantized", PassError("a rewrite failed")),
        ("onnxq.search.prepared_model.PlanApplier.quantized", ModelError("a tensor is lost")),
        ("onnxq.search.candidate.quantized_tensors", ZeroDivisionError("a fault of ours")),
        ("onnxq.evaluation.comparison.ComparisonSession.run_each", ZeroDivisionError("a fault of ours")),
    ],
)
def test_a_model_that_cannot_be_made_or_run_is_a_candidate_of_no_accuracy(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, place: str, error: Exception
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    plan = workshop.model.plan({})
    with monkeypatch.context() as patch, collect_failures() as failures:
        patch.setattr(place, fail)
        candidate = workshop.measured(plan, minmax(workshop))
        # It is not tried a second time.
        assert workshop.measured(plan, minmax(workshop)).bound == -math.inf
    assert (candidate.bound, candidate.sqnr) == (-math.inf, -math.inf)
    assert [(failure.part, str(error) in failure.reason) for failure in failures] == [("a model that was tried", True)]
    # Others are measured as ever.
    assert workshop.measured(demoted(workshop, Mode.STORAGE), minmax(workshop)).bound > 20


def test_a_file_that_the_runtime_refuses_is_a_candidate_of_no_accuracy(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = type(workshop.model).build

    def broken(model: Any, plan: Plan, statistics: Any, config: Any, path: Path, **options: Any) -> Any:
        graph = build(model, plan, statistics, config, path, **options)
        proto = onnx.load(path)
        proto.graph.node[0].op_type = "NoSuchOperator"
        onnx.save(proto, path)
        return graph

    monkeypatch.setattr(type(workshop.model), "build", broken)
    with collect_failures() as failures:
        assert workshop.measured(workshop.model.plan({}), minmax(workshop)).bound == -math.inf
    assert len(failures) == 1


def test_outputs_that_are_not_finite_have_no_accuracy_and_are_no_failure(
    perceptron: ModelProto, samples_for: Callable[..., Samples], tmp_path: Path
) -> None:
    given = samples_for(perceptron, 4)
    onnx.save(perceptron, tmp_path / "given.onnx")
    model = open_prepared_model(
        load(tmp_path / "given.onnx"), preset_named("int8-storage"), target_named("onnxruntime-cpu"), tmp_path
    )
    plan = model.plan({})
    workshop = Workshop.of(
        model, tmp_path / "given.onnx", given, model.calibrate(plan, given, silent), "q.onnx", count=4
    )
    bad = tuple({"x": np.full_like(sample["x"], np.inf)} for sample in given[:1]) + workshop.reference.given[1:]
    workshop = replace(workshop, reference=replace(workshop.reference, given=bad))
    with collect_failures() as failures:
        candidate = workshop.measured(plan, minmax(workshop))
    assert candidate.bound == -math.inf
    assert failures == []


def test_a_model_that_is_built_to_be_judged_raises_its_faults(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a fault of ours")

    monkeypatch.setattr("onnxq.search.prepared_model.PlanApplier.quantized", fail)
    with collect_failures() as failures, pytest.raises(ZeroDivisionError):
        workshop.built(workshop.model.plan({}), minmax(workshop))
    assert failures == []


def test_a_part_has_some_of_the_samples_and_candidates_of_its_own(workshop: Workshop) -> None:
    plan = workshop.model.plan({})
    whole = workshop.measured(plan, minmax(workshop))
    part = workshop.part([1, 4, 6], workshop.statistics)
    candidate = part.measured(plan, minmax(workshop))
    assert (len(part.tried), len(workshop.tried), candidate.nsr.shape[0]) == (1, 1, 3)
    # Each sample has the same noise beside another signal.
    np.testing.assert_allclose(candidate.nsr / candidate.nsr.sum(), whole.nsr[[1, 4, 6]] / whole.nsr[[1, 4, 6]].sum())
    assert candidate.path != whole.path


@pytest.mark.parametrize(("count", "expected"), [(3, [0, 4, 7]), (8, list(range(8))), (99, list(range(8)))])
def test_search_samples_are_spread_over_all(workshop: Workshop, count: int, expected: list[int]) -> None:
    reference = Workshop.of(workshop.model, PATH, samples(8), workshop.statistics, "q.onnx", count=count).reference
    chosen = [sample["image"].tobytes() for sample in reference.samples]
    assert chosen == [IMAGES[place].tobytes() for place in expected]


def test_outputs_too_large_for_memory_leave_fewer_samples_spread_anew(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onnxq.evaluation.reference._HELD_BYTES", 1)
    monkeypatch.setattr("onnxq.evaluation.reference._FEWEST_SAMPLES", 3)
    found = Workshop.of(workshop.model, PATH, samples(8), workshop.statistics, "q.onnx", count=8)
    assert len(found.reference.samples) == 3
    assert np.array_equal(found.reference.samples[-1]["image"], IMAGES[7][None])


def test_a_process_takes_its_start_and_a_run_for_each_sample(workshop: Workshop) -> None:
    slow = replace(workshop, reference=replace(workshop.reference, seconds=2.0))
    assert slow.process_seconds == pytest.approx(0.4 + 8 * 2.0)
