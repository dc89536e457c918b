"""What a process answers that runs models for another."""

from __future__ import annotations

import numpy as np
import pytest

from onnxq.errors import EngineError

from .fake_engine import fake_engine


def test_what_it_does_not_know_is_told_and_it_goes_on() -> None:
    with fake_engine() as engine:
        with pytest.raises(EngineError, match="engine fake cannot start: ValueError: 'dance' is not known"):
            engine.ask({"ask": "dance"})
        assert engine.ask({"ask": "hello"})[0]["version"] == "fake 1.0"


@pytest.mark.parametrize("name", ["../../outside", "/tmp/outside"])
def test_it_keeps_files_in_its_own_folder(name: str) -> None:
    with fake_engine() as engine, pytest.raises(EngineError, match=f"ValueError: {name} lies outside"):
        engine.ask({"ask": "keep", "folder": "0", "name": name}, [{"data": np.zeros(3, np.uint8)}])
