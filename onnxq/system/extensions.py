"""What users add: objects that installed packages register as entry points, and those of a module or a file."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from onnxq.errors import OnnxqError, SchemeError, nearest


def registered_names(group: str) -> list[str]:
    """Return the names that installed packages offer in a group of entry points."""
    return [entry.name for entry in entry_points(group=group)]


def registered(group: str, name: str, what: str) -> Callable[..., Any] | None:
    """Return what an installed package offers under a name; None where none does.

    Raises:
        SchemeError: It is there and cannot be loaded, or is None; `what` begins the sentence, as in "Range method".
    """
    for entry in entry_points(group=group, name=name):
        try:
            found: Callable[..., Any] = entry.load()
        except (ImportError, AttributeError) as error:
            raise SchemeError(
                f"{what} {name!r} of {entry.value} cannot be loaded: {error}; install its package again"
            ) from error
        except Exception as error:
            raise SchemeError(
                f"{what} {name!r} of {entry.value} cannot be loaded: {type(error).__name__}: {error}; correct its "
                "package, or uninstall it"
            ) from error
        if found is None:
            raise SchemeError(f"{what} {name!r} of {entry.value} is None there; correct its package, or uninstall it")
        return found
    return None


@contextmanager
def blamed(what: str | Callable[[], str], kind: type[OnnxqError] = SchemeError) -> Iterator[None]:
    """Tell what goes wrong inside as a failure of what a user has added.

    Args:
        what: begins the sentence and names it, as in "source 'raw'"; a function is called when something goes wrong.
        kind: of the error.

    >>> with blamed("source 'raw'"):
    ...     {}["rows"]
    Traceback (most recent call last):
    onnxq.errors.SchemeError: source 'raw' failed: KeyError: 'rows'; correct it, or do without it
    """
    try:
        yield
    except OnnxqError:
        raise
    except Exception as error:
        told = what if isinstance(what, str) else what()
        raise kind(f"{told} failed: {type(error).__name__}: {error}; correct it, or do without it") from error


def imported(place: str, what: str, known: Iterable[str] = ()) -> ModuleType:
    """Return the module that a user names, which is imported: code that the user asks to run.

    Args:
        place: the name of a module, or the path of a ``.py`` file.
        what: begins the sentence of an error, as in "metric 'scores.py:best'".
        known: names that the user may have meant instead of a module.

    Raises:
        SchemeError: there is no such module or file, or it fails while it is imported.
    """
    if place.endswith(".py"):
        return _module_of_file(Path(place), what)
    try:
        return importlib.import_module(place)
    except (Exception, SystemExit) as error:
        hint = nearest(place, known)
        raise SchemeError(f"{what} cannot be imported: {type(error).__name__}: {error}{hint}") from error


def _module_of_file(path: Path, what: str) -> ModuleType:
    if not path.is_file():
        raise SchemeError(f"{what} cannot be imported: there is no file {path}")
    # The name is one that no module has.
    module = ModuleType(f"onnxq extension {path}")
    module.__file__ = str(path)
    # Dataclasses look their module up while it is still being run.
    sys.modules[module.__name__] = module
    try:
        # The import system would leave compiled code in the user's folder.
        exec(compile(path.read_bytes(), path, "exec"), vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[module.__name__]
        raise SchemeError(f"{what} cannot be imported: {type(error).__name__}: {error}") from error
    return module
