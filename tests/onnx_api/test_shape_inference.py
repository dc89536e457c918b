"""Shape inference and inlining on weightless models."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser

from onnxq.errors import ModelError
from onnxq.ir import Graph, Variable, all_graphs, all_nodes, load, read_model, save, to_model
from onnxq.ir.type_inference import infer_types
from onnxq.onnx_api import infer_shapes, inline_functions, weightless_model
from onnxq.onnx_api.weightless import WeightlessModel
from onnxq.ops import OPERATORS

MODEL = """<ir_version: 8, opset_import: ["" : 17, "custom" : 1]>
g (float[N,3,8,8] x, bool c) => (float y)
<int64[2] target = {0, -1}, float[99] stale, float[7] told> {
  conv = Conv <pads = [1, 1, 1, 1]> (x, w)
  stale = Relu(conv)
  told = custom.Mystery(stale)
  after = Neg(told)
  flat = Reshape(stale, target)
  y = If (c) <
    then_branch = t () => (u) { inner = Transpose(flat) u = ReduceSum <keepdims = 0> (inner) },
    else_branch = e () => (v) { v = ReduceMax <keepdims = 0> (conv) }>
}"""


def graph_of(text: str = MODEL) -> Graph:
    model = parser.parse_model(text)
    if text is MODEL:
        model.graph.initializer.append(numpy_helper.from_array(np.zeros((4, 3, 3, 3), np.float32), "w"))
    return read_model(model)


def shapes(graph: Graph) -> dict[str, tuple[object, object]]:
    return {
        tensor.name: (tensor.dtype and np.dtype(tensor.dtype).name, tensor.shape)
        for scope in all_graphs(graph)
        for node in scope.nodes
        for tensor in node.outputs
    }


def test_shapes_are_found_in_all_scopes_and_stale_ones_replaced() -> None:
    graph = graph_of()

    infer_shapes(graph)

    assert shapes(graph) == {
        "conv": ("float32", ["N", 4, 8, 8]),
        "stale": ("float32", ["N", 4, 8, 8]),
        "told": ("float32", [7]),
        "after": ("float32", [7]),
        "flat": ("float32", ["N", 256]),
        "y": ("float32", []),
        "inner": ("float32", [256, "N"]),
        "u": ("float32", []),
        "v": ("float32", []),
    }


def test_what_was_found_is_declared_when_written() -> None:
    graph = graph_of()

    infer_shapes(graph)
    again = read_model(to_model(graph))

    assert shapes(again) == shapes(graph)
    assert "unk__" not in str(to_model(graph))


def test_what_cannot_be_found_stays_unknown() -> None:
    graph = graph_of(
        """<ir_version: 8, opset_import: ["" : 17, "custom" : 1]> g (float[4] x, int64[K] s) => (y)
        <float[5] r> { m = custom.Mystery(x) n = Neg(m) r = Reshape(x, s) y = Add(n, r) }"""
    )

    infer_shapes(graph)

    assert shapes(graph) == {
        "m": (None, None),
        "n": (None, None),
        "r": ("float32", None),
        "y": (None, None),
    }


def test_declared_outputs_are_completed_and_never_changed() -> None:
    graph = graph_of(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[N,4] x) => (float[batch,?] a, b, float[?,?,?] odd)
        { a = Relu(x) b = Relu(x) odd = Relu(x) }"""
    )

    infer_shapes(graph)

    assert shapes(graph) == {
        "a": ("float32", [None, 4]),
        "b": ("float32", ["N", 4]),
        "odd": ("float32", [None, None, None]),
    }
    assert [[size.dim_param for size in info.type.tensor_type.shape.dim] for info in to_model(graph).graph.output] == [
        ["batch", ""],
        ["N", ""],
        ["", "", ""],
    ]
    assert graph.inputs[0].shape == ["N", 4]


