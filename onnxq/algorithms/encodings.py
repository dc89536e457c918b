"""Encodings: the quantized values that replace the floats of a model, and a cache for them."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from onnxq.algorithms.equalization import ChannelScales, absorbing_producer
from onnxq.ir import Constant, Graph, TensorData, all_nodes
from onnxq.ir.spilling import spill
from onnxq.ir.tensor_data import ProtoTensor
from onnxq.numerics.affine import QTensor, QuantParams
from onnxq.planning.plan import Plan

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class EncodedBias:
    """The bias of a node after encoding.

    Attributes:
        values: corrected float bias, in the shape and type of the original bias, or of the weight if there was none.
            None if nothing was corrected.
        quantized: the bias as int32 with the scale of the kernel's accumulator; None if the bias stays in float.
    """

    values: Array | None = None
    quantized: QTensor | None = None


@dataclass(frozen=True, eq=False)
class Encodings:
    """The quantized values of the activations, weights and biases of a plan.

    Attributes:
        activations: scale and zero point by tensor name.
        constants: quantized values of constant activations, by tensor name.
        weights: by node and input, in the shape of the float weight. Scales have its rank.
        biases: quantized or corrected biases, by node.
        factors: divisors of channels, by tensor name: of activations before they are quantized, and of float
            activations that quantized weights multiply.
        divided: activations whose producer already divides, so their quantizers need not.
        floats: float constants that divide float activations (AWQ), by node and input.
    """

    activations: Mapping[str, QuantParams] = field(default_factory=lambda: MappingProxyType({}))
    constants: Mapping[str, QTensor] = field(default_factory=lambda: MappingProxyType({}))
    weights: Mapping[tuple[str, int], QTensor] = field(default_factory=lambda: MappingProxyType({}))
    biases: Mapping[str, EncodedBias] = field(default_factory=lambda: MappingProxyType({}))
    factors: Mapping[str, ChannelScales] = field(default_factory=lambda: MappingProxyType({}))
    divided: frozenset[str] = frozenset()
    floats: Mapping[tuple[str, int], NDArray[np.floating]] = field(default_factory=lambda: MappingProxyType({}))

    def divided_as(self, graph: Graph, plan: Plan) -> Mapping[str, str]:
        """Return the tensors whose producers divide, mapped to the tensor whose factors they use.

        A tensor between the producer and a clamp maps to the tensor behind the clamp.
        """
        dividing = {name for name, _ in self.floats}
        factors_of: dict[str, str] = {}
        for _, node in all_nodes(graph) if self.divided or dividing else ():
            for tensor in node.outputs:
                if tensor.name in self.divided:
                    maker = absorbing_producer(tensor, plan)
                    before = maker.outputs if maker is not None else ()
                    factors_of.update(dict.fromkeys((*(earlier.name for earlier in before), tensor.name), tensor.name))
            if node.name in dividing:
                factors_of[node.outputs[0].name] = node.outputs[0].name
        return factors_of


# --- the cache ------------------------------------------------------------------------------------------------------

LARGEST = 1 << 29
"""Default capacity in bytes: the int8 weights of a model with 2 GiB in float32."""


Made = TypeVar("Made")


class EncodingCache:
    """A least-recently-used cache, so that plans with a weight in common encode it once.

    Args:
        capacity: bytes of quantized values to keep; 0 keeps nothing.
    """

    def __init__(self, capacity: int = LARGEST) -> None:
        self._capacity = capacity
        self._bytes = 0
        self._made: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._digests: WeakKeyDictionary[TensorData, bytes] = WeakKeyDictionary()

    def digest(self, tensor: Constant) -> Hashable:
        """Return a key of the values of a constant, computed once while they are in memory.

        For values in an external file the key is their location.
        """
        tensor_data = tensor.tensor_data
        if isinstance(tensor_data, ProtoTensor) and tensor_data.external:
            return tensor_data.onnx_dtype, tensor_data.shape, replace(tensor_data.data_range(), tensor="")
        if tensor_data not in self._digests:
            digest = hashlib.blake2b(repr((tensor_data.onnx_dtype, tensor_data.shape)).encode(), digest_size=20)
            for chunk in tensor_data.chunks():
                digest.update(chunk)
            self._digests[tensor_data] = digest.digest()
        return self._digests[tensor_data]

    def tensor(self, key: Hashable, make: Callable[[], QTensor]) -> QTensor:
        """Return the quantized values of a key, read-only; call `make` if they are not cached."""

        def kept() -> QTensor:
            made = make()
            # If constants are kept in a file until they are written, quantized values and scales go there too.
            stored, scale = spill(made.stored), spill(made.parameters.scale)
            stored.flags.writeable = False
            return replace(made, stored=stored, parameters=replace(made.parameters, scale=scale))

        return self._found(("codes", key), kept, _bytes)

    def clear(self) -> None:
        """Forget all, to make room once the last model is built."""
        self._made.clear()
        self._digests.clear()
        self._bytes = 0

    def array(self, key: Hashable, make: Callable[[], NDArray[np.float64]]) -> NDArray[np.float64]:
        """Return the array of a key; call `make` if it is not cached."""
        return self._found(("array", key), make, lambda made: made.nbytes)

    def _found(self, key: Hashable, make: Callable[[], Made], size_of: Callable[[Made], int]) -> Made:
        if key in self._made:
            self._made.move_to_end(key)
            known: Made = self._made[key][0]
            return known
        made = make()
        size = size_of(made)
        self._made[key] = made, size
        self._bytes += size
        while self._bytes > self._capacity:
            _, (_, gone) = self._made.popitem(last=False)
            self._bytes -= gone
        return made


def _bytes(made: QTensor) -> int:
    """Return the memory of quantized values: only the scale if they lie in a file."""
    return (0 if isinstance(made.stored, np.memmap) else made.stored.nbytes) + made.parameters.scale.nbytes
