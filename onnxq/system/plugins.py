"""Plugins of users: objects that installed packages register as entry points, and objects of a module or a file."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from sysconfig import get_path
from types import ModuleType
from typing import Any

from onnxq.errors import OnnxqError, SchemeError, did_you_mean

_INSTALLED = {Path(__file__).parent.parent, *(Path(get_path(name)) for name in ("stdlib", "purelib", "platlib"))}


def registered_names(group: str) -> list[str]:
    """Return the names that installed packages register in a group of entry points."""
    return [entry.name for entry in entry_points(group=group)]


def load_registered(group: str, name: str, what: str) -> Callable[..., Any] | None:
    """Return the object that an installed package registers under ``name`` in a group of entry points, or None.

    Raises:
        SchemeError: the object cannot be loaded, or is None. ``what`` begins the message, as in "Calibration method".
    """
    for entry in entry_points(group=group, name=name):
        try:
            registered: Callable[..., Any] = entry.load()
        except (ImportError, AttributeError) as error:
            raise SchemeError(
                f"{what} {name!r} of {entry.value} cannot be loaded: {error}; install its package again"
            ) from error
        except Exception as error:
            raise SchemeError(
                f"{what} {name!r} of {entry.value} cannot be loaded: {type(error).__name__}: {error}; correct its "
                "package, or uninstall it"
            ) from error
        if registered is None:
            raise SchemeError(f"{what} {name!r} of {entry.value} is None there; correct its package, or uninstall it")
        return registered
    return None


def describe_error(error: BaseException) -> str:
    """Return type and message of an error, and the file and line of the user's code in which it arose.

    The user's code is the last file on the way to the error that belongs to no installed package.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _INSTALLED.isdisjoint(Path(frame.filename).parents)]
    # The message of a syntax error has its place.
    place = f" ({own[-1].filename}, line {own[-1].lineno})" if own and not isinstance(error, SyntaxError) else ""
    return f"{type(error).__name__}: {error}{place}"


@contextmanager
def wrap_plugin_errors(what: str | Callable[[], str], kind: type[OnnxqError] = SchemeError) -> Iterator[None]:
    """Raise errors of a plugin's code as errors of class ``kind`` that name the plugin.

    If ``what`` is a function, it is called only after an error.

    >>> with wrap_plugin_errors("source 'raw'"):
    ...     {}["rows"]
    Traceback (most recent call last):
    onnxq.errors.SchemeError: source 'raw' failed: KeyError: 'rows' (...line 2); correct it, or do without it
    """
    try:
        yield
    except OnnxqError:
        raise
    except Exception as error:
        name = what if isinstance(what, str) else what()
        raise kind(f"{name} failed: {describe_error(error)}; correct it, or do without it") from error


def import_plugin(place: str, what: str, names: Iterable[str] = ()) -> ModuleType:
    """Import the module or ``.py`` file that a user names, which runs its code.

    Raises:
        SchemeError: it does not exist, or its import fails. ``what`` begins the message, as in "metric
            'scores.py:best'". The message suggests the closest of the ``known`` names.
    """
    if place.endswith(".py"):
        return _module_of_file(Path(place), what)
    try:
        return importlib.import_module(place)
    except (Exception, SystemExit) as error:
        hint = did_you_mean(place, names)
        raise SchemeError(f"{what} cannot be imported: {type(error).__name__}: {error}{hint}") from error


def _module_of_file(path: Path, what: str) -> ModuleType:
    if not path.is_file():
        raise SchemeError(f"{what} cannot be imported: there is no file {path}")
    # The name cannot collide with an installed module, because it contains spaces.
    module = ModuleType(f"onnxq extension {path}")
    module.__file__ = str(path)
    # Dataclasses look up their module while it is still being executed.
    sys.modules[module.__name__] = module
    try:
        # The import system would leave compiled code in the user's folder.
        exec(compile(path.read_bytes(), path, "exec"), vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[module.__name__]
        raise SchemeError(f"{what} cannot be imported: {describe_error(error)}") from error
    return module
