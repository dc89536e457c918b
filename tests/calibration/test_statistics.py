"""Statistics merge by request, and survive their files to the bit."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from observations import observe, statistics

from onnxq.calibration.accumulators import ChannelMeans, Range, Request
from onnxq.calibration.histogram import Histogram
from onnxq.calibration.kinds import KINDS
from onnxq.calibration.provenance import Provenance
from onnxq.calibration.statistics import (
    CalibrationStatistics,
    load_statistics,
    merge_files,
    save_statistics,
    sum_statistics,
)
from onnxq.errors import DataError, OutputError

PROVENANCE = Provenance("model", "onnxruntime 1.2.3", ("aarch64", "x86_64 avx2"))


def of(sample: str = "ab", **tensors: list[float]) -> CalibrationStatistics:
    arrays = {name: np.float64(values) for name, values in tensors.items()}
    return replace(statistics(arrays, sample=sample), provenance=PROVENANCE)


def test_statistics_merge_by_request_and_keep_their_samples_in_order() -> None:
    a, b = of("b", a=[1.0], b=[2.0]), of("a", b=[4.0], c=[5.0])
    merged = a.merge(b)
    assert merged == b.merge(a) == sum_statistics([a, b])
    assert (merged.samples, merged.provenance) == (("a", "b"), PROVENANCE)
    assert (merged.of("b").need(Range).minimum, merged.of("b").need(Range).maximum) == (2, 4)
    assert merged.of("c") == b.of("c")
    assert merged.select(request for request in merged.statistics if request.tensor == "c").statistics == {
        request: statistic for request, statistic in b.statistics.items() if request.tensor == "c"
    }


def test_the_same_sample_is_not_merged_twice_but_may_be_run_twice() -> None:
    one = of("a", x=[1.0])
    with pytest.raises(DataError, match="Both hold the same 1 samples, such as 'a', expected each sample once"):
        one.merge(one)
    twice = one.plus(one)
    assert (twice.samples, twice.of("x").need(Range).count) == (("a", "a"), 2)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"model": "other"}, "Statistics of model model and of model other cannot be merged, expected one model"),
        ({"runtime": "other 1"}, "Statistics of onnxruntime 1.2.3 and of other 1 cannot be merged, expected one vers"),
    ],
)
def test_statistics_of_other_models_and_runtimes_do_not_merge(other: dict[str, str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        of("a", x=[1]).merge(replace(of("b", x=[1]), provenance=replace(PROVENANCE, **other)))
    machine, machines = Provenance(machines=("riscv64",)), ("aarch64", "riscv64", "x86_64 avx2")
    assert PROVENANCE.merge(machine) == machine.merge(PROVENANCE) == replace(PROVENANCE, machines=machines)


def test_a_sum_never_holds_more_than_itself_and_one_part() -> None:
    requests, size = [Request(name, "channel-means", 0) for name in "abcdefgh"], 1 << 14

    def parts() -> Iterator[CalibrationStatistics]:
        for digest in "abcd":
            yield CalibrationStatistics((digest,), {request: ChannelMeans(size, np.ones(size)) for request in requests})

    tracemalloc.start()
    total = sum_statistics(parts())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total.samples == tuple("abcd")
    assert {statistic.sums[0] for statistic in total.statistics.values()} == {4}  # type: ignore[attr-defined]
    assert peak < 2.7 * len(requests) * size * 8


def test_statistics_of_a_tensor_are_found_by_their_kind_and_axis_and_shown_as_a_line() -> None:
    tensor = observe({"x": np.float32([[1, 2]])}, [Request("x", "range"), Request("x", "channel-means", 1)]).of("x")
    assert tensor.need(Range).maximum == 2
    assert tensor.find(ChannelMeans, 0) is None
    assert tensor.find(ChannelMeans, 1).means.tolist() == [1, 2]  # type: ignore[union-attr]
    with pytest.raises(DataError, match="statistics of tensor 'x' hold no histogram, expected one; calibrate again"):
        tensor.need(Histogram)
    with pytest.raises(DataError, match="statistics of tensor 'y' hold no range"):
        CalibrationStatistics().of("y").need(Range)
    assert repr(CalibrationStatistics()) == "CalibrationStatistics(0 samples, 0 tensors: nothing)"
    assert repr(of("a", x=[1.0], y=[2.0])).startswith("CalibrationStatistics(1 samples, 2 tensors: range, histogram")


# Files.

EVERY_KIND = observe(
    {"x": np.random.default_rng(0).normal(size=(2, 3, 4)), "y": np.zeros((0, 3))},
    [Request.of(tensor, kind, 1) for tensor in "xy" for kind in KINDS],
    "cd",
)


@pytest.mark.parametrize(
    "case",
    [
        CalibrationStatistics(),
        of(a=[0.1, 1e-300, -7], b=[], c=[-1e4, -9e9, 1], d=[1e30]),
        of("3", a=[1]).merge(of("4", a=[2])),
        EVERY_KIND,
    ],
    ids=["none", "values", "merged", "every kind"],
)
def test_statistics_survive_a_file_exactly(case: CalibrationStatistics, tmp_path: Path) -> None:
    save_statistics(case, tmp_path / "s.npz")
    loaded = load_statistics(tmp_path / "s.npz")
    assert (loaded, loaded.provenance) == (case, case.provenance)
    assert [path.name for path in tmp_path.iterdir()] == ["s.npz"]


def test_equal_statistics_are_equal_bytes_that_numpy_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_statistics(of(a=[1], b=[2]), tmp_path / "a.npz")
    monkeypatch.setattr("time.time", lambda: 4e9)
    # Large arrays are written one by one.
    monkeypatch.setattr("onnxq.calibration.statistics._BUFFER", 0)
    save_statistics(of(b=[2], a=[1]), tmp_path / "b.npz")
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    with np.load(tmp_path / "a.npz", allow_pickle=False) as arrays:
        header = json.loads(arrays["header"].tobytes())
        assert (header["format"], header["samples"]) == ("onnxq statistics 9", ["ab"])
        assert arrays["histogram.counts"].sum() == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_file_that_cannot_be_written_is_told_and_the_old_one_stays(tmp_path: Path) -> None:
    path = tmp_path / "s.npz"
    with pytest.raises(OutputError, match=r"s.npz cannot be written: No such file"):
        save_statistics(CalibrationStatistics(), tmp_path / "gone" / "s.npz")
    save_statistics(of(a=[1]), path)
    (tmp_path / f".s.npz.{os.getpid()}.tmp").symlink_to("/dev/full")
    with pytest.raises(OutputError, match=r"s.npz cannot be written: No space left on device; free disk space"):
        save_statistics(of(a=[2]), path)
    assert load_statistics(path) == of(a=[1])
    assert [entry.name for entry in tmp_path.iterdir()] == ["s.npz"]


def test_a_file_is_on_the_disk_before_it_takes_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[list[str]] = []
    monkeypatch.setattr(os, "fsync", lambda number: names.append(sorted(path.name for path in tmp_path.iterdir())))
    save_statistics(of(a=[1]), tmp_path / "s.npz")
    assert names == [[f".s.npz.{os.getpid()}.tmp"], ["s.npz"]]


Header = dict[str, Any]


def changed(**fields: Any) -> Callable[[Header], Header]:
    return lambda header: header | fields


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            changed(format="onnxq statistics 6"),
            "'onnxq statistics 6', in which statistics have other names, expected 'onnxq statistics 9'",
        ),
        (lambda header: changed(statistics=header["statistics"][:1])(header), "arrays are longer than their statist"),
        (lambda header: changed(statistics=header["statistics"] * 2)(header), "does not hold calibration statistics"),
        (changed(samples=7), "does not hold calibration statistics"),
        (changed(provenance={}), "does not hold calibration statistics"),
    ],
    ids=["format", "less", "more", "samples", "provenance"],
)
def test_a_damaged_file_is_one_sentence(change: Callable[[Header], Header], message: str, tmp_path: Path) -> None:
    path = tmp_path / "s.npz"
    save_statistics(of(a=[1, 2], b=[1]), path)
    with np.load(path) as arrays:
        content = dict(arrays)
    header = change(json.loads(content["header"].tobytes()))
    np.savez(path, **(content | {"header": np.frombuffer(json.dumps(header).encode(), np.uint8)}))
    with pytest.raises(DataError, match=message):
        load_statistics(path)
    np.savez(path, **(content | {"range.ends": content["range.ends"].astype(np.float32)}))
    with pytest.raises(DataError, match="the arrays of range have other types than theirs"):
        load_statistics(path)
    with pytest.raises(DataError, match=r"gone.npz cannot be read: No such file or directory; check its path$"):
        load_statistics(tmp_path / "gone.npz")


def test_files_merge_in_any_order_and_are_checked(tmp_path: Path) -> None:
    for name, part in (("a", of("1", x=[1])), ("b", of("2", x=[2])), ("c", of("3", y=[3]))):
        save_statistics(part, tmp_path / name)
    a, b, c = (tmp_path / name for name in "abc")
    assert merge_files([a, b]) == merge_files([b, a]) == of("1", x=[1]).merge(of("2", x=[2]))
    with pytest.raises(DataError, match="c and the files before it differ in 6 statistics, such as histogram of 'x'"):
        merge_files([a, c])
    with pytest.raises(DataError, match="a: Both hold the same 1 samples"):
        merge_files([a, a])
