"""Engines run models: a runtime of some version in this process, in another process or on another machine."""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from onnxq.errors import EngineError, ModelError
from onnxq.ir.stored_tensors import is_large
from onnxq.runtime.interleaved_timing import Turn, time_interleaved
from onnxq.runtime.kernels import Kernel, profile_kernels
from onnxq.runtime.sessions import Array, Session, open_session, output_names, run, runtime_version
from onnxq.system.plugins import wrap_plugin_errors
from onnxq.system.resources import available_cores


class LoadedModel(ABC):
    """A model that an engine has loaded; `outputs` names its outputs in order."""

    outputs: tuple[str, ...]

    @abstractmethod
    def run(self, sample: Mapping[str, Array]) -> list[Any]:
        """Return the outputs of a sample in order.

        Raises:
            OnnxqError: the run fails.
        """

    def close(self) -> None:  # noqa: B027
        """Release the memory; the model cannot run afterwards."""


class Engine(ABC):
    """A runtime; close it after use, as a context manager or with `close`.

    Attributes:
        name: the name that users write.
        version: the runtime and its version, as in ``openvino 2026.4.1 in f32``; it is shown with every figure.
        profiles: whether it reports the time of each node; otherwise a search times whole models.
        threads: threads of an operator, unless a load names another number; None takes all cores.
        host: the machine that it runs on; empty for this one.
    """

    name: str
    version: str
    profiles: bool = False
    threads: int | None = None
    host: str = ""

    @property
    def place(self) -> str:
        """The version, and the machine if it is another one."""
        return f"{self.version} at {self.host}" if self.host else self.version

    @property
    def threads_given(self) -> int:
        """Number of threads of an operator in this engine, equal for timing and profiling."""
        return self.threads or available_cores()

    @abstractmethod
    def load(self, model: Path, threads: int | None = None) -> LoadedModel:
        """Load a model file.

        Args:
            model: the file; its external data lies beside it.
            threads: threads of an operator; None takes the engine's number, or the runtime's default without one.

        Raises:
            OnnxqError: the runtime refuses the model.
        """

    def load_all(self, models: Sequence[Path], threads: int | None = None) -> list[LoadedModel]:
        """Load model files, in parallel if the runtime can; see `load`.

        Raises:
            OnnxqError: the runtime refuses a model.
        """
        return [self.load(model, threads) for model in models]

    def time(
        self,
        models: Sequence[LoadedModel],
        samples: Sequence[Mapping[str, Array]],
        seconds: float,
        turn: int = 0,
        enough: int | None = None,
    ) -> list[list[Turn]]:
        """Return the seconds of models of this engine for each sample, see `time_interleaved`."""
        return time_interleaved([model.run for model in models], samples, seconds, turn, enough)

    def profile(
        self, model: Path, samples: Sequence[Mapping[str, Array]], folder: Path, repeats: int
    ) -> tuple[Kernel, ...]:
        """Return the time of each kernel of a model with `threads_given` threads, in order of execution.

        Args:
            model: the file.
            samples: each is run ``repeats`` times.
            folder: the runtime may write temporary files here.
            repeats: at least one.

        Raises:
            EngineError: this engine does not report times of nodes.
        """
        raise EngineError(
            f"engine {self.name} does not report the time of each node; use --search off, or another --engine"
        )

    def started(self) -> None:  # noqa: B027
        """Wait until the engine has started and its version is known.

        Raises:
            EngineError: it does not start, or cannot do its task.
        """

    def close(self) -> None:  # noqa: B027
        """End everything that the engine started."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# onnxruntime in this process.


class OnnxRuntime(Engine):
    """onnxruntime's CPU provider in this process.

    Args:
        folder: keeps optimized models, so that a model is loaded faster the second time; None keeps nothing.
        threads: threads of an operator; None takes all cores.
    """

    name = "onnxruntime"
    profiles = True
    _folder: Path | None = None

    def __init__(self, folder: Path | None = None, threads: int | None = None) -> None:
        self.version, self.threads = runtime_version(), threads
        self._folder = folder
        self._optimized: dict[tuple[Path, int], _Copy] = {}

    def load(self, model: Path, threads: int | None = None) -> LoadedModel:
        """Load a model file with all optimizations."""
        threads = threads or self.threads
        if self._folder is None or is_large(model):
            return _Loaded(open_session(model, threads=threads))
        # The file may be overwritten by another model.
        key = model, model.stat().st_mtime_ns
        copy = self._optimized.get(key)
        if copy is not None and (again := copy.load(threads)) is not None:
            return again
        optimized = Path(tempfile.mkdtemp(dir=self._folder)) / "optimized.onnx"
        session = open_session(model, threads=threads, optimized_copy=None if copy is not None else optimized)
        self._optimized.setdefault(key, _Copy(optimized, _inputs(session)))
        return _Loaded(session)

    def load_all(self, models: Sequence[Path], threads: int | None = None) -> list[LoadedModel]:
        """Load model files in parallel, on all available cores."""
        with ThreadPoolExecutor(available_cores()) as pool:
            return list(pool.map(lambda model: self.load(model, threads), models))

    def profile(
        self, model: Path, samples: Sequence[Mapping[str, Array]], folder: Path, repeats: int
    ) -> tuple[Kernel, ...]:
        """Run a model under the profiler."""
        inputs = [dict(sample) for sample in samples]
        return profile_kernels(model, inputs, folder, repeats=repeats, threads=self.threads_given)


@dataclass(frozen=True)
class _Copy:
    """The optimized `file` of a model, with the names of the model's inputs that have no default."""

    file: Path
    inputs: tuple[str, ...]

    def load(self, threads: int | None) -> LoadedModel | None:
        try:
            session = open_session(self.file, threads=threads, optimize=False)
        except ModelError:
            return None
        # An optimized copy of an old model may lack defaults of inputs, which then count as inputs.
        return _Loaded(session) if _inputs(session) == self.inputs else None


