"""What an encoder of a package returns, looked at before anything is made of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxq.numerics.affine import Parameters, QTensor
from onnxq.numerics.blocks import grid_shape
from onnxq.numerics.formats import Format, format_named, scale_format_named
from onnxq.numerics.spec import Spec


def checked(
    found: object, spec: Spec, shape: Sequence[int], block: tuple[int, ...], given: Parameters | None
) -> QTensor:
    """Return codes that are what a Spec says.

    Args:
        found: what an encoder has returned.
        spec: of the weight.
        shape: of the weight.
        block: extents of the values that share a scale, one for each axis.
        given: scales and zero points that it was to use; None where it finds its own.

    Raises:
        TypeError: they are no codes.
        ValueError: they have another shape or type, or hold what has no meaning.
    """
    if not isinstance(found, QTensor):
        raise TypeError(f"it returned {type(found).__name__}, expected an onnxq.numerics.affine.QTensor")
    for sentence in _faults(found, spec, shape, block):
        raise ValueError(sentence)
    if given is not None and not _are_same(found.parameters, given):
        raise ValueError("it found scales of its own, expected those that it was given, which a kernel needs")
    return found


def _faults(found: QTensor, spec: Spec, shape: Sequence[int], block: tuple[int, ...]) -> Iterator[str]:
    """Yield what is wrong; each look rests on those before it."""
    format, parameters = format_named(spec.format), found.parameters
    if found.format != format or found.codes.dtype != format.dtype:
        yield f"its codes are {found.format.name} in {found.codes.dtype}, expected {format.name} in {format.dtype}"
    if found.codes.shape != tuple(shape):
        yield f"its codes have shape {list(found.codes.shape)}, expected that of the weight, {list(shape)}"
    if not _are_codes(found.codes, format):
        yield f"some of its codes are none of {format.name}, which are from {format.minimum:g} to {format.maximum:g}"
    yield from _faults_of_scales(parameters, spec, shape, block)
    zero = parameters.zero_point
    if spec.symmetric is not (zero is None):
        yield f"it has {'no ' if zero is None else ''}zero points, expected {'none' if spec.symmetric else 'some'}"
    if zero is not None and (zero.dtype != format.dtype or zero.shape != parameters.scale.shape):
        yield f"its zero points are {zero.dtype} of shape {list(zero.shape)}, expected {format.dtype} like the scales"
    if zero is not None and not _are_codes(zero, format):
        yield f"some of its zero points are no codes of {format.name}"


def _faults_of_scales(
    parameters: Parameters, spec: Spec, shape: Sequence[int], block: tuple[int, ...]
) -> Iterator[str]:
    scale, whole, grid = parameters.scale, parameters.tensor_scale, grid_shape(shape, block)
    if scale.dtype != np.float32 or scale.shape != grid:
        yield f"its scales are {scale.dtype} of shape {list(scale.shape)}, expected float32 of shape {list(grid)}"
    if _within(parameters.block_in(shape), shape) != _within(block, shape):
        yield f"its scales are of blocks of {list(parameters.block_in(shape))}, expected {list(block)}"
    if not (np.isfinite(scale) & (scale > 0)).all():
        yield "some of its scales are NaN, infinite, zero or negative"
    format = scale_format_named(spec.scale)
    if not np.array_equal(format.round_nearest(scale), scale):
        yield f"some of its scales are no {format.name}, of {format.smallest:g} to {format.maximum:g}; round them to it"
    if spec.two_level is (whole is None) or (whole is not None and not 0 < whole < np.inf):
        yield f"the scale of its tensor is {whole}, expected {'one above 0' if spec.two_level else 'None'}"


def _within(block: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """Return the extents of a block that is cut off where the weight ends."""
    return tuple(min(length, max(extent, 1)) for length, extent in zip(block, shape, strict=True))


def _are_codes(codes: NDArray[Any], format: Format) -> bool:
    if not format.is_float:
        return bool(format.minimum <= codes.min(initial=0) and codes.max(initial=0) <= format.maximum)
    # Bytes hold more patterns than a format has codes.
    patterns = codes.view(np.uint8)
    return bool((patterns < 2**format.bits).all() and np.isfinite(format.values[patterns]).all())


def _are_same(found: Parameters, given: Parameters) -> bool:
    pairs = ((found.scale, given.scale), (found.zero_point, given.zero_point), (found.tensor_scale, given.tensor_scale))
    return all(np.array_equal(one, other) if other is not None else one is None for one, other in pairs)  # type: ignore[arg-type]
