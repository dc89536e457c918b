"""How much is tried for accuracy, by which methods, and how much a search measures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from onnxq.errors import SchemeError, check_name, unknown_name

METHODS = ("ranges", "equalization", "awq", "gptq")
"""Every method, in the order in which they are tried; each builds on the result of the previous ones."""

_BIASES = "all biases make up for rounded weights"
_DROPPED_METHODS: Mapping[str, str] = MappingProxyType(
    {
        "bias": _BIASES,
        "bias-correction": _BIASES,
        "embeddings": "a search gives embeddings the bits that the goal needs",
    }
)
# Number of samples that compare methods, since each costs time in every trial. With full effort it is a quarter of all
# samples, up to 64, because 16 samples reject some helpful methods by chance: a small ResNet has 40.7 dB, not 41.9.
_EVALUATION_SAMPLES, _PART, _MOST_EVALUATION_SAMPLES = 16, 4, 64


@dataclass(frozen=True)
class AccuracyEffort:
    """How much is tried for accuracy.

    Attributes:
        methods: which of METHODS are tried.
        thorough: whether they are tried even if the goal is reached without them, and compared on more samples.
        gptq_bits: the most bits of weights that GPTQ rounds.
    """

    methods: tuple[str, ...] = METHODS
    thorough: bool = False
    # Weights of 4 bits gain several decibels; those of 8 bits take as much time and gain little.
    gptq_bits: int = 4

    def evaluation_samples(self, samples: int) -> int:
        """Return the number of samples that compare methods.

        >>> [FAST.evaluation_samples(512), *map(FULL.evaluation_samples, (512, 100, 3))]
        [16, 64, 25, 3]
        """
        share = min(samples // _PART, _MOST_EVALUATION_SAMPLES) if self.thorough else 0
        return min(samples, max(_EVALUATION_SAMPLES, share))


OFF = AccuracyEffort(methods=())
"""The scheme's own encodings."""

FAST = AccuracyEffort()
"""As many methods as the goal needs."""

FULL = AccuracyEffort(thorough=True, gptq_bits=8)
"""Every method that lowers the error."""

ACCURACIES: Mapping[str, AccuracyEffort] = MappingProxyType({"off": OFF, "fast": FAST, "full": FULL})
"""Efforts by name."""


def check_not_dropped(method: str) -> None:
    """Refuse the name of a method that is no choice any more.

    Raises:
        SchemeError: the method is no choice any more, and the message says why.
    """
    if method in _DROPPED_METHODS:
        raise SchemeError(f"accuracy {method!r} is not a choice any more: {_DROPPED_METHODS[method]}; leave it out")


def accuracy_named(text: str) -> AccuracyEffort:
    """Return the effort that a text names: a row of ACCURACIES, or methods, separated by commas, with all effort.

    Raises:
        SchemeError: no such effort or method; the message suggests the nearest one.

    >>> accuracy_named("fast").thorough, accuracy_named("gptq,equalization").methods
    (False, ('equalization', 'gptq'))
    """
    if text in ACCURACIES:
        return ACCURACIES[text]
    wanted = tuple(part.strip() for part in text.split(","))
    for name in wanted:
        check_not_dropped(name)
        if name not in METHODS:
            raise SchemeError(unknown_name("accuracy", name, (*ACCURACIES, *METHODS)))
    return replace(FULL, methods=tuple(method for method in METHODS if method in wanted))


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Attributes:
        sensitivity: runs for measuring the quantization error: as many as the float model makes in so many times the
            time in which a process runs it over the samples; shared by what nodes can be.
        tried: plans whose models are built to find the fastest that is faithful.
        grown: plans that are tried between two of these, to let more nodes be integers after all.
        timed: plans of the frontier that are timed beside the float model.
        seconds: after which nothing more is tried.
        processes: the same, in times that a process takes to run the float model over the samples: some models take a
            hundred times as long to load as to run.
    """

    sensitivity: float
    tried: int
    grown: int
    timed: int
    seconds: float
    processes: float = math.inf


EFFORTS: Mapping[str, Effort | None] = MappingProxyType(
    {
        "off": None,
        "fast": Effort(sensitivity=2.0, tried=7, grown=4, timed=2, seconds=75.0, processes=40.0),
        "full": Effort(sensitivity=80.0, tried=60, grown=200, timed=12, seconds=3_600.0),
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
