"""Layers of one kind are asked about together, and the noise of nodes is what their codes were found to add."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import ModelProto

from onnxq import Budget, Report, quantize, sensitivity
from onnxq.config.presets import preset_named
from onnxq.config.scheme import Mode
from onnxq.ir import read_model
from onnxq.planning.planner import make_plan
from onnxq.preparing.preparation import prepare
from onnxq.runtime.targets import target_named
from onnxq.search.sensitivity import ProbeByLayerKind, QuantizerId, Sensitivities, sensitivity_by_node

TARGET = target_named("onnxruntime-cpu")
BLOCKS = 3
TEXT = "(float[4,16] x) => (float[4,16] y) {{ {} y = Tanh(h{}) }}"


def blocks(build: Callable[..., ModelProto], **weights: object) -> ModelProto:
    """Return blocks of a wide and a narrow product, as decoders have them."""
    lines = [
        f"[wide{n}] a{n} = MatMul({'x' if n == 0 else f'h{n - 1}'}, u{n}) b{n} = Relu(a{n}) "
        f"[narrow{n}] h{n} = MatMul(b{n}, d{n})"
        for n in range(BLOCKS)
    ]
    shapes = {f"u{n}": (16, 32) for n in range(BLOCKS)} | {f"d{n}": (32, 16) for n in range(BLOCKS)}
    return build(TEXT.format(" ".join(lines), BLOCKS - 1), **{**shapes, **weights})


class Asked:
    """Nothing but sources, in the order of a plan."""

    def __init__(self, sources: Sequence[QuantizerId]) -> None:
        self.sources = tuple(sources)

    def noises(self, asked: Iterable[Collection[QuantizerId]], samples: Sequence[int]) -> Iterator[NDArray[np.float64]]:
        return (np.full((len(samples), 1), float(len(coded))) for coded in asked)

    def everything(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return np.full((2, 1), float(len(self.sources))), np.ones((2, 1))


def test_neighbours_are_layers_of_one_kind(build: Callable[..., ModelProto]) -> None:
    graph = prepare(read_model(blocks(build)))
    names = [node.name for node in graph.nodes if node.op == "MatMul"]
    tensors = [node.outputs[0].name for node in graph.nodes if node.op == "MatMul"]
    given = [*map(QuantizerId, ["x", *tensors]), *(QuantizerId(name, is_node=True) for name in names)]
    board = ProbeByLayerKind(Asked(given), graph)
    assert [one.name for one in board.sources if one.is_node] == [
        *(f"wide{n}" for n in range(BLOCKS)),
        *(f"narrow{n}" for n in range(BLOCKS)),
    ]
    assert [one.name for one in board.sources if not one.is_node] == ["x", "a0", "a1", "a2", "h0", "h1", "h2"]
    assert [found.tolist() for found in board.noises([given[:2]], [0, 1])] == [[[2.0], [2.0]]]


def test_the_noise_of_a_node_is_that_of_its_codes(build: Callable[..., ModelProto]) -> None:
    graph = prepare(read_model(blocks(build)))
    plan = make_plan(graph, preset_named("int8"), TARGET)
    known = {QuantizerId("x"): np.array([0.06]), QuantizerId("wide0", is_node=True): np.array([0.04])}
    found = {
        one.node: one for one in sensitivity_by_node(graph, TARGET, lambda: Sensitivities(known))(plan, {Mode.STATIC})
    }
    assert found["wide0"].sqnr == pytest.approx(10)
    assert found["narrow2"].sqnr == np.inf
    assert sensitivity_by_node(graph, TARGET, lambda: Sensitivities(known))(plan, {Mode.DYNAMIC}) == []


def test_of_a_model_above_a_gibibyte_the_layers_that_hurt_most_are_left(
    build: Callable[..., ModelProto], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("onnxq.ir.protos._LARGE_BYTES", 1 << 10)
    random = np.random.default_rng(0)
    samples = [{"x": random.standard_normal((4, 16)).astype(np.float32)} for _ in range(12)]
    model = blocks(build)

    def quantized(goal: float, search: str) -> Report:
        budget = Budget(search=search, accuracy="off", latency=0)
        return quantize(model, samples, tmp_path / "q.onnx", goal=goal, budget=budget).report

    plain = quantized(0, "off").agreement.worst_sqnr
    found = quantized(plain, "fast")
    assert found.agreement.worst_sqnr > plain
    weighted = [one for one in found.plan.decisions if one.weights]
    left = {one.node for one in weighted if one.mode is not Mode.STATIC}
    assert 0 < len(left) < len(weighted) == 2 * BLOCKS
    told = [one.node for one in found.search.sensitivities]
    assert left == set(told[: len(left)])
    assert all(math.isfinite(one.sqnr) for one in found.search.sensitivities)


def test_the_sensitivity_of_a_model_above_a_gibibyte_is_that_of_a_smaller_one(
    build: Callable[..., ModelProto], monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(0)
    samples = [{"x": random.standard_normal((4, 16)).astype(np.float32)} for _ in range(4)]
    model, budget = blocks(build), Budget(accuracy="off", latency=0)
    small = sensitivity(model, samples, budget=budget)
    monkeypatch.setattr("onnxq.ir.protos._LARGE_BYTES", 1 << 10)
    large = sensitivity(model, samples, budget=budget)
    assert large.sqnr == pytest.approx(small.sqnr, abs=0.01)
    for one, other in zip(large.tensors, small.tensors, strict=True):
        assert one.tensor == other.tensor
        assert one.sqnr == pytest.approx(other.sqnr, abs=0.01)
    assert [one.node for one in large.nodes] == [one.node for one in small.nodes]
    assert {way.mode for one in large.nodes for way in one.ways} == {Mode.STATIC, Mode.STORAGE}
    assert {way.milliseconds for one in large.nodes for way in one.ways} == {None}
