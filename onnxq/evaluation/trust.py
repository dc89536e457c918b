"""How faithful a model can be trusted to be on samples it has not seen, judged by what it did on a few."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxq.data.inputs import is_floating
from onnxq.evaluation.bounds import Energies, influences, spread_of_parts
from onnxq.evaluation.probabilities import are_probabilities, energies_of_logarithms
from onnxq.evaluation.tally import Tally, energies_of, total, widened
from onnxq.runtime.sessions import Array

# Silent outputs that are not equal must not make the ratio infinite.
_LOWEST_SQNR = -300.0

Pair = tuple[Sequence[Any], Sequence[Any]]
"""The reference's outputs for a sample, and the candidate's."""


@dataclass(frozen=True)
class Trust:
    """What a few samples say of all others.

    Attributes:
        sqnr: SQNR in decibels that the worst output can be trusted to have; -inf when an output is not finite.
        noise: expected noise-to-signal ratio at the worst output, for comparing plans and not for trusting one.
    """

    sqnr: float
    noise: float


def trust(pairs: Sequence[Pair], files: Sequence[str] = ()) -> Trust:
    """Judge a candidate by what it and the reference gave for a few samples.

    What an output is trusted with is the lower 95 % confidence bound of its SQNR over all samples, as in a verdict; see
    `Tally.bound`. All that was made of one sample counts once, and so do the samples of one file, see `of_files`.

    Several outputs need no allowance: the least of their bounds is wrong only where that of the output is wrong which
    is worst in truth (intersection-union test; Berger, Technometrics 1982).

    Args:
        pairs: for each sample, the outputs of both models.
        files: of each sample, see `shared_files`; nothing where each counts by itself.
    """
    outputs = [_trust(_output(pairs, place), files) for place in range(len(pairs[0][0]))]
    return Trust(min((one.sqnr for one in outputs), default=math.inf), max((one.noise for one in outputs), default=0.0))


def noise_by_sample(pairs: Sequence[Pair]) -> NDArray[np.float64]:
    """Return what each sample adds to the noise-to-signal ratio of each output, for telling which candidate is better.

    Probabilities are compared by their logarithms, about the mean of each row: these are what entered the Softmax.
    Behind it most errors vanish, and the few answers that turn over decide, which is luck. What labels or sequences
    tell, that is judged all together, counts for all samples alike.

    Args:
        pairs: for each sample, the outputs of both models.

    Returns:
        float64 of shape (samples, outputs), NaN or infinite where an output is not finite.
    """
    columns = [_noises(_output(pairs, place)) for place in range(len(pairs[0][0]))]
    return np.stack(columns, 1) if columns else np.zeros((len(pairs), 0))


def influence_by_sample(pairs: Sequence[Pair], files: Sequence[str] = ()) -> NDArray[np.float64]:
    """Return how much what can be trusted depends on the noise of each sample at each output; see `influences`.

    Args:
        pairs: for each sample, the outputs of both models.
        files: of each sample, see `trust`.

    Returns:
        float64 of shape (samples, outputs); ones for what labels or sequences tell.
    """
    columns = [_influences(_output(pairs, place), files) for place in range(len(pairs[0][0]))]
    return np.stack(columns, 1) if columns else np.ones((len(pairs), 0))


def _influences(pairs: Sequence[tuple[Any, Any]], files: Sequence[str]) -> NDArray[np.float64]:
    wide = _floats(pairs)
    if wide is None:
        return np.ones(len(pairs))
    return influences(_compared(wide), [spread_of_parts(*pair) for pair in wide], files)


def _compared(wide: Sequence[tuple[Array, Array]]) -> list[Energies]:
    """Return the energies of each sample, of probabilities those of their logarithms."""
    probable = all(are_probabilities(one) for one, _ in wide)
    return [energies_of_logarithms(*pair) for pair in wide] if probable else _in_range(wide)


def _noises(pairs: Sequence[tuple[Any, Any]]) -> NDArray[np.float64]:
    wide = _floats(pairs)
    if wide is None:
        return np.full(len(pairs), _trust(pairs).noise / len(pairs))
    seen = _compared(wide)
    signal, noises = total(seen)[0], np.array([noise for _, noise in seen])
    if signal == 0:
        return np.where(noises > 0, np.inf, 0.0)
    return np.asarray(noises / signal)


def _trust(pairs: Sequence[tuple[Any, Any]], files: Sequence[str] = ()) -> Trust:
    tally = Tally()
    for pair in pairs:
        tally.add_sample(*pair)
    if tally.is_float:
        return Trust(tally.bound(files=files), tally.noise)
    # A single label is right or wrong, so labels are judged all together.
    sqnr = tally.labels(files)
    return Trust(sqnr, 10 ** (-max(sqnr, _LOWEST_SQNR) / 10))


def _output(pairs: Sequence[Pair], place: int) -> list[tuple[Any, Any]]:
    return [(one[place], other[place]) for one, other in pairs]


def _floats(pairs: Sequence[tuple[Any, Any]]) -> list[tuple[Array, Array]] | None:
    """Return the pairs of an output in a type in which energies can be told, or None where it is no float."""
    arrays = all(isinstance(one, np.ndarray) and isinstance(other, np.ndarray) for one, other in pairs)
    if not arrays or not all(is_floating(one.dtype) and one.shape == other.shape for one, other in pairs):
        return None
    return [(widened(one), widened(other)) for one, other in pairs]


def _in_range(pairs: Sequence[tuple[Array, Array]]) -> list[Energies]:
    """Return the energies of each sample, in another unit where they would be too large or too small for floats."""
    seen = [energies_of(one, other) for one, other in pairs]
    if 0 < sum(map(sum, seen)) < math.inf:
        return seen
    return [energies_of(one, other) for one, other in _finite(pairs)]


def _finite(pairs: Sequence[tuple[Array, Array]]) -> list[tuple[Array, Array]]:
    """Return the pairs where the reference is finite, in its largest value's units, so that energies are in range."""
    usable = [np.isfinite(one) for one, _ in pairs]
    kept = [(one[where], other[where]) for (one, other), where in zip(pairs, usable, strict=True)]
    unit = max((float(np.abs(one).max(initial=0.0)) for one, _ in kept), default=0.0) or 1.0
    return [(one.astype(np.float64) / unit, other.astype(np.float64) / unit) for one, other in kept]
