"""Make the file small: equal, repeated and 16-bit constants, and attributes that have their default value."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, defs

from onnxq.ir import (
    ArrayData,
    Constant,
    Graph,
    Names,
    Node,
    Tensor,
    TensorData,
    Variable,
    all_nodes,
    constant,
    insert_nodes,
    is_constant,
    onnx_dtype,
    place_constants,
    replace_uses,
)
from onnxq.ir.data_types import numpy_dtype
from onnxq.lowering import NodeBuilder, numbers_in_words
from onnxq.numerics.formats import FORMATS
from onnxq.ops import ALREADY_QUANTIZED, operator_of
from onnxq.rewrite import Changes, Pass
from onnxq.rewrite.constant_folding import without_repeats

_BITS_SET: Final = np.array([number.bit_count() for number in range(256)], np.uint8)
# Codes that share bytes, which bytes and words of several hold in the same order.
_IN_WORDS: Final = {FORMATS[name].onnx_type: FORMATS[name] for name in ("int4", "uint4", "int2", "uint2")}
_LOOK_UPS: Final = frozenset({"Gather", "GatherBlockQuantized"})


@dataclass(frozen=True)
class DeduplicateTransposedWeights(Pass):
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
            own = tensor.tensor_data.digest()
            found = _find(stored, onnx_dtype(tensor), own, home)
            turned = found is None and len(_squeezed(tensor)) == 2
            if turned:
                found = _find(stored, onnx_dtype(tensor), _transposed(tensor).digest(), home)
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


def _bits_set(tensor_data: TensorData) -> int:
    """Return how many bits are one, which is the same in whatever order the elements lie."""
    return sum(int(_BITS_SET[np.frombuffer(chunk, np.uint8)].sum(dtype=np.int64)) for chunk in tensor_data.chunks())


# --- constants that repeat along an axis ----------------------------------------------------------------------------

_EXPAND_SINCE: Final = 8
# Codes are small, and their kernels want them stored.
_TYPES: Final = frozenset(
    {TensorProto.BOOL, TensorProto.DOUBLE, TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT32, TensorProto.INT64}
)
_LEAST_SAVED: Final = 2
# The input of GRU, LSTM and RNN that holds their biases.
_CELL_BIAS: Final = 3


@dataclass(frozen=True)
class ExpandConstants(Pass):
    """Let large constants that repeat along an axis, such as zeros, come from an Expand, which a runtime folds.

    Exporters write them so, and folding made them large. Weights and biases stay, since several engines accept them
    only as initializers. So do inputs and outputs of a graph, constants that nodes on quantized values read, constants
    of less than ``smallest`` bytes, and everything below opset 8.

    Attributes:
        smallest: bytes below which the nodes cost more than they save.
    """

    smallest: int = 1 << 14

    def apply(self, graph: Graph) -> Changes:
        """Store; ``changed`` holds the names of the initializers that are no longer read."""
        changed: list[str] = []
        chains: dict[Graph, list[NodeBuilder]] = defaultdict(list)
        names = Names(graph)
        for scope, tensors in place_constants(graph).items() if graph.opset >= _EXPAND_SINCE else ():
            for tensor in tensors:
                if not self._is_candidate(tensor):
                    continue
                once = without_repeats(tensor.values)
                if _LEAST_SAVED * once.nbytes > tensor.nbytes:
                    continue
                chain = NodeBuilder(tensor.name, names)
                replace_uses(tensor, chain.expand("repeated", chain.store("once", once), tensor.shape))
                chains[scope].append(chain)
                changed.append(tensor.name)
        for scope, made in chains.items():
            insert_nodes(scope, first=[node for chain in made for node in chain.nodes])
        return Changes(tuple(changed))

    def _is_candidate(self, tensor: Constant) -> bool:
        stored = is_constant(tensor) and bool(tensor.outputs) and not tensor.graph_output_of
        large = tensor.nbytes >= self.smallest and math.prod(tensor.shape) > 1 and onnx_dtype(tensor) in _TYPES
        return stored and large and not any(_wants_initializer(node, tensor) for node in tensor.outputs)


def _wants_initializer(node: Node, tensor: Constant) -> bool:
    """Whether a node works on quantized values, or reads the tensor as a weight or bias."""
    if node.op in ALREADY_QUANTIZED:
        return True
    operator = operator_of(node)
    if operator is None or operator.looks_up:
        return False
    places = {*operator.weights, operator.bias, *((_CELL_BIAS,) if operator.recurrent else ())}
    return any(node.inputs[index] is tensor for index in places if index is not None and index < len(node.inputs))


# --- floats that were 16 bits wide ----------------------------------------------------------------------------------

_FLOAT = np.dtype(np.float32)
# A Cast and its names take about the bytes that so many values save.
_SMALLEST = 128
# They want constants as they are.
_KEPT = frozenset({"DequantizeLinear", "QuantizeLinear"})


@dataclass(frozen=True)
class NarrowConstants(Pass):
    """Store float32 constants in 16 bits, behind a Cast, where each value is one of that type.

    A runtime folds the Cast when it loads the model, so nothing changes but the size of the file. Leaves constants of
    fewer than 128 values, those that a caller may override or that a graph returns, scales, and what operators of
    other domains read.

    Attributes:
        type: ``TensorProto.DataType`` of 16-bit floats.
    """

    type: int = TensorProto.FLOAT16

    def apply(self, graph: Graph) -> Changes:
        """Narrow; new tensors are called ``w.narrow`` and ``w.wide``."""
        names = Names(graph)
        dtype = numpy_dtype(self.type)
        changed = []
        for scope, tensors in place_constants(graph).items():
            casts = []
            for tensor in tensors:
                if not _may_be_cast(tensor):
                    continue
                values = tensor.values
                with np.errstate(over="ignore"):
                    narrow = values.astype(dtype)
                if not np.array_equal(narrow.astype(_FLOAT), values, equal_nan=True):
                    continue
                wide = Variable(names.unique(f"{tensor.name}.wide"), _FLOAT, list(tensor.shape))
                replace_uses(tensor, wide)
                stored = constant(names.unique(f"{tensor.name}.narrow"), narrow)
                name = names.unique(f"{tensor.name}.widen")
                casts.append(Node("Cast", name, {"to": int(TensorProto.FLOAT)}, [stored], [wide]))
                changed.append(tensor.name)
            insert_nodes(scope, first=casts)
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


# --- attributes of default value ------------------------------------------------------------------------------------

# What the standard says in words, for every spatial axis.
_SPATIAL: Final = frozenset({"AveragePool", "Conv", "ConvTranspose", "LpPool", "MaxPool"})
_OF_AXES: Final[Mapping[str, int]] = {"dilations": 1, "strides": 1, "pads": 0}


class DropDefaults(Pass):
    """Drop attributes of standard operators that have the value that they have without being written.

    Exporters write all of them: a fiftieth of a small network of convolutions in 8 bits. Leaves those of functions and
    other domains, and those in bodies as everywhere.
    """

    def apply(self, graph: Graph) -> Changes:
        """Drop; ``changed`` holds the names of the nodes."""
        changed = []
        for _, node in all_nodes(graph):
            if node.domain or not node.attrs:
                continue
            defaults = _defaults(node.op, graph.opset)
            said = [name for name, value in node.attrs.items() if name in defaults and _is(value, defaults[name])]
            if node.op in _SPATIAL:
                said += [name for name, usual in _OF_AXES.items() if _is_all(node.attrs.get(name), usual)]
            for name in said:
                del node.attrs[name]
            if said:
                changed.append(node.name)
        return Changes(tuple(changed))


@cache
def _defaults(op: str, opset: int) -> Mapping[str, Any]:
    """Return the values that the standard declares for the attributes of an operator; none of an unknown one."""
    # Optimisers write some operators at opsets that do not have them yet, which onnxruntime runs all the same.
    if not defs.has(op, opset, ""):
        return {}
    declared = defs.get_schema(op, opset).attributes
    found = {name: one.default_value for name, one in declared.items() if one.default_value.type}
    return {name: onnx.helper.get_attribute_value(value) for name, value in found.items()}


def _is(value: object, default: object) -> bool:
    text = default.decode() if isinstance(default, bytes) else default
    return type(value) is type(text) and value == text


def _is_all(value: Any, usual: int) -> bool:
    return isinstance(value, list | tuple) and all(one == usual for one in value)
