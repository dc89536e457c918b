"""The table of encoders: how a weight becomes codes, by the method that its Spec names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxq.errors import ModelError
from onnxq.evidence.evidence import Evidence
from onnxq.numbers import burn, torch_observers
from onnxq.numbers.blocks import block_shape
from onnxq.numbers.formats import format_named
from onnxq.numbers.numerics import Parameters, QTensor, quantize
from onnxq.numbers.pairs import Pairs, fitted, scales_for_pairs
from onnxq.numbers.scale_search import chosen_parameters
from onnxq.numbers.scales import block_range
from onnxq.numbers.spec import Method, Spec
from onnxq.planning.plan import Weight

Array = npt.NDArray[Any]
Scales = npt.NDArray[np.float32]
NOTHING_SEEN = Evidence()


@dataclass(frozen=True)
class Encoder:
    """One way to choose the codes of a weight.

    Attributes:
        name: the method of a Spec that it is asked for by.
        encode: takes the finite values, what is planned for them, what calibration saw, and the scales to be used in
            place of its own where an accumulator asks for larger ones; returns codes of the values' shape, with scales
            of their rank, one for each block along each axis.
    """

    name: Method
    encode: Callable[[Array, Weight, Evidence, Scales | None], QTensor]


def _searched(values: Array, weight: Weight, _: Evidence, scale: Scales | None) -> QTensor:
    """Round to the nearest code, with the scales that a range, or a search from that, gives."""
    format, block = format_named(weight.spec.format), _block(values, weight)
    if scale is not None:
        return quantize(values, Parameters(scale, None, block=block), format)
    parameters = chosen_parameters(values, *block_range(values, block), weight.spec, block)
    return quantize(values, parameters, format)


def _burn(values: Array, weight: Weight, _: Evidence, scale: Scales | None) -> QTensor:
    """Compute as Burn does, which has no integer kernel whose accumulator could ask for larger scales."""
    assert scale is None, "what Burn quantizes is decoded, not multiplied"
    return burn.encode(values, weight.spec)


def _torch(values: Array, weight: Weight, evidence: Evidence, scale: Scales | None) -> QTensor:
    """Quantize as a MinMaxObserver and the kernel behind it do; channels may lie along any axis."""
    if scale is not None:
        return _searched(values, weight, evidence, scale)
    low, high = block_range(values, _block(values, weight))
    format = format_named(weight.spec.format)
    parameters = torch_observers.Observer(format.name, weight.spec.symmetric).parameters(low, high)
    return torch_observers.quantize(values, parameters, format)


ENCODERS: Mapping[Method, Encoder] = MappingProxyType(
    {
        encoder.name: encoder
        for encoder in (
            Encoder(Method.MINMAX, _searched),
            Encoder(Method.MSE, _searched),
            Encoder(Method.HQQ, _searched),
            Encoder(Method.BURN, _burn),
            Encoder(Method.TORCH, _torch),
        )
    }
)
"""Every encoder by the method that asks for it."""


def encode_weight(
    values: Array, weight: Weight, evidence: Evidence = NOTHING_SEEN, scale: Scales | None = None
) -> QTensor:
    """Choose the codes of a weight as its Spec says, after a look for values that have none.

    Scales are computed in float64 whatever the weight's type, brought to the scale's format, and only then divide.
    An all-zero block has scale 1. The methods of other frameworks do all as these do.

    Args:
        values: of a float type and any rank.
        weight: its Spec, and the axes that this speaks of.
        evidence: what calibration saw, for encoders that look at data.
        scale: float32 scales to be used in place of the encoder's own.

    Returns:
        Codes of the weight's shape; scale and zero point have its rank, with one entry for each block along each axis.

    Raises:
        SchemeError: the block has more axes than the weight.
        ModelError: the weight holds NaN or infinity.
    """
    if not np.isfinite([values.min(initial=0), values.max(initial=0)]).all():
        name = f"weight {weight.tensor}" if weight.tensor else "the weight"
        raise ModelError(f"{name} holds NaN or infinity, which have no code; leave its node in float")
    encode = ENCODERS[weight.spec.method].encode
    found = encode(values, weight, evidence, scale)
    if scale is None and weight.pairs is not Pairs.NONE:
        larger = scales_for_pairs(values, found.parameters.scale, weight.pairs, weight.axis, weight.reduction_axis)
        if not np.array_equal(larger, found.parameters.scale):
            found = encode(values, weight, evidence, larger)
    return paired(found, weight)


def paired(found: QTensor, weight: Weight) -> QTensor:
    """Return codes of a weight that fit in pairs, where a kernel takes them so."""
    if weight.pairs is Pairs.NONE:
        return found
    return replace(found, codes=fitted(found.codes, weight.pairs, weight.axis, weight.reduction_axis))


def encode_array(values: Array, spec: Spec, *, channel_axis: int, reduction_axis: int) -> QTensor:
    """Choose the codes of an array as a Spec says, without a model around it; see `encode_weight`.

    >>> tensor = encode_array(np.array([[7.0, -5.0, 0.3]]), Spec("int4-narrow"), channel_axis=0, reduction_axis=1)
    >>> tensor.codes, tensor.parameters.scale
    (array([[ 7, -5,  0]], dtype=int8), array([[1.]], dtype=float32))
    """
    return encode_weight(values, Weight(0, "", spec, channel_axis, values.size, reduction_axis))


def _block(values: Array, weight: Weight) -> tuple[int, ...]:
    return block_shape(weight.spec.per, values.shape, channel_axis=weight.axis, reduction_axis=weight.reduction_axis)
