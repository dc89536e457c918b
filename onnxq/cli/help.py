"""Help in groups, options, and several options as one argument of a command."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click

from onnxq.cli.types import VALUES

Command = Callable[..., Any]
Decorator = Callable[[Command], Command]

DATA, WHAT, PASSES, TRAINING, OPTIMIZER = "Data", "Quantization", "Passes", "Training", "Optimizer"
ACCURACY, SPEED, OUTPUT, REPORTS, TYPES = "Accuracy", "Speed", "Output", "Reports", "Operators and types of the model"
CALIBRATION, IMAGES, OTHER = "Calibration", "Images", "Other"
ORDER = (
    *(DATA, WHAT, PASSES, TRAINING, OPTIMIZER, ACCURACY, SPEED),
    *(OUTPUT, REPORTS, TYPES, CALIBRATION, IMAGES, OTHER),
)
"""The groups in the order of the help."""

REMOVED: Mapping[str, str] = MappingProxyType(
    {
        "diff": "plans are text; compare two files of quantize --plan-out with diff or git diff",
        "explain": "write inspect MODEL NODE --report FILE; quantize --dry-run prints the first plan of a float model",
        "plan": "write quantize MODEL --calib SAMPLES --dry-run --plan-out FILE",
        "portability": "compare, bench and verify take --engine; verify names the first node that differs there",
        "presets": "write quantize --preset list",
        "stats": "write calibrate --merge FILES -o FILE; quantize --html shows the ranges of tensors",
        "web-folder": "write quantize FOLDER --calib SAMPLES --dtypes q8,q4",
        "--badge": "verify --json prints the certified accuracy",
        "--cache": "the KV cache stays in float",
        "--jobs": "samples run in threads; calibrate and quantize take --cluster ADDRESS for several machines",
        "--max-candidates": "--time-limit ends a search with the best model so far",
        "--memory": "calibration limits its own memory",
        "--overlay": "quantize --report writes the mode, time and SQNR of every node as JSON, and --html writes a page",
        "--profile-cache": "times are kept in the user's cache folder; --no-cache leaves that out",
        "--resume": "start the run again; its weights are encoded anew",
        "--stats": "calibrate the new samples alone, then write calibrate --merge FILES -o FILE",
        "--strict-types": "models are written in types that onnxruntime loads; --emit qdq writes standard ONNX",
        "--svg": "quantize --html and report write a page with the charts",
    }
)
"""Commands and options of the version before, and what to use instead; the next release drops this table."""

_ALL = "onnxq.help_all"


class GroupedOption(click.Option):
    """An option in a group of the help.

    Attributes:
        is_advanced: True if only ``--help-all`` shows it.
    """

    def __init__(self, *args: Any, group: str = OTHER, advanced: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group, self.is_advanced = group, advanced


def _show_all(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        context.meta[_ALL] = True
        click.echo(context.get_help(), color=context.color)
        context.exit()


class GroupedCommand(click.Command):
    """A command whose help has one section per group; ``--help-all`` also shows advanced options."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if any(isinstance(parameter, GroupedOption) and parameter.is_advanced for parameter in self.params):
            settings: dict[str, Any] = {"is_flag": True, "is_eager": True, "expose_value": False, "callback": _show_all}
            self.params.append(GroupedOption(["--help-all"], help="Show all options and exit.", **settings))

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(context):
            record = parameter.get_help_record(context)
            hidden = isinstance(parameter, GroupedOption) and parameter.is_advanced and not context.meta.get(_ALL)
            # The usage line has the arguments.
            if record is not None and isinstance(parameter, click.Option) and not hidden:
                groups.setdefault(getattr(parameter, "group", OTHER), []).append(record)
        for title in sorted(groups, key=ORDER.index):
            with formatter.section(title):
                formatter.write_dl(groups[title])


