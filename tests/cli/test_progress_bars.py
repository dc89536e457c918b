from __future__ import annotations

from typing import Any

import pytest
from rich import progress as rich_progress
from rich.console import Console

from onnxq.cli import progress_bars
from onnxq.cli import terminal as console


def test_where_no_terminal_is_a_line_is_printed_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(progress_bars.time, "monotonic", lambda: now[0])
    with progress_bars.progress_bars(seconds=60.0) as progress:
        for done in range(1, 22):
            now[0] += 1.0
            progress("calibrate", done, 30)
        now[0] += 60.0
        progress("search", 7, 0)
    lines = ["Calibrating 10 of 30, 50 s left", "Calibrating 20 of 30, 40 s left", "Measuring candidates 7, 0 s left"]
    assert capsys.readouterr() == ("", "\n".join([*lines, ""]))


def test_lines_tell_how_long_a_phase_still_takes_where_its_end_is_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(progress_bars.time, "monotonic", lambda: now[0])
    with progress_bars.progress_bars() as progress:
        progress("calibrate", 0, 10)
        for done, total in ((4, 10), (10, 10)):
            now[0] += 12.0
            progress("calibrate", done, total)
        now[0] += 12.0
        progress("search", 3, 0)
    lines = ["Calibrating 4 of 10, about 18 s to go", "Calibrating 10 of 10", "Measuring candidates 3"]
    assert capsys.readouterr().err.splitlines() == lines


def test_progress_bars_are_drawn_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with progress_bars.progress_bars() as progress:
        for done in (1, 2):
            progress("calibrate", done, 2)
        progress("verify", 0, 0)
    out, err = capsys.readouterr()
    assert out == ""
    assert "Calibrating" in err


def test_what_is_noted_of_a_stage_stands_beside_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now, notes = [0.0], {"train": "loss 0.01, 20.0 dB"}
    monkeypatch.setattr(progress_bars.time, "monotonic", lambda: now[0])
    with progress_bars.progress_bars(notes=notes) as progress:
        now[0] += 10.0
        progress("train", 3, 8)
        now[0] += 10.0
        progress("verify", 0, 0)
    assert capsys.readouterr().err == "Training 3 of 8 (loss 0.01, 20.0 dB)\nVerifying\n"


@pytest.mark.parametrize("widgets", [True, False])
def test_bars_are_drawn_in_a_notebook_that_has_widgets(widgets: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Bars(rich_progress.Progress):
        def __init__(self, *columns: rich_progress.ProgressColumn, **options: Any) -> None:
            super().__init__(*columns, disable=True, **options)
            made.append(self)

    monkeypatch.setattr(rich_progress, "Progress", Bars)
    monkeypatch.setattr(console, "open_console", lambda stderr: Console(force_jupyter=True))
    monkeypatch.setattr(progress_bars, "find_spec", lambda name: object() if widgets else None)
    with progress_bars.progress_bars() as progress:
        progress("calibrate", 1, 2)
    assert [task.completed for bars in made for task in bars.tasks] == [1] * widgets
