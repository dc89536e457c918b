"""Audio files: one channel, at the model's rate, in windows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxq.data.images import ImageOptions
from onnxq.data.inputs import Input, is_floating, required
from onnxq.data.sources.source import has_suffix, library
from onnxq.errors import DataError

_EXTRA = "onnxq[audio]"


@dataclass(frozen=True)
class Audio:
    """``.wav``, ``.flac``, ``.ogg`` and ``.mp3``, their channels averaged, as floats from -1 to 1.

    The first input of floats takes the samples along its last axis; an input of whole numbers without axes takes the
    rate.

    Attributes:
        rate: samples a second that the model wants; others are resampled.
        seconds: length of a window; 0 takes the model's own, or the whole file where the model says none. Windows do
            not overlap, and of a file the last one that is not full is left out, unless it is the only one.
    """

    rate: int = 16_000
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.rate < 1 or not 0 <= self.seconds < np.inf:
            raise DataError(f"audio has rate {self.rate} and seconds {self.seconds}, expected 1 or more, and 0 or more")

    def takes(self, given: object) -> bool:
        """Return whether it is such a file."""
        return has_suffix(given, ".wav", ".flac", ".ogg", ".mp3")

    def rows(self, given: Any, inputs: Sequence[Input], images: ImageOptions) -> Iterable[object]:
        """Return the windows of a file."""
        entry = next((one for one in required(inputs) if is_floating(one.dtype) and one.shape), None)
        if entry is None or not entry.shape:
            raise DataError(
                f"{given} is audio, and no input of the model takes floats along an axis; save .npz instead"
            )
        last, rank = entry.shape[-1], len(entry.shape)
        window = round(self.seconds * self.rate) or (last if isinstance(last, int) and last > 1 else 0)
        rates = {
            one.name: np.array(self.rate, one.dtype) for one in inputs if one.shape == () and one.dtype.kind in "iu"
        }
        for samples in _windows(self._decoded(given), window):
            yield {entry.name: samples.reshape(*[1] * (rank - 1), -1).astype(entry.dtype), **rates}

    def _decoded(self, given: Any) -> NDArray[np.float32]:
        soundfile = library("soundfile", _EXTRA, given)
        try:
            with given.open("rb") as stream:
                channels, rate = soundfile.read(stream, dtype="float32", always_2d=True)
        except (soundfile.LibsndfileError, OSError, RuntimeError) as error:
            raise DataError(f"{given} cannot be read as audio: {error}; save it again") from error
        samples: NDArray[np.float32] = channels.mean(axis=1)
        return samples if rate == self.rate else library("soxr", _EXTRA, given).resample(samples, rate, self.rate)


def _windows(samples: NDArray[np.float32], size: int) -> Iterator[NDArray[np.float32]]:
    """Yield windows of a size, or all samples where it is 0; silence fills the only one."""
    if not size:
        yield samples
        return
    if len(samples) < size:
        yield np.pad(samples, (0, size - len(samples)))
    for start in range(0, len(samples) - size + 1, size):
        yield samples[start : start + size]
