from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from onnx import numpy_helper, parser
from onnx_graphsurgeon.ir.tensor import LazyValues
from plain_graphs import MODEL, plain, run

from onnxq.errors import ModelError
from onnxq.ir import Graph, from_graphsurgeon, to_model


def test_a_plain_graph_becomes_ours_and_computes_the_same() -> None:
    graph = from_graphsurgeon(plain())

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

    from_graphsurgeon(graph)

    assert model.SerializeToString() == before


def test_an_opset_that_was_set_after_the_import_counts() -> None:
    graph = plain()
    graph.opset = 21

    assert from_graphsurgeon(graph).opset == 21


def test_a_graph_made_with_graphsurgeon_loads_in_onnxruntime() -> None:
    x, y = gs.Variable("x", np.float32, ["N", 4]), gs.Variable("y", np.float32, ["N", 4])
    graph = gs.Graph([gs.Node("Relu", inputs=[x], outputs=[y])], [x, gs.Variable("c", np.bool_, [])], [y], opset=21)

    made = to_model(from_graphsurgeon(graph))

    assert made.ir_version == 10
    assert run(made, True).tolist() == [[1, 1, 1, 1]]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.zeros(4, ml_dtypes.int4), "constant 'w' holds int4 values, which GraphSurgeon cannot export"),
        (np.zeros(4, ml_dtypes.float8_e4m3fnuz), "holds float8e4m3fnuz values"),
        (np.array(["a", "b"]), "holds string values"),
        (np.zeros(4, "datetime64[D]"), "constant 'w' cannot be stored"),
    ],
)
def test_constants_that_graphsurgeon_would_change_are_refused(values: np.ndarray, message: str) -> None:
    graph = plain()
    graph.nodes[0].inputs[1].values = values

    with pytest.raises(ModelError, match=message):
        from_graphsurgeon(graph)


def test_constants_that_share_one_stored_tensor_are_refused() -> None:
    graph = plain()
    stored = LazyValues(numpy_helper.from_array(np.ones(4, np.float32), "s"))
    graph.nodes[0].inputs = [gs.Constant("a", stored), gs.Constant("b", stored)]

    with pytest.raises(ModelError, match="constants 'a' and 'b' share one stored tensor"):
        from_graphsurgeon(graph)


def test_a_graph_that_graphsurgeon_cannot_export_is_refused_in_our_words() -> None:
    graph = plain()
    graph.nodes[0].attrs["odd"] = object()

    with pytest.raises(ModelError, match="GraphSurgeon cannot export the graph 'g'"):
        from_graphsurgeon(graph)


def test_a_plain_graph_with_two_tensors_of_one_name_is_refused() -> None:
    graph = plain()
    graph.nodes.append(gs.Node("Relu", inputs=[graph.inputs[0]], outputs=[gs.Variable("h")]))

    with pytest.raises(ModelError, match="declares the tensor 'h' twice"):
        from_graphsurgeon(graph)
