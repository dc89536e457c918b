"""Encodings of AIMET and TensorQuantOverrides: what is read, and what is refused in a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxq.config.encodings_file import TensorEncoding, load_encodings
from onnxq.errors import SchemeError
from onnxq.numerics.affine import params_from_range
from onnxq.numerics.formats import format_named
from onnxq.numerics.spec import Granularity, QuantSpec

BYTE = QuantSpec("uint8", symmetric=False)
WEIGHT = QuantSpec("int8-narrow", Granularity.CHANNEL)
FIRST = {"bitwidth": 8, "dtype": "int", "min": -1.0, "max": 1.0}
SECOND = {"name": "x", "dtype": "INT", "enc_type": "PER_TENSOR", "bw": 16, "is_sym": False}


def read(document: object, folder: Path) -> tuple[TensorEncoding, ...]:
    file = folder / "model.encodings"
    file.write_text(json.dumps(document))
    return load_encodings(file)


def second(**entry: Any) -> dict[str, Any]:
    return {"version": "1.0.0", "activation_encodings": [{**SECOND, "scale": [0.5], "offset": [-3], **entry}]}


def third(**entry: Any) -> dict[str, Any]:
    return {"version": "2.0.0", "encodings": [{"name": "x", "output_dtype": "uint8", "y_scale": 0.5, **entry}]}


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (
            {
                "version": "0.6.1",
                "activation_encodings": {"x": [{**FIRST, "is_symmetric": "False", "scale": 0.5, "offset": -3}]},
                "param_encodings": {
                    "w": [{**FIRST, "is_symmetric": "True", "scale": one, "offset": -128} for one in (0.5, 0.25)],
                    "b": [{**FIRST, "bitwidth": 32, "is_symmetric": "True", "scale": 0.5, "offset": -(2**31)}],
                },
            },
            [("x", "uint8", (0.5,), (3,), None), ("w", "int8", (0.5, 0.25), (0, 0), None)],
        ),
        (second(), [("x", "uint16", (0.5,), (3,), None)]),
        (second(is_sym=True, bw=4, offset=[-8.0]), [("x", "int4", (0.5,), (0,), None)]),
        (
            {
                k: v
                for k, v in second(enc_type="PER_CHANNEL", scale=[0.5, 1], offset=[-1, -2]).items()
                if k != "version"
            },
            [("x", "uint16", (0.5, 1.0), (1, 2), None)],
        ),
        (third(), [("x", "uint8", (0.5,), (0,), None)]),
        (third(output_dtype="int8", y_zero_point=-5), [("x", "int8", (0.5,), (-5,), None)]),
        (third(output_dtype="int8", y_scale=[0.5, 0.25], axis=1), [("x", "int8", (0.5, 0.25), (0, 0), 1)]),
        (
            {"x": [{"quant_type": "QUInt16", "scale": 0.5, "zero_point": 3}], "w": [], "y": [{"quant_type": "QInt8"}]},
            [("x", "uint16", (0.5,), (3,), None), ("y", "int8", (), (), None)],
        ),
        (
            {"w": [{"scale": one, "zero_point": 0, "axis": 0} for one in (0.5, 0.25)]},
            [("w", "", (0.5, 0.25), (0, 0), 0)],
        ),
    ],
)
def test_a_file_of_every_version_is_read(document: object, expected: list[tuple[Any, ...]], tmp_path: Path) -> None:
    found = read(document, tmp_path)
    assert [(one.tensor, one.format, one.scales, one.zero_points, one.axis) for one in found] == expected


def test_ranges_of_overrides_are_read(tmp_path: Path) -> None:
    (found,) = read({"x": [{"rmin": -1, "rmax": 2.5, "symmetric": False}]}, tmp_path)
    assert (found.ranges, found.symmetric, found.count) == (((-1.0, 2.5),), False, 1)


@pytest.mark.parametrize(
    ("format", "zero_point", "usual", "symmetric"),
    [("uint8", 3, BYTE, False), ("uint16", 40_000, BYTE, False), ("int8", 0, WEIGHT, True), ("", 0, WEIGHT, True)],
)
def test_scales_and_zero_points_come_back_to_the_last_bit(
    format: str, zero_point: int, usual: QuantSpec, symmetric: bool
) -> None:
    for scale in np.random.default_rng(0).lognormal(size=200).astype(np.float32):
        one = TensorEncoding("x", format, scales=(float(scale),), zero_points=(zero_point,))
        spec = one.spec(usual)
        assert spec.symmetric is symmetric
        made = params_from_range(*one.ranges_in(spec)[0], format_named(spec.format), symmetric=spec.symmetric)
        assert (made.scale, 0 if symmetric else made.zero_point) == (scale, zero_point)


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        ([1], "it is no JSON object, expected encodings of AIMET or TensorQuantOverrides"),
        ({"version": "3.0.0"}, "version 3.0.0 of encodings is unknown, expected one of 0.6.1, 1.0.0, 2.0.0, 2.1.0"),
        ({"version": "2.0.0"}, "its encodings are no list, which version 2.0.0 has"),
        ({"version": "0.6.1", "activation_encodings": []}, "its encodings are no dict, which version 0.6.1 has"),
        ({"version": "1.0.0", "param_encodings": [{}]}, "an encoding has no name, expected that of its tensor"),
        (second(scale="a"), "the encoding of tensor 'x': scale is a number, found 'a'"),
        (second(bw=12), "tensor 'x' has integers of 12 bits, expected 4, 8 or 16; leave it out"),
        (second(dtype="FLOAT"), "tensor 'x' is FLOAT, expected integers; leave it out, and --exclude its nodes"),
        (second(enc_type="LPBQ"), "tensor 'x' has scales LPBQ, expected PER_TENSOR or PER_CHANNEL"),
        (second(scale=[0.0]), "tensor 'x' has the scale 0.0, expected a positive normal number"),
        (second(offset=[3]), "tensor 'x' has the zero point -3, expected a value of uint16"),
        (second(offset=[-3.5]), "tensor 'x' has the zero point 3.5, expected a whole number"),
        (second(scale=[0.5, 0.5]), "tensor 'x' has 2 scales and 1 zero points, expected as many"),
        (third(block_size=32), "tensor 'x' has block_size, expected a scale for the tensor or for each channel"),
        (third(output_dtype="float8"), "tensor 'x' is float8, expected integers"),
        ({**third(), "encodings": third()["encodings"] * 2}, "tensor 'x' has two encodings, expected one"),
        ({"x": 1}, "tensor 'x' has 1, expected a list as in TensorQuantOverrides, or encodings of AIMET with"),
        ({"x": [{"convert": {}}]}, "tensor 'x' has convert, expected axis, quant_type, rmax, rmin, scale, symmetric"),
        ({"x": [{"quant_type": "QInt3"}]}, "tensor 'x' has the type QInt3, expected one such as QUInt16"),
        ({"x": [{"rmin": 0}]}, "tensor 'x' has rmin, rmax and scale, expected rmin and rmax, or scale and zero_point"),
        ({"x": [{"rmin": 1, "rmax": 0}]}, r"tensor 'x' has the range \[1.0, 0.0\], expected finite limits"),
        ({"x": [{"rmin": 0, "rmax": 1}, {}]}, "tensor 'x' has scales or ranges of some channels, expected all"),
    ],
)
def test_what_is_wrong_in_a_file_is_said_in_a_sentence(document: object, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(SchemeError, match=f"encodings .*model.encodings: {sentence}"):
        read(document, tmp_path)


def test_a_file_that_is_missing_or_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{")
    for name in ("a.json", "b.json"):
        with pytest.raises(SchemeError, match="cannot be read"):
            load_encodings(tmp_path / name)
