"""Models opened for comparing: by which tensors they are compared, and the same random numbers in both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import onnx

from onnxq.calibration.seeded import SeededSession, draws, put_seeds
from onnxq.calibration.segments import read_without_data
from onnxq.data.inputs import Sample
from onnxq.errors import CandidateError, DataError, EngineError, LoadError, ModelError
from onnxq.evaluation.outputs import (
    Choice,
    DataDependentOutputs,
    NamedChoice,
    OutputPart,
    joins,
    matched,
    paired,
    parts_of,
)
from onnxq.ir import Graph, Variable, onnx_dtype, read_model
from onnxq.ir.elements import canonical_domain
from onnxq.ir.external_data import DataFolder
from onnxq.ir.protos import node_protos
from onnxq.onnx_api import infer_shapes
from onnxq.onnx_api.inlining import check_functions
from onnxq.ops import OPERATORS
from onnxq.runtime.engine import Engine, LoadedModel
from onnxq.runtime.sessions import Session, as_own, open_decoded, open_session, output_names, run, serialized
from onnxq.system.plugins import wrap_plugin_errors
from onnxq.system.resources import available_cores, cached_by_mtime, parallel_map, resident_bytes

# The opset from which on there is a GatherElements.
_GATHER_ELEMENTS = 11
# Bytes that runs of one model may take together; where one takes more, samples run one after the other.
_ROOM = 1 << 27


class RunMemory:
    """How much memory a run of each float model takes, as its first run has shown."""

    def __init__(self) -> None:
        self._taken: dict[Path, int] = {}

    def learn(self, model: Path, run: Callable[[], list[Any]]) -> list[Any]:
        """Run a float model, and see what it takes if nobody has before: its session keeps it for later runs."""
        before = resident_bytes()
        found = run()
        self._taken.setdefault(model.resolve(), resident_bytes() - before)
        return found

    def most_at_once(self, model: Path | None) -> int:
        """Return how many runs of a float model, or of one made from it, fit into memory at once; 0 if nobody knows."""
        taken = self._taken.get(model.resolve()) if model is not None else None
        return 0 if taken is None else min(available_cores(), max(_ROOM // max(taken, 1), 1))


RUN_MEMORY = RunMemory()
"""Of the float models of this process."""


@dataclass(frozen=True, eq=False)
class ComparisonSession:
    """A model that is open for comparing.

    Attributes:
        session: of the model.
        names: of what is compared, as this model calls it, in an order that all views share.
        views: by what models are compared.
        at_once: whether several samples run at once, each on one core, which takes less time than one on all.
        fed: the inputs that take what the float model chose, by what the float model calls it.
        made: its file, unless it is the float model.
    """

    session: Session
    names: tuple[str, ...]
    views: ComparisonSpec
    at_once: bool = False
    fed: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    made: Path | None = None

    def run(self, sample: Sample, index: int | None = None) -> list[Any]:
        """Return the outputs of one sample that are compared; the sample holds the float model's choices."""
        # An output that is kept would keep all memory of its session.
        given = _renamed(sample, self.fed)
        return [as_own(value) for value in run(self.session, given, self.names, index=index, made=self.made)]

    def run_each(self, samples: Iterable[Sample]) -> Iterator[list[Any]]:
        """Yield what is compared of samples, in order."""
        return parallel_map(self.run, samples, self.views.most) if self.at_once else map(self.run, samples)


@dataclass(frozen=True, eq=False)
class EngineComparisonSession:
    """A model that an engine has loaded for comparing.

    Attributes:
        loaded: the model.
        names: of what is compared, see `ComparisonSession`.
        engine: its name, for errors.
        fed: see `ComparisonSession`.
    """

    loaded: LoadedModel
    names: tuple[str, ...]
    engine: str
    fed: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    at_once: ClassVar = False

    def run(self, sample: Sample) -> list[Any]:
        """Return what is compared of one sample; see `View.run`."""
        with wrap_plugin_errors(f"engine {self.engine!r}", EngineError):
            found = dict(zip(self.loaded.outputs, self.loaded.run(_renamed(sample, self.fed)), strict=True))
        return [found[name] for name in self.names]


def _renamed(sample: Sample, fed: Mapping[str, str]) -> Sample:
    return {fed.get(name, name): array for name, array in sample.items()} if fed else sample


class _Seen(NamedTuple):
    """What is seen of a float model at once: its outputs, whether it draws random numbers, or decides by data."""

    outputs: tuple[str, ...]
    random: bool
    may_decide: bool
    parts: Mapping[str, tuple[OutputPart, ...]]


