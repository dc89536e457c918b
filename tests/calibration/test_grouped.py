"""Groups of samples run once, and what is asked of some of them is the sum of what they have shown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnxq.calibration import collect as module
from onnxq.calibration.accumulators import Request
from onnxq.calibration.collect import Grouped, collect, parts_of
from onnxq.data.dataset import Subset
from onnxq.data.inputs import SampleSource
from onnxq.errors import DataError

SAMPLES = [{"x": np.random.default_rng(seed).normal(0, 1 + seed, (3, 4)).astype(np.float32)} for seed in range(11)]
PLACES = ([0, 4, 8], [2, 6], [1, 3, 5, 7, 9, 10])
REQUESTS = (Request("y", "range"), Request.of("y", "histogram", elements=100), Request("y", "channel-means", 1))
CHANNELS = (Request("y", "channel-ranges", 1),)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 4]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Exp", ["x"], ["y"])], "g", [x], [y])
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.fixture
def groups(model: Path) -> Grouped:
    found = Grouped()
    found.observe(model, [Subset(SAMPLES, places) for places in PLACES], REQUESTS, CHANNELS)
    return found


@pytest.mark.parametrize(
    "asked",
    [SAMPLES, Subset(SAMPLES, range(11)), Subset(SAMPLES, [0, 2, 4, 6, 8]), Subset(SAMPLES, PLACES[2])],
)
def test_sums_of_groups_are_what_a_run_of_their_own_shows(
    model: Path, groups: Grouped, asked: SampleSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = REQUESTS[::-1]
    whole = collect(model, asked, wanted)
    monkeypatch.setattr(module, "collect", None)
    found = groups.collected(model, asked, wanted)
    assert found == whole
    assert list(found.statistics) == list(wanted)


@pytest.mark.parametrize(
    ("asked", "requests"),
    [
        (Subset(SAMPLES, [0, 4]), REQUESTS),
        (Subset(SAMPLES, [0, 1, 4, 8]), REQUESTS),
        (SAMPLES[:5], REQUESTS),
        (SAMPLES, CHANNELS),
    ],
)
def test_other_samples_and_requests_are_run(
    model: Path, groups: Grouped, asked: SampleSource, requests: Sequence[Request]
) -> None:
    assert groups.collected(model, asked, requests) == collect(model, asked, requests)


def test_of_each_part_is_known_what_was_wanted_apart(model: Path, groups: Grouped) -> None:
    asked = [Subset(SAMPLES, PLACES[2]), Subset(SAMPLES, []), Subset(SAMPLES, PLACES[0])]
    found = groups.parts(asked, CHANNELS)
    assert found == {
        place: tuple(collect(model, part, CHANNELS) for part in parts_of(asked[place])) for place in (0, 2)
    }
    assert groups.parts([asked[0], Subset(SAMPLES, [0, 4])], CHANNELS) == {0: found[0]}
    assert not groups.parts(asked, REQUESTS)
    assert not Grouped().parts(asked, CHANNELS)


def test_progress_counts_samples_and_an_error_names_the_one_among_all(model: Path) -> None:
    told: list[tuple[int, int]] = []
    Grouped().observe(model, [Subset(SAMPLES, places) for places in PLACES], REQUESTS, (), lambda *at: told.append(at))
    assert told[-1] == (11, 11)
    broken = [*SAMPLES[:9], {"x": np.full((3, 4), np.nan, np.float32)}, SAMPLES[10]]
    with pytest.raises(DataError, match="9"):
        Grouped().observe(model, [Subset(broken, places) for places in PLACES], REQUESTS, ())


def test_a_group_may_be_empty(model: Path) -> None:
    found = Grouped()
    found.observe(model, [Subset(SAMPLES, range(11)), Subset(SAMPLES, [])], REQUESTS, CHANNELS)
    assert found.collected(model, SAMPLES, REQUESTS) == collect(model, SAMPLES, REQUESTS)
