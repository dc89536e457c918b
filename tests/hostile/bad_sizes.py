"""Models that ask for more memory than anybody has: a name and the bytes of each."""

from __future__ import annotations

import numpy as np
from onnx import ModelProto, helper

from hostile.bad_parts import HUGE, TERABYTES, Builder, collected_in, ints, sound

MODELS: dict[str, Builder] = {}
hostile = collected_in(MODELS)

# --- sizes that nobody has ----------------------------------------------------------------------------------------


@hostile
def a_weight_of_10_to_the_18() -> ModelProto:
    model = sound()
    model.graph.initializer[0].dims[:] = [HUGE, HUGE]
    return model


@hostile
def a_weight_whose_size_overflows_to_zero() -> ModelProto:
    model = sound()
    model.graph.initializer[0].dims[:] = [1 << 32, 1 << 32]
    model.graph.initializer[0].raw_data = b""
    return model


@hostile
def a_weight_of_negative_size() -> ModelProto:
    model = sound()
    model.graph.initializer[0].dims[:] = [-16, -16]
    return model


@hostile
def a_weight_of_a_million_dimensions() -> ModelProto:
    model = sound()
    model.graph.initializer[0].dims[:] = [1] * 10**6 + [256]
    return model


@hostile
def an_input_of_10_to_the_18() -> ModelProto:
    model = sound()
    for dim in model.graph.input[0].type.tensor_type.shape.dim:
        dim.dim_value = HUGE
    return model


@hostile
def a_constant_of_shape_of_terabytes() -> ModelProto:
    return sound("c = ConstantOfShape(s)  d = ReduceSum<keepdims=0>(c)  y = Add(b, d)", s=ints(TERABYTES))


@hostile
def a_constant_of_shape_of_negative_size() -> ModelProto:
    return sound("c = ConstantOfShape(s)  d = ReduceSum<keepdims=0>(c)  y = Add(b, d)", s=ints(-5))


@hostile
def an_expand_to_terabytes() -> ModelProto:
    return sound(
        "c = Expand(v, s)  d = ReduceSum<keepdims=0>(c)  y = Add(b, d)", v=np.ones(1, "f"), s=ints(TERABYTES, 1)
    )


@hostile
def a_tile_to_terabytes() -> ModelProto:
    return sound("c = Tile(v, s)  d = ReduceSum<keepdims=0>(c)  y = Add(b, d)", v=np.ones(1, "f"), s=ints(TERABYTES))


@hostile
def a_range_to_terabytes() -> ModelProto:
    numbers = {name: np.array(value, np.float32) for name, value in (("i", 0), ("j", 1e12), ("k", 1))}
    return sound("c = Range(i, j, k)  d = ReduceSum<keepdims=0>(c)  y = Add(b, d)", **numbers)


@hostile
def a_range_without_end() -> ModelProto:
    numbers = {name: np.array(value, np.float32) for name, value in (("i", 0), ("j", 1), ("k", 0))}
    return sound("c = Range(i, j, k)  d = ReduceSum<keepdims=0>(c)  y = Add(b, d)", **numbers)


@hostile
def a_padding_to_terabytes() -> ModelProto:
    return sound("c = Pad(v, s)  d = ReduceSum<keepdims=0>(c)  y = Add(b, d)", v=np.ones(1, "f"), s=ints(0, TERABYTES))


@hostile
def a_one_hot_of_terabytes() -> ModelProto:
    return sound(
        "c = OneHot(i, s, v)  d = ReduceSum<keepdims=0>(c)  y = Add(b, d)",
        i=ints(1),
        s=ints(TERABYTES),
        v=np.array([0, 1], "f"),
    )


@hostile
def an_outer_product_of_terabytes() -> ModelProto:
    ones = np.ones((1 << 20, 1), "f")
    return sound("t = Transpose(v)  c = MatMul(v, t)  d = ReduceSum<keepdims=0>(c)  y = Add(b, d)", v=ones)


@hostile
def a_broadcast_of_terabytes() -> ModelProto:
    names = "efgh"
    ones = {name: np.ones([1024 if name == other else 1 for other in names], "f") for name in names}
    return sound("c = Sum(e, f, g, h)  d = ReduceSum<keepdims=0>(c)  y = Add(b, d)", **ones)


@hostile
def a_broadcast_of_terabytes_of_unknown_shape() -> ModelProto:
    model = a_broadcast_of_terabytes()
    # Inference gives up on a model with a wrong attribute, so that no shape is known.
    model.graph.node.append(helper.make_node("Concat", ["b", "b"], ["unused"], axis=99))
    return model


@hostile
def a_gather_of_terabytes() -> ModelProto:
    values = {"v": np.ones((1, 1 << 20), "f"), "i": np.zeros(1 << 20, np.int64)}
    return sound("c = Gather(v, i)  d = ReduceSum<keepdims=0>(c)  y = Add(b, d)", **values)


@hostile
def a_chain_that_doubles() -> ModelProto:
    doublings = "  ".join(f"c{i + 1} = Concat<axis=0>(c{i}, c{i})" for i in range(40))
    return sound(f"c0 = Identity(v)  {doublings}  d = ReduceSum<keepdims=0>(c40)  y = Add(b, d)", v=np.ones(16, "f"))


@hostile
def a_hundred_constants_of_8_megabytes() -> ModelProto:
    many = "  ".join(f"c{i} = ConstantOfShape(s)  d{i} = Add(c{i}, x0)" for i in range(100))
    total = "  ".join(f"e{i + 1} = Add(e{i}, d{i})" for i in range(100))
    return sound(
        f"x0 = ReduceSum<keepdims=0>(x)  e0 = Identity(x0)  {many}  {total}  f = ReduceSum<keepdims=0>(e100)  "
        "y = Add(b, f)",
        s=ints(2 << 20),
    )


@hostile
def a_resize_to_terabytes() -> ModelProto:
    values = {"v": np.ones((1, 1, 2, 2), "f"), "q": np.array([1, 1, 1e6, 1e6], "f")}
    return sound("c = Resize(v, , q)  d = ReduceSum<keepdims=0>(c)  y = Add(b, d)", **values)


@hostile
def a_convolution_padded_to_terabytes() -> ModelProto:
    return sound(
        "c = Reshape(b, s)  d = Conv<pads=[1000000,1000000,1000000,1000000]>(c, v)  y = ReduceSum<keepdims=0>(d)",
        s=ints(1, 1, 2, 16),
        v=np.ones((1, 1, 1, 1), "f"),
    )
