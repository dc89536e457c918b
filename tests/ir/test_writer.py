"""Where models can be written, and what is left where they cannot."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, numpy_helper, parser

from ir.written_models import WEIGHTS, assert_weights, external_model, files, model, whole
from onnxq.errors import ModelError, OutputError
from onnxq.ir import (
    Graph,
    Node,
    Variable,
    constant,
    load,
    place_constants,
    read_model,
    save,
    to_model,
)
from onnxq.ir.external_data import ALIGNMENT
from onnxq.ir.graph import Constant
from onnxq.ir.serialize import attribute_constants, constants_read


def test_weights_go_beside_the_model_when_asked(tmp_path) -> None:
    path = external_model(tmp_path)
    stored = onnx.load(path, load_external_data=False)
    large = [tensor for tensor in stored.graph.initializer if tensor.data_location == TensorProto.EXTERNAL]
    entries = [{entry.key: entry.value for entry in tensor.external_data} for tensor in large]

    assert files(tmp_path) == ["m.onnx", "m.onnx.data"]
    assert [tensor.name for tensor in large] == ["u", "v", "w"], "the bias is too small to move"
    assert {entry["location"] for entry in entries} == {"m.onnx.data"}
    assert [int(entry["offset"]) % ALIGNMENT for entry in entries] == [0, 0, 0]
    assert whole(path) == model()
    onnx.checker.check_model(path)


@pytest.mark.parametrize(
    ("external", "expected"), [(None, ["n.onnx", "n.onnx.data"]), (False, ["n.onnx"])], ids=["as it was", "taken in"]
)
def test_a_model_with_external_data_is_written_with_it_or_without(
    tmp_path, external: bool | None, expected: list[str]
) -> None:
    (tmp_path / "out").mkdir()
    save(load(external_model(tmp_path)), tmp_path / "out" / "n.onnx", external_data=external)
    assert files(tmp_path / "out") == expected
    assert_weights(tmp_path / "out" / "n.onnx")


def test_a_graph_is_saved_over_the_files_it_was_read_from_and_stays_usable(tmp_path) -> None:
    path = external_model(tmp_path)
    before = (tmp_path / "m.onnx.data").read_bytes()
    graph = load(path)
    first = graph.initializers[0]
    first.values = first.values + 1
    mapped = graph.initializers[1].values

    save(graph, path)

    assert (tmp_path / "m.onnx.data").read_bytes() != before
    np.testing.assert_array_equal(mapped, WEIGHTS["v"], "arrays that were handed out keep their values")
    for graph_now in (graph, load(path)):
        values = {tensor.name: tensor.values for tensor in graph_now.initializers}
        np.testing.assert_array_equal(values["u"], WEIGHTS["u"] + 1)
        np.testing.assert_array_equal(values["v"], WEIGHTS["v"])
    save(graph, path)
    assert files(tmp_path) == ["m.onnx", "m.onnx.data"]


def test_another_graph_of_replaced_files_refuses_to_read_them(tmp_path) -> None:
    path = external_model(tmp_path)
    graph, other = load(path), load(path)
    graph.initializers[0].values = np.zeros((80, 40), np.float32)
    save(graph, path)

    with pytest.raises(ModelError, match="changed after the model was read"):
        _ = other.initializers[1].values


def test_small_tensors_of_a_replaced_data_file_are_kept(tmp_path) -> None:
    onnx.save(model(), tmp_path / "m.onnx", save_as_external_data=True, location="m.onnx.data", size_threshold=0)
    graph = load(tmp_path / "m.onnx")

    save(graph, tmp_path / "m.onnx")

    np.testing.assert_array_equal(graph.initializers[3].values, np.ones(40))
    assert_weights(tmp_path / "m.onnx")


@pytest.mark.parametrize("error", [None, "EXDEV", "ENOSYS", "EINVAL", "no such call"])
def test_data_is_copied_with_and_without_the_help_of_the_kernel(tmp_path, monkeypatch, error: str | None) -> None:
    path = external_model(tmp_path)
    real, calls = os.copy_file_range, []

    def copy_a_little(source: int, target: int, count: int, *offsets: int) -> int:
        calls.append(count)
        if error is not None and len(calls) % 2 == 0:
            raise OSError(getattr(errno, error), "not here")
        return real(source, target, min(count, 1000), *offsets)

    if error == "no such call":
        monkeypatch.delattr(os, "copy_file_range")
    else:
        monkeypatch.setattr(os, "copy_file_range", copy_a_little)
    monkeypatch.setattr("onnxq.ir.writer.CHUNK_BYTES", 999)
    save(load(path), tmp_path / "n.onnx")
    assert bool(calls) == (error != "no such call")
    assert_weights(tmp_path / "n.onnx")


def test_a_weight_used_under_two_names_is_stored_once(tmp_path) -> None:
    graph = read_model(model())
    twin = Constant("twin", graph.initializers[0].tensor_data)
    graph.nodes[1].inputs[1] = twin

    save(graph, tmp_path / "m.onnx", external_data=True)

    offsets = {
        tensor.name: tensor.external_data[1].value
        for tensor in onnx.load(tmp_path / "m.onnx", load_external_data=False).graph.initializer
        if tensor.external_data
    }
    assert offsets["u"] == offsets["twin"] != offsets["w"]


def test_tensors_in_attributes_are_written_beside_the_model_and_run(tmp_path) -> None:
    import onnxruntime

    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[400] x) => (float[400] y) { y = Add(x, k) }'
    source = parser.parse_model(text)
    node = onnx.helper.make_node("Constant", [], ["k"], value=numpy_helper.from_array(np.arange(400, dtype=np.float32)))
    source.graph.node.insert(0, node)

    save(read_model(source), tmp_path / "m.onnx", external_data=True)

    assert whole(tmp_path / "m.onnx") == source
    (result,) = onnxruntime.InferenceSession(tmp_path / "m.onnx").run(None, {"x": np.ones(400, np.float32)})
    assert result.tolist() == list(range(1, 401))


def test_nothing_to_move_leaves_no_data_file(tmp_path) -> None:
    text = (
        '<ir_version: 8, opset_import: ["" : 17]> g (float[1] x) => (float[1] y) <float[1] w = {1}> { y = Add(x, w) }'
    )

    save(read_model(parser.parse_model(text)), tmp_path / "m.onnx", external_data=True)

    assert files(tmp_path) == ["m.onnx"]


def test_a_model_beyond_2_gib_must_go_to_files(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("onnxq.ir.writer._LARGEST_MODEL", 10_000)

    with pytest.raises(ModelError, match="exceeds the 2 GiB that ONNX allows in one piece; write it with save"):
        to_model(read_model(model()))
    with pytest.raises(ModelError, match="exceeds the 2 GiB of one ONNX file; save it with external data"):
        save(read_model(model()), tmp_path / "m.onnx", external_data=False)


def test_a_large_model_gets_external_data_by_itself(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("onnxq.ir.writer.LARGEST_INLINE", 10_000)

    save(read_model(model()), tmp_path / "m.onnx")

    assert files(tmp_path) == ["m.onnx", "m.onnx.data"]


def test_memory_stays_far_below_the_size_of_the_weights(tmp_path) -> None:
    """Loads and saves 256 MiB of weights in a fresh process; the process itself takes 60 MiB or so."""
    weights = ", ".join(f"w{index}" for index in range(16))
    source = parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17]>
        g (float[2048,2048] x) => (float[2048,2048] y) {{ y = Sum(x, {weights}) }}"""
    )
    with (tmp_path / "w.bin").open("wb") as file:
        file.truncate(256 << 20)
    for index in range(16):
        tensor = source.graph.initializer.add(name=f"w{index}", data_type=1, dims=[2048, 2048], data_location=1)
        for key, value in (("location", "w.bin"), ("offset", str(index << 24)), ("length", str(1 << 24))):
            tensor.external_data.add(key=key, value=value)
    (tmp_path / "m.onnx").write_bytes(source.SerializeToString())
    script = f"""
    import resource
    from onnxq.ir import load, save
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    graph = load({str(tmp_path / "m.onnx")!r})
    assert not any(tensor.values.any() for tensor in graph.initializers)
    save(graph, {str(tmp_path / "n.onnx")!r})
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """

    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)

    unit = 1 if sys.platform == "darwin" else 1024
    assert int(done.stdout) * unit < 100 << 20


