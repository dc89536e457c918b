"""The onnxruntime that onnxq itself runs on, in this process."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnxq.errors import ModelError
from onnxq.ir.large_models import is_large
from onnxq.runtime.engine import Engine, LoadedModel
from onnxq.runtime.kernels import Kernel, profile_kernels
from onnxq.runtime.sessions import Array, Session, open_session, output_names, run, runtime_version
from onnxq.system.resources import available_cores


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