@cached_by_mtime
def _seen(reference: Path) -> _Seen:
    model = _inlined(read_without_data(reference))
    parts = parts_of(_graph(model, reference)) if joins(model.graph) else {}
    return _Seen(tuple(_output_names(model)), draws(model), _may_decide(model), parts)


@dataclass(frozen=True)
class ComparisonSpec:
    """By what models are compared with a float model.

    What the float model chooses by its data, such as the experts of a token or the boxes that are kept, is given to
    each other model: one place that is chosen otherwise would decide all, and outputs could have other shapes. The
    float tensors that are chosen by, such as scores, are compared too. They stand for outputs that are made of choices
    alone, such as labels, and for those whose number of elements depends on the data in another way. Nodes that draw
    random numbers draw the same in each run of each model.

    Attributes:
        outputs: names of the outputs that are compared themselves.
        stand_ins: names of the float model's tensors that outputs are decided by, with the names of these outputs.
        decided: for each output that is not compared itself the tensors that it is decided by.
        choices: of the float model, which are given to other models.
        unseen: names of nodes with weights whose error shows in nothing that is compared.
        random: whether the model draws random numbers.
        parts: that outputs are joined of, by output.
        reference: file of the float model.
    """

    outputs: tuple[str, ...]
    stand_ins: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    decided: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    choices: tuple[NamedChoice, ...] = ()
    unseen: tuple[str, ...] = ()
    random: bool = False
    parts: Mapping[str, tuple[OutputPart, ...]] = field(default_factory=lambda: MappingProxyType({}))
    reference: Path | None = field(default=None, compare=False)

    @classmethod
    def of(cls, reference: Path, candidate: Path) -> ComparisonSpec:
        """Find out by what models are compared.

        Args:
            reference: file of the float model.
            candidate: file of a model made from it, as all that are compared.

        Raises:
            ModelError: The float model's file cannot be read.
            CandidateError: The other file cannot.
        """
        seen = _seen(reference)
        if not seen.may_decide:
            return cls.whole(reference)
        here = DataDependentOutputs(graph := _graph(_inlined(read_without_data(reference)), reference))
        with _failing_as_candidate(candidate != reference):
            proto = _inlined(read_without_data(candidate))
            there = DataDependentOutputs(_graph(proto, candidate))
        taken = _taken(proto, there)
        wanted = [choice.named for choice in here.choices]
        # A choice that rewriting has left nothing of cannot be given.
        while len(pairs := paired(wanted, taken)) < len(wanted):
            here = DataDependentOutputs(graph, {one.name for one in pairs})
            wanted = [choice.named for choice in here.choices]
        entering = {
            output: tuple(tensor.name for tensor in tensors)
            for output, tensors in here.entering.items()
            if matched([tensor.name for tensor in tensors], there.entering.get(output, ())) is not None
        }
        behind = {output: [choice.named for choice in choices] for output, choices in here.chosen.items()}
        scores = {output: tuple(name for one in choices for name in one.scores) for output, choices in behind.items()}
        decided = entering | {output: tuple(dict.fromkeys(scores[output])) for output in here.made_of_choices}
        judges = {output: (*decided.get(output, ()), *scores.get(output, ())) for output in seen.outputs}
        return cls(
            tuple(name for name in seen.outputs if name not in decided),
            {
                one: tuple(output for output, tensors in judges.items() if one in tensors)
                for one in dict.fromkeys(name for tensors in judges.values() for name in tensors)
            },
            decided,
            tuple(one for one in wanted if any(one in choices for choices in behind.values())),
            here.weighted if entering else (),
            seen.random,
            {output: parts for output, parts in seen.parts.items() if output not in decided},
            reference,
        )

    @classmethod
    def whole(cls, reference: Path) -> ComparisonSpec:
        """Return views of all outputs as they are, for which the same random numbers are drawn."""
        seen = _seen(reference)
        return cls(seen.outputs, random=seen.random, parts=seen.parts, reference=reference)

    @property
    def plain(self) -> bool:
        """Whether models are compared as they are."""
        return not self.stand_ins and not self.random and not self.choices

    @property
    def most(self) -> int:
        """How many samples run at once; 0 where nobody knows what a run takes."""
        return RUN_MEMORY.most_at_once(self.reference)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all that is compared, as the float model calls it."""
        return (*self.outputs, *(name for name in self.stand_ins if name not in self.outputs))

    def open_float(self, model: Path, *, at_once: bool = False) -> ComparisonSession:
        """Open the float model, which gives what it chose behind what is compared; see `open`."""
        if self.plain:
            return self.open(model, at_once=at_once)
        proto = self._read(model)
        there = DataDependentOutputs(_graph(proto, model))
        tensors = self._tensors(model, there, choices := paired(self.choices, there.choices))
        kinds = {choice.chosen.name: _kind(choice) for choice in choices.values()}
        _put_outputs(proto, {tensor.name: onnx_dtype(tensor) for tensor in tensors.values()} | kinds)
        names = (*self.names, *(one.name for one in self.choices))
        return self._opened(open_session, proto, ComparisonSession(None, names, self, at_once), model)

    def open(
        self, model: Path, *, optimize: bool = True, mapped: bool | None = None, at_once: bool = False
    ) -> ComparisonSession:
        """Open a model made from the float model: the same, with tensors as outputs, choices as inputs, and seeds.

        Args:
            model: the file.
            optimize: see `open_session`.
            mapped: see `open_session`.
            at_once: whether it is going to run several samples; those of a model that draws random numbers run one by
                one all the same.

        Raises:
            CandidateError: The file cannot be read, has other outputs, or lacks a tensor.
            LoadError: onnxruntime refuses it.
            ModelError: It is the float model, and cannot be read.
        """
        return self._open(partial(open_session, optimize=optimize, mapped=mapped), model, at_once=at_once)

    def open_decoded(self, model: Path, *, at_once: bool = False) -> ComparisonSession:
        """Open a model made from the float model in floats throughout; see `open` and `open_decoded` of the runtime."""
        return self._open(open_decoded, model, at_once=at_once)

    def _open(self, load: Callable[..., Session], model: Path, *, at_once: bool) -> ComparisonSession:
        at_once = at_once and not self.random and self.most != 1
        made = None if model == self.reference else model
        with _failing_as_candidate(made is not None):
            if self.plain:
                session = load(model, threads=1 if at_once else None)
                self._check(output_names(session))
                return ComparisonSession(session, self.names, self, at_once, made=made)
            proto, names, fed = self._widened(model)
            return self._opened(load, proto, ComparisonSession(None, names, self, at_once, fed, made), model)

    def _opened(
        self, load: Callable[..., Session], proto: onnx.ModelProto, view: ComparisonSession, model: Path
    ) -> ComparisonSession:
        at_once = view.at_once and not self.random
        put_seeds(proto)
        make = partial(load, proto, threads=1 if at_once else None, external_folder=model.parent)
        return replace(view, session=SeededSession(make) if self.random else make(), at_once=at_once)

    def open_on(self, engine: Engine, model: Path, folder: Path) -> EngineComparisonSession:
        """Open a model on an engine; see `open`.

        Args:
            engine: what runs the model.
            model: the file.
            folder: where a model with further outputs is put.

        Raises:
            OnnxqError: The engine cannot load it, or it has other outputs.
        """
        widened, names = model, self.names
        fed: Mapping[str, str] = {}
        if is_widened := bool(self.stand_ins or self.choices):
            widened = folder / f"{len(list(folder.iterdir()))}.onnx"
            with _failing_as_candidate(model != self.reference):
                proto, names, fed = self._widened(model)
            onnx.load_external_data_for_model(proto, str(model.parent))
            widened.write_bytes(serialized(proto))
        with wrap_plugin_errors(f"engine {engine.name!r}", EngineError):
            loaded = engine.load(widened)
        if not is_widened:
            with _failing_as_candidate(model != self.reference):
                self._check(loaded.outputs)
        return EngineComparisonSession(loaded, names, engine.name, fed)

    def _widened(self, model: Path) -> tuple[onnx.ModelProto, tuple[str, ...], Mapping[str, str]]:
        """Return a model that takes choices as inputs and gives all that is compared, with the names of both."""
        proto = self._read(model)
        there = DataDependentOutputs(_graph(proto, model))
        choices = paired(self.choices, _taken(proto, there))
        tensors = self._tensors(model, there, choices)
        _take_choices(proto, list(choices.values()))
        _put_outputs(proto, {tensor.name: onnx_dtype(tensor) for tensor in tensors.values()})
        for place, value in reversed(list(enumerate(proto.graph.output))):
            if value.name in self.decided:
                del proto.graph.output[place]
        names = tuple(tensors[name].name if name in tensors else name for name in self.names)
        return proto, names, {one.name: choice.given for one, choice in choices.items()}

    def _read(self, model: Path) -> onnx.ModelProto:
        proto = _inlined(read_without_data(model))
        self._check(_output_names(proto))
        return proto

    def _tensors(
        self, model: Path, there: DataDependentOutputs, choices: Mapping[NamedChoice, Choice]
    ) -> dict[str, Variable]:
        """Return the tensors of a model that stand where those of the float model do, by the latter's names."""
        sought = [(one.name, one.scores, choices[one].scores if one in choices else ()) for one in self.choices]
        known = {name for one in self.choices for name in one.scores}
        counted = ((output, wanted) for output, wanted in self.decided.items() if not known.issuperset(wanted))
        sought += [(output, wanted, there.entering.get(output, ())) for output, wanted in counted]
        found: dict[str, Variable] = {}
        for decided, wanted, entering in sought:
            names, own = matched(wanted, entering), {tensor.name: tensor for tensor in entering}
            if names is None:
                raise DataError(
                    f"{model} cannot be compared: what {decided!r} is decided by is not found in it, expected "
                    f"{', '.join(wanted)}; evaluate with a metric"
                )
            found |= {one: own[other] for one, other in names.items() if one not in self.outputs}
        return found

    def _check(self, outputs: Sequence[str]) -> None:
        expected = {*self.outputs, *self.decided}
        if set(outputs) != expected:
            raise DataError(
                f"the models cannot be compared: the first has outputs {sorted(expected)}, the second {sorted(outputs)}"
            )


