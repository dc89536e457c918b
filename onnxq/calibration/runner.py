"""Running the model on samples: statistics of tapped tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped,unused-ignore]

from onnxq.calibration.inputs import Sample
from onnxq.calibration.statistics import EMPTY, Statistics, TensorStatistics, merge, observe
from onnxq.calibration.taps import tap_outputs, tapped_bytes
from onnxq.errors import ModelError
from onnxq.runtime import Array, Session, open_session, run, serialized

HISTOGRAM_ELEMENTS = 1 << 14
"""Counting every element of a convolutional network costs several times its inference; extremes cost little."""


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
    computed = [name for name in names if name not in fed]
    outputs = tap_outputs(proto, names)
    data = tapped_bytes(
        model.read_bytes() if isinstance(model, Path) else serialized(model),
        [output for output in outputs if output.name not in fed],
    )
    del proto
    session = open_session(data, threads=threads, external_folder=folder)
    del data
    statistics: dict[str, TensorStatistics] = dict.fromkeys(names, EMPTY)
    done = 0
    for sample, arrays in _runs(session, computed, samples):
        for name in names:
            array = sample[name] if name in fed else arrays[name]
            seen = observe(array, name=name, sample=done, histogram_elements=histogram_elements)
            statistics[name] = merge(statistics[name], seen)
        done += 1
        if progress:
            progress(done, len(samples))
    return Statistics(done, MappingProxyType(statistics))


def _runs(
    session: Session, names: Sequence[str], samples: SampleSource
) -> Iterator[tuple[Sample, Mapping[str, Array]]]:
    """Yield each sample and its arrays while onnxruntime already runs the next one."""

    def arrays(future: Future[list[Array]]) -> Mapping[str, Array]:
        return dict(zip(names, future.result(), strict=True))

    with ThreadPoolExecutor(1) as pool:
        pending: tuple[Sample, Future[list[Array]]] | None = None
        for index, sample in enumerate(samples):
            following = (sample, pool.submit(run, session, sample, names, index=index))
            if pending:
                yield pending[0], arrays(pending[1])
            pending = following
        if pending:
            yield pending[0], arrays(pending[1])


def _read(path: Path) -> onnx.ModelProto:
    try:
        return onnx.load(path, load_external_data=False)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}; expected an .onnx file") from error
    except DecodeError as error:
        raise ModelError(f"{path} is no ONNX model: {error}; expected an .onnx file") from error