def test_negative_dimensions_count_as_unknown() -> None:
    model = parser.parse_model('<ir_version: 8, opset_import: ["" : 17]> g (float[4,4] x) => (y) { y = Relu(x) }')
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1
    graph = read_model(model)

    infer_shapes(graph)

    assert graph.outputs[0].shape == [None, 4]
    assert to_model(graph).graph.input[0] == model.graph.input[0], "the input stays as it was declared"


def test_weights_are_not_read(monkeypatch) -> None:
    graph = graph_of()
    weight = next(tensor for tensor in graph.initializers if tensor.name == "w")
    assert weight.nbytes < 1024
    weight.values = np.zeros((64, 3, 3, 3), np.float32)
    monkeypatch.setattr(type(weight.tensor_data), "chunks", None)

    infer_shapes(graph)

    with pytest.raises(TypeError, match="NoneType"):
        to_model(graph)
    assert shapes(graph)["conv"] == ("float32", ["N", 64, 8, 8])


@pytest.mark.parametrize("output", ["int64[4] y", "float[9,9] y"])
def test_a_wrong_output_declaration_does_not_stop_inference(output: str) -> None:
    graph = graph_of(
        f'<ir_version: 8, opset_import: ["" : 17]> g (float[4] x) => ({output}) {{ h = Relu(x) y = Neg(h) }}'
    )

    infer_shapes(graph)

    assert shapes(graph)["h"] == ("float32", [4])


def test_an_input_that_contradicts_its_initializer_is_refused() -> None:
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[4] x, float[2,2] w) => (y) <float[4] w = {1, 2, 3, 4}> { y = Add(x, w) }"""
    )

    with pytest.raises(
        ModelError, match=r"input 'w' is declared as float \[2, 2\], but its initializer is float \[4\]"
    ):
        infer_shapes(read_model(model))


def test_inference_that_gives_up_leaves_the_graph_as_it_was(monkeypatch) -> None:
    import onnx

    def give_up(*_: object, **__: object) -> None:
        raise onnx.shape_inference.InferenceError("no")

    monkeypatch.setattr("onnx.shape_inference.infer_shapes", give_up)
    graph = graph_of()
    before = shapes(graph)

    infer_shapes(graph)

    assert shapes(graph) == before


def test_nodes_that_were_appended_last_get_their_shapes() -> None:
    graph = graph_of()
    graph.nodes.reverse()

    infer_shapes(graph)

    assert shapes(graph)["flat"] == ("float32", ["N", 256])


def test_a_sequence_keeps_its_own_type() -> None:
    graph = graph_of(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[4] x) => (float[4] y) <int64 zero = {0}>
        { s = SequenceConstruct(x, x) y = SequenceAt(s, zero) }"""
    )

    infer_shapes(graph)

    assert shapes(graph)["s"] == (None, None)
    assert to_model(graph).graph.output[0] == helper.make_tensor_value_info("y", 1, [4])


def test_a_vector_that_doubles_again_and_again_needs_no_memory() -> None:
    doublings = " ".join(f"c{i + 1} = Concat<axis = 0>(c{i}, c{i})" for i in range(40))
    graph = read_model(
        parser.parse_model(
            f'<ir_version: 8, opset_import: ["" : 17]> main (float[2] x) => (float[n] y) '
            f"<int64[4] c0 = {{1, 2, 3, 4}}> {{ {doublings} s = Shape(c40) y = Expand(x, s) }}"
        )
    )
    infer_shapes(graph)
    assert graph.tensors()["c40"].shape == [4 << 40]


