"""Encodings: everything that is written in the place of floats, and the cache of weights that were encoded before."""

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
from onnxq.ir.tensor_data import KEEP, ProtoTensor
from onnxq.numerics.affine import QTensor, QuantParams
from onnxq.planning.plan import Plan

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class EncodedBias:
    """What becomes of the bias of a node.

    Attributes:
        values: the bias that makes up for the rounding of the weight, in the shape and type of the float one, or where
            there was none, of the weight; None where all stays.
        codes: int32 codes of the one or the other, with the scale of an integer kernel's accumulator; None where the
            bias stays in float.
    """

    values: Array | None = None
    codes: QTensor | None = None


@dataclass(frozen=True, eq=False)
class Encodings:
    """What is written for the activations, weights and biases of a plan.

    Attributes:
        activations: scale and zero point by tensor name.
        constants: codes of the constants among them, by tensor name.
        weights: codes by node and input, in the shape of the float weight; scales have its rank.
        biases: by node, of those that are coded or corrected.
        factors: what the channels of activations are divided by before they become codes, and those of float data that
            weights of codes multiply, by tensor name.
        divided: the activations among them that come divided, so that their quantizers need not divide.
        floats: constants that divide float data, by node and input.
    """

    activations: Mapping[str, QuantParams] = field(default_factory=lambda: MappingProxyType({}))
    constants: Mapping[str, QTensor] = field(default_factory=lambda: MappingProxyType({}))
    weights: Mapping[tuple[str, int], QTensor] = field(default_factory=lambda: MappingProxyType({}))
    biases: Mapping[str, EncodedBias] = field(default_factory=lambda: MappingProxyType({}))
    factors: Mapping[str, ChannelScales] = field(default_factory=lambda: MappingProxyType({}))
    divided: frozenset[str] = frozenset()
    floats: Mapping[tuple[str, int], NDArray[np.floating]] = field(default_factory=lambda: MappingProxyType({}))

    def divided_as(self, graph: Graph, plan: Plan) -> Mapping[str, str]:
        """Return the tensors whose values come divided, or make such behind a clamp, with the one that has the factors.

        Args:
            graph: the prepared graph.
            plan: of it.
        """
        dividing = {name for name, _ in self.floats}
        found: dict[str, str] = {}
        for _, node in all_nodes(graph) if self.divided or dividing else ():
            for tensor in node.outputs:
                if tensor.name in self.divided:
                    maker = absorbing_producer(tensor, plan)
                    before = maker.outputs if maker is not None else ()
                    found.update(dict.fromkeys((*(one.name for one in before), tensor.name), tensor.name))
            if node.name in dividing:
                found[node.outputs[0].name] = node.outputs[0].name
        return found


# --- the cache ------------------------------------------------------------------------------------------------------

LARGEST = 1 << 29
"""Bytes that are kept unless told otherwise; the codes of a model of 2 GiB in float32 take as much."""


Made = TypeVar("Made")
Chosen = TypeVar("Chosen", bound="tuple[QTensor, Any]")


class EncodingCache:
    """What encoding has made, so that candidates that have a weight in common encode it once.

    What was longest not asked for is forgotten when there is no room for more.

    Args:
        capacity: bytes of codes that are kept; 0 keeps nothing.
    """

    def __init__(self, capacity: int = LARGEST) -> None:
        self._capacity = capacity
        self._bytes = 0
        self._made: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._digests: WeakKeyDictionary[TensorData, bytes] = WeakKeyDictionary()

    def digest(self, tensor: Constant) -> Hashable:
        """Return what tells the values of a constant from all others, read once as long as these are in memory.

        Of values in a file beside the model it is where they lie.
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

    def codes(self, key: Hashable, make: Callable[[], QTensor]) -> QTensor:
        """Return the codes that a key stands for, made now or before; nobody may write to them."""

        def kept() -> QTensor:
            made = make()
            # Where constants wait in a file to be written, codes do so as well.
            made = QTensor(KEEP.get()(made.codes), made.parameters, made.format)
            made.codes.flags.writeable = False
            return made

        return self._found(("codes", key), kept, _bytes)

    def chosen(self, key: Hashable, make: Callable[[], Chosen]) -> Chosen:
        """Return the codes of a weight with what becomes of its bias, made now or before."""
        # These hold the codes even when their own entry is gone.
        return self._found(("chosen", key), make, lambda made: _bytes(made[0]))

    def array(self, key: Hashable, make: Callable[[], NDArray[np.float64]]) -> NDArray[np.float64]:
        """Return the array that a key stands for, made now or before."""
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
    """Return the memory that codes take: none where they lie in a file."""
    return (0 if isinstance(made.codes, np.memmap) else made.codes.nbytes) + made.parameters.scale.nbytes