class SectionedGroup(click.Group):
    """Commands in sections of the help; each is imported at its first use.

    Attributes:
        sections: titles with the names of their commands, in the order of the help, and the module of each command
            below ``onnxq.cli``.
    """

    sections: Mapping[str, Mapping[str, str]]

    def __init__(self, *args: Any, sections: Mapping[str, Mapping[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sections = sections

    def list_commands(self, context: click.Context) -> list[str]:
        """Return the names of all commands."""
        return sorted(name for names in self.sections.values() for name in names)

    def get_command(self, context: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command; None if the name is unknown."""
        modules = {name: module for names in self.sections.values() for name, module in names.items()}
        if cmd_name not in modules:
            return None
        command: click.Command = getattr(import_module(f"onnxq.cli.{modules[cmd_name]}"), cmd_name)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; refuse what was removed with what to use instead."""
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            raise _removed(error.option_name, error.ctx) or error from None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command of the first argument; refuse a removed or unknown name with what to use instead."""
        from onnxq.errors import did_you_mean

        name, commands = args[0], self.list_commands(ctx)
        if (error := _removed(name, ctx)) is not None:
            raise error
        if name not in commands and not name.startswith("-"):
            raise click.UsageError(f"there is no command {name!r}{did_you_mean(name, commands)}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections, with names in one column across all of them."""
        width = max(map(len, self.list_commands(context)))
        for title, names in self.sections.items():
            with formatter.section(title):
                commands = ((name, self.get_command(context, name)) for name in names)
                formatter.write_dl([(n.ljust(width), c.get_short_help_str(formatter.width)) for n, c in commands if c])


def _removed(name: str, context: click.Context | None) -> click.UsageError | None:
    return click.UsageError(f"{name} was removed: {REMOVED[name]}", context) if name in REMOVED else None


class Option:
    """A decorator that adds an option to a group of a command's help.

    Attributes:
        name: the argument of the command that takes its value.
        names: the flags, and the argument if no flag says it.
    """

    def __init__(self, group: str, flags: str, text: str, **settings: Any) -> None:
        """Declare an option, whose default is shown.

        Args:
            group: the group of the help.
            flags: the flags, the value as the help shows it, and the name of the argument if no flag says it. The
                value says its type if it is one of VALUES or [choices|of|words]; without a value, it is a flag.
            text: what it does, in a sentence.
            settings: of click.option.

        >>> Option(OUTPUT, "-o --output PATH file", "Write this file.").name
        'file'
        """
        words = flags.split()
        self.names = [word for word in words if word.startswith("-") or (word.isidentifier() and word.islower())]
        metavar = next((word for word in words if word not in self.names), None)
        if metavar is None:
            settings["is_flag"] = True
        elif metavar in VALUES:
            settings.setdefault("type", VALUES[metavar])
        elif metavar.startswith("["):
            settings.setdefault("type", click.Choice(metavar[1:-1].split("|")))
        show = settings.get("default", "") != "" and not settings.get("is_flag")
        self._settings = {"group": group, "metavar": metavar, "help": text, "show_default": show, **settings}
        self.name = str(GroupedOption(self.names, **self._settings).name)

    def __call__(self, command: Command) -> Command:
        """Return the command with the option."""
        return click.option(*self.names, cls=GroupedOption, **self._settings)(command)


def packed(argument: str, build: Callable[..., object], *options: Option, also: Sequence[str] = ()) -> Decorator:
    """Return a decorator that adds options to a command and passes them to it as one argument.

    Args:
        argument: name of the argument.
        build: makes the value of the argument from the options' values by name; often a dataclass.
        options: the options, in the order of the help.
        also: arguments of other decorators that `build` takes too, if the command has them.
    """

    def add(command: Command) -> Command:
        @functools.wraps(command)
        def with_value(*args: Any, **kwargs: Any) -> None:
            names = (*(option.name for option in options), *also)
            values = {name: kwargs.pop(name) for name in names if name in kwargs}
            command(*args, **{argument: build(**values)}, **kwargs)

        return with_options(with_value, *options)

    return add


def with_options(command: Command, *options: Decorator) -> Command:
    """Return a command with options, in the given order."""
    for option in reversed(options):
        command = option(command)
    return command


def given_of(*flags: str) -> list[str]:
    """Return the long flags of the options among these that the command line sets, in the order of the help."""
    context = click.get_current_context()
    typed = click.core.ParameterSource.COMMANDLINE
    return [
        parameter.opts[-1]
        for parameter in context.command.params
        if not set(flags).isdisjoint(parameter.opts) and context.get_parameter_source(str(parameter.name)) is typed
    ]


def once(advice: str, default: str | None = None) -> Mapping[str, Any]:
    """Return the settings of an option that may be given only once.

    click would let a second value silently replace the first. The same path counts once.

    Args:
        advice: what to do instead of giving different values.
        default: the value if none is given.
    """

    def the_only(context: click.Context, parameter: click.Parameter, values: tuple[Any, ...]) -> Any:
        if len({os.path.realpath(value) if isinstance(value, Path) else value for value in values}) > 1:
            raise click.UsageError(f"{parameter.opts[0]} is given {len(values)} times, expected once; {advice}")
        return values[0] if values else default

    return MappingProxyType({"multiple": True, "callback": the_only})
