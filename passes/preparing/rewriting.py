"""Apply passes to a model, and write the result if it is valid and, on request, computes the same."""

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
from onnxq.ir import Graph, forget_types, inner_variables, load, save, toposort
from onnxq.ir.declarations import forget_claims
from onnxq.ir.reader import open_model
from onnxq.onnx_api import check_functions, infer_shapes, weightless_model
from onnxq.passes.constants import LiftConstants
from onnxq.passes.preparing.equivalence import ROUNDING, Original, original
from onnxq.passes.preparing.named_passes import Step, as_passes
from onnxq.passes.preparing.preparation import external_bytes, reference_file
from onnxq.rewrite import Pass, PassResult, Pipeline, RewriteRule, RewriteRules
from onnxq.runtime.sessions import open_session
from onnxq.system.publish import publish, staging


@dataclass(frozen=True)
class Verify:
    """How to compare outputs after every pass.

    Attributes:
        data: samples, as for quantize(); None generates inputs of the declared types.
        tolerance: largest difference, as a share of an output's largest value.
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
        applied: the results of the passes.
        differences: after each pass, the largest difference of an output, as a share of its largest value; empty if
            nothing was compared.
        made_up: whether the inputs of the comparison were generated.
    """

    graph: Graph
    applied: tuple[PassResult, ...]
    differences: tuple[float, ...] = ()
    made_up: bool = False

    def to_dict(self) -> dict[str, object]:
        """Return plain values for JSON."""
        return {
            "passes": [result.to_dict() for result in self.applied],
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
    """Apply passes to a model, and write it if onnxruntime loads it.

    Args:
        model: a file, a ModelProto or a GraphSurgeon graph, which stays as it is.
        passes: passes, or texts that name them; see `pass_named`.
        output: file to write; None writes nothing. An existing file is replaced only by a model that loads.
        verify_each: compares outputs after every pass, which finds the first pass that breaks the model or changes its
            outputs; None only loads the result.

    Returns:
        The model, and the result of each pass.

    Raises:
        SchemeError: a text names no pass.
        PassError: a pass fails, makes an invalid model, or changes outputs beyond the tolerance.
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
            applied += _apply(step, graph)
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
    """Apply a user's passes in place to a model before it is quantized; inputs and outputs must keep their names.

    Raises:
        PassError: a pass fails, or changes the names of inputs or outputs.
    """
    applied: list[PassResult] = []
    before = _ports(graph)
    for step in passes:
        applied += _apply(step, graph)
        if (after := _ports(graph)) != before:
            changed = sorted(set(before) ^ set(after)) or ["their order"]
            raise PassError(
                f"pass {type(step).__name__} changes an input or output of the model ({changed[0]}), expected the "
                "given ones; correct the pass, or leave it out"
            )
    return tuple(applied)


def _apply(step: Pass, graph: Graph) -> tuple[PassResult, ...]:
    """Apply a pass to a graph with inferred types. They are forgotten afterwards, because the pass may change them.

    Before a rule, the values of Constant nodes become initializers, because rules match constants.

    Raises:
        PassError: the pass makes a cycle, or a graph that ONNX cannot store.
    """
    if isinstance(step, RewriteRule | RewriteRules):
        LiftConstants().apply(graph)
    declared = _typed(graph)
    infer_shapes(graph)
    inferred = _typed(graph) - declared
    applied = Pipeline((step,)).apply(graph)
    forget_types(graph, _typed(graph) - inferred)
    try:
        toposort(graph)
        weightless_model(graph)
    except ModelError as error:
        raise PassError(f"pass {type(step).__name__} breaks the model: {error}; correct it, or leave it out") from error
    return applied


def _typed(graph: Graph) -> set[str]:
    return {tensor.name for tensor in inner_variables(graph) if tensor.dtype is not None}


class _Check(NamedTuple):
    """The comparison with the original model after every pass."""

    original: Original
    tolerance: float
    was_valid: bool

    @staticmethod
    def of(reference: Path, wanted: Verify) -> _Check:
        reference_outputs = original(reference, wanted.data, images=wanted.images, limit=wanted.limit)
        return _Check(reference_outputs, wanted.tolerance, not _complaint(reference))

    def share(self, step: Pass, graph: Graph, staged: Path) -> float:
        """Write the graph after a pass, and return the largest difference of an output."""
        name = type(step).__name__
        try:
            _save(graph, staged)
            if self.was_valid and (complaint := _complaint(staged)):
                raise PassError(f"pass {name} breaks the model: it is not valid ONNX any more: {complaint}")
            worst = self.original.difference(staged)
        except (DataError, ModelError) as error:
            raise PassError(f"pass {name} breaks the model: {error}") from error
        if not worst.share <= self.tolerance:
            raise PassError(
                f"pass {name} changes output {worst.output!r} by {worst.share:.3g} of its largest value, expected at "
                f"most {self.tolerance:g}; correct it, leave it out, or raise --tolerance"
            )
        return worst.share


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


def _complaint(model: Path) -> str:
    """Return the error of onnx's checker for a model; an empty string if there is none."""
    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError as error:
        return " ".join(str(error).split())
    return ""
