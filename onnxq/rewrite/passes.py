"""Passes: frozen dataclasses whose fields are their options, and the pipeline that applies them in order."""

from __future__ import annotations

import reprlib
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from onnxq.errors import OnnxqError, PassError
from onnxq.ir.graph import Graph, restore_classes
from onnxq.system.plugins import describe_error

_OURS = __name__.partition(".")[0]
_SHOWN = 100


@dataclass(frozen=True)
class Changes:
    """Result of a pass.

    Attributes:
        changed: names of the nodes or tensors that it changed, made or removed; empty if it changed nothing.
        skipped: name and reason of each candidate that it left.
        failed: name and error of each part that raised, such as one rule of a set.
        counts: of rules the number of applications of each, by class name.

    Raises:
        TypeError: A name is not a string, or a field is not a tuple of names or of pairs.

    >>> Changes(("Conv_0",)).changed
    ('Conv_0',)
    """

    changed: tuple[str, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()
    failed: tuple[tuple[str, str], ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        pairs = (
            text
            for entry in (*self.skipped, *self.failed)
            for text in (entry if isinstance(entry, tuple) and len(entry) == 2 else (None,))
        )
        if isinstance(self.changed, str) or not all(isinstance(text, str) for text in (*self.changed, *pairs)):
            raise TypeError("Changes takes a tuple of names, and tuples of pairs of name and reason")

    def __bool__(self) -> bool:
        return bool(self.changed)


@dataclass(frozen=True)
class Pass(ABC):
    """A step of a pipeline. Its options are the fields of a frozen dataclass.

    A pass is idempotent: a second application changes nothing.

    >>> from onnxq.passes import FoldConstants
    >>> FoldConstants(largest=1000).largest
    1000
    """

    @abstractmethod
    def apply(self, graph: Graph) -> Changes:
        """Edit ``graph`` and its subgraphs in place, and report the changes."""

    def options(self) -> dict[str, object]:
        """Return the options by name."""
        return {option.name: getattr(self, option.name) for option in fields(self)}


@dataclass(frozen=True)
class PassResult:
    """A pass and its result."""

    step: Pass
    changes: Changes
    seconds: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.changes)

    def to_dict(self) -> dict[str, object]:
        """Return plain values for JSON; of long lists their length and the first 100 entries."""
        changed, skipped = self.changes.changed, self.changes.skipped
        return {
            "pass": type(self.step).__name__,
            "options": {name: reprlib.repr(value) for name, value in self.step.options().items()},
            "seconds": self.seconds,
            "changed": len(changed),
            "changed_names": list(changed[:_SHOWN]),
            "skipped": len(skipped),
            "skipped_names": [list(pair) for pair in skipped[:_SHOWN]],
            "failed": [list(pair) for pair in self.changes.failed],
        }


@dataclass(frozen=True)
class Pipeline:
    """Apply passes in order.

    Attributes:
        passes: the passes; they may be instances of a user's subclasses of `Pass`.

    >>> import onnxq
    >>> [one.step for one in Pipeline((onnxq.passes.NameNodes(),)).apply(onnxq.load("models/gru.onnx"))]
    [NameNodes()]
    """

    passes: tuple[Pass, ...]

    def apply(self, graph: Graph) -> tuple[PassResult, ...]:
        """Apply every pass to ``graph`` in place and return the result of each.

        Plain GraphSurgeon objects that a user's pass adds are converted to onnxq's classes before the next pass.

        Raises:
            PassError: A user's pass raises, or returns no `Changes`.
            OnnxqError: A pass refuses the graph, or leaves an invalid object in it. The message names the pass.
        """
        return tuple(_apply(step, graph) for step in self.passes)


def _is_ours(step: Pass) -> bool:
    return type(step).__module__.partition(".")[0] == _OURS


def _apply(step: Pass, graph: Graph) -> PassResult:
    if not isinstance(step, Pass):
        raise PassError(f"{step!r} is no pass, expected an instance of a subclass of onnxq.Pass")
    name = type(step).__name__
    start = time.perf_counter()
    try:
        changes = step.apply(graph)
        if not _is_ours(step):
            restore_classes(graph)
    except OnnxqError as error:
        error.args = (f"pass {name}: {error}",)
        raise
    except Exception as error:
        if _is_ours(step):
            # A bug in onnxq is not an input error, so it keeps its type.
            raise
        raise PassError(f"pass {name} raised {describe_error(error)}; correct it, or leave it out") from error
    if not isinstance(changes, Changes):
        raise PassError(
            f"pass {name} returned {type(changes).__name__}, expected onnxq.Changes; return Changes() where nothing "
            "was changed"
        )
    return PassResult(step, changes, time.perf_counter() - start)
