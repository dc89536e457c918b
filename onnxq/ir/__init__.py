"""Models in memory and in files: GraphSurgeon's classes without loss, edits in linear time, reader and writer."""

from __future__ import annotations

from onnxq.ir.edit import insert_nodes, remove_nodes, remove_unused, replace_nodes, replace_uses
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
from onnxq.ir.metadata import metadata_bytes, strip_metadata
from onnxq.ir.model import Graph
from onnxq.ir.order import toposort
from onnxq.ir.origins import joined_origins, origins_by_name, put_back_origins
from onnxq.ir.payload import ArrayPayload, PackedPayload, Payload
from onnxq.ir.placement import place_constants
from onnxq.ir.reader import as_graph, from_graphsurgeon, load, read_model
from onnxq.ir.reading import OperatorKey, is_fixed, nodes, only_reader, operator_key, optional, producer
from onnxq.ir.scopes import Names, constants, inner_variables, owner_graphs, scopes
from onnxq.ir.spill import spilling
from onnxq.ir.stored import ProtoPayload
from onnxq.ir.surgeon import restore_classes
from onnxq.ir.types import forget_types, types_to_declare
from onnxq.ir.versions import minimum_ir_version
from onnxq.ir.writer import save, to_model

__all__ = [
    "ArrayPayload",
    "Constant",
    "Graph",
    "Names",
    "Node",
    "OpaqueAttribute",
    "OperatorKey",
    "Origins",
    "PackedPayload",
    "Payload",
    "ProtoPayload",
    "Tensor",
    "Variable",
    "as_graph",
    "become_constant",
    "constant",
    "constants",
    "forget_types",
    "from_graphsurgeon",
    "inner_variables",
    "insert_nodes",
    "is_fixed",
    "joined_origins",
    "load",
    "metadata_bytes",
    "minimum_ir_version",
    "nodes",
    "only_reader",
    "onnx_dtype",
    "operator_key",
    "optional",
    "origins_by_name",
    "owner_graphs",
    "place_constants",
    "producer",
    "put_back_origins",
    "read_model",
    "remove_nodes",
    "remove_unused",
    "replace_nodes",
    "replace_uses",
    "restore_classes",
    "save",
    "scopes",
    "spilling",
    "strip_metadata",
    "to_model",
    "toposort",
    "types_to_declare",
]
