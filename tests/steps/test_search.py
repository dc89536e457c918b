"""Forms for integer kernels are taken back where they make a model slower than float."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from recurrent_models import LARGE, cell, sample

from onnxq import pipeline
from onnxq.calibration.data import Data
from onnxq.calibration.methods import DEFAULT_METHODS
from onnxq.evaluation.goal import Goal
from onnxq.evaluation.latency import Latency
from onnxq.pipeline import calibrate
from onnxq.search.context import SearchContext
from onnxq.search.profiling import PlanProfiler
from onnxq.steps import fallbacks
from onnxq.steps.calibrate import CalibratedModel, calibrate_model
from onnxq.steps.prepare import PreparedRun, prepare_model
from onnxq.steps.request import Budget, QuantizationRequest
from onnxq.steps.search import are_variants_hopeless, are_variants_slower, search_for_plan

DATA = Data([sample(rows, LARGE) for rows in (1, 2)])
UNTIMED = Budget("off", "off", latency_seconds=0)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Have each plan measured as the speeds in a list say, from the last to the first."""
    speeds: list[float] = []
    monkeypatch.setattr(SearchContext, "measurable", True)
    monkeypatch.setattr(PlanProfiler, "speeds", lambda self, plans: [speeds.pop() for _ in plans])
    return speeds


def seen_with(folder: Path, *, keeps_forms: bool) -> tuple[PreparedRun, CalibratedModel]:
    wanted = replace(QuantizationRequest.of("int8", "openvino", ()), keeps_forms=keeps_forms)
    ready = prepare_model(cell(LARGE, linear_before_reset=1), wanted, folder, None, UNTIMED)
    return ready, calibrate_model(ready, DATA, DEFAULT_METHODS, Goal(), UNTIMED)


@pytest.mark.parametrize(("speed", "hopeless"), [(0.5, True), (0.95, False), (1.3, False)])
def test_a_scan_is_hopeless_where_it_is_far_slower_in_integers(
    speed: float, hopeless: bool, measured: list[float], tmp_path: Path
) -> None:
    measured.append(speed)
    assert are_variants_hopeless(*seen_with(tmp_path, keeps_forms=False), Goal(), Budget()) == hopeless
    assert not measured


def test_cells_that_stay_are_not_timed_for_that(measured: list[float], tmp_path: Path) -> None:
    assert not are_variants_hopeless(*seen_with(tmp_path, keeps_forms=True), Goal(), Budget())


@pytest.mark.parametrize(
    ("keeps_forms", "seconds", "slowed"), [(False, 2.0, True), (False, 0.5, False), (True, 2.0, False)]
)
def test_forms_have_slowed_a_model_that_is_slower_and_has_any(
    keeps_forms: bool, seconds: float, slowed: bool, tmp_path: Path
) -> None:
    ready, seen = seen_with(tmp_path, keeps_forms=keeps_forms)
    found = search_for_plan(ready, seen, Goal(), UNTIMED)
    assert not are_variants_slower(ready, found)
    timed = Latency(1.0, seconds, 1, 6, 3, interval=(0.9 / seconds, 0.98 / seconds))
    chosen = replace(found.chosen, verification=replace(found.chosen.verification, latency=timed))
    assert are_variants_slower(ready, replace(found, chosen=chosen)) == slowed


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize(("hopeless", "cells"), [(True, 1), (False, 0)])
def test_a_model_has_its_cells_again_where_a_scan_is_hopeless(
    hopeless: bool, cells: int, calibrated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, model, data = [hopeless, False], cell(LARGE, linear_before_reset=1), DATA
    monkeypatch.setattr(fallbacks, "are_variants_hopeless", lambda *_: looks.pop(0))
    if calibrated:
        data = replace(DATA, statistics=calibrate(model, DATA, target="openvino"))
    done = pipeline.quantize(model, data, target="openvino", budget=UNTIMED)
    assert sum(node.op == "GRU" for node in done.graph.nodes) == cells
    assert len(looks) == 1 - cells
