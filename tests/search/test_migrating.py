"""Migration is kept only where it helps on samples that did not set it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Build

from onnxq.algorithms.encoding_config import USUAL
from onnxq.algorithms.equalization import SMALLEST, Sites, sites
from onnxq.algorithms.range_search import Within
from onnxq.calibration.methods import MinMax, Percentile
from onnxq.config.effort import FAST, FULL, Accuracy
from onnxq.config.presets import preset_named
from onnxq.config.scheme import Mode
from onnxq.ir import as_graph
from onnxq.planning.plan import Demotion
from onnxq.runtime.targets import target_named
from onnxq.search import activation_methods
from onnxq.search.activation_methods import _Channels, with_equalization
from onnxq.search.cross_validation import ALL, AlgorithmResult, CrossValidator
from onnxq.search.evaluator import PlanEvaluator
from onnxq.search.prepared_model import PreparedModel, open_prepared_model
from onnxq.system.resources import silent

TEXT = "(float[1,6,8,8] x) => (float[1,3,8,8] y) {s = Sqrt(x) a = Conv(s, w) r = Relu(a) y = Conv(r, u)}"


@pytest.fixture
def bench(build: Build, tmp_path: Path) -> PreparedModel:
    generator = np.random.default_rng(0)
    # What is small in the data matters as much as what is large.
    wide = np.array([1, 0.05, 0.04, 0.05, 0.03, 0.05])
    weight = (generator.standard_normal((8, 6, 1, 1)) / wide.reshape(1, -1, 1, 1)).astype(np.float32)
    model = build(TEXT, w=weight, u=(3, 8, 1, 1))
    return open_prepared_model(as_graph(model), preset_named("int8"), target_named("onnxruntime-cpu"), tmp_path)


def samples(count: int) -> list[dict[str, np.ndarray]]:
    generator = np.random.default_rng(1)
    wide = np.array([1, 0.05, 0.04, 0.05, 0.03, 0.05]).reshape(-1, 1, 1)
    return [{"x": ((generator.uniform(0, 1, (1, 6, 8, 8)) * wide) ** 2).astype(np.float32)} for _ in range(count)]


def validator(bench: PreparedModel, count: int) -> CrossValidator:
    data = samples(count)
    evidence = bench.calibrate(bench.plan({}), data, silent)
    return CrossValidator(PlanEvaluator.of(bench, bench.prepared, data, evidence), data)


@pytest.mark.parametrize("effort", [FAST, FULL])
def test_quiet_channels_get_finer_codes(bench: PreparedModel, effort: Accuracy) -> None:
    found, plan = validator(bench, 8), bench.plan({})
    basis = AlgorithmResult(USUAL, found.evaluator.evidence)
    chosen = with_equalization(found, plan, basis, effort).recipe
    before, after = (found.evaluator.noise(plan, recipe).sum() for recipe in (USUAL, chosen))
    assert after < before / 2
    assert chosen.migration.factors
    assert all(((one.values > 0) & (one.values <= 1)).all() for one in chosen.migration.factors.values())


@pytest.mark.parametrize("effort", [FAST, FULL])
def test_ranges_that_were_clipped_are_tried_whole(bench: PreparedModel, effort: Accuracy) -> None:
    found = validator(bench, 8)
    clipped = replace(USUAL, ranges=Percentile(60.0))
    chosen = with_equalization(found, bench.plan({}), AlgorithmResult(clipped, found.evaluator.evidence), effort).recipe
    assert chosen.ranges == MinMax()
    assert chosen.migration.factors


@pytest.mark.parametrize(("effort", "rooms"), [(FAST, {1.0}), (FULL, {1.0, 1 / SMALLEST})])
def test_with_all_effort_ranges_may_reach_beyond_where_what_follows_is_flat(
    bench: PreparedModel, effort: Accuracy, rooms: set[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, plan = validator(bench, 8), bench.plan({})
    tensor = next(iter(sites(bench.graph, plan).found[0].tensors))
    recipe = replace(USUAL, own_ranges={tensor: Within(USUAL.ranges, -0.5, 0.5)})
    tried: list[Any] = []
    quietest = CrossValidator.lowest_error
    monkeypatch.setattr(
        CrossValidator,
        "lowest_error",
        lambda self, plan, findings: tried.extend(findings) or quietest(self, plan, findings),
    )
    with_equalization(found, plan, AlgorithmResult(recipe, found.evaluator.evidence), effort)
    assert {own.room for one in tried for own in one.basis.recipe.own_ranges.values()} == rooms


def test_ends_beyond_which_all_is_flat_say_nothing_of_channels(bench: PreparedModel) -> None:
    found, plan = validator(bench, 8), bench.plan({})
    site = sites(bench.graph, plan).found[1]
    high = {name: MinMax()(found.evaluator.evidence.of(name), plan.calibrated[name])[1] for name in site.tensors}
    own = {name: Within(MinMax(), -math.inf, high[name] / 4) for name in site.tensors}
    basis = AlgorithmResult(replace(USUAL, own_ranges=own), found.evaluator.evidence)
    channels = _Channels(bench, found.groups, plan, [site], basis.evidence)
    (parts,) = channels.shares(basis.recipe, ALL).values()
    assert np.stack(parts).max() == pytest.approx(1, rel=0.02)


def test_without_sites_nothing_is_chosen(bench: PreparedModel) -> None:
    found = validator(bench, 2)
    basis = AlgorithmResult(USUAL, found.evaluator.evidence)
    floats = bench.plan({name: Demotion(Mode.FLOAT, "told to") for name in bench.plan({}).by_node})
    left = with_equalization(found, floats, basis, FULL)
    assert (left.recipe, left.left) == (
        basis.recipe,
        basis.unfit("no layers can take in factors of the channels between them").left,
    )


@pytest.mark.parametrize(("share", "tried"), [(0.01, False), (0.1, True)])
def test_sites_that_hardly_any_noise_comes_from_are_not_tried(
    bench: PreparedModel, monkeypatch: pytest.MonkeyPatch, share: float, tried: bool
) -> None:
    found, plan = validator(bench, 4), bench.plan({})
    site = sites(bench.graph, plan).found[1]
    monkeypatch.setattr(activation_methods, "sites", lambda *_: Sites((site,), {}))
    monkeypatch.setattr(
        activation_methods, "noise_share", lambda seen, _: share if seen.tensor in site.tensors else 1.0
    )
    with_equalization(found, plan, AlgorithmResult(USUAL, found.evaluator.evidence), FAST)
    assert any(part.measured for part in found._judges) is tried