def test_an_overridable_initializer_stays_an_input_that_nothing_reads() -> None:
    source = model()
    source.graph.input.append(onnx.helper.make_tensor_value_info("u", 1, [40, 40]))
    graph = read_model(source)
    graph.nodes[0].inputs[1] = constant("codes", np.ones((40, 40), np.float32))

    written = to_model(graph).graph

    assert [info.name for info in written.input] == ["x", "c", "u"]
    assert sorted(tensor.name for tensor in written.initializer) == ["bias", "codes", "u", "v", "w"]


def test_inputs_are_written_in_the_order_of_the_graph() -> None:
    source = model()
    source.graph.input.insert(1, onnx.helper.make_tensor_value_info("u", 1, [40, 40]))
    graph = read_model(source)

    graph.inputs.append(Variable("z", np.float32, [1]))
    assert [info.name for info in to_model(graph).graph.input] == ["x", "u", "c", "z"]
    graph.inputs = [graph.inputs[2], graph.inputs[1], graph.inputs[0]]
    assert [info.name for info in to_model(graph).graph.input] == ["z", "c", "x", "u"]


def test_nodes_are_written_in_order_of_execution_whatever_the_list_says() -> None:
    graph = read_model(model())
    graph.nodes.reverse()

    assert to_model(graph) == model()
    assert [node.op for node in graph.nodes] == ["If", "MatMul", "MatMul"], "writing does not change the graph"


