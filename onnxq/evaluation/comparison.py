"""Sessions that compare models: the same tensors, the same choices and the same random numbers in each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from onnxq.calibration.data import Data, SamplesLike, samples_of
from onnxq.calibration.segments import extract, read_without_data
from onnxq.data.inputs import Sample, SampleSource, model_inputs
from onnxq.errors import CandidateError, DataError, EngineError, LoadError, ModelError, check_path
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
from onnxq.evaluation.seeded import draws, draws_in_functions, put_seeds
from onnxq.ir import Graph, Variable, onnx_dtype, read_model
from onnxq.ir.elements import canonical_domain
from onnxq.ir.external_data import DataFolder
from onnxq.ir.protos import node_protos
from onnxq.ir.stored_tensors import is_large
from onnxq.onnx_api import infer_shapes, inline_proto_functions
from onnxq.ops import OPERATORS
from onnxq.passes.quantize.graph_io import with_float_io
from onnxq.runtime.engine import Engine
from onnxq.runtime.sessions import Session, as_own, open_session, output_names, run, serialized
from onnxq.system.plugins import wrap_plugin_errors
from onnxq.system.resources import available_cores, cached_by_mtime, parallel_map, resident_bytes

# The first opset with GatherElements.
_GATHER_ELEMENTS = 11
# Values between these are rounded, so a choice by them differs from one by the float model's scores.
_CODING = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"})
# Bytes that parallel runs of one model may take together. If one run takes more, samples run one by one.
_ROOM = 1 << 27


# Runs of a large model at a time, as one finds a weight in the cache that the other has read, and bytes of a model
# whose runs need the memory of the machine for themselves.
_LARGE_AT_ONCE, _LARGEST_AT_ONCE = 2, 1 << 33


class RunMemory:
    """The memory that a run of each float model takes, measured on its first run."""

    def __init__(self) -> None:
        self._taken: dict[Path, int] = {}

    def learn(self, model: Path, run: Callable[[], list[Any]]) -> list[Any]:
        """Run a float model, and measure its memory on the first run: the session keeps that memory for later runs."""
        before = resident_bytes()
        result = run()
        self._taken.setdefault(model.resolve(), resident_bytes() - before)
        return result

    def most_at_once(self, model: Path | None) -> int:
        """Return how many runs of a float model, or of one made from it, fit into memory at once; 0 if not measured."""
        if model is not None and is_large(model):
            return 1 if is_large(model, _LARGEST_AT_ONCE) else _LARGE_AT_ONCE
        taken = self._taken.get(model.resolve()) if model is not None else None
        return 0 if taken is None else min(available_cores(), max(_ROOM // max(taken, 1), 1))


RUN_MEMORY = RunMemory()
"""Of the float models of this process."""


def threads_at_once(model: Path) -> int | None:
    """Return the threads of an operator where samples of a float model, or of one made from it, run at once.

    None if they run one after the other, with as many threads as onnxruntime chooses.
    """
    if not is_large(model):
        return 1
    most = RUN_MEMORY.most_at_once(model)
    return None if most == 1 else max(available_cores() // most, 1)


@contextmanager
def open_pair(
    reference: str | Path, candidate: str | Path, data: SamplesLike | Data, *, in_order: bool = False
) -> Iterator[tuple[Path, Path, SampleSource]]:
    """Yield the files of a float model and of a model made from it, with float inputs and outputs, and the samples.

    Args:
        reference: file of the float model.
        candidate: file of the other model. If its inputs and outputs are integers, a temporary copy with floats is
            yielded.
        data: samples that fit the float model, or Data with how they are read.
        in_order: see `samples_of`.

    Raises:
        ModelError: A file cannot be read.
        DataError: The samples do not fit, or an input has another type, as another tool may write it.
    """
    for path in (reference, candidate):
        check_path(path, "the file of a model")
    reference = Path(reference)
    samples = samples_of(reference, data, in_order=in_order)
    types = {entry.name: entry.dtype for entry in model_inputs(read_without_data(reference))}
    with with_float_io(Path(candidate)) as model:
        for entry in model_inputs(read_without_data(model)):
            if entry.dtype != (wanted := types.get(entry.name, entry.dtype)):
                raise DataError(
                    f"{model} takes input {entry.name!r} as {entry.dtype}, expected {wanted} as in {reference}; check "
                    "it with onnxq verify, which brings its own inputs"
                )
        yield reference, model, samples


@dataclass(frozen=True, eq=False)
class DecidingPart:
    """The nodes with which a model chooses by scores; run on the float model's scores, they have to choose as it does.

    Attributes:
        model: these nodes, with the scores as inputs.
        folder: of the external data.
        scores: this model's names of the scores that the part reads, by the float model's names.
        decided: this model's names of the choices and labels, in the order of `ComparisonSpec.checked`.
    """

    model: onnx.ModelProto
    folder: Path
    scores: Mapping[str, str]
    decided: tuple[str, ...]

    def run(self, sample: Sample, scores: Mapping[str, Any]) -> list[Any]:
        """Return the choices and labels that follow from the float model's scores of a sample."""
        fed = {own: scores[name].astype(self._types[own]) for name, own in self.scores.items()}
        fed |= {name: sample[name] for name in self._types if name in sample and name not in fed}
        return [as_own(value) for value in run(self._session, fed, self.decided)]

    @cached_property
    def _session(self) -> Session:
        return open_session(self.model, threads=1, external_folder=self.folder, is_made=True)

    @cached_property
    def _types(self) -> Mapping[str, np.dtype[Any]]:
        types = {value.name: value.type.tensor_type.elem_type for value in self.model.graph.input}
        return {name: np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind)) for name, kind in types.items()}


