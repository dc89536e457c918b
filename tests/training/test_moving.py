"""Operators that move elements give in torch what they give in onnxruntime."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import Build

from onnxq.training.operators import MOVING
from training.modules import difference


def ints(name: str, *numbers: int) -> str:
    return f"{name} = Constant<value = int64[{len(numbers)}] {{{', '.join(map(str, numbers))}}}>()  "


CASES = {
    "Concat": "y = Concat<axis = -1>(x, x)",
    "Constant": "c = Constant<value = float[4] {1, 2, 3, 4}>()  y = Add(x, c)",
    "Constant of numbers": "c = Constant<value_floats = [1.0, 2.0, 3.0, 4.0]>()  y = Add(x, c)",
    "ConstantOfShape": ints("s", 3, 4) + "c = ConstantOfShape<value = float[1] {2}>(s)  y = Add(x, c)",
    "DepthToSpace": "y = DepthToSpace<blocksize = 2>(z)",
    "DepthToSpace by columns": 'y = DepthToSpace<blocksize = 2, mode = "CRD">(z)',
    "Expand": ints("s", 2, 1, 1, 1) + "y = Expand(x, s)",
    "Flatten": "y = Flatten<axis = -1>(x)",
    "Gather": ints("i", -1, 0) + "y = Gather<axis = 1>(x, i)",
    "GatherElements": "i = Constant<value = int64[1,2] {-1, 0}>()  y = GatherElements<axis = 0>(x, i)",
    "GatherND": "i = Constant<value = int64[2,1] {1, 0}>()  y = GatherND(x, i)",
    "NonZero": "n = NonZero(x)  y = Cast<to = 1>(n)",
    "OneHot": ints("i", 1, -1) + "d = Constant<value = int64 {3}>()  "
    "v = Constant<value = float[2] {0, 5}>()  y = OneHot(i, d, v)",
    "OneHot beyond its depth": ints("i", 5, 1, -4) + "d = Constant<value = int64 {3}>()  "
    "v = Constant<value = float[2] {0, 5}>()  y = OneHot(i, d, v)",
    "Pad": ints("p", 0, 1, 2, 3) + "c = Constant<value = float {1.5}>()  y = Pad(x, p, c)",
    "Pad by the edge": ints("p", 0, 1, 2, 3) + 'y = Pad<mode = "edge">(x, p)',
    "Pad by reflection": ints("p", 0, 1, 2, 3) + 'y = Pad<mode = "reflect">(x, p)',
    "Range": "a = Constant<value = float {1.0}>()  b = Constant<value = float {4.0}>()  y = Range(a, b, a)",
    "Reshape": ints("s", 0, 2, -1) + "y = Reshape(x, s)",
    "ScatterElements": "i = Constant<value = int64[1,2] {-1, 0}>()  u = Constant<value = float[1,2] {7, 8}>()  "
    "y = ScatterElements<axis = 1>(x, i, u)",
    "Shape": "s = Shape<start = 1>(x)  y = Cast<to = 1>(s)",
    "Size": "s = Size(x)  y = Cast<to = 1>(s)",
    "Slice": ints("b", 1) + ints("e", 9223372036854775807) + ints("a", -1) + "y = Slice(x, b, e, a)",
    "Slice backwards": ints("b", -1) + ints("e", -100) + ints("a", 1) + ints("t", -2) + "y = Slice(x, b, e, a, t)",
    "SpaceToDepth": "y = SpaceToDepth<blocksize = 2>(z)",
    "Split": ints("p", 1, 3) + "y, rest = Split<axis = 1>(x, p)",
    "Split evenly": "y, rest = Split<axis = 1>(x)",
    "Squeeze": "u = Unsqueeze(x, o)  y = Squeeze(u)",
    "Tile": ints("r", 2, 3) + "y = Tile(x, r)",
    "TopK": ints("k", 2) + "y, places = TopK(x, k)",
    "TopK of equal values": ints("k", 3) + "r = Round(x)  v, places = TopK(r, k)  y = Cast<to = 1>(places)",
    "Transpose": "y = Transpose(x)",
    "Trilu": "y = Trilu<upper = 0>(x)",
    "Unsqueeze": ints("a", -1, 0) + "y = Unsqueeze(x, a)",
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_torch_gives_what_onnxruntime_gives(case: str, build: Build) -> None:
    text = f"(float[3,4] x, float[1,4,4,6] z) => (float[?] y) {{ {ints('o', 0)} {CASES[case]} }}"
    model = build(text)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    generator = np.random.default_rng(0)
    sample = {
        name: generator.standard_normal(shape).astype(np.float32)
        for name, shape in (("x", (3, 4)), ("z", (1, 4, 4, 6)))
    }
    assert difference(model, sample) < 1e-6


def test_the_table_is_tested_as_a_whole() -> None:
    assert set(MOVING) <= set(CASES)
