"""A model comes in, and nothing that is to be written takes its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onnxq.errors import OutputError
from onnxq.ir.model import Graph
from onnxq.ir.reader import as_graph
from onnxq.ir.scopes import constants
from onnxq.ir.stored import ProtoPayload
from onnxq.system.publish import check_output, data_file


def taken_in(model: str | Path | Any, output: str | Path | None) -> tuple[Graph, Path | None, Path | None]:
    """Return the graph of a model, the file that holds it, and the file to write, which takes the place of neither.

    Args:
        model: a file, a ModelProto or a GraphSurgeon graph, of which no file is known.
        output: file to write; None writes nothing.

    Raises:
        ModelError: the model cannot be read.
        OutputError: the output cannot be written, or is the model itself or its data.
    """
    source = Path(model) if isinstance(model, (str, Path)) else None
    file = Path(output) if output is not None else None
    if file is not None:
        check_output(file, source)
    graph = as_graph(model)
    if file is not None:
        refuse_overwriting(graph, data_file(file))
    return graph, source, file


def refuse_overwriting(graph: Graph, data: Path) -> None:
    """Refuse an output whose external data would take the place of the model's own.

    Raises:
        OutputError: the model reads the file ``data``.
    """
    external = (tensor.payload for tensor in constants(graph) if tensor.payload.external)
    read = {payload.data_range().path for payload in external if isinstance(payload, ProtoPayload)}
    if data.exists() and any(data.samefile(path) for path in read):
        raise OutputError(f"output data {data} is the external data of the model itself; give another name")
