"""Codebooks: codes that stand for any numbers, told by a table."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Codebook:
    """The number that each code stands for.

    Attributes:
        numbers: in ascending order, zero among them.
    """

    numbers: tuple[float, ...]

    @property
    def bits(self) -> int:
        """Bits of one code."""
        return (len(self.numbers) - 1).bit_length()

    @property
    def zero(self) -> int:
        """The code of zero."""
        return self.numbers.index(0.0)

    @cached_property
    def _middles(self) -> npt.NDArray[np.float32]:
        exact = np.array(self.numbers)
        middles: npt.NDArray[np.float32] = ((exact[:-1] + exact[1:]) / 2).astype(np.float32)
        return middles

    def encode_into(self, values: npt.NDArray[np.float32], codes: npt.NDArray[np.uint8]) -> None:
        """Write the code of the nearest number, of the lower one in the middle between two.

        Args:
            values: of any shape.
            codes: receives the codes, shape of ``values``.
        """
        np.copyto(codes, np.searchsorted(self._middles, values), casting="unsafe")
