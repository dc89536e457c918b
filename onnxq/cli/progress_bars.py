"""Progress of running work: bars on a terminal, occasional lines elsewhere."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

from onnxq.report.formatting import size
from onnxq.system.resources import Deadline, Progress, silent

if TYPE_CHECKING:
    from rich.console import Console

# Seconds between two lines outside of a terminal.
_SILENCE = 10.0
_STAGES = {
    "calibrate": "Calibrating",
    "encode": "Encoding weights",
    "refine": "Choosing encodings",
    "profile": "Timing nodes",
    "sensitivity": "Measuring sensitivities",
    "search": "Measuring candidates",
    "blocks": "Training blocks",
    "train": "Training",
    "write": "Writing",
    "verify": "Verifying",
}
# Stages that count bytes.
_IN_BYTES = frozenset({"encode"})


@contextlib.contextmanager
def progress_bars(
    seconds: float = math.inf, notes: Mapping[str, str] | None = None, *, quiet: bool = False
) -> Iterator[Progress]:
    """Yield a progress function that draws bars on a terminal or in a notebook, and prints lines elsewhere.

    Args:
        seconds: time limit of the whole work; the time left is shown.
        notes: text to show beside a stage; it is read at each update, so it may change.
        quiet: True to show nothing.

    >>> from onnxq import Budget
    >>> with progress_bars() as progress:
    ...     budget = Budget(progress=progress)
    """
    if quiet:
        yield silent
        return
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

    from onnxq.cli.terminal import open_console

    console, deadline = open_console(stderr=True), Deadline.within(seconds)

    def said(stage: str, count: str = "", about: str = "") -> str:
        note = (notes or {}).get(stage, "")
        left = about if math.isinf(deadline.left) else f", {deadline.left:.0f} s left"
        return f"{_STAGES.get(stage, stage)}{count}{note and f' ({note})'}{left}"

    # Without widgets a notebook shows no bars, and a warning.
    if not (console.is_terminal or (console.is_jupyter and find_spec("ipywidgets"))):
        yield _lines(console, said)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[count]}"),
        # After the last step, this column shows how long the stage took.
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        tasks = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(_STAGES.get(stage, stage), count="")
            count = f"{_amount(stage, done)}/{_amount(stage, total) if total else '?'}"
            bars.update(tasks[stage], description=said(stage), completed=done, total=total or None, count=count)

        yield show


def _amount(stage: str, count: int) -> str:
    return size(count) if stage in _IN_BYTES else str(count)


def _lines(console: Console, said: Callable[[str, str, str], str]) -> Progress:
    """Print a line if the last one is older than ten seconds."""
    printed = time.monotonic()
    begun: dict[str, tuple[float, int]] = {}

    def say(stage: str, done: int, total: int) -> None:
        nonlocal printed
        start, first = begun.setdefault(stage, (time.monotonic(), done))
        if time.monotonic() >= printed + _SILENCE:
            printed = time.monotonic()
            whole = f" of {_amount(stage, total)}" if total else ""
            count = f" {_amount(stage, done)}{whole}" if done or total else ""
            ahead = (printed - start) / (done - first) * (total - done) if total > done > first else 0.0
            console.print(said(stage, count, f", about {ahead:.0f} s to go" if ahead else ""))

    return say
