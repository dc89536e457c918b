"""The prepared float model on disk, and all that is built from it: plans, statistics and candidate models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from onnxq.algorithms.activation_params import requests_for
from onnxq.algorithms.encode import encode
from onnxq.algorithms.encoders import tied_to_tables
from onnxq.algorithms.encoding_config import EncodingConfig
from onnxq.algorithms.encodings import EncodingCache, Encodings
from onnxq.algorithms.equalization import FLOAT_DATA
from onnxq.calibration.collect import collect
from onnxq.calibration.data import ChainedSamples, Data, SamplesLike, with_optional
from onnxq.calibration.methods import DEFAULT_METHODS, CalibrationMethod
from onnxq.calibration.provenance import model_digest
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.config.scheme import Scheme
from onnxq.data.inputs import SampleSource, model_inputs
from onnxq.data.samples import open_samples
from onnxq.errors import CandidateError, DataError, ModelError, PassError, SchemeError
from onnxq.ir import (
    Graph,
    constants,
    inner_variables,
    load,
    origins_by_name,
    restore_origins,
    save,
    spilling,
    to_model,
    types_to_declare,
)
from onnxq.ir.stored_tensors import is_large
from onnxq.ir.writer import LARGEST_INLINE, LINKED, weight_bytes
from onnxq.lowering import AllowedOps
from onnxq.onnx_api import weightless_model
from onnxq.passes.casts import half_type
from onnxq.passes.preparing.placing import PlanApplier
from onnxq.passes.preparing.preparation import (
    PreparationRecord,
    integer_steps,
    prepare_in_place,
    steps_named,
    widens,
)
from onnxq.passes.quantize.fake_quant_switches import FakeQuantSwitches, InsertFakeQuantSwitches, switches_for
from onnxq.planning.given import check_tensors
from onnxq.planning.obstacles import leave_idle_nodes
from onnxq.planning.plan import Demotion, Plan, Preparation
from onnxq.planning.plan_fit import check_fits, check_model, preparation_of
from onnxq.planning.planner import make_plan
from onnxq.planning.weights import format_opset, needed_opset
from onnxq.runtime.sessions import serialized
from onnxq.runtime.targets import Target
from onnxq.system.resources import Progress, cached_by_mtime, silent
from onnxq.version import VERSION

# If weights take more bytes than this, the weights that preparation computes wait in a file.
_SPILLED_BYTES = 1 << 30
# Each search, each check of statistics and the report ask for the digest.
_digest = cached_by_mtime(model_digest)


@dataclass(frozen=True)
class PreparedModel:
    """A prepared float model in a working folder, with the scheme and target of the user.

    Attributes:
        prepared: file of the prepared model; its weights lie beside it, so loading it again is cheap.
        emit: operators that built models may contain besides standard ONNX.
        fixed: demotions that all plans have, such as for nodes that calibration did not observe.
        stored: demotions of nodes that no plan has other demotions for.
        making: how the prepared model was made.
        encoding_cache: encodings of built models.
        progress: called while the weights of a large model are encoded, and when it is written.
    """

    prepared: Path
    scheme: Scheme
    target: Target
    emit: AllowedOps = AllowedOps.QDQ
    fixed: Mapping[str, Demotion] = field(default_factory=dict)
    stored: Mapping[str, Demotion] = field(default_factory=dict)
    making: PreparationRecord = field(default_factory=PreparationRecord)
    encoding_cache: EncodingCache = field(default_factory=EncodingCache, compare=False)
    progress: Progress = field(default=silent, compare=False)

    @cached_property
    def graph(self) -> Graph:
        """The prepared graph, for reading only."""
        graph = load(self.prepared)
        restore_origins(graph, self.making.origins)
        return graph

    @property
    def placing(self) -> PlanApplier:
        """The writer of quantized graphs."""
        return PlanApplier(self.target, self.emit, self.making.half)

    @cached_property
    def declared_types(self) -> frozenset[str]:
        """Inner tensors whose types built models declare: the user's, and types that runtimes cannot infer."""
        return self.making.declared | types_to_declare(self.graph)

    @cached_property
    def is_large(self) -> bool:
        """True if the weights should stay in their files rather than in memory."""
        return is_large(self.prepared)

    @cached_property
    def digest(self) -> str:
        """Identifies the prepared model, independent of its opset."""
        return self.making.content or _digest(self.prepared)

    @property
    def preparation(self) -> Preparation:
        """The preparation that plans of this model record."""
        steps = tuple(type(step).__name__ for step in self.making.steps)
        without = tuple(sorted(self.making.without))
        return Preparation(self.digest, VERSION, self.graph.opset, steps, self.making.half > 0, without)

    def checked(
        self, statistics: CalibrationStatistics, plan: Plan, methods: Sequence[CalibrationMethod] = DEFAULT_METHODS
    ) -> CalibrationStatistics:
        """Return those of given statistics that a plan and any of these calibration methods need, in their order.

        Raises:
            DataError: if they are of another model, or lack something.
        """
        if statistics.provenance.model not in ("", self.digest):
            raise DataError(
                "The given statistics are of another model, expected those of this one as it is prepared for this "
                "scheme and target; calibrate again"
            )
        needed = []
        for request in requests_for(plan, methods):
            alike = [own for own in statistics.of(request.tensor).statistics if request.like(own)]
            # Without channel means, biases stay as they are.
            if not alike and request.tensor in plan.calibrated and request.kind != "channel-means":
                raise DataError(
                    f"The given statistics lack the {request}, expected what this plan and calibration method need; "
                    "calibrate again with the same scheme and calibration method"
                )
            needed += alike
        return statistics.select(dict.fromkeys(needed))

    def plan(self, demotions: Mapping[str, Demotion]) -> Plan:
        """Return the plan with some nodes demoted; stored weights that are tied to a table get finer specs together."""
        demotions = {**self.stored, **self._tied(demotions), **self.fixed}
        return make_plan(self.graph, self.scheme, self.target, demotions, self.emit)

    def _tied(self, demotions: Mapping[str, Demotion]) -> Mapping[str, Demotion]:
        finer = {
            node: demotion for node, demotion in demotions.items() if demotion.weight is not None and node in self._ties
        }
        beside = {
            tied: replace(demotion, mode=mode)
            for node, demotion in finer.items()
            for tied in self._ties[node]
            if tied not in finer and (mode := demotions.get(tied, self._unsearched.by_node[tied]).mode) in FLOAT_DATA
        }
        return {**demotions, **beside}

    @cached_property
    def _unsearched(self) -> Plan:
        return make_plan(self.graph, self.scheme, self.target, {}, self.emit)

    @cached_property
    def _ties(self) -> Mapping[str, frozenset[str]]:
        """For each node with a weight that is tied to a table, all nodes with these values."""
        uses = tied_to_tables(self.graph, self._unsearched)
        return {node: frozenset(name for name, _ in group) for (node, _), group in uses.items()}

    def without_idle_nodes(self, plan: Plan, statistics: CalibrationStatistics) -> PreparedModel:
        """Return the model with float plans for the nodes that no sample ran."""
        return replace(self, fixed=idle) if (idle := leave_idle_nodes(self.graph, plan, statistics)) else self

    def samples(self, given: SamplesLike, data: Data, *, in_order: bool = False) -> SampleSource:
        """Open samples for the model; chained inputs come from the float model's outputs.

        Set `in_order` if the evaluation relies on the order of the samples.
        """
        inputs = with_optional(model_inputs(weightless_model(self.graph)), data.chained)
        ordered = in_order or bool(data.chained)
        samples = open_samples(
            given,
            inputs,
            images=data.image_options,
            limit=data.limit,
            source=data.source,
            in_order=ordered,
            batch=data.rows,
        )
        return ChainedSamples(samples, self.prepared, data.chained) if data.chained else samples

    def calibrate(
        self,
        plan: Plan,
        samples: SampleSource,
        progress: Progress,
        cluster: Any = None,
        methods: Sequence[CalibrationMethod] = DEFAULT_METHODS,
    ) -> CalibrationStatistics:
        """Run the float model and collect what a plan needs for any of these calibration methods.

        See `onnxq.calibration.collect.collect` for `cluster` and for errors.
        """
        requests, on_progress = requests_for(plan, methods), partial(progress, "calibrate")
        # A large model is not run for channel means alone, because its weights make runs expensive.
        fixed = all(activation.fixed_range is not None for activation in plan.activations)
        if not requests or (self.is_large and fixed):
            return CalibrationStatistics()
        seen = collect(self.prepared, samples, requests, progress=on_progress, cluster=cluster, others=plan.observed)
        return replace(seen, provenance=replace(seen.provenance, model=self.digest))

    def build(
        self, plan: Plan, statistics: CalibrationStatistics, config: EncodingConfig, path: Path, *, external_data: bool
    ) -> Graph:
        """Write the model of a plan and an encoding config to ``path`` and return its graph."""
        with self._sharing():
            return self.write(plan, self.encodings_of(plan, statistics, config), path, external_data=external_data)

    def write(self, plan: Plan, encodings: Encodings, path: Path, *, external_data: bool) -> Graph:
        """Write the model of a plan and its encodings to ``path`` and return its graph."""
        prepared = self.graph_for(plan)
        if self.is_large:
            self.progress("write", 0, 0)
        with _faults_of_candidates():
            graph = self.placing.quantized(prepared, plan, encodings, self.declared_types)
            whole = self.target.takes_bytes and weight_bytes(graph) <= LARGEST_INLINE
            save(graph, path, external_data=external_data and not whole)
        return graph

    def build_switched(
        self,
        plan: Plan,
        statistics: CalibrationStatistics,
        config: EncodingConfig,
        path: Path,
        nodes: Set[str] | None = None,
    ) -> FakeQuantSwitches:
        """Write the prepared model with quantizers behind switches: all of a plan, or those of `nodes`."""
        graph = self.graph_for(plan).copy()
        switches = switches_for(graph, plan, nodes)
        with self._sharing():
            encodings = self.encodings_of(plan, statistics, config)
            # onnxruntime reads no data with hard links in a body. So large weights stay outside; others are read in.
            is_linked = any(path.parent.glob(f"{LINKED}*"))
            shared, folder = is_linked and self.is_large, None if is_linked and not self.is_large else path.parent
            with _faults_of_candidates():
                InsertFakeQuantSwitches(plan, encodings, switches, shared).apply(graph)
                path.write_bytes(serialized(to_model(graph, folder=folder)))
        return switches

    def _sharing(self) -> AbstractContextManager[None]:
        """Keep the encodings of a large model in a file, shared with other models."""
        return spilling(self.prepared.parent, "codes.data") if self.is_large else nullcontext()

    def encodings_of(self, plan: Plan, statistics: CalibrationStatistics, config: EncodingConfig) -> Encodings:
        """Return the encodings of all that a plan quantizes."""
        # The weights of small models are encoded before a bar could be read.
        progress = self.progress if self.is_large else silent
        return encode(plan, self.graph_for(plan), statistics, config, self.encoding_cache, progress)

    def graph_for(self, plan: Plan) -> Graph:
        """Return the prepared graph at an opset that can express a plan, for reading only."""
        return self._read(self._prepared_for(plan))

    def _read(self, path: Path) -> Graph:
        if path != self.prepared and path not in self._later:
            self._later[path] = load(path)
        return self.graph if path == self.prepared else self._later[path]

    @cached_property
    def _later(self) -> dict[Path, Graph]:
        """Prepared models at later opsets."""
        return {}

    def expresses(self, plan: Plan) -> bool:
        """Return whether a plan's model can be built, at the present opset or at a later one."""
        try:
            path = self._prepared_for(plan)
            if path != self.prepared:
                check_fits(plan, self._read(path))
        except (ModelError, SchemeError):
            return False
        return True

    def _prepared_for(self, plan: Plan) -> Path:
        """Return the prepared model at an opset that has a plan's formats, made at its first use."""
        needed = format_opset(plan, self.emit)
        if needed <= self.graph.opset:
            return self.prepared
        path = self.prepared.with_name(f"prepared.{needed}.onnx")
        if not path.exists():
            with _faults_of_candidates():
                graph = load(self.prepared)
                prepare_in_place(graph, self.making.steps, opset=needed, without=self.making.without)
                save(graph, path, external_data=True, linked=True)
        return path


