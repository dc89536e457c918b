"""Whether the first dimension of a model's inputs counts samples, so that files may hold a stack of them."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import TypeAlias

Dim: TypeAlias = int | str | None
Dims: TypeAlias = tuple[Dim, ...]

# Such as s77 of torch.export, unk__12 of tf2onnx, DynamicDimension.0 of Paddle, x_dynamic_axes_1 and Concat461_dim_0 of
# torch.onnx: written by programs, they say nothing.
_NUMBERED = re.compile(
    r"[su]\d+|unk(nown)?_*\d+|dynamic_?dim(ension)?[._]?\d*|(.*_)?(dynamic_axes|dim|axis|d)_?\d+", re.IGNORECASE
)


def counts_samples(dim: Dim) -> bool:
    """Tell whether a leading dimension counts samples by what it says: it is 1, or called so.

    >>> [counts_samples(dim) for dim in (1, "batch_size", "N", "time", 3, None)]
    [True, True, True, False, False, False]
    """
    return dim == 1 or _named_batch(dim)


def says_nothing(dim: Dim) -> bool:
    """Tell whether a dimension is open and has no name, or one that a program numbered.

    >>> [says_nothing(dim) for dim in (None, "s0", "unk__12", "DynamicDimension.0", "frames", 1)]
    [True, True, True, True, False, False]
    """
    return dim is None or (isinstance(dim, str) and _NUMBERED.fullmatch(dim) is not None)


def open_batch(inputs: Collection[Dims | None], outputs: Collection[Dims | None]) -> bool:
    """Tell whether first dimensions that say nothing count samples, judged by all inputs and outputs of a model.

    They do where the first dimension of every input counts samples or says nothing, and one of them counts samples; or
    where the first dimension of every output is open as well, each input has further dimensions, for what is one
    dimension long is a signal, and none of these is called batch.

    Args:
        inputs: dimensions of each input; None where the rank is unknown.
        outputs: dimensions of each output, likewise.

    >>> open_batch([(None, 3, 224, 224)], [("s1", 1000)])
    True
    >>> open_batch([(None, 80)], [(1, 40)])
    False
    """
    if not all(dims and (counts_samples(dims[0]) or says_nothing(dims[0])) for dims in inputs):
        return False
    if any(dims and counts_samples(dims[0]) for dims in inputs):
        return True
    return (
        all(dims is None or (dims and (says_nothing(dims[0]) or _named_batch(dims[0]))) for dims in outputs)
        and all(dims and len(dims) > 1 for dims in inputs)
        and not any(_named_batch(dim) for dims in (*inputs, *outputs) for dim in _further(dims))
    )


def _further(dims: Dims | None) -> Sequence[Dim]:
    return dims[1:] if dims else ()


def _named_batch(dim: Dim) -> bool:
    return isinstance(dim, str) and ("batch" in dim.lower() or dim.lower() in ("b", "bs", "n"))
