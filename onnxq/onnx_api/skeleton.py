"""Models without their weights, for the parts of onnx that take a whole serialized model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onnx import ModelProto, TensorProto

from onnxq.ir.elements import domain_named
from onnxq.ir.emit import emit_model
from onnxq.ir.external import DataFolder
from onnxq.ir.model import Graph
from onnxq.ir.payload import Payload
from onnxq.ir.placement import place_constants
from onnxq.ir.reader import read_model
from onnxq.ir.sidecar import refer
from onnxq.ir.stored import ProtoPayload
from onnxq.ir.surgeon import restore_classes

_LOCATION = "onnxq.skeleton"


@dataclass(frozen=True, eq=False)
class Skeleton:
    """A model whose large weights are numbered references.

    Attributes:
        model: the model; reference number ``i`` is external data at offset ``i``.
        payloads: the weights.
        folder: where external data of the graph lies.
    """

    model: ModelProto
    payloads: Sequence[Payload]
    folder: DataFolder | None

    @classmethod
    def of(cls, graph: Graph, threshold: int = 1024) -> Skeleton:
        """Take the weights of ``threshold`` bytes and more out of a graph; 0 takes out all but strings."""
        payloads: list[Payload] = []

        def store(proto: TensorProto, payload: Payload, name: str) -> None:
            if payload.onnx_dtype == TensorProto.STRING or payload.nbytes < threshold:
                payload.fill(proto, name)
                return
            payload.fill_without_values(proto, name)
            refer(proto, _LOCATION, len(payloads), payload.nbytes)
            payloads.append(payload)

        model = emit_model(restore_classes(graph), place_constants(graph), store)
        _name_domains(model)
        return cls(model, payloads, graph.folder)

    def restore(self, model: ModelProto | None = None) -> Graph:
        """Read a model made from this skeleton, by default the skeleton itself, with the weights back in place."""
        return read_model(model if model is not None else self.model, self.folder, payload=self._payload)

    def _payload(self, proto: TensorProto) -> Payload:
        if proto.data_location == TensorProto.EXTERNAL:
            entries = {entry.key: entry.value for entry in proto.external_data}
            if entries.get("location") == _LOCATION:
                return self.payloads[int(entries["offset"])]
        return ProtoPayload(proto, self.folder)


def _name_domains(model: ModelProto) -> None:
    """Write ONNX's own domain in the one way that onnx's converters and inference know."""
    for entry in model.opset_import:
        entry.domain = domain_named(entry.domain)
    pending = [model.graph]
    while pending:
        for node in pending.pop().node:
            if node.domain and not domain_named(node.domain):
                node.ClearField("domain")
            for proto in node.attribute:
                if proto.HasField("g"):
                    pending.append(proto.g)
                pending.extend(proto.graphs)


def skeleton(graph: Graph, threshold: int = 1024) -> ModelProto:
    """Return the model with references in place of the weights of ``threshold`` bytes and more.

    The references lead nowhere: the model is for onnx's converters and inference, which never read large weights.

    Raises:
        ModelError: the graph is not whole.
    """
    return Skeleton.of(graph, threshold).model
