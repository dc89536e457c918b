from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxq.calibration.collect import tap
from onnxq.calibration.kinds import default_request
from onnxq.calibration.workers import (
    _OPENED,
    InstrumentedModel,
    _Opened,
    carrying_weights,
    forget_sessions,
    observe_samples,
)
from onnxq.data.inputs import Sample
from onnxq.errors import DataError, ModelError


def model(path: Path, location: str = "w.data") -> Path:
    """Write x -> MatMul(w) -> h -> Relu -> y with w in a file of its own."""
    (path.parent / location).parent.mkdir(exist_ok=True)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 64]) for name in "xy")
    weight = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    graph = helper.make_graph(nodes, "g", [x], [y], [numpy_helper.from_array(weight, "w")])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(proto, path, save_as_external_data=True, location=location)
    return path


@pytest.fixture
def tapped(tmp_path: Path) -> InstrumentedModel:
    return tap(model(tmp_path / "m.onnx"), [default_request(name, "range") for name in "hx"])


def numbered(*rows: np.ndarray, first: int = 0) -> Iterable[tuple[int, Sample]]:
    return enumerate(({"x": row[None]} for row in rows), first)


ROWS = np.random.default_rng(1).normal(size=(11, 64)).astype(np.float32)


def test_a_bad_tensor_names_itself_and_the_sample(tapped: InstrumentedModel) -> None:
    with pytest.raises(DataError, match=r"'x' holds 64 NaN or infinite values of 64 in sample 7"):
        observe_samples(tapped, numbered(np.full(64, np.nan, np.float32), first=7))


@pytest.mark.parametrize(("room", "together"), [(0, 1), (100, 1), (250, 2), (10**9, 4)])
def test_so_many_samples_run_at_a_time_as_their_taps_have_room(room: int, together: int) -> None:
    opened = _Opened((), ())
    with opened.turn(room):
        opened._largest = 100
    running, most = 0, 0
    lock, barrier = threading.Lock(), threading.Barrier(4)

    def sample() -> None:
        nonlocal running, most
        barrier.wait()
        with opened.turn(room):
            with lock:
                running += 1
                most = max(most, running)
            time.sleep(0.05)
            with lock:
                running -= 1

    threads = [threading.Thread(target=sample) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == together


def test_sessions_end_with_the_model(tapped: InstrumentedModel) -> None:
    others = set(_OPENED)
    copy = replace(tapped)
    observe_samples(tapped, numbered(*ROWS))
    observe_samples(copy, numbered(*ROWS))
    assert set(_OPENED) - others == {tapped, copy}
    alive = weakref.ref(_OPENED[copy])
    del copy
    gc.collect()
    assert alive() is None
    forget_sessions(tapped)
    assert tapped not in _OPENED


def test_a_worker_without_the_folder_uses_the_weights_that_it_was_sent(tmp_path: Path) -> None:
    tapped = tap(model(tmp_path / "m.onnx", "inner/w.data"), [default_request(name, "range") for name in "hx"])
    sent = carrying_weights(tapped, [tmp_path / "inner" / "w.data"])
    expected = observe_samples(tapped, numbered(*ROWS))
    (tmp_path / "inner" / "w.data").unlink()
    assert observe_samples(sent, numbered(*ROWS)) == expected


def test_weights_outside_the_folder_are_not_carried(tapped: InstrumentedModel, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"is not below .*, expected it there"):
        carrying_weights(tapped, [tmp_path.parent / "w.data"])
