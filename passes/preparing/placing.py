"""Which passes quantize a graph of the prepared model, and in which order."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from onnxq.algorithms.encodings import Encodings
from onnxq.config.scheme import Mode
from onnxq.ir import Graph, all_graphs, forget_types
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

# What the passes put around the quantized values of a tensor: its factors, its quantized values, and what float nodes
# share.
_CODERS: Final = frozenset({"DequantizeLinear", "Mul", "QuantizeLinear", "Sum"})


@dataclass(frozen=True)
class PlanApplier:
    """What decides, beside a plan and its quantized values, how these are written.

    Attributes:
        target: the runtime.
        emit: what the built model may hold besides standard ONNX.
        half: ``TensorProto.DataType`` of 16-bit floats that the prepared model has in float32; 0 when it has none.
    """

    target: Target
    emit: AllowedOps = AllowedOps.QDQ
    half: int = 0

    def quantized(self, graph: Graph, plan: Plan, encodings: Encodings, declared: Collection[str]) -> Graph:
        """Return a quantized copy of a prepared graph, which declares the types of these inner tensors."""
        divided = encodings.divided_as(graph, plan)
        graph = graph.copy()
        self.passes(plan, encodings).apply(graph)
        graph.set_metadata(METADATA_KEY, plan.scheme)
        if divided:
            graph.set_metadata(DIVIDED_KEY, json.dumps(divided))
        forget_types(graph, declared)
        return graph

    def passes(self, plan: Plan, encodings: Encodings) -> Pipeline:
        """Return the passes of the modes that a plan has, and those that finish the model."""
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
                # Before additions of biases become what no bias is found in.
                DecodeWeights(plan, encodings),
            ),
            Mode.STORAGE: (CompressWeights(plan, encodings, self.target.reads.constants),),
        }
        return Pipeline(
            (
                *((DivideChannels(encodings),) if encodings.floats else ()),
                *(step for mode, steps in of_modes.items() if plan.count(mode) for step in steps),
                *((FuseBiases(), IsolateProducts(plan)) if for_onnxruntime else ()),
                # What an engine of its own runs is judged on onnxruntime as well.
                *((IsolateFloats(plan),) if for_onnxruntime or self.target.engine else ()),
                *((NarrowConstants(self.half),) if self.half else ()),
                ShareInitializers(scalars_apart=True),
                DeduplicateTransposedWeights(),
                RemoveUnused(),
            )
        )


def quantized_tensors(built: Graph, prepared: Graph) -> dict[str, str]:
    """Return what nodes around quantized values stand for, by their names and the names of the tensors that they make.

    Args:
        built: with quantized values, as `PlanApplier.quantized` makes it.
        prepared: without.

    Returns:
        Names of tensors of the prepared graph; weights and other constants are not among them.
    """
    own = {node.name: node for scope in all_graphs(prepared) for node in scope.nodes}
    stands_for = {tensor.name: tensor.name for node in own.values() for tensor in node.outputs}
    stands_for.update({tensor.name: tensor.name for scope in all_graphs(prepared) for tensor in scope.inputs})
    found: dict[str, str] = {}
    for node in (node for scope in all_graphs(built) for node in scope.nodes):
        if node.name in own:
            # Of what a graph returns the quantized values are decoded under its name, so that its maker makes another
            # tensor.
            made = zip(node.outputs, own[node.name].outputs, strict=False)
            stands_for.update({tensor.name: before.name for tensor, before in made})
        elif node.op in _CODERS and (source := stands_for.get(node.inputs[0].name)):
            known = dict.fromkeys((node.name, *(tensor.name for tensor in node.outputs)), source)
            found.update(known)
            stands_for.update(known)
    return found
