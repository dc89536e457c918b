"""Migration is kept only where it helps on samples that did not set it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import Build

from onnxq.accuracy.effort import FAST, FULL, Accuracy
from onnxq.accuracy.migrating import choose_migration
from onnxq.encoding.recipe import USUAL
from onnxq.modelfile import as_graph
from onnxq.presets import preset_named
from onnxq.targets import target_named
from onnxq.workbench import Workbench, open_workbench

TEXT = "(float[1,6,8,8] x) => (float[1,3,8,8] y) {s = Sqrt(x) a = Conv(s, w) r = Relu(a) y = Conv(r, u)}"


@pytest.fixture
def bench(build: Build, tmp_path: Path) -> Workbench:
    generator = np.random.default_rng(0)
    # What is small in the data matters as much as what is large.
    wide = np.array([1, 0.05, 0.04, 0.05, 0.03, 0.05])
    weight = (generator.standard_normal((8, 6, 1, 1)) / wide.reshape(1, -1, 1, 1)).astype(np.float32)
    model = build(TEXT, w=weight, u=(3, 8, 1, 1))
    return open_workbench(as_graph(model), preset_named("int8"), target_named("onnxruntime-cpu"), tmp_path)


def samples(count: int) -> list[dict[str, np.ndarray]]:
    generator = np.random.default_rng(1)
    wide = np.array([1, 0.05, 0.04, 0.05, 0.03, 0.05]).reshape(-1, 1, 1)
    return [{"x": ((generator.uniform(0, 1, (1, 6, 8, 8)) * wide) ** 2).astype(np.float32)} for _ in range(count)]


@pytest.mark.parametrize("effort", [FAST, FULL])
def test_quiet_channels_get_finer_codes(bench: Workbench, effort: Accuracy) -> None:
    chosen = choose_migration(bench, bench.plan({}), samples(8), USUAL, effort)
    assert chosen.migration.factors
    assert chosen.after < chosen.before / 2
    assert all(((one.values > 0) & (one.values <= 1)).all() for one in chosen.migration.factors.values())


def test_nothing_is_chosen_without_samples_to_judge(bench: Workbench) -> None:
    assert not choose_migration(bench, bench.plan({}), samples(1), USUAL, FULL).migration.factors
