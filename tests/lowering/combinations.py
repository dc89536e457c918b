"""Every format, symmetry, granularity, scale format and storage that a spec can name, on a weight of each operator."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from onnxq.algorithms.encode import encode
from onnxq.algorithms.encoders import encode_array
from onnxq.config.scheme import Granularity, Mode, QuantSpec, Storage
from onnxq.errors import SchemeError
from onnxq.ir import Graph, Node, Variable, constant, remove_unused, to_model
from onnxq.numerics.formats import FORMATS, SCALE_FORMATS
from onnxq.passes import CompressWeights, DecodeWeights, ShareInitializers
from onnxq.planning.plan import Decision, Plan
from onnxq.planning.weights import decide_weights
from onnxq.runtime.sessions import open_session, run

OPSET = 25
# Narrow and 7-bit formats differ in the quantized values that they use, not in how they are stored.
STORED = tuple(name for name in FORMATS if "-" not in name and name != "int32")
# Along the sum small, fit for kernels, and cut short; in two axes; in three, which a matrix does not have.
GRANULARITIES: tuple[Granularity | tuple[int, ...], ...] = (
    Granularity.TENSOR,
    Granularity.CHANNEL,
    (8,),
    (16,),
    (4, 8),
    (2, 4, 2),
)
LEVELS = (*((scale, False) for scale in SCALE_FORMATS), ("float16", True), ("ue4m3", True))
# Attributes and the shape of the weight.
OPERATORS: dict[str, tuple[dict[str, object], tuple[int, ...]]] = {
    "MatMul": ({}, (24, 20)),
    "Gemm": ({"transB": 1}, (20, 24)),
    "Conv": ({}, (10, 12, 3, 1)),
    "ConvTranspose": ({}, (20, 6, 1, 3)),
    "Gather": ({}, (44, 24)),
}


@dataclass
class Matrix:
    """What became of all combinations of one operator and mode.

    Attributes:
        unfit: how many specs each sentence refuses for this weight.
        modes: how many nodes got each mode.
        exact: how many decoded weights equal numpy's bit for bit.
        wrong: the specs of those that do not.
        runs: how many nodes of each op type the optimised graph holds.
    """

    unfit: Counter[str] = field(default_factory=Counter)
    modes: Counter[Mode] = field(default_factory=Counter)
    exact: int = 0
    wrong: list[QuantSpec] = field(default_factory=list)
    runs: Counter[str] = field(default_factory=Counter)


@cache
def specs() -> tuple[list[QuantSpec], Counter[str]]:
    """Return all specs, and how many combinations are none, by the sentence that refuses them."""
    found: list[QuantSpec] = []
    refused: Counter[str] = Counter()
    for format, symmetric, granularity, (scale, two_level), storage in product(
        STORED, (True, False), GRANULARITIES, LEVELS, Storage
    ):
        try:
            found.append(QuantSpec(format, granularity, symmetric, scale, two_level=two_level, storage=storage))
        except SchemeError as error:
            refused[str(error)] += 1
    return found, refused


# Convolutions multiply no quantized values, so weight-only stores their weights.
MATRICES = [*((op, Mode.STORAGE) for op in OPERATORS), *((op, Mode.WEIGHT_ONLY) for op in ("MatMul", "Gemm", "Gather"))]


def chosen_specs(op: str, mode: Mode) -> list[QuantSpec]:
    """Return a seventh of all specs, among which is each choice; all matrices together have each spec."""
    return specs()[0][MATRICES.index((op, mode)) % 7 :: 7]


@cache
def matrix(op: str, mode: Mode) -> Matrix:
    """Decode a weight of many specs in one model, whose outputs are the weights, and compare them with numpy's."""
    wanted = chosen_specs(op, mode)
    found = Matrix()
    weight = np.random.default_rng(0).normal(size=OPERATORS[op][1]).astype(np.float32)
    nodes = calls(op, weight, len(wanted))
    decisions = [
        decide_weights(node, mode, spec, "asked for", in_body=False) for node, spec in zip(nodes, wanted, strict=True)
    ]
    found.modes.update(decision.mode for decision in decisions)
    found.unfit.update(decision.reason for decision in decisions if decision.mode is Mode.FLOAT)
    kept = [decision for decision in decisions if decision.mode is not Mode.FLOAT]
    decoded, found.runs = run_decoders(nodes, kept)
    for decision, values in zip(kept, decoded, strict=True):
        if values.tobytes() == expected(weight, decision).tobytes():
            found.exact += 1
        else:
            found.wrong.append(decision.weights[0].spec)
    return found


def calls(op: str, weight: npt.NDArray[Any], count: int) -> list[Node]:
    """Return nodes of one op type, each with a constant of its own that holds the weight."""
    nodes = []
    for index in range(count):
        held = constant(f"w{index}", weight)
        data = constant("i", np.arange(len(weight))) if op == "Gather" else Variable("x", np.dtype(np.float32))
        inputs = [held, data] if op == "Gather" else [data, held]
        nodes.append(Node(op, f"n{index}", dict(OPERATORS[op][0]), inputs, [Variable(f"y{index}", weight.dtype)]))
    return nodes


def expected(weight: npt.NDArray[Any], decision: Decision) -> npt.NDArray[Any]:
    """Return what numpy decodes of the weight of a decision."""
    (wanted,) = decision.weights
    values = encode_array(
        weight, wanted.spec, channel_axis=wanted.axis, reduction_axis=wanted.reduction_axis
    ).dequantize()
    turned = decision.op_type == "Gemm" and decision.mode is Mode.WEIGHT_ONLY
    return (values.T if turned else values).astype(weight.dtype)


def run_decoders(nodes: list[Node], decisions: list[Decision]) -> tuple[list[npt.NDArray[Any]], Counter[str]]:
    """Return the weights that onnxruntime decodes, and the op types of its optimised graph."""
    by_name = {node.name: (node, node.outputs[0]) for node in nodes}
    graph = Graph(nodes, name="decoders", opset=OPSET)
    plan = Plan(tuple(decisions), (), "scheme", "target")
    encodings = encode(plan, graph)
    CompressWeights(plan, encodings).apply(graph)
    DecodeWeights(plan, encodings).apply(graph)
    for decision in decisions:
        node, output = by_name[decision.node]
        # A Gather that looks up quantized rows is gone, and its output is the weight.
        tensor = node.inputs[decision.weights[0].index] if node.inputs else output
        graph.outputs.append(tensor)
    remove_unused(graph)
    ShareInitializers().apply(graph)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "optimized.onnx"
        decoded = run(open_session(to_model(graph), threads=1, optimized_copy=path), {})
        return decoded, Counter(node.op_type for node in onnx.load(path).graph.node)
