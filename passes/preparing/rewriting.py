"""Passes applied to a model, and the result written when it is valid and, where asked, computes the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import onnx
from onnx import ModelProto

from onnxq.data.images import ImageOptions
from onnxq.data.inputs import Sample
from onnxq.errors import DataError, ModelError, PassError
from onnxq.ir import Graph, load, save
from onnxq.ir.declarations import forget_claims
from onnxq.ir.reader import open_model
from onnxq.onnx_api import check_functions, weightless_model
from onnxq.passes.preparing.equivalence import ROUNDING, Original, original
from onnxq.passes.preparing.named_passes import Step, as_passes
from onnxq.passes.preparing.preparation import external_bytes, reference_file
from onnxq.rewrite import Pass, PassResult, Pipeline
from onnxq.runtime.sessions import open_session
from onnxq.system.publish import publish, staging


@dataclass(frozen=True)
class Verify:
    """How outputs are compared after every pass.

    Attributes:
        data: samples, as quantize() takes them; None makes up inputs of the types that the model declares.
        tolerance: share of an output's largest value by which it may differ.
        limit: most samples to use.
        images: how image files become arrays.

    >>> Verify(tolerance=1e-4).limit
    4
    """

    data: str | Path | Iterable[Sample] | None = None
    tolerance: float = ROUNDING
    limit: int = 4
    images: ImageOptions | None = None


@dataclass(frozen=True, eq=False)
class Rewritten:
    """A model after some passes.

    Attributes:
        graph: the model.
        applied: what each pass changed and left.
        differences: how far the worst output was from the original's after each pass, as a share of its largest value;
            empty where nothing was compared.
        made_up: whether the compared outputs are those of made-up inputs.
    """

    graph: Graph
    applied: tuple[PassResult, ...]
    differences: tuple[float, ...] = ()
    made_up: bool = False

    def to_dict(self) -> dict[str, object]:
        """Return plain values for JSON."""
        return {
            "passes": [one.to_dict() for one in self.applied],
            "differences": list(self.differences),
            "made_up": self.made_up,
        }


def run_passes(
    model: str | Path | ModelProto | Any,
    passes: Sequence[Step],
    output: str | Path | None = None,
    *,
    verify_each: Verify | None = None,
) -> Rewritten:
    """Apply passes to a model, and write it when onnxruntime loads it.

    Args:
        model: a file, a ModelProto or a GraphSurgeon graph, which stays as it is.
        passes: passes, or texts that name them; see `pass_named`.
        output: file to write; None writes nothing. An existing file is replaced only by a model that loads.
        verify_each: compares outputs after every pass, and so finds the first that breaks the model or changes what it
            computes; None only loads the result.

    Returns:
        The model, and what each pass did.

    Raises:
        SchemeError: a text names no pass.
        PassError: a pass fails, makes a model that is not valid, or changes outputs beyond the tolerance.
        ModelError: the model cannot be read, a pass refuses it, or onnxruntime does not load the result.
        DataError: the samples do not fit the model.
        OutputError: the output cannot be written.

    >>> len(run_passes("models/gru.onnx", ["FoldConstants"]).graph.nodes)
    18
    """
    steps = as_passes(passes)
    graph, _, output = open_model(model, output)
    if graph.functions:
        # onnxruntime would follow functions that call themselves until the stack ends.
        check_functions(weightless_model(graph))
    forget_claims(graph)
    with staging(output) as folder:
        staged = folder / (output.name if output is not None else "model.onnx")
        check = None if verify_each is None else _Check.of(reference_file(graph, model, folder), verify_each)
        applied: list[PassResult] = []
        differences: list[float] = []
        for step in steps:
            applied += Pipeline((step,)).apply(graph)
            if check is not None:
                differences.append(check.share(step, graph, staged))
        if not differences:
            _save_valid(graph, staged)
        made_up = check is not None and check.original.made_up
        if output is None:
            return Rewritten(graph, tuple(applied), tuple(differences), made_up)
        publish(staged, output)
    return Rewritten(load(output), tuple(applied), tuple(differences), made_up)


def apply_to_float(graph: Graph, passes: Sequence[Pass]) -> tuple[PassResult, ...]:
    """Apply a user's passes to a model that is going to be quantized, in place; its inputs and outputs must stay.

    Raises:
        PassError: a pass fails, or changes the names of inputs or outputs.
    """
    applied: list[PassResult] = []
    before = _ports(graph)
    for step in passes:
        applied += Pipeline((step,)).apply(graph)
        if (after := _ports(graph)) != before:
            changed = sorted(set(before) ^ set(after)) or ["their order"]
            raise PassError(
                f"pass {type(step).__name__} changes an input or output of the model ({changed[0]}), expected the "
                "given ones; correct the pass, or leave it out"
            )
    return tuple(applied)


class _Check(NamedTuple):
    """What a model has to hold to after every pass."""

    original: Original
    tolerance: float
    was_valid: bool

    @staticmethod
    def of(reference: Path, wanted: Verify) -> _Check:
        known = original(reference, wanted.data, images=wanted.images, limit=wanted.limit)
        return _Check(known, wanted.tolerance, _is_valid(reference))

    def share(self, step: Pass, graph: Graph, staged: Path) -> float:
        """Write what a pass has made of the graph, and return how far the worst output is."""
        name = type(step).__name__
        try:
            _save(graph, staged)
            if self.was_valid:
                _check_valid(staged)
            found = self.original.difference(staged)
        except (DataError, ModelError) as error:
            raise PassError(f"pass {name} breaks the model: {error}") from error
        if not found.share <= self.tolerance:
            raise PassError(
                f"pass {name} changes output {found.output!r} by {found.share:.3g} of its largest value, expected at "
                f"most {self.tolerance:g}; correct it, leave it out, or raise the tolerance"
            )
        return found.share


def _save(graph: Graph, path: Path) -> None:
    save(graph, path, external_data=external_bytes(graph) > 0 or None)


def _save_valid(graph: Graph, path: Path) -> None:
    try:
        _save(graph, path)
        open_session(path, optimize=False)
    except ModelError as error:
        raise PassError(f"{error}; verify each pass to learn which one did it, if one did") from error


def _ports(graph: Graph) -> list[str]:
    return [
        *(f"input {tensor.name}" for tensor in graph.inputs),
        *(f"output {tensor.name}" for tensor in graph.outputs),
    ]


def _is_valid(model: Path) -> bool:
    try:
        _check_valid(model)
    except ModelError:
        return False
    return True


def _check_valid(model: Path) -> None:
    """Let onnx's checker look at a model.

    Raises:
        ModelError: it has a complaint.
    """
    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError as error:
        raise ModelError(f"it is not valid ONNX any more: {' '.join(str(error).split())}") from error
