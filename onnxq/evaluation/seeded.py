"""Models that draw random numbers, and the seeds with which the first run of each session draws the same numbers."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from itertools import chain

import onnx
from onnx import NodeProto, defs

from onnxq.ir.elements import canonical_domain
from onnxq.ir.protos import node_protos
from onnxq.ops import OPERATORS

_SEEDS = 1 << 16
_TRAINING = 2


def draws(model: onnx.ModelProto) -> bool:
    """Return whether a node of a model draws random numbers."""
    return any(True for _ in _drawing(model))


def draws_in_functions(model: onnx.ModelProto) -> bool:
    """Return whether a node of a model-local function draws random numbers."""
    return any(True for function in model.functions for _ in _drawing_nodes(function.node))


def put_seeds(model: onnx.ModelProto, *, alike: bool = False) -> None:
    """Give each random node without a seed one that is derived from the name of its output.

    Args:
        model: the model.
        alike: whether all nodes of an operator get one seed, because inlining a function gives its nodes other names.
    """
    opset = next((entry.version for entry in model.opset_import if not canonical_domain(entry.domain)), 1)
    for node in _drawing(model):
        is_known = defs.has(node.op_type, opset, "")
        declared = defs.get_schema(node.op_type, opset).attributes.get("seed") if is_known else None
        if declared is None or any(attribute.name == "seed" for attribute in node.attribute):
            continue
        seed = zlib.crc32((node.op_type if alike else node.output[0]).encode()) % _SEEDS
        whole = declared.type == defs.OpSchema.AttrType.INT
        node.attribute.append(onnx.helper.make_attribute("seed", seed if whole else float(seed)))


def _drawing(model: onnx.ModelProto) -> Iterator[NodeProto]:
    scopes = (model.graph.node, *(function.node for function in model.functions))
    return chain.from_iterable(map(_drawing_nodes, scopes))


def _drawing_nodes(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    for node in node_protos(nodes):
        row = OPERATORS.get((canonical_domain(node.domain), node.op_type))
        if row is not None and row.random and _is_random(node):
            yield node


def _is_random(node: NodeProto) -> bool:
    """Return whether a node of a random operator draws numbers; a Dropout only does in training."""
    return node.op_type != "Dropout" or (len(node.input) > _TRAINING and bool(node.input[_TRAINING]))
