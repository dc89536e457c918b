"""Models opened for comparing: by which tensors they are compared, and the same random numbers in both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import onnx

from onnxq.cores import each_at_once
from onnxq.engines.engine import Engine, LoadedModel
from onnxq.errors import DataError, EngineError
from onnxq.execution.runner import read_without_data
from onnxq.execution.seeded import SeededSession, draws, put_seeds
from onnxq.extensions import blamed
from onnxq.graph import Graph, Variable, onnx_dtype
from onnxq.graph.elements import domain_named
from onnxq.graph.external import DataFolder
from onnxq.judging.decided import Decided, matched
from onnxq.judging.joined import Part, joins, parts_of
from onnxq.modelfile import read_model
from onnxq.onnx_tools import infer_shapes
from onnxq.onnx_tools.functions import all_nodes, check_functions
from onnxq.operators import OPERATORS
from onnxq.remembering import remembered
from onnxq.runtime import Session, open_decoded, open_session, output_names, run, serialized
from onnxq.samples.inputs import Sample


@dataclass(frozen=True, eq=False)
class View:
    """A model that is open for comparing.

    Attributes:
        session: of the model.
        names: of what is compared, as this model calls it, in an order that all views share.
        views: by what models are compared.
        at_once: whether several samples run at once, each on one core, which takes less time than one on all.
    """

    session: Session
    names: tuple[str, ...]
    views: Views
    at_once: bool = False

    def run(self, sample: Sample, index: int | None = None) -> list[Any]:
        """Return what is compared of one sample; see `onnxq.runtime.run`."""
        return run(self.session, sample, self.names, index=index)

    def run_each(self, samples: Iterable[Sample]) -> Iterator[list[Any]]:
        """Yield what is compared of samples, in order."""
        return each_at_once(self.run, samples) if self.at_once else map(self.run, samples)


@dataclass(frozen=True, eq=False)
class EngineView:
    """A model that an engine has loaded for comparing.

    Attributes:
        loaded: the model.
        names: of what is compared, see `View`.
        engine: its name, for errors.
    """

    loaded: LoadedModel
    names: tuple[str, ...]
    engine: str
    at_once: ClassVar = False

    def run(self, sample: Sample) -> list[Any]:
        """Return what is compared of one sample."""
        with blamed(f"engine {self.engine!r}", EngineError):
            found = dict(zip(self.loaded.outputs, self.loaded.run(sample), strict=True))
        return [found[name] for name in self.names]


class _Seen(NamedTuple):
    """What is seen of a float model at once: its outputs, whether it draws random numbers, or decides by data."""

    outputs: tuple[str, ...]
    random: bool
    may_decide: bool
    parts: Mapping[str, tuple[Part, ...]]


@remembered
def _seen(reference: Path) -> _Seen:
    model = _inlined(read_without_data(reference))
    parts = parts_of(_graph(model, reference)) if joins(model.graph) else {}
    return _Seen(tuple(_output_names(model)), draws(model), _may_decide(model), parts)


@dataclass(frozen=True)
class Views:
    """By what models are compared with a float model.

    Outputs whose number or order of elements depends on the data, such as the boxes that a detector keeps, are not
    compared themselves: one box more or less would decide. Nor are labels, of which few samples show little. The float
    tensors stand for them that they are decided by, such as scores. Nodes that draw random numbers draw the same in
    each run of each model.

    Attributes:
        outputs: names of the outputs that are compared themselves.
        stand_ins: names of the float model's tensors that stand for others, with the names of these outputs.
        decided: for each other output the tensors that it is decided by.
        unseen: names of nodes with weights behind those tensors, whose noise does not show.
        random: whether the model draws random numbers.
        parts: that outputs are joined of, by output.
    """

    outputs: tuple[str, ...]
    stand_ins: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    decided: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    unseen: tuple[str, ...] = ()
    random: bool = False
    parts: Mapping[str, tuple[Part, ...]] = field(default_factory=lambda: MappingProxyType({}))

    @classmethod
    def of(cls, reference: Path, candidate: Path) -> Views:
        """Find out by what models are compared.

        Args:
            reference: file of the float model.
            candidate: file of a model made from it, as all that are compared.

        Raises:
            ModelError: A file cannot be read.
        """
        seen = _seen(reference)
        if not seen.may_decide:
            return cls.whole(reference)
        found = Decided(_graph(_inlined(read_without_data(reference)), reference))
        if not found.entering:
            return cls.whole(reference)
        there = Decided(_graph(read_without_data(candidate), candidate)).entering
        decided = {
            output: tuple(tensor.name for tensor in tensors)
            for output, tensors in found.entering.items()
            if matched([tensor.name for tensor in tensors], there.get(output, ())) is not None
        }
        entering = dict.fromkeys(tensor for tensors in decided.values() for tensor in tensors)
        return cls(
            tuple(name for name in seen.outputs if name not in decided),
            {one: tuple(output for output, tensors in decided.items() if one in tensors) for one in entering},
            decided,
            found.weighted if decided else (),
            seen.random,
            {output: parts for output, parts in seen.parts.items() if output not in decided},
        )

    @classmethod
    def whole(cls, reference: Path) -> Views:
        """Return views of all outputs as they are, for which the same random numbers are drawn."""
        seen = _seen(reference)
        return cls(seen.outputs, random=seen.random, parts=seen.parts)

    @property
    def plain(self) -> bool:
        """Whether models are compared as they are."""
        return not self.stand_ins and not self.random

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all that is compared, as the float model calls it."""
        return (*self.outputs, *(name for name in self.stand_ins if name not in self.outputs))

    def open(self, model: Path, *, optimize: bool = True, mapped: bool | None = None, at_once: bool = False) -> View:
        """Open the float model, or one made from it: the same model, with tensors as outputs and with seeds.

        Args:
            model: the file.
            optimize: see `open_session`.
            mapped: see `open_session`.
            at_once: whether it is going to run several samples; those of a model that draws random numbers run one by
                one all the same.

        Raises:
            ModelError: The file cannot be loaded.
            DataError: It has other outputs, or lacks a tensor.
        """
        return self._opened(partial(open_session, optimize=optimize, mapped=mapped), model, at_once=at_once)

    def open_decoded(self, model: Path, *, at_once: bool = False) -> View:
        """Open a model made from the float model in floats throughout; see `open` and `open_decoded` of the runtime."""
        return self._opened(open_decoded, model, at_once=at_once)

    def _opened(self, load: Callable[..., Session], model: Path, *, at_once: bool) -> View:
        at_once = at_once and not self.random
        opened = partial(load, threads=1 if at_once else None)
        if self.plain:
            session = opened(model)
            self._check(output_names(session))
            return View(session, self.names, self, at_once)
        proto, names = self._widened(model)
        put_seeds(proto)
        make = partial(opened, proto, external_folder=model.parent)
        return View(SeededSession(make) if self.random else make(), names, self, at_once)

    def open_on(self, engine: Engine, model: Path, folder: Path) -> EngineView:
        """Open a model on an engine.

        Args:
            engine: what runs it.
            model: the file.
            folder: where a model with further outputs is put.

        Raises:
            OnnxqError: The engine cannot load it, or it has other outputs.
        """
        widened, names = model, self.names
        if self.stand_ins:
            widened = folder / f"{len(list(folder.iterdir()))}.onnx"
            proto, names = self._widened(model)
            onnx.load_external_data_for_model(proto, str(model.parent))
            widened.write_bytes(serialized(proto))
        with blamed(f"engine {engine.name!r}", EngineError):
            loaded = engine.load(widened)
        if not self.stand_ins:
            self._check(loaded.outputs)
        return EngineView(loaded, names, engine.name)

    def _widened(self, model: Path) -> tuple[onnx.ModelProto, tuple[str, ...]]:
        """Return a model with the tensors that stand for outputs as outputs too, and the names of all to compare."""
        proto = _inlined(read_without_data(model))
        outputs = _output_names(proto)
        self._check(outputs)
        tensors = self._tensors(proto, model) if self.stand_ins else {}
        proto.graph.output.extend(
            onnx.helper.make_tensor_value_info(tensor.name, onnx_dtype(tensor), None)
            for tensor in {tensor.name: tensor for tensor in tensors.values()}.values()
            if tensor.name not in outputs
        )
        return proto, tuple(tensors[name].name if name in tensors else name for name in self.names)

    def _check(self, outputs: Sequence[str]) -> None:
        expected = {*self.outputs, *self.decided}
        if set(outputs) != expected:
            raise DataError(
                f"the models cannot be compared: the first has outputs {sorted(expected)}, the second {sorted(outputs)}"
            )

    def _tensors(self, proto: onnx.ModelProto, model: Path) -> dict[str, Variable]:
        """Return the tensors of a model that stand where those of the float model do, by the latter's names."""
        there = Decided(_graph(proto, model)).entering
        found: dict[str, Variable] = {}
        for output, wanted in self.decided.items():
            entering = there.get(output, ())
            names, own = matched(wanted, entering), {tensor.name: tensor for tensor in entering}
            if names is None:
                raise DataError(
                    f"{model} cannot be compared: what output {output!r} is decided by is not found in it, expected "
                    f"{', '.join(wanted)}; judge by a metric"
                )
            found |= {one: own[other] for one, other in names.items() if one not in self.outputs}
        return found


def _output_names(model: onnx.ModelProto) -> list[str]:
    return [value.name for value in model.graph.output]


def _may_decide(model: onnx.ModelProto) -> bool:
    """Return whether any operator of a model counts or orders its data, or gives labels of it."""
    rows = (OPERATORS.get((domain_named(node.domain), node.op_type)) for node in all_nodes(model.graph.node))
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
