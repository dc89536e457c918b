"""What the graph layer relies on inside GraphSurgeon; where one of these fails, a new version needs a look."""

from __future__ import annotations

import inspect

import numpy as np
import onnx_graphsurgeon as gs
from onnx import numpy_helper
from onnx_graphsurgeon.ir import graph as gs_graph
from onnx_graphsurgeon.ir import tensor as gs_tensor
from onnx_graphsurgeon.util.exception import OnnxGraphSurgeonException
from onnx_graphsurgeon.util.misc import SynchronizedList

from onnxq.ir import ArrayData, Constant, Graph, Node, Variable, constant
from onnxq.ir.graph import Graph as OurGraph


def test_nodes_and_tensors_keep_each_other_in_lists_that_synchronize() -> None:
    x, y = gs.Variable("x"), gs.Variable("y")
    node = gs.Node("Relu", inputs=[x], outputs=[y])

    for owner, names in ((node, ("inputs", "outputs")), (x, ("inputs", "outputs"))):
        for name in names:
            assert isinstance(getattr(owner, name), SynchronizedList)
    assert (x.outputs[0], y.inputs[0]) == (node, node)


def test_the_methods_of_list_itself_do_not_synchronize() -> None:
    x, node = Variable("x"), Node("Relu")

    list.append(node.inputs, x)
    assert x.outputs == []
    list.__setitem__(node.inputs, slice(None), [])
    list.clear(node.inputs)
    assert node.inputs == []


def test_a_synchronized_list_calls_the_two_hooks_that_ours_overrides() -> None:
    for name in ("_add_to_elem", "_remove_from_elem"):
        assert list(inspect.signature(getattr(SynchronizedList, name)).parameters) == ["self", "elem"]

    class Recorder(SynchronizedList):
        def _add_to_elem(self, elem: object) -> None:
            seen.append(("add", elem))

        def _remove_from_elem(self, elem: object) -> None:
            seen.append(("remove", elem))

    seen: list[tuple[str, object]] = []
    items = Recorder(None, "field", [1])
    items.append(2)
    items.extend([3])
    items.insert(0, 4)
    items.remove(4)
    items.pop()
    items += [5]
    items.clear()
    assert seen == [("add", n) for n in (1, 2, 3, 4)] + [("remove", 4), ("remove", 3), ("add", 5)] + [
        ("remove", n) for n in (1, 2, 5)
    ]


def test_a_constant_keeps_its_values_where_we_put_them() -> None:
    stock = gs.Constant("c", np.zeros(1, np.float32))

    assert {"_values", "_export_dtype", "data_location", "name", "inputs", "outputs"} == set(vars(stock))
    assert {"name", "inputs", "outputs", "dtype", "shape", "type"} == set(vars(gs.Variable("v")))


def test_a_payload_passes_for_graphsurgeons_lazy_values() -> None:
    held = constant("c", np.ones(2, np.float32))
    plain = gs.Constant("c", held.tensor_data)

    assert isinstance(held.tensor_data, gs_tensor.LazyValues)
    assert (plain.shape, plain.dtype, plain.values.tolist()) == ((2,), np.float32, [1, 1])
    assert held.tensor_data.tensor == numpy_helper.from_array(np.ones(2, np.float32), "")


def test_lazy_values_hold_the_tensor_they_were_read_from() -> None:
    proto = numpy_helper.from_array(np.ones(2, np.float32), "c")

    assert gs_tensor.LazyValues(proto).tensor is proto
    assert issubclass(gs_tensor.SparseValues, gs_tensor.LazyValues)


def test_the_class_of_an_object_can_be_exchanged_for_ours() -> None:
    node, variable, held = gs.Node("Relu"), gs.Variable("v"), gs.Constant("c", np.zeros(1))
    held._values = ArrayData(held._values)

    node.__class__, variable.__class__, held.__class__ = Node, Variable, Constant

    assert len({node, variable, held}) == 3
    assert (node.source, variable.source, held.overridable_input, held.declared_unused) == (None, None, None, False)


def test_graph_takes_the_arguments_that_ours_hands_on_in_order() -> None:
    theirs, ours = (inspect.signature(one.__init__).parameters for one in (gs.Graph, OurGraph))
    by_place = [name for name, one in ours.items() if one.kind is not one.KEYWORD_ONLY]

    assert list(theirs)[: len(by_place)] == by_place
    assert set(ours) <= set(theirs)


def test_methods_that_ours_overrides_have_the_arguments_that_callers_know() -> None:
    for ours, theirs, names in (
        (Graph, gs.Graph, ("cleanup", "toposort", "copy")),
        (Node, gs.Node, ("copy",)),
        (Variable, gs.Variable, ("to_constant", "copy")),
        (Constant, gs.Constant, ("to_variable", "copy")),
    ):
        for name in names:
            expected = list(inspect.signature(getattr(theirs, name)).parameters)
            assert list(inspect.signature(getattr(ours, name)).parameters) == expected, name


def test_familiar_ways_around_a_graph_work_on_ours() -> None:
    x, h, y = Variable("x", np.float32, [4]), Variable("h"), Variable("y")
    one = Node("Relu", "one", inputs=[x], outputs=[h])
    two = Node("Neg", "two", inputs=[h], outputs=[y])
    graph = Graph([one, two], [x], [y], opset=17)

    assert (one.o(), two.i(), h.o(), y.i()) == (two, one, y, h)
    assert list(graph.tensors()) == ["x", "h", "y"]
    assert list(graph.subgraphs()) == []
    one.outputs.clear()
    assert h.inputs == []
    assert "one" in str(graph)


def test_graphsurgeon_still_has_the_losses_that_we_refuse() -> None:
    """When it stops changing these, the checks in surgeon.py can go."""
    import ml_dtypes
    from onnx_graphsurgeon.exporters.onnx_exporter import OnnxExporter, dtype_to_onnx

    assert dtype_to_onnx(np.dtype(ml_dtypes.float8_e4m3fnuz)) == 17, "the number of another type"
    stored = numpy_helper.from_array(np.zeros(1, np.float32), "before")
    OnnxExporter.export_tensor_proto(gs.Constant("after", gs_tensor.LazyValues(stored)))
    assert stored.name == "after", "the proto that was read is renamed"


def test_errors_of_graphsurgeon_are_of_one_class() -> None:
    assert issubclass(OnnxGraphSurgeonException, Exception)
    assert gs_graph.Graph is gs.Graph
