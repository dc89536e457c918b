"""One plan for several machines, whose times are made up."""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from conftest import MODELS, Build
from onnx import ModelProto

from onnxq.calibration.data import Data
from onnxq.config.scheme import Mode
from onnxq.errors import collect_failures
from onnxq.evaluation.goal import Goal
from onnxq.evaluation.latency import NOT_SLOWER, join_speeds
from onnxq.ir import Graph
from onnxq.pipeline.quantization import quantize
from onnxq.pipeline.request import Budget
from onnxq.planning.plan import Demotion, Plan
from onnxq.planning.plan_file import load_plan, save_plan
from onnxq.report import Report, load_report
from onnxq.report.page import to_html
from onnxq.report.report import summary_rows
from onnxq.runtime import engines as table
from onnxq.runtime.engine import LoadedModel, OnnxRuntime
from onnxq.runtime.interleaved_timing import Turn
from onnxq.runtime.kernels import Kernel, loaded_kernels
from onnxq.search.frontier import balance_machines, rebalanced
from onnxq.search.kernel_times import NodeTimes, join_times
from onnxq.search.search import PlanSearch
from search.table_laboratory import NODES, Table, products_of, search, static

CALIB = MODELS / "data" / "calib.npz"


@dataclass
class Machines(Table):
    """A laboratory of several machines, each with a table of its own."""

    tables: tuple[Table, ...] = ()
    prefer: str = "mean"
    shares: Sequence[float] = field(default_factory=tuple)

    @classmethod
    def of(cls, tables: Sequence[Table], prefer: str = "mean") -> Machines:
        first = tables[0]
        return cls(first.graph, first.floats, first.static, first.sensitivities, tables=tuple(tables), prefer=prefer)

    @property
    def machines(self) -> Sequence[Table]:
        return self.tables

    def weighed(self, shares: Sequence[float]) -> Machines:
        return replace(self, shares=shares)

    def times(self, plan: Plan | None) -> NodeTimes:
        floats = [one.times(None).total for one in self.tables]
        shares = self.shares or [1 / len(self.tables)] * len(self.tables)
        return join_times([one.times(plan) for one in self.tables], floats, shares)

    def speeds_by_machine(self, plan: Plan) -> tuple[float, ...]:
        return tuple(one.times(None).total / one.times(plan).total for one in self.tables)

    def join(self, speeds: Sequence[float]) -> float:
        return join_speeds(speeds, self.prefer)

    def speeds(self, plans: Sequence[Plan]) -> list[float]:
        return [self.join(self.speeds_by_machine(plan)) for plan in plans]


def random_machine(graph: Graph, chance: random.Random) -> Table:
    floats = {name: chance.uniform(2e5, 2e6) for name in NODES}
    return Table(graph, floats, {name: time * chance.choice((0.3, 0.6, 0.9, 1.4)) for name, time in floats.items()}, {})


def best_of_all(machines: Machines) -> float:
    """Return the highest joined speed of any choice of integer nodes."""
    stored = Demotion(Mode.STORAGE, "tried")
    choices = itertools.product((False, True), repeat=len(NODES))
    plans = (machines.plan({n: stored for n, out in zip(NODES, left, strict=True) if out}) for left in choices)
    return max(machines.speeds(list(plans)))


@pytest.mark.parametrize("prefer", ["mean", "worst"])
@pytest.mark.parametrize("seed", range(6))
def test_one_plan_is_about_the_best_there_is_for_all_and_nowhere_slower(
    build: Callable[..., ModelProto], seed: int, prefer: str
) -> None:
    chance, graph = random.Random(seed), products_of(build)
    machines = Machines.of([random_machine(graph, chance) for _ in range(3)], prefer)
    found = search(machines)
    speeds = machines.speeds_by_machine(found.plan)
    assert min(speeds) >= NOT_SLOWER
    assert machines.join(speeds) >= 0.95 * best_of_all(machines)


