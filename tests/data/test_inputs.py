from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnxq.data.inputs import Input, check_sample, inputs_of, model_inputs, sample_bytes
from onnxq.errors import DataError, ModelError
from onnxq.ir import load, read_model
from onnxq.onnx_api import infer_shapes

FLOAT = np.dtype(np.float32)
X = Input("x", FLOAT, ("N", 3))
IDS = Input("ids", np.dtype(np.int64), ("N", "T"))


def model_with(*inputs: onnx.ValueInfoProto, initializers: tuple[onnx.TensorProto, ...] = ()) -> onnx.ModelProto:
    return helper.make_model(helper.make_graph([], "g", inputs, [], initializers))


def test_inputs_keep_order_dtype_and_dims() -> None:
    model = model_with(
        helper.make_tensor_value_info("b", TensorProto.INT64, ["N", 4]),
        helper.make_tensor_value_info("a", TensorProto.BFLOAT16, []),
    )
    b, a = model_inputs(model)
    assert b == Input("b", np.dtype(np.int64), ("N", 4))
    assert (a.name, a.dtype.name, a.shape) == ("a", "bfloat16", ())


def test_inputs_with_a_default_need_no_sample() -> None:
    weight = helper.make_tensor("w", TensorProto.FLOAT, [1], [2.0])
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "w")]
    assert [entry.name for entry in model_inputs(model_with(*values, initializers=(weight,)))] == ["x"]


@pytest.mark.parametrize("dim", [None, 0, -1, "?", "None", "-1"])
def test_placeholder_dims_of_exporters_are_unknown(dim: int | str | None) -> None:
    (entry,) = model_inputs(model_with(helper.make_tensor_value_info("x", TensorProto.FLOAT, [dim, 3])))
    assert entry.shape == (None, 3)


def test_an_input_without_shape_has_unknown_rank() -> None:
    (entry,) = model_inputs(model_with(helper.make_tensor_value_info("x", TensorProto.FLOAT, None)))
    assert entry.shape is None


def test_an_input_that_is_no_tensor_is_a_model_error() -> None:
    sequence = helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, None)
    with pytest.raises(ModelError, match="'s' is sequence, expected a tensor"):
        model_inputs(model_with(sequence))


def test_a_fitting_sample_passes() -> None:
    check_sample({"x": np.zeros((2, 3), np.float32), "ids": np.zeros((2, 9), np.int64)}, (X, IDS), "s")
    check_sample({"t": np.array(["a", "bc"])}, (TEXT,), "s")
    # One input may be empty.
    past = Input("past", FLOAT, (1, "P", 4))
    check_sample({"x": np.zeros((1, 3), np.float32), "past": np.zeros((1, 0, 4), np.float32)}, (X, past), "s")


TEXT = Input("t", np.dtype(object), (None,))


