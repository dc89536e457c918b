"""Models that draw random numbers, run so that every run draws the same numbers."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import onnx
from onnx import NodeProto, defs

from onnxq.ir.elements import canonical_domain
from onnxq.ir.protos import node_protos
from onnxq.ops import OPERATORS
from onnxq.runtime.sessions import Session

_SEEDS = 1 << 16
_TRAINING = 2


def draws(model: onnx.ModelProto) -> bool:
    """Return whether a node of a model draws random numbers."""
    return any(True for _ in _drawing(model))


def draws_in_functions(model: onnx.ModelProto) -> bool:
    """Return whether a node of a model-local function draws random numbers."""
    return any(True for function in model.functions for _ in _drawing_nodes(function.node))


def put_seeds(model: onnx.ModelProto, *, alike: bool = False) -> None:
    """Give each random node without a seed one that is derived from the name of its output.

    Args:
        model: the model.
        alike: whether all nodes of an operator get one seed, because inlining a function gives its nodes other names.
    """
    opset = next((entry.version for entry in model.opset_import if not canonical_domain(entry.domain)), 1)
    for node in _drawing(model):
        is_known = defs.has(node.op_type, opset, "")
        declared = defs.get_schema(node.op_type, opset).attributes.get("seed") if is_known else None
        if declared is None or any(attribute.name == "seed" for attribute in node.attribute):
            continue
        seed = zlib.crc32((node.op_type if alike else node.output[0]).encode()) % _SEEDS
        whole = declared.type == defs.OpSchema.AttrType.INT
        node.attribute.append(onnx.helper.make_attribute("seed", seed if whole else float(seed)))


class SeededSession:
    """A session that is opened again for each run, because a seed only fixes what the first run draws."""

    def __init__(self, make: Callable[[], Session]) -> None:
        """Open the first session, to check that the model loads."""
        self._make = make
        self._fresh: Session | None = make()
        self._outputs = self._fresh.get_outputs()

    def get_outputs(self) -> Any:
        """Return the outputs, as a session of onnxruntime does."""
        return self._outputs

    def run(self, *given: Any) -> Any:
        """Run one sample."""
        return self._next().run(*given)

    def run_with_ort_values(self, *given: Any) -> Any:
        """Run one sample of `OrtValue` inputs."""
        return self._next().run_with_ort_values(*given)

    def _next(self) -> Session:
        session, self._fresh = self._fresh or self._make(), None
        return session


def _drawing(model: onnx.ModelProto) -> Iterator[NodeProto]:
    scopes = (model.graph.node, *(function.node for function in model.functions))
    return chain.from_iterable(map(_drawing_nodes, scopes))


def _drawing_nodes(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    for node in node_protos(nodes):
        row = OPERATORS.get((canonical_domain(node.domain), node.op_type))
        if row is not None and row.random and _is_random(node):
            yield node


def _is_random(node: NodeProto) -> bool:
    """Return whether a node of a random operator draws numbers; a Dropout only does in training."""
    return node.op_type != "Dropout" or (len(node.input) > _TRAINING and bool(node.input[_TRAINING]))
