"""How much a search measures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from onnxq.errors import check_name


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Attributes:
        noise: runs for measuring what codes add in noise: as many as the float model makes in so many times the time in
            which a process runs it over the samples; shared by what nodes can be.
        tried: plans whose models are built to find the fastest that is faithful.
        grown: of these, how many may be tried to let more nodes be integers after all.
        timed: plans of the frontier that are timed beside the float model.
        refinements: how often the profile of the winner corrects the costs.
        seconds: after which nothing more is tried.
        processes: the same, in times that a process takes to run the float model over the samples: some models take a
            hundred times as long to load as to run.
        measurements: models that are built and run after which nothing more is tried; unlike seconds they end a search
            where the same one ended before.
    """

    noise: float
    tried: int
    grown: int
    timed: int
    refinements: int
    seconds: float
    measurements: float = math.inf
    processes: float = math.inf


EFFORTS: Mapping[str, Effort | None] = MappingProxyType(
    {
        "off": None,
        "fast": Effort(noise=1.0, tried=8, grown=4, timed=2, refinements=2, seconds=75.0, processes=40.0),
        "full": Effort(noise=80.0, tried=60, grown=200, timed=12, refinements=6, seconds=3_600.0),
    }
)
"""How much each kind of search measures."""


def effort_named(name: str) -> Effort | None:
    """Return the row of EFFORTS called ``name``.

    Raises:
        SchemeError: no such search; the message suggests the nearest one.
    """
    check_name("search", name, EFFORTS)
    return EFFORTS[name]
