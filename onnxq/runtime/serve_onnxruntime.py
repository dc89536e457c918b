"""Serve onnxruntime from another environment or machine, which needs only onnxruntime and numpy."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from onnxq.runtime.protocol import Array, Backend, Loaded, serve


class OnnxRuntime(Backend):
    """onnxruntime on the CPU, with all optimizations and threads that do not spin."""

    version = f"onnxruntime {onnxruntime.__version__}"
    profiles = True

    def load(self, model: str, threads: int | None) -> Loaded:
        """Load a model file."""
        return _Session(_opened(model, _options(threads)))

    def profile(
        self, model: str, samples: Sequence[Mapping[str, Array]], repeats: int, threads: int
    ) -> tuple[Mapping[str, Any], Sequence[Array]]:
        """Return the graph that ran, without weights, and the events of its profile."""
        with tempfile.TemporaryDirectory() as folder:
            optimized = Path(folder) / "optimized.onnx"
            options = _options(threads)
            options.optimized_model_filepath = str(optimized)
            options.add_session_config_entry(
                "session.optimized_model_external_initializers_file_name", "optimized.data"
            )
            options.enable_profiling, options.profile_file_prefix = True, str(Path(folder) / "profile")
            session = _opened(model, options)
            session.run(None, dict(samples[0]))
            for sample in samples:
                for _ in range(repeats):
                    session.run(None, dict(sample))
            written = (optimized, Path(session.end_profiling()))
            return {}, [np.frombuffer(path.read_bytes(), np.uint8) for path in written]


class _Session:
    def __init__(self, session: Any) -> None:
        self.session = session
        self.outputs = [output.name for output in session.get_outputs()]

    def run(self, sample: Mapping[str, Array]) -> Sequence[Array]:
        return list(self.session.run(None, dict(sample)))


def _options(threads: int | None) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.intra_op_num_threads = threads or 0
    return options


def _opened(model: str, options: Any) -> Any:
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


if __name__ == "onnxq.runtime.backend":
    serve(OnnxRuntime())
