"""Searches whose times and errors are read from a table: models are built as usual, but neither run nor timed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
from conftest import Build
from numpy.typing import NDArray

from onnxq.algorithms.encoding_config import EncodingConfig
from onnxq.config.effort import EFFORTS, OFF, AccuracyEffort
from onnxq.config.presets import preset_named
from onnxq.config.scheme import Mode
from onnxq.data.inputs import Sample
from onnxq.evaluation.agreement import Agreement, OutputAgreement
from onnxq.evaluation.goal import Goal
from onnxq.evaluation.latency import Latency
from onnxq.evaluation.metrics import Scores
from onnxq.evaluation.reference import ReferenceOutputs
from onnxq.evaluation.verification import Kernels, Verification, Verifier
from onnxq.ir import as_graph
from onnxq.numerics.affine import sqnr_of_ratio
from onnxq.numerics.formats import format_named
from onnxq.planning.plan import Decision, Plan
from onnxq.runtime.engine import Engine, LoadedModel
from onnxq.runtime.interleaved_timing import Turn
from onnxq.runtime.kernels import Kernel
from onnxq.runtime.targets import target_named
from onnxq.search.candidate import Candidate, Recipe, Workshop
from onnxq.search.prepared_model import PreparedModel, open_prepared_model
from onnxq.search.results import SearchResult
from onnxq.search.search import Search
from onnxq.search.sensitivity import QuantizerId, SwitchedSession
from onnxq.search.times import MeasuredTimes
from onnxq.system.resources import NEVER, Deadline, silent

NODES = ("c0", "c1", "c2", "c3", "c4", "c5")
BORDER = 10_000.0
WIDTH = 64


@dataclass(eq=False)
class Table:
    """Nanoseconds and noise-to-signal ratios of a chain of layers, called after `NODES`.

    Attributes:
        op: operator of the layers. A static Conv passes quantized values on, and a static MatMul makes floats.
        floats: nanoseconds of each node in float.
        static: of each static node.
        dynamic: of each dynamic node; empty where they take as long as float.
        reads: ratio that quantizing the tensor adds that a static node reads.
        weights: ratio that 8-bit weights add.
        scales: ratio that dynamic scales add.
        joint: factor on the error of all candidates, which single quantizers do not show.
        unseen: factor on the error on the holdout.
        slower: factor on the times of models with integers when they are raced and judged.
        plans: the plan of each model that was built.
        profiled: the models that were profiled.
    """

    op: str = "Conv"
    floats: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(NODES, 9e5))
    static: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(NODES, 3e5))
    dynamic: Mapping[str, float] = field(default_factory=dict)
    reads: Mapping[str, float] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    scales: Mapping[str, float] = field(default_factory=dict)
    joint: float = 1.0
    unseen: float = 1.0
    slower: float = 1.0
    plans: dict[Path, Plan] = field(default_factory=dict)
    profiled: list[Path] = field(default_factory=list)

    def own(self, decision: Decision) -> float:
        """Return the ratio of a node's own quantizers."""
        if not decision.weights or decision.mode is Mode.FLOAT:
            return 0.0
        bits = format_named(decision.weights[0].spec.format).bits
        scales = self.scales.get(decision.node, 0.0) if decision.mode is Mode.DYNAMIC else 0.0
        return self.weights.get(decision.node, 0.0) * 4.0 ** (8 - bits) + scales

    def tensor(self, name: str) -> float:
        """Return the ratio of a quantized tensor, called after the node that reads it."""
        return self.reads.get(name.replace("t", "c"), 0.0)

    def error(self, plan: Plan) -> float:
        """Return the ratio of a whole plan."""
        ratio = sum(map(self.own, plan.decisions)) + sum(self.tensor(one.tensor) for one in plan.activations)
        return 1e-9 + self.joint * ratio

    def node_time(self, decision: Decision) -> float:
        times = {Mode.STATIC: self.static, Mode.DYNAMIC: self.dynamic}.get(decision.mode, {})
        return times.get(decision.node, self.floats[decision.node])

    def borders(self, plan: Plan) -> Iterator[str]:
        """Yield the tensors at which integers begin or end; those of products count in their nodes."""
        static = [plan.by_node[name].mode is Mode.STATIC and self.op == "Conv" for name in NODES]
        for index, name in enumerate(NODES):
            if static[index] and not (index and static[index - 1]):
                yield name.replace("c", "t")
            if static[index] and not (index + 1 < len(NODES) and static[index + 1]):
                yield f"t{index + 1}"

    def seconds(self, path: Path) -> float:
        """Return the seconds of a run of a model."""
        plan = self.plans.get(path)
        if plan is None:
            return sum(self.floats.values()) / 1e9
        nanoseconds = sum(map(self.node_time, plan.decisions)) + BORDER * len(list(self.borders(plan)))
        return nanoseconds * (self.slower if plan.decodes else 1.0) / 1e9

    def kernels(self, path: Path) -> tuple[Kernel, ...]:
        """Return the profile of a model."""
        self.profiled.append(path)
        plan = self.plans.get(path)
        times = self.floats if plan is None else {one.node: self.node_time(one) for one in plan.decisions}
        nodes = [
            Kernel(name, self.op, (f"t{index}",), (f"t{index + 1}",), times[name], 100.0)
            for index, name in enumerate(NODES)
        ]
        borders = () if plan is None else self.borders(plan)
        return (*nodes, *(Kernel(f"{name}_q", "QuantizeLinear", (), (), BORDER, 100.0) for name in borders))