Execute = Callable[[Sample, int | None], list[Any]]
"""Runs a model on a sample, which has an index for messages, and returns the compared tensors."""


@dataclass(frozen=True, eq=False)
class ComparisonSession:
    """A model that is open for comparing, on onnxruntime in this process or on an engine.

    Attributes:
        names: this model's names of the compared tensors, in the same order for all models.
        at_once: whether several samples run in parallel, see `threads_at_once`. That takes less time than one on all
            cores.
        fed: this model's inputs that take the float model's choices, by the float model's name of the choice.
        deciding: the nodes that choose by scores; None if there are none, or if they cannot run by themselves.
        close: frees what an engine holds.
    """

    execute: Execute
    names: tuple[str, ...]
    views: ComparisonSpec
    at_once: bool = False
    fed: Mapping[str, str] = field(default_factory=dict)
    deciding: DecidingPart | None = None
    close: Callable[[], None] = lambda: None

    def run(self, sample: Sample, index: int | None = None) -> list[Any]:
        """Return the compared outputs of one sample; the sample holds the float model's choices."""
        fed = {self.fed.get(name, name): array for name, array in sample.items()} if self.fed else sample
        return self.execute(fed, index)

    def outputs(self, sample: Sample) -> dict[str, Any]:
        """Return the compared outputs of one sample by name; see `run`."""
        return dict(zip(self.names, self.run(sample), strict=True))

    def run_each(self, samples: Iterable[Sample]) -> Iterator[list[Any]]:
        """Yield the compared outputs of samples, in order."""
        return parallel_map(self.run, samples, self.views.most) if self.at_once else map(self.run, samples)


