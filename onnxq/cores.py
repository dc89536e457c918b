"""How many cores there are to work with."""

from __future__ import annotations

import os


def available_cores() -> int:
    """Return how many cores this process may use, which not every system says of each process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