@dataclass(frozen=True, eq=False)
class TabledWorkshop(Workshop):
    """A workshop whose candidates have the errors of a table."""

    table: Table = field(default_factory=Table)

    def built(self, plan: Plan, recipe: Recipe, *, runs: bool = False) -> Candidate:
        candidate = super().built(plan, recipe, runs=runs)
        self.table.plans[candidate.path] = plan
        return candidate

    def _errors(self, plan: Plan, path: Path) -> tuple[float, NDArray[np.float64]]:
        ratio, count = self.table.error(plan), len(self.reference.samples)
        return sqnr_of_ratio(ratio), np.full((count, 1), ratio / count)

    def switched(self, plan: Plan, recipe: Recipe, nodes: Set[str] | None = None) -> SwitchedSession:
        return cast(SwitchedSession, TabledBoard(self.table, plan, nodes, self.reference))


@dataclass(frozen=True, eq=False)
class TabledBoard:
    """A switched session that answers from a table."""

    table: Table
    plan: Plan
    nodes: Set[str] | None
    reference: ReferenceOutputs

    @property
    def quantizers(self) -> tuple[QuantizerId, ...]:
        tensors = [QuantizerId(one.tensor) for one in self.plan.activations] if self.nodes is None else []
        named = [one.node for one in self.plan.decisions if self.nodes is None or one.node in self.nodes]
        return (*tensors, *(QuantizerId(name, is_node=True) for name in named))

    def errors(self, sets: Iterable[Collection[QuantizerId]], samples: Sequence[int]) -> Iterator[NDArray[np.float64]]:
        for quantizers in sets:
            ratio = sum(
                self.table.own(self.plan.by_node[one.name]) if one.is_node else self.table.tensor(one.name)
                for one in quantizers
            )
            yield np.full((len(samples), 1), ratio / len(samples))


@dataclass(frozen=True, eq=False)
class TabledModel(LoadedModel):
    """A model that is never run."""

    path: Path
    outputs: tuple[str, ...] = ("y",)

    def run(self, sample: Mapping[str, Any]) -> list[Any]:
        raise AssertionError("times are given")


@dataclass(eq=False)
class TabledEngine(Engine):
    """An engine with the times of a table."""

    table: Table
    profiles: bool = True
    name: str = "table"
    version: str = "table 1"

    def load(self, model: Path, threads: int | None = None) -> LoadedModel:
        return TabledModel(model)

    def time(
        self,
        models: Sequence[LoadedModel],
        samples: Sequence[Mapping[str, Any]],
        seconds: float,
        turn: int = 0,
        enough: int | None = None,
    ) -> list[list[Turn]]:
        turns = tuple(self.table.seconds(model.path) for model in models if isinstance(model, TabledModel))
        return [[turns] for _ in samples]

    def profile(
        self, model: Path, samples: Sequence[Mapping[str, Any]], folder: Path, repeats: int
    ) -> tuple[Kernel, ...]:
        return self.table.kernels(model)


