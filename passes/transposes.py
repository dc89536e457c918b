"""Transposes: in a row, beside matrix multiplications, and around operators that work in any layout.

A permutation maps the old layout to a new one: axis ``i`` of a tensor is axis ``permutation[i]`` of the new tensor, as
in ``Transpose<perm = permutation>(new)``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from onnxq.ir import (
    Constant,
    Graph,
    Names,
    Node,
    Tensor,
    Variable,
    all_graphs,
    constant_values,
    is_constant,
    numbers_of,
    optional_input,
    producer,
    remove_nodes,
    replace_uses,
    toposort,
)
from onnxq.ops import facts_of
from onnxq.rewrite import (
    Changes,
    Match,
    NodePattern,
    OpsetPatternBuilder,
    Pass,
    RewriteContext,
    RewriteRule,
    RoundingRule,
)
from onnxq.rewrite.shapes import named_shape, reshape_target
from onnxq.rewrite.soundness import rank, same_extents

Permutation: TypeAlias = tuple[int, ...]

_REDUCTIONS: Final = frozenset(
    {"ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin"}
    | {"ReduceProd", "ReduceSum", "ReduceSumSquare"}
)
_CHANNELS_FIRST: Final = frozenset(
    {"AveragePool", "BatchNormalization", "Conv", "ConvTranspose", "DepthToSpace", "GlobalAveragePool"}
    | {"GlobalMaxPool", "InstanceNormalization", "MaxPool", "SpaceToDepth"}
)
_ON_AXES: Final = {"Concat": 0, "Pad": 3, "Slice": 3, "Split": 0, **dict.fromkeys(_REDUCTIONS, 1)}
"""Operators with axes, and the input that holds them if the opset has one."""


def inverse(permutation: Sequence[int]) -> Permutation:
    """Return the inverse permutation.

    >>> inverse((0, 2, 3, 1))
    (0, 3, 1, 2)
    """
    return tuple(int(index) for index in np.argsort(permutation))


def composed(first: Sequence[int], second: Sequence[int]) -> Permutation:
    """Return the permutation of two Transposes, ``second`` behind ``first``.

    >>> composed((0, 2, 3, 1), (0, 3, 1, 2))
    (0, 1, 2, 3)
    """
    return tuple(first[axis] for axis in second)


def channels_last(rank: int) -> Permutation:
    """Return the ``perm`` that moves the channels of an image from axis 1 to the end.

    >>> channels_last(4)
    (0, 2, 3, 1)
    """
    return (0, *range(2, rank), 1)


def feeds_channels_first(tensor: Tensor) -> bool:
    """Return whether a node reads the tensor as an image whose channels come first."""
    readers = [reader for reader in tensor.outputs if reader.op in _CHANNELS_FIRST and not reader.domain]
    return any(reader.inputs[0] is tensor for reader in readers)


def permutation_of(node: Node, length: int | None = None) -> Permutation | None:
    """Return the permutation of a Transpose; None for other nodes, or if it is unknown.

    Args:
        node: the node.
        length: the rank of its data, if more is known than the shape of its input.
    """
    if node.op != "Transpose" or node.domain or len(node.inputs) != 1:
        return None
    length = rank(node.inputs[0]) if length is None else length
    order = node.attrs.get("perm", None if length is None else range(length)[::-1])
    if order is None or sorted(order) != list(range(len(order))) or length not in (None, len(order)):
        return None
    return tuple(order)


def rank_in_any_layout(node: Node) -> int:
    """Return the rank of the inputs and outputs of a node that works in any layout, else 0."""
    if node.domain or not (facts_of(node).elementwise or node.op in _ON_AXES):
        return 0
    ranks = {rank(tensor) for tensor in (*laid_out(node), *(tensor for tensor in node.outputs if tensor.name))}
    length = next(iter(ranks)) if len(ranks) == 1 else None
    if length is None or length < 2 or not laid_out(node):
        return 0
    works = _elementwise_in(node, length) if facts_of(node).elementwise else _on_known_axes(node, length)
    return length if works else 0


def laid_out(node: Node) -> list[Tensor]:
    """Return the variables that a node reads in the layout of its result."""
    read = node.inputs if facts_of(node).elementwise or node.op == "Concat" else node.inputs[:1]
    return [tensor for tensor in read if tensor.name and not is_constant(tensor) and rank(tensor) != 0]


def turn(node: Node, permutation: Permutation, names: Names) -> None:
    """Change constants and axes of a node to the new layout; its inputs stay."""
    if facts_of(node).elementwise or node.op == "Concat":
        for index, tensor in enumerate(node.inputs):
            if is_constant(tensor) and any(size != 1 for size in tensor.shape):
                node.inputs[index] = _turned(tensor, permutation, names)
    if node.op in ("Concat", "Split"):
        node.attrs["axis"] = permutation[node.attrs.get("axis", 0)]
    elif node.op in _ON_AXES:
        _rename_axes(node, permutation, names)


def loses_order(node: Node, permutation: Permutation) -> bool:
    """Return whether a node drops so many axes of its data that its result is the same in the new layout."""
    shape = node.inputs[0].shape if node.inputs else None
    if node.domain or shape is None or len(shape) != len(permutation):
        return False
    long = [permutation[axis] for axis, size in enumerate(shape) if size != 1]
    if node.op == "Flatten":
        return node.attrs.get("axis", 1) == 1 and permutation[0] == 0 and long == sorted(long)
    if node.op == "Reshape":
        target = constant_values(optional_input(node, 1))
        if target is None or 0 in target[1:] or long != sorted(long):
            return False
        return target[:1] != [0] or (permutation[0] == 0 and not node.attrs.get("allowzero", 0))
    if node.op == "Squeeze" or (node.op in _REDUCTIONS and not node.attrs.get("keepdims", 1)):
        axes = _axes(node, len(shape))
        left = [permutation[axis] for axis in range(len(shape)) if axis not in (axes or ())]
        return axes is not None and left == sorted(left)
    return False


def lose(node: Node, permutation: Permutation, names: Names) -> None:
    """Rename the axes that a node drops to the new layout."""
    if node.op not in ("Flatten", "Reshape"):
        _rename_axes(node, permutation, names)


def _elementwise_in(node: Node, rank: int) -> bool:
    # Before opset 7 an attribute sets the axis of an operand.
    constants = [tensor for tensor in node.inputs if is_constant(tensor)]
    fits = all(len(tensor.shape) <= rank for tensor in constants)
    return fits and not {"axis", "broadcast"} & set(node.attrs)


def _on_known_axes(node: Node, rank: int) -> bool:
    if node.op == "Concat":
        return "axis" in node.attrs and all(len(tensor.shape) == rank for tensor in node.inputs if is_constant(tensor))
    if node.op == "Split":
        return node.attrs.get("axis", 0) in range(-rank, rank)
    if node.op in _REDUCTIONS and not node.attrs.get("keepdims", 1):
        return False
    if node.op == "Pad":
        flat = numbers_of(node, 1, "pads")
        return flat is not None and (_axes(node, rank) is not None) and len(flat) == 2 * len(_axes(node, rank) or ())
    return _axes(node, rank) is not None


def _axes(node: Node, rank: int) -> list[int] | None:
    default: Sequence[int] | None = range(rank)
    if node.op == "Slice":
        starts = numbers_of(node, 1, "starts")
        default = None if starts is None else range(len(starts))
    elif node.op == "Squeeze" or node.attrs.get("noop_with_empty_axes", 0):
        default = None
    axes = numbers_of(node, 1 if node.op == "Squeeze" else _ON_AXES[node.op], "axes", default)
    fits = axes is not None and all(-rank <= axis < rank for axis in axes)
    return [int(axis) % rank for axis in axes] if fits and axes is not None else None


def _rename_axes(node: Node, permutation: Permutation, names: Names) -> None:
    index = 1 if node.op == "Squeeze" else _ON_AXES[node.op]
    is_input = index < len(node.inputs) and bool(node.inputs[index].name)
    if node.op == "Pad" and not is_input:
        _reorder_pads(node, permutation, names)
        return
    axes = [permutation[axis] for axis in _axes(node, len(permutation)) or ()]
    if node.op == "Squeeze":
        # Up to opset 12, onnx infers a wrong rank from unsorted axes.
        axes.sort()
    if is_input or (node.op == "Slice" and "starts" not in node.attrs):
        base = node.inputs[index].name if is_input else f"{node.name or node.op}.axes"
        dtype = node.inputs[index].dtype if is_input else node.inputs[1].dtype
        named = names.store(f"{base}.turned", np.array(axes, dtype))
        if index < len(node.inputs):
            node.inputs[index] = named
        else:
            node.inputs.append(named)
    elif "axes" in node.attrs or node.op == "Slice":
        node.attrs["axes"] = axes


def _reorder_pads(node: Node, permutation: Permutation, names: Names) -> None:
    rank = len(permutation)
    old: Any = numbers_of(node, 1, "pads")
    pads = [old[axis + side] for side in (0, rank) for axis in inverse(permutation)]
    if "pads" in node.attrs:
        node.attrs["pads"] = pads
    else:
        node.inputs[1] = names.store(f"{node.inputs[1].name}.turned", np.array(pads, np.int64))


def _turned(tensor: Constant, permutation: Permutation, names: Names) -> Constant:
    values = tensor.values
    wide = values.reshape((1,) * (len(permutation) - values.ndim) + values.shape)
    return names.store(f"{tensor.name}.turned", np.ascontiguousarray(wide.transpose(inverse(permutation))))


# Rules ----------------------------------------------------------------------------------------------------------------


class MergeTransposes(RewriteRule):
    """``Transpose(Transpose(x, p), q) -> Transpose(x, p[q])``.

    Merge two Transposes; drop one that does nothing; replace one that moves only dimensions of size 1 by Reshape.
    """

    def pattern(self, op: OpsetPatternBuilder) -> tuple[NodePattern, ...]:
        return (
            op.Transpose(op.Transpose(op.any("x"), name="first", allow_other_consumers=True), name="last"),
            op.Transpose(op.any("x"), name="last"),
        )

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        order = permutation_of(match.last)
        if order is not None and "first" in match.values:
            first = permutation_of(match.first, len(order))
            order = None if first is None else composed(first, order)
        if order is None:
            return "its order of dimensions is not known"
        if order == tuple(sorted(order)):
            return match.x
        if "first" in match.values:
            return new.like(match.last, match.x, perm=list(order))
        target = _target(named_shape(match.x), order)
        return "it moves dimensions of more than one entry" if target is None else new.Reshape(match.x, target)


def _target(named: Any, order: Permutation) -> NDArray[np.int64] | None:
    if named is None or 0 in named:
        return None
    kept = [place for place in order if named[place] != 1]
    entries = reshape_target(named, [named[place] for place in order], empty=True) if kept == sorted(kept) else None
    return None if entries is None else np.array(entries, np.int64)


class MergeTransposeBetweenReshapes(RewriteRule):
    """``Reshape(Transpose(Reshape(x, [-1, m, n]), [0, 2, 1]), [..., n, m]) -> Transpose(x)``.

    Replace Reshape to a batch of matrices, Transpose and Reshape back by one Transpose of the last two axes.

    Not if the Reshapes are not known to keep the last two axes.
    """

    def pattern(self, op: OpsetPatternBuilder) -> NodePattern:
        batch = op.Reshape(op.any("x"), op.any("batch"), name="flat")
        return op.Reshape(op.Transpose(batch, perm=[0, 2, 1]), op.any("target"))

    def check(self, match: Match) -> str:
        x, flat, result = match.x.shape, match.flat.outputs[0].shape, match.root.outputs[0].shape
        if x is None or flat is None or result is None or len(x) < 3:
            return "shapes around it are unknown"
        if not (same_extents(flat[1:], x[-2:]) and same_extents(result, [*x[:-2], x[-1], x[-2]])):
            return "its Reshapes do not keep the last two axes"
        return ""

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        last = len(match.x.shape) - 1
        return new.Transpose(match.x, perm=[*range(last - 1), last, last - 1])


class FoldTransposeIntoWeight(RoundingRule):
    """``MatMul(Flatten(Transpose(x)), W) -> MatMul(Flatten(x), W[order])``.

    Fold a Transpose in front of Flatten (or Reshape) and MatMul (or Gemm) into the weight.

    Not if the Transpose moves the batch, or others read the weight.
    """

    def pattern(self, op: OpsetPatternBuilder) -> tuple[NodePattern, ...]:
        turned = op.Transpose(op.any("x"), name="turn")
        flat = (op.Flatten(turned, axis=1, name="flat"), op.Reshape(turned, op.constant("target"), name="flat"))
        w, b = op.constant("w"), op.optional("b")
        return tuple(
            product
            for flattened in flat
            for product in (op.MatMul(flattened, w, name="product"), op.Gemm(flattened, w, b, name="product", transA=0))
        )

    def check(self, match: Match) -> str:
        order, shape = permutation_of(match.turn), match.x.shape
        if order is None or order[0] != 0 or shape is None or len(shape) != len(order):
            return "it moves the batch, or its data is of unknown rank"
        if not all(isinstance(size, int) for size in shape[1:]):
            return "the shape of its data is not known"
        if match.flat.op == "Reshape" and not _flattens(match):
            return "it is not known to flatten all but the batch"
        rows = 1 if match.product.attrs.get("transB", 0) else 0
        if len(match.w.shape) != 2 or match.w.shape[rows] != prod(shape[1:]):
            return "the weight does not fit"
        return "others read the weight" if len(match.w.outputs) > 1 else ""

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        order = permutation_of(match.turn)
        assert order is not None, "looked at before"
        sizes = [match.x.shape[axis] for axis in order[1:]]
        back = [axis - 1 for axis in inverse(order)[1:]]
        weight = match.w.values
        if match.product.attrs.get("transB", 0):
            ordered = weight.reshape(-1, *sizes).transpose(0, *(axis + 1 for axis in back))
        else:
            ordered = weight.reshape(*sizes, -1).transpose(*back, len(sizes))
        flat = new.like(match.flat, match.x, *match.flat.inputs[1:])
        operands = match.product.inputs[2:]
        return new.like(match.product, flat, new.constant(ordered.reshape(weight.shape), "weight"), *operands)


def _flattens(match: Match) -> bool:
    target, shape = match.target.values.tolist(), match.x.shape
    values = prod(shape[1:])
    return len(target) == 2 and (
        (target[1] == values and target[0] in (-1, shape[0]))
        or (target[0] == 0 and not match.flat.attrs.get("allowzero", 0) and target[1] in (-1, values))
    )


# Layouts of regions ---------------------------------------------------------------------------------------------------

_MOST_ROUNDS: Final = 16


class SinkTransposes(Pass):
    """Change the layout of regions of elementwise operators if that removes Transposes.

    ``Transpose(Relu(Transpose(x, p)), inverse(p)) -> Relu(x)``

    A region is a set of connected operators that work in any layout: elementwise ones, and Concat, Split, Pad, Slice
    and reductions, whose axes are renamed. Channels-last networks lose the Transposes around their convolutions. At an
    equal number, Transposes of images move down, or up if a convolution reads them.
    """

    def apply(self, graph: Graph) -> Changes:
        names = Names(graph)
        changed: dict[str, None] = {}
        for scope in all_graphs(graph):
            for _ in range(_MOST_ROUNDS):
                turned = _round(scope, names)
                if not turned:
                    break
                changed.update(dict.fromkeys(turned))
        if changed:
            toposort(graph)
        return Changes(tuple(changed))


def _round(scope: Graph, names: Names) -> list[str]:
    inside = set(scope.nodes)
    changed: list[str] = []
    new: list[Node] = []
    gone: list[Node] = []
    for region in list(_regions(scope.nodes)):
        # The new outputs would also be inputs of the region.
        if region.reads_itself:
            continue
        turns = [_turn(region, permutation, inside) for permutation in _suggested(region)]
        best = max(turns, key=lambda turned: turned.gain, default=None)
        if best is not None and best.gain > (0, 0):
            _apply(best, names, new, gone)
            inside.difference_update(gone)
            changed.extend(node.name for node in region.nodes)
    scope.nodes.extend(new)
    remove_nodes(scope, gone)
    return changed


@dataclass(frozen=True, eq=False)
class _Region:
    """Connected nodes that work in any layout, all on tensors of one rank."""

    rank: int
    nodes: tuple[Node, ...]

    @property
    def made(self) -> list[Variable]:
        return [tensor for node in self.nodes for tensor in node.outputs if tensor.name]

    @property
    def read(self) -> list[Tensor]:
        results = set(self.made)
        return list(dict.fromkeys(tensor for node in self.nodes for tensor in laid_out(node) if tensor not in results))

    @property
    def reads_itself(self) -> bool:
        """Whether a chain of Transposes leads from an output of the region back to an input."""
        results = set(self.made)
        for tensor in self.read:
            while tensor.inputs and permutation_of(tensor.inputs[0]) is not None:
                tensor = tensor.inputs[0].inputs[0]
                if tensor in results:
                    return True
        return False


def _regions(nodes: Sequence[Node]) -> Iterator[_Region]:
    ranks = {node: rank for node in nodes if (rank := rank_in_any_layout(node))}
    seen: set[Node] = set()
    for start, rank in ranks.items():
        members, pending = [], [start]
        while pending:
            node = pending.pop()
            if node in seen or ranks.get(node) != rank:
                continue
            seen.add(node)
            members.append(node)
            pending.extend(maker for tensor in laid_out(node) for maker in tensor.inputs)
            pending.extend(
                reader
                for result in node.outputs
                for reader in result.outputs
                if reader in ranks and any(result is tensor for tensor in laid_out(reader))
            )
        if members:
            yield _Region(rank, tuple(members))


def _suggested(region: _Region) -> list[Permutation]:
    """Return the layouts that cancel a Transpose before or behind the region."""
    makers = [maker for tensor in region.read for maker in tensor.inputs]
    readers = [reader for tensor in region.made for reader in tensor.outputs]
    before = [permutation for maker in makers if (permutation := permutation_of(maker))]
    after = [inverse(permutation) for reader in readers if (permutation := permutation_of(reader))]
    layouts = dict.fromkeys((*before, *after))
    return [order for order in layouts if len(order) == region.rank and order != tuple(sorted(order))]


class _Turn(NamedTuple):
    """A region in a new layout; each old tensor is ``Transpose<perm = permutation>`` of its new one.

    Attributes:
        fed: for each input tensor its source in the new layout, and the order of a new Transpose behind it or None.
        vanishing: Transposes behind the region that go.
        losing: nodes behind the region that drop so many axes that their result stays the same.
        shown: tensors that other nodes read in the old layout.
        gain: number of removed Transposes, then a tie-break: better places of the remaining ones.
    """

    region: _Region
    permutation: Permutation
    fed: Mapping[Tensor, tuple[Tensor, Permutation | None]]
    vanishing: Sequence[Node]
    losing: Sequence[Node]
    shown: Collection[Tensor]
    gain: tuple[int, int]


def _turn(region: _Region, permutation: Permutation, inside: Collection[Node]) -> _Turn:
    fed = {tensor: _source(tensor, permutation, inside) for tensor in region.read}
    nodes = set(region.nodes)
    vanishing: list[Node] = []
    losing: list[Node] = []
    shown: list[Tensor] = []
    for tensor in region.made:
        readers = [reader for reader in dict.fromkeys(tensor.outputs) if reader not in nodes]
        going = [reader for reader in readers if reader in inside and permutation_of(reader) == inverse(permutation)]
        # A tensor has one name, so it can be only one graph output.
        returned = [reader for reader in going if reader.outputs[0].graph_output_of]
        vanishing.extend(reader for reader in going if reader not in returned[1:])
        others = [reader for reader in readers if reader not in going or reader in returned[1:]]
        if tensor.graph_output_of or not all(node in inside and loses_order(node, permutation) for node in others):
            shown.append(tensor)
        else:
            losing.extend(others)
    sources = {source for source, _ in fed.values()}
    freed = [tensor for tensor in fed if tensor not in sources and _is_only_for(tensor, nodes, inside)]
    requested = [tensor for tensor, (_, order) in fed.items() if order is not None]
    better = len(freed) - len(requested) + 2 * sum(feeds_channels_first(node.outputs[0]) for node in vanishing)
    better -= 2 * sum(map(feeds_channels_first, shown))
    image = region.rank > 3 and permutation in (channels_last(region.rank), inverse(channels_last(region.rank)))
    saved = len(freed) - len(requested) + len(vanishing) - len(shown)
    return _Turn(region, permutation, fed, vanishing, losing, set(shown), (saved, better if image else 0))


def _source(tensor: Tensor, permutation: Permutation, inside: Collection[Node]) -> tuple[Tensor, Permutation | None]:
    maker = producer(tensor)
    order = permutation_of(maker) if maker is not None and maker in inside else None
    wanted = inverse(permutation)
    if maker is not None and order is not None:
        rest = composed(order, wanted)
        return maker.inputs[0], None if rest == tuple(sorted(rest)) else rest
    for reader in tensor.outputs:
        if reader in inside and permutation_of(reader) == wanted:
            return reader.outputs[0], None
    return tensor, wanted


def _is_only_for(tensor: Tensor, nodes: Collection[Node], inside: Collection[Node]) -> bool:
    transposed = bool(tensor.inputs) and tensor.inputs[0] in inside and permutation_of(tensor.inputs[0]) is not None
    return transposed and not tensor.graph_output_of and all(reader in nodes for reader in tensor.outputs)


def _apply(turned: _Turn, names: Names, added: list[Node], gone: list[Node]) -> None:
    """Change the layout of a region; append new Transposes to ``added`` and obsolete ones to ``gone``."""
    nodes, permutation = set(turned.region.nodes), turned.permutation
    results = turned.region.made
    for node in turned.losing:
        lose(node, permutation, names)
    for node in turned.region.nodes:
        turn(node, permutation, names)
    fed: dict[Tensor, Tensor] = {}
    for tensor, (source, order) in turned.fed.items():
        fed[tensor] = source
        if order is not None:
            fed[tensor] = new = _changed(source, order, names.unique(f"{tensor.name}.turned"))
            added.append(_transpose(source, new, order, names))
    # All at once: a replacement may itself be replaced.
    for node in turned.region.nodes:
        node.inputs = [fed.get(tensor, tensor) for tensor in node.inputs]
    for tensor in fed:
        if not tensor.outputs and not tensor.graph_output_of:
            gone.extend(maker for maker in tensor.inputs if permutation_of(maker))
    for tensor in results:
        if tensor in turned.shown:
            new = _changed(tensor, inverse(permutation), names.unique(f"{tensor.name}.turned"))
            maker = tensor.inputs[0]
            maker.outputs[next(index for index, output in enumerate(maker.outputs) if output is tensor)] = new
            replace_uses(tensor, new, nodes.union(turned.vanishing))
            added.append(_transpose(new, tensor, permutation, names))
            continue
        if tensor.shape is not None:
            tensor.shape = [tensor.shape[axis] for axis in inverse(permutation)]
        tensor.name = names.unique(f"{tensor.name}.turned")
    for reader in turned.vanishing:
        # In the new layout the tensor equals the output of the Transpose.
        result, same = reader.outputs[0], reader.inputs[0]
        if not result.graph_output_of and not same.graph_output_of:
            result.name, same.name = same.name, result.name
        replace_uses(result, same, graph_outputs=True)
    gone.extend(turned.vanishing)


def _changed(tensor: Tensor, order: Permutation, name: str) -> Variable:
    shape = None if tensor.shape is None else [tensor.shape[axis] for axis in order]
    return Variable(name, tensor.dtype, shape)


def _transpose(source: Tensor, result: Variable, order: Permutation, names: Names) -> Node:
    return Node("Transpose", names.unique(f"{result.name}.Transpose"), {"perm": list(order)}, [source], [result])
