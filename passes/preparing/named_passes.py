"""Passes by name: passes of onnxq, of installed packages, and of any module or file."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, TypeAlias

from onnxq.errors import SchemeError, did_you_mean
from onnxq.rewrite import Pass
from onnxq.system.option_text import format_option, is_option_type, parse_option
from onnxq.system.plugins import describe_error, import_plugin, load_registered, registered_names

ENTRY_POINTS = "onnxq.passes"
"""Group of entry points; each names a subclass of Pass, or a pass."""

Step: TypeAlias = str | Pass
"""A pass, or the text that names one with its options; see `pass_named`."""

_EXPECTED = "NAME, MODULE:CLASS or FILE.py:CLASS, with options as in FoldConstants:largest=1000"


def as_passes(steps: Iterable[Step]) -> tuple[Pass, ...]:
    """Return passes; texts are replaced by the passes that they name.

    Raises:
        SchemeError: a text names no pass, or options that it does not have.
    """
    if isinstance(steps, str | Pass) or not isinstance(steps, Iterable):
        raise SchemeError(f"the passes are {steps!r}, expected a list of passes or of their names")
    return tuple(pass_named(step) if isinstance(step, str) else step for step in steps)


def pass_named(text: str) -> Pass:
    """Return the pass that a text names.

    Args:
        text: the name of a pass of onnxq or of an installed package, ``module:Class``, or ``file.py:Class``, followed
            by any number of ``:option=value``. Values have the type of the option; lists are separated by commas.

    Raises:
        SchemeError: the text names no pass, or options that it does not have.

    >>> pass_named("FoldConstants:largest=1000")
    FoldConstants(largest=1000, growth=None, layouts_only=False)
    """
    name, options = _parts(text)
    step = _resolved(name)
    if isinstance(step, type):
        return _instance(step, name, options)
    if options:
        raise SchemeError(f"pass {name!r} has its options already, expected none; leave out {next(iter(options))!r}")
    return step


def passes_by_name() -> Mapping[str, type[Pass] | Pass]:
    """Return the passes of onnxq that need no plan, and those that installed packages register, by name.

    Raises:
        SchemeError: a registered pass cannot be loaded.
    """
    return {name: _resolved(name) for name in _pass_names()}


def option_texts(step: type[Pass] | Pass) -> Mapping[str, str]:
    """Return the options of a class of passes with their defaults, or those of a pass with their values.

    An option without a default has an empty text.

    >>> from onnxq.passes import FoldConstants
    >>> option_texts(FoldConstants(largest=7))
    {'largest': '7', 'growth': 'none', 'layouts_only': 'false'}
    """
    if isinstance(step, Pass):
        return {name: format_option(value) for name, value in step.options().items()}
    defaults = {option.name: _default(option) for option in fields(step) if option.init}
    return {name: "" if value is MISSING else format_option(value) for name, value in defaults.items()}


def equation_and_purpose(step: type[Pass] | Pass) -> tuple[str, str]:
    """Return the equation and the first sentence in the docstring of a rule or pass; what it lacks is empty.

    >>> from onnxq.passes import DropNoOps
    >>> equation_and_purpose(DropNoOps)
    ('Identity(x) -> x', 'Remove Identity and Dropout.')
    """
    paragraphs = [" ".join(text.split()) for text in (inspect.getdoc(step) or "").split("\n\n")]
    equation = next((text for text in paragraphs if text.startswith("``") and " -> " in text), "")
    purpose = next((text for text in paragraphs if text != equation), "")
    sentence = purpose.partition(". ")[0].rstrip(".")
    return equation.rstrip(".").replace("``", ""), sentence and f"{sentence}."


def _parts(text: str) -> tuple[str, dict[str, str]]:
    """Return the name and the options; a part without ``=`` continues the name or option before it."""
    name: list[str] = []
    options: dict[str, str] = {}
    for part in text.split(":"):
        option, separator, value = part.partition("=")
        if separator and option in options:
            raise SchemeError(f"pass {text!r} has the option {option!r} twice; give it once")
        if separator:
            options[option] = value
        elif options:
            options[list(options)[-1]] += f":{part}"
        else:
            name.append(part)
    return ":".join(name), options


def _pass_names() -> list[str]:
    from onnxq.passes import PASSES

    return [*(name for name, step in PASSES.items() if not _unwritable(step)), *registered_names(ENTRY_POINTS)]


def _resolved(name: str) -> type[Pass] | Pass:
    """Return the pass, or the class of passes, that has a name."""
    from onnxq.passes import GONE, PASSES

    step = PASSES.get(name) or (_of_module(name) if ":" in name else load_registered(ENTRY_POINTS, name, "Pass"))
    if step is None and name in GONE:
        raise SchemeError(f"pass {name!r} is no longer part of onnxq: {GONE[name]}")
    if step is None:
        hint = did_you_mean(name, _pass_names())
        raise SchemeError(f"pass {name!r} is unknown, expected {_EXPECTED}; onnxq run --list shows all names{hint}")
    if not isinstance(step, Pass) and not (isinstance(step, type) and issubclass(step, Pass)):
        raise SchemeError(
            f"pass {name!r} is of type {type(step).__name__}, expected a subclass of onnxq.Pass, or an instance of one"
        )
    return step


def _of_module(name: str) -> Any:
    # A drive letter may stand in front of another colon.
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise SchemeError(f"pass {name!r} is not written as {_EXPECTED}")
    module = import_plugin(place, f"pass {name!r}")
    # Packages may load their names when they are first used.
    if not hasattr(module, attribute):
        held = vars(module).items()
        passes = [each for each, value in held if isinstance(value, type) and issubclass(value, Pass)]
        raise SchemeError(f"pass {name!r} is unknown: {place} holds no {attribute!r}{did_you_mean(attribute, passes)}")
    return getattr(module, attribute)


def _instance(step: type[Pass], name: str, texts: Mapping[str, str]) -> Pass:
    options = {option.name: option for option in fields(step) if option.init}
    if unknown := next((option for option in texts if option not in options), None):
        has = f"its options are {', '.join(options)}" if options else "it has none"
        raise SchemeError(f"pass {name!r} has no option {unknown!r}{did_you_mean(unknown, options)}; {has}")
    if unwritable := _unwritable(step):
        raise SchemeError(
            f"pass {name!r} needs its option {unwritable[0]!r}, which no text can be; make the pass in Python"
        )
    if missing := [option for option in _required(step) if option not in texts]:
        raise SchemeError(f"pass {name!r} needs its option {missing[0]!r}; write {name}:{missing[0]}=VALUE")
    values = {option: _value(text, _kinds(step)[option], name, option) for option, text in texts.items()}
    try:
        return step(**values)
    except Exception as error:
        raise SchemeError(f"pass {name!r} cannot be made: {describe_error(error)}") from error


def _value(text: str, kind: Any, name: str, option: str) -> Any:
    if not is_option_type(kind):
        raise SchemeError(f"option {option!r} of pass {name!r} is of a type that no text can be; make it in Python")
    try:
        return parse_option(text, kind)
    except ValueError as error:
        raise SchemeError(f"option {option!r} of pass {name!r} is {text!r}, {error}") from error


def _required(step: type[Pass]) -> list[str]:
    return [option.name for option in fields(step) if option.init and _default(option) is MISSING]


def _unwritable(step: type[Pass]) -> list[str]:
    """Return the required options that cannot be written as text, such as a plan."""
    return [name for name in _required(step) if not is_option_type(_kinds(step)[name])]


def _default(option: Field[Any]) -> object:
    return option.default_factory() if option.default_factory is not MISSING else option.default


def _kinds(step: type[Pass]) -> Mapping[str, Any]:
    try:
        return typing.get_type_hints(step)
    except (AttributeError, NameError, TypeError):
        # Types that are imported only for type checkers cannot be resolved.
        return {option.name: option.type for option in fields(step)}
