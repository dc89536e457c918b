from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from onnxq.calibration.provenance import Provenance, file_digest, instruction_set, model_digest, sample_digest
from onnxq.errors import DataError, ModelError
from onnxq.ir import load, read_model, save

ONES = np.ones((2, 3), np.float32)


@pytest.mark.parametrize(
    "other",
    [
        {"x": ONES.astype(np.float64)},
        {"x": ONES.reshape(3, 2)},
        {"y": ONES},
        {"x": ONES, "y": ONES},
        {"x": ONES * np.float32(1 + 2**-23)},
        {"x": np.ones((2, 3), ml_dtypes.bfloat16)},
        {},
    ],
    ids=str,
)
def test_samples_of_other_content_have_another_digest(other: dict[str, np.ndarray]) -> None:
    assert sample_digest(other) != sample_digest({"x": ONES})


def test_samples_of_equal_content_have_one_digest() -> None:
    assert sample_digest({"x": np.asfortranarray(ONES)}) == sample_digest({"x": ONES})
    assert sample_digest({"a": ONES, "b": ONES[:1]}) == sample_digest({"b": ONES[:1], "a": ONES})
    texts = {"x": np.array(["a", "bc"])}
    assert sample_digest(texts) == sample_digest({"x": texts["x"].astype(object)})
    assert sample_digest(texts) != sample_digest({"x": np.array(["a", "bd"])})


def saved(path: Path, weight: float) -> Path:
    w = numpy_helper.from_array(np.full((64, 64), weight, np.float32), "w")
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 64]) for name in "xy")
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [x], [y], [w])
    onnx.save(helper.make_model(graph), path, save_as_external_data=True, location="w.data")
    return path


def test_a_model_is_its_file_and_its_external_data(tmp_path: Path) -> None:
    paths = []
    for name, weight in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        (tmp_path / name).mkdir()
        paths.append(saved(tmp_path / name / "m.onnx", weight))
    first, same, other = map(model_digest, paths)
    assert first == same != other
    assert paths[0].read_bytes() == paths[2].read_bytes()
    proto = onnx.load(paths[0], load_external_data=False)
    assert model_digest(proto) == model_digest(onnx.load(paths[1], load_external_data=False))


IF = """(bool c, float[64,64] x) => (float[64,64] y) {
    y = If (c) <then_branch = t () => (float[64,64] a) { a = Neg (x) }, else_branch = e () => (float[64,64] w) {}>
}"""


def saved_with_a_body(path: Path, weight: float, *, constant: bool) -> Path:
    """Write a model whose body gives a weight that lies in a file: a constant of a node, or an initializer."""
    path.parent.mkdir()
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> main {IF}')
    body = model.graph.node[0].attribute[1].g
    w = numpy_helper.from_array(np.full((64, 64), weight, np.float32), "w")
    if constant:
        body.node.append(helper.make_node("Constant", [], ["w"], value=w))
    else:
        body.initializer.append(w)
    save(read_model(model), path, external_data=True)
    return path


@pytest.mark.parametrize("constant", [False, True])
def test_weights_of_bodies_are_content(constant: bool, tmp_path: Path) -> None:
    paths = [saved_with_a_body(tmp_path / str(weight) / "m.onnx", weight, constant=constant) for weight in (1.0, 2.0)]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert model_digest(paths[0]) != model_digest(paths[1])


@pytest.mark.parametrize("constant", [False, True])
def test_content_is_the_same_wherever_it_lies(constant: bool, tmp_path: Path) -> None:
    path = saved_with_a_body(tmp_path / "m" / "m.onnx", 1.0, constant=constant)
    save(load(path), path.with_name("renamed.onnx"), external_data=True)
    save(load(path), path.with_name("inline.onnx"), external_data=False)
    paths = [path.with_name(f"{name}.onnx") for name in ("m", "renamed", "inline")]
    assert len({file.read_bytes() for file in paths}) == 3
    assert len({*map(model_digest, paths), model_digest(onnx.load(paths[2]))}) == 1


