"""The table of operators that run in torch with gradients.

It is a table of functions, not a converter such as onnx2pytorch, because what is trained here are tensors by their ONNX
names: a function takes its weight as an argument, which may come out of a fake quantizer, and every tensor between two
nodes can be one's data. Modules that own their weights hide both. onnx2pytorch also needs torchvision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from onnxq.training.calls import Call
from onnxq.training.elementwise import ELEMENTWISE
from onnxq.training.moving import MOVING
from onnxq.training.products import PLAIN, PRODUCTS
from onnxq.training.recurrent import RECURRENT, is_plain

TORCH: Mapping[str, Callable[[Call], Any]] = MappingProxyType({**ELEMENTWISE, **MOVING, **PRODUCTS, **RECURRENT})
"""The function of each operator of ONNX's own domain: takes a call, and returns a tensor or one for each output."""


def function_of(call: Call) -> Callable[[Call], Any] | None:
    """Return what computes a call in torch, or None where only onnxruntime can.

    >>> from onnxq.ir import Node
    >>> function_of(Call(Node("NonMaxSuppression"), (), 17)) is None
    True
    """
    node = call.node
    if node.domain or node.op not in TORCH:
        return None
    plain = is_plain if node.op in RECURRENT else PLAIN.get(node.op)
    return TORCH[node.op] if plain is None or plain(call) else None
