"""The model layer: GraphSurgeon classes, read and written without loss."""

from __future__ import annotations

from onnxq.graph.edit import insert_nodes, remove_nodes, remove_unused, replace_nodes, replace_uses
from onnxq.graph.elements import (
    Constant,
    Node,
    OpaqueAttribute,
    Tensor,
    Variable,
    become_constant,
    constant,
    onnx_dtype,
)
from onnxq.graph.model import Graph
from onnxq.graph.opset import inline_functions, upgrade_opset
from onnxq.graph.order import toposort
from onnxq.graph.payload import ArrayPayload, PackedPayload, Payload
from onnxq.graph.placement import place_constants
from onnxq.graph.reader import as_graph, from_graphsurgeon, load, read_model
from onnxq.graph.scopes import Names, constants, owner_graphs, scopes
from onnxq.graph.shapes import infer_shapes
from onnxq.graph.skeleton import skeleton
from onnxq.graph.spill import spilling
from onnxq.graph.stored import ProtoPayload
from onnxq.graph.surgeon import restore_classes
from onnxq.graph.versions import minimum_ir_version
from onnxq.graph.writer import save, to_model

__all__ = [
    "ArrayPayload",
    "Constant",
    "Graph",
    "Names",
    "Node",
    "OpaqueAttribute",
    "PackedPayload",
    "Payload",
    "ProtoPayload",
    "Tensor",
    "Variable",
    "as_graph",
    "become_constant",
    "constant",
    "constants",
    "from_graphsurgeon",
    "infer_shapes",
    "inline_functions",
    "insert_nodes",
    "load",
    "minimum_ir_version",
    "onnx_dtype",
    "owner_graphs",
    "place_constants",
    "read_model",
    "remove_nodes",
    "remove_unused",
    "replace_nodes",
    "replace_uses",
    "restore_classes",
    "save",
    "scopes",
    "skeleton",
    "spilling",
    "to_model",
    "toposort",
    "upgrade_opset",
]
