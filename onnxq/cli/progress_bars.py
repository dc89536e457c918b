"""What people see of work in progress: bars on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from importlib.util import find_spec

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from onnxq.deadline import Deadline
from onnxq.progress import Progress as Told

# Seconds between two lines where no terminal shows bars.
_SILENCE = 10.0
_STAGES = {
    "calibrate": "Calibrating",
    "refine": "Choosing codes",
    "profile": "Timing nodes",
    "noise": "Measuring noise",
    "search": "Measuring candidates",
    "blocks": "Training blocks",
    "train": "Training",
    "verify": "Verifying",
}


@contextlib.contextmanager
def progress_bars(seconds: float = math.inf) -> Iterator[Told]:
    """Yield a progress function that draws bars on a terminal or in a notebook, and prints lines elsewhere.

    Args:
        seconds: that there are for all of it, of which it is told how many are left.

    >>> from onnxq import Budget
    >>> with progress_bars() as progress:
    ...     budget = Budget(progress=progress)
    """
    console, deadline = open_console(stderr=True), Deadline.within(seconds)
    # Without widgets a notebook shows no bars, and a warning.
    if not (console.is_terminal or (console.is_jupyter and find_spec("ipywidgets"))):
        yield _lines(console, deadline)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        # Behind the last step it tells how long the phase took.
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        tasks = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(_STAGES.get(stage, stage))
            name = _STAGES.get(stage, stage) + _time_left(deadline)
            bars.update(tasks[stage], description=name, completed=done, total=total or None)

        yield show


def _lines(console: Console, deadline: Deadline) -> Told:
    """Return a progress function that prints a line when the last one is ten seconds old."""
    printed = time.monotonic()
    begun: dict[str, tuple[float, int]] = {}

    def say(stage: str, done: int, total: int) -> None:
        nonlocal printed
        start, first = begun.setdefault(stage, (time.monotonic(), done))
        if time.monotonic() >= printed + _SILENCE:
            printed = time.monotonic()
            count = f" {done} of {total}" if total else f" {done}" if done else ""
            ahead = (printed - start) / (done - first) * (total - done) if total > done > first else 0.0
            about = f", about {ahead:.0f} s to go" if ahead and math.isinf(deadline.left) else ""
            console.print(f"{_STAGES.get(stage, stage)}{count}{about}{_time_left(deadline)}")

    return say


def _time_left(deadline: Deadline) -> str:
    """Say how many seconds are left, where there is a limit."""
    return "" if math.isinf(deadline.left) else f", {deadline.left:.0f} s left"


def open_console(*, stderr: bool = False) -> Console:
    """Return a console that prints the names of a model as they are, whatever brackets they hold."""
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)
