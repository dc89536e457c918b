"""Help in groups: options say which they belong to, and options that name things complete and list them."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
from click.shell_completion import CompletionItem

Command = Callable[..., None]

LIST = "list"
"""What is given to an option that names things to see them all."""


DATA, WHAT, FIDELITY, SPEED, OUTPUT = "Data", "What is quantized", "Fidelity", "Speed", "Output"
PASSES, TRAINING = "Passes", "Training"
CALIBRATION, IMAGES, OTHER = "Calibration", "Images", "Other"
ORDER = (DATA, WHAT, PASSES, TRAINING, FIDELITY, SPEED, OUTPUT, CALIBRATION, IMAGES, OTHER)
"""The groups in the order of the help."""


class GroupedOption(click.Option):
    """An option that stands in a group of the help.

    Attributes:
        group: title of the group.
    """

    def __init__(self, *args: Any, group: str = OTHER, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group


class GroupedCommand(click.Command):
    """A command whose help has one section for each group of its options."""

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(context):
            record = parameter.get_help_record(context)
            # Arguments stand in the line above, and the text tells of them.
            if record is not None and isinstance(parameter, click.Option):
                groups.setdefault(getattr(parameter, "group", OTHER), []).append(record)
        for title in sorted(groups, key=ORDER.index):
            with formatter.section(title):
                formatter.write_dl(groups[title])


class SectionedGroup(click.Group):
    """Commands whose help lists them by what people want of them.

    A command is loaded when it is asked for.

    Attributes:
        sections: titles with the names of the commands under each, in the order of the help, and the modules below
            ``onnxq.cli`` that define these.
    """

    sections: Mapping[str, Mapping[str, str]]

    def __init__(self, *args: Any, sections: Mapping[str, Mapping[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sections = sections

    def list_commands(self, context: click.Context) -> list[str]:
        """Return the names of all commands."""
        return sorted(name for names in self.sections.values() for name in names)

    def get_command(self, context: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command; None where there is none of the name."""
        modules = {name: module for names in self.sections.values() for name, module in names.items()}
        if cmd_name not in modules:
            return None
        found: click.Command = getattr(import_module(f"onnxq.cli.{modules[cmd_name]}"), cmd_name.replace("-", "_"))
        return found

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections; names stand in one column through all of them."""
        width = max(map(len, self.list_commands(context)))
        for title, names in self.sections.items():
            with formatter.section(title):
                commands = ((name, self.get_command(context, name)) for name in names)
                formatter.write_dl([(n.ljust(width), c.get_short_help_str(formatter.width)) for n, c in commands if c])


def option(*names: str, group: str, **settings: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds an option to a group of a command's help."""
    return click.option(*names, cls=GroupedOption, group=group, **settings)


def the_only(context: click.Context, parameter: click.Parameter, given: tuple[Any, ...]) -> Any:
    """Return what a repeatable option was given the one time that it may be given, or None.

    Of two the second would otherwise take the place of the first unsaid. The same path counts once.

    Raises:
        UsageError: it was given other values too.
    """
    if len({os.path.realpath(one) if isinstance(one, Path) else one for one in given}) > 1:
        name = parameter.opts[0]
        raise click.UsageError(f"{name} is given {len(given)} times, expected once; put all samples into one folder")
    return given[0] if given else None


ONCE: Mapping[str, Any] = MappingProxyType({"multiple": True, "callback": the_only})
"""Settings of options that may stand on the command line once, and are refused the second time."""


def with_options(command: Command, *options: Callable[[Command], Command]) -> Command:
    """Return a command with options, in the order in which they are given here."""
    for one in reversed(options):
        command = one(command)
    return command


class Named(click.ParamType[str]):
    """The type of options that take a name of a table: the shell completes it, and ``list`` prints the table.

    Attributes:
        rows: returns the names, each with a line that tells of it, or an empty one; called when it is needed.
    """

    name = "name"

    def __init__(self, rows: Callable[[], Iterable[tuple[str, str]]]) -> None:
        self.rows = rows

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> str:
        """Return the text as it is, which is looked up where it is used; print the table for ``list``."""
        if value == LIST and context is not None and not context.resilient_parsing:
            for name, told in self.rows():
                click.echo(f"{name}\t{told}" if told else name)
            context.exit()
        return str(value)

    def shell_complete(self, context: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the names that begin so."""
        return [CompletionItem(name, help=told or None) for name, told in self.rows() if name.startswith(incomplete)]


class NodeName(click.ParamType[str]):
    """The type of an argument that names a node of the model before it, which the shell completes."""

    name = "node"

    def shell_complete(self, context: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the nodes of the model that begin so; none where it cannot be read."""
        from onnxq.errors import OnnxqError
        from onnxq.ir import all_nodes, load

        try:
            found = [node for _, node in all_nodes(load(context.params["model"]))]
        except (KeyError, TypeError, OnnxqError):
            return []
        return [CompletionItem(one.name, help=one.op) for one in found if one.name and one.name.startswith(incomplete)]


def _presets() -> Iterable[tuple[str, str]]:
    from onnxq.config.presets import DESCRIPTIONS

    return DESCRIPTIONS.items()


def _targets() -> Iterable[tuple[str, str]]:
    from onnxq.runtime.targets import TARGETS

    return ((name, "") for name in TARGETS)


def _ranges() -> Iterable[tuple[str, str]]:
    from onnxq.calibration.methods import CALIBRATION_METHODS, ENTRY_POINTS
    from onnxq.system.plugins import registered_names

    return ((name, "") for name in (*CALIBRATION_METHODS, *registered_names(ENTRY_POINTS)))


def _efforts() -> Iterable[tuple[str, str]]:
    from onnxq.config.effort import ACCURACIES, METHODS

    return ((name, "") for name in (*ACCURACIES, *METHODS))


def _engines() -> Iterable[tuple[str, str]]:
    from onnxq.runtime.engines import engine_names

    return ((name, "") for name in engine_names())


def _passes() -> Iterable[tuple[str, str]]:
    from onnxq.preparing.named_passes import passes_by_name

    return ((name, (inspect.getdoc(step) or "").partition("\n")[0]) for name, step in passes_by_name().items())


PRESET, TARGET, RANGE, EFFORT = Named(_presets), Named(_targets), Named(_ranges), Named(_efforts)
ENGINE, PASS = Named(_engines), Named(_passes)
