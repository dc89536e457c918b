"""Which samples a model is least faithful on."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from onnxq.data.inputs import Sample, is_floating
from onnxq.evaluation.agreement import OutputAgreement, agreement_of
from onnxq.evaluation.reference import Reference, run_beside
from onnxq.evaluation.views import Views


def hardest(reference: Path, candidate: Path, samples: Iterable[Sample], most: int) -> list[int]:
    """Return the places of the samples that add most noise to the output that has most for its signal.

    Args:
        reference: file of the float model.
        candidate: file of a model with the same inputs and outputs.
        samples: the data, of which one at a time is held.
        most: how many places to return at most; samples without noise are none of them.

    Returns:
        Rising places.
    """
    views = Views.of(reference, candidate)
    one, other = Reference(reference, views), views.open(candidate)
    rows = []
    for expected, found in run_beside(one, other, samples):
        agreement = agreement_of(views.names, [(expected, found)])
        rows.append([_energies(*each) for each in zip(expected, found, agreement.outputs, strict=True)])
    if not rows or not views.names:
        return []
    energies = np.array(rows)
    signals, noises = energies[..., 0], energies[..., 1]
    shares = noises / np.maximum(signals.sum(0), np.finfo(np.float64).tiny)
    of_worst = shares[:, int(np.argmax(shares.sum(0)))]
    noisiest = np.argsort(-of_worst, kind="stable")[:most]
    return sorted(int(place) for place in noisiest if of_worst[place] > 0)


def _energies(expected: Any, found: Any, output: OutputAgreement) -> tuple[float, float]:
    """Return the energies of the signal and of the noise; of labels how many there are, and how many differ."""
    if not (output.same_shapes and output.finite):
        return 1.0, math.inf
    if not isinstance(expected, np.ndarray) or not is_floating(expected.dtype):
        return float(output.compared), float(output.differing)
    usable = np.isfinite(expected)
    signal, error = expected[usable].astype(np.float64), found[usable].astype(np.float64)
    error -= signal
    return float(np.vdot(signal, signal)), float(np.vdot(error, error))
