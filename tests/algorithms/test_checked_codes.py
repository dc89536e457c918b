"""Codes of others are taken when they are what the Spec says, and each fault has its sentence."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from onnxq.algorithms.checked_codes import checked
from onnxq.algorithms.encoders import encode_array
from onnxq.numerics.affine import Parameters, QTensor
from onnxq.numerics.blocks import block_shape
from onnxq.numerics.formats import FORMATS
from onnxq.numerics.spec import Granularity, Spec

SHAPE = (40, 3)
VALUES = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
BLOCKS, AFFINE = Spec("int4-narrow", (16,), scale="float16"), Spec("uint4", (16,), symmetric=False)
TWO_LEVELS = Spec("float4e2m1", (16,), scale="ue4m3", two_level=True)


def encoded(spec: Spec) -> QTensor:
    return encode_array(VALUES, spec, channel_axis=1, reduction_axis=0)


def looked_at(found: object, spec: Spec, given: Parameters | None = None) -> QTensor:
    return checked(found, spec, SHAPE, block_shape(spec.per, SHAPE, channel_axis=1, reduction_axis=0), given)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "int32"])
@pytest.mark.parametrize("per", [*Granularity, (16,), (2, 3), (64,)])
def test_what_our_own_encoders_return_is_taken(name: str, per: Any) -> None:
    for scale in ("float32", "bfloat16"):
        spec = Spec(name, per, symmetric=FORMATS[name].signed, scale=scale)
        found = encoded(spec)
        assert looked_at(found, spec) is found
        assert looked_at(found, spec, found.parameters) is found


def test_two_levels_and_blocks_that_follow_from_the_scales_are_taken() -> None:
    found = encoded(TWO_LEVELS)
    assert looked_at(found, TWO_LEVELS) is found
    channels = Spec("int8", Granularity.CHANNEL)
    plain = encoded(channels)
    bare = replace(plain, parameters=replace(plain.parameters, block=None))
    assert looked_at(bare, channels) is bare


def with_codes(spec: Spec, *codes: Any) -> QTensor:
    """Return codes of which the first are others."""
    found = encoded(spec)
    changed = found.codes.copy()
    changed.view(np.uint8).reshape(-1)[: len(codes)] = np.array(codes).astype(np.uint8)
    return replace(found, codes=changed)


def with_parameters(spec: Spec, **changes: Any) -> QTensor:
    found = encoded(spec)
    return replace(found, parameters=replace(found.parameters, **changes))


def with_scale(spec: Spec, value: float) -> QTensor:
    scale = encoded(spec).parameters.scale.copy()
    scale[0, 0] = value
    return with_parameters(spec, scale=scale)


ONES = np.ones((3, 3), np.float32)


@pytest.mark.parametrize(
    ("found", "spec", "message"),
    [
        (encoded(AFFINE), BLOCKS, "its codes are uint4 in uint8, expected int4-narrow in int8"),
        (
            replace(encoded(BLOCKS), codes=VALUES.astype(np.int64)),
            BLOCKS,
            "its codes are int4-narrow in int64, expected int4-narrow in int8",
        ),
        (
            replace(encoded(BLOCKS), codes=np.zeros((3, 40), np.int8)),
            BLOCKS,
            "its codes have shape [3, 40], expected that of the weight, [40, 3]",
        ),
        (with_codes(BLOCKS, -8), BLOCKS, "some of its codes are none of int4-narrow, which are from -7 to 7"),
        (with_codes(AFFINE, 16), AFFINE, "some of its codes are none of uint4, which are from 0 to 15"),
        (with_codes(TWO_LEVELS, 16), TWO_LEVELS, "some of its codes are none of float4e2m1, which are from -6 to 6"),
        (with_codes(Spec("nf4"), 16), Spec("nf4"), "some of its codes are none of nf4"),
        (with_codes(Spec("float8e4m3fn"), 0x7F), Spec("float8e4m3fn"), "some of its codes are none of float8e4m3fn"),
        (with_codes(Spec("float8e5m2"), 0x7C), Spec("float8e5m2"), "some of its codes are none of float8e5m2"),
        (
            with_parameters(BLOCKS, scale=np.ones((40, 3), np.float32)),
            BLOCKS,
            "its scales are float32 of shape [40, 3], expected float32 of shape [3, 3]",
        ),
        (with_parameters(BLOCKS, scale=ONES.astype(np.float64)), BLOCKS, "its scales are float64 of shape [3, 3]"),
        (with_parameters(BLOCKS, block=(14, 1)), BLOCKS, "its scales are of blocks of [14, 1], expected [16, 1]"),
        (with_parameters(BLOCKS, block=None), BLOCKS, "its scales are of blocks of [13, 1], expected [16, 1]"),
        (with_scale(BLOCKS, np.nan), BLOCKS, "some of its scales are NaN, infinite, zero or negative"),
        (with_scale(BLOCKS, np.inf), BLOCKS, "some of its scales are NaN, infinite, zero or negative"),
        (with_scale(BLOCKS, 0), BLOCKS, "some of its scales are NaN, infinite, zero or negative"),
        (with_scale(BLOCKS, -1), BLOCKS, "some of its scales are NaN, infinite, zero or negative"),
        (with_scale(BLOCKS, 0.1), BLOCKS, "some of its scales are no float16, of 6.10352e-05 to 65504; round them"),
        (with_scale(Spec("int8", (16,)), 1e-40), Spec("int8", (16,)), "some of its scales are no float32, of 1.17"),
        (with_parameters(TWO_LEVELS, tensor_scale=None), TWO_LEVELS, "the scale of its tensor is None, expected one"),
        (with_parameters(TWO_LEVELS, tensor_scale=np.float32(0)), TWO_LEVELS, "the scale of its tensor is 0.0, expect"),
        (with_parameters(BLOCKS, tensor_scale=np.float32(1)), BLOCKS, "the scale of its tensor is 1.0, expected None"),
        (with_parameters(AFFINE, zero_point=None), AFFINE, "it has no zero points, expected some"),
        (with_parameters(BLOCKS, zero_point=ONES.astype(np.int8)), BLOCKS, "it has zero points, expected none"),
        (
            with_parameters(AFFINE, zero_point=np.zeros((3, 1), np.uint8)),
            AFFINE,
            "its zero points are uint8 of shape [3, 1], expected uint8 like the scales",
        ),
        (with_parameters(AFFINE, zero_point=ONES), AFFINE, "its zero points are float32 of shape [3, 3]"),
        (
            with_parameters(AFFINE, zero_point=np.full((3, 3), 16, np.uint8)),
            AFFINE,
            "some of its zero points are no codes of uint4",
        ),
    ],
)
def test_what_is_not_as_the_spec_says_has_its_sentence(found: QTensor, spec: Spec, message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        looked_at(found, spec)


@pytest.mark.parametrize("found", [None, VALUES, (VALUES, 1.0)])
def test_what_is_no_codes_is_told(found: object) -> None:
    with pytest.raises(TypeError, match=f"it returned {type(found).__name__}, expected an onnxq.numerics.affine.QT"):
        looked_at(found, BLOCKS)


@pytest.mark.parametrize("changed", ["scale", "zero_point"])
def test_scales_that_were_given_are_kept(changed: str) -> None:
    found = encoded(AFFINE)
    given = replace(found.parameters, **{changed: getattr(found.parameters, changed) + np.uint8(1)})
    with pytest.raises(ValueError, match="it found scales of its own, expected those that it was given"):
        looked_at(found, AFFINE, given)
