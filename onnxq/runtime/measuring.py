"""Which engine measures for a target; others than onnxruntime in this process are loaded when they are needed."""

from __future__ import annotations

from onnxq.errors import EngineError
from onnxq.runtime.engine import Engine
from onnxq.runtime.targets import DEFAULT_TARGET, Target

DEFAULT_ENGINE = "onnxruntime"
"""The engine that onnxq itself runs on."""


def engine_of(target: Target, asked: str = "", threads: int | None = None) -> tuple[Engine | None, str]:
    """Start the engine that measures for a target; one that was asked for may still be starting.

    Args:
        target: a runtime that is planned for.
        asked: the engine to use; an empty text leaves that to the target.
        threads: how many an operator is given; None leaves that to the engine.

    Returns:
        The engine, None where it is onnxruntime in this process or is not there; and in the last case why.

    Raises:
        EngineError: the engine that was asked for is not installed.
    """
    if target.name == DEFAULT_TARGET and asked in ("", DEFAULT_ENGINE):
        return None, ""
    if asked == DEFAULT_ENGINE:
        return None, f"onnxruntime in this process is not {target.name}; give --engine python:PATH where it is"
    from onnxq.runtime.table import open_engine, starting

    if asked:
        return starting(asked, threads), ""
    if not target.engine:
        return None, f"no engine runs {target.name} on this machine; give --engine ssh:HOST where one does"
    try:
        return open_engine(target.engine, threads), ""
    except EngineError as error:
        return None, str(error)


def times_tell(target: Target, engine: Engine | None) -> bool:
    """Return whether times are the target's: those of an engine for it, or of onnxruntime in this process."""
    return engine is not None or target.name == DEFAULT_TARGET