@dataclass(frozen=True)
class ComparisonSpec:
    """Which tensors of models are compared with a float model, and which choices all models share.

    The float model's data-dependent choices, such as the experts of a token or the boxes that are kept, are inputs of
    each other model. Otherwise one different choice would decide the result, and outputs could have other shapes. The
    float tensors that a choice depends on, such as scores, are compared too. They stand for two kinds of outputs: those
    made of choices alone, such as labels, and those whose number of elements depends on the data in another way. A
    model also has to choose as the float model does when it gets the float model's scores. Nodes that draw random
    numbers draw the same in each run of each model.

    The float model runs as its file is, with tensors of its main graph as further outputs. Choices inside of its
    functions and bodies are each model's own.

    Attributes:
        outputs: the outputs that are compared themselves.
        stand_ins: the float model's tensors that decide outputs, each with these outputs.
        decided: the outputs that are not compared themselves, each with the tensors that decide it.
        choices: of the float model, inputs of the other models.
        labels: outputs that are decided by scores without further arithmetic.
        free_choices: compared outputs behind choices that each model makes for itself.
        unseen: nodes with weights whose quantization error shows in no compared tensor.
        random: whether the model draws random numbers.
        seeds_alike: see `put_seeds`.
        parts: by output, the parts that it is concatenated from.
        reference: file of the float model.
    """

    outputs: tuple[str, ...]
    stand_ins: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    decided: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    choices: tuple[NamedChoice, ...] = ()
    labels: tuple[str, ...] = ()
    free_choices: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    random: bool = False
    seeds_alike: bool = False
    parts: Mapping[str, tuple[OutputPart, ...]] = field(default_factory=dict)
    reference: Path | None = field(default=None, compare=False)

    @classmethod
    def of(cls, reference: Path, candidate: Path) -> ComparisonSpec:
        """Find the tensors to compare.

        Args:
            reference: file of the float model.
            candidate: file of one model made from it; all others must have the same tensors.

        Raises:
            ModelError: The float model's file cannot be read.
            CandidateError: The other file cannot be read.
        """
        whole, may_decide = _whole(reference)
        if not may_decide:
            return whole
        model = read_without_data(reference)
        own = {value.name for value in model.graph.input} | {name for node in model.graph.node for name in node.output}
        with _failing_as_candidate(candidate != reference):
            other = _inlined(read_without_data(candidate))
            there = DataDependentOutputs(_graph(other, candidate))
        here = _sharing_choices(_graph(model, reference), own, _taken(other, there))
        entering: dict[str, tuple[str, ...]] = {}
        for output, tensors in here.entering.items():
            names = tuple(tensor.name for tensor in tensors)
            if own.issuperset(names) and matched(names, there.entering.get(output, ())) is not None:
                entering[output] = names
        behind = {output: [choice.named for choice in choices] for output, choices in here.chosen.items()}
        scores = {
            output: tuple(dict.fromkeys(name for choice in choices for name in choice.scores))
            for output, choices in behind.items()
        }
        decided = entering | {output: scores[output] for output in here.made_of_choices}
        stand_ins: dict[str, dict[str, None]] = {}
        for output in whole.outputs:
            for name in (*decided.get(output, ()), *scores.get(output, ())):
                stand_ins.setdefault(name, {})[output] = None
        used = {choice for choices in behind.values() for choice in choices}
        return replace(
            whole,
            outputs=tuple(name for name in whole.outputs if name not in decided),
            stand_ins={name: tuple(outputs) for name, outputs in stand_ins.items()},
            decided=decided,
            choices=tuple(choice.named for choice in here.choices if choice.named in used),
            labels=tuple(name for name in here.labels if name in decided),
            free_choices=tuple(name for name in here.free_choices if name not in decided),
            unseen=here.weighted if entering else (),
            parts={output: parts for output, parts in whole.parts.items() if output not in decided},
        )

    @classmethod
    def whole(cls, reference: Path) -> ComparisonSpec:
        """Return the spec that compares all outputs as they are, with the same random numbers."""
        return _whole(reference)[0]

    @property
    def plain(self) -> bool:
        """Whether models are compared without added outputs, inputs or seeds."""
        return not self.stand_ins and not self.random and not self.choices

    @property
    def most(self) -> int:
        """How many samples run in parallel; 0 if the memory of a run is not known."""
        return RUN_MEMORY.most_at_once(self.reference)

    @property
    def runs_at_once(self) -> bool:
        """Whether samples may run in parallel: no random number is drawn, and several runs fit into memory."""
        return not self.random and self.most != 1

    @property
    def _threads(self) -> int | None:
        return 1 if self.reference is None else threads_at_once(self.reference)

    @property
    def names(self) -> tuple[str, ...]:
        """The float model's names of all compared tensors."""
        return (*self.outputs, *(name for name in self.stand_ins if name not in self.outputs))

    @property
    def checked(self) -> tuple[str, ...]:
        """The float model's names of the choices and labels that are no compared tensors."""
        decided = dict.fromkeys((*(choice.name for choice in self.choices), *self.labels))
        return tuple(name for name in decided if name not in self.names)

    @property
    def uncompared(self) -> tuple[str, ...]:
        """The outputs that are neither compared nor checked, because their size depends on more than choices."""
        return tuple(name for name in self.decided if name not in self.labels)

    def open_float(self, model: Path) -> ComparisonSession:
        """Open the float model as its file is, with its choices and `checked` as outputs after the compared tensors."""
        if self.plain:
            return self.open(model, at_once=True)
        proto = read_without_data(model)
        self._check(outputs := _output_names(proto))
        names = tuple(dict.fromkeys((*self.names, *(choice.name for choice in self.choices), *self.checked)))
        proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in outputs)
        return self._seeded(open_session, proto, model, names, at_once=self.runs_at_once)

    def open(
        self, model: Path, *, optimize: bool = True, mapped: bool | None = None, at_once: bool = False
    ) -> ComparisonSession:
        """Open a model made from the float model, with compared tensors as outputs, choices as inputs, and seeds.

        `optimize` and `mapped` are as for `open_session`. With `at_once`, samples run in parallel, unless the model
        draws random numbers.

        Raises:
            CandidateError: The file cannot be read, has other outputs, or lacks a tensor.
            LoadError: onnxruntime refuses it.
            ModelError: It is the float model, and cannot be read.
        """
        load, at_once = partial(open_session, optimize=optimize, mapped=mapped), at_once and self.runs_at_once
        with _failing_as_candidate(model != self.reference):
            if self.plain:
                session = load(model, threads=self._threads if at_once else None)
                self._check(output_names(session))
                return self.view(repeat(session), model, at_once=at_once)
            proto, names, fed, deciding = self._widened(model)
            return replace(self._seeded(load, proto, model, names, at_once=at_once), fed=fed, deciding=deciding)

    def view(
        self, sessions: Iterator[Session], model: Path, names: Sequence[str] = (), *, at_once: bool = False
    ) -> ComparisonSession:
        """Return what runs a file in one of `sessions` after the other, with these names of the compared tensors."""
        names, made = tuple(names or self.names), None if model == self.reference else model

        def execute(sample: Sample, index: int | None) -> list[Any]:
            # An output that is not copied keeps all memory of its session.
            return [as_own(value) for value in run(next(sessions), sample, names, index=index, made=made)]

        return ComparisonSession(execute, names, self, at_once)

    def _seeded(
        self,
        load: Callable[..., Session],
        proto: onnx.ModelProto,
        model: Path,
        names: tuple[str, ...],
        *,
        at_once: bool,
    ) -> ComparisonSession:
        put_seeds(proto, alike=self.seeds_alike)
        make = partial(load, proto, threads=self._threads if at_once else None, external_folder=model.parent)
        # A seed only fixes what the first run of a session draws. The first one shows at once whether the model loads.
        spare = [make()]
        sessions = iter(lambda: spare.pop() if spare else make(), None) if self.random else repeat(spare[0])
        return self.view(sessions, model, names, at_once=at_once)

    def open_on(self, engine: Engine, model: Path, folder: Path) -> ComparisonSession:
        """Open a model on an engine; see `open`. A model with added outputs is written to `folder`.

        Raises:
            OnnxqError: The engine cannot load it, or it has other outputs.
        """
        place = f"engine {engine.name!r}"
        widened, names, fed = model, self.names, dict[str, str]()
        if self.stand_ins or self.choices:
            widened = folder / f"{len(list(folder.iterdir()))}.onnx"
            with _failing_as_candidate(model != self.reference):
                proto, names, fed, _ = self._widened(model)
            onnx.load_external_data_for_model(proto, str(model.parent))
            widened.write_bytes(serialized(proto))
        with wrap_plugin_errors(place, EngineError):
            loaded = engine.load(widened)
        if widened == model:
            with _failing_as_candidate(model != self.reference):
                self._check(loaded.outputs)

        def execute(sample: Sample, _: int | None) -> list[Any]:
            with wrap_plugin_errors(place, EngineError):
                values = dict(zip(loaded.outputs, loaded.run(sample), strict=True))
            return [values[name] for name in names]

        return ComparisonSession(execute, names, self, fed=fed, close=loaded.close)

    def _widened(self, model: Path) -> tuple[onnx.ModelProto, tuple[str, ...], dict[str, str], DecidingPart | None]:
        """Return the model with choices as inputs and compared tensors as outputs, the names of both, and what decides.

        Choices inside of functions of a candidate are found once these are inlined.
        """
        proto = _inlined(read_without_data(model))
        self._check(_output_names(proto))
        there = DataDependentOutputs(_graph(proto, model))
        choices = paired(self.choices, _taken(proto, there))
        tensors = self._tensors(model, there, choices)
        deciding = self._deciding(proto, model, tensors, choices)
        tensors = {name: tensor for name, tensor in tensors.items() if name not in self.outputs}
        _take_choices(proto, list(choices.values()))
        outputs = _output_names(proto)
        proto.graph.output.extend(
            onnx.helper.make_tensor_value_info(tensor.name, onnx_dtype(tensor), None)
            for tensor in {tensor.name: tensor for tensor in tensors.values()}.values()
            if tensor.name not in outputs
        )
        for place, value in reversed(list(enumerate(proto.graph.output))):
            if value.name in self.decided:
                del proto.graph.output[place]
        names = tuple(tensors[name].name if name in tensors else name for name in self.names)
        return proto, names, {named.name: choice.given for named, choice in choices.items()}, deciding

    def _deciding(
        self,
        proto: onnx.ModelProto,
        model: Path,
        tensors: Mapping[str, Variable],
        choices: Mapping[NamedChoice, Choice],
    ) -> DecidingPart | None:
        """Return the nodes that choose by scores; None if there are none, or if they quantize values on the way."""
        chosen = {named.name: choice.chosen.name for named, choice in choices.items()}
        decided = tuple(chosen.get(name, name) for name in self.checked)
        part = extract(proto, {tensor.name: onnx_dtype(tensor) for tensor in tensors.values()}, decided)
        if not decided or any(node.op_type in _CODING for node in part.graph.node):
            return None
        inputs = {value.name for value in part.graph.input}
        scores = {name: tensor.name for name, tensor in tensors.items() if tensor.name in inputs}
        return DecidingPart(part, model.parent, scores, decided)

    def _tensors(
        self, model: Path, there: DataDependentOutputs, choices: Mapping[NamedChoice, Choice]
    ) -> dict[str, Variable]:
        """Return the tensors of a model that correspond to the float model's, by the float model's names."""
        twins = [(choice, choices[choice].scores if choice in choices else ()) for choice in self.choices]
        sought = [(choice.name, choice.scores, scores) for choice, scores in twins]
        of_choices = {name for choice in self.choices for name in choice.scores}
        counted = ((output, wanted) for output, wanted in self.decided.items() if not of_choices.issuperset(wanted))
        sought += [(output, wanted, there.entering.get(output, ())) for output, wanted in counted]
        corresponding: dict[str, Variable] = {}
        for decided, wanted, entering in sought:
            names, own = matched(wanted, entering), {tensor.name: tensor for tensor in entering}
            if names is None:
                raise DataError(
                    f"{model} lacks the tensors that decide {decided!r}, expected {', '.join(wanted)}; "
                    "evaluate with a metric"
                )
            corresponding |= {name: own[own_name] for name, own_name in names.items()}
        return corresponding

    def _check(self, outputs: Sequence[str]) -> None:
        expected = {*self.outputs, *self.decided}
        if set(outputs) != expected:
            raise DataError(
                f"the models cannot be compared: the first has outputs {sorted(expected)}, the second {sorted(outputs)}"
            )


