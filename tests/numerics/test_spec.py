"""Specs: each choice, and the sentence for each pair that contradicts itself."""

from __future__ import annotations

import pytest

from onnxq.errors import SchemeError
from onnxq.numerics.formats import FORMATS
from onnxq.numerics.spec import Granularity, Method, QuantSpec, Rounding, Storage


def test_a_spec_checks_its_names() -> None:
    with pytest.raises(SchemeError, match="did you mean 'int8'"):
        QuantSpec("Int8")
    with pytest.raises(SchemeError, match="number format 'int9'"):
        QuantSpec("int9", symmetric=False)
    with pytest.raises(SchemeError, match=r"^scale format 'float15' is not one of .* did you mean 'float16'\?$"):
        QuantSpec("int8", scale="float15")


def test_a_method_is_ours_by_its_name_or_that_of_somebody_elses_encoder() -> None:
    assert QuantSpec("int4", method="mse").method is Method.MSE
    mine = QuantSpec("float8e5m2", (32,), scale="e8m0", scale_rounding=Rounding.FLOOR, method="mine")
    assert (mine.method, mine.is_followed) == ("mine", False)
    assert [one for one in Method if QuantSpec("int8", method=one, symmetric=one is not Method.HQQ).is_followed] == [
        Method.BURN,
        Method.TORCH,
    ]
    with pytest.raises(SchemeError, match="the method is None of type NoneType, expected a Method such as"):
        QuantSpec("int4", method=None)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_a_spec(name: str) -> None:
    assert QuantSpec(name, symmetric=FORMATS[name].signed, per=(32,)).format == name


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (
            {"format": "uint4"},
            "uint4 has no negative codes, so it cannot be symmetric; say symmetric = false or use int4",
        ),
        ({"format": "uint8-7bit"}, "uint8-7bit has no negative codes"),
        ({"format": "float8e4m3fn", "symmetric": False}, "float8e4m3fn codes have no zero point"),
        ({"format": "int8", "scale_rounding": Rounding.FLOOR}, 'scale_rounding = "floor" gives powers of two'),
        (
            {"format": "int8", "scale": "e8m0", "scale_rounding": Rounding.FLOOR, "symmetric": False},
            'scale_rounding = "floor" gives powers of two',
        ),
        (
            {"format": "int8", "scale": "e8m0", "scale_rounding": Rounding.FLOOR, "method": Method.MSE},
            'scale_rounding = "floor" decides the scale, so method = "mse" has nothing to choose',
        ),
        ({"format": "int8", "scale": "float16", "two_level": True}, "two_level multiplies several scales by one"),
        ({"format": "int8", "per": (32,), "two_level": True}, "two_level serves scales of a small range"),
        ({"format": "int8", "per": (32,), "scale": "e8m0", "two_level": True}, "two_level serves scales of a small"),
        ({"format": "int16", "method": Method.COMPENSATED}, 'method = "compensated" takes formats of 8 bits or fewer'),
        ({"format": "int4", "method": Method.HQQ}, 'method = "hqq" chooses zero points and symmetric codes have none'),
        ({"format": "float6e2m3", "storage": Storage.WORDS}, 'storage = "words" holds codes of 2, 4 or 8 bits'),
        ({"format": "int16", "storage": Storage.WORDS}, 'storage = "words" holds codes of 2, 4 or 8 bits'),
        ({"format": "int4", "method": Method.TORCH}, 'method = "torch" makes 8-bit integers'),
        ({"format": "float8e5m2", "method": Method.TORCH}, 'method = "torch" makes 8-bit integers'),
        ({"format": "int8", "per": (32,), "method": Method.TORCH}, 'method = "torch" makes 8-bit integers'),
        ({"format": "int8", "scale": "float16", "method": Method.TORCH}, 'method = "torch" makes 8-bit integers'),
        ({"format": "int8", "storage": Storage.WORDS, "method": Method.TORCH}, 'method = "torch" makes 8-bit integers'),
        ({"format": "int8", "per": [32]}, "per is a Granularity or a tuple such as (32,), found [32]"),
        ({"format": "int8", "per": "channel"}, "per is a Granularity or a tuple such as (32,), found 'channel'"),
        ({"format": "int8", "per": ()}, "blocks have 1 to 5 extents of at least 1, found []"),
        ({"format": "int8", "per": (0,)}, "blocks have 1 to 5 extents of at least 1, found [0]"),
        ({"format": "int8", "per": (1,) * 6}, "blocks have 1 to 5 extents of at least 1, found [1, 1, 1, 1, 1, 1]"),
    ],
)
def test_choices_that_contradict_each_other_are_told(choices: dict[str, object], message: str) -> None:
    with pytest.raises(SchemeError) as caught:
        QuantSpec(**choices)
    assert str(caught.value).startswith(message)


def test_the_published_block_formats_are_specs() -> None:
    floor = {"per": (32,), "scale": "e8m0", "scale_rounding": Rounding.FLOOR}
    for name in ("float8e4m3fn", "float8e5m2", "float6e2m3", "float6e3m2", "float4e2m1", "int8-narrow"):
        assert not QuantSpec(name, **floor).two_level
    assert QuantSpec("float4e2m1", per=(16,), scale="ue4m3", two_level=True).per != Granularity.TENSOR
