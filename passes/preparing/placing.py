"""Which passes quantize a graph of the prepared model, and in which order."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from onnxq.algorithms.encodings import Encodings
from onnxq.config.scheme import Mode
from onnxq.ir import Graph, all_graphs, all_nodes, forget_types
from onnxq.lowering import AllowedOps
from onnxq.passes.cleanup import RemoveUnused, ShareInitializers
from onnxq.passes.quantize.activations import AddToQuantized, InsertQuantizeDequantize
from onnxq.passes.quantize.constants import DeduplicateTransposedWeights, NarrowConstants
from onnxq.passes.quantize.dynamic import QuantizeDynamically, QuantizeRecurrentCells
from onnxq.passes.quantize.fusions import FuseBiases, IsolateFloats, IsolateProducts
from onnxq.passes.quantize.weights import (
    CompressWeights,
    DecodeWeights,
    DivideChannels,
    QuantizeWeights,
    ReplaceWithContrib,
)
from onnxq.planning.plan import DIVIDED_KEY, METADATA_KEY, Plan
from onnxq.rewrite import Pass, Pipeline
from onnxq.runtime.targets import Target

# Operators that the passes put around a quantized tensor.
_CODERS: Final = frozenset({"DequantizeLinear", "Mul", "QuantizeLinear", "Sum"})


@dataclass(frozen=True)
class PlanApplier:
    """Writes the quantized values of plans into graphs.

    Attributes:
        target: the runtime.
        emit: operators that the built model may contain besides standard ONNX.
        half: ``TensorProto.DataType`` of the 16-bit floats that preparation made float32; 0 if there are none.
    """

    target: Target
    emit: AllowedOps = AllowedOps.QDQ
    half: int = 0

    def quantized(self, graph: Graph, plan: Plan, encodings: Encodings, declared: Collection[str]) -> Graph:
        """Return a quantized copy of a prepared graph that declares the types of ``declared``, its inner tensors."""
        divided = encodings.divided_as(graph, plan)
        graph = graph.copy()
        self.passes(plan, encodings).apply(graph)
        graph.set_metadata(METADATA_KEY, plan.scheme)
        if divided:
            graph.set_metadata(DIVIDED_KEY, json.dumps(divided))
        forget_types(graph, declared)
        return graph

    def passes(self, plan: Plan, encodings: Encodings) -> Pipeline:
        """Return the passes for the modes of a plan, and the passes that finish the model."""
        for_onnxruntime = self.target.is_onnxruntime
        of_modes: Mapping[Mode, tuple[Pass, ...]] = {
            Mode.STATIC: (
                QuantizeWeights(plan, encodings),
                InsertQuantizeDequantize(plan, encodings, copies=for_onnxruntime),
                AddToQuantized(plan),
            ),
            Mode.DYNAMIC: (QuantizeDynamically(plan, encodings), QuantizeRecurrentCells(plan, encodings)),
            Mode.WEIGHT_ONLY: (
                *((ReplaceWithContrib(plan, encodings, self.emit),) if self.emit.has_own else ()),
                # Before `IsolateProducts` rewrites the Adds in which biases are found.
                DecodeWeights(plan, encodings),
            ),
            Mode.STORAGE: (CompressWeights(plan, encodings, self.target.reads.constants),),
        }
        return Pipeline(
            (
                *((DivideChannels(encodings),) if encodings.floats else ()),
                *(step for mode, steps in of_modes.items() if plan.count(mode) for step in steps),
                *((FuseBiases(), IsolateProducts(plan)) if for_onnxruntime else ()),
                # Models of other engines are also evaluated on onnxruntime.
                *((IsolateFloats(plan),) if for_onnxruntime or self.target.engine else ()),
                *((NarrowConstants(self.half),) if self.half else ()),
                ShareInitializers(scalars_apart=True),
                DeduplicateTransposedWeights(),
                RemoveUnused(),
            )
        )


def quantized_tensors(built: Graph, prepared: Graph) -> dict[str, str]:
    """Return, for each quantizing node and its outputs by name, the tensor of the prepared graph that it represents.

    Args:
        built: the graph from `PlanApplier.quantized`.
        prepared: the float graph.

    Returns:
        Names of activations; weights and other constants are left out.
    """
    own = {node.name: node for _, node in all_nodes(prepared)}
    stands_for = {tensor.name: tensor.name for node in own.values() for tensor in node.outputs}
    stands_for.update({tensor.name: tensor.name for scope in all_graphs(prepared) for tensor in scope.inputs})
    origins: dict[str, str] = {}
    for _, node in all_nodes(built):
        if node.name in own:
            # The DequantizeLinear of a graph output has the output's name, so the producer's output has another name.
            pairs = zip(node.outputs, own[node.name].outputs, strict=False)
            stands_for.update({tensor.name: before.name for tensor, before in pairs})
        elif node.op in _CODERS and (source := stands_for.get(node.inputs[0].name)):
            covered = dict.fromkeys((node.name, *(tensor.name for tensor in node.outputs)), source)
            origins.update(covered)
            stands_for.update(covered)
    return origins