@pytest.mark.parametrize(
    ("data_type", "values", "raw"),
    [
        (TensorProto.FLOAT, [0.5, 1.5, 2.5], np.float32([0.5, 1.5, 2.5])),
        (TensorProto.FLOAT16, [0.5, 1.5, 2.5], np.float16([0.5, 1.5, 2.5])),
        (TensorProto.INT64, [1, 2, 3], np.int64([1, 2, 3])),
        (TensorProto.BOOL, [True, False, False], np.array([True, False, False])),
        (TensorProto.INT4, [1, 2, 3], np.uint8([0x21, 0x03])),
    ],
)
def test_content_is_the_same_however_it_is_written(data_type: int, values: list[Any], raw: np.ndarray) -> None:
    def key(stored: onnx.TensorProto) -> str:
        return model_digest(helper.make_model(helper.make_graph([], "g", [], [], [stored])))

    typed, other = (helper.make_tensor("w", data_type, [3], given) for given in (values, values[::-1]))
    assert not typed.raw_data
    assert key(helper.make_tensor("w", data_type, [3], raw.tobytes(), raw=True)) == key(typed) != key(other)


def test_texts_are_content() -> None:
    def key(*texts: str) -> str:
        stored = helper.make_tensor("w", TensorProto.STRING, [2], [text.encode() for text in texts])
        return model_digest(helper.make_model(helper.make_graph([], "g", [], [], [stored])))

    assert key("a", "bc") == key("a", "bc")
    assert len({key("a", "bc"), key("ab", "c"), key("abc", "")}) == 3


def test_weights_in_files_are_not_all_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    stored = TensorProto(name="w", data_type=TensorProto.UINT8, dims=[1 << 28], data_location=TensorProto.EXTERNAL)
    stored.external_data.add(key="location", value="w.data")
    onnx.save(helper.make_model(helper.make_graph([], "g", [], [], [stored])), path)
    with (tmp_path / "w.data").open("wb") as file:
        file.truncate(1 << 28)
    code = """if True:
        import resource, sys
        from pathlib import Path
        from onnxq.calibration.provenance import model_digest
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        model_digest(Path(sys.argv[1]))
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """
    ran = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    # In KiB.
    assert int(ran.stdout) < 1 << 16


def test_the_opset_and_what_is_written_about_a_model_are_not_its_content(tmp_path: Path) -> None:
    model = onnx.load(saved(tmp_path / "m.onnx", 1.0))
    other = onnx.ModelProto()
    other.CopyFrom(model)
    other.opset_import[0].version += 1
    other.producer_name = other.doc_string = other.graph.node[0].doc_string = "another"
    other.graph.value_info.add(name="inner")
    assert model_digest(other) == model_digest(model)
    other.graph.node[0].attribute.append(helper.make_attribute("a", 1))
    assert model_digest(other) != model_digest(model)


def test_external_data_that_is_missing_is_named(tmp_path: Path) -> None:
    path = saved(tmp_path / "m.onnx", 1.0)
    (tmp_path / "w.data").unlink()
    with pytest.raises(ModelError, match=r"'w' keeps its data in 'w.data', but .* cannot be found; put that file"):
        model_digest(path)


def test_a_file_is_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    (tmp_path / "b").write_bytes(b"1")
    assert file_digest(tmp_path / "a") == file_digest(tmp_path / "b")
    (tmp_path / "b").write_bytes(b"2")
    assert file_digest(tmp_path / "a") != file_digest(tmp_path / "b")
    with pytest.raises(ModelError, match="c cannot be read: No such file"):
        file_digest(tmp_path / "c")


def test_nothing_known_is_taken_from_the_other() -> None:
    known = Provenance("m", "r 1")
    assert known.merge(known) == known.merge(Provenance()) == Provenance().merge(known) == known


def test_a_model_that_nobody_asked_for_is_that_of_the_other() -> None:
    known, same = Provenance("m", "r 1", ("x86_64 avx2",)), Provenance("", "r 1", ("x86_64 avx2",))
    assert known.merge(same) == same.merge(known) == known


def test_machines_are_united() -> None:
    a, b = (Provenance("m", "r", (machine,)) for machine in ("x86_64 avx2", "aarch64 sve"))
    assert a.merge(b) == b.merge(a) == Provenance("m", "r", ("aarch64 sve", "x86_64 avx2"))
    assert instruction_set().split()[0] == platform.machine()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (Provenance("n", "r 1"), "of model m and of model n cannot be merged"),
        (Provenance("m", "r 2"), "Statistics of r 1 and of r 2 cannot be merged"),
    ],
)
def test_what_does_not_belong_together_is_not_merged(other: Provenance, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Provenance("m", "r 1").merge(other)
