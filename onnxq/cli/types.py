"""Types of options: files, numbers, and names with completion and a list. Heavy imports wait for their first use."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
from click.shell_completion import CompletionItem

from onnxq.errors import ModelError

LIST = "list"
"""The value of an option that prints all its names."""

FILE = click.Path(path_type=Path)
"""A file or folder."""


class _ModelPath(click.Path):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(value)
        if not path.exists():
            raise ModelError(f"{path} does not exist; give the path of an .onnx file")
        return path


MODEL = _ModelPath()
"""The model of commands that also need samples: a missing model is reported before missing samples."""

COUNT = click.IntRange(min=1)
"""A whole number of 1 or more."""


class FiniteRange(click.FloatRange):
    """A number between limits; NaN and infinity are refused."""

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        """Return the number."""
        number = super().convert(value, parameter, context)
        if not math.isfinite(number):
            self.fail(f"expected a finite number, found {value}", parameter, context)
        return number


ABOVE_ZERO, FROM_ZERO = FiniteRange(min=0, min_open=True), FiniteRange(min=0)


def parsed(parse: Callable[[str], Any], expected: str) -> Callable[[str], Any]:
    """Return the type of an option whose text a function parses; `expected` says in an error how it is written."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except (ValueError, ArithmeticError):
            raise click.BadParameter(f"expected {expected}, found {text!r}") from None

    return convert


class Named(click.ParamType[str]):
    """The type of options that take a name from a table, with completion; ``list`` prints the table.

    Attributes:
        names: returns the names, with descriptions if there are any; called at the first need.
    """

    name = "name"

    def __init__(self, names: Callable[[], Mapping[str, str] | Iterable[str]]) -> None:
        self.names = names

    def _rows(self) -> Iterable[tuple[str, str]]:
        names = self.names()
        return names.items() if isinstance(names, Mapping) else ((name, "") for name in names)

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> str:
        """Return the text unchanged, because it is looked up at its use; for ``list``, print the table and exit."""
        if value == LIST and context is not None and not context.resilient_parsing:
            for name, description in self._rows():
                click.echo(f"{name}\t{description}" if description else name)
            context.exit()
        return str(value)

    def shell_complete(self, context: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the names with this prefix."""
        rows = ((name, description or None) for name, description in self._rows() if name.startswith(incomplete))
        return [CompletionItem(name, help=description) for name, description in rows]


class NodeName(click.ParamType[str]):
    """The type of an argument that names a node of the model before it, with completion."""

    name = "node"

    def shell_complete(self, context: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the node names with this prefix; none if the model cannot be read."""
        from onnxq.errors import OnnxqError
        from onnxq.ir import all_nodes, load

        try:
            nodes = [node for _, node in all_nodes(load(context.params["model"]))]
        except (KeyError, TypeError, OnnxqError):
            return []
        return [
            CompletionItem(node.name, help=node.op) for node in nodes if node.name and node.name.startswith(incomplete)
        ]


def _presets() -> Mapping[str, str]:
    from onnxq.config.presets import DESCRIPTIONS

    return DESCRIPTIONS


def _targets() -> Iterable[str]:
    from onnxq.runtime.targets import TARGETS

    return tuple(TARGETS)


def _ranges() -> Iterable[str]:
    from onnxq.calibration.methods import CALIBRATION_METHODS, ENTRY_POINTS
    from onnxq.system.plugins import registered_names

    return (*CALIBRATION_METHODS, *registered_names(ENTRY_POINTS))


def _efforts() -> Iterable[str]:
    from onnxq.config.effort import ACCURACIES, METHODS

    return (*ACCURACIES, *METHODS)


def _engines() -> Iterable[str]:
    from onnxq.runtime.engines import engine_names

    return engine_names()


def _preferences() -> Iterable[str]:
    from onnxq.evaluation.goal import PREFERENCES

    return PREFERENCES


def _passes() -> Mapping[str, str]:
    from onnxq.passes.preparing.named_passes import passes_by_name

    return {name: (inspect.getdoc(step) or "").partition("\n")[0] for name, step in passes_by_name().items()}


PRESET, TARGET, RANGE, EFFORT = Named(_presets), Named(_targets), Named(_ranges), Named(_efforts)
ENGINE, PASS, PREFERENCE = Named(_engines), Named(_passes), Named(_preferences)

VALUES: Mapping[str, click.ParamType[Any]] = MappingProxyType({"PATH": FILE, "COUNT": COUNT, "NAME[:PLACE]": ENGINE})
"""Types by the value that the help shows."""
