"""What follows the canonical form for the integer kernels of a runtime."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import onnx
from onnx import ModelProto

from onnxq.config.scheme import Mode, Scheme
from onnxq.errors import ModelError, SchemeError, did_you_mean
from onnxq.ir import Graph, Origins, all_nodes, as_graph, constants, save
from onnxq.ir.reader import as_proto
from onnxq.numerics.block_encoding import are_finite
from onnxq.onnx_api import infer_shapes
from onnxq.ops import ALREADY_QUANTIZED
from onnxq.passes import GONE, passes_of
from onnxq.passes.activations import JoinHardSwishes, SplitPRelus
from onnxq.passes.casts import WidenFloats
from onnxq.passes.cleanup import (
    DropNoOps,
    MergeEqual,
    NameNodes,
    NameTensors,
    RemoveUnused,
    ShareInitializers,
    UpgradeOpset,
)
from onnxq.passes.constants import FixInitializers, FlushDenormals, FoldConstants, LiftConstants
from onnxq.passes.control_flow import DropInitialStates, InlineFunctions, InlineIfs, LiftInvariants
from onnxq.passes.convolutions import ConvolvePooled, ConvolveTransposed
from onnxq.passes.fold_affine import FoldScalesIntoProducts, FuseBatchNorm
from onnxq.passes.linear import UnfuseProducts
from onnxq.passes.shapes import FoldShapes
from onnxq.passes.transposes import SinkTransposes
from onnxq.planning.plan import DECODING, EXCLUDED, METADATA_KEY, Plan
from onnxq.rewrite import Pass, PassResult, Pipeline, RewriteRule, RewriteRules
from onnxq.runtime.targets import Target


def _has(scheme: Scheme, *modes: Mode) -> bool:
    return any(rule.mode in modes for rule in scheme.rules)


# The passes that follow the canonical form, and when a scheme on a target wants each.
_STEPS: Mapping[Pass, Callable[[Scheme, Target], bool]] = MappingProxyType(
    {
        UnfuseProducts(): lambda scheme, target: target.is_onnxruntime and _has(scheme, *DECODING),
        JoinHardSwishes(): lambda scheme, target: (
            not (_has(scheme, Mode.STATIC) and "HardSigmoid" in target.kernels.fused.ops)
        ),
        SplitPRelus(): lambda _, target: target.is_onnxruntime,
        ConvolvePooled(): lambda scheme, target: _has(scheme, Mode.STATIC) and target.kernels.prefers_convolutions,
        ConvolveTransposed(): lambda scheme, target: _has(scheme, Mode.STATIC) and target.kernels.prefers_convolutions,
    }
)


def integer_steps(scheme: Scheme, target: Target) -> tuple[Pass, ...]:
    """Return the passes that follow the canonical form for the integer kernels of a target."""
    return tuple(step for step, is_wanted in _STEPS.items() if is_wanted(scheme, target))


def steps_named(names: Iterable[str]) -> tuple[Pass, ...]:
    """Return the passes that `integer_steps` has found for an earlier plan.

    Raises:
        SchemeError: a name is none of these.
    """
    known: Mapping[str, Pass] = {type(step).__name__: step for step in _STEPS}
    for name in names:
        if name in GONE:
            raise SchemeError(f"the plan has step {name!r}, which is no longer part of onnxq: {GONE[name]}")
        if name not in known:
            raise SchemeError(
                f"the plan has step {name!r}, expected any of {', '.join(known)}{did_you_mean(name, known)}"
            )
    return tuple(known[name] for name in names)


# From the user's model to the form that plans are made for, and what is refused on the way.

# What is computed from constants may make a model larger by this part of it, or by as much as nobody minds. It saves
# nodes that a runtime computes once.
_GROWTH, _ALWAYS_FINE = 100, 2**16
# Rules end on their own; what folds in one round tells the next one shapes, a few deep in any export seen.
_MOST_ROUNDS = 16


@dataclass(frozen=True)
class PreparationRecord:
    """How a prepared model was made of the user's, as far as what is built of it depends on that.

    Attributes:
        declared: names of the inner tensors whose types the user's model declares; built models declare no others.
        applied: the passes that made it.
        steps: those that follow the canonical form to make it one that integer kernels are known for.
        half: ``TensorProto.DataType`` of 16-bit floats that it has in float32; 0 when it has none.
        content: its digest before a later opset was needed; empty where none was.
        origins: the nodes of the user's model that its nodes stand for, by the names of the latter.
        without: names of `canonical_steps` that were left out.
    """

    declared: frozenset[str] = frozenset()
    applied: tuple[PassResult, ...] = ()
    steps: tuple[Pass, ...] = ()
    half: int = 0
    content: str = ""
    origins: Mapping[str, Origins] = field(default_factory=dict)
    without: frozenset[str] = frozenset()


def prepare(model: str | Path | ModelProto | Any, *, opset: int = 0, widen: bool = False) -> Graph:
    """Bring a float model into the canonical form that plans are made for.

    Inlines functions, converts to ``opset`` when below it, gives all nodes and tensors names of their own, and brings
    the graph into canonical form (see `canonicalise`), so that every export of a network becomes the same.

    Args:
        model: a file, a ModelProto or a GraphSurgeon graph, which stays as it is.
        opset: lowest default-domain opset wanted.
        widen: whether 16-bit floats become float32 inside the model.

    Returns:
        A new graph, with inferred types.

    Raises:
        ModelError: the model cannot be read, converted to ``opset``, or is invalid.

    >>> len(prepare("models/gru.onnx").nodes)
    11
    """
    graph = as_graph(model)
    prepare_in_place(graph, opset=opset, widen=widen)
    return graph


def prepare_in_place(
    graph: Graph, *, opset: int = 0, widen: bool = False, without: frozenset[str] = frozenset()
) -> tuple[PassResult, ...]:
    """Do to a graph what `prepare` does, and return what each pass changed and left.

    Args:
        graph: a float model.
        opset: lowest default-domain opset wanted.
        widen: whether 16-bit floats become float32 inside the model.
        without: names of `canonical_steps` that are left out.
    """
    named = Pipeline(
        (
            FixInitializers(),
            NameNodes(),
            InlineFunctions(),
            UpgradeOpset(opset),
            NameNodes(),
            NameTensors(),
            LiftConstants(),
        )
    ).apply(graph)
    if widen:
        infer_shapes(graph)
        named += Pipeline((WidenFloats(),)).apply(graph)
    return (*named, *canonicalise(graph, without))


def prepare_for_integers(
    graph: Graph,
    steps: tuple[Pass, ...],
    *,
    opset: int = 0,
    widen: bool = False,
    without: frozenset[str] = frozenset(),
) -> tuple[PassResult, ...]:
    """Do what `prepare_in_place` does, and then what `integer_steps` found.

    Args:
        graph: a float model, or one that has been prepared so before, at a lower opset.
        steps: from `integer_steps`.
        opset: lowest default-domain opset wanted of one that has been prepared before; 0 for the first time.
        widen: whether 16-bit floats become float32 inside the model.
        without: names of `canonical_steps` that are left out.
    """
    applied = prepare_in_place(graph, opset=opset, widen=widen, without=without)
    if steps:
        applied = (*applied, *Pipeline(steps).apply(graph))
        infer_shapes(graph)
    return applied


def widens(scheme: Scheme, target: Target) -> bool:
    """Whether 16-bit floats become float32, in which integer kernels give their results."""
    return scheme.multiplies_integers and not target.kernels.half


def canonicalise(graph: Graph, without: frozenset[str] = frozenset()) -> tuple[PassResult, ...]:
    """Bring a graph whose nodes have names and whose constants are initializers into canonical form, in place.

    Passes and rules are repeated, with types inferred anew, until nothing changes: what one folds tells the next one a
    shape.

    Args:
        graph: the graph.
        without: names of `canonical_steps` that are left out.

    Returns:
        What each pass changed and left in the first round, in later ones those that changed something, and what the one
        that is not repeated did.
    """
    rules, stored = _rules(without), _stored(graph)
    most = stored + most_growth(stored)
    applied: list[PassResult] = []
    infer_shapes(graph)
    for _ in range(_MOST_ROUNDS):
        found = _without(_repeated(rules, max(0, most - _stored(graph))), without).apply(graph)
        applied += found if not applied else [one for one in found if one]
        if not any(found):
            break
        infer_shapes(graph)
    return (*applied, *_without((FlushDenormals(),), without).apply(graph))


def _repeated(rules: RewriteRules, growth: int) -> tuple[Pass, ...]:
    return (
        DropNoOps(),
        FoldShapes(),
        FoldConstants(growth=growth),
        InlineIfs(),
        LiftInvariants(),
        ShareInitializers(),
        MergeEqual(),
        DropInitialStates(),
        rules,
        SinkTransposes(),
        FuseBatchNorm(),
        FoldScalesIntoProducts(),
        RemoveUnused(),
    )


def most_growth(stored: int) -> int:
    """Return by how many bytes a model of so many may grow, because what is computed once saves nodes.

    >>> most_growth(1000), most_growth(10**8)
    (65536, 1000000)
    """
    return max(_ALWAYS_FINE, stored // _GROWTH)


def _stored(graph: Graph) -> int:
    return sum(tensor.nbytes for tensor in constants(graph))


def canonical_steps() -> tuple[str, ...]:
    """Return the names of the passes and rules of the canonical form, each of which can be left out."""
    rules = _rules(frozenset())
    steps = (*_repeated(rules, 0), FlushDenormals(), *rules.rules)
    return tuple(type(step).__name__ for step in steps if not isinstance(step, RewriteRules | RemoveUnused))


def counts_of(applied: Iterable[PassResult]) -> dict[str, int]:
    """Return how many changes each of `canonical_steps` made, by its name, the most first; those that made some."""
    found: Counter[str] = Counter()
    for one in applied:
        found.update(one.changes.counts or {type(one.step).__name__: len(one.changes.changed)})
    # Names and initializers are given to every node and constant, which is nothing to report.
    known = set(canonical_steps())
    return {name: count for name, count in found.most_common() if count and name in known}


def _rules(without: frozenset[str]) -> RewriteRules:
    steps = passes_of("canonical")
    return RewriteRules(
        tuple(step() for name, step in steps.items() if issubclass(step, RewriteRule) and name not in without)
    )


def _without(steps: tuple[Pass, ...], names: frozenset[str]) -> Pipeline:
    return Pipeline(tuple(step for step in steps if type(step).__name__ not in names))


def check_float_model(graph: Graph) -> None:
    """Check that a model is one to quantize: it has outputs, holds no quantized operators, and is not of onnxq.

    Raises:
        ModelError: it is not; the message says what it is.
    """
    if not graph.outputs:
        raise ModelError("the model has no outputs, so nothing it computes is kept; export it with one or more")
    if METADATA_KEY in graph.metadata:
        raise ModelError(
            f"the model is quantized already, by onnxq as {graph.metadata[METADATA_KEY]}; quantize the float model"
        )
    for _, node in all_nodes(graph):
        if node.op in ALREADY_QUANTIZED:
            raise ModelError(
                f"the model is quantized already: node {node.name or node.outputs[0].name} is {node.op}; "
                "quantize the float model it was made from"
            )


def check_plan(plan: Plan, graph: Graph) -> None:
    """Check that a plan quantizes anything, and that the weights it quantizes are finite.

    Raises:
        ModelError: it does not, or one is not; the message says why, or which.
    """
    if not any(decision.weights for decision in plan.decisions):
        operators = {decision.reason: decision.op_type for decision in reversed(plan.decisions)}
        reasons = [reason for reason, _ in plan.left_in_float()]
        if EXCLUDED in reasons:
            note = f"{'every node is' if len(reasons) == 1 else 'some nodes are'} excluded"
            reasons = [note, *(reason for reason in reasons if reason != EXCLUDED)]
        texts = [text if (op := operators.get(text, "")) in text else f"{op}: {text}" for text in reasons[:3]]
        raise ModelError(f"there is nothing to quantize in the model: {'; '.join(texts) or 'it has no nodes'}")
    for _, node in all_nodes(graph):
        for weight in plan.by_node[node.name].weights:
            if not are_finite(node.inputs[weight.index].values):
                raise ModelError(
                    f"weight {weight.tensor} of node {node.name} holds NaN or infinity; "
                    "export the model again from sound weights"
                )


def reference_file(graph: Graph, model: str | Path | ModelProto | Any, folder: Path) -> Path:
    """Return the file of a model exactly as the user gave it; what was no file is serialized to a folder once.

    Args:
        graph: the model, read.
        model: the model as it was given.
        folder: for a model that is no file.
    """
    if isinstance(model, str | Path):
        return Path(model)
    path, proto = folder / "reference.onnx", as_proto(model)
    if path.exists():
        return path
    # Only onnxq's writer writes a model above 2 GiB, and says which values nobody can read.
    if proto is None or external_bytes(graph) or proto.ByteSize() >= onnx.checker.MAXIMUM_PROTOBUF:
        save(graph, path)
    else:
        path.write_bytes(proto.SerializeToString())
    return path


def external_bytes(graph: Graph) -> int:
    """Return the size of the values that lie outside the model file."""
    return sum(tensor.nbytes for tensor in constants(graph) if tensor.tensor_data.external)