@cached_by_mtime
def _whole(reference: Path) -> tuple[ComparisonSpec, bool]:
    """Return the spec that compares all outputs as they are, and whether data may decide any of them."""
    model = read_without_data(reference)
    seeds_alike = draws_in_functions(model)
    model = _inlined(model)
    parts = parts_of(_graph(model, reference)) if joins(model.graph) else {}
    outputs = tuple(_output_names(model))
    spec = ComparisonSpec(outputs, random=draws(model), seeds_alike=seeds_alike, parts=parts, reference=reference)
    return spec, _may_decide(model)


@contextmanager
def _failing_as_candidate(is_candidate: bool) -> Iterator[None]:
    """Raise errors as CandidateError if the model is a candidate."""
    try:
        yield
    except (ModelError, DataError) as error:
        if not is_candidate or isinstance(error, (CandidateError, LoadError)):
            raise
        raise CandidateError(str(error)) from error


def _sharing_choices(graph: Graph, exposed: set[str], taken: Sequence[Choice]) -> DataDependentOutputs:
    """Return the data-dependent outputs of a float model whose choices another model is given where it can be.

    A choice inside of a function cannot be an output, and one that rewriting removed cannot be an input.

    Args:
        graph: of the float model.
        exposed: its tensors that can be outputs.
        taken: the choices that the other model can be given.
    """
    outputs = DataDependentOutputs(graph)
    while True:
        named = [choice.named for choice in outputs.choices]
        shared = paired([choice for choice in named if exposed.issuperset((choice.name, *choice.scores))], taken)
        if len(shared) == len(named):
            return outputs
        outputs = DataDependentOutputs(graph, {choice.name for choice in shared})


