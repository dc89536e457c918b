"""Graph-rewriting passes, one a file."""

from collections.abc import Mapping
from types import MappingProxyType

from onnxq.passes.base import Changes, Pass, Pipeline
from onnxq.passes.decode_weights import DecodeWeights
from onnxq.passes.dequantize_weights import DequantizeWeights
from onnxq.passes.drop_no_ops import DropNoOps
from onnxq.passes.fold_constants import FoldConstants
from onnxq.passes.fuse_batch_norm import FuseBatchNorm
from onnxq.passes.inline_functions import InlineFunctions
from onnxq.passes.insert_quantize_dequantize import InsertQuantizeDequantize
from onnxq.passes.isolate_products import IsolateProducts
from onnxq.passes.lift_constants import LiftConstants
from onnxq.passes.name_nodes import NameNodes
from onnxq.passes.quantize_dynamically import QuantizeDynamically
from onnxq.passes.quantize_recurrent_cells import QuantizeRecurrentCells
from onnxq.passes.quantize_weights import QuantizeWeights
from onnxq.passes.remove_quantize_dequantize import RemoveQuantizeDequantize
from onnxq.passes.remove_unused import RemoveUnused
from onnxq.passes.replace_integer_operators import ReplaceIntegerOperators
from onnxq.passes.replace_integer_products import ReplaceIntegerProducts
from onnxq.passes.replace_with_contrib import ReplaceWithContrib
from onnxq.passes.restore_operators import RestoreOperators
from onnxq.passes.share_initializers import ShareInitializers
from onnxq.passes.store_weights import StoreWeights
from onnxq.passes.unpack_block_weights import UnpackBlockWeights
from onnxq.passes.upgrade_opset import UpgradeOpset

PASSES: Mapping[str, type[Pass]] = MappingProxyType(
    {
        step.__name__: step
        for step in (
            DecodeWeights,
            DequantizeWeights,
            DropNoOps,
            FoldConstants,
            FuseBatchNorm,
            InlineFunctions,
            InsertQuantizeDequantize,
            LiftConstants,
            NameNodes,
            QuantizeDynamically,
            QuantizeRecurrentCells,
            QuantizeWeights,
            RemoveQuantizeDequantize,
            RemoveUnused,
            ReplaceIntegerOperators,
            ReplaceIntegerProducts,
            IsolateProducts,
            ReplaceWithContrib,
            RestoreOperators,
            ShareInitializers,
            StoreWeights,
            UnpackBlockWeights,
            UpgradeOpset,
        )
    }
)
"""Every pass by name."""

__all__ = [
    "PASSES",
    "Changes",
    "DecodeWeights",
    "DequantizeWeights",
    "DropNoOps",
    "FoldConstants",
    "FuseBatchNorm",
    "InlineFunctions",
    "InsertQuantizeDequantize",
    "IsolateProducts",
    "LiftConstants",
    "NameNodes",
    "Pass",
    "Pipeline",
    "QuantizeDynamically",
    "QuantizeRecurrentCells",
    "QuantizeWeights",
    "RemoveQuantizeDequantize",
    "RemoveUnused",
    "ReplaceIntegerOperators",
    "ReplaceIntegerProducts",
    "ReplaceWithContrib",
    "RestoreOperators",
    "ShareInitializers",
    "StoreWeights",
    "UnpackBlockWeights",
    "UpgradeOpset",
]
