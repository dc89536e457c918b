"""The graph in memory: GraphSurgeon's classes with identity, edits in linear time, and what a pass is."""

from __future__ import annotations

from onnxq.graph.edit import insert_nodes, remove_nodes, remove_unused, replace_nodes, replace_uses
from onnxq.graph.elements import (
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
from onnxq.graph.model import Graph
from onnxq.graph.order import toposort
from onnxq.graph.origins import joined_origins, origins_by_name, put_back_origins
from onnxq.graph.passes import Applied, Changes, Pass, Pipeline
from onnxq.graph.patterns import Call, Match, Operators
from onnxq.graph.payload import ArrayPayload, PackedPayload, Payload
from onnxq.graph.reading import OperatorKey, is_fixed, nodes, only_reader, operator_key, optional, producer
from onnxq.graph.replacements import New
from onnxq.graph.rules import RewriteChanges, RewriteRule, RewriteRules
from onnxq.graph.scopes import Names, constants, inner_variables, owner_graphs, scopes
from onnxq.graph.stored import ProtoPayload
from onnxq.graph.surgeon import restore_classes
from onnxq.graph.types import forget_types, types_to_declare

__all__ = [
    "Applied",
    "ArrayPayload",
    "Call",
    "Changes",
    "Constant",
    "Graph",
    "Match",
    "Names",
    "New",
    "Node",
    "OpaqueAttribute",
    "OperatorKey",
    "Operators",
    "Origins",
    "PackedPayload",
    "Pass",
    "Payload",
    "Pipeline",
    "ProtoPayload",
    "RewriteChanges",
    "RewriteRule",
    "RewriteRules",
    "Tensor",
    "Variable",
    "become_constant",
    "constant",
    "constants",
    "forget_types",
    "inner_variables",
    "insert_nodes",
    "is_fixed",
    "joined_origins",
    "nodes",
    "only_reader",
    "onnx_dtype",
    "operator_key",
    "optional",
    "origins_by_name",
    "owner_graphs",
    "producer",
    "put_back_origins",
    "remove_nodes",
    "remove_unused",
    "replace_nodes",
    "replace_uses",
    "restore_classes",
    "scopes",
    "toposort",
    "types_to_declare",
]