@contextmanager
def _faults_of_candidates() -> Iterator[None]:
    """Raise errors of a candidate as `CandidateError`: users cannot fix them, and a search skips the plan."""
    try:
        yield
    except (ModelError, PassError, DataError) as error:
        raise CandidateError(str(error)) from error


def open_prepared_model(
    graph: Graph,
    scheme: Scheme,
    target: Target,
    folder: Path,
    emit: AllowedOps = AllowedOps.QDQ,
    replay: Plan | None = None,
    without: frozenset[str] = frozenset(),
) -> PreparedModel:
    """Prepare a graph in place and save it, at a later opset only if the plan needs one.

    Args:
        graph: the float model.
        scheme: the user's rules.
        target: the runtime.
        folder: folder of the prepared model.
        emit: operators that may dequantize weights.
        replay: a plan to carry out instead of planning with the scheme.
        without: names of `canonical_steps` to leave out.

    Raises:
        SchemeError: if `replay` is of another model, or of another version of onnxq, or the scheme has encodings of
            tensors that the model lacks.
    """
    check_tensors(scheme.encodings, graph)
    preparation = preparation_of(replay) if replay is not None else None
    declared = frozenset(tensor.name for tensor in inner_variables(graph) if tensor.dtype is not None)
    large = sum(tensor.nbytes for tensor in constants(graph)) > _SPILLED_BYTES
    half = half_type(graph) if (widens(scheme, target) if preparation is None else preparation.widened) else 0
    without = without if preparation is None else frozenset(preparation.without)
    with spilling(folder, "weights.data") if large else nullcontext():
        steps = integer_steps(scheme, target) if preparation is None else steps_named(preparation.steps)
        applied = prepare_in_place(graph, steps, widen=half > 0, without=without)
        making = PreparationRecord(declared, applied, steps, half, origins=origins_by_name(graph), without=without)
        bench = PreparedModel(folder / "prepared.onnx", scheme, target, emit, making=making)
        save(graph, bench.prepared, external_data=True, linked=True)
    needed = needed_opset(bench.plan({}), bench.emit) if preparation is None else preparation.opset
    if needed > graph.opset:
        # Statistics that were collected for other plans stay valid.
        content = _digest(bench.prepared)
        applied = (*applied, *prepare_in_place(graph, steps, opset=needed, without=without))
        save(graph, bench.prepared, external_data=True, linked=True)
        # The graph of the first `PreparedModel` is out of date.
        making = replace(making, applied=applied, content=content, origins=origins_by_name(graph))
        bench = replace(bench, making=making)
    if replay is not None:
        check_fits(replay, bench.graph)
        check_model(replay, bench.digest)
    return bench
