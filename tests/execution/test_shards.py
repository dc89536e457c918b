from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, Executor, Future
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import pytest
from observations import wanted
from onnx import TensorProto, helper, numpy_helper

from onnxq.errors import DataError
from onnxq.execution.runner import tap
from onnxq.execution.shards import Pool, Shard, Tapped, carrying_weights, forget_session, observe_shard, run_shards


def model(path: Path) -> Path:
    """Write x -> MatMul(w) -> h -> Relu -> y with w in a file of its own."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 64]) for name in "xy")
    weight = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    graph = helper.make_graph(nodes, "g", [x], [y], [numpy_helper.from_array(weight, "w")])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(proto, path, save_as_external_data=True, location="w.data")
    return path


@pytest.fixture
def tapped(tmp_path: Path) -> Tapped:
    return tap(model(tmp_path / "m.onnx"), wanted(["h", "x"]))


def shards(count: int) -> list[Shard]:
    rows = np.random.default_rng(1).normal(size=(count, 1, 64)).astype(np.float32)
    return [Shard({index: {"x": row}}) for index, row in enumerate(rows)]


class Mortal(Executor):
    """Runs at once; of all calls, those numbered in `deaths` find their worker dead, and so do the later ones."""

    def __init__(self, calls: Iterator[int], deaths: set[int]) -> None:
        self.calls, self.deaths, self.dead = calls, deaths, False

    def submit(self, function, /, *args, **kwargs) -> Future:  # type: ignore[no-untyped-def,type-arg]
        if self.dead:
            raise BrokenExecutor("dead before")
        future: Future[object] = Future()
        if next(self.calls) in self.deaths:
            self.dead = True
            future.set_exception(BrokenExecutor("dead"))
        else:
            future.set_result(function(*args, **kwargs))
        return future


class MortalWorkers:
    def __init__(self, deaths: set[int], count: int = 2) -> None:
        self.deaths, self.count, self.opened = deaths, count, 0
        self.calls = iter(range(10_000))

    @contextmanager
    def open(self, tapped: Tapped) -> Iterator[Pool]:
        self.opened += 1
        yield Pool(Mortal(self.calls, self.deaths), tapped, self.count)


@pytest.mark.parametrize("deaths", [set(), {0}, {3}, {0, 1}, {2, 5, 9, 14}, {10}])
def test_every_shard_is_run_once_though_workers_die(deaths: set[int], tapped: Tapped) -> None:
    workers = MortalWorkers(deaths)
    found = {min(shard.samples): seen for shard, seen in run_shards(tapped, shards(11), workers)}
    assert found == {min(shard.samples): observe_shard(tapped, shard) for shard in shards(11)}
    assert bool(deaths) < workers.opened <= 1 + len(deaths)


def test_a_shard_that_kills_every_worker_ends_in_a_sentence(tapped: Tapped) -> None:
    workers = MortalWorkers(set(range(4, 100)))
    with pytest.raises(DataError, match=r"Workers died 3 times while running sample [34] "):
        list(run_shards(tapped, shards(11), workers))
    assert workers.opened == 3


def test_no_shards_start_no_workers(tapped: Tapped) -> None:
    workers = MortalWorkers(set())
    assert list(run_shards(tapped, [], workers)) == []
    assert workers.opened == 0


def test_few_shards_are_in_memory_at_a_time(tapped: Tapped) -> None:
    taken: list[int] = []

    def source() -> Iterator[Shard]:
        for number, shard in enumerate(shards(30)):
            taken.append(number)
            yield shard

    for finished, _ in enumerate(run_shards(tapped, source(), MortalWorkers(set()))):
        assert len(taken) <= finished + 5


def test_an_error_of_a_sample_is_not_retried(tapped: Tapped) -> None:
    workers = MortalWorkers(set())
    bad = Shard({7: {"x": np.full((1, 64), np.nan, np.float32)}})
    with pytest.raises(DataError, match=r"'x' holds 64 NaN or infinite values of 64 in sample 7"):
        list(run_shards(tapped, [bad], workers))
    assert workers.opened == 1


def test_a_worker_without_the_folder_uses_the_weights_that_it_was_sent(tapped: Tapped, tmp_path: Path) -> None:
    sent = carrying_weights(tapped, [tmp_path / "w.data"])
    expected = observe_shard(tapped, shards(1)[0])
    (tmp_path / "w.data").unlink()
    forget_session()
    assert observe_shard(sent, shards(1)[0]) == expected