@contextmanager
def _failing_as_candidate(is_candidate: bool) -> Iterator[None]:
    """Raise what is wrong with a model that was made from the float model as a fault of that model alone."""
    try:
        yield
    except (ModelError, DataError) as error:
        if not is_candidate or isinstance(error, (CandidateError, LoadError)):
            raise
        raise CandidateError(str(error)) from error


def _taken(model: onnx.ModelProto, found: DataDependentOutputs) -> list[Choice]:
    """Return the choices that a model of its opset can take: GatherElements gives the values of those of a TopK."""
    opset = next((entry.version for entry in model.opset_import if not canonical_domain(entry.domain)), 1)
    return [choice for choice in found.choices if opset >= _GATHER_ELEMENTS or choice.node.op != "TopK"]


def _take_choices(model: onnx.ModelProto, choices: Sequence[Choice]) -> None:
    """Make inputs of what the nodes of a model choose, and leave out the nodes that choose."""
    for choice in choices:
        shape = choice.chosen.shape
        rank = None if shape is None else [None] * len(shape)
        model.graph.input.append(onnx.helper.make_tensor_value_info(choice.given, _kind(choice), rank))
    chosen = {choice.chosen.name: choice for choice in choices}
    nodes = []
    for node in model.graph.node:
        if node.op_type == "Compress" and node.input[1] in chosen:
            node.input[1] = chosen[node.input[1]].given
        made = [chosen[name] for name in node.output if name in chosen and chosen[name].given == name]
        if not made:
            nodes.append(node)
        elif node.op_type == "TopK" and node.output[0]:
            axis = next((one.i for one in node.attribute if one.name == "axis"), -1)
            gathered = [node.input[0], node.output[1]], [node.output[0]]
            nodes.append(onnx.helper.make_node("GatherElements", *gathered, axis=axis))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    given = {choice.given for choice in choices}
    values = [value for value in model.graph.value_info if value.name not in given]
    del model.graph.value_info[:]
    model.graph.value_info.extend(values)


