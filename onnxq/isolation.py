"""Run the program in a child process, so that a crash inside a native library ends in a sentence."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path

from onnxq.publish import remove_abandoned, told_of_staging

_BAD_INPUT = 2
_ASKED_TO_STOP = frozenset({"SIGHUP", "SIGINT", "SIGPIPE", "SIGTERM"})


def run_isolated(program: Callable[[], None]) -> None:
    """Run a program in a child process and exit with its code; a signal that kills it becomes a sentence and code 2.

    Call it before anything starts threads. Where processes cannot be forked the program runs here. The child ends with
    its parent, signals that ask the parent to stop are passed on, and what a killed child had staged is removed.

    Args:
        program: ends by returning or by SystemExit, and prints its own errors.
    """
    if not hasattr(os, "fork"):
        program()
        return
    lifeline, held = os.pipe()
    places, told = os.pipe()
    child = os.fork()
    if not child:
        os.close(held)
        told_of_staging.set(_teller(told))
        threading.Thread(target=_end_with_parent, args=(lifeline,), daemon=True).start()
        _run_to_the_end(program)
        return
    os.close(lifeline)
    os.close(told)
    # The terminal tells both processes of Ctrl-C, and the child answers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for asked in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(asked, lambda number, frame: os.kill(child, number))
    _, status = os.waitpid(child, 0)
    with os.fdopen(places, "rb") as lines:
        code = os.waitstatus_to_exitcode(status)
        for folder in lines.read().split(b"\0")[:-1] if code < 0 else ():
            remove_abandoned(Path(os.fsdecode(folder)))
    _exit_as(code)


def _run_to_the_end(program: Callable[[], None]) -> None:
    """Run a program and end the process as soon as it is done; where it fails, the interpreter tells why and ends."""
    code = 0
    try:
        program()
    except SystemExit as asked:
        if not isinstance(asked.code, int | None):
            raise
        code = asked.code or 0
    # What the interpreter does else, to take all modules and graphs apart, would take a thirtieth of a second.
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def _teller(pipe: int) -> Callable[[Path], None]:
    """Return a function that writes each path once; the pipe holds thousands, and a full one must not block."""
    os.set_blocking(pipe, False)

    @cache
    def tell(folder: Path) -> None:
        with contextlib.suppress(OSError):
            os.write(pipe, os.fsencode(folder.absolute()) + b"\0")

    return tell


def _end_with_parent(lifeline: int) -> None:
    os.read(lifeline, 1)
    os._exit(1)


def _exit_as(code: int) -> None:
    """Exit with the code of a child, which is negative when a signal killed it."""
    if code >= 0:
        sys.exit(code)
    name = signal.Signals(-code).name
    if name in _ASKED_TO_STOP:
        sys.exit(128 - code)
    cause = "memory ran out" if name == "SIGKILL" else "onnxruntime cannot cope with the model"
    sys.stderr.write(
        f"onnxq: the process was ended by {name}, most likely because {cause}; no unfinished file is left\n"
    )
    sys.exit(_BAD_INPUT)
