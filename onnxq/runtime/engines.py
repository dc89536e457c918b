"""Engines by name, built-in and from installed packages, and the engine that measures for a target."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from types import MappingProxyType
from typing import Self

from onnxq.errors import EngineError, unknown_name
from onnxq.runtime.child import ChildEngine, backend_source, python_program
from onnxq.runtime.engine import Engine, OnnxRuntime, is_in_process
from onnxq.runtime.node import node_engine
from onnxq.runtime.targets import DEFAULT_TARGET, Target
from onnxq.system.plugins import load_registered, registered_names, wrap_plugin_errors

DEFAULT_ENGINE = "onnxruntime"
"""The engine that onnxq itself uses."""

Opener = Callable[[str], Engine]
"""Starts an engine from the text after the colon of its name; empty without a colon."""

ENTRY_POINTS = "onnxq.engines"
"""The entry point group in which packages offer an `Opener`."""


def _here(place: str) -> Engine:
    if place:
        raise EngineError(
            f"engine onnxruntime takes no {place!r}; write python:{place} for that of another environment"
        )
    return OnnxRuntime()


def _served(backend: str, name: str, arguments: tuple[str, ...], place: str) -> Engine:
    """Start an engine whose file is ``serve_BACKEND.py``, in a Python that has its module: BACKEND up to a ``_``."""
    module = backend.partition("_")[0]
    if not place and find_spec(module) is None:
        raise EngineError(
            f"engine {name} is not installed; pip install 'onnxq[{module}]', or give {name}:/path/to/python"
        )
    program = python_program(place or sys.executable, backend_source(f"serve_{backend}"), *arguments)
    return ChildEngine(name, program)


def _python(place: str) -> Engine:
    if not place:
        raise EngineError("engine python lacks the path of a Python; write python:/path/to/python")
    return ChildEngine(f"python:{place}", python_program(place, backend_source("serve_onnxruntime")))


def _ssh(place: str) -> Engine:
    host, _, python = place.partition(":")
    if not host:
        raise EngineError("engine ssh lacks a host; write ssh:HOST, or ssh:HOST:/path/to/python")
    program = python_program(python or "python3", backend_source("serve_onnxruntime"))
    # After "--", no host can be read as an option.
    command = ("ssh", "-o", "BatchMode=yes", "--", host, shlex.join(program.command))
    engine = ChildEngine(f"ssh:{place}", replace(program, command=command, remote=True))
    engine.host = host
    return engine


_ROWS: Mapping[str, Opener] = {
    # That of this process; "python" serves that of another environment.
    "onnxruntime": _here,
    "openvino-f32": partial(_served, "openvino", "openvino-f32", ("f32",)),
    "onnxruntime-node": partial(node_engine, "onnxruntime-node"),
    "onnxruntime-web": partial(node_engine, "onnxruntime-web"),
    "python": _python,
    "ssh": _ssh,
}
_FILES = (module.name for module in iter_modules([str(Path(__file__).parent)]) if module.name.startswith("serve_"))
_BACKENDS = {name.replace("_", "-"): name for name in (file.removeprefix("serve_") for file in _FILES)}

ENGINES: Mapping[str, Opener] = MappingProxyType(
    {**{name: partial(_served, backend, name, ()) for name, backend in _BACKENDS.items()}, **_ROWS}
)
"""Built-in engines by name. A file ``serve_MODULE.py`` beside this one serves the engine MODULE; it needs no row."""

_REMOVED: Mapping[str, str] = MappingProxyType(
    {"tract": "take openvino, onnxruntime-node, onnxruntime-web, or ssh:HOST where the model will run"}
)
"""Removed engines, and what to take instead."""


def open_engine(text: str, threads: int | None = None) -> Engine:
    """Start an engine and wait for it.

    Args:
        text: a name, and after a colon its location: a Python for ``python`` and ``openvino``, a host for ``ssh``, the
            folder of ``node_modules`` for the npm packages.
        threads: threads of an operator; None leaves the number to the engine.

    Raises:
        EngineError: the engine is unknown, is not installed, or does not start.
    """
    engine = start_engine(text, threads)
    engine.started()
    return engine


def start_engine(text: str, threads: int | None = None) -> Engine:
    """Begin to start an engine, see `open_engine`; `Engine.started` waits for it and raises the errors."""
    name, _, place = text.partition(":")
    opener = ENGINES.get(name) or load_registered(ENTRY_POINTS, name, "engine")
    if opener is None and name in _REMOVED:
        raise EngineError(f"engine {name!r} was removed; {_REMOVED[name]}")
    if opener is None:
        raise EngineError(unknown_name("engine", name, engine_names()))
    with wrap_plugin_errors(f"engine {text!r}", EngineError):
        engine = opener(place)
        if not isinstance(engine, Engine):
            raise TypeError(f"it is {engine!r}, expected an onnxq.runtime.engine.Engine")
    engine.threads = threads or engine.threads
    return engine


def engine_names() -> list[str]:
    """Return the names of all engines, installed or not."""
    return [*ENGINES, *registered_names(ENTRY_POINTS)]


@dataclass(frozen=True, eq=False)
class TargetEngine:
    """The engine that runs and times models for a target; close it after use, as a context manager.

    Attributes:
        engine: None if the target cannot be measured here.
        unmeasured: why; empty if it can.
    """

    engine: Engine | None
    unmeasured: str = ""

    @property
    def elsewhere(self) -> tuple[Engine, ...]:
        """The engine, unless it is onnxruntime in this process."""
        return () if self.engine is None or is_in_process(self.engine) else (self.engine,)

    def caching(self, folder: Path) -> Engine | None:
        """Return the engine; onnxruntime in this process keeps optimized models in a folder."""
        if self.engine is None or not is_in_process(self.engine):
            return self.engine
        return OnnxRuntime(folder, self.engine.threads)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for engine in self.elsewhere:
            engine.close()


def start_engine_for(target: Target, requested: str = "", threads: int | None = None) -> TargetEngine:
    """Start the engine that measures for a target; an engine named by `requested` may still be starting on return.

    Args:
        target: the target of the plan.
        requested: the engine to use; empty takes that of the target.
        threads: threads of an operator; None leaves the number to the engine.

    Raises:
        EngineError: the engine named by `requested` is not installed.
    """
    if target.name == DEFAULT_TARGET and requested in ("", DEFAULT_ENGINE):
        return TargetEngine(OnnxRuntime(threads=threads))
    if requested == DEFAULT_ENGINE:
        reason = f"onnxruntime in this process is not {target.name}; give --engine python:PATH where it is"
        return TargetEngine(None, reason)
    if requested:
        return TargetEngine(start_engine(requested, threads))
    if not target.engine:
        reason = f"no engine runs {target.name} on this machine; give --engine ssh:HOST where one does"
        return TargetEngine(None, reason)
    try:
        return TargetEngine(open_engine(target.engine, threads))
    except EngineError as error:
        return TargetEngine(None, str(error))
