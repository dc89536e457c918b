from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from observations import evidence

from onnxq.calibration.accumulators import Request
from onnxq.calibration.kinds import KINDS
from onnxq.calibration.provenance import Provenance
from onnxq.calibration.statistics import CalibrationStatistics, load_statistics, merge_files, observe, save_statistics
from onnxq.errors import DataError, OutputError

PROVENANCE = Provenance("model", "onnxruntime 1.2.3", ("aarch64", "x86_64 avx2"))


def saved(sample: str = "ab", **tensors: list[float]) -> CalibrationStatistics:
    return replace(
        evidence({name: np.float64(one) for name, one in tensors.items()}, sample=sample), provenance=PROVENANCE
    )


EVERY_KIND = observe(
    {"x": np.random.default_rng(0).normal(size=(2, 3, 4)), "y": np.zeros((0, 3))},
    [Request.of(tensor, kind, 1) for tensor in "xy" for kind in KINDS],
    "cd",
)
CASES = [
    CalibrationStatistics(),
    saved(a=[0.1, 1e-300, -7], b=[], c=[-1e4, -9e9, 1], d=[1e30]),
    saved("3", a=[1]).merge(saved("4", a=[2])),
    EVERY_KIND,
]


@pytest.mark.parametrize("case", CASES)
def test_evidence_survives_a_file_exactly(case: CalibrationStatistics, tmp_path: Path) -> None:
    save_statistics(case, tmp_path / "s.npz")
    loaded = load_statistics(tmp_path / "s.npz")
    assert loaded == case
    assert loaded.provenance == case.provenance
    assert [path.name for path in tmp_path.iterdir()] == ["s.npz"]


def test_equal_evidence_is_equal_bytes_whatever_the_order_of_its_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_statistics(saved(a=[1], b=[2]), tmp_path / "a.npz")
    monkeypatch.setattr("time.time", lambda: 4e9)
    save_statistics(saved(b=[2], a=[1]), tmp_path / "b.npz")
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


def test_numpy_reads_the_file_without_pickles(tmp_path: Path) -> None:
    save_statistics(saved(a=[1, 2]), tmp_path / "s.npz")
    with np.load(tmp_path / "s.npz", allow_pickle=False) as arrays:
        header = json.loads(arrays["header"].tobytes())
        assert arrays["histogram.counts"].sum() == 2
    assert header["samples"] == ["ab"]


def test_a_place_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"s.npz cannot be written: No such file"):
        save_statistics(CalibrationStatistics(), tmp_path / "gone" / "s.npz")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_one_sentence_and_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "s.npz"
    save_statistics(saved(a=[1]), path)
    (tmp_path / f".s.npz.{os.getpid()}.tmp").symlink_to("/dev/full")
    with pytest.raises(OutputError, match=r"s.npz cannot be written: No space left on device; make room"):
        save_statistics(saved(a=[2]), path)
    assert load_statistics(path) == saved(a=[1])
    assert [entry.name for entry in tmp_path.iterdir()] == ["s.npz"]


def test_a_file_is_on_the_disk_before_it_takes_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(os, "fsync", lambda number: seen.append(sorted(path.name for path in tmp_path.iterdir())))
    save_statistics(saved(a=[1]), tmp_path / "s.npz")
    assert seen == [[f".s.npz.{os.getpid()}.tmp"], ["s.npz"]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda header: header | {"format": "onnxq statistics 6"},
            "'onnxq statistics 6', in which statistics have other names, expected 'onnxq statistics 8'",
        ),
        (lambda header: header | {"statistics": header["statistics"][:1]}, "arrays are longer than what they hold"),
        (lambda header: header | {"statistics": header["statistics"] * 2}, "does not hold calibration statistics"),
        (lambda header: header | {"samples": 7}, "does not hold calibration statistics"),
        (lambda header: header | {"provenance": {}}, "does not hold calibration statistics"),
    ],
    ids=["format", "less", "more", "samples", "provenance"],
)
def test_a_header_that_is_not_ours_is_one_sentence(
    change: Callable[[dict[str, list[object]]], dict[str, object]], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "s.npz"
    save_statistics(saved(a=[1, 2], b=[1]), path)
    with np.load(path) as arrays:
        content = dict(arrays)
    header = change(json.loads(content["header"].tobytes()))
    np.savez(path, **(content | {"header": np.frombuffer(json.dumps(header).encode(), np.uint8)}))
    with pytest.raises(DataError, match=message):
        load_statistics(path)


def test_files_merge_in_any_order_and_are_checked(tmp_path: Path) -> None:
    for name, one in (("a", saved("1", x=[1])), ("b", saved("2", x=[2])), ("c", saved("3", y=[3]))):
        save_statistics(one, tmp_path / name)
    a, b, c = (tmp_path / name for name in "abc")
    assert merge_files([a, b]) == merge_files([b, a]) == saved("1", x=[1]).merge(saved("2", x=[2]))
    with pytest.raises(DataError, match="c and the files before it differ in 6 statistics, such as histogram of 'x'"):
        merge_files([a, c])
    with pytest.raises(DataError, match="a: Both hold the same 1 samples"):
        merge_files([a, a])


def test_a_file_that_is_not_there_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone.npz cannot be read: No such file or directory; check its path$"):
        load_statistics(tmp_path / "gone.npz")
