"""Run the program in a child process, so that a crash inside a native library ends in a sentence."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable

_BAD_INPUT = 2
_ASKED_TO_STOP = frozenset({"SIGHUP", "SIGINT", "SIGPIPE", "SIGTERM"})


def run_isolated(program: Callable[[], None]) -> None:
    """Run a program in a child process and exit with its code; a signal that kills it becomes a sentence and code 2.

    Call it before anything starts threads. Where processes cannot be forked the program runs here. The child ends with
    its parent, and signals that ask the parent to stop are passed on.

    Args:
        program: ends by returning or by SystemExit, and prints its own errors.
    """
    if not hasattr(os, "fork"):
        program()
        return
    lifeline, held = os.pipe()
    child = os.fork()
    if not child:
        os.close(held)
        threading.Thread(target=_end_with_parent, args=(lifeline,), daemon=True).start()
        program()
        return
    os.close(lifeline)
    # The terminal tells both processes of Ctrl-C, and the child answers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for asked in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(asked, lambda number, frame: os.kill(child, number))
    _, status = os.waitpid(child, 0)
    _exit_as(os.waitstatus_to_exitcode(status))


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
    sys.stderr.write(f"onnxq: the process was ended by {name}, most likely because {cause}; nothing was written\n")
    sys.exit(_BAD_INPUT)
