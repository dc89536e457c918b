"""Graph-rewriting passes, one a file."""

from collections.abc import Mapping
from types import MappingProxyType

from onnxq.passes.base import Changes, Pass, Pipeline
from onnxq.passes.drop_no_ops import DropNoOps
from onnxq.passes.fold_constants import FoldConstants
from onnxq.passes.fuse_batch_norm import FuseBatchNorm
from onnxq.passes.inline_functions import InlineFunctions
from onnxq.passes.insert_quantize_dequantize import InsertQuantizeDequantize
from onnxq.passes.lift_constants import LiftConstants
from onnxq.passes.name_nodes import NameNodes
from onnxq.passes.quantize_weights import QuantizeWeights
from onnxq.passes.remove_unused import RemoveUnused
from onnxq.passes.share_initializers import ShareInitializers
from onnxq.passes.store_weights import StoreWeights
from onnxq.passes.upgrade_opset import UpgradeOpset

PASSES: Mapping[str, type[Pass]] = MappingProxyType(
    {
        step.__name__: step
        for step in (
            DropNoOps,
            FoldConstants,
            FuseBatchNorm,
            InlineFunctions,
            InsertQuantizeDequantize,
            LiftConstants,
            NameNodes,
            QuantizeWeights,
            RemoveUnused,
            ShareInitializers,
            StoreWeights,
            UpgradeOpset,
        )
    }
)
"""Every pass by name."""

__all__ = [
    "PASSES",
    "Changes",
    "DropNoOps",
    "FoldConstants",
    "FuseBatchNorm",
    "InlineFunctions",
    "InsertQuantizeDequantize",
    "LiftConstants",
    "NameNodes",
    "Pass",
    "Pipeline",
    "QuantizeWeights",
    "RemoveUnused",
    "ShareInitializers",
    "StoreWeights",
    "UpgradeOpset",
]
