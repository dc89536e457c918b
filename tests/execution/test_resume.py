from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxq.errors import DataError, OutputError
from onnxq.evidence.statistics import Statistics
from onnxq.evidence.storage import load_statistics, save_statistics
from onnxq.execution import resume
from onnxq.execution.resume import Collection, calibrate_tensors, discard_checkpoints
from onnxq.execution.runner import collect
from onnxq.samples.inputs import Sample

MODEL = Path(__file__).parents[2] / "models" / "resnet.onnx"
CALIB = MODEL.parent / "data" / "calib.npz"
SAMPLES: list[Sample] = [{"image": image[None]} for image in np.load(CALIB)["image"][:48]]
TAPS = [node.output[0] for node in onnx.load(MODEL).graph.node if node.op_type in ("Conv", "Relu")]
INTERRUPTED = 24


class ReadingFailedError(Exception):
    pass


class Failing(list[Sample]):
    """Samples of which reading all fails in the middle, once a first sample has been asked for."""

    def __iter__(self):  # type: ignore[no-untyped-def]
        for index, sample in enumerate(super().__iter__()):
            if index == INTERRUPTED:
                raise ReadingFailedError
            yield sample


@pytest.fixture
def notices() -> list[str]:
    return []


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Note how many samples and tensors each call of `collect` has to run."""
    seen: list[tuple[int, int]] = []

    def noted(model, samples, tensors, *, ledger, **options):  # type: ignore[no-untyped-def]
        seen.append((len(samples) - ledger.earlier.samples, len(tensors)))
        return collect(model, samples, tensors, ledger=ledger, **options)

    monkeypatch.setattr(resume, "collect", noted)
    return seen


def whole(taps: list[str] = TAPS, samples: list[Sample] = SAMPLES) -> Statistics:
    return calibrate_tensors(MODEL, samples, taps, Collection())


def reused(path: Path, notices: list[str], **changes: object) -> Statistics:
    given = {"samples": SAMPLES, "tensors": TAPS, "model": MODEL, "collection": Collection()} | changes
    given["collection"] = dataclasses.replace(given["collection"], reuse=path, notice=notices.append)  # type: ignore[type-var]
    return calibrate_tensors(**given)  # type: ignore[arg-type]


def test_statistics_say_what_they_are_of() -> None:
    found = whole()
    assert found == collect(MODEL, SAMPLES, TAPS)
    assert [index for index, _ in found.provenance.samples] == list(range(len(SAMPLES)))


def test_what_matches_is_not_run_again(tmp_path: Path, notices: list[str], runs: list[tuple[int, int]]) -> None:
    save_statistics(whole(), tmp_path / "s.npz")
    runs.clear()
    assert reused(tmp_path / "s.npz", notices) == whole()
    assert (runs[:-1], notices) == ([], [])


def test_missing_samples_are_run_and_told(tmp_path: Path, notices: list[str], runs: list[tuple[int, int]]) -> None:
    path, expected = tmp_path / "s.npz", whole()
    save_statistics(whole(TAPS, SAMPLES[:30]), path)
    runs.clear()
    found = reused(path, notices)
    assert (found, found.provenance) == (expected, expected.provenance)
    assert runs == [(18, len(TAPS))]
    assert notices == [f"{path} lacks 18 of 48 samples; they are run now"]


def test_missing_tensors_are_run_and_told(tmp_path: Path, notices: list[str], runs: list[tuple[int, int]]) -> None:
    path, expected = tmp_path / "s.npz", whole()
    there = whole(TAPS[3:5], SAMPLES[:8])
    save_statistics(there, path)
    runs.clear()
    found = reused(path, notices)
    assert runs == [(40, 2), (48, len(TAPS) - 2)]
    assert [notice.split(" lacks ")[1].split(" (")[0] for notice in notices] == [
        f"{len(TAPS) - 2} of {len(TAPS)} tensors",
        "40 of 48 samples; they are run now",
    ]
    assert list(found.tensors) == TAPS
    assert found.provenance == expected.provenance
    assert found.select(TAPS[:3] + TAPS[5:]) == expected.select(TAPS[:3] + TAPS[5:])
    # Fewer taps leave more to be fused, which rounds otherwise.
    for name in TAPS[3:5]:
        assert found.tensors[name].extremes == pytest.approx(expected.tensors[name].extremes, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": [{"image": SAMPLES[0]["image"] + 1}, *SAMPLES[1:]]}, "has 1 of 48 samples that are not among"),
        ({"samples": SAMPLES[:10]}, "has 38 of 48 samples that are not among these"),
        ({"samples": SAMPLES[::-1]}, "samples that are not among these; nothing of it is used"),
        ({"model": MODEL.with_name("resnet-other.onnx")}, "is of another model"),
        ({"collection": Collection(histogram_elements=100)}, "counts 8192 elements of a tensor and not 100"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_of_something_else_is_not_used(
    changes: dict[str, object], message: str, tmp_path: Path, notices: list[str]
) -> None:
    if "model" in changes:
        proto = onnx.load(MODEL)
        proto.producer_name = "another"
        changes = {"model": tmp_path / "other.onnx"}
        onnx.save(proto, tmp_path / "other.onnx")
    save_statistics(whole(), tmp_path / "s.npz")
    found = reused(tmp_path / "s.npz", notices, **changes)
    assert len(notices) == 1
    assert message in notices[0]
    given = {"samples": SAMPLES, "tensors": TAPS, "model": MODEL, "collection": Collection()} | changes
    assert found == calibrate_tensors(**given)  # type: ignore[arg-type]


def test_extremes_alone_are_not_used_where_a_histogram_is_wanted(tmp_path: Path, notices: list[str]) -> None:
    bare = calibrate_tensors(MODEL, SAMPLES, TAPS, Collection(histogram_elements=0))
    save_statistics(bare, tmp_path / "s.npz")
    assert reused(tmp_path / "s.npz", notices) == whole()
    assert notices == [f"{tmp_path / 's.npz'} holds extremes and no histogram, which is wanted; nothing of it is used"]


def test_statistics_of_another_runtime_are_not_used(tmp_path: Path, notices: list[str]) -> None:
    found = whole()
    older = dataclasses.replace(found, provenance=dataclasses.replace(found.provenance, runtime="onnxruntime 1.2.3"))
    save_statistics(older, tmp_path / "s.npz")
    assert reused(tmp_path / "s.npz", notices) == found
    assert "is of onnxruntime 1.2.3 and not onnxruntime" in notices[0]


def test_statistics_without_provenance_are_not_used(tmp_path: Path, notices: list[str]) -> None:
    save_statistics(collect(MODEL, SAMPLES, TAPS), tmp_path / "s.npz")
    assert reused(tmp_path / "s.npz", notices) == whole()
    assert notices == [f"{tmp_path / 's.npz'} does not say which samples it is of; nothing of it is used"]


def test_an_interrupted_run_goes_on_where_it_was(
    tmp_path: Path, notices: list[str], runs: list[tuple[int, int]]
) -> None:
    collection = Collection(checkpoint=tmp_path / "s.npz", seconds=0, notice=notices.append)
    with pytest.raises(ReadingFailedError):
        calibrate_tensors(MODEL, Failing(SAMPLES), TAPS, collection)
    (partial,) = tmp_path.iterdir()
    kept = load_statistics(partial).samples
    assert 0 < kept <= INTERRUPTED
    assert calibrate_tensors(MODEL, SAMPLES, TAPS, collection) == whole()
    assert runs[1] == (len(SAMPLES) - kept, len(TAPS))
    assert notices == [f"{partial} holds {kept} of 48 samples of an interrupted run; it goes on"]
    discard_checkpoints(tmp_path / "s.npz")
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_checkpoint_is_told_and_left(tmp_path: Path, notices: list[str]) -> None:
    collection = Collection(checkpoint=tmp_path / "s.npz", notice=notices.append)
    calibrate_tensors(MODEL, SAMPLES, TAPS, collection)
    (partial,) = tmp_path.iterdir()
    partial.write_bytes(partial.read_bytes()[:1000])
    assert calibrate_tensors(MODEL, SAMPLES, TAPS, collection) == whole()
    assert "cannot be read" in notices[0]


def test_a_folder_that_cannot_be_written_shows_before_anything_is_run(tmp_path: Path, runs: list[object]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"partial cannot be written: Not a directory; free space or choose"):
        calibrate_tensors(MODEL, SAMPLES, TAPS, Collection(checkpoint=tmp_path / "file" / "s.npz"))
    assert runs == []


def test_a_memory_budget_splits_the_taps_and_does_not_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: list[tuple[int, int]]
) -> None:
    from onnxq.execution.budget import tap_sizes

    sizes = tap_sizes(MODEL, SAMPLES[0], TAPS)
    monkeypatch.setattr(resume, "peak_memory", lambda: 1_000_000)
    ahead = 2 * resume.available_cores() * (resume.SHARD_BYTES + SAMPLES[0]["image"].nbytes)
    collection = Collection(memory=1_000_000 + ahead + max(sizes.values()) * 8, checkpoint=tmp_path / "s.npz")
    assert calibrate_tensors(MODEL, SAMPLES, TAPS, collection) == whole()
    assert runs[:-1] == [(48, 11), (48, 13)]
    with pytest.raises(DataError) as caught:
        calibrate_tensors(MODEL, SAMPLES, TAPS, dataclasses.replace(collection, memory=1_000_100 + ahead))
    found = re.fullmatch(
        r"--memory is (\d+) MB, expected at least (\d+) MB: 1 MB of the process, (\d+) MB of samples on their way and "
        r"1 MB of tensor '[^']+' with what is computed beside it; raise it",
        str(caught.value),
    )
    assert found is not None
    given, enough, waiting = (int(number) for number in found.groups())
    assert given <= enough <= 1 + waiting + 1
    enough_memory = dataclasses.replace(collection, memory=enough * 10**6, checkpoint=None)
    assert calibrate_tensors(MODEL, SAMPLES, TAPS, enough_memory) == whole()


PROGRAM = """
import os, random, signal, sys, time
from pathlib import Path
import onnxruntime
from test_resume import MODEL, SAMPLES, TAPS
from onnxq.execution.resume import Collection, calibrate_tensors, discard_checkpoints
from onnxq.evidence.storage import save_statistics

