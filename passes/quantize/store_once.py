"""Store once what several initializers hold in another shape or order."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from onnx import TensorProto

from onnxq.ir import (
    ArrayData,
    Constant,
    Graph,
    Names,
    Tensor,
    TensorData,
    Variable,
    insert_nodes,
    is_constant,
    onnx_dtype,
    place_constants,
    replace_uses,
)
from onnxq.lowering import NodeBuilder, numbers_in_words
from onnxq.numerics.formats import FORMATS
from onnxq.rewrite import Changes, Pass

_BITS_SET: Final = np.array([number.bit_count() for number in range(256)], np.uint8)
# Codes that share bytes, which bytes and words of several hold in the same order.
_IN_WORDS: Final = {FORMATS[name].onnx_type: FORMATS[name] for name in ("int4", "uint4", "int2", "uint2")}
_LOOK_UPS: Final = frozenset({"Gather", "GatherBlockQuantized"})


@dataclass(frozen=True)
class StoreOnce(Pass):
    """Let initializers of equal bytes, reshaped or transposed, come from the first by nodes that a runtime folds.

    A table whose rows are looked up, and which a product reads transposed, is stored once. Codes of 4 and 2 bits are
    also taken out of bytes and words. Leaves initializers that are inputs or outputs of a graph, text, those that the
    other's graph does not show, and those of fewer than ``smallest`` bytes.

    Attributes:
        smallest: bytes below which the nodes cost more than they save.
    """

    smallest: int = 1 << 12

    def apply(self, graph: Graph) -> Changes:
        """Store; ``changed`` holds the names of the initializers that are no longer read."""
        names = Names(graph)
        changed: list[str] = []
        nodes: dict[Graph, list[NodeBuilder]] = defaultdict(list)
        stored: dict[tuple[int, bytes], tuple[Constant, Graph]] = {}
        for tensor, home in self._candidates(graph):
            own = _digest(tensor.tensor_data)
            found = _find(stored, onnx_dtype(tensor), own, home)
            turned = found is None and len(_squeezed(tensor)) == 2
            if turned:
                found = _find(stored, onnx_dtype(tensor), _digest(_transposed(tensor)), home)
            if found is None:
                stored.setdefault((onnx_dtype(tensor), own), (tensor, home))
                continue
            chain = NodeBuilder(tensor.name, names)
            replace_uses(tensor, _shown(chain, found, tensor, turned=turned))
            nodes[home].append(chain)
            changed.append(tensor.name)
        for scope, chains in nodes.items():
            insert_nodes(scope, first=[node for chain in chains for node in chain.nodes])
        return Changes(tuple(changed))

    def _candidates(self, graph: Graph) -> Iterator[tuple[Constant, Graph]]:
        """Yield the initializers that may hold the same as others, with their graphs, the ones to be kept first."""
        groups: dict[int, list[tuple[Constant, Graph]]] = defaultdict(list)
        for scope, tensors in place_constants(graph).items():
            for tensor in tensors:
                if _may_be_shown(tensor) and tensor.nbytes >= self.smallest:
                    groups[tensor.nbytes].append((tensor, scope))
        for alike in groups.values():
            # Numbers that share bytes with others have no ends of their own.
            in_words = any(onnx_dtype(tensor) in _IN_WORDS for tensor, _ in alike)
            for near in [alike] if in_words else _grouped(alike, lambda tensor_data: tensor_data.fingerprint):
                for group in _grouped(near, _bits_set):
                    # Rows are looked up where they lie; the sort keeps the order of the graphs otherwise.
                    yield from sorted(group, key=lambda pair: not _is_looked_up(pair[0]))


def _grouped(
    alike: list[tuple[Constant, Graph]], key: Callable[[TensorData], Hashable]
) -> Iterator[list[tuple[Constant, Graph]]]:
    """Yield groups of two constants and more that have the same key; of one alone it is not asked."""
    groups: dict[Hashable, list[tuple[Constant, Graph]]] = defaultdict(list)
    for tensor, scope in alike if len(alike) > 1 else ():
        groups[key(tensor.tensor_data)].append((tensor, scope))
    return (group for group in groups.values() if len(group) > 1)


def _find(
    stored: dict[tuple[int, bytes], tuple[Constant, Graph]], dtype: int, digest: bytes, home: Graph
) -> Constant | None:
    """Return a constant of these bytes that a graph can see."""
    kinds = (dtype, TensorProto.UINT8, TensorProto.UINT32) if dtype in _IN_WORDS else (dtype,)
    for kind in kinds:
        if (kind, digest) in stored:
            tensor, scope = stored[kind, digest]
            around: Graph | None = home
            while around is not None:
                if around is scope:
                    return tensor
                around = around.parent
    return None


def _shown(chain: NodeBuilder, source: Constant, tensor: Constant, *, turned: bool) -> Tensor:
    """Append what makes one constant of another and return it; nothing is made where they are equal."""
    shape = _squeezed(tensor)
    before = shape[::-1] if turned else tensor.shape
    in_words = onnx_dtype(source) != onnx_dtype(tensor)
    shown: Tensor = numbers_in_words(chain, source, _IN_WORDS[onnx_dtype(tensor)]) if in_words else source
    if in_words or source.shape != before:
        shown = chain.reshape("stored", shown, before)
    if turned:
        shown = chain.then("Transpose", "turned", [shown], perm=[1, 0])
        if shape != tensor.shape:
            shown = chain.reshape("shown", shown, tensor.shape)
    if in_words:
        shown = chain.cast("typed", shown, onnx_dtype(tensor))
    if isinstance(shown, Variable):
        shown.dtype, shown.shape = tensor.dtype, list(tensor.shape)
    return shown


def _may_be_shown(tensor: Constant) -> bool:
    """Whether nodes may make a constant; shapes are left, which such nodes read themselves."""
    shapes = any(node.op == "Reshape" and node.inputs[0] is not tensor for node in tensor.outputs)
    return is_constant(tensor) and bool(tensor.outputs) and not tensor.graph_output_of and not shapes


def _is_looked_up(tensor: Constant) -> bool:
    return any(node.op in _LOOK_UPS and node.inputs[0] is tensor for node in tensor.outputs)


def _squeezed(tensor: Constant) -> tuple[int, ...]:
    return tuple(extent for extent in tensor.shape if extent != 1)


def _transposed(tensor: Constant) -> TensorData:
    return ArrayData(tensor.values.reshape(_squeezed(tensor)).T)


def _digest(tensor_data: TensorData) -> bytes:
    digest = hashlib.blake2b(digest_size=20)
    for chunk in tensor_data.chunks():
        digest.update(chunk)
    return digest.digest()


def _bits_set(tensor_data: TensorData) -> int:
    """Return how many bits are one, which is the same in whatever order the elements lie."""
    return sum(int(_BITS_SET[np.frombuffer(chunk, np.uint8)].sum(dtype=np.int64)) for chunk in tensor_data.chunks())
