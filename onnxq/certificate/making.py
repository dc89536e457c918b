"""Make a certificate: inputs that look like samples, what both models give for them, and when a run is right."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import islice, zip_longest
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import numpy as np

from onnxq.calibration.data import Data, SamplesLike, samples_of
from onnxq.calibration.provenance import instruction_set, model_digest
from onnxq.certificate.certificate import (
    MOST_BYTES,
    Certificate,
    Fingerprint,
    InputRecipe,
    Measured,
    VerifiedOn,
    write_certificate,
)
from onnxq.certificate.onnxq_verify import decibels, make_probe, sketch
from onnxq.certificate.overflow import find_overflow
from onnxq.certificate.recipes import TABLES, describe_inputs, packed
from onnxq.data.inputs import Sample, SampleSource, inputs_of, is_floating
from onnxq.data.samples import evenly
from onnxq.errors import EngineError, OnnxqError
from onnxq.evaluation.agreement import Agreement, compare_files
from onnxq.evaluation.comparison import RUN_MEMORY
from onnxq.ir import Graph, load
from onnxq.ir.writer import weight_bytes
from onnxq.passes.quantize.graph_io import float_values, graph_tensors, quantized_values
from onnxq.runtime.engine import Engine
from onnxq.runtime.sessions import Array, Session, as_own, open_session, output_names, run, runtime_version
from onnxq.system.plugins import wrap_plugin_errors
from onnxq.system.publish import check_output
from onnxq.system.records import to_plain
from onnxq.system.resources import parallel_map
from onnxq.version import VERSION

Outputs = Mapping[str, Any]
Run = Callable[[Sample], Outputs]
"""Runs a model; returns its outputs by name."""

PROBES = TABLES
"""Probes of a certificate; 3 to 8 find faults, and take about as long as loading."""

MARGIN = 6.0
"""Decibels that a run may be farther from the certified output than quantization and the runs at making were."""

CLOSE = 34.0
"""Decibels beside the certified output that no run needs more of."""

_LOOKED_AT, _TRIED = 8, 8
# Seconds of all cores, whatever else runs. A model whose first runs take longer has no probes.
_MOST_SECONDS = 5.0
# Nodes that take long to load once more, and bytes of weights, which unfused kernels decode in each run.
_MANY_NODES, _MUCH = 2000, 1 << 24
# Decibels that any output has.
_ANY = -9999.0
# Decibels by which one probe may look better than the others.
_LUCK = 5.0
# Bytes that the digests of the file take at most.
_FOR_DIGESTS = 1024
_BUCKETS = (32, 16, 8, 4)
_LARGEST_CODE = 2**15 - 1
_UNCLEAR = "on generated inputs it differs too much to be compared"


def certify(
    reference: str | Path,
    candidate: str | Path,
    data: SamplesLike | Data,
    output: str | Path | None = None,
    *,
    engines: Sequence[Engine] = (),
) -> Certificate:
    """Write a certificate into a model that any tool quantized.

    Args:
        reference: file of the float model.
        candidate: file of the quantized model.
        data: samples that fit both models, or Data with how they are read.
        output: file to write; None replaces the candidate by the same model with the certificate.
        engines: other engines that have to count as right.

    Raises:
        ModelError: a file cannot be read or loaded.
        DataError: the samples do not fit.
        OutputError: the output cannot be written.

    >>> certify("model.onnx", "model.int8.onnx", "data/").measured.sqnr  # doctest: +SKIP
    38.1
    """
    reference, candidate = Path(reference), Path(candidate)
    output = candidate if output is None else Path(output)
    check_output(output, reference)
    samples = samples_of(reference, data)
    agreement = compare_files(reference, candidate, data)
    certificate = make_certificate(reference, candidate, samples, agreement, agreement.samples, engines=engines)
    return write_certificate(certificate, candidate, output)


def _measured(agreement: Agreement, unseen: int) -> Measured:
    bounds = [output.bound for output in agreement.outputs if output.bound is not None]
    bound = _rounded_down(min(bounds)) if bounds else None
    return Measured(_rounded_down(agreement.worst_sqnr), bound, agreement.samples, unseen, agreement.files)


def _rounded_down(sqnr: float) -> float:
    return math.floor(round(sqnr * 100, 6)) / 100 if math.isfinite(sqnr) else sqnr


def make_certificate(
    reference: Path,
    candidate: Path,
    samples: SampleSource,
    agreement: Agreement,
    unseen: int,
    *,
    graph: Graph | None = None,
    runs: tuple[Run, Run] | None = None,
    threads: int = 1,
    plan: str = "",
    engines: Sequence[Engine] = (),
) -> Certificate:
    """Make a certificate, without the digests of the file that `write_certificate` adds.

    Args:
        reference: file of the float model.
        candidate: file of the quantized model; if it does not load, there are no probes.
        samples: the probes' inputs are made to look like some of these.
        agreement: of the two models; outputs that it does not compare as they are have no fingerprint.
        unseen: how many of its samples had neither set ranges nor chosen the plan.
        graph: the quantized model, if it is read already.
        runs: both models, if they are loaded already.
        threads: threads of an operator of the loaded quantized model; 0 if onnxruntime chose them.
        plan: digest of the plan.
        engines: other engines that have to count as right; those that fail count as none.
    """
    graph = graph if graph is not None else load(candidate)
    tensors = graph_tensors(graph.metadata)
    certificate = Certificate(
        made_by=f"onnxq {VERSION}, {runtime_version()}",
        float_model=model_digest(reference),
        plan=plan,
        measured=_measured(agreement, unseen),
        overflow=find_overflow(graph),
        outputs=tuple(output.name for output in graph.outputs),
        quantized={
            tensor.name: (tensor.scale, tensor.zero_point)
            for tensor in tensors
            if tensor.format and tensor.kind == "output"
        },
    )

    def floats(run: Run) -> Run:
        return lambda sample: float_values(run(sample), tensors)

    try:
        inputs = inputs_of(graph)
        recipes = describe_inputs(inputs, [quantized_values(sample, tensors) for sample in evenly(samples, _LOOKED_AT)])
        floating, base = runs or (open_floating(reference), running(open_session(candidate, threads=1)))
        most = max(RUN_MEMORY.most_at_once(reference), 1)
        certified = run_probes(lambda sample: floating(float_values(sample, tensors)), floats(base), recipes, most)
    except OnnxqError as error:
        return replace(certificate, without_probes=str(error))
    here = VerifiedOn(runtime_version(), instruction_set(), threads, optimized=True, sqnr=math.inf)
    places: list[Place] = [(here, certified.certified)]
    if len(graph.nodes) < _MANY_NODES and weight_bytes(graph) < _MUCH:
        with suppress(OnnxqError):
            # Another number of threads, and unfused kernels, which differ little: one probe shows it.
            unfused = floats(running(open_session(candidate, threads=2, optimize=False)))
            places.append((replace(here, threads=2, optimized=False), certified.again(unfused, 1)))
    for engine in engines:
        name = f"engine {engine.name!r}"
        with suppress(OnnxqError), wrap_plugin_errors(name, EngineError), closing(engine.load(candidate)) as loaded:
            there = floats(lambda sample: dict(zip(loaded.outputs, loaded.run(sample), strict=True)))
            place = replace(here, engine=engine.version, threads=engine.threads or 0)
            places.append((place, certified.again(there)))
    return _fingerprinted(certificate, certified, places, agreement)


def open_floating(reference: Path) -> Run:
    """Return a function that runs the float model on a few probes."""
    return running(open_session(reference, threads=1, few_runs=True))


def running(session: Session) -> Run:
    """Return a function that runs a session."""
    names = output_names(session)
    return lambda sample: dict(zip(names, map(as_own, run(session, sample)), strict=True))


# Runs of both models on probes.

Place = tuple[VerifiedOn, Sequence[Outputs]]
"""Where the quantized model ran, and what it gave for each probe, or only for the first ones."""


@dataclass(frozen=True, eq=False)
class Runs:
    """What both models gave for probes.

    Attributes:
        changing: outputs that another run of the same session changes.
    """

    inputs: tuple[InputRecipe, ...]
    seeds: tuple[int, ...]
    floats: tuple[Outputs, ...]
    certified: tuple[Outputs, ...]
    changing: frozenset[str] = frozenset()

    def again(self, engine_run: Run, probes: int = PROBES) -> list[Outputs]:
        """Return what a model gives for the first probes."""
        plain = {"inputs": to_plain(self.inputs)}
        return [engine_run(make_probe(plain, seed)) for seed in self.seeds[:probes]]


def run_probes(floating: Run, base: Run, candidates: Iterable[tuple[InputRecipe, ...]], most: int) -> Runs:
    """Run both models on generated inputs, of the first shapes that both take, on `most` at once.

    Raises:
        OnnxqError: no probe runs, or a run takes too long.
    """
    faults: list[OnnxqError] = []
    for recipes in candidates:
        plain, outputs = {"inputs": to_plain(recipes)}, dict[int, tuple[Outputs, Outputs]]()

        def run_both(seed: int, plain: Mapping[str, Any] = plain) -> tuple[Outputs, Outputs] | None:
            sample = make_probe(plain, seed)
            try:
                return floating(sample), base(sample)
            except OnnxqError as error:
                faults.append(error)
                return None

        seeds = iter(range(_TRIED))
        while tried := list(islice(seeds, min(most, PROBES - len(outputs)))):
            start = process_time()
            both = zip(tried, parallel_map(run_both, tried, most), strict=True)
            outputs |= {seed: values for seed, values in both if values is not None}
            if outputs and len(outputs) <= most and process_time() - start > _MOST_SECONDS * len(tried):
                raise OnnxqError(f"a run of both models takes longer than {_MOST_SECONDS:g} s")
        if len(outputs) == PROBES:
            floats, certified = zip(*outputs.values(), strict=True)
            # Sessions of one process may draw the same numbers, but none draws the same twice.
            again = base(make_probe(plain, max(outputs)))
            changing = frozenset(name for name, value in certified[-1].items() if not _is_same(value, again[name]))
            return Runs(recipes, tuple(outputs), floats, certified, changing)
    raise OnnxqError(f"too few generated inputs run: {next(reversed(faults), None)}")


def _is_same(first: Any, second: Any) -> bool:
    """Return whether two runs of one session agree; what is no tensor is not looked at."""
    if not isinstance(first, np.ndarray):
        return True
    return (
        first.shape == second.shape and decibels(*(sketch(each, _BUCKETS[0], 0)[0] for each in (first, second))) > CLOSE
    )


# Fingerprints of outputs.

Sums = Mapping[str, Array]
"""By output, sums of elements of shape (probes, buckets), see `onnxq_verify.sketch`."""


def _fingerprinted(certificate: Certificate, runs: Runs, places: Sequence[Place], agreement: Agreement) -> Certificate:
    """Return a certificate with fingerprints of all outputs that can be compared."""
    decided = dict.fromkeys((*agreement.decided, *agreement.chosen), "it follows from choices of the model")
    obstacles = {name: decided.get(name) or _obstacle(name, runs, places) for name in certificate.outputs}
    for buckets in _BUCKETS:
        names = [name for name, obstacle in obstacles.items() if not obstacle]
        outputs_of_all = (runs.floats, *(outputs for _, outputs in places))
        floats, *here = (_sums(names, outputs, runs.seeds, buckets) for outputs in outputs_of_all)
        marks = [_fingerprint(name, floats, here, runs.certified) for name in names]
        obstacles |= {mark.name: _UNCLEAR for mark in marks if max(mark.tolerances) < 0}
        marks = [mark for mark in marks if not obstacles[mark.name]]
        names = [mark.name for mark in marks]
        left_out = {name: obstacle for name, obstacle in obstacles.items() if obstacle}
        if not marks:
            reasons = f"no output can be compared: {'; '.join(sorted(set(left_out.values())))}"
            return replace(certificate, left_out=left_out, without_probes=reasons)
        right = replace(
            certificate,
            inputs=runs.inputs,
            seeds=runs.seeds,
            fingerprints=tuple(marks),
            left_out=left_out,
            verified=tuple(
                replace(place, sqnr=_worst(names, floats, sums)) for (place, _), sums in zip(places, here, strict=True)
            ),
        )
        if len(right.to_json().encode()) <= MOST_BYTES - _FOR_DIGESTS:
            return right
    return replace(
        certificate, without_probes=f"fingerprints of {len(certificate.outputs)} outputs take more than 16 KB"
    )


def _obstacle(name: str, runs: Runs, places: Sequence[Place]) -> str:
    """Return why an output cannot be compared; empty if it can."""
    if name in runs.changing:
        return "it is random, or depends on earlier runs"
    for probe, wanted in enumerate(runs.floats):
        values = [wanted[name], *(outputs[probe][name] for _, outputs in places if probe < len(outputs))]
        if not all(isinstance(value, np.ndarray) for value in values):
            return "it is no tensor"
        if len({value.shape for value in values}) > 1:
            return "its shape depends on the data"
        if not _is_label(wanted[name]) and len({int(np.isfinite(value).sum()) for value in values[1:]}) > 1:
            return "its NaN or infinite elements differ between runs"
    return ""


def _is_label(values: Array) -> bool:
    return not is_floating(values.dtype)


def _sums(names: Sequence[str], outputs: Sequence[Outputs], seeds: Sequence[int], most: int) -> Sums:
    sums = {}
    for name in names:
        values = [output[name] for output in outputs]
        buckets = max(1, min(most, *(value.size for value in values)))
        sums[name] = np.array([sketch(value, buckets, seed)[0] for value, seed in zip(values, seeds, strict=False)])
    return sums


def _worst(names: Sequence[str], floats: Sums, here: Sums) -> float:
    """Return the decibels of the worst output beside the float model, over the probes that ran."""
    return round(min(decibels(floats[name][: len(here[name])], here[name]) for name in names), 2)


def _fingerprint(name: str, floats: Sums, places: Sequence[Sums], outputs: Sequence[Outputs]) -> Fingerprint:
    wanted, certified, *others = (sums[name] for sums in (floats, *places))
    scale = float(f"{max(np.abs(wanted).max(), np.abs(certified).max()) / _LARGEST_CODE * 1.001:.4g}") or 1.0
    codes = [np.rint(sums / scale).astype("<i2") for sums in (wanted, certified)]
    wanted, certified = (sums * scale for sums in codes)
    # A generated input may happen to show little of the error that others show.
    usual = median(_clamped(decibels(*both)) for both in zip(certified, wanted, strict=True)) + _LUCK
    tolerances = tuple(
        round(min(usual, _nearest(one, right)) - MARGIN, 1) for one, *right in zip_longest(certified, wanted, *others)
    )
    # A label may turn over by rounding.
    spare = len(tolerances) // 2 if _is_label(outputs[0][name]) else 0
    finite = tuple(sketch(output[name], 1, 0)[1] for output in outputs)
    return Fingerprint(name, scale, packed(codes[0]), packed(codes[1]), finite, tolerances, spare)


def _nearest(certified: Array, right: Sequence[Array | None]) -> float:
    """Return the decibels beside the certified output of what is farthest from it and right; None was not run."""
    if not certified.any():
        return _ANY
    return min(_clamped(decibels(certified, sums)) for sums in right if sums is not None)


def _clamped(value: float) -> float:
    return max(min(value, CLOSE), _ANY)
