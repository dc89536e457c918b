"""A laboratory measures real models: how faithful, how long each node takes, how fast."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from onnx import ModelProto

from onnxq.encoding.recipe import Recipe
from onnxq.modelfile import read_model, save
from onnxq.planning.plan import Demotion
from onnxq.preparation import prepare
from onnxq.presets import preset_named
from onnxq.progress import silent
from onnxq.scheme import Mode
from onnxq.searching.laboratory import Laboratory
from onnxq.targets import target_named
from onnxq.trials import Trials
from onnxq.workbench import Workbench


@pytest.fixture
def laboratory(residual: ModelProto, samples_for: Callable[..., list], tmp_path: Path) -> Laboratory:
    path = tmp_path / "prepared.onnx"
    save(prepare(read_model(residual)), path)
    bench = Workbench(path, preset_named("int8"), target_named("onnxruntime-cpu"))
    samples = samples_for(residual, 4)
    statistics = bench.calibrate(bench.plan({}), samples, silent)
    return Laboratory(Trials.of(bench, path, samples, statistics), Recipe(), path, seconds=0.05)


def test_storing_all_weights_is_more_faithful_than_integers(laboratory: Laboratory) -> None:
    stored = laboratory.plan({name: Demotion(Mode.STORAGE, "why") for name in ("stem", "left", "right", "last")})
    assert 20 < laboratory.sqnr(laboratory.plan({})) < laboratory.sqnr(stored)


def test_every_convolution_has_a_time_in_both_models(laboratory: Laboratory) -> None:
    plan = laboratory.plan({})
    floats, integers = laboratory.times(None), laboratory.times(plan)
    for times in (floats, integers):
        assert all(times.nodes[name] > 0 for name in ("stem", "left", "right", "last"))
        assert times.rest == 0
    assert {"x", "y"} <= integers.borders.keys()


def test_speed_is_a_ratio_beside_the_float_model(laboratory: Laboratory) -> None:
    assert 0.01 < laboratory.speed(laboratory.plan({})) < 100
