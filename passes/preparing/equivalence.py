"""Whether a rewritten model still computes what the original does: equal outputs up to the rounding of floats."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from onnxq.data.images import ImageOptions
from onnxq.data.inputs import Input, Sample, generate_samples, inputs_of, is_floating
from onnxq.data.samples import open_samples
from onnxq.errors import CandidateError, DataError
from onnxq.ir import load
from onnxq.runtime.sessions import Session, open_session, output_names, run

ROUNDING = 1e-5
"""Share of an output's largest value by which float32 sums in another order differ."""

_SAMPLES = 4
_TRIES = 16


@dataclass(frozen=True)
class Difference:
    """How far an output of a candidate is from the original's.

    Attributes:
        output: its name.
        share: largest difference of two elements, as a share of the largest element; infinite where shapes, types,
            NaN or infinities differ, and where elements that are no floats do.
    """

    output: str
    share: float


@dataclass(frozen=True, eq=False)
class Original:
    """A model, with what it answers on a few samples.

    Attributes:
        samples: what is fed.
        names: of the outputs.
        expected: the outputs of each sample.
        made_up: whether the samples were made up.
    """

    samples: tuple[Sample, ...]
    names: tuple[str, ...]
    expected: tuple[Sequence[Any], ...]
    made_up: bool

    def only(self, names: Sequence[str]) -> Original:
        """Return the same with some of the outputs."""
        places = [self.names.index(name) for name in names]
        expected = tuple(tuple(outputs[place] for place in places) for outputs in self.expected)
        return replace(self, names=tuple(names), expected=expected)

    def difference(self, candidate: Path) -> Difference:
        """Run a candidate as it is written, without optimisations, and return how far its worst output is.

        Raises:
            CandidateError: onnxruntime does not load it or run it on a sample, or it lacks an output.
        """
        session = open_session(candidate, optimize=False, is_made=True)
        if lost := [name for name in self.names if name not in output_names(session)]:
            raise CandidateError(f"output {lost[0]!r} is gone")
        found = (
            run(session, sample, self.names, index=index, made=candidate) for index, sample in enumerate(self.samples)
        )
        return worst_difference(self.names, self.expected, found)


def original(
    model: Path,
    data: str | Path | Iterable[Sample] | None = None,
    *,
    images: ImageOptions | None = None,
    limit: int = _SAMPLES,
) -> Original:
    """Run a model as it is written, without optimisations, and keep what it answers.

    Args:
        model: the file.
        data: samples; None makes up inputs of the declared types, of which those count that the model runs.
        images: how image files become arrays.
        limit: most samples to use.

    Raises:
        ModelError: onnxruntime does not load the model.
        DataError: the samples do not fit, the model runs none of those that were made up, or it gives other outputs
            each time it runs.
    """
    inputs = inputs_of(load(model))
    session = open_session(model, optimize=False)
    names = tuple(output_names(session))
    if data is None:
        answered = list(islice(runnable_samples(session, inputs, "--data"), limit))
    else:
        given = open_samples(data, inputs, images=images, limit=limit)
        answered = [(sample, run(session, sample, index=index)) for index, sample in enumerate(given)]
    samples, expected = tuple(sample for sample, _ in answered), tuple(outputs for _, outputs in answered)
    # Each run computes the constant part of the model anew, so one sample has to do.
    again = worst_difference(names, expected[:1], (run(session, sample) for sample in samples[:1]))
    if again.share > ROUNDING:
        raise DataError(
            f"output {again.output!r} of the model differs between runs, so no rewriting can be compared; fix the "
            "seeds of its random operators"
        )
    return Original(samples, names, expected, data is None)


