"""One session answers what any of the quantized values of a plan do."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from conftest import MODELS
from numpy.typing import NDArray
from onnx import ModelProto
from onnxq.search.evaluator import PlanEvaluator

from onnxq import Budget, Report, quantize, sensitivity
from onnxq.algorithms.encoding_config import EncodingConfig
from onnxq.config.presets import preset_named
from onnxq.config.scheme import Mode
from onnxq.ir import load, read_model, save
from onnxq.numerics.affine import sqnr_of_ratio
from onnxq.passes.preparing.preparation import prepare
from onnxq.planning.plan import Demotion
from onnxq.planning.planner import make_plan
from onnxq.runtime.targets import target_named
from onnxq.search.prepared_model import PreparedModel
from onnxq.search.sensitivity import (
    LARGEST_NSR,
    ProbeByLayerKind,
    QuantizerId,
    QuantizerToggleSession,
    Sensitivities,
    attribute_error,
    measure_sensitivities,
    sensitivity_by_node,
    typical_sample,
    worst_output_nsr,
)
from onnxq.system.resources import silent

TARGET = target_named("onnxruntime-cpu")


def trials_of(path: Path, samples: list) -> PlanEvaluator:
    bench = PreparedModel(path, preset_named("int8"), TARGET)
    return PlanEvaluator.of(bench, path, samples, bench.calibrate(bench.plan({}), samples, silent))


def test_all_codes_make_the_noise_of_the_quantized_model(
    residual: ModelProto, samples_for: Callable[..., list], tmp_path: Path
) -> None:
    path = tmp_path / "prepared.onnx"
    save(prepare(read_model(residual)), path)
    evaluator = trials_of(path, samples_for(residual, 4))
    plan = evaluator.bench.plan({})
    board = QuantizerToggleSession.of(evaluator, plan, EncodingConfig())
    everything = range(4)
    silent_codes, joint = board.nsr_by_set([(), board.sources], everything)
    assert silent_codes.max() < 1e-9
    real = evaluator.nsr(plan, EncodingConfig())
    assert joint.shape == real.shape
    assert sqnr_of_ratio(worst_output_nsr(joint.sum(0))) == pytest.approx(
        sqnr_of_ratio(worst_output_nsr(real.sum(0))), abs=1.0
    )
    some = QuantizerToggleSession.of(evaluator, plan, EncodingConfig(), {"stem"})
    assert some.sources == (QuantizerId("stem", is_node=True),)


@pytest.mark.parametrize("name", ["resnet", "mobilenet"])
def test_sums_of_what_codes_make_alone_predict_other_plans(name: str, tmp_path: Path) -> None:
    path = tmp_path / "prepared.onnx"
    save(prepare(load(MODELS / f"{name}.onnx")), path)
    evaluator = trials_of(path, [{"image": one[None]} for one in np.load(MODELS / "data" / "calib.npz")["image"][:4]])
    bench, full = evaluator.bench, evaluator.bench.plan({})
    found = measure_sensitivities(QuantizerToggleSession.of(evaluator, full, EncodingConfig()), 4, runs=1000)
    generator = np.random.default_rng(0)
    static = [one.node for one in full.decisions if one.mode is Mode.STATIC and one.weights]
    errors = []
    for share in (0.2, 0.5, 0.8):
        left = {node: Demotion(Mode.STORAGE, "why") for node in static if generator.random() < share}
        plan = bench.plan(left)
        quantizers = [QuantizerId(one.tensor) for one in plan.activations]
        quantizers += [QuantizerId(one.node, is_node=True) for one in plan.decisions if one.mode is not Mode.FLOAT]
        errors.append(
            sqnr_of_ratio(worst_output_nsr(found.together(quantizers)))
            - sqnr_of_ratio(worst_output_nsr(evaluator.nsr(plan, EncodingConfig()).sum(0)))
        )
    # Errors of neighbouring quantized values point the same way more or less often.
    assert np.median(np.abs(errors)) < 2.5


# How noise is divided among what becomes quantized values.

UNITS = tuple(QuantizerId(f"t{index}") for index in range(32))


@dataclass
class Board:
    """Answers for sources whose noise is known: by source, at two outputs, the second of which has half of it."""

    loud: Mapping[str, float]
    rest: float = 0.001
    requested: list[int] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)

    @property
    def sources(self) -> tuple[QuantizerId, ...]:
        return UNITS

    def nsr(self, quantized: Collection[QuantizerId], samples: Sequence[int]) -> NDArray[np.float64]:
        self.requested.append(len(quantized))
        self.samples += samples
        total = sum(self.loud.get(source.name, self.rest) for source in quantized)
        return np.array([[total, total / 2] for _ in samples]) / len(samples)

    def nsr_by_set(
        self, requested: Iterable[Collection[QuantizerId]], samples: Sequence[int]
    ) -> Iterator[NDArray[np.float64]]:
        return (self.nsr(quantized, samples) for quantized in requested)

    def groups(self, groups: Sequence[Sequence[QuantizerId]]) -> list[NDArray[np.float64]]:
        return [found[0] for found in self.nsr_by_set(groups, [0])]


def spread(board: Board, most: int, negligible: float = 0.0) -> dict[str, float]:
    [whole] = Board(board.loud, board.rest).groups([UNITS])
    found = attribute_error(UNITS, board.groups, whole=whole, most=most, negligible=negligible)
    assert list(found) == list(UNITS)
    assert all(ratios[1] == pytest.approx(ratios[0] / 2) for ratios in found.values())
    return {source.name: worst_output_nsr(ratios) for source, ratios in found.items()}


def test_each_source_is_measured_alone_when_there_is_time() -> None:
    board = Board({"t3": 1.0, "t20": 0.5})
    found = spread(board, 32)
    assert board.requested == [1] * 32
    assert (found["t3"], found["t20"], found["t0"]) == (1.0, 0.5, 0.001)


def test_few_measurements_find_the_noisiest() -> None:
    board = Board({"t3": 1.0, "t20": 0.5})
    found = spread(board, 20, 0.01)
    assert len(board.requested) <= 20
    assert sorted(found, key=lambda unit: -found[unit])[:2] == ["t3", "t20"]
    assert (found["t3"], found["t20"]) == (pytest.approx(1.0, rel=0.05), pytest.approx(0.5, rel=0.05))


@pytest.mark.parametrize("most", [0, 1, 2])
def test_the_parts_make_the_whole_even_where_errors_point_the_same_way(most: int) -> None:
    found = attribute_error(
        UNITS,
        lambda groups: [np.array([len(group) ** 2 / 1024]) for group in groups],
        whole=np.ones(1),
        most=most,
        negligible=0.0,
    )
    assert sum(map(worst_output_nsr, found.values())) == pytest.approx(1.0)


def test_the_noise_of_a_group_is_divided_by_likely_shares() -> None:
    shares = {UNITS[1]: 3.0, UNITS[2]: 0.0, UNITS[3]: 1.0}
    found = attribute_error(
        UNITS[:4], lambda groups: [np.ones(1)] * len(groups), whole=np.ones(1), most=1, negligible=0.0, shares=shares
    )
    # Of the first none is known.
    assert [worst_output_nsr(found[unit]) for unit in UNITS[:4]] == pytest.approx([0.2, 0.6, 0.0, 0.2])


def test_groups_of_one_size_come_first_and_then_the_noisiest_are_split() -> None:
    board = Board({"t3": 1.0})
    found = spread(board, 10)
    assert board.requested == [4] * 8 + [2] * 2
    assert found["t2"] == found["t3"] > 100 * found["t0"]


@pytest.mark.parametrize(("runs", "again"), [(1000, 32), (57, 7)])
def test_all_are_measured_on_all_samples_as_far_as_runs_go_and_the_noisiest_first(runs: int, again: int) -> None:
    board = Board({"t3": 1.0, "t20": 0.5}, rest=1e-4)
    found = measure_sensitivities(board, 3, runs=runs)
    assert board.requested == [32, 32, *[1] * 32, *[1] * again]
    assert found.tensors["t3"] == pytest.approx(1.0)
    assert found.nodes == {}
    assert list(found.errors)[:2] == [QuantizerId("t3"), QuantizerId("t20")]
    assert len(found.errors) == again
    assert found.alone == set(UNITS)
    assert found.joint == pytest.approx([1.5 + 30e-4, 0.75 + 15e-4])
    assert found.of([QuantizerId("t3"), QuantizerId("t20"), QuantizerId("unknown")]) == pytest.approx(1.5)


def test_what_is_silent_in_the_sample_that_is_looked_at_first_is_heard_in_others() -> None:
    class Late(Board):
        def nsr(self, quantized: Collection[QuantizerId], samples: Sequence[int]) -> NDArray[np.float64]:
            late = {0: 0.0, 1: 0.0, 2: 5.0}
            return super().nsr(quantized, samples) + [
                [late[sample] * (QuantizerId("t5") in quantized)] * 2 for sample in samples
            ]

    found = measure_sensitivities(Late({"t3": 1.0}), 3, runs=1000)
    assert found.tensors["t5"] == pytest.approx(5.0, rel=1e-3)
    assert found.of(UNITS) == pytest.approx(worst_output_nsr(found.joint))


def test_without_time_all_sources_share_what_they_do_together() -> None:
    found = measure_sensitivities(Board({"t3": 1.0}), 2, runs=0)
    assert found.alone == frozenset()
    assert list(found.tensors.values()) == pytest.approx([1.031 / 32] * 32)


def test_what_is_not_finite_is_very_noisy_but_can_be_added_up() -> None:
    found = measure_sensitivities(Board({"t3": math.nan, "t4": math.inf}), 2, runs=1000)
    assert found.tensors["t3"] == found.tensors["t4"] == LARGEST_NSR
    assert found.of(UNITS) == LARGEST_NSR


def test_no_sources_or_samples_have_no_noise() -> None:
    assert measure_sensitivities(Board({}), 0, runs=10).ratios == {}
    assert Sensitivities().of(UNITS) == 0.0
    assert sqnr_of_ratio(0.001) == pytest.approx(30.0)


def test_the_worst_output_is_that_of_the_sum_and_not_of_each() -> None:
    found = Sensitivities({UNITS[0]: np.array([0.5, 0.1]), UNITS[1]: np.array([0.1, 0.6])})
    assert found.of(UNITS) == pytest.approx(0.7)
    assert found.tensors == {"t0": 0.5, "t1": 0.6}


@pytest.mark.parametrize("joint", [0.5, 1.6, 6.4])
def test_many_codes_make_what_was_measured_of_all_and_few_make_their_sum(joint: float) -> None:
    sources = tuple(QuantizerId(f"t{index}") for index in range(16))
    found = Sensitivities(dict.fromkeys(sources, np.array([0.1, 0.0])), joint=np.array([joint, 0.0]))
    assert found.together(sources) == pytest.approx([joint, 0.0])
    parts = [worst_output_nsr(found.together(sources[:count])) for count in range(17)]
    assert parts == sorted(parts)
    assert parts[0] == 0.0
    assert parts[1] == pytest.approx(0.1, rel=0.15)
    # All the way, they are on the side of the sum on which the joint is.
    sums = [worst_output_nsr(np.array([0.1 * count])) for count in range(17)]
    assert all((one - summed) * (joint - 1.6) >= -1e-12 for one, summed in zip(parts, sums, strict=True))


def test_without_a_joint_measurement_codes_make_their_sum_together() -> None:
    found = Sensitivities({UNITS[0]: np.array([0.5, 0.1]), UNITS[1]: np.array([0.1, 0.6])})
    assert found.together(UNITS) == pytest.approx([0.6, 0.7])
    assert Sensitivities().together(UNITS) == pytest.approx([0.0])


def test_weights_have_a_share_of_the_noise() -> None:
    found = Sensitivities(
        {QuantizerId("t"): np.array([0.3, 0.1]), QuantizerId("n", is_node=True): np.array([0.1, 0.0])}
    )
    assert found.share_of_nodes == pytest.approx(0.25)
    assert Sensitivities().share_of_nodes == 0.0


def test_progress_says_how_many_questions_there_are() -> None:
    reported: list[tuple[int, int]] = []
    measure_sensitivities(Board({"t3": 1.0}, rest=1e-5), 2, 1000, lambda done, total: reported.append((done, total)))
    assert reported[0] == (1, 32)
    assert reported[-1] == (64, 64)
    assert all(done <= total for done, total in reported)


def test_where_runs_take_long_fewer_are_made() -> None:
    reported: list[int] = []
    measure_sensitivities(Board({"t3": 1.0}), 2, 1000, lambda done, _: reported.append(done), longest=0.0)
    assert reported == []


@pytest.mark.parametrize(
    ("nsr", "place"),
    [([1.0], 0), ([1.0, 1.0, 1.0], 1), ([1.0, 9.0, 1.0], 1), ([4.0, 5.0, 6.0, 5.0], 3), ([0.0, 0.0], 0)],
)
def test_the_first_look_is_at_a_usual_sample_unless_one_has_most_of_the_noise(nsr: list[float], place: int) -> None:
    assert typical_sample(np.array(nsr)) == place


# Layers of one kind are asked about together, and the noise of nodes is what their quantized values were found to add.

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

    def nsr_by_set(
        self, requested: Iterable[Collection[QuantizerId]], samples: Sequence[int]
    ) -> Iterator[NDArray[np.float64]]:
        return (np.full((len(samples), 1), float(len(quantized))) for quantized in requested)


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
    assert [found.tolist() for found in board.nsr_by_set([given[:2]], [0, 1])] == [[[2.0], [2.0]]]


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
        budget = Budget(search=search, accuracy="off", latency_seconds=0)
        return quantize(model, samples, tmp_path / "q.onnx", goal=goal, budget=budget).report

    plain = quantized(0, "off").agreement.worst_sqnr
    found = quantized(plain, "fast")
    assert found.agreement.worst_sqnr > plain
    weighted = [one for one in found.plan.decisions if one.weights]
    left = {one.node for one in weighted if one.mode is not Mode.STATIC}
    assert 0 < len(left) < len(weighted) == 2 * BLOCKS
    reported = [one.node for one in found.search.sensitivities]
    assert left == set(reported[: len(left)])
    assert all(math.isfinite(one.sqnr) for one in found.search.sensitivities)


def test_the_sensitivity_of_a_model_above_a_gibibyte_is_that_of_a_smaller_one(
    build: Callable[..., ModelProto], monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(0)
    samples = [{"x": random.standard_normal((4, 16)).astype(np.float32)} for _ in range(4)]
    model, budget = blocks(build), Budget(accuracy="off", latency_seconds=0)
    small = sensitivity(model, samples, budget=budget)
    monkeypatch.setattr("onnxq.ir.protos._LARGE_BYTES", 1 << 10)
    large = sensitivity(model, samples, budget=budget)
    assert large.sqnr == pytest.approx(small.sqnr, abs=0.01)
    for one, other in zip(large.tensors, small.tensors, strict=True):
        assert one.tensor == other.tensor
        assert one.sqnr == pytest.approx(other.sqnr, abs=0.01)
    assert [one.node for one in large.nodes] == [one.node for one in small.nodes]
    assert {way.mode for one in large.nodes for way in one.options} == {Mode.STATIC, Mode.STORAGE}
    assert {way.milliseconds for one in large.nodes for way in one.options} == {None}
