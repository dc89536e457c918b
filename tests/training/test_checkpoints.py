"""States of training are whole or not there, and of this training alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from onnxq.errors import OutputError
from onnxq.training.learning import Checkpoint, digest_of

STATE = {"epoch": 3, "module": {"w": torch.tensor([1.0, 2.0])}}


def test_a_state_comes_back(tmp_path: Path) -> None:
    keep = Checkpoint(tmp_path / "s", "one")
    assert keep.load() is None
    keep.save(STATE)
    found = keep.load()
    assert found is not None
    assert found["module"]["w"].tolist() == [1, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


@pytest.mark.parametrize("damage", [b"", b"nothing", None])
def test_what_is_damaged_or_of_another_training_is_not_taken(damage: bytes | None, tmp_path: Path) -> None:
    Checkpoint(tmp_path / "s", "one").save(STATE)
    if damage is not None:
        (tmp_path / "s").write_bytes(damage)
    assert Checkpoint(tmp_path / "s", "one" if damage is not None else "other").load() is None


def test_without_a_file_nothing_is_kept() -> None:
    keep = Checkpoint(None)
    keep.save(STATE)
    assert keep.load() is None


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"the state of training .* cannot be written"):
        Checkpoint(tmp_path / "none" / "deeper" / "s").save(STATE)


def test_keys_tell_trainings_apart() -> None:
    assert digest_of([1, torch.zeros(2)]) == digest_of([1, torch.zeros(2)])
    assert len({digest_of([1]), digest_of([2]), digest_of([torch.zeros(2)]), digest_of([torch.ones(2)])}) == 4