def _inputs(session: Session) -> tuple[str, ...]:
    return tuple(entry.name for entry in session.get_inputs())


def is_in_process(engine: Engine) -> bool:
    """Return whether an engine is onnxruntime in this process itself."""
    return type(engine) is OnnxRuntime


class _Loaded(LoadedModel):
    def __init__(self, session: Session) -> None:
        self.session: Session | None = session
        self.outputs = tuple(output_names(session))

    def run(self, sample: Mapping[str, Array]) -> list[Any]:
        return run(self.session, sample)

    def close(self) -> None:
        self.session = None


class Preloader:
    """Starts engines in the background, and then loads one model after the other in each.

    Args:
        engines: the engines.
        loads: whether to load models, or only to start.
    """

    def __init__(self, engines: Sequence[Engine], *, loads: bool = True) -> None:
        self._engines, self._worker = engines if loads else (), ThreadPoolExecutor(1)
        self._begun: list[Future[None]] = [self._worker.submit(engine.started) for engine in engines]

    def load(self, model: Path) -> None:
        """Begin to load a model; `check` raises if an engine refuses it."""
        self._begun += [self._worker.submit(_loaded, engine, model) for engine in self._engines]

    def expect(self, model: Path) -> None:
        """Begin to load a model that will be profiled, if an engine profiles; profiling reports its errors."""
        for engine in self._engines:
            self._worker.submit(_expected, engine, model)

    def check(self, *, wait: bool = True) -> None:
        """Raise the errors of engines' starts and of loads.

        Args:
            wait: whether to wait for all loads; otherwise only those that are done count.

        Raises:
            EngineError: an engine does not start, or does not load a model.
        """
        for process in self._begun:
            if wait or process.done():
                process.result()


def _loaded(engine: Engine, model: Path) -> None:
    with wrap_plugin_errors(f"engine {engine.name!r}", EngineError):
        engine.load(model).close()


def _expected(engine: Engine, model: Path) -> None:
    if engine.profiles:
        _loaded(engine, model)
