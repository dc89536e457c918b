"""A model comes in, and nothing that is to be written takes its place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from conftest import MODELS
from onnx import ModelProto, helper, numpy_helper, parser
from onnx_graphsurgeon.ir.tensor import LazyValues
from plain_graphs import MODEL, plain, run
from small_models import model, small

from ir.edited_graphs import calls
from onnxq.errors import ModelError, OutputError
from onnxq.ir import Graph, as_graph, load, read_model, to_model
from onnxq.ir.reader import open_model, refuse_overwriting


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_an_exported_program_of_torch_is_its_proto() -> None:
    proto = onnx.load(MODELS / "gru.onnx")
    graph = as_graph(SimpleNamespace(model_proto=proto))
    assert [node.name for node in graph.nodes] == [node.name for node in proto.graph.node]


def test_everything_that_holds_a_model_becomes_a_graph(tmp_path) -> None:
    onnx.save(small(), tmp_path / "m.onnx")
    plain = gs.import_onnx(small())  # noqa: TID251 - what users hand over

    for given in (tmp_path / "m.onnx", str(tmp_path / "m.onnx"), small(), plain):
        assert [node.op for node in as_graph(given).nodes] == ["Add"]
    with pytest.raises(ModelError, match="the model is of type int, expected a path, "):
        as_graph(3)


def test_what_a_graph_was_made_from_stays_as_it_is_when_the_graph_is_edited() -> None:
    model, graph = small(), read_model(small())
    before = model.SerializeToString(), to_model(graph).SerializeToString()

    for given in (model, graph):
        own = as_graph(given)
        own.nodes[0].op = "Mul"
        own.set_metadata("by", "me")
        own.nodes[0].inputs[1].values = np.zeros(4, np.float32)
        own.opset = 18

    assert (model.SerializeToString(), to_model(graph).SerializeToString()) == before
    assert as_graph(graph) is not graph


def test_a_graph_tells_what_the_model_said() -> None:
    graph = read_model(small())

    assert [(tensor.name, tensor.shape, tensor.dtype) for tensor in graph.inputs] == [("x", [4], "float32")]
    assert (graph.opset, graph.ir_version, graph.name) == (17, 8, "g")
    assert graph.nodes[0].inputs[1] is graph.initializers[0]
    assert graph.outputs[0].inputs == [graph.nodes[0]]


def test_a_model_from_before_opsets_has_opset_1() -> None:
    old = small()
    old.ir_version = 2
    del old.opset_import[:]

    assert read_model(old).opset == 1


def change(name: str, value: object) -> ModelProto:
    changed = small()
    setattr(changed, name, value)
    return changed


def without(name: str) -> ModelProto:
    changed = small()
    changed.ClearField(name)
    return changed


def with_opset(version: int) -> ModelProto:
    changed = small()
    changed.opset_import[0].version = version
    return changed


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (without("graph"), "holds no graph"),
        (without("opset_import"), "the Add node that makes .* imports no opset of domain ''"),
        (with_opset(0), "opset 0, but the installed onnx"),
        (with_opset(999), "opset 999, but the installed onnx .* knows 1 to"),
        (change("ir_version", 99), "IR version 99, .* upgrade onnx"),
        (model("g () => () { }"), "the graph is empty"),
    ],
)
def test_an_incomplete_model_is_refused_with_the_reason(broken: ModelProto, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_model(broken)


def test_a_model_of_custom_operators_alone_needs_no_onnx_opset() -> None:
    custom = small()
    custom.graph.node[0].domain = custom.opset_import[0].domain = "custom"

    assert read_model(custom).opset == 0


def truncated() -> bytes:
    return small().SerializeToString()[:-20]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"hello, this is no model", "is not an ONNX model, is cut short"),
        (truncated(), "is not an ONNX model, is cut short"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1", "Git LFS pointer"),
        (ModelProto(ir_version=8).SerializeToString(), "holds no graph"),
        (b"PK\x03\x04" + bytes(100), "is not an ONNX model"),
    ],
)
def test_a_file_that_is_no_model_is_refused_by_name(tmp_path, data: bytes, message: str) -> None:
    with pytest.raises(ModelError, match=rf"m\.onnx.*{message}") as caught:
        load(written(tmp_path / "m.onnx", data))
    assert "\n" not in str(caught.value)


def test_a_path_without_a_file_is_refused(tmp_path) -> None:
    with pytest.raises(ModelError, match=r"lost\.onnx does not exist"):
        load(tmp_path / "lost.onnx")
    with pytest.raises(ModelError, match="is a folder"):
        load(tmp_path)
    with pytest.raises(ModelError, match="cannot be read"):
        load("a\0b")


@pytest.mark.parametrize("cut", range(0, 160, 7))
def test_a_file_cut_anywhere_is_read_or_refused_but_never_crashes(tmp_path, cut: int) -> None:
    data = small().SerializeToString()
    path = written(tmp_path / "m.onnx", data[: min(cut, len(data))])
    try:
        graph = load(path)
    except ModelError:
        return
    assert isinstance(graph, Graph)


@pytest.mark.parametrize("seed", range(60))
def test_a_file_with_flipped_bytes_is_read_or_refused_but_never_crashes(tmp_path, seed: int) -> None:
    data = bytearray(small().SerializeToString())
    state = seed * 2654435761 + 1
    for _ in range(3):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        data[(state >> 33) % len(data)] ^= 1 << (state >> 60) % 8
    try:
        graph = load(written(tmp_path / "m.onnx", bytes(data)))
    except ModelError:
        return
    assert isinstance(graph, Graph)


def test_reading_does_work_in_proportion_to_the_model() -> None:
    """Bodies look names up in the graphs around them, and must not copy what those declare."""
    lookups: dict[int, int] = {}
    for size in (50, 100, 200):
        body = "t () => (u) { u = Neg(x) }"
        nodes = [f"y{i} = If (c) <then_branch = {body}, else_branch = {body}>" for i in range(size)]
        text = f"g (float[4] x, bool c) => (float[4] y0) {{ {' '.join(nodes)} }}"
        lookups[size] = calls(partial(read_model, model(text)))

    assert lookups[200] - lookups[100] < 2.1 * (lookups[100] - lookups[50])


@pytest.mark.parametrize("field", ["producer_name", "domain", "doc_string", "opset_import", "metadata_props"])
def test_other_text_of_the_model_that_is_no_text_is_refused(field: str) -> None:
    source = small()
    source.producer_name = source.domain = source.doc_string = "unset"
    if field == "opset_import":
        source.opset_import.add(domain="MARK", version=1)
    elif field == "metadata_props":
        source.metadata_props.add(key="MARK", value="1")
    else:
        setattr(source, field, "MARK")
    damaged = ModelProto.FromString(source.SerializeToString().replace(b"MARK", b"MA\xffK"))

    if field == "metadata_props":
        # What is carried through as it came need not be read.
        assert to_model(read_model(damaged)).SerializeToString().count(b"MA\xffK") == 1
    else:
        with pytest.raises(ModelError, match=r"the text b'MA\\xffK', which is not UTF-8"):
            read_model(damaged)


@pytest.mark.parametrize(("first", "last"), [(13, 13), (11, 13), (13, 11)])
def test_a_domain_that_is_imported_twice_is_written_once_as_runtimes_read_it(first: int, last: int) -> None:
    model = parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 13]> g (float[4] x) => (float[4] y) { y = Relu(x) }'
    )
    del model.opset_import[:]
    model.opset_import.extend([helper.make_opsetid("", first), helper.make_opsetid("ai.onnx", last)])
    written = to_model(read_model(model))
    assert [(entry.domain, entry.version) for entry in written.opset_import] == [("", last)]
    onnx.checker.check_model(written, full_check=True)


# A model comes in, and nothing that is to be written takes its place.


def test_data_that_the_model_reads_is_not_overwritten(tmp_path: Path) -> None:
    source = tmp_path / "in.onnx"
    onnx.save(onnx.load(MODELS / "gru.onnx"), source, save_as_external_data=True, location="out.onnx.data")
    graph = load(source)
    refuse_overwriting(graph, tmp_path / "other.data")
    with pytest.raises(OutputError, match="is the external data of the model itself"):
        refuse_overwriting(graph, tmp_path / "out.onnx.data")
    with pytest.raises(OutputError, match="is the external data of the model itself"):
        open_model(source, tmp_path / "out.onnx")


def test_a_file_is_not_overwritten_and_a_model_in_memory_has_none(tmp_path: Path) -> None:
    source, output = MODELS / "gru.onnx", tmp_path / "out.onnx"
    graph, file, wanted = open_model(str(source), str(output))
    assert (file, wanted, len(graph.nodes)) == (source, output, 34)
    assert open_model(graph, None)[1:] == (None, None)
    assert open_model(onnx.load(source), output)[1:] == (None, output)
    with pytest.raises(OutputError):
        open_model(source, source)


def test_a_plain_graph_becomes_ours_and_computes_the_same() -> None:
    graph = as_graph(plain())

    assert isinstance(graph, Graph)
    for flag in (True, False):
        np.testing.assert_array_equal(run(to_model(graph), flag), run(parser.parse_model(MODEL), flag))


def test_a_plain_graph_and_the_model_it_came_from_are_not_changed() -> None:
    model = parser.parse_model(MODEL)
    model.opset_import.append(onnx.helper.make_opsetid("custom", 1))
    before = model.SerializeToString()
    graph = gs.import_onnx(model)  # noqa: TID251 - what users hand over
    graph.nodes[0].domain = "com.microsoft"
    graph.nodes[0].inputs[1].name = "renamed"

    as_graph(graph)

    assert model.SerializeToString() == before


def test_an_opset_that_was_set_after_the_import_counts() -> None:
    graph = plain()
    graph.opset = 21

    assert as_graph(graph).opset == 21


def test_a_graph_made_with_graphsurgeon_loads_in_onnxruntime() -> None:
    x, y = gs.Variable("x", np.float32, ["N", 4]), gs.Variable("y", np.float32, ["N", 4])
    graph = gs.Graph([gs.Node("Relu", inputs=[x], outputs=[y])], [x, gs.Variable("c", np.bool_, [])], [y], opset=21)

    made = to_model(as_graph(graph))

    assert made.ir_version == 10
    assert run(made, True).tolist() == [[1, 1, 1, 1]]


def holds(values: np.ndarray) -> Callable[[gs.Graph], None]:
    return lambda graph: setattr(graph.nodes[0].inputs[1], "values", values)


def shares_a_stored_tensor(graph: gs.Graph) -> None:
    stored = LazyValues(numpy_helper.from_array(np.ones(4, np.float32), "s"))
    graph.nodes[0].inputs = [gs.Constant("a", stored), gs.Constant("b", stored)]


def makes_a_tensor_twice(graph: gs.Graph) -> None:
    graph.nodes.append(gs.Node("Relu", inputs=[graph.inputs[0]], outputs=[gs.Variable("h")]))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (holds(np.zeros(4, ml_dtypes.int4)), "constant 'w' holds int4 values, which GraphSurgeon cannot export"),
        (holds(np.zeros(4, ml_dtypes.float8_e4m3fnuz)), "holds float8e4m3fnuz values"),
        (holds(np.array(["a", "b"])), "holds string values"),
        (holds(np.zeros(4, "datetime64[D]")), "constant 'w' cannot be stored"),
        (shares_a_stored_tensor, "constants 'a' and 'b' share one stored tensor"),
        (lambda graph: graph.nodes[0].attrs.update(odd=object()), "GraphSurgeon cannot export the graph 'g'"),
        (makes_a_tensor_twice, "declares the tensor 'h' twice"),
    ],
)
def test_what_graphsurgeon_would_change_or_cannot_export_is_refused(
    damage: Callable[[gs.Graph], None], message: str
) -> None:
    graph = plain()
    damage(graph)
    with pytest.raises(ModelError, match=message):
        as_graph(graph)
