"""Models in memory and in files: lossless subclasses of GraphSurgeon's, edits in linear time, reader and writer."""

from __future__ import annotations

from onnxq.ir.declarations import forget_types
from onnxq.ir.edit import (
    insert_nodes,
    metadata_bytes,
    remove_nodes,
    remove_unused,
    replace_nodes,
    replace_uses,
    strip_metadata,
)
from onnxq.ir.elements import (
    Constant,
    Node,
    OpaqueAttribute,
    Origins,
    Tensor,
    Variable,
    become_constant,
    constant,
    onnx_dtype,
)
from onnxq.ir.graph import Graph, restore_classes
from onnxq.ir.node_builder import NodeBuilder
from onnxq.ir.order import toposort
from onnxq.ir.queries import (
    Names,
    OperatorKey,
    all_graphs,
    all_nodes,
    constant_values,
    constants,
    inner_variables,
    is_composite,
    is_constant,
    join_origins,
    numbers_of,
    operator_key,
    optional_input,
    origins_by_name,
    owner_graphs,
    producer,
    restore_origins,
    sole_consumer,
    without_absent,
)
from onnxq.ir.reader import as_graph, load, read_model
from onnxq.ir.serialize import place_constants
from onnxq.ir.spilling import spilling
from onnxq.ir.tensor_data import ArrayData, PackedTensor, ProtoTensor, TensorData
from onnxq.ir.type_inference import types_to_declare
from onnxq.ir.versions import minimum_ir_version
from onnxq.ir.writer import save, to_model

__all__ = [
    "ArrayData",
    "Constant",
    "Graph",
    "Names",
    "Node",
    "NodeBuilder",
    "OpaqueAttribute",
    "OperatorKey",
    "Origins",
    "PackedTensor",
    "ProtoTensor",
    "Tensor",
    "TensorData",
    "Variable",
    "all_graphs",
    "all_nodes",
    "as_graph",
    "become_constant",
    "constant",
    "constant_values",
    "constants",
    "forget_types",
    "inner_variables",
    "insert_nodes",
    "is_composite",
    "is_constant",
    "join_origins",
    "load",
    "metadata_bytes",
    "minimum_ir_version",
    "numbers_of",
    "onnx_dtype",
    "operator_key",
    "optional_input",
    "origins_by_name",
    "owner_graphs",
    "place_constants",
    "producer",
    "read_model",
    "remove_nodes",
    "remove_unused",
    "replace_nodes",
    "replace_uses",
    "restore_classes",
    "restore_origins",
    "save",
    "sole_consumer",
    "spilling",
    "strip_metadata",
    "to_model",
    "toposort",
    "types_to_declare",
    "without_absent",
]
