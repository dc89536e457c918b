"""What is in a model: operators, types, sizes, opset, and what is quantized and how."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from onnx import TensorProto

from onnxq.constants import VIEWS
from onnxq.graph import Constant, Node, Tensor, constants, onnx_dtype, scopes
from onnxq.modelfile import load
from onnxq.operators import ALREADY_QUANTIZED, OPERATORS, Role
from onnxq.planning.plan import METADATA_KEY


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
        weight: type of the stored values, such as ``float`` or ``int8``.
        shape: of the weight.
        scales: how many scales the weight has; 0 when it is not quantized.
        data: ``int`` when the data input is dequantized in front of it, else ``float``.
    """

    node: str
    op_type: str
    weight: str
    shape: tuple[int, ...]
    scales: int
    data: str


@dataclass(frozen=True)
class Inspection:
    """What inspect_model found.

    Attributes:
        path: the file.
        bytes: its size, external data not included.
        external_bytes: size of the values outside the file.
        opsets: version by domain.
        ir_version: version of the file format.
        producer: what wrote it.
        scheme: the onnxq scheme that made it, or None.
        inputs: what it is fed.
        outputs: what it gives.
        graphs: the main graph and all bodies.
        operators: how many nodes of each op type.
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
    """Read a model without its external data and say what is in it.

    Args:
        path: the file.

    Returns:
        The findings.

    Raises:
        ModelError: the file cannot be read.
    """
    graph = load(path)
    found = constants(graph)
    kinds = Counter(_type_name(tensor) for tensor in found)
    sizes: Counter[str] = Counter()
    for tensor in found:
        sizes[_type_name(tensor)] += tensor.nbytes
    operators = Counter(node.op for scope in scopes(graph) for node in scope.nodes)
    return Inspection(
        path=str(path),
        bytes=path.stat().st_size,
        external_bytes=sum(tensor.nbytes for tensor in found if tensor.payload.external),
        opsets=dict(graph.opset_imports),
        ir_version=graph.ir_version,
        producer=" ".join(part for part in (graph.producer_name, graph.producer_version) if part),
        scheme=graph.metadata.get(METADATA_KEY),
        inputs=tuple(_port(tensor) for tensor in graph.inputs),
        outputs=tuple(_port(tensor) for tensor in graph.outputs),
        graphs=sum(1 for _ in scopes(graph)),
        operators=dict(operators.most_common()),
        constants={name: (count, sizes[name]) for name, count in kinds.most_common()},
        weights=tuple(weight for scope in scopes(graph) for node in scope.nodes for weight in _weights(node)),
    )


def _port(tensor: object) -> Port:
    shape = getattr(tensor, "shape", None)
    return Port(tensor.name, _type_name(tensor), None if shape is None else tuple(shape))  # type: ignore[attr-defined]


def _type_name(tensor: object) -> str:
    return str(TensorProto.DataType.Name(onnx_dtype(tensor))).lower()  # type: ignore[arg-type]


def _weights(node: Node) -> list[WeightNode]:
    operator = OPERATORS.get(node.op)
    found = []
    for index in operator.weights if operator else ():
        stored, scales = _stored(node, index)
        if stored is not None and len(stored.shape) >= 2:
            data = node.inputs[0]
            integer = operator is not None and operator.role is Role.COMPUTE and _decoder(data) is not None
            found.append(
                WeightNode(
                    node.name, node.op, _type_name(stored), tuple(stored.shape), scales, "int" if integer else "float"
                )
            )
    return found


def _stored(node: Node, index: int) -> tuple[Constant | None, int]:
    """Return the constant behind a weight input and the number of its scales, looking through its decoder."""
    tensor = node.inputs[index] if index < len(node.inputs) else None
    if isinstance(tensor, Constant):
        return tensor, 0
    decoder = _decoder(tensor)
    if decoder is None:
        return None, 0
    codes = decoder.inputs[0]
    if decoder.op == "Mul":
        codes = codes.inputs[0].inputs[0] if codes.inputs else codes
    codes, scale = _origin(codes), _origin(decoder.inputs[1])
    if not isinstance(codes, Constant) or not isinstance(scale, Constant):
        return None, 0
    volume = 1
    for extent in scale.shape:
        volume *= extent
    return codes, volume


def _origin(tensor: Tensor) -> Tensor:
    """Return what a tensor shows in another order or shape."""
    while tensor.inputs and tensor.inputs[0].op in VIEWS:
        tensor = tensor.inputs[0].inputs[0]
    return tensor


def _decoder(tensor: object) -> Node | None:
    """Return the node that turns codes into this tensor: a DequantizeLinear, or the Mul behind a Cast."""
    producers = getattr(tensor, "inputs", ())
    node = producers[0] if producers else None
    if node is not None and node.op == "Cast" and node.inputs[0].inputs and node.inputs[0].inputs[0].op == "Mul":
        node = node.inputs[0].inputs[0]
    if node is None or node.op not in ("DequantizeLinear", "Mul"):
        return None
    source = node.inputs[0]
    if node.op == "Mul" and not (source.inputs and source.inputs[0].op == "Cast"):
        return None
    return node  # type: ignore[no-any-return]
