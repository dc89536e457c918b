"""From the user's model to the form that plans are made for, and what is refused on the way."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from onnxq.errors import ModelError, OutputError
from onnxq.graph import Graph, Pipeline, ProtoPayload, constants, scopes
from onnxq.onnx_tools import infer_shapes
from onnxq.operators import ALREADY_QUANTIZED
from onnxq.passes import (
    DropNoOps,
    FoldConstants,
    FuseBatchNorm,
    InlineFunctions,
    LiftConstants,
    NameNodes,
    NameTensors,
    RemoveUnused,
    ShareInitializers,
    UpgradeOpset,
    WidenFloats,
)
from onnxq.planning.plan import METADATA_KEY, Plan


def prepare(graph: Graph, *, opset: int = 0, widen: bool = False) -> Graph:
    """Bring a float model into the form that plans are made for, in place.

    Inlines functions, converts to ``opset`` when below it, gives all nodes and tensors names of their own, lifts and
    folds constants, fuses BatchNormalization and drops nodes that do nothing.

    Args:
        graph: a float model.
        opset: lowest default-domain opset wanted.
        widen: whether 16-bit floats become float32 inside the model.

    Returns:
        The same graph, with inferred types.
    """
    Pipeline((NameNodes(), InlineFunctions(), UpgradeOpset(opset), NameNodes(), NameTensors())).apply(graph)
    infer_shapes(graph)
    Pipeline(
        (
            LiftConstants(),
            *((WidenFloats(),) if widen else ()),
            DropNoOps(),
            FoldConstants(),
            FuseBatchNorm(),
            ShareInitializers(),
            RemoveUnused(),
        )
    ).apply(graph)
    infer_shapes(graph)
    return graph


def refuse_quantized(graph: Graph) -> None:
    """Refuse a model that holds quantized operators, or that onnxq has made.

    Raises:
        ModelError: it does.
    """
    if METADATA_KEY in graph.metadata:
        raise ModelError(
            f"the model is quantized already, by onnxq as {graph.metadata[METADATA_KEY]}; quantize the float model"
        )
    for scope in scopes(graph):
        for node in scope.nodes:
            if node.op in ALREADY_QUANTIZED:
                raise ModelError(
                    f"the model is quantized already: node {node.name or node.outputs[0].name} is {node.op}; "
                    "quantize the float model it was made from"
                )


def refuse_overwriting(graph: Graph, data: Path) -> None:
    """Refuse an output whose external data would take the place of the model's own.

    Raises:
        OutputError: the model reads the file ``data``.
    """
    external = (tensor.payload for tensor in constants(graph) if tensor.payload.external)
    read = {payload.data_range().path for payload in external if isinstance(payload, ProtoPayload)}
    if data.exists() and any(data.samefile(path) for path in read):
        raise OutputError(f"output data {data} is the external data of the model itself; give another name")


def check_plan(plan: Plan, graph: Graph) -> None:
    """Check that a plan quantizes anything, and that the weights it quantizes are finite.

    Raises:
        ModelError: it does not, or one is not; the message says why, or which.
    """
    if not any(decision.weights for decision in plan.decisions):
        reasons = "; ".join(reason for reason, _ in plan.left_in_float()[:3])
        raise ModelError(f"there is nothing to quantize in the model: {reasons or 'it has no nodes'}")
    for scope in scopes(graph):
        for node in scope.nodes:
            for weight in plan.by_node[node.name].weights:
                if not np.isfinite(node.inputs[weight.index].values.astype(np.float32)).all():
                    raise ModelError(
                        f"weight {weight.tensor} of node {node.name} holds NaN or infinity; "
                        "export the model again from sound weights"
                    )
