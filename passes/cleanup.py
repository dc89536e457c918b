"""What computes nothing, or the same twice; names, metadata and the opset."""

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
    Variable,
    all_graphs,
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
from onnxq.rewrite import (
    Changes,
    Match,
    NodePattern,
    OpsetPatternBuilder,
    Pass,
    RewriteContext,
    RewriteRule,
)
from onnxq.rewrite.patterns import COMMUTATIVE
from onnxq.rewrite.shapes import broadcast, named_shape

# Before, a Dropout was in training mode unless it said otherwise.
_INFERS = 7


class DropNoOps(Pass):
    """Let the consumers of an Identity or Dropout read its input, constants included.

    What makes its input makes an output of a graph under the name of that. Leaves a node between an input, a constant
    or another output and an output of its graph, a Dropout whose mask is used, and one in training mode.
    """

    def apply(self, graph: Graph) -> Changes:
        """Drop; ``changed`` holds the names of the nodes."""
        changed: list[str] = []
        left: list[tuple[str, str]] = []
        for scope in all_graphs(graph):
            dropped = []
            own = set(scope.nodes)
            for node in scope.nodes:
                if node.op not in ("Identity", "Dropout") or node.domain:
                    continue
                source, made = node.inputs[0], node.outputs[0]
                if made.graph_output_of and not (
                    set(made.graph_output_of) == {scope} and _can_be_returned(source, own)
                ):
                    left.append((node.name, "its output is an output of the graph"))
                elif obstacle := _dropout_obstacle(node, graph.opset):
                    left.append((node.name, obstacle))
                else:
                    if made.graph_output_of:
                        source.dtype, source.shape, source.source = made.dtype, made.shape, made.source
                    replace_uses(made, source, graph_outputs=True)
                    dropped.append(node)
            remove_nodes(scope, dropped)
            changed.extend(node.name for node in dropped)
        return Changes(tuple(changed), tuple(left))


def _can_be_returned(tensor: Tensor, own: set[Node]) -> bool:
    """Whether a node of the same graph makes it, so that it may do so under the name of the output."""
    return (
        isinstance(tensor, Variable) and bool(tensor.inputs) and tensor.inputs[0] in own and not tensor.graph_output_of
    )


def _dropout_obstacle(node: Node, opset: int) -> str:
    if node.op != "Dropout":
        return ""
    if opset < _INFERS and not node.attrs.get("is_test", 0):
        return "it is in training mode"
    if len(node.outputs) > 1 and (node.outputs[1].outputs or node.outputs[1].graph_output_of):
        return "its mask is used"
    training = optional_input(node, 2)
    if training is not None and not (is_constant(training) and not training.values.any()):
        return "it may run in training mode"
    return ""


