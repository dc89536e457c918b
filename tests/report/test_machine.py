"""Stages and the machine are told as they are."""

from __future__ import annotations

from onnxq.report.parts import Machine, Stopwatch, peak_memory


def test_stages_follow_one_another_and_are_no_longer_than_the_whole() -> None:
    watch = Stopwatch()
    for name in ("prepare", "calibrate"):
        watch.lap(name)
    assert [stage.name for stage in watch.stages] == ["prepare", "calibrate"]
    assert 0 <= sum(stage.seconds for stage in watch.stages) <= watch.seconds


def test_a_stage_that_work_went_back_to_stands_once() -> None:
    watch = Stopwatch()
    for name in ("prepare", "calibrate", "prepare"):
        watch.lap(name)
    assert [stage.name for stage in watch.stages] == ["prepare", "calibrate"]
    assert 0 <= sum(stage.seconds for stage in watch.stages) <= watch.seconds


def test_memory_only_grows() -> None:
    before = peak_memory()
    assert 0 < before <= peak_memory()


def test_the_machine_names_what_decides_the_outcome() -> None:
    found = Machine.this()
    assert found.cores >= 1
    assert found.versions["onnxruntime"]