@dataclass(frozen=True, eq=False)
class TabledVerifier(Verifier):
    """A verifier that judges by a table.

    Attributes:
        drop: the metric's drop by SQNR in decibels; None without a metric.
        judged: the plans that were judged, in order.
        looks: at the holdout that each counted as.
    """

    table: Table = field(default_factory=Table)
    drop: Callable[[float], float] | None = None
    judged: list[Plan] = field(default_factory=list)
    looks: list[int] = field(default_factory=list)

    def verified(self, candidate: Path, look: int, known: Sequence[Latency | None] = ()) -> Verification:
        plan, speed = self.table.plans[candidate], self.table.seconds(self.reference) / self.table.seconds(candidate)
        self.judged.append(plan)
        self.looks.append(look)
        sqnr = sqnr_of_ratio(self.table.unseen * self.table.error(plan))
        output = OutputAgreement("y", sqnr, None, 0.0, same_shapes=True, finite=True, compared=1, bound=sqnr)
        latency = Latency(speed, 1.0, 1, 10, 6, (speed - 0.01, speed + 0.01))
        integers = sum(one.mode in (Mode.STATIC, Mode.DYNAMIC) for one in plan.decisions)
        kernels = Kernels(integers, 0, 0, integers)
        return Verification(Agreement(8, (output,)), kernels, latency if self.seconds else None)

    def scores(self, candidate: Path, look: int) -> Scores | None:
        if self.drop is None:
            return None
        sqnr = sqnr_of_ratio(self.table.unseen * self.table.error(self.table.plans[candidate]))
        return Scores("top1", 1.0, 1.0 - self.drop(sqnr), self.drop(sqnr), 0.0)


SHAPES = {"Conv": (1, WIDTH, 1, 1), "MatMul": (1, WIDTH)}


@dataclass(frozen=True)
class Laboratory:
    """Opens searches for the chain of layers in a folder of its own."""

    folder: Path
    build: Build

    def model(self, op: str, scheme: str) -> PreparedModel:
        """Return the prepared chain."""
        nodes = " ".join(f"[{name}] t{index + 1} = {op}(t{index}, w{index})" for index, name in enumerate(NODES))
        kind = f"float[{','.join(map(str, SHAPES[op]))}]"
        weights = {f"w{index}": (WIDTH, *SHAPES[op][1:]) for index in range(len(NODES))}
        graph = as_graph(self.build(f"({kind} t0) => ({kind} t{len(NODES)}) {{ {nodes} }}", **weights))
        folder = self.folder / f"run{len(list(self.folder.iterdir()))}"
        folder.mkdir()
        return open_prepared_model(graph, preset_named(scheme), target_named("onnxruntime-cpu"), folder)

    def search(
        self,
        table: Table,
        goal: float | Goal = 20.0,
        *,
        scheme: str = "int8",
        search: str = "fast",
        accuracy: AccuracyEffort = OFF,
        times: MeasuredTimes | None = None,
        deadline: Deadline = NEVER,
        profiles: bool = True,
        seconds: float = 1.0,
        holdout: bool = True,
        drop: Callable[[float], float] | None = None,
    ) -> Search:
        """Return a search for the plan of a table; see `Search`, `TabledVerifier` and `TabledEngine`."""
        model = self.model(table.op, scheme)
        samples: list[Sample] = [{"t0": np.full(SHAPES[table.op], value, np.float32)} for value in range(1, 9)]
        statistics = model.calibrate(model.plan({}), samples, silent)
        # Without a search nothing is compared with the float model.
        compared = tuple(samples) if EFFORTS[search] or accuracy.methods else ()
        count = len(compared)
        reference = ReferenceOutputs(compared, compared, cast(Any, None), ((),) * count, 1e-3, tuple(range(count)))
        verifier = TabledVerifier(
            model.prepared,
            samples[:4] if holdout else samples,
            seconds,
            engine=TabledEngine(table, profiles),
            table=table,
            drop=drop,
        )
        workshop = TabledWorkshop(model, reference, statistics, "model.onnx", table=table)
        return Search(
            workshop,
            samples,
            Recipe(EncodingConfig(), statistics),
            verifier,
            model.prepared,
            Goal.of(goal),
            EFFORTS[search],
            accuracy,
            times or MeasuredTimes(),
            deadline,
        )


def minmax(workshop: Workshop) -> Recipe:
    """Return the recipe from minimum to maximum."""
    return Recipe(EncodingConfig(), workshop.statistics)


def modes(result: SearchResult) -> dict[str, Mode]:
    """Return the mode of each node."""
    return {one.node: one.mode for one in result.candidate.plan.decisions}


def static(result: SearchResult) -> str:
    """Return the numbers of the static nodes."""
    return "".join(name[1:] for name, mode in modes(result).items() if mode is Mode.STATIC)


def bits(result: SearchResult) -> str:
    """Return the bits of each node's weights, with a dash for floats."""
    formats = [one.weights[0].spec.format if one.weights else "" for one in result.candidate.plan.decisions]
    return " ".join(str(format_named(one).bits) if one else "-" for one in formats)
