"""Attributes that say what goes without saying take bytes and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Final

import onnx
from onnx import defs

from onnxq.ir import Graph, all_nodes
from onnxq.rewrite import Changes, Pass

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
