"""What is summed of one output, sample by sample."""

from __future__ import annotations

import numpy as np

from onnxq.judging.bounds import RISK, lower_bound
from onnxq.judging.tally import Tally


def tally_of(*pairs: tuple[object, object]) -> Tally:
    tally = Tally()
    for pair in pairs:
        tally.add_sample(*pair)
    return tally


def test_energies_are_kept_by_sample_and_summed_over_all() -> None:
    tally = tally_of((np.array([3.0, 4.0]), np.array([3.0, 4.5])), (np.array([1.0, 0.0]), np.array([1.0, 0.0])))
    assert tally.energies == [(25.0, 0.25), (1.0, 0.0)]
    assert (tally.signal, tally.noise, tally.largest) == (26.0, 0.25, 0.5)
    assert tally.bound(RISK) == lower_bound(tally.energies)


def test_what_is_no_float_is_counted() -> None:
    tally = tally_of((np.array([1, 2, 3]), np.array([1, 2, 4])), (np.array(["a"], object), np.array(["b"], object)))
    assert (tally.is_float, tally.equal, tally.compared) == (False, 2, 4)
