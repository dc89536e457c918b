"""A run that is stopped or killed ends as if it was not."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
from observations import wanted

from calibration.resumed_samples import INTERRUPTED, MODEL, SAMPLES, TAPS, Failing, ReadingFailedError, reused, whole
from onnxq.calibration import calibrate as resume
from onnxq.calibration import collect as runner
from onnxq.calibration.accumulators import SampleExtremes
from onnxq.calibration.calibrate import Collection, calibrate_tensors, discard_checkpoints
from onnxq.calibration.collect import collect
from onnxq.calibration.dask_cluster import Cluster
from onnxq.calibration.provenance import sample_digest
from onnxq.calibration.statistics import load_statistics, merge_files, save_statistics
from onnxq.calibration.workers import Processes
from onnxq.data.inputs import Sample
from onnxq.errors import DataError, OutputError, SchemeError
from onnxq.system.resources import available_cores


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ({"memory": "4GB"}, "most_bytes", 4 * 10**9),
        ({"memory": 1 << 20}, "most_bytes", 1 << 20),
        ({}, "most_bytes", None),
        ({"workers": 3}, "run_by", Processes(3)),
        ({"workers": "tcp://a:1"}, "run_by", Cluster("tcp://a:1")),
        ({}, "run_by", None),
    ],
)
def test_texts_and_numbers_stand_for_what_they_are_on_the_command_line(
    given: dict[str, Any], field: str, value: object
) -> None:
    assert getattr(Collection(**given), field) == value


@pytest.mark.parametrize(
    ("given", "sentence"),
    [({"memory": "much"}, "expected a size such as 4GB or 512MiB, found 'much'"), ({"workers": 0}, "0")],
)
def test_what_is_no_size_or_number_of_processes_is_refused_at_once(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SchemeError, match=sentence):
        Collection(**given)


@pytest.fixture
def notices() -> list[str]:
    return []


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Note how many samples and tensors each call of `collect` has to run."""
    seen: list[tuple[int, int]] = []

    def noted(model, samples, requests, *, ledger, **options):  # type: ignore[no-untyped-def]
        seen.append((len(samples) - len(ledger.earlier.samples), len({one.tensor for one in requests})))
        return collect(model, samples, requests, ledger=ledger, **options)

    monkeypatch.setattr(resume, "collect", noted)
    return seen


def test_statistics_say_what_they_are_of() -> None:
    found = whole()
    assert found == collect(MODEL, SAMPLES, wanted(TAPS))
    assert found.samples == tuple(sorted(map(sample_digest, SAMPLES)))


