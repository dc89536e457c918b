"""Models made to hurt: a name and the bytes of each; all of them take x, float32 of shape [2,16], where they can."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper, parser

PARTS = """
    [product] a = MatMul(x, w)
    [relu] b = Relu(a)
"""
TERABYTES = 1 << 40
HUGE = 10**9

MODELS: dict[str, Callable[[], ModelProto]] = {}


def hostile(build: Callable[[], ModelProto]) -> Callable[[], ModelProto]:
    MODELS[build.__name__] = build
    return build


def sound(text: str = "y = Identity(b)", *, opset: int = 17, **weights: np.ndarray) -> ModelProto:
    """Return a model with a product that quantizes and some more nodes that make y."""
    model = parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : {opset}]> main (float[2,16] x) => (float[a,b] y) {{ {PARTS} {text} }}'
    )
    generator = np.random.default_rng(0)
    weights = {"w": generator.standard_normal((16, 16)).astype(np.float32) / 4, **weights}
    model.graph.initializer.extend(numpy_helper.from_array(values, name) for name, values in weights.items())
    model.graph.output[0].type.tensor_type.ClearField("shape")
    return model


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


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
def a_hundred_constants_of_200_megabytes() -> ModelProto:
    many = "  ".join(f"c{i} = ConstantOfShape(s)  d{i} = Add(c{i}, x0)" for i in range(100))
    total = "  ".join(f"e{i + 1} = Add(e{i}, d{i})" for i in range(100))
    return sound(
        f"x0 = ReduceSum<keepdims=0>(x)  e0 = Identity(x0)  {many}  {total}  f = ReduceSum<keepdims=0>(e100)  "
        "y = Add(b, f)",
        s=ints(50 << 20),
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


# --- values that no kernel expects --------------------------------------------------------------------------------

_IMAGE = {"s": ints(1, 2, 4, 4), "v": np.ones((2, 2, 3, 3), "f") / 9}
_CONVOLUTION = "c = Reshape(b, s)  y = Conv<{}>(c, v)"


def _convolution(attributes: str) -> Callable[[], ModelProto]:
    return lambda: sound(_CONVOLUTION.format(attributes), **_IMAGE)


for _attributes in (
    "group = 0",
    "group = -1",
    "group = 3",
    "strides = [0, 0]",
    "strides = [-1, -1]",
    "strides = [1]",
    "dilations = [0, 0]",
    "dilations = [1000000000, 1000000000]",
    "kernel_shape = [0, 0]",
    "kernel_shape = [5, 5]",
    "kernel_shape = [3]",
    "pads = [-9, -9, -9, -9]",
    "pads = [1]",
    'auto_pad = "NONSENSE"',
    "group = 1.5",
    'strides = "text"',
):
    MODELS[f"a_convolution_with_{_attributes}"] = _convolution(_attributes)

for _text in (
    "c = Reshape(b, s)  y = MaxPool<kernel_shape = [0, 0]>(c)",
    "c = Reshape(b, s)  y = MaxPool<kernel_shape = [2, 2], strides = [0, 0]>(c)",
    "c = Reshape(b, s)  y = AveragePool<kernel_shape = [-1, 2]>(c)",
    "c = Reshape(b, s)  y = ConvTranspose<output_padding = [1000000000, 0]>(c, v)",
    "c = Reshape(b, s)  y = DepthToSpace<blocksize = 0>(c)",
    "c = Reshape(b, s)  y = LRN<size = 0>(c)",
    "y = Transpose<perm = [7, 7]>(b)",
    "y = Transpose<perm = [-1, 0]>(b)",
    "y = Concat<axis = 99>(b, b)",
    "y = Softmax<axis = -9>(b)",
    "y = Gather<axis = 5>(b, s)",
    "y = Gather(b, far)",
    "y = Reshape(b, many)",
    "y = Reshape(b, zero)",
    "y = Flatten<axis = 99>(b)",
    "y, z = Split(b, zero)",
    "y = Slice(b, zero, far, zero, zero)",
    "y = TopK(b, far)",
    "y = Squeeze(b, far)",
    "y = Unsqueeze(b, far)",
    "y = Gemm<transB = 1>(b, w, s)",
    "y = Gemm(b, w, s, s, s)",
    "y = MatMul(b)",
    "y = Clip(b, nan, nan)",
    'y = Einsum<equation = "ij,jk,kl->zz">(b, w, w)',
    "y, h, c = LSTM<hidden_size = 1000000>(b, w, w)",
    "y = Cast<to = 9999>(b)",
    "y = Relu()",
    "y = NoSuchOperator(b)",
    "y = BatchNormalization(b, w, w, w, w)",
    "c = Dropout(b, nan)  y = MatMul(c, w)",
    "y = Add(b, w)",
    "t = MatMul(b, w)  y = BatchNormalization<epsilon = -5.0>(t, line, line, line, line)",
):

    def _odd(text: str = _text) -> ModelProto:
        return sound(
            text,
            **_IMAGE,
            far=ints(HUGE),
            many=ints(-1, -1),
            zero=ints(0),
            nan=np.array(np.nan, "f"),
            line=np.ones(16, "f"),
        )

    MODELS[_text] = _odd


def fatal() -> ModelProto:
    """Return a model at which onnxruntime divides by zero, which ends the process."""
    return sound("c = Reshape(b, s)  y = ConvTranspose<group = 0>(c, v)", **_IMAGE)


@hostile
def a_weight_of_nan() -> ModelProto:
    return sound("y = MatMul(b, n)", n=np.full((16, 16), np.nan, "f"))


@hostile
def a_weight_of_the_largest_floats() -> ModelProto:
    return sound("y = MatMul(b, n)", n=np.full((16, 16), np.finfo(np.float32).max, "f"))


@hostile
def a_weight_of_the_smallest_floats() -> ModelProto:
    return sound("y = MatMul(b, n)", n=np.full((16, 16), 1e-45, "f"))


@hostile
def a_weight_of_an_unknown_type() -> ModelProto:
    model = sound()
    model.graph.initializer[0].data_type = 9999
    return model


@hostile
def a_weight_of_strings() -> ModelProto:
    model = sound()
    model.graph.initializer[0].CopyFrom(
        helper.make_tensor("w", TensorProto.STRING, [2, 2], [b"a", b"b", b"c", b"\xff"])
    )
    return model


@hostile
def an_attribute_of_two_kinds() -> ModelProto:
    model = sound("y = Concat<axis = 1>(b, b)")
    attribute = next(node for node in model.graph.node if node.op_type == "Concat").attribute[0]
    attribute.s, attribute.type = b"text", AttributeProto.GRAPH
    return model


# --- graphs that are none -----------------------------------------------------------------------------------------


@hostile
def a_cycle() -> ModelProto:
    model = sound("c = Relu(d)  d = Relu(b)  y = Add(b, d)")
    next(node for node in model.graph.node if node.output[0] == "d").input[0] = "c"
    return model


@hostile
def a_dangling_input() -> ModelProto:
    model = sound()
    model.graph.node[1].input[0] = "nowhere"
    return model


@hostile
def a_dangling_output() -> ModelProto:
    model = sound()
    model.graph.output[0].name = "nowhere"
    return model


@hostile
def two_tensors_of_one_name() -> ModelProto:
    model = sound()
    model.graph.initializer.add().CopyFrom(model.graph.initializer[0])
    return model


@hostile
def an_output_listed_twice() -> ModelProto:
    model = sound()
    model.graph.output.add().CopyFrom(model.graph.output[0])
    return model


@hostile
def an_input_listed_twice() -> ModelProto:
    model = sound()
    model.graph.input.add().CopyFrom(model.graph.input[0])
    return model


@hostile
def a_name_that_is_no_text() -> ModelProto:
    return ModelProto.FromString(sound().SerializeToString().replace(b"product", b"pr\xffduct"))


@hostile
def a_domain_that_is_no_text() -> ModelProto:
    model = sound()
    model.opset_import.add(domain="marker", version=1)
    return ModelProto.FromString(model.SerializeToString().replace(b"marker", b"mark\xffr"))


@hostile
def documentation_that_is_no_text() -> ModelProto:
    model = sound()
    model.doc_string = model.graph.node[0].doc_string = "marker"
    return ModelProto.FromString(model.SerializeToString().replace(b"marker", b"mark\xffr"))


@hostile
def names_that_climb() -> ModelProto:
    model = sound("y = MatMul(b, v)", v=np.eye(16, dtype="f"))
    model.graph.node[0].name = "../../../tmp/escaped"
    model.graph.name = "/" + "x" * 10_000
    model.graph.initializer[0].name = model.graph.node[0].input[1] = "../../escaped\0"
    return model


@hostile
def an_opset_of_the_far_future() -> ModelProto:
    model = sound()
    model.opset_import[0].version = HUGE
    return model


@hostile
def a_negative_opset() -> ModelProto:
    model = sound()
    model.opset_import[0].version = -1
    return model


@hostile
def no_opset() -> ModelProto:
    model = sound()
    del model.opset_import[:]
    return model


@hostile
def a_negative_ir_version() -> ModelProto:
    model = sound()
    model.ir_version = -(1 << 60)
    return model


@hostile
def a_sparse_weight_that_points_outside() -> ModelProto:
    model = sound("y = MatMul(b, v)")
    values = numpy_helper.from_array(np.ones(2, "f"), "v")
    indices = numpy_helper.from_array(ints(5, HUGE), "indices")
    model.graph.sparse_initializer.add(values=values, indices=indices, dims=[16, 16])
    return model


@hostile
def a_sparse_weight_of_terabytes() -> ModelProto:
    model = a_sparse_weight_that_points_outside()
    model.graph.sparse_initializer[0].dims[:] = [16, TERABYTES]
    return model


@hostile
def quantization_annotations_of_nothing() -> ModelProto:
    model = sound()
    annotation = model.graph.quantization_annotation.add(tensor_name="nowhere")
    annotation.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="w")
    return model


# --- what calls itself --------------------------------------------------------------------------------------------


def _function(name: str, callees: list[str]) -> object:
    nodes = [helper.make_node(callee, [f"t{i}"], [f"t{i + 1}"], domain="mine") for i, callee in enumerate(callees)]
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("mine", 1)]
    return helper.make_function("mine", name, ["t0"], [f"t{len(nodes)}"], nodes, imports)


def _with_functions(*functions: tuple[str, list[str]]) -> ModelProto:
    model = sound("y = Identity(b)")
    model.opset_import.add(domain="mine", version=1)
    model.functions.extend(_function(name, callees) for name, callees in functions)
    model.graph.node.insert(2, helper.make_node(functions[0][0], ["b"], ["called"], domain="mine"))
    next(node for node in model.graph.node if node.op_type == "Identity").input[0] = "called"
    return model


@hostile
def a_function_that_calls_itself() -> ModelProto:
    return _with_functions(("f", ["f"]))


@hostile
def functions_that_call_each_other() -> ModelProto:
    return _with_functions(("f", ["g"]), ("g", ["h"]), ("h", ["f"]))


@hostile
def functions_that_call_ten_others_each() -> ModelProto:
    levels = [(f"f{i}", [f"f{i + 1}"] * 10) for i in range(12)]
    model = _with_functions(*levels)
    leaf = [helper.make_node("Relu", ["t0"], ["t1"])]
    model.functions.append(helper.make_function("mine", "f12", ["t0"], ["t1"], leaf, [helper.make_opsetid("", 17)]))
    return model


@hostile
def two_functions_of_one_name() -> ModelProto:
    return _with_functions(("f", ["g"]), ("f", ["g"]), ("g", []))


def nested(levels: int) -> ModelProto:
    """Return a model with a tower of If nodes."""
    inner = GraphProto(name="innermost")
    inner.node.append(helper.make_node("Relu", ["b"], ["made"]))
    inner.output.append(helper.make_tensor_value_info("made", TensorProto.FLOAT, None))
    for level in range(levels):
        node = NodeProto(op_type="If", input=["yes"], output=[f"made{level}"])
        for key in ("then_branch", "else_branch") if level == 0 else ("then_branch",):
            attribute = node.attribute.add(name=key, type=AttributeProto.GRAPH)
            attribute.g.CopyFrom(inner)
        if level:
            other = node.attribute.add(name="else_branch", type=AttributeProto.GRAPH).g
            other.name = f"else{level}"
            other.node.append(helper.make_node("Relu", ["b"], [f"other{level}"]))
            other.output.append(helper.make_tensor_value_info(f"other{level}", TensorProto.FLOAT, None))
        inner = GraphProto(name=f"level{level}", node=[node])
        inner.output.append(helper.make_tensor_value_info(f"made{level}", TensorProto.FLOAT, None))
    model = sound()
    model.graph.node[-1].CopyFrom(inner.node[0])
    model.graph.output[0].name = model.graph.node[-1].output[0]
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "yes"))
    return model


@hostile
def ifs_nested_20_deep() -> ModelProto:
    return nested(20)


def nested_bytes(levels: int) -> bytes:
    """Return the file of a model with If nodes in one another, deeper than protobuf itself would write."""

    def field(number: int, data: bytes) -> bytes:
        size, varint = len(data), bytearray()
        while size > 127:
            varint.append(size & 127 | 128)
            size >>= 7
        return bytes([number << 3 | 2, *varint, size]) + data

    body = b""
    for _ in range(levels):
        attribute = field(1, b"then_branch") + field(6, body) + bytes([20 << 3 & 127 | 128, 1, AttributeProto.GRAPH])
        body = field(1, field(1, b"b") + field(2, b"c") + field(4, b"If") + field(5, attribute))
    return sound().SerializeToString() + field(7, body)


# --- damaged files ------------------------------------------------------------------------------------------------


def victim() -> ModelProto:
    """Return a small model that holds a bit of everything."""
    model = sound(
        """c = Reshape(b, s)
        d = Conv<pads = [1, 1, 1, 1]>(c, v, bias)
        e = Flatten(d)
        f = Gemm(e, g)
        y = If (yes) <then_branch = one () => (float[a,b] p) { p = MatMul(f, h) },
                      else_branch = other () => (float[a,b] q) { q = Relu(f) }>""",
        **_IMAGE,
        bias=np.ones(2, "f"),
        g=np.random.default_rng(1).standard_normal((32, 16)).astype("f"),
        h=np.random.default_rng(2).standard_normal((16, 16)).astype("f"),
        yes=np.array(True),
    )
    model.metadata_props.add(key="author", value="somebody")
    model.graph.value_info.append(helper.make_tensor_value_info("e", TensorProto.FLOAT, [1, 32]))
    return model


def mutations(data: bytes, count: int, seed: int) -> Iterator[bytes]:
    """Yield damaged copies: cut short, bits flipped, bytes changed, pieces repeated or left out."""
    chance = random.Random(seed)
    for _ in range(count):
        found = bytearray(data)
        kind = chance.choice(("cut", "bits", "bits", "bytes", "repeat", "drop"))
        place = chance.randrange(len(data))
        length = chance.randint(1, 40)
        if kind == "cut":
            del found[place:]
        elif kind == "bits":
            for _ in range(chance.randint(1, 8)):
                found[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        elif kind == "bytes":
            found[place : place + length] = chance.randbytes(length)
        elif kind == "repeat":
            found[place:place] = found[place : place + length]
        else:
            del found[place : place + length]
        yield bytes(found)
