"""Compute in the layout of the operators around, so that Transposes between them go."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from onnxq.ir import (
    Graph,
    Names,
    Node,
    Tensor,
    Variable,
    remove_nodes,
    replace_uses,
    scopes,
    toposort,
)
from onnxq.rewrite import Changes, Pass
from onnxq.rewrite.layouts import (
    Permutation,
    channels_last,
    composed,
    feeds_channels_first,
    inverse,
    laid_out,
    lose,
    loses_order,
    permutation_of,
    rank_in_any_layout,
    turn,
)

_MOST_ROUNDS: Final = 16


class SinkTransposes(Pass):
    """Let regions of elementwise operators compute in the layout of what feeds them where that takes Transposes away.

    A region is a set of connected operators that work in any layout: elementwise ones, and Concat, Split, Pad, Slice
    and reductions, whose axes are renamed. Networks whose image has its channels last lose the Transposes around every
    convolution. Where the number of Transposes stays, those of images go down, and up from in front of convolutions.
    """

    def apply(self, graph: Graph) -> Changes:
        """Sink; ``changed`` holds the names of the nodes that compute in another layout."""
        names = Names(graph)
        changed: dict[str, None] = {}
        for scope in scopes(graph):
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
    made: list[Node] = []
    gone: list[Node] = []
    for region in list(_regions(scope.nodes)):
        # Its new results would be sources of what it reads.
        if region.reads_itself:
            continue
        turns = [_turn(region, permutation, inside) for permutation in _suggested(region)]
        best = max(turns, key=lambda turned: turned.gain, default=None)
        if best is not None and best.gain > (0, 0):
            _apply(best, names, made, gone)
            inside.difference_update(gone)
            changed.extend(node.name for node in region.nodes)
    scope.nodes.extend(made)
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
        """What comes from outside, each tensor once."""
        made = set(self.made)
        return list(dict.fromkeys(tensor for node in self.nodes for tensor in laid_out(node) if tensor not in made))

    @property
    def reads_itself(self) -> bool:
        """Whether Transposes alone lead from a tensor that the region makes to one that it reads."""
        made = set(self.made)
        for tensor in self.read:
            while tensor.inputs and permutation_of(tensor.inputs[0]) is not None:
                tensor = tensor.inputs[0].inputs[0]
                if tensor in made:
                    return True
        return False


def _regions(nodes: Sequence[Node]) -> Iterator[_Region]:
    ranks = {node: rank for node in nodes if (rank := rank_in_any_layout(node))}
    seen: set[Node] = set()
    for start, rank in ranks.items():
        found, pending = [], [start]
        while pending:
            node = pending.pop()
            if node in seen or ranks.get(node) != rank:
                continue
            seen.add(node)
            found.append(node)
            pending.extend(maker for tensor in laid_out(node) for maker in tensor.inputs)
            pending.extend(
                reader
                for made in node.outputs
                for reader in made.outputs
                if reader in ranks and any(made is tensor for tensor in laid_out(reader))
            )
        if found:
            yield _Region(rank, tuple(found))


def _suggested(region: _Region) -> list[Permutation]:
    """Return the layouts in which a Transpose in front or behind would be for nothing."""
    makers = [maker for tensor in region.read for maker in tensor.inputs]
    readers = [reader for tensor in region.made for reader in tensor.outputs]
    before = [permutation for maker in makers if (permutation := permutation_of(maker))]
    after = [inverse(permutation) for reader in readers if (permutation := permutation_of(reader))]
    return [one for one in dict.fromkeys((*before, *after)) if len(one) == region.rank and one != tuple(sorted(one))]


class _Turn(NamedTuple):
    """A region in a new layout: each of its tensors is what the permutation makes of the one that is computed instead.

    Attributes:
        fed: what gives each tensor from outside in the new layout: another tensor, and what must be done to it.
        vanishing: Transposes behind that go, for the new tensor is what they make.
        losing: nodes behind that drop so many axes that their result is the same.
        shown: tensors that others go on reading in the old layout.
        gain: how many Transposes go, and where their number stays, whether those that are left stand better.
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
        # A tensor has one name, so it can be one output of the model.
        returned = [reader for reader in going if reader.outputs[0].returned_by]
        vanishing.extend(reader for reader in going if reader not in returned[1:])
        others = [reader for reader in readers if reader not in going or reader in returned[1:]]
        if tensor.returned_by or not all(one in inside and loses_order(one, permutation) for one in others):
            shown.append(tensor)
        else:
            losing.extend(others)
    sources = {source for source, _ in fed.values()}
    freed = [tensor for tensor in fed if tensor not in sources and _is_only_for(tensor, nodes, inside)]
    asked = [tensor for tensor, (_, order) in fed.items() if order is not None]
    better = len(freed) - len(asked) + 2 * sum(feeds_channels_first(node.outputs[0]) for node in vanishing)
    better -= 2 * sum(map(feeds_channels_first, shown))
    image = region.rank > 3 and permutation in (channels_last(region.rank), inverse(channels_last(region.rank)))
    saved = len(freed) - len(asked) + len(vanishing) - len(shown)
    return _Turn(region, permutation, fed, vanishing, losing, set(shown), (saved, better if image else 0))


def _source(tensor: Tensor, permutation: Permutation, inside: Collection[Node]) -> tuple[Tensor, Permutation | None]:
    maker = tensor.inputs[0] if tensor.inputs else None
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
    """Whether a tensor is made by a Transpose for these nodes alone."""
    transposed = bool(tensor.inputs) and tensor.inputs[0] in inside and permutation_of(tensor.inputs[0]) is not None
    return transposed and not tensor.returned_by and all(reader in nodes for reader in tensor.outputs)


def _apply(turned: _Turn, names: Names, made: list[Node], gone: list[Node]) -> None:
    """Compute a region in its new layout; list the Transposes that are new, and those that nobody needs any more."""
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
            fed[tensor] = new = _changed(source, order, names.fresh(f"{tensor.name}.turned"))
            made.append(_transpose(source, new, order, names))
    # All at once: what one tensor is replaced by may be replaced itself.
    for node in turned.region.nodes:
        node.inputs = [fed.get(tensor, tensor) for tensor in node.inputs]
    for tensor in fed:
        if not tensor.outputs and not tensor.returned_by:
            gone.extend(maker for maker in tensor.inputs if permutation_of(maker))
    for tensor in results:
        if tensor in turned.shown:
            new = _changed(tensor, inverse(permutation), names.fresh(f"{tensor.name}.turned"))
            maker = tensor.inputs[0]
            maker.outputs[next(index for index, one in enumerate(maker.outputs) if one is tensor)] = new
            replace_uses(tensor, new, nodes.union(turned.vanishing))
            made.append(_transpose(new, tensor, permutation, names))
        elif tensor.shape is not None:
            tensor.shape = [tensor.shape[axis] for axis in inverse(permutation)]
    for reader in turned.vanishing:
        replace_uses(reader.outputs[0], reader.inputs[0], graph_outputs=True)
    gone.extend(turned.vanishing)


def _changed(tensor: Tensor, order: Permutation, name: str) -> Variable:
    shape = None if tensor.shape is None else [tensor.shape[axis] for axis in order]
    return Variable(name, tensor.dtype, shape)


def _transpose(source: Tensor, result: Variable, order: Permutation, names: Names) -> Node:
    return Node("Transpose", names.fresh(f"{result.name}.Transpose"), {"perm": list(order)}, [source], [result])
