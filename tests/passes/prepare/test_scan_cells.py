"""ScanCells writes cells with large weights as products in a Scan, whose codes a runtime multiplies as they are."""

from __future__ import annotations

import onnx
import pytest
from model_texts import apply_once, difference, named_graph, ops, outputs
from recurrent_models import LARGE, SMALL, cell, sample

from onnxq.config.presets import PRESETS
from onnxq.config.scheme import Mode
from onnxq.ir import Graph, as_graph
from onnxq.onnx_api import infer_shapes
from onnxq.passes import ScanCells
from onnxq.planning.planner import make_plan
from onnxq.preparing.preparation import integer_steps, prepare_for_integers, steps_named
from onnxq.runtime.targets import target_named


def body(graph: Graph) -> Graph:
    (scan,) = (node for node in graph.nodes if node.op == "Scan")
    return scan.attrs["body"]


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("state", [False, True], ids=["zeros", "a state"])
@pytest.mark.parametrize(("batch", "rows"), [("N", 1), ("N", 3), (2, 2)])
def test_a_large_cell_becomes_products(direction: str, *, state: bool, batch: int | str, rows: int) -> None:
    made = cell(LARGE, batch=batch, state=state, direction=direction, linear_before_reset=1)
    graph = named_graph(made)
    assert apply_once(ScanCells(), graph)
    assert "GRU" not in ops(graph)
    assert [node.op for node in graph.nodes].count("MatMul") == ops(body(graph)).count("MatMul") == 1
    given = sample(rows, LARGE, state=state)
    assert difference(outputs(graph, given), outputs(made, given)) < 1e-5


def test_the_body_says_how_many_axes_its_outputs_have_where_the_model_does_not() -> None:
    made = cell(LARGE, batch="N", state=True, linear_before_reset=1)
    graph = named_graph(made)
    ScanCells().apply(graph)
    assert [len(tensor.shape) for tensor in body(graph).outputs] == [2, 2]


def test_a_cell_without_biases_becomes_products() -> None:
    made = cell(LARGE, bias=False, linear_before_reset=1)
    graph = named_graph(made)
    assert apply_once(ScanCells(), graph)
    assert difference(outputs(graph, sample(1, LARGE)), outputs(made, sample(1, LARGE))) < 1e-5


def test_a_cell_whose_first_state_may_have_any_rank_stays() -> None:
    graph = named_graph(cell(LARGE, state=True, linear_before_reset=1))
    graph.nodes[-1].inputs[5].shape = None
    assert not ScanCells().apply(graph)


@pytest.mark.parametrize(
    "made",
    [
        cell(SMALL, linear_before_reset=1),
        cell(LARGE),
        cell(LARGE, linear_before_reset=1, clip=1.0),
        cell(LARGE, linear_before_reset=1, lengths=True),
    ],
    ids=["small", "reset first", "clipped", "lengths"],
)
def test_others_stay(made: onnx.ModelProto) -> None:
    graph = named_graph(made)
    assert not apply_once(ScanCells(), graph)
    assert ops(graph) == ["GRU"]


@pytest.mark.parametrize(("target", "wanted"), [("openvino", "Scan"), ("onnxruntime-cpu", "GRU")])
def test_it_is_for_runtimes_that_multiply_codes_in_bodies(target: str, wanted: str) -> None:
    made = cell(LARGE, linear_before_reset=1)
    graph = named_graph(made)
    steps = integer_steps(PRESETS["int8"], target_named(target))
    assert steps_named([type(step).__name__ for step in steps]) == steps
    prepare_for_integers(graph, steps)
    prepare_for_integers(graph, steps, opset=21)
    assert wanted in ops(graph)
    assert difference(outputs(graph, sample(2, LARGE)), outputs(made, sample(2, LARGE))) < 1e-5


def test_what_a_step_multiplies_stays_codes() -> None:
    graph = named_graph(cell(LARGE, linear_before_reset=1))
    target = target_named("openvino")
    prepare_for_integers(graph, integer_steps(PRESETS["int8"], target))
    plan = make_plan(graph, PRESETS["int8"], target)
    (product,) = (node for node in body(graph).nodes if node.op == "MatMul")
    assert plan.by_node[product.name].mode is Mode.WEIGHT_ONLY
    assert product.origins == (("cell", "GRU"),)


def test_only_cells_are_replaced_where_no_node_has_a_name() -> None:
    made = cell(LARGE, linear_before_reset=1)
    made.graph.node[0].ClearField("name")
    made.graph.node[0].output[0] = "inner"
    made.graph.node.append(onnx.helper.make_node("Neg", ["inner"], ["y"]))
    graph = as_graph(made)
    infer_shapes(graph)
    changes = apply_once(ScanCells(), graph)
    assert changes.changed == ("GRU_inner",)
    assert "GRU" not in ops(graph)
    assert ops(graph).count("Neg") == 1
    assert difference(outputs(graph, sample(1, LARGE)), outputs(made, sample(1, LARGE))) < 1e-5
