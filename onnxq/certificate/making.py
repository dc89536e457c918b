"""Make a certificate: recipes of inputs from samples, probes on both models, and the tolerance of a right run."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
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
    Probe,
    VerifiedOn,
    write_certificate,
)
from onnxq.certificate.onnxq_verify import decibels, judge, labels, make_probe, sketch, unpack
from onnxq.certificate.overflow import find_overflow
from onnxq.data.inputs import Input, Sample, SampleSource, is_floating, model_inputs
from onnxq.data.samples import evenly
from onnxq.errors import OnnxqError
from onnxq.evaluation.agreement import Agreement, compare_files
from onnxq.ir import load
from onnxq.ir.protos import is_large
from onnxq.onnx_api import weightless_model
from onnxq.runtime.engine import Engine
from onnxq.runtime.sessions import Array, Session, as_own, open_session, output_names, run, runtime_version
from onnxq.system.publish import check_output
from onnxq.system.records import to_plain
from onnxq.version import VERSION

PROBES = 4
"""Probes of a certificate; 3 to 8 find faults, and take about as long as loading."""

_LOOKED_AT = 8
# Inputs that are tried unless the first few are accurate, with grains as measured and larger.
_TRIED, _SCALES, _ACCURATE = 6, (1, 2, 4), 15.0
# Seconds. After that no further inputs are tried; a model whose first runs take longer has no probes.
_MOST_SECONDS = 5.0
# Decibels that a run may be farther from the certified output than quantization and the runs at making were.
_MARGIN = 6.0
# Decibels beside the certified output that no run needs more of, and by which one probe may look better than others.
_CLOSE, _LUCK = 34.0, 20.0
_UNCLEAR = "on made-up inputs it differs too much to be compared"
# Bytes that the digests of the file take at most.
_FOR_DIGESTS = 1024
# An element this many times the tolerated error above all others stays the largest.
_CLEAR = 8.0
_SHARE_OF_LABELS = 0.75
_BUCKETS = (64, 32, 16, 8)
_QUANTILES, _COLUMN_QUANTILES, _TOKENS, _COLUMNS = 33, 9, 64, 64
# Elements of a sample whose free dimensions are halved, to a multiple of a step.
_LARGE, _STEP = 1 << 17, 32
# Elements of each sample that quantiles are taken of, and samples and elements along an axis that correlate.
_POOLED, _CORNERS, _CORNER = 1 << 14, 4, 64
_LARGEST_CODE = 2**15 - 1
_WHOLE = 2**53
_CORRELATED = 0.5
_SETTLED_BY_COLUMN = 0.5
_TYPES = frozenset(
    (
        *("float16", "float32", "float64", "bool", "string"),
        *(f"{u}int{bits}" for u in ("", "u") for bits in (8, 16, 32, 64)),
    )
)


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
    measured = measured_of(agreement, unseen=agreement.samples)
    made = make_certificate(reference, candidate, samples, agreement, measured, engines=engines)
    return write_certificate(made, candidate, output)


def measured_of(agreement: Agreement, unseen: int) -> Measured:
    """Return the accuracy that an agreement shows."""
    bounds = [one.bound for one in agreement.outputs if one.bound is not None]
    return Measured(agreement.worst_sqnr, min(bounds, default=None), agreement.samples, unseen, agreement.files)


def make_certificate(
    reference: Path,
    candidate: Path,
    samples: SampleSource,
    agreement: Agreement,
    measured: Measured,
    *,
    plan: str = "",
    engines: Sequence[Engine] = (),
) -> Certificate:
    """Make a certificate, without the digests of the file that `write_certificate` adds.

    Args:
        reference: file of the float model.
        candidate: file of the quantized model; if it does not load, there are no probes.
        samples: the probes' inputs are made to look like some of these.
        agreement: of the two models; outputs that it does not compare as they are have no fingerprint.
        measured: the accuracy on samples.
        plan: digest of the plan.
        engines: other engines that have to count as right.
    """
    graph = load(candidate)
    made = Certificate(
        made_by=f"onnxq {VERSION}, {runtime_version()}",
        float_model=model_digest(reference),
        plan=plan,
        measured=measured,
        overflow=find_overflow(graph),
        inputs=(),
        outputs=tuple(one.name for one in graph.outputs),
        probes=(),
    )
    inputs = model_inputs(weightless_model(graph))
    looked = list(evenly(samples, _LOOKED_AT))
    odd = [str(one) for one in inputs if _type(one) not in _TYPES or len({_rank(one, sample) for sample in looked}) > 1]
    odd += [str(one) for one in inputs if one.name not in looked[0]]
    if odd or not inputs:
        reason = f"no values can be made for input {odd[0]}" if odd else "the model has no input"
        return replace(made, without_probes=reason)
    recipes = tuple(describe_input(one, [np.asarray(sample[one.name]) for sample in looked]) for one in inputs)
    try:
        runs = run_probes(reference, candidate, recipes, _shapes(inputs, looked), engines)
    except OnnxqError as error:
        return replace(made, without_probes=str(error))
    decided = dict.fromkeys((*agreement.decided, *agreement.chosen), "it follows from choices of the model")
    left_out = {name: reason for name in made.outputs if (reason := decided.get(name) or runs.obstacle(name))}
    for buckets in _BUCKETS:
        probes = runs.probes([name for name in made.outputs if name not in left_out], buckets)
        compared = {one.name for probe in probes for one in probe.outputs}
        unclear = dict.fromkeys((name for name in made.outputs if name not in {*left_out, *compared}), _UNCLEAR)
        found = replace(made, inputs=recipes, probes=probes, left_out={**left_out, **unclear})
        if not compared:
            reasons = "; ".join(sorted(set(found.left_out.values())))
            return replace(found, inputs=(), probes=(), without_probes=f"no output can be compared: {reasons}")
        found = replace(found, verified=tuple(one.verified(probes) for one in runs.places))
        if len(found.to_json().encode()) <= MOST_BYTES - _FOR_DIGESTS:
            return found
    return replace(made, without_probes=f"fingerprints of {len(made.outputs)} outputs take more than 16 KB")


# Recipes of inputs.


def describe_input(entry: Input, values: Sequence[Array]) -> InputRecipe:
    """Return a recipe of values that are distributed and correlated as an input's samples are."""
    kind, grain = _type(entry), tuple(_grain(values, axis) for axis in range(values[0].ndim))
    pooled = np.concatenate([one.reshape(-1)[:: one.size // _POOLED + 1] for one in values])
    if not pooled.size:
        # A decoder's past is empty before its first token.
        pooled = np.zeros(1, values[0].dtype)
    if kind == "string":
        texts = _categories(values)
        return InputRecipe(entry.name, kind, grain, (tuple(range(len(texts))),), texts=texts)
    if kind == "float16":
        bits = _quantiles(pooled, _QUANTILES).view(np.uint16)
        return InputRecipe(entry.name, kind, grain, (tuple(map(int, bits)),))
    if not kind.startswith("float"):
        kept = pooled[np.abs(pooled.astype(np.float64)) < _WHOLE].astype(np.int64)
        # Quantiles keep the shares of zeros and ones.
        tokens = _quantiles(kept, _TOKENS) if len(kept) else (0,)
        return InputRecipe(entry.name, kind, grain, (tuple(map(int, tokens)),))
    axis = _column_axis(values)
    columns = pooled[np.newaxis] if axis is None else _columns(values, axis)
    count = _QUANTILES if axis is None else _COLUMN_QUANTILES
    quantiles = _quantiles(columns.astype(np.float64), count)
    exponents = tuple(_exponent(float(np.abs(one).max())) for one in quantiles)
    tables = np.rint(quantiles * 2.0 ** -np.array(exponents)[:, np.newaxis]).astype(np.int64)
    # Interpolation multiplies by 256.
    shifted = tuple(one - 8 for one in exponents)
    return InputRecipe(entry.name, kind, grain, tuple(tuple(map(int, one)) for one in tables), axis or 0, shifted)


def _quantiles(values: Array, count: int) -> Array:
    # numpy's own loads a package that nothing else needs.
    return np.sort(values, axis=-1)[..., np.rint(np.linspace(0, values.shape[-1] - 1, count)).astype(int)]


def _type(entry: Input) -> str:
    return "string" if entry.dtype.hasobject or entry.dtype.kind in "SU" else entry.dtype.name


def _rank(entry: Input, sample: Sample) -> int:
    return np.ndim(sample[entry.name]) if entry.name in sample else -1


def _exponent(largest: float) -> int:
    return math.frexp(largest / _LARGEST_CODE)[1] if largest else 0


def _grain(values: Sequence[Array], axis: int) -> int:
    """Return the largest power of two by which neighbours along an axis are still correlated."""
    grain = 1
    corners = [one[tuple(slice(_CORNER) for _ in one.shape)] for one in values[:_CORNERS]]
    while all(one.dtype.kind in "fiub" and one.shape[axis] > grain for one in corners):
        pairs = [_neighbours(one, axis, grain) for one in corners]
        before, after = (np.concatenate(side) for side in zip(*pairs, strict=True))
        if not before.size:
            break
        centre = before.mean()
        spread = float(np.square(before - centre).sum() * np.square(after - centre).sum())
        if not spread or float(((before - centre) * (after - centre)).sum()) < _CORRELATED * math.sqrt(spread):
            break
        grain *= 2
    return grain


def _neighbours(values: Array, axis: int, lag: int) -> tuple[Array, Array]:
    moved = np.moveaxis(values, axis, 0).astype(np.float64)
    return moved[:-lag].reshape(-1), moved[lag:].reshape(-1)


def _column_axis(values: Sequence[Array]) -> int | None:
    """Return the axis, the last or the second, whose entries have values of their own, as columns of a table do."""
    for axis in {values[0].ndim - 1: 0, 1: 0} if values[0].ndim > 1 else ():
        if len({one.shape[axis] for one in values}) > 1 or not 1 < values[0].shape[axis] <= _COLUMNS:
            continue
        rows = _columns(values, axis)
        if not rows.size:
            continue
        total = float(rows.astype(np.float64).var())
        if total and float(rows.mean(axis=1, dtype=np.float64).var()) > _SETTLED_BY_COLUMN * total:
            return axis
    return None


def _columns(values: Sequence[Array], axis: int) -> Array:
    rows = [np.moveaxis(one, axis, 0).reshape(one.shape[axis], -1) for one in values]
    return np.concatenate([one[:, :: one.size // _POOLED + 1] for one in rows], 1)


def _categories(values: Sequence[Array]) -> tuple[str, ...]:
    """Return the strings that several samples have, which are no secret of one of them."""
    seen: dict[str, int] = {}
    for one in values:
        for text in {str(text) for text in one.flat}:
            seen[text] = seen.get(text, 0) + 1
    common = sorted(text for text, count in seen.items() if count > 1 and len(text) <= 32)
    return tuple(common[:16]) or ("text",)


def _shapes(inputs: Sequence[Input], looked: Sequence[Sample]) -> list[tuple[tuple[int, ...], ...]]:
    """Return shapes to try in turn: the least sample's with one row, and before it half of large free dimensions."""
    least = min(looked, key=lambda sample: sum(np.asarray(one).size for one in sample.values()))
    whole = [(one, np.asarray(least[one.name]).shape) for one in inputs]
    is_large = sum(math.prod(shape) for _, shape in whole) > _LARGE
    return [tuple(_fewer(*one, halved=halved) for one in whole) for halved in (True, False)[not is_large :]]


def _fewer(entry: Input, shape: tuple[int, ...], *, halved: bool) -> tuple[int, ...]:
    free = [not isinstance(dim, int) for dim in entry.shape or [None] * len(shape)]
    # Models halve the sizes of images several times.
    halves = [dim // 2 // _STEP * _STEP for dim in shape]
    found = [half if halved and one and half else dim for dim, half, one in zip(shape, halves, free, strict=True)]
    return (1, *found[1:]) if entry.batched and free[0] else tuple(found)


# Runs of both models on probes.

Outputs = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class RunsInPlace:
    """The outputs of the quantized model for each probe in one place."""

    place: VerifiedOn
    outputs: tuple[Outputs, ...]

    def verified(self, probes: Sequence[Probe]) -> VerifiedOn:
        """Return the place with the SQNR of the worst output there."""
        outputs = iter(self.outputs)
        given = [{**to_plain(one), "shapes": []} for one in probes]
        found = judge({"inputs": [], "probes": given}, lambda _: next(outputs))
        return replace(self.place, sqnr=round(found["sqnr"], 2))


@dataclass(frozen=True, eq=False)
class Runs:
    """The outputs of both models for some probes.

    Attributes:
        given: seed, scale of the grain and shapes of each probe.
        floats: outputs of the float model for each probe.
        places: runs of the quantized model; the first is the certified one.
        usual: by float output, the median SQNR in decibels over all probes that were tried.
        changing: outputs that another run of the same session changes.
    """

    given: tuple[tuple[int, int, tuple[tuple[int, ...], ...]], ...]
    floats: tuple[Outputs, ...]
    places: tuple[RunsInPlace, ...]
    usual: Mapping[str, float]
    changing: frozenset[str] = frozenset()

    def obstacle(self, name: str) -> str:
        """Return why an output cannot be compared; empty if it can."""
        if name in self.changing:
            return "it is random, or depends on earlier runs"
        for index, wanted in enumerate(self.floats):
            values = [wanted[name], *(one.outputs[index][name] for one in self.places)]
            if not all(isinstance(one, np.ndarray) for one in values):
                return "it is no tensor"
            if len({one.shape for one in values}) > 1:
                return "its shape depends on the data"
            if len({_lost(one) for one in values[1:]}) > 1:
                return "its NaN or infinite elements differ between runs"
        return ""

    def probes(self, names: Sequence[str], buckets: int) -> tuple[Probe, ...]:
        """Return the probes with fingerprints of some outputs; outputs that differ too much have none."""
        found = []
        for index, (seed, scale, shapes) in enumerate(self.given):
            marks = (self._fingerprint(name, index, seed, buckets) for name in names)
            found.append(Probe(seed, scale, shapes, tuple(one for one in marks if one is not None)))
        return tuple(found)

    def _fingerprint(self, name: str, index: int, seed: int, buckets: int) -> Fingerprint | None:
        values = [self.floats[index][name], *(one.outputs[index][name] for one in self.places)]
        floats, certified, *others = values
        shape = tuple(certified.shape)
        if not is_floating(certified.dtype):
            known = labels(certified)
            share = min(float(np.mean(labels(one) == known)) for one in (floats, *others)) if known.size else 0.0
            tolerance = round(share * _SHARE_OF_LABELS, 2)
            if not tolerance:
                return None
            return Fingerprint(name, shape, "", _packed(known, 1.0), 1.0, tolerance, labels=True)
        (wanted, _), (known, lost) = (sketch(one, buckets, seed) for one in (floats, certified))
        if not known.any():
            return None
        scale = float(f"{max(np.abs(known).max(), np.abs(wanted).max()) / _LARGEST_CODE * 1.001:.4g}")
        codes = _packed(wanted, scale), _packed(known, scale)
        wanted, known = (unpack(one, scale) for one in codes)
        here = decibels(wanted, known)
        # A made-up input may happen to show little of the error that others show.
        usual = max(self.usual[name], here - _LUCK)
        near = [decibels(known, sketch(one, buckets, seed)[0]) for one in others]
        tolerance = round(min(here, usual, *near, _CLOSE) - _MARGIN, 1)
        if tolerance < 0:
            return None
        return Fingerprint(name, shape, *codes, scale, tolerance, _clear_top(certified, tolerance), lost)


def run_probes(
    reference: Path,
    candidate: Path,
    recipes: Sequence[InputRecipe],
    shapes: Sequence[tuple[tuple[int, ...], ...]],
    engines: Sequence[Engine] = (),
) -> Runs:
    """Try made-up inputs on both models, and run those that show most of the model in several places.

    Args:
        reference: file of the float model.
        candidate: file of the quantized model.
        recipes: of the inputs.
        shapes: shapes of the inputs; the first that both models run are taken.
        engines: other engines; those that fail count as none.

    Raises:
        OnnxqError: a model does not load, no probe runs, or a run takes too long.
    """
    base, floating = open_session(candidate, threads=1), open_session(reference, threads=1)
    plain: list[Any] = [to_plain(one) for one in recipes]
    tried: list[_Tried] = []
    fault: OnnxqError | None = None
    start = perf_counter()
    for chosen in shapes:
        for seed in range(_TRIED):
            is_late = tried and perf_counter() - start > _MOST_SECONDS
            if is_late or (seed == PROBES <= len(tried) and all(one.is_accurate for one in tried)):
                break
            scale = _SCALES[seed % len(_SCALES)]
            sample = make_probe({"inputs": plain}, {"seed": seed, "scale": scale, "shapes": chosen})
            try:
                tried.append(_Tried((seed, scale, chosen), sample, _run(floating, sample), _run(base, sample)))
            except OnnxqError as error:
                fault = error
            if len(tried) == 1 and perf_counter() - start > _MOST_SECONDS:
                raise OnnxqError(f"a run of both models takes longer than {_MOST_SECONDS:g} s")
        if is_late or len(tried) >= PROBES:
            break
    if not tried:
        raise OnnxqError(f"no made-up input runs: {fault}")
    usual, chosen_ones = _most_telling(tried)
    samples = [one.sample for one in chosen_ones]
    here = VerifiedOn(runtime_version(), instruction_set(), 1, True, math.inf)
    certified = tuple(one.certified for one in chosen_ones)
    places = [(here, certified)]
    # Sessions of one process may draw the same numbers, but none draws the same twice.
    again = _run(base, samples[0])
    del base, floating
    # Another number of threads, and unfused kernels; in a large model these decode all weights in each run.
    place = replace(here, threads=2, optimized=is_large(candidate))
    with suppress(OnnxqError):
        session = open_session(candidate, threads=place.threads, optimize=place.optimized)
        places.append((place, tuple(_run(session, sample) for sample in samples)))
    for engine in engines:
        with suppress(OnnxqError):
            loaded = engine.load(candidate)
            place = VerifiedOn(engine.version, instruction_set(), engine.threads or 0, True, math.inf)
            places.append((place, tuple(_named(loaded.outputs, loaded.run(sample)) for sample in samples)))
            loaded.close()
    given, floats = (tuple(one.given for one in chosen_ones), tuple(one.floats for one in chosen_ones))
    changing = frozenset(name for name, one in certified[0].items() if not _is_same(one, again[name]))
    return Runs(given, floats, tuple(RunsInPlace(*one) for one in places), usual, changing)


@dataclass(frozen=True, eq=False)
class _Tried:
    given: tuple[int, int, tuple[tuple[int, ...], ...]]
    sample: Sample
    floats: Outputs
    certified: Outputs

    @property
    def is_accurate(self) -> bool:
        floats = [
            name for name, one in self.certified.items() if isinstance(one, np.ndarray) and is_floating(one.dtype)
        ]
        return all(self.sqnr(name) >= _ACCURATE for name in floats)

    def sqnr(self, name: str) -> float:
        wanted, found = self.floats[name], self.certified[name]
        if not isinstance(wanted, np.ndarray) or not is_floating(wanted.dtype) or wanted.shape != found.shape:
            return -math.inf
        return decibels(*(sketch(one, _BUCKETS[0], self.given[0])[0] for one in (wanted, found)))


def _most_telling(tried: Sequence[_Tried]) -> tuple[dict[str, float], list[_Tried]]:
    """Return the median SQNR of each output, and the probes of the highest, for each output in turn."""
    table = {name: [one.sqnr(name) for one in tried] for name in tried[0].certified}
    best = [sorted(range(len(tried)), key=lambda place: (-values[place], place)) for values in table.values()]
    order = dict.fromkeys(places[rank] for rank in range(len(tried)) for places in best)
    chosen = sorted(list(order)[:PROBES])
    return {name: sorted(values)[len(values) // 2] for name, values in table.items()}, [
        tried[place] for place in chosen
    ]


def _run(session: Session, sample: Sample) -> Outputs:
    return _named(output_names(session), [as_own(one) for one in run(session, sample)])


def _named(names: Sequence[str], values: Sequence[Any]) -> Outputs:
    return dict(zip(names, values, strict=True))


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two runs of one session agree; what is no tensor is not looked at."""
    if not isinstance(one, np.ndarray):
        return True
    if one.shape != other.shape or not is_floating(one.dtype):
        return np.array_equal(one, other)
    return decibels(*(sketch(each, _BUCKETS[0], 0)[0] for each in (one, other))) > _CLOSE


def _lost(values: Array) -> int:
    return sketch(values, 1, 0)[1] if is_floating(values.dtype) else 0


def _packed(values: Array, scale: float) -> str:
    return base64.b64encode(np.rint(values / scale).astype("<i2").tobytes()).decode()


def _clear_top(values: Array, tolerance: float) -> int:
    """Return the index of the largest element if it is far above the others, beside the tolerated error; else -1."""
    flat = values.reshape(-1).astype(np.float64)
    if flat.size < 2 or not np.isfinite(flat).all():
        return -1
    second, first = np.partition(flat, -2)[-2:]
    error = math.sqrt(float(np.square(flat).mean()) * 10 ** (-tolerance / 10))
    return int(flat.argmax()) if first - second > _CLEAR * error else -1