class DropWheres(RewriteRule):
    """A Where whose condition is constant, and the same everywhere, is the operand that it takes.

    ``Where(true, x, y) -> x``
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
        made, taken = broadcast(shapes), named_shape(_taken(match))
        return "" if made == taken and None not in made else "what it takes has another shape than what it makes"

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        return _taken(match)


def _taken(match: Match) -> Any:
    return match.x if match.condition.values.all() else match.y


class RemoveUnused(Pass):
    """Remove what no output of the model needs, such as the float weight behind its codes.

    Leaves graph inputs, initializers that a caller may override, and those that a quantization annotation names.
    """

    def apply(self, graph: Graph) -> Changes:
        """Remove; ``changed`` holds the names of the nodes and initializers."""
        before = [(item, _name(item)) for item in _items(graph)]
        for scope in all_graphs(graph):
            annotations = scope.source.quantization_annotation if scope.source is not None else ()
            named = {entry.value for one in annotations for entry in one.quant_parameter_tensor_names}
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
    """Return the name, or for a node without one its operator and first output."""
    return item.name or f"{item.op}_{item.outputs[0].name if item.outputs else ''}"


# The same twice -------------------------------------------------------------------------------------------------------

# What two calls of may differ in, and what runtimes match by node: one for each reader.
_KEPT = frozenset(
    {
        "Bernoulli",
        "DequantizeLinear",
        "Dropout",
        "DynamicQuantizeLinear",
        "Multinomial",
        "QuantizeLinear",
        "RandomNormal",
        "RandomNormalLike",
        "RandomUniform",
        "RandomUniformLike",
    }
)


class MergeEqual(Pass):
    """Let all read the first of several nodes of equal operator, attributes and inputs, in bodies what is around them.

    Constants count as equal when they are the same tensor, as they are once `ShareInitializers` has been applied.
    Leaves random numbers, quantization, operators with bodies or of other domains, and nodes that make two outputs of
    a graph, which have a name each.
    """

    def apply(self, graph: Graph) -> Changes:
        """Merge; ``changed`` holds the names of the nodes that went."""
        return Changes(tuple(_merge(graph, ChainMap())))


def _merge(scope: Graph, first: ChainMap[Hashable, tuple[Node, Graph]]) -> list[str]:
    """Merge the nodes of one graph and its bodies, given what stands before it in the graphs around."""
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
                new.dtype, new.shape, new.source = old.dtype, old.shape, old.source
            replace_uses(old, new, graph_outputs=True)
        kept.origins = join_origins((kept, node))
        gone.append(node)
        names.append(node.name)
    remove_nodes(scope, gone)
    return names


def _can_merge(node: Node, kept: Node, *, same_graph: bool) -> bool:
    """Whether no output of a graph loses its name, and none is made by a node of another graph."""
    return all(
        not old.graph_output_of or (same_graph and not new.graph_output_of)
        for old, new in zip(node.outputs, kept.outputs, strict=True)
    )


def _key(node: Node) -> Hashable:
    """Return what is equal for nodes that compute the same; None where that cannot be said."""
    if node.domain or node.op in _KEPT or node.subgraphs() or not node.outputs:
        return None
    attributes = [(name, _content(value)) for name, value in sorted(node.attrs.items())]
    if any(content is None for _, content in attributes):
        return None
    inputs: list[Any] = [tensor if tensor.name else None for tensor in node.inputs]
    if node.op in COMMUTATIVE and len(inputs) == 2:
        inputs.sort(key=id)
    return node.op, tuple(attributes), tuple(inputs), tuple(bool(tensor.name) for tensor in node.outputs)


def _content(value: Any) -> Hashable:
    """Return what makes two values of an attribute equal: types, signs of zeros and payloads of NaN count."""
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
    """Let all nodes read the first of several initializers of equal type, shape and bytes.

    One that is shared by several bodies of control flow moves to the innermost graph around them. Leaves initializers
    that are inputs or outputs of a graph, those that training moves on, and text.

    Attributes:
        scalars_apart: whether each graph keeps scalars of its own. onnxruntime 1.30 does not load two bodies whose
            integer kernels give codes with one zero point.
    """

    scalars_apart: bool = False

    def apply(self, graph: Graph) -> Changes:
        """Share; ``changed`` holds the names of the initializers that are no longer read."""
        shared = list(_shareable(graph))
        # Most large weights are alone in their shape and ends, and their bytes need not be read.
        kinds = {tensor: _kind(tensor) for tensor, _ in shared}
        alike = Counter(kinds.values())
        first: dict[tuple[Hashable, bytes, Graph | None], tuple[Constant, Graph]] = {}
        moved: set[Constant] = set()
        names: Names | None = None
        changed = []
        for tensor, scope in shared:
            if alike[kinds[tensor]] == 1:
                continue
            among = scope if self.scalars_apart and not tensor.shape else None
            kept, home = first.setdefault((kinds[tensor], tensor.tensor_data.digest(), among), (tensor, scope))
            if kept is tensor:
                continue
            if home is not scope and kept not in moved:
                # It is going to be seen from several bodies, where other tensors may bear its name.
                names = names or Names(graph)
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
    """Whether sharing can make a difference: text has no bytes, and what nothing reads was stored so on purpose.

    The statistics of a BatchNormalization in training are written where they lie.
    """
    moves = any(reader.op == "BatchNormalization" and reader.attrs.get("training_mode") for reader in tensor.outputs)
    return bool(tensor.outputs) and onnx_dtype(tensor) != TensorProto.STRING and not moves


def _kind(tensor: Constant) -> tuple[int, tuple[int, ...], str]:
    return onnx_dtype(tensor), tuple(tensor.shape), tensor.tensor_data.fingerprint


# Names, metadata, opset -----------------------------------------------------------------------------------------------


class NameNodes(Pass):
    """Name nodes without a name after their op type and first output; number repeated names.

    Rules select nodes by name and onnxruntime refuses repeated names, so names must be unique over all graphs.
    The first node that has a name keeps it.
    """

    def apply(self, graph: Graph) -> Changes:
        """Rename; ``changed`` holds the new names."""
        renamed = _without_a_name_of_their_own(graph)
        if not renamed:
            return Changes()
        names = Names(graph)
        for node in renamed:
            output = next((tensor.name for tensor in node.outputs if tensor.name), "")
            node.name = names.unique(node.name or f"{node.op}_{output}")
        return Changes(tuple(node.name for node in renamed))


def _without_a_name_of_their_own(graph: Graph) -> list[Node]:
    seen = {""}
    renamed = []
    for scope in all_graphs(graph):
        for node in scope.nodes:
            if node.name in seen:
                renamed.append(node)
            seen.add(node.name)
    return renamed


class NameTensors(Pass):
    """Number the names that tensors of several graphs share, as those of both branches of a merged decoder do.

    Plans and statistics tell tensors apart by name, so names must be unique over all graphs. Tensors of the main graph
    keep theirs, and so does the first body that has a name; inputs and outputs of bodies are known by their positions.
    Leaves sparse initializers, which are carried as they were read.
    """

    def apply(self, graph: Graph) -> Changes:
        """Rename; ``changed`` holds the new names."""
        shared = _sharing_names(graph) if any(node.attrs and node.subgraphs() for node in graph.nodes) else []
        if not shared:
            return Changes()
        names = Names(graph)
        for tensor in shared:
            tensor.name = names.unique(tensor.name)
        return Changes(tuple(tensor.name for tensor in shared))


def _sharing_names(graph: Graph) -> list[Tensor]:
    """Return the tensors of bodies that are called like one of a graph before theirs."""
    placed = place_constants(graph)
    seen = {tensor.name for scope in placed for tensor, _ in scope.sparse_initializers}
    shared: list[Tensor] = []
    for scope, stored in placed.items():
        made = (tensor for node in scope.nodes for tensor in node.outputs if tensor.name)
        for tensor in (*scope.inputs, *stored, *made):
            if tensor.name in seen and scope.parent is not None:
                shared.append(tensor)
            seen.add(tensor.name)
    return shared


class StripMetadata(Pass):
    """Remove metadata and documentation of nodes and inner tensors, and metadata of graphs, in bodies as well.

    Exporters keep there where in the program a node came from, which can be a fifth of a quantized file. Leaves what
    belongs to the model as a whole, and the documentation of graphs, inputs and outputs.
    """

    def apply(self, graph: Graph) -> Changes:
        """Strip; ``changed`` holds the names of the nodes and tensors."""
        return Changes(tuple(strip_metadata(graph)))


@dataclass(frozen=True)
class UpgradeOpset(Pass):
    """Convert the default domain to ``version`` with onnx's own converter; later models stay as they are.

    Attributes:
        version: the lowest opset that is wanted.
    """

    version: int = 13

    def apply(self, graph: Graph) -> Changes:
        """Convert; ``changed`` says from which opset to which."""
        before = graph.opset
        if before >= self.version:
            return Changes()
        origins = origins_by_name(graph)
        graph.adopt(upgrade_opset(graph, self.version))
        restore_origins(graph, origins)
        return Changes((f"opset {before} to {self.version}",))
