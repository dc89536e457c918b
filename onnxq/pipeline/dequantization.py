"""From a quantized model back to a plain float one: the float model that its quantized values stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import onnx
from onnx import ModelProto

from onnxq.certificate.onnxq_verify import KEY as CERTIFICATE_KEY
from onnxq.errors import ModelError
from onnxq.ir import Graph, all_nodes, constants, inner_variables, load, save
from onnxq.ir.protos import copy_other_fields
from onnxq.ir.reader import open_model
from onnxq.onnx_api import infer_shapes
from onnxq.ops import ALREADY_QUANTIZED
from onnxq.passes.cleanup import NameNodes, RemoveUnused
from onnxq.passes.constants import FoldConstants, LiftConstants
from onnxq.passes.control_flow import InlineFunctions
from onnxq.passes.dequantize.activations import RemoveQuantizeDequantize, RestoreOperators
from onnxq.passes.dequantize.integer_operators import ReplaceIntegerOperators, ReplaceIntegerProducts
from onnxq.passes.dequantize.weights import DequantizeWeights, UnpackBlockWeights
from onnxq.passes.quantize.constants import DeduplicateTransposedWeights
from onnxq.planning.plan import METADATA_KEY
from onnxq.rewrite import Pipeline
from onnxq.runtime.sessions import open_session
from onnxq.system.publish import publish, staging

Model = str | Path | onnx.ModelProto | Any
"""A file, a ModelProto, or a GraphSurgeon graph."""

# onnxruntime has more operators on integers than have a float form here.
_PREFIXES: Final = ("MatMulBlockQuantized", "MatMulNBits", "QEmbed", "QLinear", "QOrdered")
_STEPS: Final = Pipeline(
    (
        DequantizeWeights(),
        UnpackBlockWeights(),
        ReplaceIntegerOperators(),
        ReplaceIntegerProducts(),
        RemoveUnused(),
        DequantizeWeights(),
        RemoveQuantizeDequantize(),
    )
)


def dequantize(model: Model, output: str | Path | None = None) -> Graph:
    """Turn a quantized model into the float model that it stands for.

    Weights are what their quantized values mean, equal bit for bit to what onnxruntime computes from them; activations
    are no longer rounded. Inputs and outputs keep their names, types and shapes.

    Args:
        model: a file, a ModelProto or a GraphSurgeon graph, of onnxq, onnxruntime's quantizers or whoever writes the
            same operators. A graph stays as it is.
        output: file to write; None writes nothing. An existing file is replaced only by a model that loads.

    Returns:
        The float model.

    Raises:
        ModelError: the model cannot be read, holds nothing quantized, or a node whose float meaning is not known; or
            onnxruntime does not load the result.
        OutputError: the output cannot be written.

    >>> dequantize("model.int8.onnx", "model.float.onnx")  # doctest: +SKIP
    """
    graph, _, output = open_model(model, output)
    external = any(tensor.tensor_data.external for tensor in constants(graph))
    with staging(output) as folder:
        staged = folder / (output.name if output is not None else "model.onnx")
        rewrite(graph)
        save(graph, staged, external_data=external or None)
        open_session(staged, optimize=False)
        if output is None:
            return graph
        publish(staged, output)
    return load(output)


def rewrite(graph: Graph) -> None:
    """Turn a quantized graph into a float one in place; large weights are computed when they are read.

    Raises:
        ModelError: there is nothing quantized in it, or a node whose float meaning is not known.
    """
    declared = frozenset(tensor.name for tensor in inner_variables(graph) if tensor.dtype is not None)
    Pipeline((NameNodes(), InlineFunctions(), NameNodes(), LiftConstants())).apply(graph)
    infer_shapes(graph)
    ours = METADATA_KEY in graph.metadata
    if ours:
        # Codes that are stored once stand in front of each reader as it wants them.
        Pipeline((RestoreOperators(), FoldConstants(layouts_only=True))).apply(graph)
    done = _STEPS.apply(graph)
    if not ours and not any(result for result in done if not isinstance(result.step, RemoveUnused)):
        raise ModelError(
            "the model holds no quantized values and no quantized operators, so there is nothing to dequantize"
        )
    Pipeline((DeduplicateTransposedWeights(), RemoveUnused()) if ours else (RemoveUnused(),)).apply(graph)
    _refuse_quantized(graph)
    if ours:
        _drop_scheme(graph)
    infer_shapes(graph)
    for tensor in inner_variables(graph):
        if tensor.name not in declared:
            tensor.dtype = tensor.shape = tensor.source = None


def _refuse_quantized(graph: Graph) -> None:
    for _, node in all_nodes(graph):
        if node.op in ALREADY_QUANTIZED or (node.domain and node.op.startswith(_PREFIXES)):
            raise ModelError(
                f"node {node.name} is {node.op}, which has no float counterpart; "
                "dequantize the model that it was optimized from, or replace this node first"
            )


def _drop_scheme(graph: Graph) -> None:
    """Take out the scheme that made the model, and the certificate; the proto it was read from stays as it is."""
    kept = ModelProto()
    copy_other_fields(graph.model_source, kept, {"graph", "functions", "metadata_props"})
    for key, value in graph.metadata.items():
        if key not in (METADATA_KEY, CERTIFICATE_KEY):
            kept.metadata_props.add(key=key, value=value)
    graph.model_source = kept