def test_initializers_that_a_caller_may_override_are_no_constants() -> None:
    graph = graph_of(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[6] x, int64[2] s, float[N,2] w) => (y, z)
        <int64[2] s = {2, 3}, float[1,2] w = {1, 2}> { y = Reshape(x, s) z = Relu(w) }"""
    )

    infer_shapes(graph)

    assert shapes(graph) == {"y": ("float32", [None, None]), "z": ("float32", [None, 2])}


@pytest.mark.parametrize(
    ("declared", "rows", "other"),
    [
        ("float[batch,2] x, float[batch,3] w", "batch", "batch"),
        ("float[?,2] x, float[?,3] w", None, None),
        ("float[None,2] x, float[None,3] w", None, None),
        ("float[unk__1,2] x, float[unk__1,3] w", None, None),
        ("float[n,n] x, float[n,3] w", None, "n"),
    ],
)
def test_equal_names_of_inputs_are_equal_dimensions_unless_they_are_placeholders(
    declared: str, rows: str | None, other: str | None
) -> None:
    made = f'<ir_version: 8, opset_import: ["" : 17]> g ({declared}) => (y, z) {{ y = Relu(x) z = Relu(w) }}'
    model = parser.parse_model(made.replace("?", "what"))
    for info in model.graph.input:
        for size in info.type.tensor_type.shape.dim:
            size.dim_param = {"what": "?"}.get(size.dim_param, size.dim_param)
    graph = read_model(model)

    infer_shapes(graph)

    found = shapes(graph)
    assert found["y"][1][0] == rows
    assert found["z"][1][0] == other
    again = to_model(graph)
    written = [size.dim_param for info in again.graph.input for size in info.type.tensor_type.shape.dim]
    assert [name for name in written if name] == (["n", "n", "n"] if other == "n" else ["batch"] * 2 if rows else [])


def test_names_of_outputs_of_inner_tensors_and_in_bodies_are_no_facts() -> None:
    graph = graph_of(
        """<ir_version: 8, opset_import: ["" : 17, "custom" : 1]>
        g (float[A,2] x, bool go, int64 n) => (float[A,2] kept, float[B,2] y) <float[A,2] odd> {
            odd = custom.Mystery(x) kept = Identity(odd) y = Neg(kept)
            last = Loop (n, go, x) <body = b (int64 i, bool c, float[A,2] s) => (bool d, float[A,2] t) {
                d = Identity(c) t = Concat<axis = 0>(s, s) }>
        }"""
    )

    infer_shapes(graph)

    found = shapes(graph)
    assert [found[name][1] for name in ("odd", "kept", "y", "t")] == [[None, 2]] * 4
    written = to_model(graph).graph
    assert [info.type.tensor_type.shape.dim[0].dim_param for info in written.output] == ["A", "B"]
    body = written.node[-1].attribute[0].g
    assert [info.type.tensor_type.shape.dim[0].dim_param for info in (body.input[2], body.output[1])] == ["", ""]


@pytest.mark.parametrize(
    ("first", "state"),
    [
        ("x", [None, 1]),  # may have another length than the body declares
        ("five", [5, 1]),
        ("two", [None, 1]),
    ],
)
def test_a_loop_that_starts_otherwise_than_its_body_declares_is_not_believed(first: str, state: list[object]) -> None:
    graph = graph_of(
        f"""<ir_version: 8, opset_import: ["" : 17]>
        g (float[A,1] x, float[5,1] five, bool go, int64 n) => (last, y) <float[2,1] two = {{0, 0}}> {{
            last, y = Loop (n, go, {first}) <body = b (int64 i, bool c, float[5,1] s) => (bool d, t, float[5,1] u) {{
                d = Identity(c) t = Identity(s) u = Neg(s) }}>
        }}"""
    )

    infer_shapes(graph)

    found = shapes(graph)
    assert [found[name][1] for name in ("t", "u", "y")] == [state, state, [None, *state]]


# What onnx's inference is shown in the place of operators that it does not know.

HEAD = '<ir_version: 8, opset_import: ["" : 16, "com.microsoft" : 1]>'


FED = "float[2,5,8] x, float[2,5,8] s, int32[2,5] i, float[8,24] w, float[99,8] t, float[8] g, float[2,3,5,4] q"


def found(body: str) -> dict[str, tuple[str, object]]:
    graph = read_model(parser.parse_model(f"{HEAD} g ({FED}) => (y) {{ {body} }}"))
    infer_shapes(graph)
    return {
        tensor.name: (np.dtype(tensor.dtype).name if tensor.dtype is not None else "", tensor.shape)
        for _, node in all_nodes(graph)
        for tensor in node.outputs
    }


@pytest.mark.parametrize(
    ("call", "dtype", "shape"),
    [
        ("FastGelu (x, g)", "float32", [2, 5, 8]),
        ("SkipLayerNormalization (x, s, g, g)", "float32", [2, 5, 8]),
        ("Attention <num_heads = 2> (x, w, g)", "float32", None),
        ("FusedMatMul <alpha = 0.5> (x, w)", "float32", [2, 5, 24]),
        ("FusedMatMul <transB = 1> (q, q)", "float32", None),
        ('FusedGemm <activation = "Relu", transA = 0> (t, w)', "float32", [99, 24]),
        ("EmbedLayerNormalization (i, i, t, t, t, g, g)", "float32", [2, 5, 8]),
        ('FusedConv <activation = "Relu", kernel_shape = [3, 3]> (q, q)', "float32", None),
        ("MultiHeadAttention <num_heads = 2> (x, x, x)", "float32", None),
        ("Mystery (x)", "", None),
    ],
)
def test_types_behind_foreign_operators_are_known(call: str, dtype: str, shape: object) -> None:
    known = found(f"a = com.microsoft.{call} y = Relu (a)")
    assert known["y"][0] == dtype
    assert call.startswith("FusedConv") or known["y"][1] == shape


def test_other_outputs_have_types_too() -> None:
    known = found("a, , , b = com.microsoft.SkipLayerNormalization (x, s, g, g) y = Add (a, b)")
    assert known["b"] == known["y"] == ("float32", [2, 5, 8])
    assert "" not in known or known[""] == ("", None)


def test_an_operator_of_a_later_opset_has_a_type_as_well() -> None:
    assert found("a = LayerNormalization (x, g) y = Relu (a)")["y"] == ("float32", [2, 5, 8])


def test_bodies_have_stand_ins_and_the_nodes_of_the_graph_stay() -> None:
    text = """c = Cast <to = 9> (g) y = If (c) <
      then_branch = t () => (float[2,5,8] u) { a = com.microsoft.QuickGelu (x) u = Relu (a) },
      else_branch = e () => (float[2,5,8] v) { b = com.microsoft.Attention <num_heads = 2> (x, w, g) v = Relu (b) }>"""
    known = found(text)
    assert (known["a"], known["b"]) == (("float32", [2, 5, 8]), ("float32", None))


def test_a_damaged_node_says_nothing() -> None:
    assert found("a = com.microsoft.RotaryEmbedding () y = Relu (a)")["y"] == ("", None)
    assert found("a = com.microsoft.FusedMatMul (x) y = Relu (a)")["y"][0] in ("", "float32")


def test_a_model_that_imports_no_opset_of_onnx_is_left_as_it_is() -> None:
    text = '<ir_version: 8, opset_import: ["com.microsoft" : 1]> g (float[2,8] x, float[8,4] w) => (float[2,4] y)'
    graph = read_model(parser.parse_model(text + " { y = com.microsoft.FusedMatMul (x, w) }"))
    infer_shapes(graph)
    assert graph.outputs[0].shape == [2, 4]


def test_every_row_of_another_domain_says_what_type_it_gives() -> None:
    assert all(row.types for (domain, _), row in OPERATORS.items() if domain)
    assert all(len(row.shapes) <= len(row.types) for row in OPERATORS.values())


def test_what_is_declared_counts_where_onnx_knows_an_operator_but_not_what_it_makes() -> None:
    text = """<ir_version: 8, opset_import: ["" : 16, "ai.onnx.ml" : 3]> g (float[2,4] x) => (y) <float[2,4] a> {
        a = ai.onnx.ml.Scaler <offset = [1.0], scale = [2.0]> (x)  y = Relu (a) }"""
    graph = read_model(parser.parse_model(text))
    infer_shapes(graph)
    assert (graph.outputs[0].dtype, graph.outputs[0].shape) == (np.float32, [2, 4])


@pytest.mark.parametrize(
    ("opset", "body", "shape"),
    [
        (10, "y = Slice (x, zero, one, zero)", [None, 5]),
        (10, "y = Slice (x, zero, one, one)", ["A", 1]),
        (11, "y = Slice (x, zero, one, zero)", [None, 5]),
        (10, "y = Squeeze <axes = [-1]> (u)", ["A", 5]),
        (10, "y = Unsqueeze <axes = [-1]> (x)", ["A", 5, 1]),
        (13, 'y = Einsum <equation = "ij,ij->ij"> (u2, x)', ["A", 5]),
        (13, 'y = Einsum <equation = "ij,ij->ij"> (x, z)', [None, 5]),
        (13, 'y = Einsum <equation = "ij,kj->ki"> (x, z)', ["B", "A"]),
        (13, 'y = Einsum <equation = "ij,kj"> (x, z)', ["A", "B"]),
        (13, 'y = Einsum <equation = "...j,...j->...j"> (u2, x)', None),
        (13, 'y = Einsum <equation = "ij->ji"> (x)', [5, "A"]),
        (
            10,
            "y = If (c) <then_branch = t () => (p) { p = Neg (x) }, else_branch = e () => (q) { q = Neg (z) }>",
            None,
        ),
        (
            11,
            "y = If (c) <then_branch = t () => (p) { p = Neg (x) }, else_branch = e () => (q) { q = Neg (z) }>",
            [None, 5],
        ),
        (
            10,
            """l = com.microsoft.FastGelu (x) y = If (c) <then_branch = t () => (p) {
                k = Slice (x, zero, one, zero) p = Neg (k) }, else_branch = e () => (q) { q = Neg (l) }>""",
            None,
        ),
    ],
)
def test_what_onnx_infers_wrongly_is_not_believed(opset: int, body: str, shape: object) -> None:
    graph = read_model(
        parser.parse_model(
            f"""<ir_version: 8, opset_import: ["" : {opset}, "com.microsoft" : 1]>
            g (float[A,5] x, float[B,5] z, float[A,5,1] u, float[1,5] u2, bool c) => (y)
            <int64[1] zero = {{0}}, int64[1] one = {{1}}> {{ {body} }}"""
        )
    )
    infer_shapes(graph)
    found = {tensor.name: tensor.shape for _, node in all_nodes(graph) for tensor in node.outputs}
    assert found["y"] == shape
    assert found.get("k", [None])[0] is None
    for _, node in all_nodes(graph):
        if node.outputs[0].name == "y":
            alone = node.copy(node.inputs, [Variable(tensor.name) for tensor in node.outputs])
            infer_types(alone, graph.opset_imports)
            assert alone.outputs[0].shape in (shape, None)


HEAD_OF_FUNCTIONS = (
    """<ir_version: 9, opset_import: ["" : 17, "mine" : 1]> main (float[2] x) => (float[2] y) { y = mine.f0(x) }"""
)


def model_of(*bodies: str) -> ModelProto:
    """Return a model that calls f0, where body number n is that of the function fn."""
    functions = (
        f'<domain: "mine", opset_import: ["" : 17, "mine" : 1]> f{index} (a) => (b) {{ {body} }}'
        for index, body in enumerate(bodies)
    )
    return parser.parse_model(HEAD_OF_FUNCTIONS + " ".join(functions))


def inlined_ops(model: ModelProto) -> list[str]:
    return [node.op for node in inline_functions(read_model(model)).nodes]


@pytest.mark.parametrize(
    "bodies",
    [("b = mine.f0(a)",), ("b = mine.f1(a)", "b = mine.f2(a)", "b = mine.f1(a)")],
    ids=["itself", "through another"],
)
def test_a_function_that_calls_itself_is_refused(bodies: tuple[str, ...]) -> None:
    with pytest.raises(ModelError, match=r"^function 'f[012]' of the model calls itself; the model is damaged$"):
        inlined_ops(model_of(*bodies))


def test_a_call_from_a_body_of_control_flow_counts() -> None:
    branch = "() => (float[2] c) { c = mine.f0(a) }"
    looped = f"t = Constant<value = bool {{1}}>() b = If (t) <then_branch = g {branch}, else_branch = h {branch}>"
    with pytest.raises(ModelError, match="calls itself"):
        inlined_ops(model_of(looped))


def test_functions_that_multiply_one_another_are_refused_before_anything_is_inlined() -> None:
    ten = " ".join(f"c{i + 1} = mine.f{{}}(c{i})" for i in range(10))
    bodies = [f"c0 = Identity(a) {ten.format(*[level + 1] * 10)} b = Identity(c10)" for level in range(12)]
    with pytest.raises(ModelError, match=r"has 1\.\d+e\+12 nodes once its functions are inlined, expected at most"):
        inlined_ops(model_of(*bodies, "b = Relu(a)"))


def test_a_long_chain_of_functions_is_inlined() -> None:
    length = 200
    assert inlined_ops(model_of(*(f"b = mine.f{i + 1}(a)" for i in range(length)), "b = Relu(a)")) == ["Relu"]


def test_two_functions_of_one_name_are_refused() -> None:
    model = model_of("b = Relu(a)")
    model.functions.append(
        helper.make_function("mine", "f0", ["a"], ["b"], [helper.make_node("Neg", ["a"], ["b"])], model.opset_import)
    )
    with pytest.raises(ModelError, match="two functions named 'f0'"):
        inlined_ops(model)


LARGE = np.arange(1024, dtype=np.float32)


def graph() -> Graph:
    model = parser.parse_model('<ir_version: 8, opset_import: ["" : 17]> g (float[4] x) => (y) { y = Sum(x, w, s) }')
    model.graph.initializer.append(numpy_helper.from_array(LARGE, "w"))
    model.graph.initializer[0].doc_string = "doc"
    model.graph.initializer.append(numpy_helper.from_array(np.float32(1), "s"))
    model.graph.initializer.append(helper.make_tensor("names", TensorProto.STRING, [300], [b"long text"] * 300))
    return read_model(model)


def test_large_weights_are_references_and_small_ones_stay() -> None:
    large, small, names = weightless_model(graph()).graph.initializer

    assert large.data_location == TensorProto.EXTERNAL
    assert (list(large.dims), large.doc_string, large.raw_data) == ([1024], "doc", b"")
    assert small.raw_data == np.float32(1).tobytes()
    assert len(names.string_data) == 300


def test_the_threshold_is_in_bytes() -> None:
    def count(threshold: int) -> int:
        stored = weightless_model(graph(), threshold).graph.initializer
        return sum(tensor.data_location == TensorProto.EXTERNAL for tensor in stored)

    assert (count(4097), count(4096), count(5), count(4), count(0)) == (0, 1, 1, 2, 2)


def test_a_skeleton_of_external_weights_does_not_read_them(tmp_path, monkeypatch) -> None:
    save(graph(), tmp_path / "m.onnx", external_data=True)
    read = load(tmp_path / "m.onnx")
    monkeypatch.setattr(np, "memmap", None)

    assert len(weightless_model(read).SerializeToString()) < 5000


def test_restoring_puts_every_weight_back() -> None:
    original = graph()

    for threshold in (0, 1024, 10**6):
        assert to_model(WeightlessModel.of(original, threshold).restore()) == to_model(original)
