"""Models that an engine loads ahead, while something else is done: asked again, it takes less time."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from onnxq.errors import EngineError
from onnxq.runtime.engine import Engine
from onnxq.system.plugins import wrap_plugin_errors


class Ahead:
    """An engine that starts, and then loads one model after the other.

    Args:
        engine: the engine; None does nothing.
        loads: whether it loads models, or only starts.
    """

    def __init__(self, engine: Engine | None, *, loads: bool = True) -> None:
        self._engine, self._worker = engine if loads else None, ThreadPoolExecutor(1)
        self._begun = [self._worker.submit(engine.started)] if engine is not None else list[Future[None]]()

    def load(self, model: Path) -> None:
        """Begin to load a model; see `check` for one that is refused."""
        if self._engine is not None:
            self._begun.append(self._worker.submit(_loaded, self._engine, model))

    def expect(self, model: Path) -> None:
        """Begin to load a model that is going to be profiled, if the engine does that; what it refuses is told then."""
        if self._engine is not None:
            self._worker.submit(_expected, self._engine, model)

    def check(self, *, wait: bool = True) -> None:
        """Tell what the engine has refused.

        Args:
            wait: whether to wait until all is loaded, rather than to tell what is known.

        Raises:
            EngineError: the engine does not start, or does not load a model.
        """
        for one in self._begun:
            if wait or one.done():
                one.result()


def _loaded(engine: Engine, model: Path) -> None:
    with wrap_plugin_errors(f"engine {engine.name!r}", EngineError):
        engine.load(model).close()


def _expected(engine: Engine, model: Path) -> None:
    if engine.profiles:
        _loaded(engine, model)
