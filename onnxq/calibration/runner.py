"""Running the model under onnxruntime: sessions, outputs, and statistics of tapped tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import onnx
from google.protobuf.message import DecodeError, EncodeError  # type: ignore[import-untyped,unused-ignore]
from numpy.typing import NDArray

from onnxq.calibration.inputs import Sample
from onnxq.calibration.statistics import EMPTY, Statistics, TensorStatistics, merge, observe
from onnxq.calibration.taps import tap_outputs, tapped_bytes
from onnxq.errors import DataError, ModelError

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

HISTOGRAM_ELEMENTS = 1 << 14
"""Counting every element of a convolutional network costs several times its inference; extremes cost little."""

_EXTERNAL_FOLDER = "session.model_external_initializers_file_folder_path"


class SampleSource(Protocol):
    """A sized stream of samples: `onnxq.calibration.data.Samples`, or a list."""

    def __len__(self) -> int:
        """Return how many samples an iteration yields."""
        ...

    def __iter__(self) -> Iterator[Sample]:
        """Start again at the first sample."""
        ...


def collect(
    model: onnx.ModelProto | Path,
    samples: SampleSource,
    tensors: Sequence[str],
    *,
    progress: Callable[[int, int], None] | None = None,
    threads: int | None = None,
    histogram_elements: int | None = HISTOGRAM_ELEMENTS,
) -> Statistics:
    """Run every sample once and return the statistics of the named tensors.

    The taps of two samples are in memory at a time: one observed, one running. Nothing is written beside the model.

    Args:
        model: The float model; a path for models whose weights are in external files.
        samples: Checked samples, see `onnxq.calibration.data.open_samples`.
        tensors: Float tensors of the main graph: node outputs, graph inputs or initializers.
        progress: Called with (samples done, samples in all) after each sample.
        threads: Threads of onnxruntime; None leaves the choice to it.
        histogram_elements: How many evenly spaced elements of a larger tensor its histogram counts in each sample;
            None counts all. Minimum and maximum are always exact.

    Raises:
        ModelError: The model does not load, or a name is no tensor of the main graph.
        DataError: A sample does not run, or a tensor is not float, or holds NaN or infinite values.
    """
    proto = _read(model) if isinstance(model, Path) else model
    folder = model.parent if isinstance(model, Path) else None
    names = list(dict.fromkeys(tensors))
    fed = {value.name for value in proto.graph.input} - {tensor.name for tensor in proto.graph.initializer}
    run = [name for name in names if name not in fed]
    outputs = tap_outputs(proto, names)
    data = tapped_bytes(
        model.read_bytes() if isinstance(model, Path) else _serialized(model),
        [output for output in outputs if output.name not in fed],
    )
    del proto
    session = open_session(data, threads=threads, external_folder=folder)
    del data
    statistics: dict[str, TensorStatistics] = dict.fromkeys(names, EMPTY)
    done = 0
    for sample, arrays in _runs(session, run, samples):
        for name in names:
            array = sample[name] if name in fed else arrays.pop(name)
            seen = observe(array, name=name, sample=done, histogram_elements=histogram_elements)
            statistics[name] = merge(statistics[name], seen)
        done += 1
        if progress:
            progress(done, len(samples))
    return Statistics(done, MappingProxyType(statistics))


def run_outputs(session: InferenceSession, sample: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Run one sample and return the model's outputs by name.

    Raises:
        DataError: onnxruntime cannot run the sample; the message holds its reason.
    """
    return _run(session, [output.name for output in session.get_outputs()], sample, None)


def open_session(
    model: onnx.ModelProto | bytes | Path,
    *,
    threads: int | None = None,
    optimize: bool = True,
    external_folder: Path | None = None,
) -> InferenceSession:
    """Open a model on the CPU.

    Args:
        model: A path for models above 2 GiB or with external data.
        threads: Threads inside an operator; None leaves the choice to onnxruntime.
        optimize: All graph optimizations, or none.
        external_folder: Where the external data of a model given as bytes or message lies.

    Raises:
        ModelError: onnxruntime cannot load the model; the message holds its reason.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    level = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimize else level.ORT_DISABLE_ALL
    if threads is not None:
        options.intra_op_num_threads = threads
    if external_folder is not None:
        options.add_session_config_entry(_EXTERNAL_FOLDER, str(external_folder.resolve()))
    source = _serialized(model) if isinstance(model, onnx.ModelProto) else model
    try:
        return onnxruntime.InferenceSession(
            str(source) if isinstance(source, Path) else source, options, providers=["CPUExecutionProvider"]
        )
    except _runtime_errors() as error:
        where = str(model) if isinstance(model, Path) else "The model"
        raise ModelError(f"{where} cannot be loaded by onnxruntime: {_reason(error)}; check the model") from error


def _runs(
    session: InferenceSession, names: Sequence[str], samples: SampleSource
) -> Iterator[tuple[Sample, dict[str, NDArray[Any]]]]:
    """Yield each sample and its arrays while onnxruntime already runs the next one."""
    with ThreadPoolExecutor(1) as pool:
        pending: tuple[Sample, Future[dict[str, NDArray[Any]]]] | None = None
        for index, sample in enumerate(samples):
            following = (sample, pool.submit(_run, session, names, sample, index))
            if pending:
                yield pending[0], pending[1].result()
            pending = following
        if pending:
            yield pending[0], pending[1].result()


def _run(
    session: InferenceSession, names: Sequence[str], sample: Mapping[str, NDArray[Any]], index: int | None
) -> dict[str, NDArray[Any]]:
    if not names:
        return {}
    try:
        values = session.run(list(names), dict(sample))
    except _runtime_errors() as error:
        where = "The sample" if index is None else f"Sample {index}"
        raise DataError(f"{where} cannot be run by onnxruntime: {_reason(error)}; check shapes and values") from error
    return dict(zip(names, values, strict=True))


def _read(path: Path) -> onnx.ModelProto:
    try:
        return onnx.load(path, load_external_data=False)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}; expected an .onnx file") from error
    except DecodeError as error:
        raise ModelError(f"{path} is no ONNX model: {error}; expected an .onnx file") from error


def _serialized(model: onnx.ModelProto) -> bytes:
    try:
        return bytes(model.SerializeToString())
    except (EncodeError, ValueError) as error:
        raise ModelError("The model is above 2 GiB, expected less in memory; save it and give its path") from error


@cache
def _runtime_errors() -> tuple[type[Exception], ...]:
    """Return onnxruntime's exceptions, which have no common base, and those of its Python layer."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    native = [value for value in vars(state).values() if isinstance(value, type) and issubclass(value, Exception)]
    return (*native, RuntimeError, ValueError, TypeError)


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."
