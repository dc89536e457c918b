"""A model taken in: given as a file or in memory, with passes of the user's, on the workbench."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx

from onnxq.graph import Graph
from onnxq.modelfile import as_graph
from onnxq.named_passes import Step, as_passes
from onnxq.preparation import check_float_model
from onnxq.rewriting import apply_to_float
from onnxq.targets import target_named
from onnxq.wanted import Wanted
from onnxq.workbench import Workbench, open_workbench

Model = str | Path | onnx.ModelProto | Any
"""A file, a ModelProto, or a GraphSurgeon graph."""


def rewritten(model: Model, prepare: Sequence[Step]) -> Graph:
    """Return a graph of the model after passes of the user's."""
    passes, graph = as_passes(prepare), as_graph(model)
    apply_to_float(graph, passes)
    check_float_model(graph)
    return graph


def opened(graph: Graph, wanted: Wanted, folder: Path, *, measured: bool) -> Workbench:
    """Open the workbench of a model after passes of the user's, given whether a search measures time."""
    emit = wanted.emit(measured=measured)
    return open_workbench(graph, wanted.scheme, target_named(wanted.target), folder, emit, wanted.replay, wanted.least)
