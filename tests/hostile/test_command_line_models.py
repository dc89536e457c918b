"""Bad models on the command line: one sentence, the exit code, and nothing written anywhere."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper

from hostile.command_line import Place, Run, edit, quantize_arguments, quantized_pair, refused, stored
from onnxq.evaluation.goal import Goal
from onnxq.pipeline import quantize
from onnxq.steps.request import Budget


def external(place: Place, location: str) -> None:
    """Make the model refer to a data file by this location."""
    model = onnx.load(place.model)
    tensor = model.graph.initializer[0]
    content = tensor.raw_data
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    onnx.save(model, place.model)
    (place.root / "secret.data").write_bytes(content)


def truncated(place: Place) -> None:
    place.model.write_bytes(place.model.read_bytes()[:-1000])


def folder(place: Place) -> None:
    place.model.unlink()
    place.model.mkdir()


def linked_data(place: Place) -> None:
    external(place, "weights.data")
    (place.model.parent / "weights.data").symlink_to(place.root / "secret.data")


def only(*nodes: onnx.NodeProto) -> Callable[[Place], None]:
    """Return an edit that leaves a float[4,32] input and these nodes, the last of which gives ``y``."""

    def replaced(model: ModelProto) -> None:
        del model.graph.node[:]
        del model.graph.initializer[:]
        model.graph.node.extend(nodes)
        model.graph.output[0].type.tensor_type.ClearField("shape")

    return edit(replaced)


def integer_product() -> Callable[[Place], None]:
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"], "dynamic"),
        helper.make_node("Transpose", ["q"], ["t"]),
        helper.make_node("MatMulInteger", ["q", "t"], ["i"]),
        helper.make_node("Cast", ["i"], ["y"], to=TensorProto.FLOAT),
    ]
    return only(*nodes)


def divided_by_zero(model: ModelProto) -> None:
    model.graph.node[-1].output[0] = "made"
    model.graph.node.append(helper.make_node("Sub", ["made", "made"], ["zero"]))
    model.graph.node.append(helper.make_node("Div", ["zero", "zero"], ["y"]))


def our_own(place: Place) -> None:
    quantize(
        place.model, place.calib, place.root / "done.onnx", goal=Goal(force=True), budget=Budget(latency_seconds=0)
    )
    (place.root / "done.onnx").replace(place.model)


def imported(domain: str, version: int) -> Callable[[Place], None]:
    def change(model: ModelProto) -> None:
        del model.opset_import[:]
        model.opset_import.add(domain=domain, version=version)

    return edit(change)


BAD_MODELS = {
    "not ONNX": (
        lambda place: place.model.write_text("weights and biases"),
        r"model\.onnx is not an ONNX model, is cut short",
    ),
    "truncated": (truncated, r"model\.onnx"),
    "empty": (lambda place: place.model.write_bytes(b""), r"model\.onnx is empty; expected an ONNX model"),
    "a folder": (folder, r"model\.onnx is a folder; give the path of an \.onnx file"),
    "missing": (lambda place: place.model.unlink(), r"model\.onnx does not exist; give the path of an \.onnx file"),
    "Git LFS pointer": (
        lambda place: place.model.write_text("version https://git-lfs.github.com/spec/v1\n"),
        r"is a Git LFS pointer",
    ),
    "missing external data": (lambda place: external(place, "weights.data"), r"weights\.data"),
    "absolute external data": (lambda place: external(place, str(place.root / "secret.data")), r"secret\.data"),
    "external data above": (lambda place: external(place, "../secret.data"), r"\.\./secret\.data"),
    "external data linked away": (linked_data, r"links to .*secret\.data outside the model's folder"),
    "opset of the future": (imported("", 999), r"999"),
    "opset 0": (imported("", 0), r"opset|version|Opset"),
    "no opset": (edit(lambda model: model.ClearField("opset_import")), r"opset|version|domain"),
    "no nodes": (edit(lambda model: model.graph.ClearField("node")), r"y"),
    "no outputs": (edit(lambda model: model.graph.ClearField("output")), r"the model has no outputs"),
    "a cycle": (
        edit(lambda model: model.graph.node[0].input.__setitem__(0, model.graph.node[-1].output[0])),
        r"has a cycle through the nodes",
    ),
    "a name that makes a tensor twice": (
        edit(lambda model: model.graph.initializer.append(model.graph.initializer[0])),
        r"declares the tensor 'w0' twice",
    ),
    "a missing input": (edit(lambda model: model.graph.ClearField("initializer")), r"w0"),
    "quantized nodes": (
        edit(quantized_pair),
        r"the model is quantized already: node pair is QuantizeLinear; quantize the float model",
    ),
    "integer products": (integer_product(), r"the model is quantized already: node dynamic is DynamicQuantizeLinear"),
    "our own output": (our_own, r"the model is quantized already, by onnxq as int8; quantize the float model"),
    "nothing to quantize": (
        only(helper.make_node("Tanh", ["x"], ["y"])),
        r"there is nothing to quantize in the model: Tanh has no integer kernel",
    ),
    "NaN in a weight": (edit(lambda model: stored(model, np.nan)), r"weight w0 of node first holds NaN or infinity"),
    "infinity in a weight": (
        edit(lambda model: stored(model, np.inf)),
        r"weight w0 of node first holds NaN or infinity",
    ),
    "NaN alone in its outputs": (
        edit(divided_by_zero),
        r"every value of output y of the float model is NaN or infinite, in all \d+ samples .* see which node first",
    ),
    "unknown operator": (edit(lambda model: setattr(model.graph.node[1], "op_type", "Rleu")), r"Rleu"),
}


@pytest.mark.parametrize("case", BAD_MODELS)
def test_a_bad_model_is_one_sentence_and_no_file(case: str, place: Place, onnxq: Run) -> None:
    spoil, message = BAD_MODELS[case]
    spoil(place)
    before = place.files()
    sentence = refused(onnxq(*quantize_arguments(place)))
    assert re.search(message, sentence), sentence
    assert place.files() == before


@pytest.mark.parametrize(
    "case", ["not ONNX", "truncated", "empty", "a folder", "missing", "missing external data", "external data above"]
)
@pytest.mark.parametrize("command", ["inspect", "compare", "plan"])
def test_every_command_refuses_a_bad_model(case: str, command: str, place: Place, onnxq: Run) -> None:
    BAD_MODELS[case][0](place)
    before = place.files()
    arguments = {
        "inspect": ["inspect", place.model],
        "compare": ["compare", place.model, place.model, "--data", place.calib],
        "plan": ["quantize", place.model, "--dry-run"],
    }
    refused(onnxq(*arguments[command]))
    assert place.files() == before
