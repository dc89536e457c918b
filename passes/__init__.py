"""Graph-rewriting passes, one a file."""

from collections.abc import Mapping
from types import MappingProxyType

from onnxq.graph import Changes, Pass, Pipeline
from onnxq.passes.dequantize.dequantize_weights import DequantizeWeights
from onnxq.passes.dequantize.remove_quantize_dequantize import RemoveQuantizeDequantize
from onnxq.passes.dequantize.replace_integer_operators import ReplaceIntegerOperators
from onnxq.passes.dequantize.replace_integer_products import ReplaceIntegerProducts
from onnxq.passes.dequantize.restore_operators import RestoreOperators
from onnxq.passes.dequantize.unpack_block_weights import UnpackBlockWeights
from onnxq.passes.place.decode_weights import DecodeWeights
from onnxq.passes.place.fuse_biases import FuseBiases
from onnxq.passes.place.insert_quantize_dequantize import InsertQuantizeDequantize
from onnxq.passes.place.isolate_products import IsolateProducts
from onnxq.passes.place.quantize_dynamically import QuantizeDynamically
from onnxq.passes.place.quantize_recurrent_cells import QuantizeRecurrentCells
from onnxq.passes.place.quantize_weights import QuantizeWeights
from onnxq.passes.place.replace_with_contrib import ReplaceWithContrib
from onnxq.passes.place.store_weights import StoreWeights
from onnxq.passes.prepare.drop_no_ops import DropNoOps
from onnxq.passes.prepare.fold_constants import FoldConstants
from onnxq.passes.prepare.fuse_batch_norm import FuseBatchNorm
from onnxq.passes.prepare.inline_functions import InlineFunctions
from onnxq.passes.prepare.lift_constants import LiftConstants
from onnxq.passes.prepare.name_nodes import NameNodes
from onnxq.passes.prepare.remove_unused import RemoveUnused
from onnxq.passes.prepare.share_initializers import ShareInitializers
from onnxq.passes.prepare.upgrade_opset import UpgradeOpset

PASSES: Mapping[str, type[Pass]] = MappingProxyType(
    {
        step.__name__: step
        for step in (
            DecodeWeights,
            DequantizeWeights,
            DropNoOps,
            FoldConstants,
            FuseBatchNorm,
            FuseBiases,
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
    "FuseBiases",
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
