"""Remove nodes without effect, duplicates and unused tensors; names, metadata and the opset."""

from __future__ import annotations

from collections import ChainMap, Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

from onnx import TensorProto

from onnxq.ir import (
    Constant,
    Graph,
    Names,
    Node,
    OpaqueAttribute,
    Tensor,
    all_graphs,
    all_nodes,
    is_constant,
    join_origins,
    onnx_dtype,
    optional_input,
    origins_by_name,
    place_constants,
    remove_nodes,
    remove_unused,
    replace_uses,
    restore_origins,
    strip_metadata,
)
from onnxq.onnx_api import upgrade_opset
from onnxq.rewrite import Changes, Match, NodePattern, OpsetPatternBuilder, Pass, RewriteContext, RewriteRule
from onnxq.rewrite.patterns import COMMUTATIVE
from onnxq.rewrite.shapes import broadcast, named_shape
from onnxq.rewrite.soundness import is_pure


class DropNoOps(RewriteRule):
    """``Identity(x) -> x``.

    Remove Identity and Dropout.

    If its output is a graph output, the producer of its input takes that name. Not between an output and a graph input,
    a constant or another output; not for a Dropout whose mask is used, or in training mode.
    """

    def pattern(self, op: OpsetPatternBuilder) -> tuple[NodePattern, ...]:
        return op.Identity(op.any("x")), op.Dropout(op.any("x"), ...)

    def check(self, match: Match) -> str:
        if any(mask.outputs or mask.graph_output_of for mask in match.root.outputs[1:]):
            return "its mask is used"
        training = optional_input(match.root, 2)
        infers = training is None or (is_constant(training) and not training.values.any())
        return "" if infers else "it may run in training mode"

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        return [match.x for tensor in match.root.outputs if tensor.name]


class DropWheres(RewriteRule):
    """``Where(true, x, y) -> x``.

    Replace a Where with a uniform constant condition by the operand that it selects.

    Not if broadcasting gives the result another shape than the operand.
    """

    def pattern(self, op: OpsetPatternBuilder) -> NodePattern:
        return op.Where(op.constant("condition"), op.any("x"), op.any("y"))

    def check(self, match: Match) -> str:
        values = match.condition.values
        if not values.size or (values.any() and not values.all()):
            return "its condition differs from entry to entry"
        shapes: list[Any] = [named_shape(tensor) for tensor in (match.condition, match.x, match.y)]
        if None in shapes:
            return "the shape of an operand is not known"
        shape, taken = broadcast(shapes), named_shape(_taken(match))
        return "" if shape == taken and None not in shape else "its input has another shape than its output"

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        return _taken(match)


def _taken(match: Match) -> Any:
    return match.x if match.condition.values.all() else match.y


class RemoveUnused(Pass):
    """Remove nodes and initializers that no output of the model needs, such as float weights after quantization.

    Keeps graph inputs, initializers that a caller may override, and constants that a quantization annotation names.
    """

    def apply(self, graph: Graph) -> Changes:
        before = [(item, _name(item)) for item in _items(graph)]
        for scope in all_graphs(graph):
            annotations = scope.source.quantization_annotation if scope.source is not None else ()
            named = {entry.value for annotation in annotations for entry in annotation.quant_parameter_tensor_names}
            for tensor in scope.initializers:
                tensor.declared_unused = tensor.declared_unused and tensor.name in named
        remove_unused(graph)
        after = set(_items(graph))
        return Changes(tuple(name for item, name in before if item not in after))


def _items(graph: Graph) -> Iterator[Node | Constant]:
    for scope in all_graphs(graph):
        yield from scope.nodes
        yield from scope.initializers


def _name(item: Node | Constant) -> str:
    return item.name or f"{item.op}_{item.outputs[0].name if item.outputs else ''}"


# The same twice -------------------------------------------------------------------------------------------------------


