"""Models that ask for more memory than anybody has: a name and the bytes of each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import ModelProto, helper

from hostile.bad_parts import HUGE, TERABYTES, Builder, ints, sound


def summed(nodes: str, **weights: np.ndarray) -> ModelProto:
    """Return a model that adds the sum of c to what it computes."""
    return sound(f"{nodes}  d = ReduceSum<keepdims=0>(c)  y = Add(b, d)", **weights)


def weight_of(*dims: int, without_data: bool = False) -> ModelProto:
    model = sound()
    model.graph.initializer[0].dims[:] = dims
    if without_data:
        model.graph.initializer[0].raw_data = b""
    return model


def large_input() -> ModelProto:
    model = sound()
    for dim in model.graph.input[0].type.tensor_type.shape.dim:
        dim.dim_value = HUGE
    return model


def floats(*numbers: float) -> dict[str, np.ndarray]:
    return {name: np.array(number, np.float32) for name, number in zip("ijk", numbers, strict=True)}


def broadcast(unused: Sequence[str] = ()) -> ModelProto:
    names = "efgh"
    ones = {name: np.ones([1024 if name == other else 1 for other in names], "f") for name in names}
    model = summed("c = Sum(e, f, g, h)", **ones)
    # Inference gives up on a model with a wrong attribute, so that no shape is known.
    model.graph.node.extend(helper.make_node("Concat", ["b", "b"], [name], axis=99) for name in unused)
    return model


def hundred_constants() -> ModelProto:
    many = "  ".join(f"c{i} = ConstantOfShape(s)  d{i} = Add(c{i}, x0)" for i in range(100))
    total = "  ".join(f"e{i + 1} = Add(e{i}, d{i})" for i in range(100))
    text = f"x0 = ReduceSum<keepdims=0>(x)  e0 = Identity(x0)  {many}  {total}  c = ReduceSum<keepdims=0>(e100)"
    return summed(text, s=ints(2 << 20))


ONE, ROW = np.ones(1, "f"), np.ones(16, "f")
DOUBLED = "  ".join(f"c{i + 1} = Concat<axis=0>(c{i}, c{i})" for i in range(40))
PADDED = "c = Reshape(b, s)  d = Conv<pads=[1000000,1000000,1000000,1000000]>(c, v)  y = ReduceSum<keepdims=0>(d)"
MODELS: dict[str, Builder] = {
    "a_weight_of_10_to_the_18": lambda: weight_of(HUGE, HUGE),
    "a_weight_whose_size_overflows_to_zero": lambda: weight_of(1 << 32, 1 << 32, without_data=True),
    "a_weight_of_negative_size": lambda: weight_of(-16, -16),
    "a_weight_of_a_million_dimensions": lambda: weight_of(*[1] * 10**6, 256),
    "an_input_of_10_to_the_18": large_input,
    "a_constant_of_shape_of_terabytes": lambda: summed("c = ConstantOfShape(s)", s=ints(TERABYTES)),
    "a_constant_of_shape_of_negative_size": lambda: summed("c = ConstantOfShape(s)", s=ints(-5)),
    "an_expand_to_terabytes": lambda: summed("c = Expand(v, s)", v=ONE, s=ints(TERABYTES, 1)),
    "a_tile_to_terabytes": lambda: summed("c = Tile(v, s)", v=ONE, s=ints(TERABYTES)),
    "a_range_to_terabytes": lambda: summed("c = Range(i, j, k)", **floats(0, 1e12, 1)),
    "a_range_without_end": lambda: summed("c = Range(i, j, k)", **floats(0, 1, 0)),
    "a_padding_to_terabytes": lambda: summed("c = Pad(v, s)", v=ONE, s=ints(0, TERABYTES)),
    "a_one_hot_of_terabytes": lambda: summed(
        "c = OneHot(i, s, v)", i=ints(1), s=ints(TERABYTES), v=np.array([0, 1], "f")
    ),
    "an_outer_product_of_terabytes": lambda: summed("t = Transpose(v)  c = MatMul(v, t)", v=np.ones((1 << 20, 1), "f")),
    "a_broadcast_of_terabytes": broadcast,
    "a_broadcast_of_terabytes_of_unknown_shape": lambda: broadcast(unused=["unused"]),
    "a_gather_of_terabytes": lambda: summed(
        "c = Gather(v, i)", v=np.ones((1, 1 << 20), "f"), i=np.zeros(1 << 20, np.int64)
    ),
    "a_chain_that_doubles": lambda: summed(f"c0 = Identity(v)  {DOUBLED}  c = Identity(c40)", v=ROW),
    "a_hundred_constants_of_8_megabytes": hundred_constants,
    "a_resize_to_terabytes": lambda: summed(
        "c = Resize(v, , q)", v=np.ones((1, 1, 2, 2), "f"), q=np.array([1, 1, 1e6, 1e6], "f")
    ),
    "a_convolution_padded_to_terabytes": lambda: sound(PADDED, s=ints(1, 1, 2, 16), v=np.ones((1, 1, 1, 1), "f")),
}
