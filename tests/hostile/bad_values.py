"""Models of values, shapes and names that nobody has: a name and the bytes of each."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnx import AttributeProto, ModelProto, TensorProto, helper, numpy_helper

from hostile.bad_parts import HUGE, IMAGE, TERABYTES, Builder, collected_in, ints, sound

MODELS: dict[str, Builder] = {}
hostile = collected_in(MODELS)

# --- values that no kernel expects --------------------------------------------------------------------------------

_CONVOLUTION = "c = Reshape(b, s)  y = Conv<{}>(c, v)"


def _convolution(attributes: str) -> Callable[[], ModelProto]:
    return lambda: sound(_CONVOLUTION.format(attributes), **IMAGE)


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
            **IMAGE,
            far=ints(HUGE),
            many=ints(-1, -1),
            zero=ints(0),
            nan=np.array(np.nan, "f"),
            line=np.ones(16, "f"),
        )

    MODELS[_text] = _odd


for _value in (np.nan, np.finfo(np.float32).max, 1e-45):

    def _filled(value: float = _value) -> ModelProto:
        return sound("y = MatMul(b, n)", n=np.full((16, 16), value, "f"))

    MODELS[f"a_weight_of_{_value:.0e}"] = _filled


def fatal() -> ModelProto:
    """Return a model at which onnxruntime divides by zero, which ends the process."""
    return sound("c = Reshape(b, s)  y = ConvTranspose<group = 0>(c, v)", **IMAGE)


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

CHANGES: dict[str, Callable[[ModelProto], object]] = {
    "a_weight_of_an_unknown_type": lambda model: setattr(model.graph.initializer[0], "data_type", 9999),
    "a_dangling_input": lambda model: model.graph.node[1].input.__setitem__(0, "nowhere"),
    "a_dangling_output": lambda model: setattr(model.graph.output[0], "name", "nowhere"),
    "two_tensors_of_one_name": lambda model: model.graph.initializer.append(model.graph.initializer[0]),
    "an_output_listed_twice": lambda model: model.graph.output.append(model.graph.output[0]),
    "an_input_listed_twice": lambda model: model.graph.input.append(model.graph.input[0]),
    "an_opset_of_the_far_future": lambda model: setattr(model.opset_import[0], "version", HUGE),
    "a_negative_opset": lambda model: setattr(model.opset_import[0], "version", -1),
    "no_opset": lambda model: model.ClearField("opset_import"),
    "a_negative_ir_version": lambda model: setattr(model, "ir_version", -(1 << 60)),
}
for _name, _change in CHANGES.items():

    def _changed(change: Callable[[ModelProto], object] = _change) -> ModelProto:
        model = sound()
        change(model)
        return model

    MODELS[_name] = _changed


@hostile
def a_cycle() -> ModelProto:
    model = sound("c = Relu(d)  d = Relu(b)  y = Add(b, d)")
    next(node for node in model.graph.node if node.output[0] == "d").input[0] = "c"
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