class MergeEqual(Pass):
    """Merge nodes of equal operator, attributes and inputs; a subgraph may read the node of an outer graph.

    ``Add(Relu(x), Relu(x)) -> Add(y, y) with y = Relu(x)``

    Constants are equal if they are the same tensor, as after `ShareInitializers`. Not for random operators,
    quantization, operators with subgraphs or of other domains, and nodes that make two graph outputs.
    """

    def apply(self, graph: Graph) -> Changes:
        return Changes(tuple(_merge(graph, ChainMap())))


def _merge(scope: Graph, first: ChainMap[Hashable, tuple[Node, Graph]]) -> list[str]:
    gone, names = [], []
    for node in scope.nodes:
        for body in node.subgraphs():
            names.extend(_merge(body, first.new_child()))
        key = _key(node)
        if key is None:
            continue
        kept, home = first.setdefault(key, (node, scope))
        if kept is node or not _can_merge(node, kept, same_graph=home is scope):
            continue
        for old, new in zip(node.outputs, kept.outputs, strict=True):
            if old.graph_output_of:
                new.take_type(old)
            replace_uses(old, new, graph_outputs=True)
        kept.origins = join_origins((kept, node))
        gone.append(node)
        names.append(node.name)
    remove_nodes(scope, gone)
    return names


def _can_merge(node: Node, kept: Node, *, same_graph: bool) -> bool:
    return all(
        not old.graph_output_of or (same_graph and not new.graph_output_of)
        for old, new in zip(node.outputs, kept.outputs, strict=True)
    )


def _key(node: Node) -> Hashable:
    """Return a key that is equal for nodes that compute the same; None if unknown."""
    if node.domain or not is_pure(node) or node.subgraphs() or not node.outputs:
        return None
    attributes = [(name, _content(value)) for name, value in sorted(node.attrs.items())]
    if any(content is None for _, content in attributes):
        return None
    inputs: list[Any] = [tensor if tensor.name else None for tensor in node.inputs]
    if node.op in COMMUTATIVE and len(inputs) == 2:
        inputs.sort(key=id)
    return node.op, tuple(attributes), tuple(inputs), tuple(bool(tensor.name) for tensor in node.outputs)


def _content(value: Any) -> Hashable:
    """Return a key of an attribute value; types, signs of zeros and payloads of NaN count."""
    if isinstance(value, bool | int | float | str | bytes):
        return type(value).__name__, repr(value)
    if isinstance(value, list | tuple):
        parts = tuple(_content(part) for part in value)
        return None if None in parts else parts
    if isinstance(value, Constant):
        text = value.dtype.kind in "OSU"
        return None if text else (value.tensor_data.onnx_dtype, tuple(value.shape), value.tensor_data.digest())
    return value.proto.SerializeToString(deterministic=True) if isinstance(value, OpaqueAttribute) else None


@dataclass(frozen=True)
class ShareInitializers(Pass):
    """Merge initializers of equal type, shape and bytes.

    An initializer that several subgraphs share moves to the innermost graph around them. Not for inputs or outputs of a
    graph, statistics that training updates, and strings.

    Attributes:
        scalars_apart: whether each graph keeps its own scalars. onnxruntime 1.30 fails to load two subgraphs whose
            integer kernels share a zero point.
    """

    scalars_apart: bool = False

    def apply(self, graph: Graph) -> Changes:
        shared = list(_shareable(graph))
        # Most large weights differ in shape or end elements, so their bytes need not be read.
        kinds = {tensor: _kind(tensor) for tensor, _ in shared}
        alike = Counter(kinds.values())
        first: dict[tuple[Hashable, bytes, Graph | None], tuple[Constant, Graph]] = {}
        moved: set[Constant] = set()
        names = Names(graph)
        changed = []
        for tensor, scope in shared:
            if alike[kinds[tensor]] == 1:
                continue
            among = scope if self.scalars_apart and not tensor.shape else None
            kept, home = first.setdefault((kinds[tensor], tensor.tensor_data.digest(), among), (tensor, scope))
            if kept is tensor:
                continue
            if home is not scope and kept not in moved:
                # Several subgraphs will see it, and other tensors there may have its name.
                kept.name = names.unique(kept.name)
                moved.add(kept)
            replace_uses(tensor, kept)
            changed.append(tensor.name)
        return Changes(tuple(changed))


