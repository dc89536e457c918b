"""Factors of float data are kept where some channels are far larger than others, and nowhere else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import Build

from onnxq.algorithms.encoding_config import Recipe
from onnxq.config.effort import FULL
from onnxq.config.presets import preset_named
from onnxq.ir import as_graph
from onnxq.planning.plan import Plan
from onnxq.runtime.targets import DEFAULT_TARGET, target_named
from onnxq.search.cross_validation import LARGE, AlgorithmResult, CrossValidator
from onnxq.search.evaluator import PlanEvaluator
from onnxq.search.prepared_model import open_prepared_model
from onnxq.search.weight_methods import with_awq, with_gptq
from onnxq.system.resources import silent

TEXT = "(float[8,64] x) => (float[8,48] y) {n = LayerNormalization(x, s, b) a = MatMul(n, w) y = Add(a, c)}"
LOUD = np.where(np.arange(64) % 32 == 3, 30.0, 1.0).astype(np.float32)


def samples(count: int, seed: int = 0) -> list[dict[str, np.ndarray]]:
    generator = np.random.default_rng(seed)
    return [{"x": generator.normal(size=(8, 64)).astype(np.float32)} for _ in range(count)]


def opened(
    build: Build, folder: Path, norm: np.ndarray, scheme: str = "int4-block32"
) -> tuple[CrossValidator, Plan, AlgorithmResult]:
    shift = np.where(norm, 0.1, 0.0).astype(np.float32)
    graph = as_graph(build(TEXT, s=norm, b=shift, w=(64, 48), c=(48,)))
    bench, data = open_prepared_model(graph, preset_named(scheme), target_named(DEFAULT_TARGET), folder), samples(32)
    plan = bench.plan({})
    evidence = bench.calibrate(plan, data, silent)
    return (
        CrossValidator(PlanEvaluator.of(bench, bench.prepared, data[::2], evidence), data),
        plan,
        AlgorithmResult(Recipe(), evidence),
    )


def noise(validator: CrossValidator, plan: Plan, basis: AlgorithmResult) -> float:
    fresh = PlanEvaluator.of(
        validator.evaluator.bench, validator.evaluator.bench.prepared, samples(16, seed=1), basis.evidence
    )
    return float(fresh.noise(plan, basis.recipe).sum())


@pytest.mark.parametrize("scheme", ["int4-block32", "int2-block16", "nf4-block64"])
def test_factors_lower_the_noise_on_new_samples(scheme: str, build: Build, tmp_path: Path) -> None:
    validator, plan, plain = opened(build, tmp_path, LOUD, scheme)
    found = with_awq(validator, plan, plain, FULL)
    assert set(found.recipe.scaling.factors) == {"n"}
    assert noise(validator, plan, found) < 0.85 * noise(validator, plan, plain)


def test_errors_cancel_with_factors_too(build: Build, tmp_path: Path) -> None:
    validator, plan, plain = opened(build, tmp_path, LOUD)
    both, alone = (with_gptq(validator, plan, one, FULL) for one in (with_awq(validator, plan, plain, FULL), plain))
    assert both.recipe.compensation is not None
    assert noise(validator, plan, both) < 1.02 * noise(validator, plan, alone)


def test_channels_that_are_alike_get_none(build: Build, tmp_path: Path) -> None:
    validator, plan, plain = opened(build, tmp_path, np.ones(64, np.float32))
    assert with_awq(validator, plan, plain, FULL) is plain


def test_channels_of_which_nothing_was_seen_stay_as_they_are(build: Build, tmp_path: Path) -> None:
    norm = np.where(np.arange(64) == 5, 0.0, LOUD).astype(np.float32)
    validator, plan, plain = opened(build, tmp_path, norm)
    factors = with_awq(validator, plan, plain, FULL).recipe.scaling.factors["n"].values
    assert factors[5] == 1
    assert factors[3] > 1


def test_data_whose_matrices_have_no_room_in_memory_get_none(build: Build, tmp_path: Path) -> None:
    validator, plan, plain = opened(build, tmp_path, LOUD)
    room = 9 * 64 * 64 * 8
    left = with_awq(validator, plan, plain, replace(FULL, memory=room - 1))
    assert (left.recipe, left.left) == (
        plain.recipe,
        plain.unfit("Gram matrices of the data have no room in memory").left,
    )
    roomy = with_awq(validator, plan, plain, replace(FULL, memory=room))
    assert roomy.recipe.scaling.key == with_awq(validator, plan, plain, FULL).recipe.scaling.key


@pytest.mark.parametrize(
    ("scheme", "large", "told"),
    [
        ("int8", False, "no float data that a normalization or a Mul makes is multiplied by codes alone"),
        ("int4-block32", True, LARGE),
    ],
)
def test_why_no_factors_apply_is_told(
    scheme: str, large: bool, told: str, build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    validator, plan, plain = opened(build, tmp_path, LOUD, scheme)
    monkeypatch.setitem(vars(validator.evaluator.bench), "is_large", large)
    assert with_awq(validator, plan, plain, FULL).left == f"it does not apply: {told}"


def test_weights_of_too_many_bits_for_factors_are_told(build: Build, tmp_path: Path) -> None:
    validator, plan, plain = opened(build, tmp_path, LOUD)
    left = with_awq(validator, plan, plain, replace(FULL, compensated_bits=3)).left
    assert left.endswith("is multiplied by weights of 3 bits or fewer")
