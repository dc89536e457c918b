"""How much is tried for accuracy, and which methods."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from onnxq.errors import SchemeError, nearest

METHODS = ("ranges", "migration", "compensation", "bias")
"""Every method, in the order in which they are tried: what each finds, the next ones build on."""


@dataclass(frozen=True)
class Accuracy:
    """How much is tried for accuracy.

    Attributes:
        methods: which of METHODS are tried.
        models: most models that each method builds and runs.
        seconds: after which no further model is built.
    """

    methods: tuple[str, ...] = METHODS
    models: int = 8
    seconds: float = 60.0


OFF = Accuracy(methods=(), models=0, seconds=0.0)
"""Codes as the scheme says, whatever data says."""

FAST = Accuracy()
"""A few models a method."""

FULL = Accuracy(models=64, seconds=1_800.0)
"""As many models as pay."""

ACCURACIES: Mapping[str, Accuracy] = MappingProxyType({"off": OFF, "fast": FAST, "full": FULL})
"""Efforts by name."""


def accuracy_named(text: str) -> Accuracy:
    """Return the effort that a text names: a row of ACCURACIES, or methods, separated by commas, with all effort.

    Raises:
        SchemeError: no such effort or method; the message suggests the nearest one.

    >>> accuracy_named("fast").models, accuracy_named("migration,bias").methods
    (8, ('migration', 'bias'))
    """
    if text in ACCURACIES:
        return ACCURACIES[text]
    wanted = tuple(part.strip() for part in text.split(","))
    for name in wanted:
        if name not in METHODS:
            known = (*ACCURACIES, *METHODS)
            raise SchemeError(f"accuracy {name!r} is not one of {', '.join(known)}{nearest(name, known)}")
    return Accuracy(tuple(method for method in METHODS if method in wanted), FULL.models, FULL.seconds)
