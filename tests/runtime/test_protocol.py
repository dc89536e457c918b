"""Messages come out as they went in, and what is none is told."""

from __future__ import annotations

import io

import ml_dtypes
import numpy as np
import pytest

from onnxq.errors import EngineError
from onnxq.runtime.protocol import receive, send

from .fake_engine import fake_engine


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.arange(6, dtype=np.int64).reshape(2, 3).T,
        np.array(True),
        np.zeros((0, 4), np.uint8),
        np.array([1.5, -2], ml_dtypes.bfloat16),
        np.array([["a", "\xe4"]], dtype=object),
        np.array([b"a", b"b"]).astype(object),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_arrays_come_out_as_they_went_in(array: np.ndarray) -> None:
    stream = io.BytesIO()
    send(stream, {"ask": "run", "seconds": 0.5}, [array, np.ones(2)])
    stream.seek(0)
    header, (found, ones) = receive(stream)
    assert header == {"ask": "run", "seconds": 0.5}
    expected = [one.decode() if isinstance(one, bytes) else one for one in array.ravel().tolist()]
    assert (found.dtype, found.shape, found.ravel().tolist()) == (array.dtype, array.shape, expected)
    assert ones.tolist() == [1, 1]


def test_a_stream_that_ends_in_the_middle_is_told() -> None:
    stream = io.BytesIO()
    send(stream, {}, [np.ones(8)])
    with pytest.raises(EOFError):
        receive(io.BytesIO(stream.getvalue()[:-1]))


@pytest.mark.parametrize("data", [b"Segmentation fault", b"\x00\x00\x00\x02[]", b"\x00\x00\x00\x02{!"])
def test_what_is_no_message_is_told(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"header|Expecting"):
        receive(io.BytesIO(data))


def test_what_it_does_not_know_is_told_and_it_goes_on() -> None:
    with fake_engine() as engine:
        with pytest.raises(EngineError, match="engine fake cannot start: ValueError: 'dance' is not known"):
            engine.ask({"ask": "dance"})
        assert engine.ask({"ask": "hello"})[0]["version"] == "fake 1.0"


@pytest.mark.parametrize("name", ["../../outside", "/tmp/outside"])
def test_it_keeps_files_in_its_own_folder(name: str) -> None:
    with fake_engine() as engine, pytest.raises(EngineError, match=f"ValueError: {name} lies outside"):
        engine.ask({"ask": "keep", "folder": "0", "name": name}, [{"data": np.zeros(3, np.uint8)}])
