"""The contents of a model: operators, types, sizes, opset, and how its weights are quantized."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from onnx import TensorProto

from onnxq.ir import (
    Constant,
    Graph,
    Node,
    Tensor,
    all_graphs,
    all_nodes,
    constants,
    load,
    onnx_dtype,
    optional_input,
    producer,
)
from onnxq.onnx_api import infer_shapes
from onnxq.ops import ALREADY_QUANTIZED, operator_of
from onnxq.passes.dequantize.stored_weights import holds_quantized, stored_weights
from onnxq.planning.plan import METADATA_KEY

_FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE})


@dataclass(frozen=True)
class Port:
    """A graph input or output."""

    name: str
    type: str
    shape: tuple[int | str | None, ...] | None


@dataclass(frozen=True)
class WeightNode:
    """A node with a weight and how that weight is stored.

    Attributes:
        node: its name.
        op_type: its operator.
        weight: the numbers that its stored values stand for, such as ``float``, ``int8`` or ``float4e2m1``.
        shape: of the weight.
        scales: how many scales the weight has; 0 when it is not quantized.
        data: ``int`` when the node multiplies integers, or data that is dequantized in front of it, else ``float``.
        bits: of one stored value.
    """

    node: str
    op_type: str
    weight: str
    shape: tuple[int, ...]
    scales: int
    data: str
    bits: int


@dataclass(frozen=True)
class Inspection:
    """The contents of a model.

    Attributes:
        path: the file.
        bytes: its size, external data not included.
        external_bytes: size of the values outside the file.
        opsets: version by domain.
        ir_version: version of the file format.
        producer: the program that wrote it.
        scheme: the onnxq scheme that it was quantized with, or None.
        inputs: of the main graph.
        outputs: of the main graph.
        graphs: number of graphs: the main graph and all subgraphs.
        operators: number of nodes of each operator, the most frequent first.
        constants: number and bytes of the constants by type.
        weights: the nodes with weights.
    """

    path: str
    bytes: int
    external_bytes: int
    opsets: dict[str, int]
    ir_version: int | None
    producer: str
    scheme: str | None
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    graphs: int
    operators: dict[str, int]
    constants: dict[str, tuple[int, int]]
    weights: tuple[WeightNode, ...]

    @property
    def quantized(self) -> bool:
        """Whether any operator or weight is quantized."""
        return bool(ALREADY_QUANTIZED & self.operators.keys()) or any(weight.scales for weight in self.weights)

    def to_dict(self) -> dict[str, object]:
        """Return plain values for JSON."""
        return {**asdict(self), "quantized": self.quantized}


def inspect_model(path: Path) -> Inspection:
    """Read a model without its external data and return its contents.

    Args:
        path: the file.

    Raises:
        ModelError: the file cannot be read.
    """
    graph = load(path)
    tensors = constants(graph)
    kinds = Counter(_type_name(tensor) for tensor in tensors)
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        sizes[_type_name(tensor)] += tensor.nbytes
    operators = count_operators(graph)
    return Inspection(
        path=str(path),
        bytes=path.stat().st_size,
        external_bytes=sum(tensor.nbytes for tensor in tensors if tensor.tensor_data.external),
        opsets=dict(graph.opset_imports),
        ir_version=graph.ir_version,
        producer=" ".join(part for part in (graph.producer_name, graph.producer_version) if part),
        scheme=graph.metadata.get(METADATA_KEY),
        inputs=tuple(_port(tensor) for tensor in graph.inputs),
        outputs=tuple(_port(tensor) for tensor in graph.outputs),
        graphs=sum(1 for _ in all_graphs(graph)),
        operators=dict(operators.most_common()),
        constants={name: (count, sizes[name]) for name, count in kinds.most_common()},
        weights=_weights(graph),
    )


def count_operators(graph: Graph) -> Counter[str]:
    """Return the number of nodes of each operator, those in subgraphs included."""
    return Counter(node.op for scope in all_graphs(graph) for node in scope.nodes)


def _port(tensor: object) -> Port:
    shape = getattr(tensor, "shape", None)
    return Port(tensor.name, _type_name(tensor), None if shape is None else tuple(shape))  # type: ignore[attr-defined]


def _type_name(tensor: object) -> str:
    return str(TensorProto.DataType.Name(onnx_dtype(tensor))).lower()  # type: ignore[arg-type]


def _weights(graph: Graph) -> tuple[WeightNode, ...]:
    """Return the weights of all nodes, quantized and float."""
    stored: dict[Node, list[WeightNode]] = {}
    if quantized := holds_quantized(graph):
        infer_shapes(graph)
    for weight in stored_weights(graph) if quantized else ():
        data = "int" if weight.integer else "float"
        entry = WeightNode(
            weight.node.name, weight.node.op, weight.format, weight.shape or (), weight.scales, data, weight.bits
        )
        stored.setdefault(weight.node, []).append(entry)
    return tuple(weight for _, node in all_nodes(graph) for weight in (*_floats(node), *stored.get(node, ())))


def _floats(node: Node) -> list[WeightNode]:
    operator = operator_of(node)
    weights = operator.weights if operator else ()
    constants = [_lifted(tensor) for index in weights if (tensor := optional_input(node, index)) is not None]
    return [
        WeightNode(node.name, node.op, _type_name(tensor), tuple(tensor.shape), 0, "float", 8 * tensor.dtype.itemsize)
        for tensor in constants
        if isinstance(tensor, Constant) and onnx_dtype(tensor) in _FLOATS and len(tensor.shape) >= 2
    ]


def _lifted(tensor: Tensor) -> object:
    """Return the value of a Constant node that makes a tensor, or the tensor."""
    maker = producer(tensor)
    return maker.attrs.get("value") if maker is not None and maker.op == "Constant" else tensor
