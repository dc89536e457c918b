"""Times that are measured once, and files that do not hold any."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from onnxq.pipeline.request import Budget
from onnxq.runtime.engine import Engine, OnnxRuntime
from onnxq.search import times
from onnxq.search.kernel_times import NodeTimes
from onnxq.search.times import MeasuredTimes, times_key
from onnxq.system.publish import locked

NODES = NodeTimes({"a": 1.5}, {"t": 0.25}, {"a": 512.0}, 0.0)
PLAIN = json.dumps({"nodes": {"a": 1.5}, "borders": {}, "elements": {}, "rest": 0})


def never() -> NodeTimes:
    raise AssertionError("it was measured before")


def kept(path: Path, **speeds: float) -> MeasuredTimes:
    """Return times to which the same nodes, and these speeds, were added under each name."""
    measured = MeasuredTimes.opened(path)
    for name, speed in speeds.items():
        measured.of_nodes(name, lambda: NODES)
        measured.speed(name, speed)
    return measured


def test_what_was_measured_first_counts_in_later_runs_too(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "times.json"
    first = kept(path, a=2.0)
    assert (first.of_nodes("a", never), first.speed("a", 3.0)) == (NODES, 2.0)
    assert not path.exists()
    first.save()
    again = MeasuredTimes.opened(path)
    assert (again.of_nodes("a", never), again.speed("a", 3.0), again.added) == (NODES, 2.0, set())
    # A file with nothing new is not written.
    path.unlink()
    again.save()
    assert not path.exists()


def test_without_a_file_times_are_known_for_as_long_as_the_process(tmp_path: Path) -> None:
    measured = MeasuredTimes.opened(None)
    measured.of_nodes("a", lambda: NODES)
    measured.save()
    assert measured.of_nodes("a", never) == NODES
    assert list(tmp_path.iterdir()) == []


def test_runs_that_share_a_file_keep_what_the_others_measured(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    for measured in [kept(path, a=2.0), kept(path, b=3.0)]:
        measured.save()
    both = MeasuredTimes.opened(path)
    assert (both.speeds, both.nodes.keys()) == ({"a": 2.0, "b": 3.0}, {"a", "b"})


def test_a_run_waits_for_another_that_writes(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    measured = kept(path, a=2.0)
    with ThreadPoolExecutor(1) as pool:
        with locked(tmp_path):
            saved = pool.submit(measured.save)
            with pytest.raises(TimeoutError):
                saved.result(timeout=0.2)
        saved.result(timeout=60)
    assert MeasuredTimes.opened(path).speeds == {"a": 2.0}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "\x08\x07model",
        '{"format": "onnxq times 0", "nodes": {}, "speeds": {}}',
        '{"format": "onnxq times 1", "nodes": []}',
        '{"format": "onnxq times 1", "nodes": {"key": {"nodes": {}}}, "speeds": {}}',
        *(
            f'{{"format": "onnxq times 1", "nodes": {{"key": {PLAIN.replace("1.5", value)}}}, "speeds": {{}}}}'
            for value in ("-1", "NaN", "Infinity", "null", '"1"', f"1{'0' * 400}", "true", "[1]")
        ),
        f'{{"format": "onnxq times 1", "nodes": {{}}, "speeds": {{"key": {math.nan}}}}}',
    ],
)
def test_a_file_without_times_costs_a_measurement_and_a_warning(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "times.json"
    path.write_text(text)
    measured = kept(path, a=2.0)
    assert "times.json does not hold times" in caplog.text
    assert "all is measured again" in caplog.text
    measured.save()
    assert MeasuredTimes.opened(path).speeds == {"a": 2.0}


def test_a_place_that_cannot_be_written_is_warned_of_and_costs_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("a file where the folder should be")
    for path in (tmp_path / "file" / "times.json", tmp_path):
        caplog.clear()
        measured = kept(path, a=2.0)
        measured.save()
        assert "times cannot be kept in" in caplog.text
        assert measured.speeds == {"a": 2.0}
    assert (tmp_path / "file").read_text() == "a file where the folder should be"


@pytest.mark.parametrize(("limit", "most"), [("_MOST_ENTRIES", 2), ("_MOST_BYTES", 200)])
def test_the_oldest_times_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, most: int) -> None:
    monkeypatch.setattr(times, limit, most)
    path = tmp_path / "times.json"
    measured = MeasuredTimes.opened(path)
    many = NodeTimes({f"node{index}": 1.0 for index in range(100)}, {}, {}, 0.0)
    for key, nodes in (("many", many), ("a", NODES), ("b", NODES)):
        measured.of_nodes(key, lambda nodes=nodes: nodes)
        measured.speed(key, 2.0)
        measured.save()
    assert list(MeasuredTimes.opened(path).nodes) == ["a", "b"]


def test_the_newest_times_are_kept_however_large_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(times, "_MOST_BYTES", 1)
    kept(tmp_path / "times.json", a=2.0, b=3.0).save()
    assert list(MeasuredTimes.opened(tmp_path / "times.json").nodes) == ["b"]


class Other(OnnxRuntime):
    """An engine of another name and version."""

    name, version = "other", "other 1"


def test_a_key_differs_by_all_that_times_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(model: str = "m", samples: str = "ab", what: str = "nodes", engine: Engine | None = None) -> str:
        return times_key(model, samples, what, engine or OnnxRuntime(threads=1))

    keys = [key(), key(model="n"), key(samples="ac"), key(samples="a"), key(what="speed")]
    keys += [key(engine=OnnxRuntime(threads=2)), key(engine=Other(threads=1))]
    for name in ("processor_name", "available_cores"):
        with monkeypatch.context() as patch:
            patch.setattr(times, name, lambda: "another")
            keys.append(key())
    monkeypatch.setattr(times, "VERSION", "another")
    assert len({*keys, key()}) == 10
    assert key() == key()


def test_the_users_cache_folder_is_the_default_and_no_cache_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Budget().times_path == tmp_path / "onnxq" / "times.json"
    assert Budget(cache=False).times_path is None
    assert Budget(cache="own.json").times_path == Path("own.json")