def find_culprits(
    names: Sequence[str], fault: str, fault_without: Callable[[frozenset[str]], str]
) -> Mapping[str, str]:
    """Find by halves which steps to leave out so that nothing is wrong any more.

    Steps are applied in one order, so the shortest beginning of it with which something is wrong ends with a culprit.
    What is wrong with all steps left out is no fault of theirs.

    Args:
        names: of the steps that change something, in any order.
        fault: what is wrong with all of them; an empty string where nothing is.
        fault_without: says what is wrong when some steps are left out; an empty string where nothing is.

    Returns:
        The steps to leave out, each with what is wrong with it; empty where leaving steps out does not help.

    >>> find_culprits(["a", "b", "c", "d"], "it is slow", lambda without: "" if "c" in without else "it is slow")
    {'c': 'it is slow'}
    """
    culprits: dict[str, str] = {}
    if not fault or fault_without(frozenset(names)):
        return culprits
    # With the first `good` of the steps that are left, nothing is wrong.
    good = 0
    while fault:
        left = [name for name in names if name not in culprits]
        bad, reason = len(left), fault
        while bad - good > 1:
            middle = (good + bad) // 2
            if now := fault_without(frozenset([*culprits, *left[middle:]])):
                bad, reason = middle, now
            else:
                good = middle
        culprits[left[good]] = reason
        fault = fault_without(frozenset(culprits)) if bad < len(left) else ""
    return culprits


def runnable_samples(session: Session, inputs: Sequence[Input], option: str) -> Iterator[tuple[Sample, Sequence[Any]]]:
    """Yield generated samples that a model runs, each with its outputs; errors recommend an option that gives samples.

    Raises:
        DataError: it runs none.
    """
    ran, reason = 0, ""
    for sample in generate_samples(inputs, _TRIES if inputs else 1):
        try:
            outputs = run(session, sample)
        except DataError as error:
            reason = reason or str(error)
            continue
        ran += 1
        yield sample, outputs
    if not ran:
        raise DataError(f"the model runs none of {_TRIES} made-up inputs, the first because {reason}; give {option}")


def worst_difference(
    names: Sequence[str], expected: Sequence[Sequence[Any]], found: Iterable[Sequence[Any]]
) -> Difference:
    """Return the worst output of two models on some samples, the first of equals.

    The scale of an output is its largest value in the sample, or in the median sample where that is larger: a sample of
    large values hides no error in others.
    """
    largest = [[_largest(outputs[index]) for outputs in expected] for index in range(len(names))]
    usual = [median(values) if values else 0.0 for values in largest]
    worst = Difference("", 0.0)
    for place, (outputs, others) in enumerate(zip(expected, found, strict=True)):
        for index, (name, one, other) in enumerate(zip(names, outputs, others, strict=True)):
            share = _share(one, other, max(usual[index], largest[index][place]))
            if share > worst.share:
                worst = Difference(name, share)
    return worst


def _share(expected: Any, found: Any, scale: float) -> float:
    if type(expected) is not type(found):
        return math.inf
    if isinstance(expected, list):
        pairs = zip(expected, found, strict=False)
        return math.inf if len(expected) != len(found) else max((_share(*pair, scale) for pair in pairs), default=0.0)
    if isinstance(expected, dict):
        if expected.keys() != found.keys():
            return math.inf
        return max((_share(expected[key], found[key], scale) for key in expected), default=0.0)
    if not isinstance(expected, np.ndarray):
        return _share_of_arrays(np.asarray(expected), np.asarray(found), scale)
    return _share_of_arrays(expected, found, scale)


def _share_of_arrays(expected: Any, found: Any, scale: float) -> float:
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return math.inf
    if not _is_float(expected):
        return 0.0 if np.array_equal(expected, found) else math.inf
    one, other = expected.astype(np.float64), found.astype(np.float64)
    finite = np.isfinite(one)
    if not np.array_equal(one[~finite], other[~finite], equal_nan=True) or not np.isfinite(other[finite]).all():
        return math.inf
    error = float(np.abs(other[finite] - one[finite]).max(initial=0.0))
    return error / scale if scale else math.inf if error else 0.0


def _largest(value: Any) -> float:
    if isinstance(value, list | dict):
        return max((_largest(one) for one in (value.values() if isinstance(value, dict) else value)), default=0.0)
    if not isinstance(value, float | np.ndarray) or not _is_float(np.asarray(value)):
        return 0.0
    numbers = np.asarray(value).astype(np.float64)
    return float(np.abs(numbers[np.isfinite(numbers)]).max(initial=0.0))


def _is_float(array: Any) -> bool:
    return is_floating(array.dtype)
