"""What runs models: a runtime of some version, here, in another process or on another machine."""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from onnxq.errors import EngineError, ModelError
from onnxq.ir.protos import is_large
from onnxq.runtime.interleaved_timing import Turn, time_interleaved
from onnxq.runtime.kernels import Kernel, profile_kernels
from onnxq.runtime.sessions import Array, Session, open_session, output_names, run, runtime_version
from onnxq.system.plugins import wrap_plugin_errors
from onnxq.system.resources import available_cores


class LoadedModel(ABC):
    """A model that an engine has loaded.

    Attributes:
        outputs: names of its outputs in order.
    """

    outputs: tuple[str, ...]

    @abstractmethod
    def run(self, sample: Mapping[str, Array]) -> list[Any]:
        """Return the outputs of a sample in order.

        Raises:
            OnnxqError: the run fails.
        """

    def close(self) -> None:  # noqa: B027
        """Give its memory back; nothing runs afterwards."""


class Engine(ABC):
    """A runtime. It is closed when it is not needed any more, as a context manager or by `close`.

    Attributes:
        name: the name users write.
        version: the runtime and its version, as in ``openvino 2026.4.1 in f32``, which stands beside every figure.
        profiles: whether it tells what each node takes; a search times whole models where it does not.
        threads: how many an operator is given where a load does not say it; None stands for as many as there are cores.
    """

    name: str
    version: str
    profiles: bool = False
    threads: int | None = None

    @property
    def threads_given(self) -> int:
        """How many threads an operator is given by this engine: what is timed, and what is profiled, has as many."""
        return self.threads or available_cores()

    @abstractmethod
    def load(self, model: Path, threads: int | None = None) -> LoadedModel:
        """Load a model file.

        Args:
            model: the file; its external data lies beside it.
            threads: threads inside an operator; None takes the engine's own number, and leaves it to the runtime where
                there is none.

        Raises:
            OnnxqError: the runtime refuses it.
        """

    def load_all(self, models: Sequence[Path], threads: int | None = None) -> list[LoadedModel]:
        """Load model files, which takes less time than one behind the other where the runtime loads several at once.

        Args:
            models: the files.
            threads: see `load`.

        Raises:
            OnnxqError: the runtime refuses one.
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
        """Return how long each kernel of a model takes in `threads_given`, in order of execution.

        Args:
            model: the file.
            samples: each is run ``repeats`` times.
            folder: where the runtime may write.
            repeats: at least one.

        Raises:
            EngineError: this engine does not tell.
        """
        raise EngineError(f"engine {self.name} does not tell what each node takes; time whole models")

    def started(self) -> None:  # noqa: B027
        """Wait until it has started and knows its version, where that goes on after it was made.

        Raises:
            EngineError: it does not start, or cannot do what it is for.
        """

    def close(self) -> None:  # noqa: B027
        """End what the engine has started."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# The onnxruntime that onnxq itself runs on, in this process.


class OnnxRuntime(Engine):
    """onnxruntime's CPU provider in this process.

    Args:
        folder: where it keeps what its optimisations made of models, so that one that is loaded again is loaded in a
            fraction of the time; None keeps nothing.
        threads: how many an operator is given; None stands for as many as there are cores.
    """

    name = "onnxruntime"
    profiles = True
    _folder: Path | None = None

    def __init__(self, folder: Path | None = None, threads: int | None = None) -> None:
        self.version, self.threads = runtime_version(), threads
        self._folder = folder
        self._optimized: dict[tuple[Path, int], _Copy] = {}

    def load(self, model: Path, threads: int | None = None) -> LoadedModel:
        """Load a model file with all optimisations."""
        threads = threads or self.threads
        if self._folder is None or is_large(model):
            return _Loaded(open_session(model, threads=threads))
        # Another model may take a file's place.
        key = model, model.stat().st_mtime_ns
        copy = self._optimized.get(key)
        if copy is not None and (again := copy.load(threads)) is not None:
            return again
        made = Path(tempfile.mkdtemp(dir=self._folder)) / "optimized.onnx"
        session = open_session(model, threads=threads, optimized_copy=None if copy is not None else made)
        self._optimized.setdefault(key, _Copy(made, _inputs(session)))
        return _Loaded(session)

    def load_all(self, models: Sequence[Path], threads: int | None = None) -> list[LoadedModel]:
        """Load model files at once, on as many cores as there are."""
        with ThreadPoolExecutor(available_cores()) as pool:
            return list(pool.map(lambda model: self.load(model, threads), models))

    def profile(
        self, model: Path, samples: Sequence[Mapping[str, Array]], folder: Path, repeats: int
    ) -> tuple[Kernel, ...]:
        """Run a model under the profiler."""
        given = [dict(sample) for sample in samples]
        return profile_kernels(model, given, folder, repeats=repeats, threads=self.threads_given)


@dataclass(frozen=True)
class _Copy:
    """What optimisations made of a model.

    Attributes:
        file: with all that is optimised.
        inputs: names of the model's own, those with values aside.
    """

    file: Path
    inputs: tuple[str, ...]

    def load(self, threads: int | None) -> LoadedModel | None:
        """Load it, or return None where the runtime has written what it does not read, or reads otherwise."""
        try:
            session = open_session(self.file, threads=threads, optimize=False)
        except ModelError:
            return None
        # Inputs of old models lose values that the optimisations needed no more.
        return _Loaded(session) if _inputs(session) == self.inputs else None


def _inputs(session: Session) -> tuple[str, ...]:
    return tuple(one.name for one in session.get_inputs())


class _Loaded(LoadedModel):
    def __init__(self, session: Session) -> None:
        self.session: Session | None = session
        self.outputs = tuple(output_names(session))

    def run(self, sample: Mapping[str, Array]) -> list[Any]:
        return run(self.session, sample)

    def close(self) -> None:
        self.session = None


class Preloader:
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
