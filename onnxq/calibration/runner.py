"""Running the model on samples: what is requested of its tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped,unused-ignore]

from onnxq.calibration.evidence import Evidence, EvidenceTotal
from onnxq.calibration.kinds import kind_named
from onnxq.calibration.provenance import sample_digest
from onnxq.calibration.requests import Request
from onnxq.calibration.segments import segments
from onnxq.calibration.shards import InstrumentedRunError, Tapped
from onnxq.calibration.work import Shard, Work
from onnxq.calibration.workers import Threads, Workers
from onnxq.data.dataset import Selection, picked, stretches
from onnxq.data.inputs import SampleSource
from onnxq.errors import CandidateError, DataError, ModelError
from onnxq.ir.large_models import is_large
from onnxq.runtime.sessions import open_session, run


@dataclass(frozen=True)
class Ledger:
    """What makes evidence fit to be kept and continued.

    Attributes:
        model: digest of the model, see `onnxq.calibration.provenance.model_digest`.
        earlier: evidence for the same requests from some of the samples, which are not run again.
        keep: called with the evidence of all finished samples, whenever there are more of them.
        digests: of the samples, in their order, see `sample_digest`; empty where nobody has found them out yet.
    """

    model: str
    earlier: Evidence
    keep: Callable[[Evidence], None]
    digests: tuple[str, ...] = ()


def collect(
    model: onnx.ModelProto | Path,
    samples: SampleSource,
    requests: Sequence[Request],
    *,
    progress: Callable[[int, int], None] | None = None,
    workers: Workers | None = None,
    others: Sequence[str] = (),
    ledger: Ledger | None = None,
) -> Evidence:
    """Run every sample once and return what is requested: the same bits whatever the workers.

    Each worker holds the taps of one sample in memory. Nothing is written beside the model.

    Args:
        model: The float model; a path for models whose weights are in external files.
        samples: Checked samples, see `onnxq.data.samples.open_samples`.
        requests: What is wanted of float tensors: node outputs, graph inputs, or initializers of the main graph. Those
            of bodies have names of their own, and all their values of a sample count as one array of one axis.
        progress: Called with (samples done, samples in all) after each sample.
        workers: Where samples run; None runs them in threads of this process, one for each core.
        others: Tensors that are not observed, but computed as if they were: with them, the evidence is the same bits as
            that of one run for all tensors.
        ledger: Continues earlier evidence, and says which model it is of; None does neither.

    Raises:
        ModelError: The model does not load, or a name is no tensor of the main graph.
        DataError: A sample does not run or is not among those that the earlier evidence has, or an array is not what a
            kind of statistic is for, such as one with NaN or infinite values of which a range is wanted.
        SchemeError: The workers or a kind of statistic cannot be had.
    """
    for request in requests:
        kind_named(request.kind)
    tapped = replace(tap(model, requests, others), model=ledger.model if ledger else "")
    earlier = ledger.earlier if ledger else Evidence()
    left, total = _left(samples, earlier, ledger.digests if ledger else ()), EvidenceTotal(earlier)
    done = len(samples) - len(left)
    with _float_model_blamed_first(model, samples):
        for evidence in (workers or Threads()).run(tapped, Work(samples, left)):
            total.add(evidence)
            further = len(evidence.samples)
            # Before the next comes, this one is let go.
            del evidence
            done = _told(progress, done, further, len(samples))
            if ledger:
                ledger.keep(total.evidence)
    found = total.evidence
    return found.select(request for request in dict.fromkeys(requests) if request in found.statistics)


def collect_apart(
    model: onnx.ModelProto | Path,
    runs: Sequence[Sequence[Selection]],
    requests: Sequence[Request],
    apart: Sequence[Request] = (),
    *,
    progress: Callable[[int, int], None] | None = None,
    others: Sequence[str] = (),
) -> Iterator[tuple[Evidence, tuple[Evidence, ...]]]:
    """Run every sample once, in threads of this process, and yield in order what the parts of each run show together.

    Args:
        model: see `collect`, as for what is raised.
        runs: parts of the samples.
        requests: what is wanted of tensors.
        apart: what is wanted of each part besides, which comes second.
        progress: see `collect`.
        others: see `collect`.
    """
    shards = [[Shard(tuple(stretches(part.samples, part.places))) for part in parts] for parts in runs]
    done, count = 0, sum(len(shard) for parts in shards for shard in parts)
    tapped = tap(model, (*requests, *apart), others)
    source = runs[0][0].samples if count else []
    with _float_model_blamed_first(model, source):
        for found in Threads().run_parts(tapped, shards, tuple(apart)):
            yield found
            done = _told(progress, done, len(found[0].samples), count)


@contextmanager
def _float_model_blamed_first(model: onnx.ModelProto | Path, samples: SampleSource) -> Iterator[None]:
    """If the float model runs the sample that fails, say that the fault is the instrumented model's.

    Raises:
        CandidateError: the float model runs the sample.
        RunError: the float model fails as well; its own reason is told.
    """
    try:
        yield
    except InstrumentedRunError as error:
        (sample,) = picked(samples, [error.index])
        run(open_session(model, threads=1), sample, index=error.index)
        raise CandidateError(
            f"the float model runs sample {error.index}, but not with the observed tensors as further outputs "
            f"({error.reason}); observe fewer tensors, or report the model"
        ) from error


def _told(progress: Callable[[int, int], None] | None, done: int, further: int, count: int) -> int:
    """Tell of each of some further samples, and return how many are done with them."""
    if progress:
        for one in range(done + 1, done + further + 1):
            progress(one, count)
    return done + further


def tap(model: onnx.ModelProto | Path, requests: Sequence[Request], others: Sequence[str] = ()) -> Tapped:
    """Return a model with the tensors of the requests as outputs, ready for workers; see `collect`.

    Raises:
        ModelError: The model cannot be read, or a name is no tensor of the main graph.
    """
    proto = read_without_data(model) if isinstance(model, Path) else model
    names = tuple(dict.fromkeys(request.tensor for request in requests))
    fed = {value.name for value in proto.graph.input} - {tensor.name for tensor in proto.graph.initializer}
    parts = segments(
        proto, [name for name in names if name not in fed], [name for name in others if name not in fed | set(names)]
    )
    return Tapped(
        segments=parts,
        folder=model.parent if isinstance(model, Path) else None,
        requests=tuple(dict.fromkeys(requests)),
        mapped=is_large(proto),
    )


def _left(samples: SampleSource, earlier: Evidence, digests: Sequence[str]) -> list[int]:
    """Return the indices of the samples that are still to be run; they are read only where digests are not known.

    Raises:
        DataError: A sample that was run before is not there any more.
    """
    if not earlier.samples:
        return list(range(len(samples)))
    done = Counter(earlier.samples)
    left = []
    for index, digest in enumerate(digests or map(sample_digest, samples)):
        if done[digest]:
            done[digest] -= 1
        else:
            left.append(index)
    if gone := done.total():
        raise DataError(
            f"{gone} samples of the earlier statistics are not there, expected samples to stay as they are; "
            "calibrate again"
        )
    return left


def read_without_data(path: Path) -> onnx.ModelProto:
    """Return the model of a file, its external data left where it is.

    Raises:
        ModelError: The file cannot be read, or is no model.
    """
    try:
        return onnx.load(path, load_external_data=False)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}; expected an .onnx file") from error
    except DecodeError as error:
        raise ModelError(f"{path} is no ONNX model: {error}; expected an .onnx file") from error
