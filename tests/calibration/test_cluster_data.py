"""Objects whose items are samples go to workers that need them, and only where that is worth it."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from calibration.clustered import MODEL, SAMPLES, TAPS, Items, collected_here, ledger
from onnxq.calibration import dask_cluster
from onnxq.calibration.collect import collect
from onnxq.calibration.dask_cluster import Cluster, pickled
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.calibration.workers import InstrumentedModel, Processes, Threads, Workers
from onnxq.data.dataset import Subset
from onnxq.data.files import SampleFile
from onnxq.data.inputs import Input, Sample, model_inputs
from onnxq.data.samples import CachedDataset, Samples, open_samples
from onnxq.errors import DataError

distributed = pytest.importorskip("distributed", reason="needs pip install 'onnxq[dask]'")

IMAGE = model_inputs(onnx.load(MODEL))
CLIENT = "onnxq-test-client"


class Elsewhere(Items):
    """Reads other samples, or none, on a worker."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def __getitem__(self, place: int) -> Sample:
        if hasattr(threading, CLIENT):
            return super().__getitem__(place)
        if self.how == "gone":
            raise FileNotFoundError(place)
        return SAMPLES[-1 - place]


class Closed(Items):
    """Cannot be opened anywhere but here."""

    def __reduce__(self) -> Any:
        return _open_here, ()


def _open_here() -> Closed:
    raise ModuleNotFoundError("No module named 'pictures'")


class Locked(Items):
    """Cannot be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Held(Items):
    """Has its samples in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.images = np.zeros(dask_cluster.MOST_BYTES // 8 + 1)


@pytest.fixture(scope="module")
def running() -> Iterator[Any]:
    """Return a client of a cluster of two workers, in processes of their own."""
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=2, processes=True, dashboard_address=None, host="127.0.0.1"
        ) as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def expected() -> CalibrationStatistics:
    return collected_here()


@pytest.fixture(autouse=True)
def client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mark this process, so that samples can tell where they are read."""
    monkeypatch.setattr(threading, CLIENT, True, raising=False)


def same(found: CalibrationStatistics, expected: CalibrationStatistics) -> bool:
    return (found, found.provenance) == (expected, expected.provenance)


def opened(given: Items) -> Samples:
    """Open an object, and forget what was read of it to see whether it stays the same."""
    samples = open_samples(given, IMAGE)
    given.read.clear()
    return samples


@pytest.mark.parametrize("lease", [0.0, 60.0])
def test_workers_read_the_items_that_they_need(lease: float, running: Any, expected: CalibrationStatistics) -> None:
    given = Items()
    assert same(collect(MODEL, opened(given), TAPS, workers=Cluster(running, lease=lease), ledger=ledger()), expected)
    assert given.read == []


@pytest.mark.parametrize("workers", [Threads(2), Processes(2)], ids=str)
def test_items_give_the_same_bits_on_this_machine(workers: Workers, expected: CalibrationStatistics) -> None:
    assert same(collect(MODEL, opened(Items()), TAPS, workers=workers, ledger=ledger()), expected)


def test_of_a_selection_no_other_items_are_read(running: Any) -> None:
    given, places = Items(), [1, 2, 40, 62]
    found = collect(MODEL, Subset(opened(given), places), TAPS, workers=Cluster(running))
    assert found == collect(MODEL, [SAMPLES[place] for place in places], TAPS)
    assert set(given.read) <= {1}


def test_what_was_run_before_is_not_run_again(running: Any, expected: CalibrationStatistics) -> None:
    before = replace(ledger(), earlier=collect(MODEL, SAMPLES[:40], TAPS, ledger=ledger()))
    assert same(collect(MODEL, opened(Items()), TAPS, workers=Cluster(running), ledger=before), expected)


@pytest.mark.parametrize(
    "given", [Elsewhere("other"), Elsewhere("gone"), Closed(), Locked(), Held()], ids=lambda given: type(given).__name__
)
def test_samples_are_sent_where_items_cannot_be_read_by_workers(
    given: Items, running: Any, expected: CalibrationStatistics
) -> None:
    assert same(collect(MODEL, opened(given), TAPS, workers=Cluster(running), ledger=ledger()), expected)
    # Eight were kept while the object was opened.
    assert len(given.read) == len(set(given.read)) == len(SAMPLES) - 8


def test_an_object_is_sent_once(running: Any, expected: CalibrationStatistics, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    scatter = running.scatter
    monkeypatch.setattr(running, "scatter", lambda given, **how: sent.append((given, how)) or scatter(given, **how))
    assert same(collect(MODEL, opened(Items()), TAPS, workers=Cluster(running, lease=0.0), ledger=ledger()), expected)
    assert [how["broadcast"] for _, how in sent] == [True]
    assert [type(one) for one in sent[0][0]] == [InstrumentedModel, bytes]


def test_an_error_of_an_item_is_the_same_sentence_from_a_cluster(running: Any) -> None:
    given = Items()
    samples = opened(given)
    given.__class__ = Broken
    with pytest.raises(DataError, match="samples, row 5 failed: KeyError: 'image'"):
        collect(MODEL, samples, TAPS, workers=Cluster(running))


class Broken(Items):
    def __getitem__(self, place: int) -> Sample:
        return super().__getitem__(place) if place != 5 else {"image": {}["image"]}


def items_of(given: Any) -> Samples:
    inputs = (Input("image", np.dtype(np.float32), None),)
    items = CachedDataset(given, range(len(given)), inputs)
    return Samples([SampleFile("samples", "samples", len(given), items.read, stored=False)], inputs, range(len(given)))


def test_a_data_set_is_read_as_it_was_pickled() -> None:
    data = pickled(open_samples(Items(), IMAGE))
    assert data is not None
    assert [sample["image"].tobytes() for sample in pickle.loads(data).read_samples([3, 9])] == [
        SAMPLES[place]["image"].tobytes() for place in (3, 9)
    ]


class Pieces(Items):
    """Has its samples in memory, in 64 pieces each of which is small."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.pieces = [bytes([piece]) * (size // 64) for piece in range(64)]


def test_an_object_is_sent_up_to_so_many_bytes() -> None:
    assert len(pickled(items_of(Pieces(dask_cluster.MOST_BYTES * 9 // 10))) or b"") > dask_cluster.MOST_BYTES // 2
    assert pickled(items_of(Pieces(dask_cluster.MOST_BYTES * 11 // 10))) is None


def test_what_is_large_is_not_copied_to_see_that_it_is() -> None:
    copied: list[Large] = []

    class Large:
        nbytes = dask_cluster.MOST_BYTES + 1

        def __reduce__(self) -> Any:
            copied.append(self)
            return list, ()

    given = Items()
    given.read = [Large()]  # type: ignore[list-item]
    assert pickled(items_of(given)) is None
    assert copied == []


def test_files_are_sent_by_their_names_however_many_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "0.npz", **SAMPLES[0])
    samples = open_samples(tmp_path, IMAGE)
    monkeypatch.setattr(dask_cluster, "MOST_BYTES", 10)
    data = pickled(samples)
    assert data is not None
    (tmp_path / "0.npz").unlink()
    with pytest.raises(DataError, match=r"0.npz"):
        list(pickle.loads(data))
