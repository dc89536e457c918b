"""What a pass is: a frozen dataclass whose fields are its options and whose ``apply`` edits a graph in place."""

from __future__ import annotations

import reprlib
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields

from onnxq.errors import OnnxqError, PassError
from onnxq.ir.graph import Graph, restore_classes

_OURS = __name__.partition(".")[0]
_SHOWN = 100


@dataclass(frozen=True)
class Changes:
    """What a pass did.

    Attributes:
        changed: names of the nodes or tensors it changed, made or removed; empty when it changed nothing.
        skipped: names of what it looked at and left as it was, each with the reason.
        failed: names of its parts that failed and were skipped, each with what happened.

    Raises:
        TypeError: a name is no text, or text stands where a tuple of names should.
    """

    changed: tuple[str, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()
    failed: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        pairs = (
            text
            for one in (*self.skipped, *self.failed)
            for text in (one if isinstance(one, tuple) and len(one) == 2 else (None,))
        )
        if isinstance(self.changed, str) or not all(isinstance(text, str) for text in (*self.changed, *pairs)):
            raise TypeError("Changes takes a tuple of names, and tuples of pairs of name and reason")

    def __bool__(self) -> bool:
        return bool(self.changed)


@dataclass(frozen=True)
class Pass(ABC):
    """A step of a pipeline; a subclass is one module with one public class named verb and object.

    One that has options is a frozen dataclass, whose fields they are.
    Applied a second time a pass changes nothing.
    """

    @abstractmethod
    def apply(self, graph: Graph) -> Changes:
        """Edit ``graph`` and its bodies in place and say what changed and what was left."""

    def options(self) -> dict[str, object]:
        """Return the options of this pass by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True)
class PassResult:
    """A pass that was applied, and what came of it.

    Attributes:
        step: the pass.
        changes: what it changed and left.
        seconds: the time it took.
    """

    step: Pass
    changes: Changes
    seconds: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.changes)

    def to_dict(self) -> dict[str, object]:
        """Return plain values for JSON: of long lists their length and beginning."""
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
    """Passes that are applied in order.

    Attributes:
        passes: the passes; a user's own subclass of Pass is as good as any.
    """

    passes: tuple[Pass, ...]

    def apply(self, graph: Graph) -> tuple[PassResult, ...]:
        """Apply every pass to ``graph`` in place and return what each changed and left.

        Plain GraphSurgeon objects that a pass puts into the graph take our classes before the next one sees them.

        Raises:
            PassError: a pass that is not onnxq's own fails, which is the cause of the error, or returns no Changes.
            OnnxqError: a pass refuses the graph, or leaves what is no node or tensor in it; the message names the pass.
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
            # A fault of ours is no bad input of the user's.
            raise
        raise PassError(f"pass {name} raised {type(error).__name__}: {error}; correct it, or leave it out") from error
    if not isinstance(changes, Changes):
        raise PassError(
            f"pass {name} returned {type(changes).__name__}, expected onnxq.Changes; return Changes() where nothing "
            "was changed"
        )
    return PassResult(step, changes, time.perf_counter() - start)
