"""The onnxruntime that onnxq itself runs on, in this process."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onnxq.engines.engine import Engine, LoadedModel
from onnxq.engines.kernels import Kernel, profile_kernels
from onnxq.runtime import Array, Session, is_large, open_session, output_names, run, runtime_version


class OnnxRuntime(Engine):
    """onnxruntime's CPU provider in this process.

    Args:
        folder: where it keeps what its optimisations made of models, so that one that is loaded again is loaded in a
            fraction of the time; None keeps nothing.
    """

    name = "onnxruntime"
    profiles = True
    _folder: Path | None = None

    def __init__(self, folder: Path | None = None) -> None:
        self.version = runtime_version()
        self._folder = folder
        self._optimized: dict[tuple[Path, int], Path] = {}

    def load(self, model: Path, threads: int | None = None) -> LoadedModel:
        """Load a model file with all optimisations."""
        if self._folder is None or is_large(model):
            return _Loaded(open_session(model, threads=threads))
        # Another model may take a file's place.
        key = model, model.stat().st_mtime_ns
        if key in self._optimized:
            return _Loaded(open_session(self._optimized[key], threads=threads, optimize=False))
        copy = Path(tempfile.mkdtemp(dir=self._folder)) / "optimized.onnx"
        session = open_session(model, threads=threads, optimized_copy=copy)
        self._optimized[key] = copy
        return _Loaded(session)

    def profile(
        self, model: Path, samples: Sequence[Mapping[str, Array]], folder: Path, repeats: int
    ) -> tuple[Kernel, ...]:
        """Run a model under the profiler."""
        return profile_kernels(model, [dict(sample) for sample in samples], folder, repeats=repeats)


class _Loaded(LoadedModel):
    def __init__(self, session: Session) -> None:
        self.session: Session | None = session
        self.outputs = tuple(output_names(session))

    def run(self, sample: Mapping[str, Array]) -> list[Any]:
        return run(self.session, sample)

    def close(self) -> None:
        self.session = None
