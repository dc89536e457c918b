"""Ranges that are kept because their models are nearer to the float model."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import MODELS, Build
from observations import seen, statistics

from onnxq.algorithms.encoding_config import DEFAULT_CONFIG, EncodingConfig
from onnxq.algorithms.equalization import SMALLEST, EqualizationGroups, find_groups
from onnxq.algorithms.range_search import RangeChoice, SaturatingRange
from onnxq.calibration.methods import MinMax, Percentile
from onnxq.config.effort import FAST, FULL, AccuracyEffort
from onnxq.config.presets import PRESETS, preset_named
from onnxq.config.scheme import Mode
from onnxq.data.samples import evenly
from onnxq.ir import as_graph, load
from onnxq.numerics.spec import QuantSpec
from onnxq.planning.plan import Demotion, Plan
from onnxq.runtime.targets import TARGETS, target_named
from onnxq.search import activation_methods
from onnxq.search.activation_methods import _Channels, error_share, ranges_by_tensor, with_equalization, with_ranges
from onnxq.search.cross_validation import ALL, AlgorithmResult, CrossValidator
from onnxq.search.evaluator import PlanEvaluator
from onnxq.search.prepared_model import PreparedModel, open_prepared_model
from onnxq.system.resources import silent

UINT8, UINT4 = (QuantSpec(name, symmetric=False) for name in ("uint8", "uint4"))
SAMPLES = [{"image": image[None]} for image in np.load(MODELS / "data" / "calib.npz")["image"][:24]]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    return open_prepared_model(
        load(MODELS / "mobilenet.onnx"), PRESETS["int8"], TARGETS["onnxruntime-cpu"], tmp_path_factory.mktemp("bench")
    )


@pytest.fixture(scope="module")
def plan(bench: PreparedModel) -> Plan:
    return bench.plan({})


def validator(bench: PreparedModel, plan: Plan, holdout: int, most: int) -> CrossValidator:
    statistics = bench.calibrate(plan, SAMPLES[:most], silent)
    spread = list(evenly(SAMPLES[:most], holdout))
    return CrossValidator(PlanEvaluator.of(bench, MODELS / "mobilenet.onnx", spread, statistics), SAMPLES[:most])


def test_the_best_ranges_are_never_noisier_than_the_first(bench: PreparedModel, plan: Plan) -> None:
    found = validator(bench, plan, 4, 8)
    basis = AlgorithmResult(EncodingConfig(), found.evaluator.statistics)
    config = with_ranges(found, plan, basis, FAST, (Percentile(90.0), MinMax())).config
    assert repr(config.ranges) == repr(MinMax())
    assert len(found.evaluator.measured) == FAST.models
    assert found.evaluator.trust(plan, config).nsr <= found.evaluator.trust(plan, EncodingConfig()).nsr


@pytest.mark.parametrize(("before", "chosen", "kept"), [(99.99, 80.0, False), (80.0, 99.99, True)])
def test_ranges_are_kept_where_they_hold_on_samples_held_out(
    bench: PreparedModel, plan: Plan, monkeypatch: pytest.MonkeyPatch, before: float, chosen: float, kept: bool
) -> None:
    found = validator(bench, plan, 4, 12)
    basis = AlgorithmResult(EncodingConfig(Percentile(before)), found.evaluator.statistics)
    monkeypatch.setattr(activation_methods, "choose_ranges", lambda *_, **__: RangeChoice(Percentile(chosen)))
    config = with_ranges(found, plan, basis, FAST).config
    assert repr(config.ranges) == repr(Percentile(chosen if kept else before))


def test_ranges_end_where_what_follows_is_flat(
    bench: PreparedModel, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = validator(bench, plan, 4, 8)
    basis, tensor = AlgorithmResult(EncodingConfig(), found.evaluator.statistics), plan.observed_tensors[1]
    _, high = MinMax()(basis.statistics.of(tensor), plan.calibrated[tensor])
    for end, kept in ((high, True), (high / 50, False)):
        monkeypatch.setattr(activation_methods, "saturation_limits", lambda *_, end=end: {tensor: (-math.inf, end)})
        config = with_ranges(found, plan, basis, FAST, (MinMax(),)).config
        # The first changes nothing, and takes nothing off; the second is not flat in truth.
        assert not config.own_ranges or kept


def test_plans_without_ranges_keep_the_recipe(bench: PreparedModel, plan: Plan) -> None:
    found = validator(bench, plan, 1, 1)
    basis, stored = AlgorithmResult(EncodingConfig(), found.evaluator.statistics), replace(plan, activations=())
    left = with_ranges(found, stored, basis, FAST, (Percentile(90.0),))
    assert (left.config, left.left) == (basis.config, basis.unfit("no range of data is found by samples").left)
    assert not found.evaluator.measured


def test_tensors_of_much_noise_for_their_signal_come_first(bench: PreparedModel, plan: Plan) -> None:
    spread, peaked = np.linspace(-1, 1, 100), np.append(np.linspace(-1, 1, 100), 100.0)
    assert error_share(seen(peaked), UINT8) > 5 * error_share(seen(spread), UINT8)
    assert error_share(seen(spread), UINT4) > 100 * error_share(seen(spread), UINT8)
    assert error_share(seen([3.0]), UINT8) == 0
    values = dict.fromkeys(plan.observed_tensors, spread) | {plan.observed_tensors[-1]: peaked}
    found = ranges_by_tensor(plan, statistics(values), (MinMax(), Percentile(50.0)))
    assert next(iter(found)) == plan.observed_tensors[-1]
    assert found[plan.observed_tensors[0]][MinMax()] == (-1, 1)


# Migration is kept only where it helps on samples that did not set it.

TEXT = "(float[1,6,8,8] x) => (float[1,3,8,8] y) {s = Sqrt(x) a = Conv(s, w) r = Relu(a) y = Conv(r, u)}"


@pytest.fixture
def model_to_equalize(build: Build, tmp_path: Path) -> PreparedModel:
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


def equalization_validator(model_to_equalize: PreparedModel, count: int) -> CrossValidator:
    data = samples(count)
    statistics = model_to_equalize.calibrate(model_to_equalize.plan({}), data, silent)
    return CrossValidator(PlanEvaluator.of(model_to_equalize, model_to_equalize.prepared, data, statistics), data)


@pytest.mark.parametrize("effort", [FAST, FULL])
def test_quiet_channels_get_finer_codes(model_to_equalize: PreparedModel, effort: AccuracyEffort) -> None:
    found, plan = equalization_validator(model_to_equalize, 8), model_to_equalize.plan({})
    basis = AlgorithmResult(DEFAULT_CONFIG, found.evaluator.statistics)
    chosen = with_equalization(found, plan, basis, effort).config
    before, after = (found.evaluator.nsr(plan, config).sum() for config in (DEFAULT_CONFIG, chosen))
    assert after < before / 2
    assert chosen.equalization.factors
    assert all(((one.values > 0) & (one.values <= 1)).all() for one in chosen.equalization.factors.values())


@pytest.mark.parametrize("effort", [FAST, FULL])
def test_ranges_that_were_clipped_are_tried_whole(model_to_equalize: PreparedModel, effort: AccuracyEffort) -> None:
    found = equalization_validator(model_to_equalize, 8)
    clipped = replace(DEFAULT_CONFIG, ranges=Percentile(60.0))
    chosen = with_equalization(
        found, model_to_equalize.plan({}), AlgorithmResult(clipped, found.evaluator.statistics), effort
    ).config
    assert chosen.ranges == MinMax()
    assert chosen.equalization.factors


@pytest.mark.parametrize(("effort", "rooms"), [(FAST, {1.0}), (FULL, {1.0, 1 / SMALLEST})])
def test_with_all_effort_ranges_may_reach_beyond_where_what_follows_is_flat(
    model_to_equalize: PreparedModel, effort: AccuracyEffort, rooms: set[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, plan = equalization_validator(model_to_equalize, 8), model_to_equalize.plan({})
    tensor = next(iter(find_groups(model_to_equalize.graph, plan).found[0].tensors))
    config = replace(DEFAULT_CONFIG, own_ranges={tensor: SaturatingRange(DEFAULT_CONFIG.ranges, -0.5, 0.5)})
    tried: list[Any] = []
    quietest = CrossValidator.lowest_error
    monkeypatch.setattr(
        CrossValidator,
        "lowest_error",
        lambda self, plan, findings: tried.extend(findings) or quietest(self, plan, findings),
    )
    with_equalization(found, plan, AlgorithmResult(config, found.evaluator.statistics), effort)
    assert {own.room for one in tried for own in one.basis.config.own_ranges.values()} == rooms


def test_ends_beyond_which_all_is_flat_say_nothing_of_channels(model_to_equalize: PreparedModel) -> None:
    found, plan = equalization_validator(model_to_equalize, 8), model_to_equalize.plan({})
    site = find_groups(model_to_equalize.graph, plan).found[1]
    high = {name: MinMax()(found.evaluator.statistics.of(name), plan.calibrated[name])[1] for name in site.tensors}
    own = {name: SaturatingRange(MinMax(), -math.inf, high[name] / 4) for name in site.tensors}
    basis = AlgorithmResult(replace(DEFAULT_CONFIG, own_ranges=own), found.evaluator.statistics)
    channels = _Channels(model_to_equalize, found.groups, plan, [site], basis.statistics)
    (parts,) = channels.shares(basis.config, ALL).values()
    assert np.stack(parts).max() == pytest.approx(1, rel=0.02)


def test_without_sites_nothing_is_chosen(model_to_equalize: PreparedModel) -> None:
    found = equalization_validator(model_to_equalize, 2)
    basis = AlgorithmResult(DEFAULT_CONFIG, found.evaluator.statistics)
    floats = model_to_equalize.plan(
        {name: Demotion(Mode.FLOAT, "told to") for name in model_to_equalize.plan({}).by_node}
    )
    left = with_equalization(found, floats, basis, FULL)
    assert (left.config, left.left) == (
        basis.config,
        basis.unfit("no layers can take in factors of the channels between them").left,
    )


@pytest.mark.parametrize(("share", "tried"), [(0.01, False), (0.1, True)])
def test_sites_that_hardly_any_noise_comes_from_are_not_tried(
    model_to_equalize: PreparedModel, monkeypatch: pytest.MonkeyPatch, share: float, tried: bool
) -> None:
    found, plan = equalization_validator(model_to_equalize, 4), model_to_equalize.plan({})
    site = find_groups(model_to_equalize.graph, plan).found[1]
    monkeypatch.setattr(activation_methods, "find_groups", lambda *_: EqualizationGroups((site,), {}))
    monkeypatch.setattr(
        activation_methods, "error_share", lambda seen, _: share if seen.tensor in site.tensors else 1.0
    )
    with_equalization(found, plan, AlgorithmResult(DEFAULT_CONFIG, found.evaluator.statistics), FAST)
    assert any(part.measured for part in found._holdouts) is tried
