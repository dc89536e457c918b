"""Divide the channels of float data by the factors that the weights behind have taken in."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onnxq.algorithms.encodings import Codes
from onnxq.ir import Graph, Names, constant
from onnxq.rewrite import Changes, Pass


@dataclass(frozen=True, eq=False)
class DivideChannels(Pass):
    """Give normalizations and Muls the constants that divide what they make.

    Works in the main graph. A constant that others read as well stays theirs.

    Attributes:
        codes: hold the constants.
    """

    codes: Codes

    def apply(self, graph: Graph) -> Changes:
        """Divide; the new constants are called ``c.divided``."""
        names: Names | None = None
        changed: dict[str, None] = {}
        for node in graph.nodes if self.codes.floats else ():
            for index, source in enumerate(node.inputs):
                values = self.codes.floats.get((node.name, index))
                if values is not None and not np.array_equal(values, source.values):
                    names = names or Names(graph)
                    made = constant(names.unique(f"{source.name}.divided"), values)
                    node.inputs = [*node.inputs[:index], made, *node.inputs[index + 1 :]]
                    changed[node.name] = None
        return Changes(tuple(changed))
