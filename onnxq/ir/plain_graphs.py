"""Whole graphs of plain GraphSurgeon, exported where that loses nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
from onnx import ModelProto, TensorProto
from onnx_graphsurgeon.ir.tensor import LazyValues, SparseValues
from onnx_graphsurgeon.util.exception import OnnxGraphSurgeonException

from onnxq.errors import ModelError
from onnxq.ir.data_types import data_type_name, data_type_of, is_packed
from onnxq.ir.elements import domain_named

_ADVICE = "read the model with onnxq.load instead of GraphSurgeon's import"


def export_plain_graph(graph: gs.Graph) -> ModelProto:
    """Return the model of a plain GraphSurgeon graph, which is not changed.

    Raises:
        ModelError: GraphSurgeon would change the type of a constant or the name of a shared one, or cannot export the
            graph at all.
    """
    constants = list(_constants(graph))
    _refuse_losses(constants)
    domains = graph.import_domains
    imported = [(tensor._values, tensor._values.tensor) for tensor in constants if _is_imported(tensor)]
    try:
        # The exporter writes names into the protos that the graph was imported from, so it gets copies.
        for values, proto in imported:
            values.tensor = TensorProto()
            values.tensor.CopyFrom(proto)
        # It also adds domains to the list that it finds, which is the one of the model read.
        graph.import_domains = None if domains is None else list(domains)
        model: ModelProto = gs.export_onnx(graph, do_type_check=False)  # noqa: TID251 - losses are refused above
    except (
        OnnxGraphSurgeonException,
        AssertionError,
        AttributeError,
        TypeError,
        UnboundLocalError,
        ValueError,
    ) as error:
        raise ModelError(f"GraphSurgeon cannot export the graph {graph.name!r}: {error}") from error
    finally:
        graph.import_domains = domains
        for values, proto in imported:
            values.tensor = proto
    for entry in model.opset_import:
        if not domain_named(entry.domain):
            # It ignores an opset that was set after the import.
            entry.version = graph.opset
    if graph.ir_version is None:
        # GraphSurgeon takes the newest that onnx knows, which onnxruntime may not load; the writer sets what is needed.
        model.ClearField("ir_version")
    return model


def _constants(graph: gs.Graph) -> Iterator[Any]:
    pending = [graph]
    seen: set[int] = set()
    while pending:
        scope = pending.pop()
        for node in scope.nodes:
            pending.extend(node.subgraphs())
            for value in (*node.inputs, *node.attrs.values()):
                if isinstance(value, gs.Constant) and id(value) not in seen:
                    seen.add(id(value))
                    yield value


def _is_imported(tensor: Any) -> bool:
    return isinstance(tensor._values, LazyValues) and not isinstance(tensor._values, SparseValues)


def _refuse_losses(constants: list[Any]) -> None:
    owner: dict[int, str] = {}
    for tensor in constants:
        if isinstance(tensor._values, SparseValues):
            continue
        if isinstance(tensor._values, LazyValues):
            known = owner.setdefault(id(tensor._values), tensor.name)
            if known != tensor.name:
                raise ModelError(
                    f"constants {known!r} and {tensor.name!r} share one stored tensor, and GraphSurgeon would give "
                    f"both the same name; {_ADVICE}"
                )
            continue
        try:
            data_type = data_type_of(np.asarray(tensor._values).dtype)
        except TypeError as error:
            raise ModelError(f"constant {tensor.name!r} cannot be stored: {error}") from error
        # GraphSurgeon writes packed types one to a byte, strings not at all, and this type under another's number.
        if is_packed(data_type) or data_type in (TensorProto.STRING, TensorProto.FLOAT8E4M3FNUZ):
            raise ModelError(
                f"constant {tensor.name!r} holds {data_type_name(data_type)} values, which GraphSurgeon cannot export; "
                f"make it with onnxq.ir.constant in a graph from onnxq.load"
            )