def _kind(choice: Choice) -> int:
    return int(onnx.TensorProto.BOOL if choice.node.op == "Compress" else onnx.TensorProto.INT64)


def _put_outputs(model: onnx.ModelProto, tensors: Mapping[str, int]) -> None:
    """Make tensors outputs of a model, unless they are; they have these element types."""
    outputs = _output_names(model)
    model.graph.output.extend(
        onnx.helper.make_tensor_value_info(name, kind, None) for name, kind in tensors.items() if name not in outputs
    )


def _output_names(model: onnx.ModelProto) -> list[str]:
    return [value.name for value in model.graph.output]


def _may_decide(model: onnx.ModelProto) -> bool:
    """Return whether any operator of a model counts or orders its data, or gives labels of it."""
    rows = (OPERATORS.get((canonical_domain(node.domain), node.op_type)) for node in node_protos(model.graph.node))
    return any(row is not None and (row.data_dependent or row.labels) for row in rows)


def _inlined(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model without functions, so that all nodes can be seen."""
    if not model.functions:
        return model
    check_functions(model)
    return onnx.inliner.inline_local_functions(model)


def _graph(model: onnx.ModelProto, path: Path) -> Graph:
    graph = read_model(_inlined(model), DataFolder.of_model(path))
    infer_shapes(graph)
    return graph
