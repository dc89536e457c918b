"""Bytes to graph and back, without loss: model files and external data."""

from __future__ import annotations

from onnxq.modelfile.metadata import metadata_bytes, strip_metadata
from onnxq.modelfile.placement import place_constants
from onnxq.modelfile.reader import as_graph, from_graphsurgeon, load, read_model
from onnxq.modelfile.spill import spilling
from onnxq.modelfile.versions import minimum_ir_version
from onnxq.modelfile.writer import save, to_model

__all__ = [
    "as_graph",
    "from_graphsurgeon",
    "load",
    "metadata_bytes",
    "minimum_ir_version",
    "place_constants",
    "read_model",
    "save",
    "spilling",
    "strip_metadata",
    "to_model",
]
