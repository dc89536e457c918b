"""Which weights are rounded so that their errors cancel, what has to be seen of data for that, and what it tells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from onnxq.calibration.gram import Gram
from onnxq.calibration.requests import Option, Request
from onnxq.ir import Node, Variable
from onnxq.numerics.compensation import DAMPING, Moments
from onnxq.numerics.formats import format_named
from onnxq.numerics.matrices import Matrices
from onnxq.numerics.spec import Method, Spec

ROWS: Final = 8192
"""Rows of data that Gram matrices are made of, from all samples together."""
GRAM_BYTES: Final = 1 << 30
"""Bytes that the Gram matrices of a group of samples take at most, unless less is wanted."""
# Of convolutions in groups, whose many matrices have few columns, one row in so many.
_GROUPED = 8

_CELLS = frozenset({"GRU", "LSTM", "RNN"})
_MOST_BITS = 8
_WEIGHT, _RECURRENCE = 1, 2
_BYTES = 8


@dataclass(frozen=True)
class Sums:
    """How a weight is multiplied.

    Attributes:
        request: what is to be seen of its data.
        matrices: how the weight is matrices that multiply it.
    """

    request: Request
    matrices: Matrices

    @property
    def gram_bytes(self) -> int:
        """Bytes that the Gram matrices of its data take at most."""
        groups, _, columns = self.matrices.shape
        return groups * columns * columns * _BYTES


@dataclass(frozen=True)
class Compensation:
    """Error-compensating rounding, and the weights that get it.

    Attributes:
        rows: most rows of data that each sample shows.
        damping: share of the mean of a Gram matrix's diagonal that is added to it.
        bits: weights of more bits are rounded.
        memory: bytes that all Gram matrices may take; weights whose matrices have no room are rounded.
    """

    rows: int
    damping: float = DAMPING
    bits: int = _MOST_BITS
    memory: int = GRAM_BYTES

    @classmethod
    def of_samples(
        cls, samples: int, damping: float = DAMPING, bits: int = _MOST_BITS, memory: int = GRAM_BYTES
    ) -> Compensation:
        """Return one whose Gram matrices have about ``ROWS`` rows when each of so many samples shows as many.

        >>> Compensation.of_samples(100).rows
        82
        """
        return cls(-(-ROWS // max(samples, 1)), damping, bits, memory)

    def covers(self, spec: Spec) -> bool:
        """Whether weights of a Spec get it; what a package's encoder chooses stays."""
        free = isinstance(spec.method, Method) and not spec.is_followed
        return free and format_named(spec.format).bits <= min(self.bits, _MOST_BITS)


@dataclass(frozen=True, eq=False)
class Terms:
    """What is known of the data that a weight multiplies.

    Attributes:
        moments: of the terms that the columns of its matrices are multiplied with.
        matrices: how the weight is matrices that multiply it.
        damping: share of the mean of a Gram matrix's diagonal that is added to it.
    """

    moments: Moments
    matrices: Matrices
    damping: float = DAMPING


def sums_of(node: Node, index: int, shape: tuple[int, ...], rows: int) -> Sums | None:
    """Return how a node multiplies its input of that index and shape, where that is known.

    Args:
        node: of a prepared graph.
        index: of the weight among its inputs.
        shape: of the weight.
        rows: most rows of data that each sample shows.
    """
    if node.op in _CELLS:
        return _recurrent_sums(node, index, shape, rows)
    data: Any = node.inputs[0]
    if not isinstance(data, Variable) or index != _WEIGHT:
        return None
    if node.op == "Conv":
        return _patches(node, data, shape, rows)
    if node.op in ("Gemm", "MatMul") and len(shape) == 2:
        transposed = node.op == "Gemm" and bool(node.attrs.get("transB", 0))
        axis = 0 if node.op == "Gemm" and node.attrs.get("transA", 0) else -1
        request = Request.of(data.name, "gram", axis, rows=rows)
        return Sums(request, Matrices.of_product((shape[0], shape[1]), transposed=transposed))
    return None


def _patches(node: Node, data: Variable, shape: tuple[int, ...], rows: int) -> Sums | None:
    pads = [int(pad) for pad in node.attrs.get("pads", ())]
    if node.attrs.get("auto_pad", "NOTSET") != "NOTSET" or min(pads, default=0) < 0:
        return None
    groups = int(node.attrs.get("group", 1))
    extents = {"kernel": shape[2:], "pads": pads}
    extents |= {name: node.attrs[name] for name in ("strides", "dilations") if name in node.attrs}
    options: dict[str, Option] = {name: ",".join(map(str, numbers)) for name, numbers in extents.items() if numbers}
    rows = rows if groups == 1 else -(-rows // _GROUPED)
    request = Request.of(data.name, "gram", 1, rows=rows, groups=groups, **options)
    return Sums(request, Matrices.of_convolution(shape, groups))


def _recurrent_sums(node: Node, index: int, shape: tuple[int, ...], rows: int) -> Sums | None:
    """Return how a cell of one direction multiplies its weights.

    What it gives at one step is what it multiplies at the next; of that, only the first state is not seen.
    """
    data: Any = node.inputs[0] if index == _WEIGHT else node.outputs[0] if index == _RECURRENCE else None
    if not isinstance(data, Variable) or data.is_empty() or shape[0] != 1 or node.attrs.get("layout", 0):
        return None
    return Sums(Request.of(data.name, "gram", -1, rows=rows), Matrices.of_cell(shape))


def within(sizes: Mapping[Request, int], memory: int) -> Iterator[Request]:
    """Yield the requests of the smallest sizes that have room in the memory together."""
    for request, size in sorted(sizes.items(), key=lambda one: one[1]):
        memory -= size
        if memory < 0:
            return
        yield request


def terms_of(gram: Gram, sums: Sums, factors: NDArray[np.float64] | None, damping: float, *, corrected: bool) -> Terms:
    """Return what is known of the data that a weight multiplies.

    Args:
        gram: what was seen of it.
        sums: how the weight multiplies it.
        factors: what each of its terms is divided by, in the weight's shape; None where none is.
        damping: share of the mean of a Gram matrix's diagonal that is added to it.
        corrected: whether a bias makes up for what is lost in the mean.
    """
    products, means = gram.moments(np.float32), gram.means()
    if factors is not None:
        # Every output is multiplied with the same terms.
        each = sums.matrices.view(factors)[:, 0]
        # A matrix that is not finite, as that of very large values is not, is not used.
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            products /= (each[:, :, None] * each[:, None]).astype(np.float32)
        means = means / each
    return Terms(Moments(products, means if corrected else None), sums.matrices, damping)
