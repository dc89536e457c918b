"""The error that each quantizer adds: measured in one session, shared within groups, scaled to all together."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import MODELS, Build
from numpy.typing import NDArray
from onnx import ModelProto

from onnxq.config.presets import preset_named
from onnxq.config.scheme import Mode
from onnxq.ir import load, read_model
from onnxq.numerics.affine import sqnr_of_ratio
from onnxq.passes.preparing.preparation import prepare
from onnxq.planning.plan import Demotion
from onnxq.runtime.targets import target_named
from onnxq.search.candidate import Workshop
from onnxq.search.prepared_model import open_prepared_model
from onnxq.search.sensitivity import (
    SILENT,
    QuantizerId,
    Sensitivities,
    by_kind_of_layer,
    measure_sensitivities,
    typical_sample,
    worst_output_nsr,
)
from onnxq.system.resources import Deadline, silent
from search.laboratory import minmax

TARGET = target_named("onnxruntime-cpu")

# One session with a switch for each quantizer


def workshop_of(name: str, folder: Path, count: int = 4) -> Workshop:
    path = MODELS / f"{name}.onnx"
    model = open_prepared_model(load(path), preset_named("int8"), TARGET, folder)
    samples = [{"image": one[None]} for one in np.load(MODELS / "data" / "calib.npz")["image"][:count]]
    statistics = model.calibrate(model.plan({}), samples, silent)
    return Workshop.of(model, path, samples, statistics, "model.onnx", count=count)


def test_all_switches_on_make_the_error_of_the_quantized_model_and_none_makes_none(tmp_path: Path) -> None:
    workshop = workshop_of("resnet", tmp_path)
    plan = workshop.model.plan({})
    board = workshop.switched(plan, minmax(workshop))
    assert {one.name for one in board.quantizers if not one.is_node} <= set(plan.by_tensor)
    nothing, everything = board.errors([(), board.quantizers], range(4))
    assert nothing.max() < 1e-9
    candidate = workshop.measured(plan, minmax(workshop))
    assert everything.shape == candidate.nsr.shape
    assert sqnr_of_ratio(worst_output_nsr(everything.sum(0))) == pytest.approx(candidate.sqnr, abs=1.0)


def test_the_switches_of_some_nodes_are_their_own_alone(tmp_path: Path) -> None:
    workshop = workshop_of("resnet", tmp_path)
    plan = workshop.model.plan({})
    node = next(one.node for one in plan.decisions if one.weights)
    assert workshop.switched(plan, minmax(workshop), {node}).quantizers == (QuantizerId(node, is_node=True),)


@pytest.mark.parametrize("name", ["resnet", "mobilenet"])
def test_sums_of_single_errors_predict_the_error_of_plans(name: str, tmp_path: Path) -> None:
    workshop = workshop_of(name, tmp_path)
    full = workshop.model.plan({})
    measured = measure_sensitivities(workshop.switched(full, minmax(workshop)), 1000)
    assert len(measured.alone) == len(measured.ratios)
    generator, misses = np.random.default_rng(0), []
    static = [one.node for one in full.decisions if one.mode is Mode.STATIC and one.weights]
    for share in (0.0, 0.2, 0.5, 0.8):
        plan = workshop.model.plan(
            {node: Demotion(Mode.STORAGE, "why") for node in static if generator.random() < share}
        )
        quantizers = [QuantizerId(one.tensor) for one in plan.activations]
        quantizers += [QuantizerId(one.node, is_node=True) for one in plan.decisions if one.mode is not Mode.FLOAT]
        misses.append(sqnr_of_ratio(measured.of(quantizers)) - workshop.measured(plan, minmax(workshop)).sqnr)
    # One sample stands for all, and errors of neighbours point the same way more or less often.
    assert np.median(np.abs(misses)) < 4


# How errors are measured and shared

UNITS = tuple(QuantizerId(f"t{index}") for index in range(32))


@dataclass
class Board:
    """Answers for quantizers whose errors are given; a second output has half of them.

    Attributes:
        loud: error by tensor; all others have `rest`.
        shares: of the error in each sample.
        joint: factor on the error of all together.
        requested: the number of quantizers of each set that was measured on one sample.
        samples: the samples that single sets were measured on.
    """

    loud: Mapping[str, float] = field(default_factory=dict)
    rest: float = 1e-3
    shares: tuple[float, ...] = (1.0, 1.0)
    joint: float = 1.0
    requested: list[int] = field(default_factory=list)
    samples: set[int] = field(default_factory=set)
    quantizers: tuple[QuantizerId, ...] = UNITS

    @property
    def reference(self) -> Any:
        return SimpleNamespace(given=self.shares)

    def errors(self, sets: Iterable[Collection[QuantizerId]], samples: Sequence[int]) -> Iterator[NDArray[np.float64]]:
        for quantizers in sets:
            if len(samples) == 1 < len(self.shares):
                self.requested.append(len(quantizers))
                self.samples.update(samples)
            total = sum(self.loud.get(one.name, self.rest) for one in quantizers)
            total *= self.joint if len(quantizers) == len(self.quantizers) and len(samples) > 1 else 1.0
            yield np.array([[total, total / 2] for _ in samples]) * np.array([[self.shares[one]] for one in samples])


def measured(board: Board, runs: int, **options: Any) -> Sensitivities:
    return measure_sensitivities(board, runs, **options)  # type: ignore[arg-type]


def test_with_enough_runs_each_quantizer_is_measured_alone() -> None:
    board = Board({"t3": 1.0, "t20": 0.5}, shares=(0.25, 0.75))
    found = measured(board, 32)
    # All together come first, on the sample of median error.
    assert (board.requested, board.samples) == ([32, *[1] * 32], {1})
    assert [found.tensors[name] for name in ("t3", "t20", "t0")] == pytest.approx([1.0, 0.5, 1e-3])
    assert (found.alone, found.nodes) == (set(UNITS), {})
    assert found.joint == pytest.approx([1.53, 0.765])
    assert found.of([UNITS[3], UNITS[20], QuantizerId("unknown")]) == pytest.approx(1.5)


def test_with_fewer_runs_groups_are_measured_and_the_loudest_are_split() -> None:
    board = Board({"t3": 1.0})
    found = measured(board, 16)
    assert board.requested == [32, *[4] * 8, 2, 2, 1, 1, *board.requested[13:]]
    assert len(board.requested) <= 1 + 16
    assert list(found.ratios) == list(UNITS)
    assert max(found.tensors, key=found.tensors.__getitem__) == "t3"
    assert found.tensors["t3"] == pytest.approx(2.0, rel=0.01)
    assert {QuantizerId("t2"), QuantizerId("t3")} <= found.alone
    # The quantizers of a group share its error.
    assert found.tensors["t28"] == found.tensors["t31"] == pytest.approx(2e-3)


@pytest.mark.parametrize("runs", [3, 7, 16, 31])
def test_parts_of_a_group_add_up_to_it_even_where_errors_point_the_same_way(runs: int) -> None:
    class Coherent(Board):
        def errors(self, sets: Iterable[Collection[QuantizerId]], samples: Sequence[int]) -> Iterator[Any]:
            return (np.full((len(samples), 1), len(one) ** 2 / 1024) for one in sets)

    found = measured(Coherent(), runs)
    size = math.ceil(64 / runs)
    groups = [len(UNITS[start : start + size]) for start in range(0, 32, size)]
    assert sum(found.tensors.values()) == pytest.approx(2 * sum(count**2 for count in groups) / 1024)


def test_single_errors_are_scaled_to_the_error_of_all_samples() -> None:
    found = measured(Board({"t3": 1.0}, shares=(1.0, 9.0, 2.0)), 32)
    assert found.tensors["t3"] == pytest.approx(12.0)
    assert measured(Board({"t3": 1.0}, joint=0.5), 32).tensors["t3"] == pytest.approx(1.0)


def test_without_runs_only_all_together_are_measured() -> None:
    board = Board({"t3": 1.0})
    found = measured(board, 0)
    assert (found.ratios, board.requested) == ({}, [])
    assert found.joint == pytest.approx([2 * 1.031, 1.031])


def test_when_time_ran_out_the_rest_shares_what_is_left() -> None:
    board = Board({"t3": 1.0})
    found = measured(board, 16, until=Deadline(0.0))
    assert board.requested == [32, 4]
    assert found.tensors["t0"] == found.tensors["t3"]
    assert len({found.tensors[one.name] for one in UNITS[4:] if not one.is_node}) == 1


def test_errors_that_are_not_finite_are_large_and_can_be_added() -> None:
    class Broken(Board):
        def errors(self, sets: Iterable[Collection[QuantizerId]], samples: Sequence[int]) -> Iterator[Any]:
            for one, ratios in zip(list(sets), super().errors(sets, samples), strict=True):
                yield np.where(UNITS[3] in one, 1e10, ratios)

    found = measured(Broken(), 32)
    assert found.tensors["t3"] == found.of(UNITS) == 1e10
    assert worst_output_nsr(np.array([math.inf, 0.0])) == 1e10


def test_nothing_to_measure_has_no_error() -> None:
    assert measured(Board(quantizers=()), 10) is SILENT
    assert SILENT.of(UNITS) == 0.0


def test_the_worst_output_is_that_of_the_sum() -> None:
    found = Sensitivities({UNITS[0]: np.array([0.5, 0.1]), UNITS[1]: np.array([0.1, 0.6])})
    assert found.of(UNITS) == pytest.approx(0.7)
    assert found.tensors == {"t0": 0.5, "t1": 0.6}


@pytest.mark.parametrize("runs", [8, 16, 32])
def test_progress_ends_where_it_said(runs: int) -> None:
    told: list[tuple[int, int]] = []
    measured(Board({"t3": 1.0}), runs, progress=lambda done, total: told.append((done, total)))
    assert told[0] == (1, runs)
    assert told[-1][0] <= told[-1][1] == runs
    assert [done for done, _ in told] == sorted(done for done, _ in told)


@pytest.mark.parametrize(
    ("nsr", "place"),
    [([1.0], 0), ([1.0, 1.0, 1.0], 1), ([1.0, 9.0, 1.0], 1), ([4.0, 5.0, 6.0, 5.0], 3), ([0.0, 0.0], 0)],
)
def test_the_typical_sample_is_the_median_by_error(nsr: list[float], place: int) -> None:
    assert typical_sample(np.array(nsr)) == place


# Neighbours

BLOCKS = 3


@pytest.fixture
def blocks(build: Build) -> ModelProto:
    """Return blocks of a wide and a narrow product, as decoders have them."""
    lines = [
        f"[wide{n}] a{n} = MatMul({'x' if n == 0 else f'h{n - 1}'}, u{n}) b{n} = Relu(a{n}) "
        f"[narrow{n}] h{n} = MatMul(b{n}, d{n})"
        for n in range(BLOCKS)
    ]
    shapes = {f"u{n}": (16, 32) for n in range(BLOCKS)} | {f"d{n}": (32, 16) for n in range(BLOCKS)}
    text = f"(float[4,16] x) => (float[4,16] y) {{ {' '.join(lines)} y = Tanh(h{BLOCKS - 1}) }}"
    return build(text, **shapes)


def test_in_a_large_model_neighbours_are_layers_of_one_kind(blocks: ModelProto) -> None:
    graph = prepare(read_model(blocks))
    layers = [node for node in graph.nodes if node.op == "MatMul"]
    quantizers = [QuantizerId("x"), *(QuantizerId(node.outputs[0].name) for node in layers)]
    quantizers += [QuantizerId(node.name, is_node=True) for node in layers]
    ordered = [one.name for one in sorted(quantizers, key=by_kind_of_layer(graph))]
    assert ordered[:7] == ["x", "a0", "a1", "a2", "h0", "h1", "h2"]
    assert ordered[7:] == [*(f"wide{n}" for n in range(BLOCKS)), *(f"narrow{n}" for n in range(BLOCKS))]
    # Neighbours share their error.
    board = Board({"wide0": 1.0, "wide2": 0.5}, quantizers=tuple(quantizers))
    assert measured(board, 8, order=by_kind_of_layer(graph)).nodes["wide1"] > 0.1
