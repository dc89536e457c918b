"""Models that are built and run once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from threading import Event

import numpy as np
import pytest

from onnxq.errors import DataError
from onnxq.search.evaluator import Answers, BuiltModel, BuiltModels, Runner


def test_a_model_is_built_once_while_there_is_room(tmp_path: Path) -> None:
    built = BuiltModels(room=25)
    asked = []

    def build(path: Path) -> BuiltModel:
        asked.append(path.name)
        path.write_bytes(bytes(10))
        return BuiltModel(path, {})

    first, second = (built.model(name, tmp_path, build) for name in "ab")
    assert built.model("a", tmp_path, build) is first
    built.model("c", tmp_path, build)
    assert len(asked) == 3
    assert (first.path.exists(), second.path.exists()) == (True, False)
    assert built.model("b", tmp_path, build).path.exists()


def test_a_model_that_was_built_is_copied_where_it_is_all_in_one_file(tmp_path: Path) -> None:
    built, place = BuiltModels(), tmp_path / "copy.onnx"

    def build(path: Path, is_whole: bool = True) -> BuiltModel:
        path.write_bytes(b"model")
        return BuiltModel(path, {}, is_whole)

    assert not built.copied("a", place)
    built.model("a", tmp_path, build)
    assert built.copied("a", place)
    assert place.read_bytes() == b"model"
    built.model("b", tmp_path, partial(build, is_whole=False))
    assert not built.copied("b", place)


class Model:
    """Gives numbers, and knows on which samples it was run."""

    def __init__(self, failing: bool = False) -> None:
        self.built, self.ran, self.failing = 0, list[int](), failing

    def build(self) -> Runner:
        self.built += 1
        return self.run

    def run(self, numbers: Sequence[int]) -> Answers:
        if self.failing:
            raise DataError("the sample cannot be run")
        self.ran += numbers
        return {number: [np.full(4, number, np.float32)] for number in numbers}


def test_a_model_is_run_once_on_a_sample() -> None:
    model, candidates = Model(), BuiltModels()
    assert [float(answer[0][0]) for answer in candidates.answers("a", [3, 1], model.build)] == [3, 1]
    assert [float(answer[0][0]) for answer in candidates.answers("a", [1, 2, 3], model.build)] == [1, 2, 3]
    candidates.begin("a", [2, 3], model.build)
    assert (model.built, model.ran) == (2, [3, 1, 2])


def test_what_was_begun_is_waited_for() -> None:
    slow, quick, candidates, may_end = Model(), Model(), BuiltModels(), Event()

    def build() -> Runner:
        run = slow.build()
        return lambda numbers: run(numbers) if may_end.wait(60) else {}

    candidates.begin("slow", [1, 2], build)
    candidates.begin("slow", [1, 2], build)
    candidates.begin("quick", [1], quick.build)
    assert (slow.built, quick.built, quick.ran) == (1, 1, [])
    may_end.set()
    # Begun with fewer samples than are asked for.
    assert len(candidates.answers("quick", [1, 2], quick.build)) == len(candidates.answers("slow", [1, 2], build)) == 2
    assert (slow.built, slow.ran, quick.ran) == (1, [1, 2], [1, 2])


def test_a_run_that_fails_in_the_background_is_told_to_who_asks() -> None:
    model, candidates = Model(failing=True), BuiltModels()
    candidates.begin("a", [1], model.build)
    with pytest.raises(DataError, match="cannot be run"):
        candidates.answers("a", [1], model.build)


@pytest.mark.parametrize(("held", "ran"), [(32, [1, 2]), (31, [1, 2, 1, 2])])
def test_outputs_are_kept_while_there_is_room(held: int, ran: list[int]) -> None:
    model, candidates = Model(), BuiltModels(held=held)
    for _ in range(2):
        assert len(candidates.answers("a", [1, 2], model.build)) == 2
    assert model.ran == ran