def test_a_graph_made_from_nothing_is_a_valid_model_for_onnxruntime() -> None:
    import onnxruntime

    x, y = Variable("x", np.float32, ["N"]), Variable("y", np.float32, ["N"])
    graph = Graph([Node("Mul", "m", inputs=[x, constant("two", np.float32(2))], outputs=[y])], [x], [y], opset=17)

    made = to_model(graph)

    onnx.checker.check_model(made, full_check=True)
    assert made.ir_version == 7
    (result,) = onnxruntime.InferenceSession(made.SerializeToString()).run(None, {"x": np.ones(2, np.float32)})
    assert result.tolist() == [2, 2]


# Where models can be written, and what is left where they cannot.


@pytest.mark.parametrize("before", [None, b"x" * 10**6], ids=["a new file", "an existing file"])
def test_a_small_model_is_one_file_and_replaces_another_whole(tmp_path, before: bytes | None) -> None:
    if before is not None:
        (tmp_path / "m.onnx").write_bytes(before)
    save(read_model(model()), tmp_path / "m.onnx")
    assert files(tmp_path) == ["m.onnx"]
    assert onnx.load(tmp_path / "m.onnx") == model()


def test_new_files_have_the_usual_permissions(tmp_path) -> None:
    (tmp_path / "plain").touch()

    path = external_model(tmp_path)

    for name in (path, tmp_path / "m.onnx.data"):
        assert name.stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("lost/m.onnx", "the folder .*lost does not exist; create it first"),
        ("file/m.onnx", "the folder .*file does not exist"),
        ("folder", "it is a folder; give the name of a file in it"),
    ],
)
def test_a_place_that_cannot_be_written_is_named(tmp_path, target: str, message: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()

    with pytest.raises(OutputError, match=message):
        save(read_model(model()), tmp_path / target)
    assert files(tmp_path) == ["file", "folder"]


def test_a_folder_without_permission_is_refused(tmp_path, monkeypatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "write_bytes", refuse)

    with pytest.raises(OutputError, match=r"cannot write .*m\.onnx: Permission denied"):
        save(read_model(model()), tmp_path / "m.onnx")


@pytest.mark.parametrize("external", [True, False])
def test_a_full_disk_leaves_the_old_files_and_nothing_else(tmp_path, external: bool) -> None:
    path = external_model(tmp_path)
    before = {name: (tmp_path / name).read_bytes() for name in files(tmp_path)}
    script = f"""
    import resource
    from onnxq.errors import OutputError
    from onnxq.ir import load, save
    graph = load({str(path)!r})
    resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))
    try:
        save(graph, {str(path)!r}, external_data={external})
    except OutputError as error:
        print(error)
    """

    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)

    assert "File too large" in done.stdout
    assert {name: (tmp_path / name).read_bytes() for name in files(tmp_path)} == before


# Graphs that cannot be written are refused in a sentence.


def two_of_one_name(graph: Graph) -> None:
    graph.nodes[0].inputs[1] = constant("v", np.ones((40, 40), np.float32))


def makes_a_taken_name(graph: Graph) -> None:
    graph.nodes.append(Node("Relu", "again", inputs=[graph.inputs[0]], outputs=[Variable("a")]))


def reads_what_nothing_makes(graph: Graph) -> None:
    graph.nodes[0].inputs[0] = Variable("lost")


def reads_across_branches(graph: Graph) -> None:
    then, otherwise = graph.nodes[2].subgraphs()
    otherwise.nodes[0].inputs[1] = then.nodes[0].outputs[0]


def hides_a_tensor(graph: Graph) -> None:
    then, _ = graph.nodes[2].subgraphs()
    then.nodes.insert(0, Node("Neg", "hides", inputs=[graph.inputs[0]], outputs=[Variable("b")]))


def returns_what_nothing_makes(graph: Graph) -> None:
    graph.outputs.append(Variable("lost"))


