"""Keep what follows products of codes apart from them."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

import numpy as np

from onnxq.config.scheme import Mode
from onnxq.ir import (
    Graph,
    Names,
    Node,
    Tensor,
    Variable,
    all_graphs,
    constant,
    insert_nodes,
    replace_uses,
    sole_consumer,
)
from onnxq.ops import operator_of
from onnxq.passes.quantize.planned import copy_of
from onnxq.planning.plan import Plan
from onnxq.rewrite import Changes, Pass

_CLAMPS = frozenset({"Clip", "Relu"})


@dataclass(frozen=True, eq=False)
class IsolateProducts(Pass):
    """Write what follows a product of codes in operators that onnxruntime does not take for something else.

    Then it decodes the codes in each run: it takes a Relu or Clip behind a product, with or without a bias between
    them, for the beginning of a quantizer, and a QuantizeLinear behind a weight-only product for the end of a static
    one; it merges an Add of matrices into a product, and one of a bias into a static product that gives floats. Such
    clamps become Max and Min, such an Add becomes a Sum, and the QuantizeLinear reads a copy, as it does where others
    read a static product besides. Leaves clamps whose limits are attributes, as models below opset 11 have them, and
    what stands in another graph than the product, since onnxruntime takes together nodes of one graph only.

    Attributes:
        plan: names the products.
    """

    plan: Plan

    def apply(self, graph: Graph) -> Changes:
        """Replace; a Clip between two limits becomes two nodes, and copies are called ``t.copy``."""
        names = Names(graph)
        changed = []
        for scope in all_graphs(graph):
            before: dict[Node, list[Node]] = {}
            after: dict[Node, list[Node]] = {}
            here = set(scope.nodes)
            for node in scope.nodes:
                mode = self.plan.by_node[node.name].mode if node.name in self.plan.by_node else Mode.FLOAT
                operator = operator_of(node)
                if operator is None or not operator.product or mode not in (Mode.WEIGHT_ONLY, Mode.STATIC):
                    continue
                product, reader = node.outputs[0], _reader_here(node.outputs[0], here)
                static = mode is Mode.STATIC
                if reader is not None and reader.op == "Add" and not reader.domain:
                    if _is_merged(reader, product) or (static and not _is_quantized(reader.outputs[0], here)):
                        reader.op = "Sum"
                        changed.append(reader.name)
                        continue
                    product, reader = reader.outputs[0], _reader_here(reader.outputs[0], here)
                if _quantizers(product) and not (static and reader is not None):
                    after[product.inputs[0]] = [_copied(product, names)]
                    changed.append(product.inputs[0].name)
                elif (
                    reader is not None
                    and not (static and _quantizers(reader.outputs[0]))
                    and (ends := _ends(reader, names))
                ):
                    before[reader] = _replace(reader, ends, names)
                    changed.append(reader.name)
            insert_nodes(scope, before=before, after=after)
        return Changes(tuple(changed))


def _reader_here(tensor: Variable, here: Set[Node]) -> Node | None:
    """Return the node that alone reads a tensor, where that is one of the same graph."""
    reader = sole_consumer(tensor)
    return reader if reader in here else None


def _quantizers(tensor: Variable) -> list[Node]:
    return [node for node in tensor.outputs if node.op == "QuantizeLinear"]


def _is_quantized(tensor: Variable, here: Set[Node]) -> bool:
    """Return whether only a quantizer reads a tensor, a clamp between them aside."""
    reader = _reader_here(tensor, here)
    if reader is not None and reader.op in _CLAMPS:
        reader = _reader_here(reader.outputs[0], here)
    return reader is not None and reader.op == "QuantizeLinear"


def _copied(product: Variable, names: Names) -> Node:
    """Let the quantizers of a product read a copy, and return the node that makes it."""
    copy = copy_of(product, product.name, names)
    replace_uses(product, copy.outputs[0], set(_quantizers(product)))
    return copy


def _is_merged(reader: Node, product: Variable) -> bool:
    """Return whether onnxruntime merges the Add that reads a product into it, a vector aside."""
    others = [tensor for tensor in reader.inputs if tensor is not product]
    return _may_have_rank_2(product) and any(_may_have_rank_2(tensor) for tensor in others)


def _may_have_rank_2(tensor: Tensor) -> bool:
    return tensor.shape is None or len(tensor.shape) == 2


def _ends(clamp: Node, names: Names) -> list[tuple[str, Tensor]]:
    """Return the operators that clamp from below and above, each with its limit; none where nothing is to be done."""
    if clamp.op not in _CLAMPS or clamp.domain or clamp.attrs or not clamp.outputs[0].outputs:
        return []
    if clamp.op == "Relu":
        zero = np.zeros((), clamp.inputs[0].dtype or np.float32)
        return [("Max", constant(names.unique(f"{clamp.name}.zero"), zero))]
    limits = zip(("Max", "Min"), clamp.inputs[1:], strict=False)
    return [(op, limit) for op, limit in limits if limit.name]


def _replace(clamp: Node, ends: list[tuple[str, Tensor]], names: Names) -> list[Node]:
    """Turn a clamp into its last operator, and return the one that must stand before it, if any."""
    data, (last, limit) = clamp.inputs[0], ends[-1]
    before = []
    if len(ends) > 1:
        raised = Variable(names.unique(f"{clamp.outputs[0].name}.raised"), data.dtype, data.shape)
        before.append(Node("Max", names.unique(f"{clamp.name}.max"), {}, [data, ends[0][1]], [raised]))
        data = raised
    clamp.op, clamp.inputs = last, [data, limit]
    return before
