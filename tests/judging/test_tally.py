"""What is summed of one output, sample by sample."""

from __future__ import annotations

import numpy as np

from onnxq.judging.bounds import RISK, lower_bound, of_files
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


def test_samples_of_one_file_count_as_one() -> None:
    generator = np.random.default_rng(0)
    pairs = [(one := generator.normal(0, 1, 4), one + generator.normal(0, 0.1, 4)) for _ in range(6)]
    tally, files = tally_of(*pairs), ["a", "a", "b", "b", "c", "c"]
    assert tally.bound(RISK, files) == lower_bound(of_files(tally.energies, files))
    labels = tally_of(*((np.array([0, 0]), np.array([one, one])) for one in (1, 1, 0, 0, 0, 0)))
    assert (labels.telling(()), labels.telling(files)) == (None, 1.0)


def test_what_is_no_float_is_counted() -> None:
    tally = tally_of((np.array([1, 2, 3]), np.array([1, 2, 4])), (np.array(["a"], object), np.array(["b"], object)))
    assert (tally.is_float, tally.equal, tally.compared) == (False, 2, 4)
