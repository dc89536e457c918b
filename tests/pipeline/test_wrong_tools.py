"""Converters, inliners and passes that make a wrong model: the verdict, or the check of the preparation, sees each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import pytest
from conftest import Build

from onnxq.config.scheme import Mode
from onnxq.errors import OnnxqError, PassError
from onnxq.ir import Graph, all_nodes, to_model
from onnxq.ir.protos import node_protos
from onnxq.onnx_api import inlining, version_conversion
from onnxq.passes.cleanup import RemoveUnused
from onnxq.passes.constants import FoldConstants
from onnxq.passes.quantize.activations import InsertQuantizeDequantize
from onnxq.pipeline.quantization import quantize
from onnxq.pipeline.request import Budget
from onnxq.rewrite import Changes, Pass
from onnxq.runtime.sessions import open_session, run

# Half of the rows are small, so that quantization changes no choice of rows.
SIZES = np.tile(np.float32([[0.1], [2.0]]), (4, 1))
SAMPLES = [{"x": SIZES * np.random.default_rng(seed).standard_normal((8, 64)).astype(np.float32)} for seed in range(8)]
CONSTANTS: dict[str, Any] = {
    "w": (64, 64),
    "u": (64, 16),
    "three": np.array([3]),
    "nought": np.zeros(1, np.float32),
    "most": np.full(1, 0.8, np.float32),
    "names": np.array([f"class {index}" for index in range(16)], object),
}
FIRST_PLAN = Budget(search="off", accuracy="off", latency_seconds=0)
# The outputs, and the nodes that decide them.
DECISIONS = {
    "values": ("s", ""),
    "top values and indices": ("v, i", "v, i = TopK (s, three)"),
    "top indices": ("int64[8,3] i", "v, i = TopK (s, three)"),
    "places": ("n", "m = Greater (s, nought) n = NonZero (m)"),
    "labels": ("int64[8] l", "l = ArgMax <axis = 1, keepdims = 0> (s)"),
    "names of labels": ("string[8] t", "l = ArgMax <axis = 1, keepdims = 0> (s) t = Gather (names, l)"),
    "distinct rows": ("y", "d = Unique <axis = 0, sorted = 0> (s) y = Abs (d)"),
    "rows": (
        "y",
        "q = ReduceMax <axes = [1], keepdims = 0> (s) m = Greater (q, most) y = Compress <axis = 0> (s, m)",
    ),
}
# By operator: what a wrong tool makes of it.
WRONG: dict[str, tuple[str, dict[str, float]]] = {
    "LeakyRelu": ("LeakyRelu", {"alpha": 0.01}),
    "TopK": ("TopK", {"largest": 0}),
    "Greater": ("Less", {}),
    "ArgMax": ("ArgMin", {}),
    "Abs": ("Exp", {}),
}


def falsify_graph(graph: Graph, op: str) -> list[str]:
    """Change an operator of a graph as `WRONG` says, and return the names of the nodes."""
    kind, attributes = WRONG[op]
    nodes = [node for _, node in all_nodes(graph) if node.op == op]
    for node in nodes:
        node.op = kind
        node.attrs.update(attributes)
    return [node.name for node in nodes]


@dataclass(frozen=True, eq=False)
class Falsifier:
    """Makes tools wrong.

    Attributes:
        op: the operator that a wrong tool changes.
        changed: names of what it changed.
    """

    monkeypatch: pytest.MonkeyPatch
    op: str
    changed: list[str] = field(default_factory=list)

    def protos(self, owner: Any, name: str) -> None:
        """Make a function wrong that returns a model."""
        tool = getattr(owner, name)

        def wrong(*given: Any, **options: Any) -> onnx.ModelProto:
            model = tool(*given, **options)
            kind, attributes = WRONG[self.op]
            for node in node_protos(model.graph.node):
                if node.op_type == self.op:
                    kept = [attribute for attribute in node.attribute if attribute.name not in attributes]
                    del node.attribute[:]
                    node.attribute.extend([*kept, *(onnx.helper.make_attribute(*item) for item in attributes.items())])
                    node.op_type = kind
                    self.changed.append(node.output[0])
            return model

        self.monkeypatch.setattr(owner, name, wrong)

    def step(self, step: type) -> None:
        """Make a pass wrong."""
        apply = step.apply  # type: ignore[attr-defined]

        def wrong(made: Any, graph: Graph) -> Any:
            changes = apply(made, graph)
            self.changed.extend(falsify_graph(graph, self.op))
            return changes

        self.monkeypatch.setattr(step, "apply", wrong)


TOOLS: dict[str, Callable[[Falsifier], None]] = {
    "converter": lambda falsifier: falsifier.protos(version_conversion.version_converter, "convert_version"),
    "inliner": lambda falsifier: falsifier.protos(inlining.inliner, "inline_local_functions"),
    "pass that can be left out": lambda falsifier: falsifier.step(FoldConstants),
    "pass that cannot": lambda falsifier: falsifier.step(RemoveUnused),
    "pass that quantizes": lambda falsifier: falsifier.step(InsertQuantizeDequantize),
}


def model_of(build: Build, decision: str, *, in_function: bool) -> onnx.ModelProto:
    """Return a model of opset 11 whose nodes between the products, and behind them, may be functions."""
    outputs, nodes = DECISIONS[decision]
    scores = "h = MatMul (x, w) r = LeakyRelu <alpha = 0.9> (h) s = MatMul (r, u)"
    model = build(f"(float[8,64] x) => ({outputs}) {{ {scores} {nodes} }}", opset=11, **CONSTANTS)
    if in_function:
        for node in model.graph.node:
            if node.op_type in WRONG:
                inputs, body = [*node.input], onnx.NodeProto()
                body.CopyFrom(node)
                opsets = [onnx.helper.make_opsetid("", 11)]
                function = onnx.helper.make_function("local", node.op_type, inputs, [*node.output], [body], opsets)
                model.functions.append(function)
                node.domain = "local"
                del node.attribute[:]
        model.opset_import.append(onnx.helper.make_opsetid("local", 1))
    return model


def is_right(expected: onnx.ModelProto, found: onnx.ModelProto) -> bool:
    """Whether outputs agree as those of a quantized model do, whoever chose."""
    sessions = [open_session(model) for model in (expected, found)]
    return all(
        one.shape == other.shape and _decibels(one, other) > 15 if one.dtype == np.float32 else _share(one, other) > 0.5
        for sample in SAMPLES
        for one, other in zip(*(run(session, sample) for session in sessions), strict=True)
    )


def _decibels(one: np.ndarray, other: np.ndarray) -> float:
    return float(10 * np.log10(np.square(one).sum() / max(float(np.square(one - other).sum()), 1e-30)))


def _share(one: np.ndarray, other: np.ndarray) -> float:
    """Return the share of equal elements, or of places."""
    if one.ndim == 2 and len(one) == 2:
        ours, theirs = (set(map(tuple, places.T)) for places in (one, other))
        return len(ours & theirs) / len(ours | theirs)
    return float(np.mean(one == other))


def cases() -> Iterator[Any]:
    for tool in TOOLS:
        for decision, (_, nodes) in DECISIONS.items():
            for op in WRONG:
                # Only the prepared float model is checked behind sizes that no choice explains.
                if (op == "LeakyRelu" or f"{op} " in nodes) and (op, tool) != ("Abs", "pass that quantizes"):
                    yield pytest.param(tool, decision, op, id=f"{tool}-{decision}-{op}")


@pytest.mark.parametrize(("tool", "decision", "op"), list(cases()))
def test_no_wrong_model_is_verified(
    tool: str, decision: str, op: str, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(build, decision, in_function=tool == "inliner")
    falsifier = Falsifier(monkeypatch, op)
    TOOLS[tool](falsifier)
    try:
        result = quantize(model, SAMPLES, budget=FIRST_PLAN)
    except OnnxqError:
        return
    finally:
        assert falsifier.changed
    assert is_right(model, to_model(result.graph)), result.report.verdict


@pytest.mark.parametrize("in_function", [False, True])
@pytest.mark.parametrize("decision", DECISIONS)
def test_the_same_models_are_verified_with_right_tools(decision: str, in_function: bool, build: Build) -> None:
    model = model_of(build, decision, in_function=in_function)
    result = quantize(model, SAMPLES, budget=FIRST_PLAN)
    assert result.report.plan.count(Mode.STATIC) == 2
    assert is_right(model, to_model(result.graph))


@pytest.mark.parametrize(("decision", "op"), [("values", "LeakyRelu"), ("top indices", "TopK"), ("labels", "ArgMax")])
def test_a_pass_of_the_user_is_checked_against_the_given_model(decision: str, op: str, build: Build) -> None:
    class Wrong(Pass):
        def apply(self, graph: Graph) -> Changes:
            return Changes(tuple(falsify_graph(graph, op)))

    with pytest.raises(PassError, match="pass Wrong changes the float model: output"):
        quantize(model_of(build, decision, in_function=False), SAMPLES, prepare=[Wrong()], budget=FIRST_PLAN)