def test_a_fleet_of_one_decides_like_a_single_machine(build: Callable[..., ModelProto]) -> None:
    graph = products_of(build)
    for seed in range(4):
        alone = random_machine(graph, random.Random(seed))

        def decided(found: PlanSearch) -> object:
            return found.plan, [(one.milliseconds, one.sqnr, one.speed) for one in found.frontier]

        assert decided(search(Machines.of([alone]))) == decided(search(alone))


def test_the_slowest_machine_counts_where_it_is_preferred(build: Callable[..., ModelProto]) -> None:
    # The first machine gains much by the first half. The second loses by it, most by c2, and gains by the second half.
    floats, graph = dict.fromkeys(NODES, 1e6), products_of(build)
    gains, losses = dict.fromkeys(NODES[:3], 1e5), dict.fromkeys(NODES[3:], 5e5)
    one = Table(graph, floats, {**floats, **gains}, {})
    other = Table(graph, floats, {"c0": 1.1e6, "c1": 1.2e6, "c2": 1.6e6, **losses}, {})
    mean, worst = (Machines.of([one, other], prefer) for prefer in ("mean", "worst"))
    assert static(search(mean)) == list(NODES)
    assert static(search(worst)) == [name for name in NODES if name != "c2"]


def test_shares_follow_speeds_and_rise_where_a_plan_is_slow() -> None:
    assert rebalanced([0.5, 0.5], [2.0, 2.0], worst=True) == [0.5, 0.5]
    assert rebalanced([0.5, 0.5], [4.0, 1.0], worst=False) == [0.8, 0.2]
    fast, slow = rebalanced([0.5, 0.5], [4.0, 1.0], worst=True)
    assert slow > 0.9 > fast


# The whole way, with engines whose times follow from kernels


class MadeUp(OnnxRuntime):
    """A runtime whose integer kernels take so many times as long as the float kernels, by its name.

    With "whole" behind that, it reports no times of nodes.
    """

    def __init__(self, place: str) -> None:
        self.name, self.version = f"made-up:{place}", f"made-up {place}"
        self.profiles = not place.endswith("whole")
        self.factor = float(place.removesuffix("whole"))
        self.paths: dict[LoadedModel, Path] = {}

    def load(self, model: Path, threads: int | None = None) -> LoadedModel:
        loaded = super().load(model, threads)
        self.paths[loaded] = model
        return loaded

    def profile(self, model: Path, *given: Any) -> tuple[Kernel, ...]:
        return tuple(replace(one, nanoseconds=self.nanoseconds(one.op_type)) for one in loaded_kernels(model))

    def nanoseconds(self, op_type: str) -> float:
        if op_type.startswith("QLinear"):
            return 1e6 * self.factor
        return 1e6 if "Conv" in op_type or "Gemm" in op_type or "MatMul" in op_type else 1e3

    def time(
        self, models: Sequence[LoadedModel], samples: Sequence[Mapping[str, Any]], *given: Any
    ) -> list[list[Turn]]:
        turn = tuple(sum(one.nanoseconds for one in self.profile(self.paths[model])) / 1e9 for model in models)
        return [[turn] for _ in samples]


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Report]:
    monkeypatch.setattr(table, "load_registered", lambda group, name, what: MadeUp if name == "made-up" else None)

    def quantized(*engines: str, **given: Any) -> Report:
        budget = Budget(accuracy="off", latency_seconds=0.1, engine=engines)
        with collect_failures() as failures:
            report = quantize(MODELS / "resnet.onnx", Data(CALIB, limit=8), budget=budget, **given).report
        assert not failures
        return report

    return quantized


