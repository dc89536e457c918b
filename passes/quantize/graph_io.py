"""Give a quantized model integers as inputs and outputs, where its plan quantizes these, and floats again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from onnxq.calibration.segments import read_without_data
from onnxq.ir import (
    Constant,
    Graph,
    Names,
    Node,
    NodeBuilder,
    Variable,
    insert_nodes,
    is_constant,
    load,
    producer,
    remove_nodes,
    replace_uses,
    save,
)
from onnxq.numerics.affine import QuantParams, dequantize, quantize
from onnxq.numerics.formats import QuantDType, format_named
from onnxq.system.publish import staging
from onnxq.system.resources import cached_by_mtime

IO_KEY: Final = "onnxq.io"
"""Metadata key of the quantized inputs and outputs: a JSON list of `GraphTensor`."""


@dataclass(frozen=True)
class GraphTensor:
    """An input or output of a model whose quantizer was taken out, or that stays in float.

    Attributes:
        name: of the tensor.
        kind: ``input`` or ``output``.
        format: ``uint8`` and so on; empty if it stays in float.
        scale: the float value is ``scale * (quantized - zero_point)``.
        zero_point: see `scale`.
        why: why it stays in float; empty if it does not.

    >>> str(GraphTensor("x", "input", "uint8", 0.5, 128))
    'input x is uint8, 0.5 * (x - 128)'
    """

    name: str
    kind: str
    format: str = ""
    scale: float = 1.0
    zero_point: int = 0
    why: str = ""

    def __str__(self) -> str:
        if not self.format:
            return f"{self.kind} {self.name} stays float: {self.why}"
        return f"{self.kind} {self.name} is {self.format}, {self.scale:.6g} * ({self.name} - {self.zero_point})"

    @property
    def quantizer(self) -> tuple[QuantParams, QuantDType]:
        """Scale and zero point, and the format, as arrays are quantized with."""
        format = format_named(self.format)
        return QuantParams(np.array(self.scale, np.float32), np.array(self.zero_point, format.dtype)), format


def remove_outer_quantizers(graph: Graph) -> None:
    """Remove QuantizeLinear behind inputs and DequantizeLinear before outputs, and note their scales in the metadata.

    The application quantizes inputs and dequantizes outputs instead, so this is no pass: passes keep types. Names stay.
    Inputs that other nodes read as floats and outputs that are computed as floats are noted with the reason.
    """
    names = Names(graph)
    found = [*_inputs(graph), *_outputs(graph, names)]
    if any(one.format for one in found):
        graph.set_metadata(IO_KEY, json.dumps([asdict(one) for one in found]))


def graph_tensors(metadata: Mapping[str, str]) -> tuple[GraphTensor, ...]:
    """Return what the metadata of a model says of its inputs and outputs; nothing if they were left in float."""
    return tuple(GraphTensor(**one) for one in json.loads(metadata.get(IO_KEY, "[]")))


def quantized_values(values: Mapping[str, Any], tensors: Sequence[GraphTensor]) -> dict[str, Any]:
    """Return inputs or outputs by name with the quantized values of those that a model has as integers.

    >>> quantized_values({"x": np.array([1.0], np.float32)}, [GraphTensor("x", "input", "uint8", 0.5, 128)])
    {'x': array([130], dtype=uint8)}
    """
    known = {one.name: one.quantizer for one in tensors if one.format}
    return {name: quantize(one, *known[name]).values if name in known else one for name, one in values.items()}


def float_values(values: Mapping[str, Any], tensors: Sequence[GraphTensor]) -> dict[str, Any]:
    """Return inputs or outputs by name with the floats of those that a model has as integers.

    >>> float_values({"x": np.array([130], np.uint8)}, [GraphTensor("x", "input", "uint8", 0.5, 128)])
    {'x': array([1.], dtype=float32)}
    """
    known = {one.name: one.quantizer for one in tensors if one.format}
    return {name: dequantize(one, *known[name]) if name in known else one for name, one in values.items()}


@contextmanager
def with_float_io(model: Path) -> Iterator[Path]:
    """Yield a model file that takes and gives floats: the model, or a temporary copy of a model with integers.

    Raises:
        ModelError: the file cannot be read.
    """
    if not any(one.format for one in tensors_of(model)):
        yield model
        return
    with staging(None) as folder:
        graph = load(model)
        insert_outer_quantizers(graph)
        save(graph, folder / model.name)
        yield folder / model.name


@cached_by_mtime
def tensors_of(model: Path) -> tuple[GraphTensor, ...]:
    """Return what the metadata of a model file says of its inputs and outputs; see `graph_tensors`."""
    return graph_tensors({entry.key: entry.value for entry in read_without_data(model).metadata_props})


def insert_outer_quantizers(graph: Graph) -> None:
    """Undo `remove_outer_quantizers`: inputs and outputs are floats again, and the nodes between compute the same."""
    names = Names(graph)
    for one in graph_tensors(graph.metadata):
        if not one.format:
            continue
        parameters, _ = one.quantizer
        new = NodeBuilder(one.name, names)
        parts = {"scale": parameters.scale, "zero_point": parameters.zero_point}
        quantization = [new.store(role, np.asarray(value)) for role, value in parts.items()]
        listed = graph.inputs if one.kind == "input" else graph.outputs
        [place] = (place for place, tensor in enumerate(listed) if tensor.name == one.name)
        integers = listed[place]
        listed[place] = floats = Variable(one.name, np.dtype(np.float32), integers.shape)
        integers.name = new.named("quantized")
        if one.kind == "input":
            new.node("QuantizeLinear", "quantizer", [floats, *quantization], integers)
            insert_nodes(graph, first=new.nodes)
        else:
            new.node("DequantizeLinear", "quantizer", [integers, *quantization], floats)
            graph.nodes.extend(new.nodes)
    graph.set_metadata(IO_KEY, "[]")


def _inputs(graph: Graph) -> Iterator[GraphTensor]:
    for tensor in graph.inputs:
        readers = list(tensor.outputs)
        if isinstance(tensor, Constant) or not _is_float(tensor):
            continue
        quantizer = next((reader for reader in readers if reader.op == "QuantizeLinear"), None)
        integers = _integers(quantizer, tensor.name, "input")
        if quantizer is None or integers is None:
            yield GraphTensor(tensor.name, "input", why="no quantizer reads it")
        elif len(readers) > 1 or tensor in graph.outputs:
            yield GraphTensor(tensor.name, "input", why="nodes read it as floats, too")
        else:
            quantized = quantizer.outputs[0]
            remove_nodes(graph, {quantizer})
            replace_uses(quantized, tensor, set(quantized.outputs), graph_outputs=True)
            tensor.dtype = np.dtype(integers.format)
            yield integers


def _outputs(graph: Graph, names: Names) -> Iterator[GraphTensor]:
    for place, tensor in enumerate(list(graph.outputs)):
        if isinstance(tensor, Constant) or not _is_float(tensor):
            continue
        decoder = producer(tensor)
        is_decoded = decoder is not None and decoder.op == "DequantizeLinear"
        integers = _integers(decoder, tensor.name, "output") if is_decoded else None
        quantized = decoder.inputs[0] if decoder is not None and integers is not None else None
        if decoder is None or integers is None or not isinstance(quantized, Variable):
            yield GraphTensor(tensor.name, "output", why="it is computed as floats")
        elif quantized in graph.inputs or quantized in graph.outputs:
            yield GraphTensor(tensor.name, "output", why="its quantized values are an input or output already")
        else:
            if tensor.outputs:
                tensor.name = names.unique(f"{integers.name}.dequantized")
            else:
                remove_nodes(graph, {decoder})
            quantized.name, quantized.dtype, quantized.shape = integers.name, np.dtype(integers.format), tensor.shape
            graph.outputs[place] = quantized
            yield integers


def _integers(quantizer: Node | None, name: str, kind: str) -> GraphTensor | None:
    """Return an input or output with the scale of its quantizer; None if it has no constant one."""
    if quantizer is None or len(quantizer.inputs) < 3 or not all(map(is_constant, quantizer.inputs[1:3])):
        return None
    scale, zero_point = (parameter.values for parameter in quantizer.inputs[1:3])
    if scale.size != 1:
        return None
    return GraphTensor(name, kind, zero_point.dtype.name, float(scale.reshape(())), int(zero_point.reshape(())))


def _is_float(tensor: Variable) -> bool:
    return bool(tensor.dtype == np.float32)
