from __future__ import annotations

from pathlib import Path

import onnx
import onnx_graphsurgeon as gs
import pytest
from onnx import ModelProto, helper, parser

from onnxq.errors import ModelError
from onnxq.graph import Graph, as_graph, load, read_model, to_model

HEADER = '<ir_version: 8, opset_import: ["" : 17]>'


def model(text: str) -> ModelProto:
    return parser.parse_model(f"{HEADER} {text}")


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def small() -> ModelProto:
    return model("g (float[4] x) => (float[4] y) <float[4] w = {1, 2, 3, 4}> { y = Add(x, w) }")


def test_everything_that_holds_a_model_becomes_a_graph(tmp_path) -> None:
    onnx.save(small(), tmp_path / "m.onnx")
    graph = load(tmp_path / "m.onnx")
    plain = gs.import_onnx(small())  # noqa: TID251 - what users hand over

    for given in (tmp_path / "m.onnx", str(tmp_path / "m.onnx"), small(), plain):
        assert [node.op for node in as_graph(given).nodes] == ["Add"]
    assert as_graph(graph) is graph
    with pytest.raises(TypeError, match="found int"):
        as_graph(3)


def test_a_graph_tells_what_the_model_said() -> None:
    graph = read_model(small())

    assert [(tensor.name, tensor.shape, tensor.dtype) for tensor in graph.inputs] == [("x", [4], "float32")]
    assert (graph.opset, graph.ir_version, graph.name) == (17, 8, "g")
    assert graph.nodes[0].inputs[1] is graph.initializers[0]
    assert graph.outputs[0].inputs == [graph.nodes[0]]


def test_bodies_read_the_tensors_around_them() -> None:
    graph = read_model(
        model(
            """g (float[4] x, bool c) => (float[4] y) <float[4] w = {1, 2, 3, 4}> {
            h = Relu(x)
            y = If (c) <then_branch = t () => (u) { u = Add(h, w) }, else_branch = e () => (v) { v = Neg(h) }>
            }"""
        )
    )
    then, otherwise = graph.nodes[1].bodies()

    assert (then.parent, otherwise.parent) == (graph, graph)
    assert then.nodes[0].inputs == [graph.nodes[0].outputs[0], graph.initializers[0]]
    assert graph.nodes[0].outputs[0].outputs == [then.nodes[0], otherwise.nodes[0]]
    assert then.opset == 17


def test_a_local_tensor_hides_an_outer_one_of_its_name() -> None:
    graph = read_model(
        model(
            """g (float[4] x, bool c) => (float[4] y) {
            h = Relu(x)
            y = If (c) <then_branch = t () => (u) { h = Neg(x) u = Abs(h) }, else_branch = e () => (v) { v = Neg(h) }>
            }"""
        )
    )
    then, otherwise = graph.nodes[1].bodies()

    assert then.nodes[1].inputs[0] is then.nodes[0].outputs[0]
    assert otherwise.nodes[0].inputs[0] is graph.nodes[0].outputs[0]


def test_nodes_in_any_order_are_put_in_order() -> None:
    graph = read_model(model("g (float[4] x) => (float[4] y) { y = Abs(b) b = Neg(a) a = Relu(x) }"))

    assert [node.op for node in graph.nodes] == ["Relu", "Neg", "Abs"]


def test_a_model_from_before_opsets_has_opset_1() -> None:
    old = small()
    old.ir_version = 2
    del old.opset_import[:]

    assert read_model(old).opset == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "g (float[4] x) => (float[4] y) { [adder] y = Add(x, lost) }",
            "Add node 'adder' reads the tensor 'lost', which nothing produces",
        ),
        (
            "g (float[4] x) => (float[4] y) { y = Add(x, lost) }",
            r"the Add node that makes \['y'\] reads the tensor 'lost'",
        ),
        ("g (float[4] x) => (float[4] lost) { y = Relu(x) }", "nothing produces 'lost', an output of graph 'g'"),
        (
            "g (float[4] x) => (float[4] y) { y = Relu(x) [again] y = Neg(x) }",
            "declares the tensor 'y' twice, the second time as an output of Neg node 'again'",
        ),
        ("g (float[4] x) => (float[4] x) { x = Relu(x) }", "declares the tensor 'x' twice"),
        (
            "g (float[4] x) => (float[4] y) <float[1] w = {1}> { w = Relu(x) y = Add(x, w) }",
            "declares the tensor 'w' twice",
        ),
        ("g (float[4] x, float[4] x) => (float[4] y) { y = Relu(x) }", "'x' twice, the second time as an input"),
        (
            "g (float[4] x) => (float[4] c) { [one] a = Add(x, b) [two] b = Relu(a) [three] c = Neg(b) }",
            "graph 'g' has a cycle through the nodes one -> two; it cannot be executed",
        ),
        (
            """g (bool c) => (float[4] y)
            { [if] y = If (c) <then_branch = t () => (u) { u = Neg(y) }, else_branch = e () => (v) { v = Abs(y) }> }""",
            "cycle through the nodes if;",
        ),
        (
            """g (bool c) => (float[4] y)
            { y = If (c) <then_branch = t () => (u) { [in] u = Neg(z) }, else_branch = e () => (z) { z = Abs(c) }> }""",
            "Neg node 'in' reads the tensor 'z'",
        ),
    ],
)
def test_a_graph_that_cannot_be_executed_is_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_model(model(text))


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


@pytest.mark.parametrize(("old", "new"), [(b"Add", b"\xff\xfe\xfd"), (b"\x01x", b"\x01\xff"), (b"\x01w", b"\x01\xff")])
def test_names_that_are_no_text_are_refused(old: bytes, new: bytes) -> None:
    broken = ModelProto.FromString(small().SerializeToString().replace(old, new))

    with pytest.raises(ModelError, match="not UTF-8"):
        read_model(broken)


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


def test_reading_does_work_in_proportion_to_the_model(monkeypatch) -> None:
    """Bodies look names up in the graphs around them, and must not copy what those declare."""
    lookups = {}
    for size in (50, 100, 200):
        body = "t () => (u) { u = Neg(x) }"
        nodes = [f"y{i} = If (c) <then_branch = {body}, else_branch = {body}>" for i in range(size)]
        text = f"g (float[4] x, bool c) => (float[4] y0) {{ {' '.join(nodes)} }}"
        lookups[size] = count_calls(monkeypatch, model(text))

    assert lookups[200] - lookups[100] < 2.1 * (lookups[100] - lookups[50])


def count_calls(monkeypatch, proto: ModelProto) -> int:
    import sys

    calls = 0

    def profile(frame, event, argument) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        read_model(proto)
    finally:
        sys.setprofile(None)
    return calls


def test_helper_made_models_need_no_special_care() -> None:
    node = helper.make_node("Relu", ["x"], ["y"])
    graph = helper.make_graph(
        [node], "g", [helper.make_tensor_value_info("x", 1, ["N"])], [helper.make_tensor_value_info("y", 1, ["N"])]
    )

    assert read_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])).opset == 21


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


def test_documentation_that_is_no_text_is_refused_in_one_line() -> None:
    source = small()
    source.graph.node[0].doc_string = "MARK" * 2000
    graph = read_model(ModelProto.FromString(source.SerializeToString().replace(b"MARK", b"MA\xff\n")))
    graph.nodes[0].name = "another"

    with pytest.raises(ModelError, match="not UTF-8, such as") as caught:
        to_model(graph)
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)
