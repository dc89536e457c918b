"""The onnxruntime that onnxq itself runs on, in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onnxq.engines.engine import Engine, LoadedModel
from onnxq.engines.kernels import Kernel, profile_kernels
from onnxq.runtime import Array, Session, open_session, output_names, run, runtime_version


class OnnxRuntime(Engine):
    """onnxruntime's CPU provider in this process."""

    name = "onnxruntime"
    profiles = True

    def __init__(self) -> None:
        self.version = runtime_version()

    def load(self, model: Path, threads: int | None = None) -> LoadedModel:
        """Load a model file with all optimisations."""
        return _Loaded(open_session(model, threads=threads))

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
