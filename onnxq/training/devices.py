"""The device that trains: the one that a user names, else the one whose training steps are the fastest."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from onnxq.errors import OnnxqError, SchemeError

# Timed steps of a device; the fastest counts. The first step of a device loads kernels and is not timed.
_STEPS = 3
# A device is given up if its first step takes this many times the fastest step of another.
_HOPELESS = 5.0

Step = Callable[[], object]
"""A training step that has ended when it returns, also on a device that runs beside Python."""


@dataclass(frozen=True)
class StepTime:
    """How long a training step takes on a device.

    Attributes:
        device: name of the device, as torch has it.
        seconds: time of the fastest step; infinite if the device cannot train the model.
        reason: why it cannot; empty otherwise.
    """

    device: str
    seconds: float
    reason: str = ""

    def __str__(self) -> str:
        """Return the time in words, or the reason without one."""
        return self.reason or f"{1e3 * self.seconds:.3g} ms"


def available_devices() -> tuple[str, ...]:
    """Return the names of the devices to choose from; the processor is the last one.

    >>> available_devices()[-1]
    'cpu'
    """
    return (*(("cuda",) if torch.cuda.is_available() else ()), "cpu")


def torch_device(name: str) -> torch.device:
    """Return the device of a name.

    Raises:
        SchemeError: torch has no such device.

    >>> torch_device("cpu")
    device(type='cpu')
    """
    try:
        found = torch.device(name)
        # A device without memory, such as meta, returns no values.
        torch.zeros(1, device=found).cpu()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise SchemeError(f"torch has no device {name!r} here ({reason}); take cpu, or leave it out") from error
    return found


def time_devices(
    names: Sequence[str], start: Callable[[str], Step], clock: Callable[[], float] = time.perf_counter
) -> tuple[StepTime, ...]:
    """Time training steps on devices.

    Args:
        names: the devices.
        start: moves the model to a device and returns its training step.
        clock: returns the time in seconds.

    Returns:
        The times, fastest device first. A device that fails, for example without enough memory, comes last.

    >>> time_devices(["cpu"], lambda name: lambda: None)[0].device
    'cpu'
    """
    found: list[StepTime] = []
    for name in names:
        fastest = min((one.seconds for one in found), default=math.inf)
        try:
            found.append(StepTime(name, _fastest_step(start(name), clock, _HOPELESS * fastest)))
        except (OnnxqError, RuntimeError) as error:
            found.append(StepTime(name, math.inf, " ".join(str(error).split()) or type(error).__name__))
    # Of equal times, the processor's is taken, which needs no copies.
    return tuple(sorted(found, key=lambda one: (one.seconds, one.device != "cpu")))


def _fastest_step(step: Step, clock: Callable[[], float], limit: float) -> float:
    first = _timed(step, clock)
    return first if first > limit else min(_timed(step, clock) for _ in range(_STEPS))


def _timed(step: Step, clock: Callable[[], float]) -> float:
    start = clock()
    step()
    return clock() - start


def describe_times(times: Sequence[StepTime]) -> str:
    """Return which device was chosen and the times of all, in words.

    >>> describe_times([StepTime("cpu", 0.031), StepTime("cuda", 0.24)])
    'cpu (31 ms a step; cuda: 240 ms)'
    """
    first, *others = times
    return f"{first.device} ({'; '.join([f'{first} a step', *(f'{one.device}: {one}' for one in others)])})"
