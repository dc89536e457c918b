"""Run the program in a child process, so that a crash in a native library ends in an error message."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

from onnxq.system.publish import on_staging, remove_abandoned

_BAD_INPUT = 2
_CRASHES = frozenset({"SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV"})
_STOP_SIGNALS = frozenset({"SIGHUP", "SIGINT", "SIGPIPE", "SIGTERM"})

_crashes: ContextVar[tuple[Crash, ...]] = ContextVar("crashes", default=())
# The pipe to the parent; None if the program is not isolated.
_pipe: ContextVar[int | None] = ContextVar("pipe", default=None)
# Entries in the pipe that cannot be confused with folders, which are written as absolute paths.
_ANOTHER_TRY, _NO_OTHER_TRY = b"", b"-"


class Crash(Exception):  # noqa: N818
    """A signal ended an earlier process of the same run, most likely inside of onnxruntime."""


def earlier_crashes() -> tuple[Crash, ...]:
    """Return the crashes of earlier processes of this run, the first one first."""
    return _crashes.get()


def allow_another_try() -> None:
    """Let the program run again from its beginning if a crash ends this process from now on.

    It has no effect if the program is not isolated.
    """
    _tell(_ANOTHER_TRY)


def forbid_another_try() -> None:
    """Undo `allow_another_try`: a crash from now on ends the run."""
    _tell(_NO_OTHER_TRY)


def run_isolated(program: Callable[[], None]) -> None:
    """Run a program in a child process and exit with its code. The program prints its own errors.

    A crash becomes a message and exit code 2. If the program called `allow_another_try` before the crash, and not
    `forbid_another_try` since, it runs again. The child ends with its parent, requests to stop the parent are passed
    on, and folders that a killed child had staged are removed.

    Call it before any thread starts. If processes cannot be forked, the program runs in this process.
    """
    if not hasattr(os, "fork"):
        program()
        return
    crashes: tuple[Crash, ...] = ()
    while True:
        code, may_run_again = _run_in_child(program, crashes)
        if not may_run_again or code >= 0 or (name := signal.Signals(-code).name) not in _CRASHES:
            break
        crashes = (*crashes, Crash(f"{name} ended the process, most likely inside of onnxruntime"))
        sys.stderr.write(f"onnxq: {crashes[-1]}; a simpler run is tried now\n")
    _exit_as(code)


def _run_in_child(program: Callable[[], None], crashes: tuple[Crash, ...]) -> tuple[int, bool]:
    """Return the exit code of a child, negative for a signal, and whether the program may run again."""
    lifeline, held = os.pipe()
    places, reports = os.pipe()
    child = os.fork()
    if not child:
        os.close(held)
        # The pipe holds thousands of paths, and a full one must not block.
        os.set_blocking(reports, False)
        _pipe.set(reports)
        _crashes.set(crashes)
        on_staging.set(cache(lambda folder: _tell(os.fsencode(folder.absolute()))))
        threading.Thread(target=_end_with_parent, args=(lifeline,), daemon=True).start()
        _run_to_the_end(program)
        sys.exit(0)
    os.close(lifeline)
    os.close(reports)
    status, stop = _wait_for(child)
    os.close(held)
    with os.fdopen(places, "rb") as lines:
        code = os.waitstatus_to_exitcode(status)
        entries = lines.read().split(b"\0")[:-1] if code < 0 else []
    tries = [entry for entry in entries if entry in (_ANOTHER_TRY, _NO_OTHER_TRY)]
    for folder in dict.fromkeys(entry for entry in entries if entry not in tries):
        remove_abandoned(Path(os.fsdecode(folder)))
    return code, tries[-1:] == [_ANOTHER_TRY] and not stop


def _wait_for(child: int) -> tuple[int, bool]:
    """Return the wait status of a child, and whether a request to stop was passed on."""
    passed_on = False

    def pass_on(number: int, frame: object) -> None:
        nonlocal passed_on
        passed_on = True
        # The child may have ended a moment ago.
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    # The terminal sends Ctrl-C to both processes, and the child handles it.
    handlers: dict[int, Any] = {signal.SIGINT: signal.SIG_IGN, signal.SIGTERM: pass_on, signal.SIGHUP: pass_on}
    previous: dict[int, Any] = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        _, status = os.waitpid(child, 0)
    finally:
        # From here on a request to stop ends this process, not a child that is gone.
        for number, handler in previous.items():
            # A handler that was not set from Python is None, which `signal.signal` does not accept.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
    return status, passed_on


def _run_to_the_end(program: Callable[[], None]) -> None:
    code = 0
    try:
        program()
    except SystemExit as stopped:
        if not isinstance(stopped.code, int | None):
            raise
        code = stopped.code or 0
    # Skip the rest of the interpreter's exit: freeing all modules and graphs takes 30 ms.
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def _tell(entry: bytes) -> None:
    if (pipe := _pipe.get()) is not None:
        with contextlib.suppress(OSError):
            os.write(pipe, entry + b"\0")


def _end_with_parent(lifeline: int) -> None:
    os.read(lifeline, 1)
    os._exit(1)


def _exit_as(code: int) -> None:
    if code >= 0:
        sys.exit(code)
    name = signal.Signals(-code).name
    if name in _STOP_SIGNALS:
        sys.exit(128 - code)
    cause = "memory ran out" if name == "SIGKILL" else "onnxruntime failed on the model or on one made of it"
    sys.stderr.write(
        f"onnxq: the process was ended by {name}, most likely because {cause}; no unfinished file is left\n"
    )
    sys.exit(_BAD_INPUT)
