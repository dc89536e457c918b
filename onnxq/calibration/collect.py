"""Run the model on samples and collect the requested statistics.

Samples are cut into chunks. Threads, or the workers of a Dask cluster, each run a chunk and observe its tensors, and
the statistics of chunks are added up in the order of the samples. Chunks depend on the samples alone, so the sum is the
same bits however many threads run, and wherever they do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import onnx

from onnxq.calibration.accumulators import Request
from onnxq.calibration.instrumented import Chunk, InstrumentedModel, InstrumentedRunError, OpenedModel, instrument
from onnxq.calibration.kinds import find_kind
from onnxq.calibration.statistics import CalibrationStatistics, sum_statistics
from onnxq.data.dataset import Subset, picked, reads_by_index
from onnxq.data.inputs import SampleSource, sample_bytes
from onnxq.errors import CandidateError
from onnxq.runtime.sessions import open_session, run
from onnxq.system.resources import available_cores, parallel_map

_MOST_THREADS = 8
"""Each thread holds the observed tensors of one sample in memory."""
_CHUNKS = 8
"""Chunks that few samples are cut into: more would take longer to add up, fewer would leave threads idle at the end."""
_CHUNK_SAMPLES, _CHUNK_BYTES = 64, 8 * 10**6
"""Most samples of a chunk, and most bytes unless it is a single sample: chunks that are sent are in memory."""

Progress = Callable[[int, int], None]


def collect(
    model: onnx.ModelProto | Path,
    samples: SampleSource,
    requests: Sequence[Request],
    *,
    progress: Progress | None = None,
    cluster: Any = None,
    others: Sequence[str] = (),
) -> CalibrationStatistics:
    """Run every sample once and return the requested statistics.

    No files are written beside the model.

    Args:
        model: The float model; a path if its weights are in external files.
        samples: Checked samples, see `onnxq.data.samples.open_samples`.
        requests: Requests for float tensors: node outputs, graph inputs, or initializers of the main graph, and tensors
            of bodies. Names of body tensors are unique; their values in a sample form one array with one axis.
        progress: Called with (samples done, samples in all) after each chunk of samples.
        cluster: Address of a Dask scheduler, or a connected `distributed.Client`; None takes threads of this process.
        others: Tensors that are computed as if they were observed. With them, the statistics are bit-identical to one
            run for all tensors.

    Raises:
        ModelError: The model does not load, or a name is not a tensor of the model.
        DataError: A sample does not run, or a requested kind does not apply to an array, for example because of NaN or
            infinite values; or the workers of the cluster fail.
        CandidateError: The float model runs a sample, but the instrumented model does not.
        SchemeError: The cluster is not available, or a kind of statistic is unknown.
    """
    for request in requests:
        find_kind(request.kind)
    instrumented = instrument(model, requests, others)
    if cluster is None:
        observed = _in_threads(instrumented, cut(samples, sent=not reads_by_index(samples)))
    else:
        from onnxq.calibration.dask_cluster import observe_on_cluster

        observed = observe_on_cluster(cluster, instrumented, cut(samples, sent=True))
    try:
        total = sum_statistics(_reported(observed, len(samples), progress))
    except InstrumentedRunError as error:
        (sample,) = picked(samples, [error.index])
        # If the float model does not run the sample either, its error is raised.
        run(open_session(model, threads=1), sample, index=error.index)
        raise CandidateError(
            f"the float model runs sample {error.index}, but not with the observed tensors as further outputs "
            f"({error.reason}); observe fewer tensors, or report the model"
        ) from error
    return total.select(request for request in dict.fromkeys(requests) if request in total.statistics)


def cut(samples: SampleSource, *, sent: bool) -> Iterator[Chunk]:
    """Cut samples into chunks, in their order.

    Args:
        samples: All samples.
        sent: Whether samples are read here, because the reader of a chunk cannot; otherwise it reads them.
    """
    count = len(samples)
    largest = max(map(sample_bytes, picked(samples, range(min(count, 1)))), default=1)
    size = max(1, min(math.ceil(count / _CHUNKS), _CHUNK_SAMPLES, _CHUNK_BYTES // max(largest, 1)))
    read = picked(samples, range(count))
    for start in range(0, count, size):
        indices = range(start, min(start + size, count))
        yield Chunk(indices, list(islice(read, len(indices))) if sent else Subset(samples, indices))


def _in_threads(instrumented: InstrumentedModel, chunks: Iterable[Chunk]) -> Iterator[CalibrationStatistics]:
    """Observe chunks in their order, in threads that share the sessions of the model."""
    with closing(OpenedModel(instrumented)) as model:
        yield from parallel_map(model.observe, chunks, min(available_cores(), _MOST_THREADS))


def _reported(
    observed: Iterator[CalibrationStatistics], count: int, progress: Progress | None
) -> Iterator[CalibrationStatistics]:
    """Yield statistics, and report how many samples are done after each of them is added up and freed."""
    done = 0
    for statistics in observed:
        done += len(statistics.samples)
        yield statistics
        del statistics
        if progress:
            progress(done, count)
