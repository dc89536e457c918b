"""The first node of a model whose output differs between two engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx

from onnxq.calibration.instrument import append_outputs, tensor_types
from onnxq.data.inputs import is_floating
from onnxq.errors import EngineError, OnnxqError
from onnxq.evaluation.agreement import agreement_of
from onnxq.runtime.engine import Engine
from onnxq.runtime.sessions import Array, serialized
from onnxq.system.plugins import wrap_plugin_errors

AGREEING = 20.0
"""SQNR in decibels beside onnxruntime from which on an engine computes the same model."""


@dataclass(frozen=True, eq=False)
class FirstDifference:
    """Search for the first node whose inputs agree on two engines and whose output does not.

    Attributes:
        model: with its weights.
        sample: on which the engines differ.
        known: the reference engine.
        other: the engine in question.
        least: SQNR in decibels from which on tensors agree.
        folder: for models with added outputs.
        seen: whether tensors agree, by name.
    """

    model: onnx.ModelProto
    sample: Mapping[str, Array]
    known: Engine
    other: Engine
    least: float
    folder: Path
    seen: dict[str, bool] = field(default_factory=dict)

    def node(self, output: str) -> str:
        """Return the name and operator of the first node before an output that differs, or an empty string.

        Bisection needs few runs and finds a node that differs after one that does not. From there, it goes up to a node
        whose inputs agree.
        """
        makers = {name: node for node in self.model.graph.node for name in node.output if name}
        types = tensor_types(self.model)
        behind = _ancestors(makers, output)
        candidates = [
            name
            for node in self.model.graph.node
            for name in node.output[:1]
            if name in behind and name in types and _is_float(types[name])
        ]
        low, high = -1, len(candidates) - 1
        if high < 0 or self._agrees(candidates[high], types[candidates[high]]):
            return ""
        while high - low > 1:
            middle = (low + high) // 2
            if self._agrees(candidates[middle], types[candidates[middle]]):
                low = middle
            else:
                high = middle
        found = candidates[high]
        while above := next(
            (name for name in _floats_above(makers, found, set(candidates)) if not self._agrees(name, types[name])), ""
        ):
            found = above
        node = makers[found]
        return f"{node.name or found} ({node.op_type})"

    def _agrees(self, name: str, value: onnx.ValueInfoProto) -> bool:
        """Return whether a tensor agrees; also True if an engine cannot output it."""
        if name not in self.seen:
            path = self.folder / f"tapped-{len(self.seen)}.onnx"
            declared = any(one.name == name for one in self.model.graph.output)
            path.write_bytes(append_outputs(serialized(self.model), [] if declared else [value]))
            try:
                expected, found = (self._value(engine, path, name) for engine in (self.known, self.other))
                worst = agreement_of([name], [([expected], [found])])
                self.seen[name] = worst.sound and worst.worst_sqnr >= self.least
            except OnnxqError:
                self.seen[name] = True
        return self.seen[name]

    def _value(self, engine: Engine, path: Path, name: str) -> Array:
        with wrap_plugin_errors(f"engine {engine.name!r}", EngineError):
            loaded = engine.load(path)
            try:
                values: Array = np.asarray(loaded.run(self.sample)[loaded.outputs.index(name)])
                return values
            finally:
                loaded.close()


def _is_float(value: onnx.ValueInfoProto) -> bool:
    return is_floating(np.dtype(onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)))


def _ancestors(makers: Mapping[str, onnx.NodeProto], output: str) -> set[str]:
    found, pending = set(), [output]
    while pending:
        name = pending.pop()
        if name in makers and name not in found:
            found.add(name)
            pending.extend(makers[name].input)
    return found


def _floats_above(makers: Mapping[str, onnx.NodeProto], name: str, floats: set[str]) -> set[str]:
    """Return the nearest float tensors that a tensor is computed from; quantized values are passed over."""
    found, pending, met = set(), list(makers[name].input), {name}
    while pending:
        one = pending.pop()
        if one in met:
            continue
        met.add(one)
        if one in floats:
            found.add(one)
        elif one in makers:
            pending.extend(makers[one].input)
    return found
