"""Prepare a float model for plans: its canonical form, the steps for integer kernels, and checks of model and plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
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


# The passes that follow the canonical form, and whether a scheme on a target wants each.
_STEPS: Mapping[Pass, Callable[[Scheme, Target], bool]] = {
    UnfuseProducts(): lambda scheme, target: target.is_onnxruntime and _has(scheme, *DECODING),
    JoinHardSwishes(): lambda scheme, target: (
        not (_has(scheme, Mode.STATIC) and "HardSigmoid" in target.kernels.fused.ops)
    ),
    SplitPRelus(): lambda _, target: target.is_onnxruntime,
    ConvolvePooled(): lambda scheme, target: _has(scheme, Mode.STATIC) and target.kernels.prefers_convolutions,
    ConvolveTransposed(): lambda scheme, target: _has(scheme, Mode.STATIC) and target.kernels.prefers_convolutions,
}


def integer_steps(scheme: Scheme, target: Target) -> tuple[Pass, ...]:
    """Return the passes that follow the canonical form for the integer kernels of a target."""
    return tuple(step for step, is_wanted in _STEPS.items() if is_wanted(scheme, target))


def steps_named(names: Iterable[str]) -> tuple[Pass, ...]:
    """Return the passes that a plan file names as its steps.

    Raises:
        SchemeError: `integer_steps` has no pass of a name.
    """
    steps: Mapping[str, Pass] = {type(step).__name__: step for step in _STEPS}
    for name in names:
        if name in GONE:
            raise SchemeError(f"the plan has step {name!r}, which is no longer part of onnxq: {GONE[name]}")
        if name not in steps:
            raise SchemeError(
                f"the plan has step {name!r}, expected any of {', '.join(steps)}{did_you_mean(name, steps)}"
            )
    return tuple(steps[name] for name in names)


# Folding constants may make a model larger by one part in 100, or by 64 KiB, because it saves nodes at run time.
_GROWTH, _ALWAYS_FINE = 100, 2**16
# Each round may learn shapes from what the round before folded; exports need a few rounds.
_MOST_ROUNDS = 16


@dataclass(frozen=True)
class PreparationRecord:
    """How a prepared model was made from the user's model.

    Attributes:
        declared: names of the inner tensors whose types the user's model declares; built models declare no others.
        applied: results of all passes.
        steps: the passes that followed the canonical form, for integer kernels.
        half: ``TensorProto.DataType`` of the 16-bit floats that became float32; 0 if there are none.
        content: digest before the conversion to a later opset; empty if there was none.
        origins: for each node by name, the nodes of the user's model that it replaces.
        without: names of `canonical_steps` that were left out.
    """

    declared: frozenset[str] = frozenset()
    applied: tuple[PassResult, ...] = ()
    steps: tuple[Pass, ...] = ()
    half: int = 0
    content: str = ""
    origins: Mapping[str, Origins] = field(default_factory=dict)
    without: frozenset[str] = frozenset()


def prepare(model: str | Path | ModelProto | Any, *, opset: int = 0) -> Graph:
    """Bring a float model into the canonical form that plans are made for.

    Inlines functions, converts the model to ``opset`` if it is older, names all nodes and tensors uniquely, and brings
    the graph into canonical form (see `canonicalise`), so that all exports of a network become the same graph.

    Args:
        model: a file, a ModelProto or a GraphSurgeon graph, which stays as it is.
        opset: lowest default-domain opset wanted.

    Returns:
        A new graph, with inferred types.

    Raises:
        ModelError: the model cannot be read, converted to ``opset``, or is invalid.

    >>> len(prepare("models/gru.onnx").nodes)
    11
    """
    graph = as_graph(model)
    prepare_in_place(graph, opset=opset)
    return graph


def prepare_in_place(
    graph: Graph,
    steps: tuple[Pass, ...] = (),
    *,
    opset: int = 0,
    widen: bool = False,
    without: frozenset[str] = frozenset(),
) -> tuple[PassResult, ...]:
    """Prepare a graph in place as `prepare` does, then apply ``steps``; return the results of all passes.

    Args:
        graph: a float model, or one that was prepared before, at a lower opset.
        steps: from `integer_steps`.
        opset: lowest default-domain opset wanted.
        widen: whether 16-bit floats become float32 inside the model.
        without: names of `canonical_steps` that are left out.
    """
    applied = Pipeline(
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
        applied += Pipeline((WidenFloats(),)).apply(graph)
    applied += canonicalise(graph, without)
    if steps:
        applied += Pipeline(steps).apply(graph)
        infer_shapes(graph)
    return applied


def widens(scheme: Scheme, target: Target) -> bool:
    """Whether 16-bit floats become float32, in which integer kernels give their results."""
    return scheme.multiplies_integers and not target.kernels.half


def canonicalise(graph: Graph, without: frozenset[str] = frozenset()) -> tuple[PassResult, ...]:
    """Bring a graph whose nodes have names and whose constants are initializers into canonical form, in place.

    Passes and rules are repeated with newly inferred types until nothing changes, because folding makes shapes known.

    Args:
        graph: the graph.
        without: names of `canonical_steps` that are left out.

    Returns:
        The results of the first round, those of later rounds that changed something, and that of `FlushDenormals`,
        which is not repeated.
    """
    rules, stored = _rules(without), _stored(graph)
    most = stored + most_growth(stored)
    applied: list[PassResult] = []
    infer_shapes(graph)
    for _ in range(_MOST_ROUNDS):
        results = _without(_repeated(rules, max(0, most - _stored(graph))), without).apply(graph)
        applied += results if not applied else [result for result in results if result]
        if not any(results):
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
    """Return by how many bytes folding may make a model with ``stored`` bytes of constants larger.

    >>> most_growth(1000), most_growth(10**8)
    (65536, 1000000)
    """
    return max(_ALWAYS_FINE, stored // _GROWTH)


def _stored(graph: Graph) -> int:
    return sum(tensor.nbytes for tensor in constants(graph))


def canonical_steps() -> tuple[str, ...]:
    """Return the names of the passes and rules of the canonical form; any of them can be left out."""
    rules = _rules(frozenset())
    steps = (*_repeated(rules, 0), FlushDenormals(), *rules.rules)
    return tuple(type(step).__name__ for step in steps if not isinstance(step, RewriteRules | RemoveUnused))


def counts_of(applied: Iterable[PassResult]) -> dict[str, int]:
    """Return the number of changes of each of `canonical_steps` that made any, by name, in descending order."""
    counts: Counter[str] = Counter()
    for result in applied:
        counts.update(result.changes.counts or {type(result.step).__name__: len(result.changes.changed)})
    # Names and initializers are given to every node and constant, which is nothing to report.
    names = set(canonical_steps())
    return {name: count for name, count in counts.most_common() if count and name in names}


def _rules(without: frozenset[str]) -> RewriteRules:
    steps = passes_of("canonical")
    return RewriteRules(
        tuple(step() for name, step in steps.items() if issubclass(step, RewriteRule) and name not in without)
    )


def _without(steps: tuple[Pass, ...], names: frozenset[str]) -> Pipeline:
    return Pipeline(tuple(step for step in steps if type(step).__name__ not in names))


def check_float_model(graph: Graph) -> None:
    """Raise ModelError if a model has no outputs or is quantized already."""
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
    """Raise ModelError if a plan quantizes nothing, or a weight of it is not finite."""
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
    """Return the file of the unchanged user's model; a model in memory is written to a folder once.

    Args:
        graph: the model as it was read.
        model: the user's model.
        folder: folder of the file for a model in memory.
    """
    if isinstance(model, str | Path):
        return Path(model)
    path, proto = folder / "reference.onnx", as_proto(model)
    if path.exists():
        return path
    # Only onnxq's writer writes models above 2 GiB, and names external values that cannot be read.
    if proto is None or external_bytes(graph) or proto.ByteSize() >= onnx.checker.MAXIMUM_PROTOBUF:
        save(graph, path)
    else:
        path.write_bytes(proto.SerializeToString())
    return path


def external_bytes(graph: Graph) -> int:
    """Return the size of the values that lie outside the model file."""
    return sum(tensor.nbytes for tensor in constants(graph) if tensor.tensor_data.external)
