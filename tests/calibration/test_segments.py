"""Models cut into segments compute what the whole model computes; stages run them one after the other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from model_texts import model
from numpy.typing import NDArray
from observations import wanted, with_outputs

from onnxq.calibration import segments as module
from onnxq.calibration.accumulators import SampleExtremes
from onnxq.calibration.collect import collect
from onnxq.calibration.segments import Segment, Stage, extract, segments, stages
from onnxq.errors import DataError, ModelError
from onnxq.runtime.sessions import Memory, open_session, output_names, run

MODEL = Path(__file__).parents[2] / "models" / "resnet.onnx"
WEIGHTS = dict.fromkeys("wv", np.float32([[1, 2], [-3, 4]]))
FED = {"x": np.float32([[1, -2], [0.5, 3]]), "flag": np.array(True)}
LAYERS = """(float[N,2] x) => (float[N,2] y) {
    a = MatMul(x, w) b = Relu(a) c = MatMul(b, v) d = Add(c, x) e = MatMul(d, w) y = Sub(e, b)
}"""
BODIES = """(float[N,2] x, bool flag) => (float[N,2] y) { a = MatMul(x, w) b = Relu(a) c = Neg(b)
    y = If(flag) <then_branch = t () => (i) { i = Add(b, w) }, else_branch = e () => (j) { j = Sub(b, c) }>
}"""
SEQUENCES = """(float[N,2] x) => (float[N,2] y) {
    s = SequenceConstruct(x, x) a = Relu(x) zero = Constant <value = int64 {0}> () b = SequenceAt(s, zero)
    c = Add(a, b) y = Neg(c)
}"""


def built(text: str = LAYERS) -> onnx.ModelProto:
    return model(text, **{name: array for name, array in WEIGHTS.items() if f" {name})" in text})


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut after every observed tensor that allows it."""
    monkeypatch.setattr(module, "SEGMENT_TENSORS", 1)


def through(parts: tuple[Segment, ...] | tuple[Stage, ...]) -> dict[str, NDArray[np.float32]]:
    """Run parts one after the other, without any tensor that is not kept; return all outputs."""
    live, values = dict(FED), {}
    for part in parts:
        if isinstance(part, Segment):
            part = Stage.of(part, None, mapped=False, memory=Memory.UNPLANNED, threads=1)
        outputs = part.run(live)
        values |= outputs
        live = {name: array for name, array in {**live, **outputs}.items() if name in part.kept}
    return values


def whole(made: onnx.ModelProto, names: str) -> dict[str, list[list[float]]]:
    session = open_session(with_outputs(made, names.split()), threads=1)
    feeds = {value.name: FED[value.name] for value in session.get_inputs()}
    values = run(session, feeds, names.split())
    return {name: value.tolist() for name, value in zip(names.split(), values, strict=True)}


@pytest.mark.parametrize(
    ("text", "names"),
    [*((LAYERS, names) for names in ("a b c d e y", "b d y", "a", "e y", "b c", "w b e", "y")), (BODIES, "a b c y")],
)
def test_segments_and_stages_give_what_the_whole_model_gives(text: str, names: str) -> None:
    made = built(text)
    for declared in ([], [1, 2]):
        # Declared dimensions of inner tensors may be wrong.
        if declared:
            made.graph.value_info.extend(onnx.helper.make_tensor_value_info(name, 1, declared) for name in "abc")
        for parts in (segments(made, names.split()), stages(made, names.split())):
            values = through(parts)
            assert {name: values[name].tolist() for name in names.split()} == whole(made, names)


def test_a_cut_is_only_where_observed_tensors_cross() -> None:
    parts = segments(built(), "bdy")
    assert [(part.inputs, part.outputs, set(part.kept)) for part in parts] == [
        (("x",), ("b",), {"x", "b"}),
        (("x", "b"), ("d",), {"b", "d"}),
        (("b", "d"), ("y",), set()),
    ]
    stored = [[tensor.name for tensor in onnx.ModelProto.FromString(part.model).graph.initializer] for part in parts]
    assert stored == [["w"], ["v"], ["w"]]
    # Unless b is observed, it would have to cross every cut up to the last node.
    assert [part.outputs for part in segments(built(), "ady")] == [("a",), ("d", "y")]
    assert segments(built(BODIES), "abcy")[-1].inputs == ("flag", "b", "c")


