"""Constants: folding of constant subgraphs, the place of initializers, and denormal weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from types import MappingProxyType
from typing import Any, Final, TypeGuard
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper

from onnxq.ir import (
    ArrayData,
    Constant,
    Graph,
    Node,
    Tensor,
    TensorData,
    Variable,
    all_graphs,
    all_nodes,
    become_constant,
    constants,
    is_constant,
    onnx_dtype,
    remove_nodes,
)
from onnxq.numerics.blocks import PIECE
from onnxq.ops import Role, operator_of
from onnxq.rewrite import Changes, Pass
from onnxq.rewrite.constant_folding import Step, evaluate_all, is_small
from onnxq.rewrite.soundness import decided_by, is_pure
from onnxq.rewrite.views import VIEWS
from onnxq.system.resources import parallel_map

# Their results cannot be stored.
_OPTIONALS: Final = frozenset({"Optional", "OptionalGetElement", "OptionalHasElement"})
# Their output can be far larger than their inputs, so its size must be known before.
_GENERATORS = frozenset(
    {
        "AffineGrid",
        "BlackmanWindow",
        "CenterCropPad",
        "Col2Im",
        "ConstantOfShape",
        "DFT",
        "Expand",
        "HammingWindow",
        "HannWindow",
        "MaxUnpool",
        "MelWeightMatrix",
        "OneHot",
        "Pad",
        "Range",
        "Resize",
        "Tile",
        "Upsample",
    }
)
_FLOATS = frozenset({TensorProto.DOUBLE, TensorProto.FLOAT, TensorProto.FLOAT16})
# Bytes of an element whose type is unknown.
_LARGEST_ELEMENT = 8
# Smaller integer tensors (in bytes) are shape arithmetic, larger ones are quantized weights.
_SMALLEST_STORED = 256
_LARGEST_VALUE = 2
# Results up to this many bytes are always folded.
_SMALL_RESULT = 1 << 12
# Views and casts of large weights may make a model grow to this many times the bytes of its constants.
_MOST_GROWTH = 2


@dataclass(frozen=True)
class FoldConstants(Pass):
    """Replace nodes whose inputs are all constant by initializers, in every graph of the model.

    Not for inputs that a caller may override, Q/DQ nodes, and quantized weights behind a Cast or packed in words. Not
    for random operators, control flow, custom operators, and graph outputs. Results larger than ``largest`` stay, and
    results that together make the model larger by more than ``growth``; results of up to 4096 bytes are always folded.
    Weights that are only transposed, reshaped, sliced or cast are folded at any size, and computed on load.

    Attributes:
        largest: most bytes of one computed result.
        growth: most bytes by which all results may exceed their inputs; None means ``largest``.
        layouts_only: whether to fold only views (transposes, reshapes, slices), which includes views of quantized
            weights.
    """

    largest: int = 256 * 2**20
    growth: int | None = None
    layouts_only: bool = False

    def apply(self, graph: Graph) -> Changes:
        changed: list[str] = []
        left: list[tuple[str, str]] = []
        gone: list[Node] = []
        stored = sum(tensor.nbytes for tensor in constants(graph))
        growth = self.largest if self.growth is None else self.growth
        # A large result on the way to small ones is computed once here, instead of in every run.
        work, room = max(self.largest, growth, stored), max(self.largest, _MOST_GROWTH * stored)
        sizes = _Sizes(self.largest, growth, work, room, self.layouts_only)
        for scope in all_graphs(graph):
            cone = sizes.cone(scope, left)
            gone += self._fold(scope, cone, sizes.too_large(cone, left), graph.opset, changed, left)
        remove_nodes(graph, gone)
        return Changes(tuple(changed), tuple(left))

    def _fold(
        self,
        scope: Graph,
        cone: Sequence[Node],
        large: set[Node],
        opset: int,
        changed: list[str],
        left: list[tuple[str, str]],
    ) -> list[Node]:
        # Producers of graph outputs stay whole: kernels may crash if one of several outputs is omitted.
        kept = large | {node for node in cone if any(tensor.graph_output_of for tensor in node.outputs)}
        kept |= _not_rounded(cone, kept)
        wanted = _read_outside(cone, kept)
        if not wanted:
            return []
        steps = {Step.of(node): node for node in _needed(cone, wanted)}
        found = evaluate_all(list(steps), wanted, opset, largest=self.largest)
        left.extend((step.node, f"it cannot be computed: {reason}") for step, reason in found.failed.items())
        kept.update(steps[step] for step in found.failed)
        for tensor in _read_outside(cone, kept):
            scope.initializers.append(become_constant(tensor, found.values[tensor]))
            changed.append(tensor.name)
        return [node for node in cone if node not in kept]


def _not_rounded(cone: Sequence[Node], kept: set[Node]) -> set[Node]:
    """Return nodes of float16 that a discrete operator reads, because onnxruntime does not round between the two."""
    going, found = set(cone) - kept, set[Node]()
    for node in reversed(cone):
        if node.op in VIEWS or onnx_dtype(node.outputs[0]) != TensorProto.FLOAT16:
            continue
        readers = {consumer for consumer in node.outputs[0].outputs if consumer not in going or consumer in found}
        if any(one in found or node.outputs[0] in decided_by(one) for one in readers):
            found.add(node)
    return found


def _needed(cone: Sequence[Node], wanted: Sequence[Variable]) -> list[Node]:
    """Return the nodes that tensors are computed from, in order; others may be heavy."""
    tensors, found = set[Tensor](wanted), list[Node]()
    for node in reversed(cone):
        if not tensors.isdisjoint(node.outputs):
            tensors.update(node.inputs)
            found.append(node)
    return found[::-1]


def _read_outside(cone: Sequence[Node], kept: set[Node]) -> list[Variable]:
    going = {node for node in cone if node not in kept}
    made = (tensor for node in cone if node in going for tensor in node.outputs)
    return [tensor for tensor in made if any(consumer not in going for consumer in tensor.outputs)]


@dataclass(eq=False)
class _Sizes:
    """Bytes of results, and the limits on their sum.

    Attributes:
        largest: most bytes of one result that is computed at once.
        growth: most bytes by which stored results may exceed their inputs.
        work: most bytes by which all results may exceed their inputs, intermediate ones included.
        room: most bytes by which views and casts may make the model grow.
        layouts_only: whether only views are folded.
        known: bytes and elements of the folded results of the current graph.
        grown: bytes of results beyond their inputs.
        stored: bytes of results that kept nodes read, beyond the constants behind them.
    """

    largest: int
    growth: int
    work: int
    room: int
    layouts_only: bool = False
    known: dict[Tensor, tuple[int, int]] = field(default_factory=dict)
    grown: int = 0
    stored: int = 0

    def cone(self, scope: Graph, left: list[tuple[str, str]]) -> list[Node]:
        """Return the nodes of a graph that depend on constants alone, in its order.

        Results of an outer graph count only once they are constants, which a subgraph can read.
        """
        self.known.clear()
        cone = []
        for node in scope.nodes:
            inputs = [tensor for tensor in node.inputs if tensor.name]
            if node.domain or node.op in _OPTIONALS or not is_pure(node) or node.subgraphs():
                continue
            if not all(map(self._is_known, inputs)):
                continue
            if self.layouts_only and node.op not in VIEWS:
                continue
            if obstacle := (not self.layouts_only and _quantized_obstacle(node)) or self._obstacle(node, inputs):
                left.append((node.name, obstacle))
            else:
                cone.append(node)
        return cone

    def _is_known(self, tensor: Tensor) -> bool:
        return self.layouts_only or _is_plain(tensor) if is_constant(tensor) else tensor in self.known

    def _size(self, tensor: Tensor) -> tuple[int, int]:
        return (tensor.nbytes, math.prod(tensor.shape)) if isinstance(tensor, Constant) else self.known[tensor]

    def _obstacle(self, node: Node, inputs: Sequence[Tensor]) -> str:
        """Return why a result exceeds a limit, or count its bytes."""
        read = [self._size(tensor) for tensor in inputs]
        elements = _most_elements(node, [count for _, count in read])
        if elements is None:
            return "the size of its result is not known"
        made = elements * _element_bytes(node, read)
        if _is_derived(node):
            spent = read[0][0] if len(set(inputs[0].outputs)) == 1 else 0
            if made - spent > self.room:
                return "its result and those before it make the model too large"
            self.room -= max(0, made - spent)
        else:
            grown = self.grown + max(0, made - sum(count for count, _ in read))
            if made > self.largest:
                return f"its result of up to {elements} elements is too large"
            if grown > self.work:
                return "its result and those before it make the model too large"
            self.grown = grown
        self.known.update(dict.fromkeys(node.outputs, (made, elements)))
        return ""

    def too_large(self, cone: Sequence[Node], left: list[tuple[str, str]]) -> set[Node]:
        going, sources = set(cone), self._sources(cone)
        kept: set[Node] = set()
        for node in reversed(cone):
            read = [one for one in node.outputs if any(user not in going or user in kept for user in one.outputs)]
            grown = sum(max(0, self.known[one][0] - sources[node]) for one in read)
            if grown > _SMALL_RESULT and self.stored + grown > self.growth:
                left.append((node.name, "its result and those before it make the model too large"))
                kept.add(node)
                for tensor in node.outputs:
                    del self.known[tensor]
            else:
                self.stored += grown
        return kept

    def _sources(self, cone: Sequence[Node]) -> dict[Node, int]:
        """Return, for each node, the bytes of the constants behind its results that go with the cone."""
        going, found = set(cone), dict[Node, int]()
        for node in cone:
            # Views and casts have their own limit, ``room``.
            derived = _is_derived(node)
            read = 0
            for tensor in {tensor for tensor in node.inputs[: 1 if derived else None] if tensor.name}:
                if not isinstance(tensor, Constant):
                    read += found[tensor.inputs[0]] if tensor.inputs[0] in going else self.known[tensor][0]
                elif derived or going.issuperset(tensor.outputs):
                    read += tensor.nbytes
            grown = self.known[node.outputs[0]][0] - self._size(node.inputs[0])[0] if derived else 0
            found[node] = read + max(0, grown)
        return found


def _is_derived(node: Node) -> bool:
    return bool(node.inputs and node.inputs[0].name) and (node.op in VIEWS or _is_cast_to_float(node))


def _is_cast_to_float(node: Node) -> bool:
    wanted = node.attrs.get("to")
    return node.op == "Cast" and isinstance(wanted, int) and wanted in _FLOATS


def _most_elements(node: Node, read: Sequence[int]) -> int | None:
    """Upper bound; broadcasting and matrix multiplication make at most the product of the elements of the inputs."""
    shapes = [tensor.shape for tensor in node.outputs if tensor.name]
    if all(shape is not None and all(isinstance(extent, int) for extent in shape) for shape in shapes):
        return max((math.prod(shape) for shape in shapes), default=0)
    if _is_derived(node):
        return read[0]
    if node.op in _GENERATORS:
        return None
    if node.op == "Concat":
        return sum(read)
    return max(sum(read), math.prod(elements for elements in read if elements))


def _element_bytes(node: Node, read: Sequence[tuple[int, int]]) -> int:
    if node.op in VIEWS and read and read[0][1]:
        return read[0][0] // read[0][1]
    types = [tensor.dtype for tensor in node.outputs if tensor.name]
    if _is_cast_to_float(node):
        types = [helper.tensor_dtype_to_np_dtype(node.attrs["to"])]
    return max((_LARGEST_ELEMENT if dtype is None else np.dtype(dtype).itemsize for dtype in types), default=0)


def _is_plain(tensor: Constant) -> bool:
    return tensor.dtype.kind in "fiub" and not is_small(tensor.dtype)


def _quantized_obstacle(node: Node) -> str:
    first = node.inputs[0] if node.inputs else None
    if node.op == "Cast" and _is_quantized(first):
        return "decodes a stored weight"
    if any(isinstance(tensor, Constant) and _is_words(tensor) for tensor in node.inputs):
        return "unpacks a stored weight from words"
    if node.op in VIEWS and _is_quantized(first) and len(set(first.outputs)) > 1:
        return "shows a stored weight in another order"
    return ""


def _is_quantized(tensor: Tensor | None) -> TypeGuard[Constant]:
    """Quantized weights: a Cast to float would store them two or four times as large."""
    return (
        isinstance(tensor, Constant)
        and tensor.dtype.kind in "iu"
        and tensor.dtype.itemsize <= _LARGEST_VALUE
        and tensor.nbytes >= _SMALLEST_STORED
    )


def _is_words(tensor: Constant) -> bool:
    """Packed quantized weights; float models have no uint32 tensors of this size."""
    return tensor.dtype == np.uint32 and tensor.nbytes >= _SMALLEST_STORED


# Initializers ---------------------------------------------------------------------------------------------------------

_PLAIN_TYPES: Mapping[str, type] = MappingProxyType(
    {
        "value_float": np.float32,
        "value_floats": np.float32,
        "value_int": np.int64,
        "value_ints": np.int64,
        "value_string": object,
        "value_strings": object,
    }
)


class LiftConstants(Pass):
    """Replace Constant nodes by initializers of the same graph, in subgraphs too.

    Not for constants that are outputs of their graph, and sparse values.
    """

    def apply(self, graph: Graph) -> Changes:
        changed, left = [], []
        for scope in all_graphs(graph):
            outputs = set(scope.outputs)
            lifted = []
            for node in scope.nodes:
                if node.op != "Constant" or node.domain:
                    continue
                tensor, tensor_data = node.outputs[0], _payload(node)
                if tensor in outputs:
                    left.append((tensor.name, "is an output of its graph"))
                elif tensor_data is None:
                    left.append((tensor.name, "holds sparse values"))
                else:
                    lifted.append((node, tensor, tensor_data))
            remove_nodes(scope, [node for node, _, _ in lifted])
            for _, tensor, tensor_data in lifted:
                become_constant(tensor, tensor_data)
                scope.initializers.append(tensor)
                changed.append(tensor.name)
        return Changes(tuple(changed), tuple(left))


def _payload(node: Node) -> TensorData | None:
    value = node.attrs.get("value")
    if isinstance(value, Constant):
        return value.tensor_data
    for key, dtype in _PLAIN_TYPES.items():
        if key in node.attrs:
            return ArrayData(np.asarray(node.attrs[key], dtype))
    return None


# Since this IR version an initializer need not be an input; a caller may override one that is.
_IR_OF_PLAIN_INITIALIZERS = 4


class FixInitializers(Pass):
    """Remove initializers from the graph inputs if all of them are listed there.

    Before IR version 4 that was mandatory, and no caller could override them. Exporters kept the habit for years.
    Runtimes neither fold nor quantize a tensor that a caller may override. Not for graphs (from version 4 on) that list
    only some, a single one, or no layer weights: there the list is a choice.
    """

    def apply(self, graph: Graph) -> Changes:
        listed = [tensor for tensor in graph.initializers if tensor.overridable_input is not None]
        is_old = (graph.ir_version or _IR_OF_PLAIN_INITIALIZERS) < _IR_OF_PLAIN_INITIALIZERS
        is_habit = len(listed) == len(graph.initializers) > 1 and any(_holds_weights(node) for node in graph.nodes)
        if not is_old and not is_habit:
            return Changes(
                skipped=tuple((tensor.name, "is listed as an input, as others are not") for tensor in listed)
            )
        for tensor in listed:
            tensor.overridable_input = None
        return Changes(tuple(tensor.name for tensor in listed))


def _holds_weights(node: Node) -> bool:
    operator = operator_of(node)
    return operator is not None and any(
        place < len(node.inputs) and isinstance(node.inputs[place], Constant) for place in operator.weights
    )


# Denormals ------------------------------------------------------------------------------------------------------------

_PRODUCTS: Final = frozenset({Role.COMPUTE, Role.WEIGHTED})
# Beside a number of this size, rounding hides denormals in any sum.
_HIDES_DENORMALS: Final = 2.0**-100
# Bits of a float32: the exponent, which is zero in denormals and in zero; and all but the sign.
_EXPONENT, _UNSIGNED = np.uint32(0x7F800000), np.uint32(0x7FFFFFFF)


# Values that were looked at, because a model is prepared once for each opset that is tried.
_WITHOUT_DENORMALS: Final[WeakSet[TensorData]] = WeakSet()


class FlushDenormals(Pass):
    """Set denormal elements (below 1.2e-38) of float32 weights to zero.

    Training with weight decay makes such elements. They do not change any sum, but processors multiply them many times
    slower. Not for other constants, such as the epsilon of a divisor, and weights without much larger elements.
    """

    def apply(self, graph: Graph) -> Changes:
        weights: dict[Constant, None] = {}
        for _, node in all_nodes(graph):
            operator = operator_of(node)
            if operator is not None and operator.role in _PRODUCTS:
                read = (node.inputs[index] for index in operator.weights if index < len(node.inputs))
                weights.update(dict.fromkeys(tensor for tensor in read if is_constant(tensor)))
        found = [tensor for tensor in weights if onnx_dtype(tensor) == TensorProto.FLOAT]
        found = [tensor for tensor in found if tensor.tensor_data not in _WITHOUT_DENORMALS]
        small = set(compress(found, parallel_map(_has_denormals, found)))
        _WITHOUT_DENORMALS.update(tensor.tensor_data for tensor in found if tensor not in small)
        changed = [tensor for tensor in small if _largest(tensor) >= _HIDES_DENORMALS]
        for tensor in changed:
            values = np.ascontiguousarray(tensor.values)
            tensor.values = np.where(_are_denormal(values.view(np.uint32)), np.float32(0), values)
        return Changes(tuple(tensor.name for tensor in changed))


def _has_denormals(tensor: Constant) -> bool:
    for chunk in tensor.tensor_data.chunks():
        bits = np.frombuffer(chunk, np.uint32)
        pieces = (bits[start : start + PIECE] for start in range(0, bits.size, PIECE))
        if any(bool(_are_denormal(piece).any()) for piece in pieces):
            return True
    return False


def _largest(tensor: Constant) -> float:
    pieces = (np.abs(np.frombuffer(piece, np.float32)) for piece in tensor.tensor_data.chunks())
    return max((float(piece.max(initial=0.0, where=np.isfinite(piece))) for piece in pieces), default=0.0)


def _are_denormal(bits: NDArray[np.uint32]) -> NDArray[Any]:
    small: NDArray[Any] = (bits & _EXPONENT) == 0
    if small.any():
        small &= (bits & _UNSIGNED) != 0
    return small
