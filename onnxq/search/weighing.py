"""What each sample counts where noise is measured to choose plans by."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# However much or little of what can be trusted depends on a sample: without the codes that make it so noisy, as in the
# plans that will do, it is noisy no more.
_LEAST, _MOST = 0.3, 6.0


def weights_of(noises: NDArray[np.float64], influences: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return what each sample counts at each output, so that the noise of all samples stays what it is.

    Args:
        noises: noise-to-signal ratio with all codes, of shape (samples, outputs).
        influences: how much what can be trusted depends on each, of the same shape; see `onnxq.evaluation.bounds`.

    Returns:
        float64 of the same shape.

    >>> weights_of(np.array([[1.0], [1.0], [4.0]]), np.array([[-2.0], [1.0], [99.0]])).round(2).tolist()
    [[0.07], [0.24], [1.42]]
    """
    weights = influences.clip(_LEAST, _MOST)
    weighed = (weights * noises).sum(0)
    return np.asarray(weights * np.divide(noises.sum(0), weighed, out=np.ones_like(weighed), where=weighed > 0))


def typical_sample(noises: NDArray[np.float64]) -> int:
    """Return the place of the sample with which half of the noise of all is reached, from the quietest on.

    That is the noisiest one where it has half of the noise, and else one like most.

    >>> typical_sample(np.array([5.0, 1.0, 3.0])), typical_sample(np.array([5.0, 1.0, 5.0, 4.0, 6.0]))
    (0, 2)
    """
    order = np.argsort(noises, kind="stable")
    return int(order[int(np.searchsorted(np.cumsum(noises[order]), noises.sum() / 2))])