def test_a_segment_ends_after_some_tensors_or_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = built()
    made.graph.value_info.extend(onnx.helper.make_tensor_value_info(name, 1, [1, 2]) for name in "abcde")
    for tensors, size, count in ((1, 1 << 26, 5), (2, 1 << 26, 3), (8, 1 << 26, 1), (8, 2 * 2 * 4, 3), (8, 8, 5)):
        monkeypatch.setattr(module, "SEGMENT_TENSORS", tensors)
        monkeypatch.setattr(module, "SEGMENT_BYTES", size)
        assert len(segments(made, "abcdey")) == count + (tensors == 1 or size == 8), (tensors, size)


def test_other_tensors_cut_and_are_computed_but_not_given_unless_they_are_needed() -> None:
    parts, alone = segments(built(), ["d"], "abcey"), segments(built(), "abcdey")
    assert [part.inputs for part in parts] == [part.inputs for part in alone]
    assert [part.outputs for part in parts] == [("a",), ("b",), ("c",), ("d",), ("e",), ()]
    assert through(parts)["d"].tolist() == through(alone)["d"].tolist()
    (only,) = segments(built(), ["y"], "e")
    assert (only.outputs, set(output_names(open_session(only.model)))) == (("y",), {"e", "y"})


def test_nodes_out_of_order_stay_together_and_unknown_names_are_told() -> None:
    backwards = built()
    nodes = list(backwards.graph.node)[::-1]
    del backwards.graph.node[:]
    backwards.graph.node.extend(nodes)
    backwards.graph.value_info.extend(onnx.helper.make_tensor_value_info(name, 1, None) for name in "bd")
    assert len(segments(backwards, "bdy")) == 1
    for cut in (segments, stages):
        with pytest.raises(ModelError, match="Tensor 'z' is not in the main graph"):
            cut(built(), ["z"])


def test_initializers_that_are_inputs_are_not_fed() -> None:
    made = built()
    made.ir_version = 3
    made.graph.input.extend(onnx.helper.make_tensor_value_info(name, 1, [2, 2]) for name in "wv")
    parts = stages(made, "bd")
    assert [part.inputs for part in parts] == [("x",), ("x", "b"), ("b", "d")]
    assert through(parts)["y"].tolist() == whole(built(), "y")["y"]


def test_tensors_that_are_no_numbers_do_not_cross_a_cut() -> None:
    parts = stages(built(SEQUENCES), "ac")
    assert [part.outputs for part in parts] == [("a", "b"), ("c",), ("y",)]
    assert through(parts)["y"].tolist() == whole(built(SEQUENCES), "y")["y"]


def test_stages_read_weights_of_files_and_give_observed_tensors(tmp_path: Path) -> None:
    onnx.save(built(), tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0, location="weights")
    parts = stages(tmp_path / "m.onnx", ["b"], observed=["a", "c", "x"])
    assert [part.outputs for part in parts] == [("a", "b"), ("c", "y")]
    assert through(parts)["y"].tolist() == whole(built(), "y")["y"]
    with pytest.raises(DataError, match=r"sample 3 cannot be run by onnxruntime: .*invalid dimensions"):
        parts[0].run({"x": FED["x"][:, :1]}, 3)
    (tmp_path / "text.onnx").write_text("no model")
    for name, message in (("none", "none.onnx cannot be read: No such file"), ("text", "is not an ONNX model")):
        with pytest.raises(ModelError, match=message):
            stages(tmp_path / f"{name}.onnx", [])


def test_the_nodes_between_tensors_are_extracted() -> None:
    part = extract(built(), {"b": 1, "a": 1, "unused": 1}, ["d", "d"])
    assert [node.op_type for node in part.graph.node] == ["MatMul", "Add"]
    assert [value.name for value in part.graph.input] == ["x", "b"]
    values = whole(built(), "b d")
    (d,) = run(open_session(part), {"x": FED["x"], "b": np.float32(values["b"])})
    assert d.tolist() == values["d"]


def test_cut_and_uncut_statistics_of_a_network_differ_by_rounding_only(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [node.output[0] for node in onnx.load(MODEL).graph.node if node.op_type in ("Conv", "Relu", "Add")]
    samples = [{"image": image[None]} for image in np.load(MODEL.parent / "data" / "calib.npz")["image"][:8]]
    found = []
    for tensors in (1, 8, 10_000):
        monkeypatch.setattr(module, "SEGMENT_TENSORS", tensors)
        found.append((len(segments(onnx.load(MODEL), names)), collect(MODEL, samples, wanted(names))))
    (most, one), (some, other), (single, uncut) = found
    assert most > some > single == 1
    for name in names:
        ends = [statistics.of(name).need(SampleExtremes).ends for statistics in (one, other, uncut)]
        assert ends[0] == pytest.approx(ends[2], rel=1e-6, abs=1e-6)
        assert ends[1] == pytest.approx(ends[2], rel=1e-6, abs=1e-6)
