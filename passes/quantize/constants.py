"""Reduce the file size: equal, transposed and 16-bit constants."""

from __future__ import annotations

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
    Node,
    NodeBuilder,
    Tensor,
    TensorData,
    Variable,
    insert_nodes,
    is_constant,
    onnx_dtype,
    place_constants,
    replace_uses,
)
from onnxq.ir.data_types import is_packed, numpy_dtype
from onnxq.lowering import numbers_in_words
from onnxq.numerics.formats import FORMATS
from onnxq.rewrite import Changes, Pass

_BITS_SET: Final = np.array([number.bit_count() for number in range(256)], np.uint8)
# numpy 1 has no function for it.
_count_bits: Final = getattr(np, "bitwise_count", _BITS_SET.__getitem__)
# Formats whose values share bytes; uint8 and uint32 tensors hold them in the same order.
_IN_WORDS: Final = {FORMATS[name].onnx_type: FORMATS[name] for name in ("int4", "uint4", "int2", "uint2")}
_LOOK_UPS: Final = frozenset({"Gather", "GatherBlockQuantized"})


@dataclass(frozen=True)
class DeduplicateTransposedWeights(Pass):
    """Replace initializers that equal another one, reshaped or transposed, by nodes that a runtime folds.

    An embedding that a matrix multiplication reads transposed is stored once. Values of 4 and 2 bits are also extracted
    from uint8 and uint32 tensors. Skips graph inputs and outputs, strings, initializers outside the scope of the first
    one, and initializers of fewer than `smallest` bytes.

    Attributes:
        smallest: size in bytes below which the nodes cost more than they save.
    """

    smallest: int = 1 << 12

    def apply(self, graph: Graph) -> Changes:
        names = Names(graph)
        changed: list[str] = []
        first: dict[Graph, list[Node]] = defaultdict(list)
        stored: dict[tuple[int, bytes], tuple[Constant, Graph]] = {}
        for tensor, home in self._candidates(graph):
            own = tensor.tensor_data.digest()
            source = _find(stored, onnx_dtype(tensor), own, home)
            turned = source is None and len(_squeezed(tensor)) == 2
            if turned:
                source = _find(stored, onnx_dtype(tensor), _transposed(tensor).digest(), home)
            if source is None:
                stored.setdefault((onnx_dtype(tensor), own), (tensor, home))
                continue
            chain = NodeBuilder(tensor.name, names)
            replace_uses(tensor, _shown(chain, source, tensor, turned=turned))
            first[home] += chain.nodes
            changed.append(tensor.name)
        insert_nodes(graph, first=first)
        return Changes(tuple(changed))

    def _candidates(self, graph: Graph) -> Iterator[tuple[Constant, Graph]]:
        """Yield groups of possibly equal initializers with their graphs; those to keep come first."""
        groups: dict[int, list[tuple[Constant, Graph]]] = defaultdict(list)
        for scope, tensors in place_constants(graph).items():
            for tensor in tensors:
                if _may_be_shown(tensor) and tensor.nbytes >= self.smallest:
                    groups[tensor.nbytes].append((tensor, scope))
        for alike in groups.values():
            # The first bytes of packed types depend on their layout.
            in_words = any(is_packed(onnx_dtype(tensor)) for tensor, _ in alike)
            for near in [alike] if in_words else _grouped(alike, lambda tensor_data: tensor_data.fingerprint):
                for group in _grouped(near, _bits_set):
                    # Embeddings come first, so lookups read the stored tensor. The stable sort keeps the graph order.
                    yield from sorted(group, key=lambda pair: not _is_looked_up(pair[0]))


def _grouped(
    alike: list[tuple[Constant, Graph]], key: Callable[[TensorData], Hashable]
) -> Iterator[list[tuple[Constant, Graph]]]:
    """Yield groups of two or more constants with the same key; a single constant needs no key."""
    groups: dict[Hashable, list[tuple[Constant, Graph]]] = defaultdict(list)
    for tensor, scope in alike if len(alike) > 1 else ():
        groups[key(tensor.tensor_data)].append((tensor, scope))
    return (group for group in groups.values() if len(group) > 1)


def _find(
    stored: dict[tuple[int, bytes], tuple[Constant, Graph]], dtype: int, digest: bytes, home: Graph
) -> Constant | None:
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
    """Append nodes that compute one constant from another, and return the result; equal constants need no node."""
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
    """Whether nodes may compute a constant. Shapes stay, because Reshape reads them itself."""
    shapes = any(node.op == "Reshape" and node.inputs[0] is not tensor for node in tensor.outputs)
    return is_constant(tensor) and bool(tensor.outputs) and not tensor.graph_output_of and not shapes


def _is_looked_up(tensor: Constant) -> bool:
    return any(node.op in _LOOK_UPS and node.inputs[0] is tensor for node in tensor.outputs)


def _squeezed(tensor: Constant) -> tuple[int, ...]:
    return tuple(extent for extent in tensor.shape if extent != 1)


def _transposed(tensor: Constant) -> TensorData:
    return ArrayData(tensor.values.reshape(_squeezed(tensor)).T)


def _bits_set(tensor_data: TensorData) -> int:
    """Return the number of one bits, which does not depend on the order of the elements."""
    return sum(int(_count_bits(np.frombuffer(chunk, np.uint8)).sum(dtype=np.int64)) for chunk in tensor_data.chunks())


# --- floats that were 16 bits wide ----------------------------------------------------------------------------------

_FLOAT = np.dtype(np.float32)
# A Cast with its names takes about as many bytes as narrowing this many values saves.
_SMALLEST = 128
# Operators that need their constants as initializers.
_KEPT = frozenset({"DequantizeLinear", "QuantizeLinear"})


@dataclass(frozen=True)
class NarrowConstants(Pass):
    """Store float32 constants in 16 bits behind a Cast, if every value is exact in that type.

    A runtime folds the Cast when it loads the model, so only the file size changes. Skips constants of fewer than 128
    values, overridable inputs, graph outputs, scales, and constants of other operator domains.

    Attributes:
        type: `TensorProto.DataType` of a 16-bit float.
    """

    type: int = TensorProto.FLOAT16

    def apply(self, graph: Graph) -> Changes:
        names = Names(graph)
        dtype = numpy_dtype(self.type)
        changed = []
        first: dict[Graph, list[Node]] = {}
        for scope, tensors in place_constants(graph).items():
            new = NodeBuilder("", names)
            first[scope] = new.nodes
            for tensor in tensors:
                if not _may_be_cast(tensor):
                    continue
                values = tensor.values
                with np.errstate(over="ignore"):
                    narrow = values.astype(dtype)
                if not np.array_equal(narrow.astype(_FLOAT), values, equal_nan=True):
                    continue
                stored, shape = new.store(f"{tensor.name}.narrow", narrow), list(tensor.shape)
                to = int(TensorProto.FLOAT)
                wide = new.node("Cast", f"{tensor.name}.widen", [stored], f"{tensor.name}.wide", _FLOAT, shape, to=to)
                replace_uses(tensor, wide)
                changed.append(tensor.name)
        insert_nodes(graph, first=first)
        return Changes(tuple(changed))


def _may_be_cast(tensor: Constant) -> bool:
    return (
        onnx_dtype(tensor) == TensorProto.FLOAT
        and tensor.nbytes >= _FLOAT.itemsize * _SMALLEST
        and bool(tensor.outputs)
        and tensor.overridable_input is None
        and not tensor.graph_output_of
        and not any(node.op in _KEPT or node.domain for node in tensor.outputs)
    )
