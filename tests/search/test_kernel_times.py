"""Profiles are traced back to the nodes they stand for, whatever the runtime made of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from convolutions import KERNEL, between_convolutions
from onnx import ModelProto

from onnxq.config.presets import preset_named
from onnxq.config.scheme import Mode
from onnxq.ir import all_nodes, as_graph, load, read_model, save
from onnxq.passes.preparing.preparation import prepare
from onnxq.planning.plan import Decision, Demotion, Plan
from onnxq.planning.planner import make_plan
from onnxq.runtime.kernels import Kernel, profile_kernels
from onnxq.runtime.targets import target_named
from onnxq.search.kernel_times import (
    NodeTime,
    NodeTimes,
    Region,
    find_regions,
    kernels_by_node,
    node_times,
    trace_kernels,
)


def kernel(name: str, op: str, inputs: str, outputs: str, nanoseconds: float) -> Kernel:
    return Kernel(name, op, tuple(inputs.split()), tuple(outputs.split()), nanoseconds, 512.0)


@pytest.fixture
def conv_relu(build: Callable[..., ModelProto]) -> ModelProto:
    return between_convolutions(build, "[clamp] b = Relu(a)")


def test_a_fused_kernel_counts_at_the_node_with_the_weight(conv_relu: ModelProto) -> None:
    graph = prepare(as_graph(conv_relu))
    times = trace_kernels(
        [
            kernel("b_nchwc", "Conv", "x w0", "reorder", 7.0),
            kernel("last_token_3", "Conv", "reorder w1", "y", 5.0),
        ],
        graph,
    )
    assert times.nodes == {"first": 7.0, "last": 5.0}
    assert times.rest == 0
    assert times.elements["first"] == 512


def test_a_kernel_bears_the_name_of_the_node_that_it_was_fused_into(build: Callable[..., ModelProto]) -> None:
    graph = prepare(as_graph(between_convolutions(build, "[gate] s = Sigmoid(a) [silu] b = Mul(a, s)")))
    times = trace_kernels(
        [
            kernel("a_nchwc", "Conv", "x w0", "reorder", 7.0),
            kernel("silu/QuickGeluFusion/", "QuickGelu", "reorder", "reorder_token_1", 2.0),
            kernel("y_nchwc", "Conv", "reorder_token_1 w1", "reorder_token_2", 5.0),
        ],
        graph,
    )
    assert times.nodes == {"first": 7.0, "silu": 2.0, "last": 5.0}
    assert times.elements["silu"] == 512
    assert times.rest == 0


def test_a_kernel_without_a_name_stands_for_what_is_left_behind_its_input(build: Callable[..., ModelProto]) -> None:
    formula = (
        "[div] d = Div(a, root) [erf] e = Erf(d) [add] f = Add(e, one) [mul] g = Mul(a, f) [half] b = Mul(g, half)"
    )
    graph = prepare(as_graph(between_convolutions(build, formula, root=1.4142135, one=1.0, half=0.5)))
    last = graph.nodes[-2].name
    times = trace_kernels(
        [
            kernel("a_nchwc", "Conv", "x w0", "reorder", 7.0),
            kernel("Gelu_token_4", "Gelu", "reorder", "reorder_token_1", 2.0),
            kernel("y_nchwc", "Conv", "reorder_token_1 w1", "reorder_token_2", 5.0),
        ],
        graph,
    )
    assert times.nodes == {"first": 7.0, last: 2.0, "last": 5.0}
    assert times.elements[last] == 512
    assert times.rest == 0


def test_kernels_that_several_names_were_fused_into_count_at_the_last(conv_relu: ModelProto) -> None:
    graph = prepare(as_graph(conv_relu))
    times = trace_kernels(
        [
            kernel("x.quantize", "FakeQuantize", "x", "x.quantize", 1.0),
            kernel("x.quantize_abcd_acdb_first", "Reorder", "x.quantize", "x.quantize_abcd_acdb_first", 2.0),
            kernel("first", "Convolution", "reorder", "first first/WithoutBiases Multiply_7 b.quantize", 10.0),
            kernel("last/WithoutBiases", "Convolution", "first", "last/WithoutBiases last", 8.0),
            kernel("last_acdb_abcd", "Reorder", "last/WithoutBiases", "last_acdb_abcd", 3.0),
        ],
        graph,
        {"x.quantize": "x"},
    )
    assert times.nodes == {"first": 10.0, "last": 8.0}
    assert times.borders == {"x": 3.0, "y": 3.0}
    assert times.rest == 0


def test_borders_and_layouts_count_at_their_tensor(conv_relu: ModelProto) -> None:
    graph = prepare(as_graph(conv_relu))
    times = trace_kernels(
        [
            kernel("x.quantize", "QuantizeLinear", "x s z", "x.codes", 1.0),
            kernel("Transpose_token_1", "Transpose", "x.codes", "t1", 2.0),
            kernel("first_token_2", "QLinearConv", "t1 w", "first_out", 10.0),
            kernel("b.dequantize/duplicated", "DequantizeLinear", "first_out s z", "d1", 3.0),
            kernel("b.share", "Sum", "d1", "b.copy", 4.0),
            kernel("last/MatMulAddFusion_token_5", "Gemm", "d1 w", "unknown", 8.0),
            kernel("mystery", "Gelu", "q", "q2", 0.5),
        ],
        graph,
        {"x.quantize": "x", "b.dequantize": "b", "b.share": "b"},
    )
    assert times.borders == {"x": 3.0, "b": 7.0}
    assert times.nodes == {"first": 10.0, "last": 8.0}
    assert times.rest == 0.5
    assert times.total == 28.5


def test_every_kernel_of_a_real_run_is_found(conv_relu: ModelProto, tmp_path: Path) -> None:
    graph = prepare(as_graph(conv_relu))
    save(graph, tmp_path / "m.onnx")
    sample = {"x": np.ones((1, 8, 8, 8), np.float32)}
    kernels = profile_kernels(tmp_path / "m.onnx", [sample, sample], tmp_path, repeats=3)
    times = trace_kernels(kernels, load(tmp_path / "m.onnx"))
    assert {"first", "last"} <= times.nodes.keys()
    assert times.rest == 0
    assert times.nodes["first"] > 0
    assert times.elements["last"] == 512
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]


def test_a_branch_counts_in_the_samples_that_take_it(build: Callable[..., ModelProto], tmp_path: Path) -> None:
    model = build(
        """(float[1,8,8,8] x, bool c) => (float[1,8,8,8] y) {
            [first] a = Conv <pads = [1,1,1,1]> (x, w0)
            [choose] b = If (c) <
                then_branch = yes () => (float[1,8,8,8] u) { [inner] u = Sin(a) },
                else_branch = no () => (float[1,8,8,8] v) { [other] v = Cos(a) }>
            [last] y = Conv <pads = [1,1,1,1]> (b, w1)
        }""",
        w0=KERNEL,
        w1=KERNEL,
    )
    onnx.save(model, tmp_path / "m.onnx")
    samples = [{"x": np.ones((1, 8, 8, 8), np.float32), "c": np.array(flag)} for flag in (True, False)]
    kernels = profile_kernels(tmp_path / "m.onnx", samples, tmp_path, repeats=2)
    times = trace_kernels(kernels, load(tmp_path / "m.onnx"))
    assert {"first", "last", "inner", "other"} <= times.nodes.keys()
    assert "choose" not in times.nodes
    assert times.elements["last"] == 512
    assert times.elements["inner"] == times.elements["other"] == 256


def test_all_turns_of_a_loop_count_together_at_the_nodes_of_its_body(looping: ModelProto, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    save(prepare(as_graph(looping)), path)
    samples = [{"x": np.ones((1, 8), np.float32), "n": np.array(turns)} for turns in (3, 7)]
    times = trace_kernels(profile_kernels(path, samples, tmp_path, repeats=2), load(path))
    assert {"first", "inner", "scale"} <= times.nodes.keys()
    assert "loop" not in times.nodes
    assert (times.elements["first"], times.elements["inner"]) == (8, 8 * 5)
    assert times.rest == 0
    assert [found.name for found in tmp_path.iterdir()] == ["m.onnx"]


def test_nodes_of_bodies_that_name_their_tensors_alike_are_told_apart(build: Callable[..., ModelProto]) -> None:
    model = build(
        """(float[4] x, bool c) => (float[4] y) {
            [choose] y = If (c) <
                then_branch = yes () => (float[4] v) { [a] u = Sin(x) [b] v = Cos(u) },
                else_branch = no () => (float[4] v) { [c] u = Tan(x) [d] v = Exp(u) }>
        }"""
    )
    graph = prepare(as_graph(model))
    made = {node.name: node.outputs[0].name for _, node in all_nodes(graph) if node.name in "abcd"}
    kernels = [kernel(name, "", "x", made[name], float(index)) for index, name in enumerate("abcd", start=1)]
    assert trace_kernels(kernels, graph).nodes == {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}


def test_quantizing_shared_data_anew_counts_evenly_at_the_products_that_share_it(
    build: Callable[..., ModelProto],
) -> None:
    model = build(
        "(float[4,8] x) => (float[4,8] y, float[4,8] z) { [a] y = MatMul(x, w0) [b] z = MatMul(x, w1) }",
        w0=(8, 8),
        w1=(8, 8),
    )
    quantizer = kernel("x.quantize", "DynamicQuantizeLinear", "x", "x.codes x.scale x.zero_point", 6.0)
    products = [
        kernel("a.1", "MatMulIntegerToFloat", "x.codes w0.codes x.scale", "y", 10.0),
        kernel("b.1", "MatMulIntegerToFloat", "x.codes w1.codes x.scale", "z", 20.0),
    ]
    graph = prepare(as_graph(model))
    times = trace_kernels([quantizer, *products], graph)
    assert times.nodes == {"a": 13.0, "b": 23.0}
    assert times.rest == 0
    assert trace_kernels([quantizer], graph).rest == 6.0


def test_coders_that_the_runtime_moves_count_at_their_tensor(conv_relu: ModelProto) -> None:
    times = trace_kernels(
        [
            kernel("b_q", "QuantizeLinear", "b_pre_q s z", "b_q_to_dq", 2.0),
            kernel("b_dq_token_4", "DequantizeLinear", "b_q_to_dq s z", "b_post_dq", 3.0),
            kernel("first_q", "QuantizeLinear", "unknown s z", "known_to_nobody", 1.0),
        ],
        prepare(as_graph(conv_relu)),
    )
    assert times.borders == {"b": 5.0}


def test_coders_that_the_runtime_adds_to_decoded_data_count_at_what_that_stands_for(conv_relu: ModelProto) -> None:
    decoded = kernel("b.dequantized_q_token_1", "QuantizeLinear", "b.dequantized s z", "b.dequantized_q", 2.0)
    times = trace_kernels([decoded], prepare(as_graph(conv_relu)), {"b.dequantized": "b"})
    assert times.borders == {"b": 2.0}


def test_kernels_belong_to_the_nodes_whose_names_they_bear_or_whose_outputs_they_make(conv_relu: ModelProto) -> None:
    first, second, fused = (
        kernel("first_token_1", "QLinearConv", "x.codes", "first", 1.0),
        kernel("ReorderOutput", "ReorderOutput", "first", "b", 1.0),
        kernel("anything", "Conv", "x", "b", 1.0),
    )
    graph = prepare(as_graph(conv_relu))
    maker = next(node.name for node in graph.nodes if node.outputs[0].name == "b")
    assert kernels_by_node([first, second, fused], graph) == {"first": (first,), maker: (fused,)}


# Regions are joined by quantized values, and their borders count with them.


def test_a_float_node_parts_two_regions(residual: ModelProto) -> None:
    graph = prepare(read_model(residual))
    names = [node.name for node in graph.nodes]
    demotions = {name: Demotion(Mode.STORAGE, "why") for name in ("sum", "sum_relu")}
    plan = make_plan(graph, preset_named("int8"), target_named("onnxruntime-cpu"), demotions)
    floats = NodeTimes(dict.fromkeys(names, 2e6), {}, {}, 0.0)
    integers = NodeTimes(dict.fromkeys(names, 1e6), {"x": 5e5, "e": 25e4, "g": 1e6}, {}, 0.0)
    assert find_regions(graph, plan, floats, integers) == (
        Region("stem", 5, Mode.STATIC, 10.0, 5.75),
        Region("last", 1, Mode.STATIC, 2.0, 2.0),
    )


def test_dynamic_nodes_are_regions_of_their_own(perceptron: ModelProto) -> None:
    graph = prepare(read_model(perceptron))
    demotions = {node.name: Demotion(Mode.DYNAMIC, "why") for node in graph.nodes}
    plan = make_plan(graph, preset_named("int8"), target_named("onnxruntime-cpu"), demotions)
    times = NodeTimes({"first": 1e6, "second": 2e6}, {}, {}, 0.0)
    found = find_regions(graph, plan, times, times)
    assert [(region.first, region.mode) for region in found] == [("second", Mode.DYNAMIC), ("first", Mode.DYNAMIC)]


def test_a_border_that_two_regions_share_is_counted_once(residual: ModelProto) -> None:
    graph = prepare(read_model(residual))
    names = [node.name for node in graph.nodes]
    demotions = {name: Demotion(Mode.STORAGE, "why") for name in ("left", "left_relu", "sum", "sum_relu")}
    plan = make_plan(graph, preset_named("int8"), target_named("onnxruntime-cpu"), demotions)
    ones = NodeTimes(dict.fromkeys(names, 1e6), {}, {}, 0.0)
    borders = {"b": 4e6, "d": 2e6, "e": 1e6, "g": 8e6}
    found = find_regions(graph, plan, ones, NodeTimes(ones.nodes, borders, {}, 0.0))
    assert {region.first: region.nodes for region in found} == {"stem": 2, "right": 1, "last": 1}
    assert sum(region.milliseconds for region in found) == 4.0 + 15.0


def test_times_of_nodes_stand_in_the_order_of_the_plan() -> None:
    decisions = tuple(Decision(name, "Conv", Mode.STATIC, "why") for name in "cab")
    floats, integers = NodeTimes({"a": 2e6, "c": 4e6}, {}, {}, 0.0), NodeTimes({"a": 1e6}, {}, {}, 0.0)
    found = node_times(Plan(decisions, (), "int8", "onnxruntime-cpu"), floats, integers)
    assert found == (NodeTime("c", 4.0, 0.0), NodeTime("a", 2.0, 1.0))