def test_the_result_is_verified_timed_and_shown_on_every_machine(fleet: Callable[..., Report], tmp_path: Path) -> None:
    report = fleet("made-up:0.25", "made-up:0.5:threads=1", "made-up:0.5:threads=2", goal=Goal(10.0, prefer="worst"))
    assert report.plan.count(Mode.STATIC)
    names = [f"{one.engine}, {one.threads}" for one in report.performance.latencies]
    assert names[:2] == [f"made-up 0.25, {OnnxRuntime().threads_given}", "made-up 0.5, 1"]
    assert report.latency == min(report.performance.latencies, key=lambda one: one.speed)
    assert [one.engine for one in report.accuracy.on_engines] == ["made-up 0.25", "made-up 0.5", "made-up 0.5"]
    timed = [one.speeds for one in report.search.frontier if one.speeds]
    assert all(one[0] > one[1] for one in timed if one[0] > 1.1)
    assert "of 3 machines" in report.verdict
    rows = [one.text for one in summary_rows(report) if one.name == "latency"]
    assert len(rows) == 3
    for row, latency in zip(rows, report.performance.latencies, strict=True):
        assert latency.engine in row
    assert to_html(report).count("made-up 0.5") >= 2
    report.save(tmp_path / "report.json")
    assert load_report(tmp_path / "report.json").performance.latencies == report.performance.latencies
    assert len(json.loads(report.to_json())["performance"]["latencies"]) == 3


def test_one_plan_for_this_machine_and_one_behind_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # It runs on this machine what it is given for the other one.
    (tmp_path / "ssh").write_text('#!/bin/sh\nexec sh -c "$5"\n', encoding="utf-8")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    budget = Budget(search="off", latency_seconds=0.01, engine=("onnxruntime", f"ssh:board:{sys.executable}:threads=1"))
    report = quantize(MODELS / "resnet.onnx", Data(CALIB, limit=4), budget=budget, goal=Goal(10.0, force=True)).report
    here, there = report.performance.latencies
    assert (there.engine, there.threads) == (f"{here.engine} at board", 1)
    [accuracy] = report.accuracy.on_engines
    assert accuracy.engine == there.engine


def test_a_machine_without_gain_from_integers_is_named_with_what_it_costs(fleet: Callable[..., Report]) -> None:
    report = fleet("made-up:0.25", "made-up:1.5")
    assert not report.plan.decodes
    assert min(one.speed for one in report.performance.latencies) >= NOT_SLOWER
    [row] = [one.text for one in summary_rows(report) if one.name == "held back"]
    assert row.startswith("no plan with integers is as fast as float on made-up 1.5")
    assert row.endswith("times as fast as float instead of 1.00")
    assert not any(one.name == "held back" for one in summary_rows(fleet("made-up:0.25", "made-up:0.5")))


def test_engines_without_times_of_nodes_are_timed_by_whole_models(fleet: Callable[..., Report]) -> None:
    report = fleet("made-up:0.25whole", "made-up:0.5", goal=Goal(10.0))
    assert report.plan.count(Mode.STATIC)
    assert all(len(one.speeds) == 2 for one in report.search.frontier if one.speed and not one.is_float)
    report = fleet("made-up:0.25whole", "made-up:0.5whole")
    assert (report.plan.count(Mode.STATIC) > 0, report.search.frontier) == (True, ())


def test_a_plan_for_several_targets_is_written_read_and_carried_out(tmp_path: Path, build: Build) -> None:
    budget = Budget(search="off", accuracy="off", latency_seconds=0)
    given = MODELS / "resnet.onnx", Data(CALIB, limit=4)
    done = quantize(*given, tmp_path / "one.onnx", target=["onnxruntime-cpu:threads=1", "qnn"], budget=budget)
    assert done.report.plan.target == "onnxruntime-cpu+qnn"
    assert done.report.performance.unmeasured.startswith("qnn: no engine runs qnn")
    save_plan(done.report.plan, tmp_path / "plan.toml")
    quantize(*given, tmp_path / "other.onnx", scheme=load_plan(tmp_path / "plan.toml"), budget=budget)
    assert (tmp_path / "one.onnx").read_bytes() == (tmp_path / "other.onnx").read_bytes()


def test_one_machine_has_all_of_the_costs(build: Callable[..., ModelProto]) -> None:
    alone = random_machine(products_of(build), random.Random(1))
    assert balance_machines("prices", Machines.of([alone]))[0] == "prices"  # type: ignore[arg-type, comparison-overlap]