def _taken(model: onnx.ModelProto, outputs: DataDependentOutputs) -> list[Choice]:
    """Return the choices that can be inputs in a model's opset: TopK needs GatherElements for its values."""
    opset = next((entry.version for entry in model.opset_import if not canonical_domain(entry.domain)), 1)
    return [choice for choice in outputs.choices if opset >= _GATHER_ELEMENTS or choice.node.op != "TopK"]


def _take_choices(model: onnx.ModelProto, choices: Sequence[Choice]) -> None:
    """Make the choices inputs of a model, and remove the nodes that make them."""
    for choice in choices:
        shape = choice.chosen.shape
        rank = None if shape is None else [None] * len(shape)
        kind = onnx.TensorProto.BOOL if choice.node.op == "Compress" else onnx.TensorProto.INT64
        model.graph.input.append(onnx.helper.make_tensor_value_info(choice.given, kind, rank))
    chosen = {choice.chosen.name: choice for choice in choices}
    nodes = []
    for node in model.graph.node:
        if node.op_type == "Compress" and node.input[1] in chosen:
            node.input[1] = chosen[node.input[1]].given
        chosen_here = [chosen[name] for name in node.output if name in chosen and chosen[name].given == name]
        if not chosen_here:
            nodes.append(node)
        elif node.op_type == "TopK" and node.output[0]:
            axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), -1)
            gathered = [node.input[0], node.output[1]], [node.output[0]]
            nodes.append(onnx.helper.make_node("GatherElements", *gathered, axis=axis))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    inputs = {choice.given for choice in choices}
    values = [value for value in model.graph.value_info if value.name not in inputs]
    del model.graph.value_info[:]
    model.graph.value_info.extend(values)


def _output_names(model: onnx.ModelProto) -> list[str]:
    return [value.name for value in model.graph.output]


def _may_decide(model: onnx.ModelProto) -> bool:
    """Return whether any operator has a data-dependent size or order, or outputs labels."""
    rows = (OPERATORS.get((canonical_domain(node.domain), node.op_type)) for node in node_protos(model.graph.node))
    return any(row is not None and (row.data_dependent or row.labels) for row in rows)


def _inlined(model: onnx.ModelProto) -> onnx.ModelProto:
    return inline_proto_functions(model) if model.functions else model


def _graph(model: onnx.ModelProto, path: Path) -> Graph:
    graph = read_model(_inlined(model), DataFolder.of_model(path))
    infer_shapes(graph)
    return graph
