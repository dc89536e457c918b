"""Constants: folding of constant subgraphs, the place of initializers, and denormal weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
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
from onnxq.ir.spilling import spill, spill_data
from onnxq.numerics.blocks import PIECE
from onnxq.ops import facts_of
from onnxq.rewrite import Changes, Pass
from onnxq.rewrite.constant_folding import Step, evaluate_all, is_small
from onnxq.rewrite.soundness import Uses, decided_by, is_pure
from onnxq.rewrite.views import VIEWS
from onnxq.system.resources import parallel_map

# Their results cannot be stored.
_OPTIONALS: Final = frozenset({"Optional", "OptionalGetElement", "OptionalHasElement"})
# Their output can be far larger than their inputs, so its size must be known before.
_GENERATORS = frozenset(
    {"AffineGrid", "CenterCropPad", "Col2Im", "ConstantOfShape", "DFT", "Expand", "MaxUnpool", "MelWeightMatrix"}
    | {"BlackmanWindow", "HammingWindow", "HannWindow", "OneHot", "Pad", "Range", "Resize", "Tile", "Upsample"}
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
        folding = _Folding(self, sum(tensor.nbytes for tensor in constants(graph)))
        for scope in all_graphs(graph):
            folding.fold(scope)
        remove_nodes(graph, folding.gone)
        return Changes(tuple(folding.changed), tuple(folding.skipped))


class _Folding:
    """One walk over the graphs of a model.

    Attributes:
        growth: most bytes by which stored results may exceed their inputs.
        work: most bytes by which all results may exceed their inputs, intermediate ones included: a large result on the
            way to small ones is computed once here, instead of in every run.
        room: most bytes by which views and casts may make the model grow.
        sizes: bytes and elements of the folded results of the current graph.
        grown: bytes of results beyond their inputs.
        stored: bytes of results that kept nodes read, beyond the constants behind them.
    """

    def __init__(self, options: FoldConstants, stored: int) -> None:
        self.options = options
        self.growth = options.largest if options.growth is None else options.growth
        self.work, self.room = max(options.largest, self.growth, stored), max(options.largest, _MOST_GROWTH * stored)
        self.sizes: dict[Tensor, tuple[int, int]] = {}
        self.grown = self.stored = 0
        self.changed: list[str] = []
        self.skipped: list[tuple[str, str]] = []
        self.gone: list[Node] = []

    def fold(self, scope: Graph) -> None:
        cone = self._cone(scope)
        # Producers of graph outputs stay whole: kernels may crash if one of several outputs is omitted.
        kept = self._too_large(cone) | {node for node in cone if any(tensor.graph_output_of for tensor in node.outputs)}
        kept |= _not_rounded(cone, kept)
        wanted = _read_outside(cone, kept)
        if not wanted:
            return
        steps = {Step.of(node): node for node in _needed(cone, wanted)}
        results = evaluate_all(list(steps), wanted, scope.opset, largest=self.options.largest)
        self.skipped.extend((step.node, f"it cannot be computed: {reason}") for step, reason in results.failed.items())
        kept.update(steps[step] for step in results.failed)
        for tensor in _read_outside(cone, kept):
            scope.initializers.append(become_constant(tensor, spill_data(results.values[tensor])))
            self.changed.append(tensor.name)
        self.gone += [node for node in cone if node not in kept]

    def _cone(self, scope: Graph) -> list[Node]:
        """Return the nodes of a graph that depend on constants alone, in its order.

        Results of an outer graph count only once they are constants, which a subgraph can read.
        """
        self.sizes.clear()
        layouts_only, cone = self.options.layouts_only, []
        for node in scope.nodes:
            inputs = [tensor for tensor in node.inputs if tensor.name]
            if node.domain or node.op in _OPTIONALS or not is_pure(node) or node.subgraphs():
                continue
            if not all(map(self._is_computable, inputs)) or (layouts_only and node.op not in VIEWS):
                continue
            if obstacle := (not layouts_only and _quantized_obstacle(node)) or self._obstacle(node, inputs):
                self.skipped.append((node.name, obstacle))
            else:
                cone.append(node)
        return cone

    def _is_computable(self, tensor: Tensor) -> bool:
        return self.options.layouts_only or _is_plain(tensor) if is_constant(tensor) else tensor in self.sizes

    def _size(self, tensor: Tensor) -> tuple[int, int]:
        return (tensor.nbytes, math.prod(tensor.shape)) if isinstance(tensor, Constant) else self.sizes[tensor]

    def _obstacle(self, node: Node, inputs: Sequence[Tensor]) -> str:
        """Return why a result exceeds a limit, or count its bytes."""
        read = [self._size(tensor) for tensor in inputs]
        elements = _most_elements(node, [count for _, count in read])
        if elements is None:
            return "the size of its result is not known"
        size = elements * _element_bytes(node, read)
        if _is_derived(node):
            spent = read[0][0] if len(set(inputs[0].outputs)) == 1 else 0
            if size - spent > self.room:
                return "its result and those before it make the model too large"
            self.room -= max(0, size - spent)
        else:
            grown = self.grown + max(0, size - sum(count for count, _ in read))
            if size > self.options.largest:
                return f"its result of up to {elements} elements is too large"
            if grown > self.work:
                return "its result and those before it make the model too large"
            self.grown = grown
        self.sizes.update(dict.fromkeys(node.outputs, (size, elements)))
        return ""

    def _too_large(self, cone: Sequence[Node]) -> set[Node]:
        going, sources = set(cone), self._sources(cone)
        for node in reversed(cone):
            results = [tensor for tensor in node.outputs if not going.issuperset(tensor.outputs)]
            grown = sum(max(0, self.sizes[tensor][0] - sources[node]) for tensor in results)
            if grown > _SMALL_RESULT and self.stored + grown > self.growth:
                self.skipped.append((node.name, "its result and those before it make the model too large"))
                going.remove(node)
                for tensor in node.outputs:
                    del self.sizes[tensor]
            else:
                self.stored += grown
        return set(cone) - going

    def _sources(self, cone: Sequence[Node]) -> dict[Node, int]:
        """Return, for each node, the bytes of the constants behind its results that go with the cone."""
        going, sources = set(cone), dict[Node, int]()
        for node in cone:
            # Views and casts have their own limit, ``room``.
            derived = _is_derived(node)
            read = 0
            for tensor in {tensor for tensor in node.inputs[: 1 if derived else None] if tensor.name}:
                if not isinstance(tensor, Constant):
                    read += sources[tensor.inputs[0]] if tensor.inputs[0] in going else self.sizes[tensor][0]
                elif derived or going.issuperset(tensor.outputs):
                    read += tensor.nbytes
            grown = self.sizes[node.outputs[0]][0] - self._size(node.inputs[0])[0] if derived else 0
            sources[node] = read + max(0, grown)
        return sources


def _not_rounded(cone: Sequence[Node], kept: set[Node]) -> set[Node]:
    """Return nodes of float16 that a discrete operator reads, because onnxruntime does not round between the two."""
    going, unrounded = set(cone) - kept, set[Node]()
    for node in reversed(cone):
        result = node.outputs[0]
        if node.op in VIEWS or onnx_dtype(result) != TensorProto.FLOAT16:
            continue
        readers = set(result.outputs) - going
        if any(reader in unrounded or result in decided_by(reader) for reader in readers):
            unrounded.add(node)
            going.discard(node)
    return unrounded


def _needed(cone: Sequence[Node], wanted: Sequence[Variable]) -> list[Node]:
    """Return the nodes that tensors are computed from, in order; others may be heavy."""
    tensors, nodes = set[Tensor](wanted), list[Node]()
    for node in reversed(cone):
        if not tensors.isdisjoint(node.outputs):
            tensors.update(node.inputs)
            nodes.append(node)
    return nodes[::-1]


def _read_outside(cone: Sequence[Node], kept: set[Node]) -> list[Variable]:
    going = set(cone) - kept
    results = (tensor for node in cone if node in going for tensor in node.outputs)
    return [tensor for tensor in results if not going.issuperset(tensor.outputs)]


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

_PLAIN_TYPES: Mapping[str, type] = {
    "value_float": np.float32,
    "value_floats": np.float32,
    "value_int": np.int64,
    "value_ints": np.int64,
    "value_string": object,
    "value_strings": object,
}


class LiftConstants(Pass):
    """Replace Constant nodes by initializers of the same graph, in subgraphs too.

    Not for constants that are outputs of their graph, and sparse values.
    """

    def apply(self, graph: Graph) -> Changes:
        changed, skipped = [], []
        for scope in all_graphs(graph):
            outputs = set(scope.outputs)
            lifted = []
            for node in scope.nodes:
                if node.op != "Constant" or node.domain:
                    continue
                tensor, tensor_data = node.outputs[0], _payload(node)
                if tensor in outputs:
                    skipped.append((tensor.name, "is an output of its graph"))
                elif tensor_data is None:
                    skipped.append((tensor.name, "holds sparse values"))
                else:
                    lifted.append((node, tensor, tensor_data))
            remove_nodes(scope, [node for node, _, _ in lifted])
            for _, tensor, tensor_data in lifted:
                become_constant(tensor, tensor_data)
                scope.initializers.append(tensor)
                changed.append(tensor.name)
        return Changes(tuple(changed), tuple(skipped))


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
        lists_all = len(listed) == len(graph.initializers) > 1
        is_habit = lists_all and any(isinstance(tensor, Constant) for node in graph.nodes for tensor in _weights(node))
        if not is_old and not is_habit:
            return Changes(
                skipped=tuple((tensor.name, "is listed as an input, as others are not") for tensor in listed)
            )
        for tensor in listed:
            tensor.overridable_input = None
        return Changes(tuple(tensor.name for tensor in listed))


def _weights(node: Node) -> list[Tensor]:
    return [node.inputs[index] for index in facts_of(node).weights if index < len(node.inputs)]


# Denormals ------------------------------------------------------------------------------------------------------------

# Beside a number of this size, rounding hides denormals in any sum.
_HIDES_DENORMALS: Final = 2.0**-100
# Bits of a float32: the exponent, which is zero in denormals and in zero; and all but the sign.
_EXPONENT, _UNSIGNED = np.uint32(0x7F800000), np.uint32(0x7FFFFFFF)


# Values that were looked at, because a model is prepared once for each opset that is tried.
_WITHOUT_DENORMALS: Final[WeakSet[TensorData]] = WeakSet()


class FlushDenormals(Pass):
    """Set denormal elements (below 1.2e-38) of float32 weights to zero.

    Training with weight decay makes such elements. They do not change any sum, but processors multiply them many times
    slower. Other constants stay, such as the epsilon of a divisor, and so do weights without much larger elements and
    weights whose last bit a discrete operator depends on.
    """

    def apply(self, graph: Graph) -> Changes:
        read = (tensor for _, node in all_nodes(graph) if not facts_of(node).looks_up for tensor in _weights(node))
        weights = [
            tensor
            for tensor in dict.fromkeys(filter(is_constant, read))
            if onnx_dtype(tensor) == TensorProto.FLOAT and tensor.tensor_data not in _WITHOUT_DENORMALS
        ]
        small = dict.fromkeys(compress(weights, parallel_map(_has_denormals, weights)))
        _WITHOUT_DENORMALS.update(tensor.tensor_data for tensor in weights if tensor not in small)
        uses = Uses(graph)
        changed = [
            tensor
            for tensor in small
            if _largest(tensor) >= _HIDES_DENORMALS
            and not uses.decides(result for reader in tensor.outputs for result in reader.outputs)
        ]
        for tensor in changed:
            values = np.ascontiguousarray(tensor.values)
            tensor.values = spill(np.where(_are_denormal(values.view(np.uint32)), np.float32(0), values))
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
