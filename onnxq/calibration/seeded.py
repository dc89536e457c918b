"""Models that draw random numbers, run so that every run draws the same numbers."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
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


def put_seeds(model: onnx.ModelProto) -> None:
    """Give each random node without a seed that of its operator, which does not depend on names or inlining."""
    opset = next((entry.version for entry in model.opset_import if not canonical_domain(entry.domain)), 1)
    for node in _drawing(model):
        is_known = defs.has(node.op_type, opset, "")
        declared = defs.get_schema(node.op_type, opset).attributes.get("seed") if is_known else None
        if declared is None or any(attribute.name == "seed" for attribute in node.attribute):
            continue
        seed = zlib.crc32(node.op_type.encode()) % _SEEDS
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
    for node in chain.from_iterable(map(node_protos, scopes)):
        row = OPERATORS.get((canonical_domain(node.domain), node.op_type))
        if row is not None and row.random and _is_random(node):
            yield node


def _is_random(node: NodeProto) -> bool:
    """Return whether a node of a random operator draws numbers; a Dropout only does in training."""
    return node.op_type != "Dropout" or (len(node.input) > _TRAINING and bool(node.input[_TRAINING]))
