from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from observations import wanted
from onnx import TensorProto, helper, numpy_helper

from onnxq.calibration import segments as module
from onnxq.calibration.accumulators import SampleExtremes
from onnxq.calibration.collect import collect
from onnxq.calibration.segments import Segment, segments
from onnxq.errors import ModelError
from onnxq.runtime.sessions import open_session, run

MODEL = Path(__file__).parents[2] / "models" / "resnet.onnx"
SAMPLES = [{"image": image[None]} for image in np.load(MODEL.parent / "data" / "calib.npz")["image"][:8]]
TAPS = [node.output[0] for node in onnx.load(MODEL).graph.node if node.op_type in ("Conv", "Relu", "Add")]


def chained(*nodes: onnx.NodeProto, outputs: str = "y", dims: tuple[object, ...] = ("N", 2)) -> onnx.ModelProto:
    """Return a model of these nodes with the inputs x and flag, and the weights w and v."""
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 2]),
        helper.make_tensor_value_info("flag", TensorProto.BOOL, []),
    ]
    weights = [numpy_helper.from_array(np.float32([[1, 2], [-3, 4]]), name) for name in "wv"]
    made = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs.split()]
    graph = helper.make_graph(nodes, "g", inputs, made, weights)
    hidden = sorted({name for node in nodes for name in node.output} - set(outputs.split()))
    graph.value_info.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name in hidden)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def node(kind: str, inputs: str, output: str, **attributes: object) -> onnx.NodeProto:
    return helper.make_node(kind, inputs.split(), [output], **attributes)


LAYERS = (
    node("MatMul", "x w", "a"),
    node("Relu", "a", "b"),
    node("MatMul", "b v", "c"),
    node("Add", "c x", "d"),
    node("MatMul", "d w", "e"),
    node("Sub", "e b", "y"),
)
FED = {"x": np.float32([[1, -2], [0.5, 3]]), "flag": np.array(True)}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut after every tap that allows it."""
    monkeypatch.setattr(module, "SEGMENT_TENSORS", 1)


def ran(parts: tuple[Segment, ...]) -> dict[str, np.ndarray]:
    """Run segments one after the other, and forget what is not kept."""
    live, given = dict(FED), {}
    for part in parts:
        session = open_session(part.model, threads=1)
        values = dict(
            zip(part.outputs, run(session, {name: live[name] for name in part.inputs}, part.outputs), strict=True)
        )
        given |= values
        live = {name: array for name, array in {**live, **values}.items() if name in part.kept}
    return given


def whole(model: onnx.ModelProto, taps: str) -> dict[str, np.ndarray]:
    instrumented = onnx.ModelProto()
    instrumented.CopyFrom(model)
    own = {value.name for value in model.graph.output}
    instrumented.graph.output.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in taps.split() if name not in own
    )
    return dict(zip(taps.split(), run(open_session(instrumented, threads=1), FED, taps.split()), strict=True))


@pytest.mark.parametrize("taps", ["a b c d e y", "b d y", "a", "e y", "b c", "w b e", "y"])
def test_segments_give_what_the_whole_model_gives(taps: str) -> None:
    model = chained(*LAYERS)
    expected = whole(model, taps)
    found = ran(segments(model, taps.split()))
    assert {name: found[name].tolist() for name in expected} == {name: one.tolist() for name, one in expected.items()}


def test_a_cut_is_only_where_tapped_tensors_cross() -> None:
    parts = segments(chained(*LAYERS), ["b", "d", "y"])
    assert [(part.inputs, part.outputs) for part in parts] == [
        (("x",), ("b",)),
        (("x", "b"), ("d",)),
        (("b", "d"), ("y",)),
    ]
    assert [set(part.kept) for part in parts] == [{"x", "b"}, {"b", "d"}, set()]
    # Without the tap at b, that tensor would have to cross every cut up to the last node.
    assert [part.outputs for part in segments(chained(*LAYERS), ["a", "d", "y"])] == [("a",), ("d", "y")]


def test_weights_are_only_where_they_are_used() -> None:
    parts = segments(chained(*LAYERS), ["b", "d", "y"])
    stored = [[t.name for t in onnx.ModelProto.FromString(part.model).graph.initializer] for part in parts]
    assert stored == [["w"], ["v"], ["w"]]


def test_other_tensors_cut_too_and_are_not_given_unless_they_are_needed() -> None:
    parts = segments(chained(*LAYERS), ["d"], ["a", "b", "c", "e", "y"])
    alone = segments(chained(*LAYERS), ["a", "b", "c", "d", "e", "y"])
    assert [part.inputs for part in parts] == [part.inputs for part in alone]
    assert parts[0].outputs == ("a",)
    assert ran(parts)["d"].tolist() == ran(alone)["d"].tolist()
    last = onnx.ModelProto.FromString(parts[-2].model)
    assert parts[-1].outputs == ()
    assert [value.name for value in last.graph.output][:1] == ["e"]


def test_bodies_read_tensors_of_earlier_segments() -> None:
    body = helper.make_graph(
        [node("Add", "b w", "inner")], "body", [], [helper.make_tensor_value_info("inner", TensorProto.FLOAT, None)]
    )
    choice = node("If", "flag", "y", then_branch=body, else_branch=body)
    model = chained(node("MatMul", "x w", "a"), node("Relu", "a", "b"), node("Neg", "b", "c"), choice)
    parts = segments(model, ["a", "b", "c", "y"])
    assert parts[-1].inputs == ("flag", "b")
    assert ran(parts)["y"].tolist() == whole(model, "y")["y"].tolist()


def test_wrong_inner_dimensions_do_no_harm() -> None:
    model = chained(*LAYERS, dims=(1, 2))
    assert ran(segments(model, ["b", "d", "y"]))["y"].tolist() == whole(model, "y")["y"].tolist()


def test_nodes_out_of_order_stay_together() -> None:
    assert len(segments(chained(*LAYERS[::-1]), ["b", "d", "y"])) == 1


def test_a_name_that_is_not_there_is_told() -> None:
    with pytest.raises(ModelError, match="Tensor 'z' is not in the main graph"):
        segments(chained(*LAYERS), ["z"])


@pytest.mark.parametrize("taps", [1, 3, 8])
def test_cut_and_uncut_statistics_of_a_network_differ_by_rounding_only(
    taps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SEGMENT_TENSORS", 10_000)
    uncut = collect(MODEL, SAMPLES, wanted(TAPS))
    monkeypatch.setattr(module, "SEGMENT_TENSORS", taps)
    assert len(segments(onnx.load(MODEL), TAPS)) > 1
    cut = collect(MODEL, SAMPLES, wanted(TAPS))
    for name in TAPS:
        ends, expected = (found.of(name).need(SampleExtremes).ends for found in (cut, uncut))
        assert ends == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_a_segment_ends_where_its_taps_are_declared_to_be_large(monkeypatch: pytest.MonkeyPatch) -> None:
    model = chained(*LAYERS, dims=(1, 2))
    monkeypatch.setattr(module, "SEGMENT_TENSORS", 8)
    assert len(segments(model, ["a", "b", "c", "d"])) == 1
    monkeypatch.setattr(module, "SEGMENT_BYTES", 2 * 2 * 4)
    assert segments(model, ["a", "b", "c", "d"])[0].outputs == ("a", "b")