def _shareable(graph: Graph) -> Iterator[tuple[Constant, Graph]]:
    for scope, tensors in place_constants(graph).items():
        fixed = {tensor.name for tensor in (*scope.inputs, *scope.outputs)}
        for tensor in tensors:
            if tensor.name not in fixed and tensor.overridable_input is None and _is_read_number(tensor):
                yield tensor, scope


def _is_read_number(tensor: Constant) -> bool:
    # Strings have no bytes, unread constants were kept on purpose, and training updates the statistics.
    moves = any(reader.op == "BatchNormalization" and reader.attrs.get("training_mode") for reader in tensor.outputs)
    return bool(tensor.outputs) and onnx_dtype(tensor) != TensorProto.STRING and not moves


def _kind(tensor: Constant) -> tuple[int, tuple[int, ...], str]:
    return onnx_dtype(tensor), tuple(tensor.shape), tensor.tensor_data.fingerprint


# Names, metadata, opset -----------------------------------------------------------------------------------------------


class NameNodes(Pass):
    """Name nodes without a name after their op type and first output; number repeated names.

    Plan rules select nodes by name and onnxruntime refuses repeated names, so names must be unique over all graphs. The
    first node with a name keeps it.
    """

    def apply(self, graph: Graph) -> Changes:
        seen, renamed = {""}, list[Node]()
        for _, node in all_nodes(graph):
            if node.name in seen:
                renamed.append(node)
            seen.add(node.name)
        names = Names(graph)
        for node in renamed:
            output = next((tensor.name for tensor in node.outputs if tensor.name), "")
            node.name = names.unique(node.name or f"{node.op}_{output}")
        return Changes(tuple(node.name for node in renamed))


class NameTensors(Pass):
    """Number tensor names that several graphs share, such as both branches of a merged decoder.

    Plans and statistics identify tensors by name, so names must be unique over all graphs. Tensors of the main graph
    keep their names, and so does the first subgraph with a name. Subgraph inputs and outputs may be renamed: their
    position identifies them. Not for sparse initializers, which stay as they were read.
    """

    def apply(self, graph: Graph) -> Changes:
        shared = _sharing_names(graph) if any(node.attrs and node.subgraphs() for node in graph.nodes) else []
        names = Names(graph)
        for tensor in shared:
            tensor.name = names.unique(tensor.name)
        return Changes(tuple(tensor.name for tensor in shared))


def _sharing_names(graph: Graph) -> list[Tensor]:
    placed = place_constants(graph)
    seen = {tensor.name for scope in placed for tensor, _ in scope.sparse_initializers}
    shared: list[Tensor] = []
    for scope, stored in placed.items():
        outputs = (tensor for node in scope.nodes for tensor in node.outputs if tensor.name)
        for tensor in (*scope.inputs, *stored, *outputs):
            if tensor.name in seen and scope.parent is not None:
                shared.append(tensor)
            seen.add(tensor.name)
    return shared


class StripMetadata(Pass):
    """Remove metadata and documentation of nodes and inner tensors, and metadata of graphs, in subgraphs too.

    Exporters store the source location of each node there, which can be a fifth of a quantized file. Keeps metadata of
    the model, and the documentation of graphs, inputs and outputs.
    """

    def apply(self, graph: Graph) -> Changes:
        return Changes(tuple(strip_metadata(graph)))


@dataclass(frozen=True)
class UpgradeOpset(Pass):
    """Convert the default domain to ``version`` with onnx's converter. Not for models of a later opset.

    Attributes:
        version: the lowest opset of the result.
    """

    version: int = 13

    def apply(self, graph: Graph) -> Changes:
        """Return the old and the new opset as one text."""
        before = graph.opset
        if before >= self.version:
            return Changes()
        origins = origins_by_name(graph)
        graph.adopt(upgrade_opset(graph, self.version))
        restore_origins(graph, origins)
        return Changes((f"opset {before} to {self.version}",))
