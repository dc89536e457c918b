"""Integer inputs and outputs: take the quantizers at the borders out of a quantized model, and put them back."""

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
    """An input or output of a model with integer inputs and outputs.

    Attributes:
        name: name of the tensor.
        kind: ``input`` or ``output``.
        format: its number format, such as ``uint8``; empty if it stays float.
        scale: the float value is ``scale * (quantized - zero_point)``.
        zero_point: see `scale`.
        why: why it stays float; empty if it does not.

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
        """The parameters and the format that quantize arrays."""
        format = format_named(self.format)
        return QuantParams(np.array(self.scale, np.float32), np.array(self.zero_point, format.dtype)), format


def remove_outer_quantizers(graph: Graph) -> None:
    """Remove QuantizeLinear behind inputs and DequantizeLinear before outputs, and store their scales in the metadata.

    The application quantizes inputs and dequantizes outputs instead. This is not a pass, because passes keep types.
    Names stay. Inputs that other nodes read as floats, and outputs that are computed as floats, stay float; the
    metadata has the reason.
    """
    names = Names(graph)
    tensors = [*_inputs(graph), *_outputs(graph, names)]
    if any(tensor.format for tensor in tensors):
        graph.set_metadata(IO_KEY, json.dumps([asdict(tensor) for tensor in tensors]))


def graph_tensors(metadata: Mapping[str, str]) -> tuple[GraphTensor, ...]:
    """Return the inputs and outputs from the metadata of a model; none if `remove_outer_quantizers` changed none."""
    return tuple(GraphTensor(**entry) for entry in json.loads(metadata.get(IO_KEY, "[]")))


def quantized_values(values: Mapping[str, Any], tensors: Sequence[GraphTensor]) -> dict[str, Any]:
    """Return arrays by name, with quantized values for the inputs or outputs that a model has as integers.

    >>> quantized_values({"x": np.array([1.0], np.float32)}, [GraphTensor("x", "input", "uint8", 0.5, 128)])
    {'x': array([130], dtype=uint8)}
    """
    scales = {tensor.name: tensor.quantizer for tensor in tensors if tensor.format}
    return {name: quantize(value, *scales[name]).values if name in scales else value for name, value in values.items()}


def float_values(values: Mapping[str, Any], tensors: Sequence[GraphTensor]) -> dict[str, Any]:
    """Return arrays by name, with floats for the inputs or outputs that a model has as integers.

    >>> float_values({"x": np.array([130], np.uint8)}, [GraphTensor("x", "input", "uint8", 0.5, 128)])
    {'x': array([1.], dtype=float32)}
    """
    scales = {tensor.name: tensor.quantizer for tensor in tensors if tensor.format}
    return {name: dequantize(value, *scales[name]) if name in scales else value for name, value in values.items()}


@contextmanager
def with_float_io(model: Path) -> Iterator[Path]:
    """Yield a model file with float inputs and outputs: the model itself, or a temporary copy.

    Raises:
        ModelError: the file cannot be read.
    """
    if not any(tensor.format for tensor in tensors_of(model)):
        yield model
        return
    with staging(None) as folder:
        graph = load(model)
        insert_outer_quantizers(graph)
        save(graph, folder / model.name)
        yield folder / model.name


@cached_by_mtime
def tensors_of(model: Path) -> tuple[GraphTensor, ...]:
    """Return the inputs and outputs from the metadata of a model file; see `graph_tensors`."""
    return graph_tensors({entry.key: entry.value for entry in read_without_data(model).metadata_props})


def insert_outer_quantizers(graph: Graph) -> None:
    """Undo `remove_outer_quantizers`."""
    names, first = Names(graph), list[Node]()
    for entry in graph_tensors(graph.metadata):
        if not entry.format:
            continue
        parameters, _ = entry.quantizer
        new = NodeBuilder(entry.name, names)
        parts = {"scale": parameters.scale, "zero_point": parameters.zero_point}
        quantization = [new.store(role, np.asarray(value)) for role, value in parts.items()]
        listed = graph.inputs if entry.kind == "input" else graph.outputs
        [place] = (place for place, tensor in enumerate(listed) if tensor.name == entry.name)
        integers = listed[place]
        listed[place] = floats = Variable(entry.name, np.dtype(np.float32), integers.shape)
        integers.name = new.named("quantized")
        if entry.kind == "input":
            new.node("QuantizeLinear", "quantizer", [floats, *quantization], integers)
            first[:0] = new.nodes
        else:
            new.node("DequantizeLinear", "quantizer", [integers, *quantization], floats)
            graph.nodes.extend(new.nodes)
    insert_nodes(graph, first={graph: first})
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
    """Return an input or output with the scale of its quantizer; None if that is not constant."""
    if quantizer is None or len(quantizer.inputs) < 3 or not all(map(is_constant, quantizer.inputs[1:3])):
        return None
    scale, zero_point = (parameter.values for parameter in quantizer.inputs[1:3])
    if scale.size != 1:
        return None
    return GraphTensor(name, kind, zero_point.dtype.name, float(scale.reshape(())), int(zero_point.reshape(())))


def _is_float(tensor: Variable) -> bool:
    return bool(tensor.dtype == np.float32)
