"""Explanation of one node: its mode and the reason, formats, measurements, neighbours and kernels."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnxq.config.scheme import Mode
from onnxq.errors import DataError, ModelError, did_you_mean
from onnxq.ir import Graph, Node, all_nodes, load
from onnxq.ops import Role, operator_of
from onnxq.planning.plan import Activation, Plan, Weight
from onnxq.report import Report
from onnxq.report.parts import TensorValues, WeightChannels
from onnxq.runtime.kernels import Kernel, loaded_kernels
from onnxq.search.kernel_times import NodeTime, kernels_by_node
from onnxq.search.results import NodeSensitivity
from onnxq.system.records import to_plain

_BORDERS = frozenset({"DequantizeLinear", "QuantizeLinear"})


@dataclass(frozen=True)
class Neighbour:
    """A node before or after a node; nodes that onnxq inserted between them are passed over.

    Attributes:
        node: its name.
        op_type: its operator.
        mode: its mode in the plan.
        tensor: the first tensor between them.
    """

    node: str
    op_type: str
    mode: Mode
    tensor: str


@dataclass(frozen=True)
class RunningKernel:
    """A kernel that computes a node.

    Attributes:
        name: as the runtime calls it.
        op_type: its operator.
        fused: whether it has the name of another node, into which this one was fused as far as names show.
    """

    name: str
    op_type: str
    fused: bool


@dataclass(frozen=True)
class Explanation:
    """What is known of one node.

    Attributes:
        figures: the measurements that the reason rests on.
        weights: its quantized constant inputs.
        read: its quantized inputs, with their formats and ranges.
        given: its quantized outputs.
        producers: the nodes that it reads from.
        consumers: the nodes that read from it.
        sensitivities: the SQNR with this node alone quantized, in each mode that was measured.
        time: of a run, in float and quantized; None if not measured.
        values: calibrated values of these tensors.
        channels: how much the channels of its weights differ.
        kernels: what onnxruntime runs for it; empty if it was folded into a constant, or there is no model yet.
        is_there: whether the graph has a node of this name. A node that was merged into another, such as the addition
            of a bias into a matrix multiplication, has no neighbours or kernels here. Nor has a node that a runtime's
            own operator replaces.
    """

    node: str
    op_type: str
    mode: Mode
    reason: str
    figures: str
    weights: tuple[Weight, ...] = ()
    read: tuple[Activation, ...] = ()
    given: tuple[Activation, ...] = ()
    producers: tuple[Neighbour, ...] = ()
    consumers: tuple[Neighbour, ...] = ()
    sensitivities: tuple[NodeSensitivity, ...] = ()
    time: NodeTime | None = None
    values: tuple[TensorValues, ...] = ()
    channels: tuple[WeightChannels, ...] = ()
    kernels: tuple[RunningKernel, ...] = ()
    is_there: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return dict(to_plain(self))


def explain(model: str | Path, report: Report, node: str) -> Explanation:
    """Explain a node of a quantized model.

    Args:
        model: file of the quantized model.
        report: of its quantization.
        node: name of a node of the plan.

    Raises:
        ModelError: The model cannot be read, or the plan has no such node; the message suggests the nearest name.
        DataError: The report is of another model.
    """
    path = Path(model)
    graph = load(path)
    _check_report(path, report)
    plan = report.plan
    decision = plan.by_node.get(node)
    if decision is None:
        raise ModelError(
            f"the plan has no node {node!r}, expected one of the {len(plan.decisions)} that quantize --dry-run lists"
            f"{did_you_mean(node, plan.by_node)}"
        )
    here = next((item for _, item in all_nodes(graph) if item.name == node), None)

    def around(step: Step) -> list[tuple[str, Node | None]]:
        return [] if here is None else list(_walk(here, step, lambda neighbour: neighbour.name in plan.by_node))

    producers, consumers = around(_producers), around(_consumers)
    read, written = (_activations((tensor for tensor, _ in pairs), plan) for pairs in (producers, consumers))
    tensors = {item.tensor for item in (*read, *written)}
    return Explanation(
        decision.node,
        decision.op_type,
        decision.mode,
        decision.reason,
        decision.figures,
        decision.weights,
        read,
        written,
        _neighbours(producers, plan),
        _neighbours(consumers, plan),
        sensitivities=tuple(item for item in report.search.sensitivities if item.node == node),
        time=next((item for item in report.performance.times if item.node == node), None),
        values=tuple(item for item in report.encoding.tensors if item.tensor in tensors),
        channels=tuple(item for item in report.encoding.weights if item.node == node),
        kernels=_kernels(graph, node, here, loaded_kernels(path)),
        is_there=here is not None,
    )


def _check_report(path: Path, report: Report) -> None:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest == report.files.model_digest:
        raise DataError(f"{path} is the float model of the report, expected the quantized one, {report.output}")
    if report.files.output_digest not in ("", digest):
        raise DataError(f"the report is of another model than {path}, expected {report.output}; quantize again")


Step = Callable[[Node], Iterator[tuple[str, Node | None]]]
"""Yields the tensors on one side of a node, each with the node behind it."""


def _producers(node: Node) -> Iterator[tuple[str, Node | None]]:
    for tensor in node.inputs:
        if tensor.name:
            yield tensor.name, tensor.inputs[0] if tensor.inputs else None


def _consumers(node: Node) -> Iterator[tuple[str, Node | None]]:
    for tensor in node.outputs:
        for reader in tensor.outputs or [None]:
            yield tensor.name, reader


def _walk(node: Node, step: Step, ends: Callable[[Node], bool]) -> Iterator[tuple[str, Node | None]]:
    """Yield the tensors on one side of a node, each with the node behind it, up to the next nodes that end the walk."""
    pending, seen = [node], {node}
    while pending:
        for tensor, neighbour in step(pending.pop(0)):
            yield tensor, neighbour
            if neighbour is not None and neighbour not in seen and not ends(neighbour):
                seen.add(neighbour)
                pending.append(neighbour)


def _activations(tensors: Iterable[str], plan: Plan) -> tuple[Activation, ...]:
    return tuple(plan.by_tensor[name] for name in dict.fromkeys(tensors) if name in plan.by_tensor)


def _neighbours(pairs: Iterable[tuple[str, Node | None]], plan: Plan) -> tuple[Neighbour, ...]:
    tensors: dict[str, str] = {}
    for tensor, node in pairs:
        if node is not None and node.name in plan.by_node:
            tensors.setdefault(node.name, tensor)
    decisions = ((plan.by_node[name], tensor) for name, tensor in tensors.items())
    return tuple(Neighbour(decision.node, decision.op_type, decision.mode, tensor) for decision, tensor in decisions)


def _kernels(graph: Graph, name: str, here: Node | None, kernels: tuple[Kernel, ...]) -> tuple[RunningKernel, ...]:
    """Return what runs for a node: its own kernels, or the kernel after or before it that it was fused into.

    A kernel that is fused from a pattern has the name of the pattern's last node and another operator. Otherwise the
    node is the end of a kernel before it, such as a clamp of quantized values, or an addition after a matrix
    multiplication.
    """
    own = kernels_by_node(kernels, graph)
    if name in own:
        return tuple(RunningKernel(kernel.name, kernel.op_type, fused=False) for kernel in own[name])
    if here is None:
        return ()

    def nearest(step: Step) -> Iterator[tuple[Node, Kernel]]:
        # Fusion crosses neither Q/DQ nor compute nodes.
        walked = _walk(here, step, lambda node: node.name in own or node.op in _BORDERS or _is_product(node))
        near = dict.fromkeys(node for _, node in walked if node is not None and node.op not in _BORDERS)
        return ((node, kernel) for node in near for kernel in own.get(node.name, ()))

    behind = [kernel for node, kernel in nearest(_consumers) if kernel.op_type != node.op]
    before = [kernel for _, kernel in nearest(_producers)]
    fusions = behind[:1] or sorted(before, key=kernels.index)[-1:]
    return tuple(RunningKernel(kernel.name, kernel.op_type, fused=True) for kernel in fusions)


def _is_product(node: Node) -> bool:
    operator = operator_of(node)
    return operator is not None and operator.role is Role.COMPUTE