@pytest.mark.parametrize(
    ("sample", "inputs", "message"),
    [
        ({}, [X], r"s: input 'x' float32\[N, 3\] is missing, found nothing"),
        ({"X": np.zeros((1, 3), np.float32)}, [X], r"s: 'X' is not an input of the model, expected 'x'"),
        ({"x": np.zeros((1, 3))}, [X], r"'x' is float64, expected float32; save it as array.astype\('float32'\)"),
        ({"x": np.zeros((1, 3), np.float16)}, [X], "'x' is float16, expected float32"),
        (
            {"x": np.zeros((1, 3), np.uint8)},
            [X],
            r"'x' is uint8, expected float32; .* array.astype\('float32'\) / 255 where",
        ),
        ({"x": np.array([[1, None, "a"]], object)}, [X], "'x' is object, expected float32"),
        ({"x": np.zeros(3, np.float32)}, [X], r"shape \[3\] of rank 1, expected rank 2"),
        ({"x": np.zeros((1, 4), np.float32)}, [X], r"expected 3 and found 4 on axis 1"),
        ({"x": [[1.0, 2.0, 3.0]]}, [X], "'x' is list, expected a numpy array"),
        ({"x": np.array([[1, np.nan, -np.inf]], np.float32)}, [X], "'x' holds 2 NaN or infinite values of 3"),
        (
            {"x": np.zeros((0, 3), np.float32)},
            [X],
            r"s is empty \('x' \[0, 3\]\), expected values in one input at least; leave it out",
        ),
        (
            {"attenton_mask": np.zeros(1)},
            [Input("attention_mask", FLOAT, (1,))],
            "did you mean 'attention_mask'",
        ),
        ({"ids": np.zeros((1, 1), np.int32)}, [IDS], "'ids' is int32, expected int64"),
        # One symbol has one size within a sample.
        (
            {"x": np.zeros((2, 3), np.float32), "ids": np.zeros((4, 9), np.int64)},
            [X, IDS],
            "dim 'N' is 2 in 'x' and 4 in 'ids'",
        ),
        # A missing input is told before the shapes of others.
        ({"x": np.zeros((9, 2, 3), np.float32)}, [X, IDS], r"s: input 'ids' .* is missing, found 'x'"),
        ({"t": np.zeros(2)}, [TEXT], "expected strings"),
        *(
            ({"t": np.array(["a", value], object)}, [TEXT], f"'t' holds {kind}, expected strings alone")
            for value, kind in ((None, "NoneType"), (3, "int"), (b"a", "bytes"))
        ),
    ],
)
def test_a_sample_that_does_not_fit_is_told_why(
    sample: dict[str, np.ndarray], inputs: list[Input], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        check_sample(sample, inputs, "s")


def test_unknown_dims_and_ranks_accept_any_shape() -> None:
    inputs = (Input("x", FLOAT, (None, None)), Input("y", FLOAT, None))
    check_sample({"x": np.zeros((2, 5), np.float32), "y": np.zeros((1, 1, 1), np.float32)}, inputs, "s")


def test_an_input_of_an_unknown_element_type_is_refused() -> None:
    value = helper.make_tensor_value_info("x", 99, [1])
    model = helper.make_model(helper.make_graph([], "g", [value], [value]))
    with pytest.raises(ModelError, match="'x' has the element type 99, which the installed onnx does not support"):
        model_inputs(model)


def test_the_bytes_of_a_sample_are_those_of_its_arrays() -> None:
    assert sample_bytes({"x": np.zeros((2, 3), np.float32), "n": np.int64(1)[None]}) == 32


@pytest.mark.parametrize(
    ("inputs", "outputs", "found"),
    [
        ({"x": ["s0", 3, 224, 224]}, {"y": ["s0", 10]}, [True]),
        ({"x": ["unk__12", 2048]}, {"y": ["unk__13", 214]}, [True]),
        ({"x": [None, 3, None, None]}, {"y": None}, [True]),
        ({"x": [None, 80]}, {"y": [1, 40]}, [False]),
        ({"x": [None, 80]}, {"y": []}, [False]),
        ({"x": [None]}, {"y": [None]}, [False]),
        ({"x": [None, "batch", 80]}, {"y": [None, "batch", 80]}, [False]),
        ({"x": ["time", 80]}, {"y": ["time", 80]}, [False]),
        ({"x": [None, None], "state": [2, None, 128]}, {"y": [None, 1]}, [False, False]),
        ({"x": ["batch", 80], "y": [None]}, {"z": [1]}, [True, True]),
        ({"x": [1, 80], "y": [None, 4]}, {"z": [1]}, [True, True]),
        ({"x": [3, 80]}, {"z": [3]}, [False]),
    ],
)
def test_inputs_are_batched_where_the_whole_model_shows_it(
    inputs: dict[str, list[int | str | None]], outputs: dict[str, list[int | str | None] | None], found: list[bool]
) -> None:
    values = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in side.items()]
        for side in (inputs, outputs)
    ]
    model = helper.make_model(helper.make_graph([], "g", *values))
    assert [entry.batched for entry in model_inputs(model)] == found


@pytest.mark.parametrize("layout", [0, 1])
def test_what_a_recurrent_node_reads_begins_with_time(layout: int) -> None:
    node = helper.make_node("GRU", ["x", "w", "r"], ["y"], hidden_size=4, layout=layout)
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, None, 8]) for name in "xy")
    (entry,) = model_inputs(helper.make_model(helper.make_graph([node], "g", [x], [y])))
    assert entry.batched is bool(layout)


@pytest.mark.parametrize("name", ["gru", "mobilenet", "resnet", "vit"])
def test_a_graph_has_the_inputs_of_its_file(name: str) -> None:
    path = f"models/{name}.onnx"
    assert inputs_of(load(path)) == model_inputs(onnx.load(path))


def test_a_sparse_default_needs_no_sample() -> None:
    x, w, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xwy")
    values, places = helper.make_tensor("w", TensorProto.FLOAT, [1], [2.0]), helper.make_tensor("", 7, [1], [0])
    sparse = helper.make_sparse_tensor(values, places, [2])
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])], "g", [x, w], [y], sparse_initializer=[sparse]
    )
    model = helper.make_model(graph)
    assert [entry.name for entry in inputs_of(read_model(model))] == ["x"]
    assert inputs_of(read_model(model)) == model_inputs(model)


def test_a_name_that_the_graph_does_not_trust_is_still_that_of_the_input() -> None:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", "N"]) for name in "xy")
    model = helper.make_model(helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "g", [x], [y]))
    graph = read_model(model)
    infer_shapes(graph)
    assert graph.inputs[0].shape == [None, None]
    assert inputs_of(graph) == model_inputs(model)
