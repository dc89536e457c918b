"""The first node of a model whose output differs between two engines."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from functools import cache
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


def first_difference(
    model: onnx.ModelProto,
    output: str,
    sample: Mapping[str, Array],
    reference: Engine,
    engine: Engine,
    folder: Path,
) -> str:
    """Return the name and operator of the first node before an output that differs, or an empty string.

    Bisection needs few runs and finds a node that differs after one that does not. From there, it goes up to a node
    whose inputs agree.

    Args:
        model: with its weights.
        output: name of an output that differs.
        sample: on which the engines differ.
        reference: the engine that is right.
        engine: the one in question.
        folder: for models with added outputs.
    """
    makers = {name: node for node in model.graph.node for name in node.output if name}
    types = {name: value for name, value in tensor_types(model).items() if _is_float(value)}
    declared = {value.name for value in model.graph.output}

    @cache
    def agrees(name: str) -> bool:
        """Return whether a tensor agrees; also True if an engine cannot output it."""
        path = folder / f"tapped-{len(list(folder.iterdir()))}.onnx"
        path.write_bytes(append_outputs(serialized(model), [] if name in declared else [types[name]]))
        try:
            expected, actual = (_value(runtime, path, name, sample) for runtime in (reference, engine))
            agreement = agreement_of([name], [([expected], [actual])])
        except OnnxqError:
            return True
        return agreement.sound and agreement.worst_sqnr >= AGREEING

    before = {output, *_above(makers, output)}
    floats = [name for node in model.graph.node for name in node.output[:1] if name in before and name in types]
    low, high = -1, len(floats) - 1
    if high < 0 or agrees(floats[high]):
        return ""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if agrees(floats[middle]) else (low, middle)
    differing, names = floats[high], set(floats)
    # Quantized values are passed over, up to the nearest floats.
    while above := next((name for name in _above(makers, differing, names) if name in names and not agrees(name)), ""):
        differing = above
    node = makers[differing]
    return f"{node.name or differing} ({node.op_type})"


def _value(engine: Engine, path: Path, name: str, sample: Mapping[str, Array]) -> Array:
    with wrap_plugin_errors(f"engine {engine.name!r}", EngineError):
        loaded = engine.load(path)
        try:
            values: Array = np.asarray(loaded.run(sample)[loaded.outputs.index(name)])
            return values
        finally:
            loaded.close()


def _is_float(value: onnx.ValueInfoProto) -> bool:
    return is_floating(np.dtype(onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)))


def _above(makers: Mapping[str, onnx.NodeProto], name: str, ends: Container[str] = ()) -> Iterator[str]:
    """Yield the tensors that a tensor is computed from, each once, up to some."""
    pending, seen = list(makers[name].input) if name in makers else [], {name}
    while pending:
        tensor = pending.pop()
        if tensor in makers and tensor not in seen:
            seen.add(tensor)
            yield tensor
            if tensor not in ends:
                pending.extend(makers[tensor].input)
