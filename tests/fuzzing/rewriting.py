"""What onnxq makes of a float model: each pass alone, the canonical form, and the preparation for each target."""

from __future__ import annotations

import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from onnx import ModelProto

from onnxq.config.scheme import Mode, Rule, Scheme
from onnxq.ir import Graph, as_graph, forget_types, inner_variables, to_model, types_to_declare
from onnxq.onnx_api import infer_shapes
from onnxq.passes import PASSES
from onnxq.passes.casts import half_type
from onnxq.passes.cleanup import RemoveUnused
from onnxq.passes.preparing.named_passes import passes_by_name
from onnxq.passes.preparing.preparation import integer_steps, prepare_in_place, widens
from onnxq.passes.quantize.constants import DeduplicateTransposedWeights
from onnxq.rewrite import PassResult, Pipeline, RewriteRules
from onnxq.runtime.targets import target_named

_STATIC = Scheme(rules=(Rule(Mode.STATIC),))


@dataclass
class Rewritten:
    """A rewritten model, how often each pass and rule changed something, and what those said that failed."""

    model: ModelProto
    fired: Counter[str]
    failed: tuple[tuple[str, str], ...] = ()


Rewrite = Callable[[ModelProto, frozenset[str]], Rewritten]
"""Rewrites a model, some passes and rules left out."""


def canonical(model: ModelProto, without: frozenset[str] = frozenset()) -> Rewritten:
    """Return what `onnxq optimize` writes before it compares."""
    graph = as_graph(model)
    declared = {tensor.name for tensor in inner_variables(graph) if tensor.dtype is not None}
    last = (DeduplicateTransposedWeights(smallest=16), RemoveUnused())
    kept = Pipeline(tuple(step for step in last if type(step).__name__ not in without))
    applied = (*prepare_in_place(graph, without=without), *kept.apply(graph))
    return _written(graph, applied, declared)


def prepared(target: str) -> Rewrite:
    """Return what prepares a model for the integer kernels of a target."""

    def rewrite(model: ModelProto, without: frozenset[str] = frozenset()) -> Rewritten:
        graph, row = as_graph(model), target_named(target)
        declared = {tensor.name for tensor in inner_variables(graph) if tensor.dtype is not None}
        widen = widens(_STATIC, row) and half_type(graph) > 0
        applied = prepare_in_place(graph, widen=widen and "WidenFloats" not in without, without=without)
        steps = tuple(step for step in integer_steps(_STATIC, row) if type(step).__name__ not in without)
        if steps:
            applied = (*applied, *Pipeline(steps).apply(graph))
            infer_shapes(graph)
        return _written(graph, applied, declared)

    return rewrite


def alone(name: str, inferred: bool, opset: int = 0) -> Rewrite:
    """Return what applies one pass, with or without types inferred before."""

    def rewrite(model: ModelProto, without: frozenset[str] = frozenset()) -> Rewritten:
        graph = as_graph(model)
        declared = {tensor.name for tensor in inner_variables(graph) if tensor.dtype is not None}
        options = {
            "UpgradeOpset": {"version": opset},
            "DeduplicateTransposedWeights": {"smallest": 16},
        }
        step = PASSES[name](**options.get(name, {}))
        if inferred and name not in _FIRST:
            Pipeline((PASSES["NameNodes"](), PASSES["LiftConstants"]())).apply(graph)
            infer_shapes(graph)
        applied = () if name in without else Pipeline((step,)).apply(graph)
        return _written(graph, applied, declared)

    return rewrite


_FIRST = ("NameNodes", "LiftConstants", "InlineFunctions", "UpgradeOpset", "StripMetadata")
_OF_QUANTIZED = frozenset(name for name, step in PASSES.items() if ".dequantize." in step.__module__)
SINGLE = tuple(name for name in passes_by_name() if name in PASSES and name not in _OF_QUANTIZED | {"FuseBiases"})
"""Passes and rules that change float models and need no plan."""


def _written(graph: Graph, applied: Iterable[PassResult], declared: set[str]) -> Rewritten:
    applied = tuple(applied)
    forget_types(graph, declared | types_to_declare(graph))
    failed = tuple(pair for one in applied for pair in one.changes.failed)
    return Rewritten(to_model(graph), counted(applied), failed)


def counted(applied: Iterable[PassResult]) -> Counter[str]:
    """Return how often each pass and rule changed something."""
    found: Counter[str] = Counter()
    for one in applied:
        name, together = type(one.step).__name__, isinstance(one.step, RewriteRules)
        found.update(one.changes.counts if together else {name: len(one.changes.changed)})
    return +found


def named_in(error: BaseException) -> str:
    """Return the pass or rule in which something was raised."""
    if found := re.search(r"\brule (\w+)", str(error)) or re.search(r"\bpass (\w+)", str(error)):
        return found[1]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if "/passes/" in frame.filename:
            return frame.filename.rsplit("/", 1)[1].removesuffix(".py")
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{last.filename.rsplit('/', 1)[1]}:{last.name}"
