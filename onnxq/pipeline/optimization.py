"""Optimizing a float model: the same function in canonical form, never slower, hardly larger, and proven equal."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from onnx import ModelProto

from onnxq.errors import DataError, ModelError, OutputError, SchemeError, did_you_mean
from onnxq.evaluation.latency import NOT_SLOWER, Latency, measure_latency
from onnxq.ir import (
    Graph,
    constants,
    forget_types,
    inner_variables,
    load,
    save,
    types_to_declare,
)
from onnxq.ir.reader import open_model
from onnxq.ir.stored_tensors import is_large
from onnxq.passes.activations import JoinHardSwishes
from onnxq.passes.cleanup import RemoveUnused, StripMetadata
from onnxq.passes.preparing.equivalence import Difference, Original, find_culprits, original
from onnxq.passes.preparing.preparation import canonical_steps, counts_of, external_bytes, most_growth, prepare_in_place
from onnxq.passes.preparing.rewriting import Verify
from onnxq.passes.quantize.constants import DeduplicateTransposedWeights
from onnxq.pipeline.inspection import count_operators
from onnxq.rewrite import PassResult, Pipeline
from onnxq.system.publish import data_file, publish, staging, stored_bytes

# Models of thousands of nodes take seconds to load, in each round anew.
_PATIENCE = 20.0
_JOINS = JoinHardSwishes.__name__


@dataclass(frozen=True)
class Size:
    """The size of a model.

    Attributes:
        operators: number of nodes of each operator but Constant, those in subgraphs included.
        bytes: its file, with its external data.
    """

    operators: Mapping[str, int]
    bytes: int

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return sum(self.operators.values())


@dataclass(frozen=True, eq=False)
class Optimized:
    """An optimized model and how it came about.

    Attributes:
        graph: the model.
        applied: what each pass changed and left.
        before: size of the given model.
        after: size of the optimized one.
        difference: how far its worst output is from the given model's; None where nothing could be compared.
        made_up: whether the compared outputs are those of generated inputs.
        latency: beside the given model; None when it was not asked for.
        left_out: passes and rules that were not applied, each with the reason; ``*`` stands for all of them.

    >>> import onnxq
    >>> onnxq.optimize("models/gru.onnx", latency_seconds=0).after.nodes
    11
    """

    graph: Graph
    applied: tuple[PassResult, ...]
    before: Size
    after: Size
    difference: Difference | None
    made_up: bool
    latency: Latency | None = None
    left_out: tuple[tuple[str, str], ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        """How many changes each pass and rule made, by its name, those that made some."""
        return counts_of(self.applied)

    def to_dict(self) -> dict[str, object]:
        """Return plain values for JSON."""
        return {
            "nodes": [self.before.nodes, self.after.nodes],
            "operators": {"before": dict(self.before.operators), "after": dict(self.after.operators)},
            "bytes": [self.before.bytes, self.after.bytes],
            "speed": self.latency.speed if self.latency else None,
            "speed_interval": list(self.latency.interval) if self.latency and self.latency.is_bounded else None,
            "difference": self.difference.share if self.difference else None,
            "made_up": self.made_up,
            "changes": self.counts,
            "left_out": [list(pair) for pair in self.left_out],
            "passes": [one.to_dict() for one in self.applied],
        }


def optimize(
    model: str | Path | ModelProto | Any,
    output: str | Path | None = None,
    *,
    verify: Verify | None = None,
    without: Collection[str] = (),
    latency_seconds: float = 2.0,
    strip_metadata: bool = False,
    unverified: bool = False,
) -> Optimized:
    """Rewrite a float model into canonical form: what `quantize` prepares, on its own.

    The result is compared with the model as it was given, without optimisations of the runtime. A rule that changes
    outputs beyond the tolerance is left out, and so is one that makes the model slower, or larger by more than 1 % and
    64 KiB.

    Args:
        model: a file, a ModelProto or a GraphSurgeon graph, which stays as it is.
        output: file to write; None writes nothing. An existing file is replaced only by a verified one.
        verify: the samples and the tolerance; by default generated inputs.
        without: names of passes and rules to leave out.
        latency_seconds: time to spend on comparing latency; 0 leaves it out.
        strip_metadata: whether what exporters wrote about nodes and tensors is left out.
        unverified: whether a model that onnxruntime does not run is rewritten all the same, without any comparison.

    Raises:
        ModelError: the model cannot be read, or onnxruntime does not load it.
        DataError: the samples do not fit the model, or it runs none of the generated inputs.
        SchemeError: there is no pass or rule of a name in ``without``.
        OutputError: the output cannot be written.

    >>> optimize("models/gru.onnx", latency_seconds=0).after.nodes
    11
    """
    wanted = verify or Verify()
    _check_names(without)
    graph, source, output = open_model(model, output)
    with staging(output) as folder:
        reference = source or _saved(graph, folder / "original.onnx")
        before = Size(_operators(graph), _content_bytes(reference))
        known = _answers(reference, wanted, unverified=unverified)
        if strip_metadata:
            StripMetadata().apply(graph)
        staged = folder / (output.name if output is not None else "model.onnx")
        most = before.bytes + most_growth(before.bytes)
        evaluator = _Evaluator(reference, known, wanted.tolerance, latency_seconds, most)
        done = _no_worse(graph, evaluator, staged, dict.fromkeys(without, "it was asked for"))
        done = replace(done, before=before)
        if output is None:
            return done
        publish(staged, output)
    return replace(done, graph=load(output))


def _answers(reference: Path, wanted: Verify, *, unverified: bool) -> Original | None:
    try:
        return original(reference, wanted.data, images=wanted.images, limit=wanted.limit)
    except (DataError, ModelError):
        if not unverified:
            raise
    return None


@dataclass(frozen=True, eq=False)
class _Evaluator:
    """Says what is wrong with a rewritten model beside the one that was given.

    Attributes:
        reference: file of the given model.
        known: what it answers; None where it does not run.
        tolerance: share of an output's largest value by which it may differ.
        seconds: for a look at the speed; 0 leaves it out.
        most: bytes that the rewritten model may have.
    """

    reference: Path
    known: Original | None
    tolerance: float
    seconds: float
    most: int

    def fault(self, done: Optimized, staged: Path) -> str:
        """Say what is wrong with a model that was compared and timed; an empty string where nothing is."""
        found, latency = done.difference, done.latency
        if (size := _content_bytes(staged)) > self.most:
            return f"the model would have {size} bytes"
        if found is not None and not found.share <= self.tolerance:
            return f"it changes output {found.output!r} by {found.share:.2g} of its largest value"
        if latency is None or latency.keeps_up or latency.speed >= NOT_SLOWER:
            return ""
        return f"the model would run at {latency.speed:.2f} times the speed"

    def latency(self, staged: Path) -> Latency | None:
        if self.known is None or self.seconds <= 0 or is_large(self.reference) or not self.known.samples:
            return None
        look = partial(measure_latency, self.reference, staged, self.known.samples, patience=_PATIENCE)
        first = look(seconds=self.seconds)
        if first.keeps_up:
            return first
        # Other work on the machine may have made it so.
        return look(seconds=2 * self.seconds, rounds=2 * first.rounds)


def _no_worse(graph: Graph, evaluator: _Evaluator, staged: Path, without: dict[str, str]) -> Optimized:
    """Rewrite and write a copy, without what fails, changes outputs or makes the model slower."""

    def tried(left_out: Mapping[str, str]) -> tuple[Optimized | None, str]:
        try:
            done = _rewritten(graph, evaluator.known, staged, {**without, **left_out})
            if fault := evaluator.fault(done, staged):
                return done, fault
            done = replace(done, latency=evaluator.latency(staged))
        except Exception as error:
            if isinstance(error, MemoryError | OutputError):
                raise
            return None, f"it fails with {type(error).__name__}: {error}"
        return done, evaluator.fault(done, staged)

    done, reason = tried({})
    if done is not None and not reason:
        return done
    names = tuple(done.counts) if done is not None else tuple(name for name in canonical_steps() if name not in without)
    culprits = find_culprits(names, reason, lambda left: tried(dict.fromkeys(left, ""))[1])
    if culprits:
        done, reason = tried(culprits)
        if done is not None and not reason:
            return done
    return _unchanged(graph, staged, evaluator.known, {**without, **culprits}, reason)


def _unchanged(
    graph: Graph, staged: Path, known: Original | None, left_out: Mapping[str, str], reason: str
) -> Optimized:
    done = _rewritten(graph, known, staged, {"*": reason})
    return replace(done, left_out=(*left_out.items(), ("*", reason)))


def _rewritten(graph: Graph, known: Original | None, staged: Path, without: dict[str, str]) -> Optimized:
    """Write a rewritten copy of a graph and compare it."""
    copy = graph.copy()
    declared = {tensor.name for tensor in inner_variables(copy) if tensor.dtype is not None}
    applied: tuple[PassResult, ...] = ()
    if "*" not in without:
        # What is tied stays so: a weight that two nodes read in two orders is stored once.
        joined = () if _JOINS in without else (JoinHardSwishes(),)
        last = Pipeline((*joined, DeduplicateTransposedWeights(), RemoveUnused()))
        applied = (*prepare_in_place(copy, without=frozenset(without)), *last.apply(copy))
    forget_types(copy, declared | types_to_declare(copy))
    _saved(copy, staged)
    after = Size(_operators(copy), stored_bytes(staged, (data_file(staged),)))
    found = known.difference(staged) if known is not None else None
    made_up = known is not None and known.made_up
    return Optimized(copy, applied, after, after, found, made_up, left_out=tuple(without.items()))


def _check_names(names: Collection[str]) -> None:
    steps = (*canonical_steps(), _JOINS)
    if unknown := next((name for name in names if name not in steps), None):
        hint = did_you_mean(unknown, steps) or f"; leave out one of {', '.join(steps)}"
        raise SchemeError(f"no pass or rule that can be left out is named {unknown!r}{hint}")


def _saved(graph: Graph, path: Path) -> Path:
    external = any(tensor.tensor_data.external for tensor in constants(graph))
    save(graph, path, external_data=external or None)
    return path


def _operators(graph: Graph) -> Mapping[str, int]:
    return {name: count for name, count in count_operators(graph).items() if name != "Constant"}


def _content_bytes(path: Path) -> int:
    """Return the bytes of a model and its external tensors, without the padding between these in their file."""
    return stored_bytes(path) + external_bytes(load(path))
