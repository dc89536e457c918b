"""Models without weights, for functions of onnx that take a whole serialized model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onnx import ModelProto, TensorProto

from onnxq.ir.elements import canonical_domain
from onnxq.ir.external_data import DataFolder
from onnxq.ir.graph import Graph, restore_classes
from onnxq.ir.protos import node_protos
from onnxq.ir.reader import read_model
from onnxq.ir.serialize import place_constants, serialize_model
from onnxq.ir.tensor_data import ProtoTensor, TensorData
from onnxq.ir.writer import refer

_LOCATION = "onnxq.skeleton"


@dataclass(frozen=True, eq=False)
class WeightlessModel:
    """A model whose large weights are replaced by references: number ``i`` is external data at offset ``i``.

    Attributes:
        payloads: the weights.
        folder: the folder of the graph's external data.
    """

    model: ModelProto
    payloads: Sequence[TensorData]
    folder: DataFolder | None

    @classmethod
    def of(cls, graph: Graph, threshold: int = 1024) -> WeightlessModel:
        """Take the weights of at least ``threshold`` bytes out of a graph; 0 takes all but strings."""
        payloads: list[TensorData] = []

        def store(proto: TensorProto, tensor_data: TensorData, name: str) -> None:
            if tensor_data.onnx_dtype == TensorProto.STRING or tensor_data.nbytes < threshold:
                tensor_data.fill(proto, name)
                return
            tensor_data.fill_without_values(proto, name)
            refer(proto, _LOCATION, len(payloads), tensor_data.nbytes)
            payloads.append(tensor_data)

        model = serialize_model(restore_classes(graph), place_constants(graph), store)
        _name_domains(model)
        return cls(model, payloads, graph.folder)

    def restore(self, model: ModelProto | None = None) -> Graph:
        """Return a model as a graph, with the weights back in place; by default ``self.model``."""
        return read_model(model if model is not None else self.model, self.folder, tensor_data=self._payload)

    def _payload(self, proto: TensorProto) -> TensorData:
        if proto.data_location == TensorProto.EXTERNAL:
            entries = {entry.key: entry.value for entry in proto.external_data}
            if entries.get("location") == _LOCATION:
                return self.payloads[int(entries["offset"])]
        return ProtoTensor(proto, self.folder)


def _name_domains(model: ModelProto) -> None:
    # onnx's converters and inference know the domain of ONNX only as "".
    for entry in model.opset_import:
        entry.domain = canonical_domain(entry.domain)
    for node in node_protos(model.graph.node):
        if node.domain and not canonical_domain(node.domain):
            node.ClearField("domain")


def weightless_model(graph: Graph, threshold: int = 1024) -> ModelProto:
    """Return the model with references in place of weights of at least ``threshold`` bytes.

    The references point nowhere. The model is for onnx's converters and inference, which never read large weights.
    """
    return WeightlessModel.of(graph, threshold).model
