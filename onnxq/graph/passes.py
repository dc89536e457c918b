"""What a pass is: a frozen dataclass whose fields are its options and whose ``apply`` edits a graph in place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields

from onnxq.graph.model import Graph


@dataclass(frozen=True)
class Changes:
    """What a pass did.

    Attributes:
        changed: names of the nodes or tensors it changed, made or removed; empty when it changed nothing.
        left: names of what it looked at and left, each with the reason.
    """

    changed: tuple[str, ...] = ()
    left: tuple[tuple[str, str], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.changed)


@dataclass(frozen=True)
class Pass(ABC):
    """A step of a pipeline; a subclass is one module with one public class named verb and object.

    Applied a second time a pass changes nothing.
    """

    @abstractmethod
    def apply(self, graph: Graph) -> Changes:
        """Edit ``graph`` and its bodies in place and say what changed and what was left."""

    def options(self) -> dict[str, object]:
        """Return the options of this pass by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True)
class Pipeline:
    """Passes that are applied in order.

    Attributes:
        passes: the passes; a user's own subclass of Pass is as good as any.
    """

    passes: tuple[Pass, ...]

    def apply(self, graph: Graph) -> tuple[tuple[Pass, Changes], ...]:
        """Apply every pass to ``graph`` in place and return what each changed and left."""
        return tuple((step, step.apply(graph)) for step in self.passes)