whole, output = map(Path, sys.argv[1:])
moments, kills, finished, kept = random.Random(0), 0, 0, 0
while kills < 20 or not finished:
    kept += any(output.parent.iterdir())
    child = os.fork()
    if not child:
        save_statistics(calibrate_tensors(MODEL, SAMPLES, TAPS, Collection(checkpoint=output, seconds=0)), output)
        discard_checkpoints(output)
        os._exit(0)
    time.sleep(moments.uniform(0, 0.3))
    os.kill(child, signal.SIGKILL)
    kills += os.waitpid(child, 0)[1] == signal.SIGKILL
    if output.exists():
        finished += 1
        assert output.read_bytes() == whole.read_bytes()
        for path in output.parent.iterdir():
            path.unlink()
print(kills, finished, kept)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills processes that it forks")
def test_a_run_that_is_killed_at_random_moments_ends_with_the_same_bits(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "output").mkdir()
    save_statistics(whole(), tmp_path / "whole.npz")
    arguments = [tmp_path / "program.py", tmp_path / "whole.npz", tmp_path / "output" / "s.npz"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    run = subprocess.run(
        [sys.executable, *map(str, arguments)], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    kills, finished, kept = map(int, run.stdout.split())
    assert kills >= 20
    assert finished >= 1
    assert kept >= 1


@pytest.mark.parametrize(
    ("kept", "wanted", "again"),
    [
        (((), {TAPS[0]: 1}), ((), {TAPS[0]: 1}), 0),
        ((TAPS[:1], {TAPS[0]: 1}), ((), {TAPS[0]: 1}), 0),
        ((TAPS[:1], {TAPS[0]: 1}), (TAPS[:1], {}), 0),
        (((), {TAPS[0]: 1}), ((), {TAPS[0]: -1}), 1),
        (((), {TAPS[0]: 1}), (TAPS[:1], {TAPS[0]: 1}), 1),
        ((TAPS[:1], {}), ((), {TAPS[0]: 1}), 1),
    ],
)
def test_means_are_used_where_they_are_along_the_wanted_axis_and_ranges_where_they_were_kept(
    kept: tuple[list[str], dict[str, int]],
    wanted: tuple[list[str], dict[str, int]],
    again: int,
    tmp_path: Path,
    notices: list[str],
) -> None:
    def calibrated(tensors: tuple[list[str], dict[str, int]], collection: Collection) -> Statistics:
        return calibrate_tensors(MODEL, SAMPLES[:2], tensors[0], collection, means=tensors[1])

    save_statistics(calibrated(kept, Collection()), tmp_path / "a.npz")
    found = calibrated(wanted, Collection(reuse=tmp_path / "a.npz", notice=notices.append))
    assert len(notices) == again, notices
    fresh, one = (statistics.tensors[TAPS[0]] for statistics in (calibrated(wanted, Collection()), found))
    assert one.has_range >= fresh.has_range
    np.testing.assert_array_equal(one.sums if wanted[1] else fresh.sums, fresh.sums)
