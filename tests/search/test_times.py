"""Node times that are measured once, and files that do not hold any."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import MODELS
from onnxq.search.cost_cache import CostCache, cost_key

from onnxq.calibration.data import Data
from onnxq.errors import DataError, OutputError
from onnxq.evaluation.latency import Latency
from onnxq.evaluation.verification import Timer
from onnxq.pipeline.quantization import quantize
from onnxq.pipeline.request import Budget
from onnxq.runtime import engine as local
from onnxq.runtime.kernels import profile_kernels
from onnxq.search import cost_cache
from onnxq.search.kernel_times import NodeTimes
from onnxq.system.publish import locked

CALIB = MODELS / "data" / "calib.npz"
TIMES = NodeTimes({"a": 1.5}, {"t": 0.25}, {"a": 512.0}, 0.0)


def never() -> NodeTimes:
    raise AssertionError("it was measured before")


def test_what_was_measured_is_known_to_the_next_run(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    first = CostCache.opened(path)
    assert first.times("key", lambda: TIMES) == TIMES
    assert not path.exists()
    first.save()
    again = CostCache.opened(path)
    assert again.times("key", never) == TIMES
    assert again.times("other", lambda: TIMES) == TIMES
    again.save()
    assert CostCache.opened(path).known == {"key": TIMES, "other": TIMES}
    assert [found.name for found in tmp_path.iterdir()] == ["costs.json"]


def test_without_a_file_times_are_known_for_as_long_as_the_cache_lives(tmp_path: Path) -> None:
    cache = CostCache.opened(None)
    cache.times("key", lambda: TIMES)
    cache.save()
    assert cache.times("key", never) == TIMES
    assert list(tmp_path.iterdir()) == []


def test_the_oldest_times_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_cache, "_MOST_ENTRIES", 2)
    cache = CostCache.opened(tmp_path / "costs.json")
    for key in ("a", "b", "c"):
        cache.times(key, lambda: TIMES)
    cache.save()
    assert list(CostCache.opened(tmp_path / "costs.json").known) == ["b", "c"]


def test_the_times_of_very_many_nodes_make_room_sooner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_cache, "_MOST_BYTES", 200)
    cache = CostCache.opened(tmp_path / "costs.json")
    many = NodeTimes({f"node{index}": 1.0 for index in range(100)}, {}, {}, 0.0)
    for key, times in (("many", many), ("a", TIMES), ("b", TIMES)):
        cache.times(key, lambda found=times: found)
    cache.save()
    assert list(CostCache.opened(tmp_path / "costs.json").known) == ["a", "b"]
    cache.times("largest", lambda: many)
    cache.save()
    assert list(CostCache.opened(tmp_path / "costs.json").known) == ["largest"]


def test_runs_that_share_a_file_keep_what_the_others_measured(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    one, other = CostCache.opened(path), CostCache.opened(path)
    one.times("one", lambda: TIMES)
    other.times("other", lambda: TIMES)
    one.save()
    other.save()
    assert list(CostCache.opened(path).known) == ["one", "other"]


def test_a_run_waits_for_another_that_writes(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    cache = CostCache.opened(path)
    cache.times("one", lambda: TIMES)
    with ThreadPoolExecutor(1) as pool:
        with locked(tmp_path) as held:
            assert held
            saved = pool.submit(cache.save)
            with pytest.raises(TimeoutError):
                saved.result(timeout=0.2)
        saved.result(timeout=10)
    assert list(CostCache.opened(path).known) == ["one"]


def test_what_something_else_wrote_meanwhile_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    cache = CostCache.opened(path)
    cache.times("one", lambda: TIMES)
    path.write_text("a diary")
    with pytest.raises(DataError, match="does not hold node times"):
        cache.save()
    assert path.read_text() == "a diary"


def test_a_search_writes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    write = cost_cache._write
    monkeypatch.setattr(cost_cache, "_write", lambda known, *rest: (written.append(len(known)), write(known, *rest)))
    quantize(
        MODELS / "gru.onnx",
        Data(CALIB, limit=4),
        budget=Budget(latency_seconds=0.01, profile_cache=tmp_path / "costs.json"),
    )
    assert len(written) == 1
    assert written[0] > 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": "onnxq costs 0", "times": {}}',
        '{"format": "onnxq costs 1", "times": []}',
        '{"format": "onnxq costs 1", "times": {"key": {"nodes": {}, "borders": {}, "elements": {}}}}',
        '{"format": "onnxq costs 1", "times": {"key": {"nodes": {"a": -1}, "borders": {}, "elements": {}, "rest": 0}}}',
        '{"format": "onnxq costs 1", "times": {"key": {"nodes": {}, "borders": {}, "elements": {}, "rest": NaN}}}',
        f'{{"format": "onnxq costs 1", "times": {{"key": {{"nodes": {{"a": 1{"0" * 400}}}, "borders": {{}}}}}}}}',
        '{"format": "onnxq costs 1", "times": {"key": {"nodes": {}, "borders": 3, "elements": {}, "rest": 0}}}',
        "\x08\x07model",
    ],
)
def test_a_file_of_anything_else_is_refused_and_kept(tmp_path: Path, text: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(DataError, match=r"costs.json does not hold node times \(.*expected a file of onnxq costs 1"):
        CostCache.opened(path)
    assert path.read_text() == text


def test_places_that_cannot_hold_a_file_are_told_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="missing of the output does not exist"):
        CostCache.opened(tmp_path / "missing" / "costs.json")
    with pytest.raises(OutputError, match="is a folder"):
        CostCache.opened(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(OutputError, match="taken cannot be written"):
        cost_cache._write({"key": TIMES}, {}, tmp_path / "taken")
    assert [found.name for found in tmp_path.iterdir()] == ["taken"]


def test_other_models_plans_data_runtimes_and_machines_have_other_times(monkeypatch: pytest.MonkeyPatch) -> None:
    requested = [
        ("m", "s", "e", "r"),
        ("n", "s", "e", "r"),
        ("m", "t", "e", "r"),
        ("m", "s", None, "r"),
        ("m", "s", "e", "q"),
    ]
    keys = [cost_key(model, [sample], effect, engine) for model, sample, effect, engine in requested]
    for name in ("_processor", "available_cores"):
        monkeypatch.setattr(cost_cache, name, lambda: "another")
        keys.append(cost_key("m", ["s"], "e", "r"))
    assert len(set(keys)) == 7
    assert keys[-1] == cost_key("m", ["s"], "e", "r")


def test_a_second_search_profiles_nothing_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profiled = []

    def counted(*given, **options):
        profiled.append(given[0].name)
        return profile_kernels(*given, **options)

    monkeypatch.setattr(local, "profile_kernels", counted)
    path = tmp_path / "costs.json"
    data, options = Data(CALIB, limit=4), {"goal": 0.0, "budget": Budget(latency_seconds=0.05, profile_cache=path)}
    quantize(MODELS / "resnet.onnx", data, **options)
    first = len(profiled)
    known = len(json.loads(path.read_text())["times"])
    assert first == known >= 2
    quantize(MODELS / "resnet.onnx", data, **options)
    assert len(profiled) == first
    assert len(json.loads(path.read_text())["times"]) == known


@pytest.mark.parametrize("goal", [0.0, 30.0])
def test_with_known_costs_a_second_search_writes_the_same_bytes(
    goal: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Whether the model keeps up is for each run to see; other work on the machine must not decide here.
    monkeypatch.setattr(Timer, "latency", lambda *_, **__: Latency(2.0, 1.0, 1, 10, 6, (1.9, 2.1)))
    budget = Budget(latency_seconds=0.05, profile_cache=tmp_path / "costs.json")
    data, outputs = Data(CALIB, limit=16), [tmp_path / "first.onnx", tmp_path / "again.onnx"]
    plans = [quantize(MODELS / "mobilenet.onnx", data, path, goal=goal, budget=budget).report.plan for path in outputs]
    assert plans[0] == plans[1]
    assert outputs[0].read_bytes() == outputs[1].read_bytes()


def test_the_speed_that_was_measured_first_stays(tmp_path: Path) -> None:
    first = CostCache.opened(tmp_path / "costs.json")
    assert [first.speed("a", 2.0), first.speed("a", 3.0)] == [2.0, 2.0]
    first.save()
    assert CostCache.opened(tmp_path / "costs.json").speed("a", 1.0) == 2.0


def test_a_speed_of_zero_that_an_earlier_version_kept_is_not_known(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text('{"format": "onnxq costs 1", "times": {}, "speeds": {"failed": 0.0, "timed": 1.5}}')
    assert CostCache.opened(path).speeds == {"timed": 1.5}


def test_a_file_of_something_else_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_text("mine")
    with pytest.raises(DataError, match="does not hold node times"):
        quantize(tmp_path / "missing.onnx", tmp_path / "missing", budget=Budget(profile_cache=tmp_path / "costs.json"))