def test_each_sample_is_digested_once_to_find_what_is_left(
    tmp_path: Path, notices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_statistics(whole(samples=SAMPLES[:INTERRUPTED]), tmp_path / "s.npz")
    digested: list[str] = []

    def noted(sample: Sample) -> str:
        digested.append(sample_digest(sample))
        return digested[-1]

    for module in (resume, runner):
        monkeypatch.setattr(module, "sample_digest", noted)
    assert reused(tmp_path / "s.npz", notices) == whole()
    assert digested == [sample_digest(sample) for sample in SAMPLES]


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
    assert list(found.statistics) == wanted(TAPS)
    assert found.provenance == expected.provenance
    assert found.select(wanted(TAPS[:3] + TAPS[5:])) == expected.select(wanted(TAPS[:3] + TAPS[5:]))
    # Fewer taps leave more to be fused, which rounds otherwise.
    for name in TAPS[3:5]:
        ends, exact = (one.of(name).need(SampleExtremes).ends for one in (found, expected))
        assert ends == pytest.approx(exact, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": [{"image": SAMPLES[0]["image"] + 1}, *SAMPLES[1:]]}, "has 1 of 48 samples that are not among"),
        (
            {"samples": SAMPLES[:10], "requests": wanted([*TAPS, "logits"])},
            "has 38 of 48 samples that are not among these",
        ),
        ({"model": MODEL.with_name("resnet-other.onnx")}, "is of another model"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_of_something_else_is_not_used(
    changes: dict[str, object], message: str, tmp_path: Path, notices: list[str]
) -> None:
    if "model" in changes:
        proto = onnx.load(MODEL)
        proto.graph.initializer.add(name="unused", data_type=onnx.TensorProto.FLOAT, dims=[0])
        changes = {"model": tmp_path / "other.onnx"}
        onnx.save(proto, tmp_path / "other.onnx")
    save_statistics(whole(), tmp_path / "s.npz")
    found = reused(tmp_path / "s.npz", notices, **changes)
    assert len(notices) == 1
    assert message in notices[0]
    given = {"samples": SAMPLES, "requests": wanted(TAPS), "model": MODEL, "collection": Collection()} | changes
    assert found == calibrate_tensors(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize("samples", [SAMPLES[::-1], SAMPLES[7:] + SAMPLES[:7]], ids=["backwards", "from the middle"])
def test_the_order_of_samples_does_not_matter(
    samples: list[Sample], tmp_path: Path, notices: list[str], runs: list[object]
) -> None:
    save_statistics(whole(), tmp_path / "s.npz")
    runs.clear()
    assert reused(tmp_path / "s.npz", notices, samples=samples) == whole(samples=samples) == whole()
    assert (runs[:-2], notices) == ([], [])


def test_a_sample_added_in_front_is_run_alone(tmp_path: Path, notices: list[str], runs: list[tuple[int, int]]) -> None:
    save_statistics(whole(samples=SAMPLES[1:]), tmp_path / "s.npz")
    runs.clear()
    assert reused(tmp_path / "s.npz", notices) == whole()
    assert runs[0] == (1, len(TAPS))
    assert notices == [f"{tmp_path / 's.npz'} lacks 1 of 48 samples; they are run now"]


def test_files_of_two_folders_are_those_of_one_run_and_taken_whole(
    tmp_path: Path, notices: list[str], runs: list[object]
) -> None:
    for name, samples in (("a", SAMPLES[:20]), ("b", SAMPLES[20:])):
        save_statistics(whole(samples=samples), tmp_path / name)
    merged = merge_files([tmp_path / "b", tmp_path / "a"])
    assert merged == whole()
    save_statistics(merged, tmp_path / "s.npz")
    runs.clear()
    assert reused(tmp_path / "s.npz", notices) == merged
    assert reused(tmp_path / "s.npz", notices, samples=SAMPLES[:20]) == merged
    assert (runs, notices) == ([], [f"{tmp_path / 's.npz'} holds 28 samples besides these; it is used as it is"])


def test_what_is_counted_otherwise_is_lacking(tmp_path: Path, notices: list[str], runs: list[tuple[int, int]]) -> None:
    save_statistics(calibrate_tensors(MODEL, SAMPLES, wanted(TAPS, elements=100), Collection()), tmp_path / "s.npz")
    runs.clear()
    found = reused(tmp_path / "s.npz", notices)
    assert found == whole()
    assert runs[0] == (48, len(TAPS))
    assert [f"s.npz lacks {len(TAPS)} of {len(TAPS)} tensors ({TAPS[0]}, " in notice for notice in notices] == [True]


def test_statistics_of_another_runtime_are_not_used(tmp_path: Path, notices: list[str]) -> None:
    found = whole()
    older = dataclasses.replace(found, provenance=dataclasses.replace(found.provenance, runtime="onnxruntime 1.2.3"))
    save_statistics(older, tmp_path / "s.npz")
    assert reused(tmp_path / "s.npz", notices) == found
    assert "is of onnxruntime 1.2.3 and not onnxruntime" in notices[0]


def test_statistics_without_provenance_are_not_used(tmp_path: Path, notices: list[str]) -> None:
    save_statistics(collect(MODEL, SAMPLES, wanted(TAPS)), tmp_path / "s.npz")
    assert reused(tmp_path / "s.npz", notices) == whole()
    assert notices == [f"{tmp_path / 's.npz'} does not say which model it is of; nothing of it is used"]


def test_an_interrupted_run_goes_on_where_it_was(
    tmp_path: Path, notices: list[str], runs: list[tuple[int, int]]
) -> None:
    collection = Collection(checkpoint=tmp_path / "s.npz", seconds=0, notice=notices.append)
    with pytest.raises(ReadingFailedError):
        calibrate_tensors(MODEL, Failing(SAMPLES), wanted(TAPS), collection)
    (partial,) = tmp_path.iterdir()
    kept = len(load_statistics(partial).samples)
    assert 0 < kept <= INTERRUPTED
    assert calibrate_tensors(MODEL, SAMPLES, wanted(TAPS), collection) == whole()
    assert runs[1] == (len(SAMPLES) - kept, len(TAPS))
    assert notices == [f"{partial} holds {kept} of 48 samples of an interrupted run; it goes on"]
    discard_checkpoints(tmp_path / "s.npz")
    assert list(tmp_path.iterdir()) == []


def test_files_of_others_beside_a_checkpoint_are_left(tmp_path: Path) -> None:
    others = [
        "s.npz",
        "s.npz.notes.tmp",
        "s.npz.tmp",
        "s.npz.mine.partial",
        ".s.npz.12.tmp.swp",
        "t.npz.00000000.partial",
    ]
    ours = ["s.npz.0123abcd.partial", ".s.npz.12.tmp", ".s.npz.0123abcd.partial.12.tmp"]
    for name in (*others, *ours):
        (tmp_path / name).write_text("")
    discard_checkpoints(tmp_path / "s.npz")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)


def test_a_damaged_checkpoint_is_told_and_left(tmp_path: Path, notices: list[str]) -> None:
    collection = Collection(checkpoint=tmp_path / "s.npz", notice=notices.append)
    calibrate_tensors(MODEL, SAMPLES, wanted(TAPS), collection)
    (partial,) = tmp_path.iterdir()
    partial.write_bytes(partial.read_bytes()[:1000])
    assert calibrate_tensors(MODEL, SAMPLES, wanted(TAPS), collection) == whole()
    assert "cannot be read" in notices[0]


def test_a_folder_that_cannot_be_written_shows_before_anything_is_run(tmp_path: Path, runs: list[object]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        OutputError, match=r"partial cannot be written: Not a directory; free disk space there, or give"
    ):
        calibrate_tensors(MODEL, SAMPLES, wanted(TAPS), Collection(checkpoint=tmp_path / "file" / "s.npz"))
    assert runs == []


def test_a_memory_budget_splits_the_taps_and_does_not_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: list[tuple[int, int]]
) -> None:
    from onnxq.calibration.calibrate import measure_tensor_bytes, statistics_bytes

    sizes = measure_tensor_bytes(MODEL, SAMPLES[0], TAPS)
    monkeypatch.setattr(resume, "peak_memory", lambda: 1_000_000)
    ahead = 2 * available_cores() * (resume.SHARD_BYTES + SAMPLES[0]["image"].nbytes)
    result = sum(statistics_bytes(wanted(TAPS), sizes, len(SAMPLES)).values())
    enough = 1_000_000 + ahead + 4 * result + max(sizes.values()) * 8
    collection = Collection(memory=enough, checkpoint=tmp_path / "s.npz")
    assert calibrate_tensors(MODEL, SAMPLES, wanted(TAPS), collection) == whole()
    assert runs[:-1] == [(48, 12), (48, 12)]
    runs.clear()
    # Where statistics are what does not fit, the tensors are split by theirs.
    fewer = dataclasses.replace(collection, memory=enough - result)
    assert calibrate_tensors(MODEL, SAMPLES, wanted(TAPS), fewer) == whole()
    assert len(runs[:-1]) > 2
    with pytest.raises(DataError) as caught:
        calibrate_tensors(MODEL, SAMPLES, wanted(TAPS), dataclasses.replace(collection, memory=1_000_100 + ahead))
    found = re.fullmatch(
        r"--memory is (\d+) MB, expected at least (\d+) MB: process 1 MB, samples (\d+) MB, "
        r"statistics (\d+) MB and tensor '[^']+' 1 MB; raise it",
        str(caught.value),
    )
    assert found is not None
    given, least, waiting, kept = (int(number) for number in found.groups())
    assert given <= least <= 1 + waiting + kept + 1
    enough_memory = dataclasses.replace(collection, memory=least * 10**6, checkpoint=None)
    assert calibrate_tensors(MODEL, SAMPLES, wanted(TAPS), enough_memory) == whole()


PROGRAM = """
import os, random, signal, sys, time
from pathlib import Path
import onnxruntime
from observations import wanted
from test_resume import MODEL, SAMPLES, TAPS
from onnxq.calibration.calibrate import Collection, calibrate_tensors, discard_checkpoints
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.calibration.provenance import sample_digest
from onnxq.calibration.accumulators import SampleExtremes
from onnxq.calibration.statistics import save_statistics

whole, output = map(Path, sys.argv[1:])
moments, kills, finished, kept = random.Random(0), 0, 0, 0
how = Collection(checkpoint=output, seconds=0)
while kills < 20 or not finished:
    kept += any(output.parent.iterdir())
    child = os.fork()
    if not child:
        save_statistics(calibrate_tensors(MODEL, SAMPLES, wanted(TAPS), how), output)
        discard_checkpoints(output)
        os._exit(0)
    # On a busy machine a run takes longer, so the moments move on.
    time.sleep(moments.uniform(0, 0.3 + kills / 100))
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
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), str(Path(__file__).parent), *sys.path])
    }
    run = subprocess.run(
        [sys.executable, *map(str, arguments)], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    kills, finished, kept = map(int, run.stdout.split())
    assert kills >= 20
    assert finished >= 1
    assert kept >= 1
