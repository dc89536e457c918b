"""Compare the outputs of a rewritten model with those of the original, up to the rounding of floats."""

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
    """The difference of an output between a candidate and the original.

    Attributes:
        output: name of the output.
        share: largest difference of two elements, as a share of the largest element; infinite if shapes, types, NaN or
            infinities differ, or elements that are not floats.
    """

    output: str
    share: float


@dataclass(frozen=True, eq=False)
class Original:
    """The outputs of the original model on a few samples.

    Attributes:
        samples: the inputs.
        names: names of the outputs.
        expected: the outputs of each sample.
        made_up: whether the samples were generated.
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
        """Run a candidate without optimisations, and return the largest difference of an output.

        Raises:
            CandidateError: onnxruntime does not load or run the candidate, or the candidate lacks an output.
        """
        session = open_session(candidate, optimize=False, is_made=True)
        if lost := [name for name in self.names if name not in output_names(session)]:
            raise CandidateError(f"output {lost[0]!r} is gone")
        outputs = (
            run(session, sample, self.names, index=index, made=candidate) for index, sample in enumerate(self.samples)
        )
        return worst_difference(self.names, self.expected, outputs)


def original(
    model: Path,
    data: str | Path | Iterable[Sample] | None = None,
    *,
    images: ImageOptions | None = None,
    limit: int = _SAMPLES,
) -> Original:
    """Run a model without optimisations, and keep its outputs.

    Args:
        model: the file.
        data: samples; None generates inputs of the declared types, and keeps those that the model runs.
        images: how image files become arrays.
        limit: most samples to use.

    Raises:
        ModelError: onnxruntime does not load the model.
        DataError: the samples do not fit, the model runs none of the generated samples, or its outputs differ from run
            to run.
    """
    inputs = inputs_of(load(model))
    session = open_session(model, optimize=False)
    names = tuple(output_names(session))
    if data is None:
        answered = list(islice(runnable_samples(session, inputs, "--data"), limit))
    else:
        opened = open_samples(data, inputs, images=images, limit=limit)
        answered = [(sample, run(session, sample, index=index)) for index, sample in enumerate(opened)]
    samples, expected = tuple(sample for sample, _ in answered), tuple(outputs for _, outputs in answered)
    # Without optimisations each run computes the constant part of the model again, so only one sample is repeated.
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
    """Find by bisection the steps that must be left out to avoid a fault.

    Steps are applied in a fixed order, so the shortest faulty prefix of them ends with a culprit. A fault that remains
    without any step is not caused by one.

    Args:
        names: names of the steps that change something, in any order.
        fault: the fault with all of them; an empty string for none.
        fault_without: returns the fault that remains if some steps are left out; an empty string for none.

    Returns:
        The steps to leave out, each with its fault; empty if leaving steps out does not help.

    >>> find_culprits(["a", "b", "c", "d"], "it is slow", lambda without: "" if "c" in without else "it is slow")
    {'c': 'it is slow'}
    """
    culprits: dict[str, str] = {}
    if not fault or fault_without(frozenset(names)):
        return culprits
    # With the first `good` of the remaining steps nothing is wrong.
    good = 0
    while fault:
        remaining = [name for name in names if name not in culprits]
        bad, reason = len(remaining), fault
        while bad - good > 1:
            middle = (good + bad) // 2
            if now := fault_without(frozenset([*culprits, *remaining[middle:]])):
                bad, reason = middle, now
            else:
                good = middle
        culprits[remaining[good]] = reason
        fault = fault_without(frozenset(culprits)) if bad < len(remaining) else ""
    return culprits


def runnable_samples(session: Session, inputs: Sequence[Input], option: str) -> Iterator[tuple[Sample, Sequence[Any]]]:
    """Yield the generated samples that a model runs, each with its outputs.

    Raises:
        DataError: the model runs none of them; the message recommends ``option``, which takes samples.
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
        raise DataError(f"the model runs none of {_TRIES} generated inputs, the first because {reason}; give {option}")


def worst_difference(
    names: Sequence[str], expected: Sequence[Sequence[Any]], candidate: Iterable[Sequence[Any]]
) -> Difference:
    """Return the largest difference between the outputs of two models; the first of equal ones.

    The scale of an output is its largest value in the sample, or in the median sample if that is larger, so that a
    sample of large values hides no error in other samples.
    """
    largest = [[_largest(outputs[index]) for outputs in expected] for index in range(len(names))]
    usual = [median(values) if values else 0.0 for values in largest]
    worst = Difference("", 0.0)
    for place, (outputs, candidate_outputs) in enumerate(zip(expected, candidate, strict=True)):
        for index, (name, reference, output) in enumerate(zip(names, outputs, candidate_outputs, strict=True)):
            share = _share(reference, output, max(usual[index], largest[index][place]))
            if share > worst.share:
                worst = Difference(name, share)
    return worst


def _share(expected: Any, actual: Any, scale: float) -> float:
    if type(expected) is not type(actual):
        return math.inf
    if isinstance(expected, list):
        pairs = zip(expected, actual, strict=False)
        return math.inf if len(expected) != len(actual) else max((_share(*pair, scale) for pair in pairs), default=0.0)
    if isinstance(expected, dict):
        if expected.keys() != actual.keys():
            return math.inf
        return max((_share(expected[key], actual[key], scale) for key in expected), default=0.0)
    return _share_of_arrays(np.asarray(expected), np.asarray(actual), scale)


def _share_of_arrays(expected: Any, actual: Any, scale: float) -> float:
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return math.inf
    if not is_floating(expected.dtype):
        return 0.0 if np.array_equal(expected, actual) else math.inf
    left, right = expected.astype(np.float64), actual.astype(np.float64)
    finite = np.isfinite(left)
    if not np.array_equal(left[~finite], right[~finite], equal_nan=True) or not np.isfinite(right[finite]).all():
        return math.inf
    error = float(np.abs(right[finite] - left[finite]).max(initial=0.0))
    return error / scale if scale else math.inf if error else 0.0


def _largest(value: Any) -> float:
    if isinstance(value, list | dict):
        return max((_largest(entry) for entry in (value.values() if isinstance(value, dict) else value)), default=0.0)
    if not isinstance(value, float | np.ndarray) or not is_floating(np.asarray(value).dtype):
        return 0.0
    numbers = np.asarray(value).astype(np.float64)
    return float(np.abs(numbers[np.isfinite(numbers)]).max(initial=0.0))