def holds_an_object(graph: Graph) -> None:
    graph.nodes[0].attrs["odd"] = object()


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (two_of_one_name, r"graph 'g' has two tensors named 'v'; take new names from Names\.unique"),
        (makes_a_taken_name, "Relu node 'again' makes 'a', but graph 'g' has a tensor of that name"),
        (reads_what_nothing_makes, "MatMul node 'first' reads the tensor 'lost', which nothing produces"),
        (reads_across_branches, "reads the tensor 'p', which nothing produces where it could see it"),
        (hides_a_tensor, "reads a tensor 'b', but another tensor of that name hides it"),
        (returns_what_nothing_makes, "the output list of graph 'g' reads the tensor 'lost'"),
        (holds_an_object, "MatMul node 'first' has the attribute 'odd' with the value <object"),
    ],
)
def test_a_damaged_graph_is_refused(damage: Callable[[Graph], None], sentence: str) -> None:
    graph = read_model(model())
    graph.nodes[0].name = "first"
    damage(graph)
    with pytest.raises(ModelError, match=sentence):
        to_model(graph)


def test_documentation_that_is_no_text_is_refused_in_one_line() -> None:
    source = model()
    source.graph.node[0].doc_string = "MARK" * 2000
    graph = read_model(ModelProto.FromString(source.SerializeToString().replace(b"MARK", b"MA\xff\n")))
    graph.nodes[0].name = "another"
    with pytest.raises(ModelError, match="not UTF-8, such as") as caught:
        to_model(graph)
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)


# Where constants are declared.

MODEL = """<ir_version: 8, opset_import: ["" : 17]> g (float[4] x, bool c) => (float[4] y)
<float[4] w = {1, 2, 3, 4}, float[4] v = {5, 6, 7, 8}, float[4] spare = {0, 0, 0, 0}> {
  h = Mul(x, w)
  y = If (c) <then_branch = t () => (p) { p = Add(h, v) }, else_branch = e () => (q) { q = Sub(h, v) }>
}"""


def graph() -> Graph:
    return read_model(parser.parse_model(MODEL))


def branches(graph: Graph) -> list[Graph]:
    return graph.nodes[1].subgraphs()


def declared(graph: Graph) -> dict[str, list[str]]:
    """Names by graph, which are those of the written model too."""
    found = {scope.name: [tensor.name for tensor in tensors] for scope, tensors in place_constants(graph).items()}
    written = to_model(graph).graph
    for proto in (written, *(attribute.g for attribute in written.node[1].attribute)):
        assert sorted(tensor.name for tensor in proto.initializer) == sorted(found[proto.name])
    return found


def used_alone(main: Graph) -> None:
    branches(main)[0].nodes[0].inputs[1] = constant("alone", np.float32(1))


def shared_by_branches(main: Graph) -> None:
    shared = constant("shared", np.float32(2))
    for branch in branches(main):
        branch.nodes[0].inputs[1] = shared


def moved_outwards(main: Graph) -> None:
    then, _ = branches(main)
    inner = constant("inner", np.ones(4, np.float32))
    then.initializers.append(inner)
    then.nodes[0].inputs[1] = main.nodes[0].inputs[1] = inner


def lost_its_last_use(main: Graph) -> None:
    main.nodes[0].inputs[1] = main.initializers[1]


@pytest.mark.parametrize(
    ("edit", "outside", "inside"),
    [
        (lambda main: None, ["w", "v", "spare"], []),
        (used_alone, ["w", "v", "spare"], ["alone"]),
        (shared_by_branches, ["w", "spare", "shared"], []),
        (moved_outwards, ["v", "spare", "inner"], []),
        (lost_its_last_use, ["v", "spare"], []),
    ],
    ids=["as it was read", "used alone", "shared by branches", "moved outwards", "lost its last use"],
)
def test_a_constant_is_declared_where_all_its_users_see_it(
    edit: Callable[[Graph], None], outside: list[str], inside: list[str]
) -> None:
    main = graph()
    edit(main)
    assert declared(main) == {"g": outside, "t": inside, "e": []}


def test_what_a_graph_returns_is_read_and_what_attributes_hold_is_not() -> None:
    main = graph()
    held = constant("held", np.float32(1))
    main.nodes[0].attrs["value"] = held
    main.outputs.append(main.initializers[2])

    assert [tensor.name for tensor in constants_read(main)] == ["w", "spare"]
    assert list(attribute_constants(main)) == [held]


@pytest.mark.parametrize("linked", [True, False], ids=["one file system", "another file system"])
def test_linked_models_leave_values_in_their_data_files_or_copy_them(tmp_path, monkeypatch, linked: bool) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "another file system")

    source, folder = external_model(tmp_path / "source"), tmp_path / "folder"
    folder.mkdir()
    if not linked:
        monkeypatch.setattr("os.link", refuse)
    graph = load(source)
    # Twice over the same file, as when a later opset is needed.
    for _ in range(2):
        save(graph, folder / "n.onnx", external_data=True, linked=True)
    [data] = folder.glob("*.data")
    assert data.samefile(source.with_name("m.onnx.data")) is linked
    assert_weights(folder / "n.onnx")
    data.unlink()
    assert_weights(source)
