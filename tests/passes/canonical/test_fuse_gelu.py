"""GELU in the spellings of all exporters becomes one node, or the one spelling that runtimes know."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from model_texts import apply_once, difference, model, named_graph, ops, outputs, sample
from onnx import ModelProto

from onnxq.ir import save
from onnxq.passes import FuseGelu, UnifyGeluArgument
from onnxq.rewrite import RewriteRules

GELU = RewriteRules((FuseGelu(), UnifyGeluArgument()))
RunningGraph = Callable[[Path], onnx.GraphProto]

ERF = {
    "div, half last": "d = Div(x, root) e = Erf(d) p = Add(e, one) m = Mul(x, p) g = Mul(m, half)",
    "div, half first": "h = Mul(half, x) d = Div(x, root) e = Erf(d) p = Add(one, e) g = Mul(p, h)",
    "div, half inside": "d = Div(x, root) e = Erf(d) p = Add(e, one) m = Mul(p, half) g = Mul(x, m)",
    "mul, half last": "d = Mul(x, inverse) e = Erf(d) p = Add(e, one) m = Mul(p, x) g = Mul(m, half)",
    "mul, half first": "h = Mul(x, half) d = Mul(inverse, x) e = Erf(d) p = Add(e, one) g = Mul(h, p)",
    "mul, half inside": "d = Mul(x, inverse) e = Erf(d) p = Add(e, one) m = Mul(half, p) g = Mul(m, x)",
}
ENDS = ("h = Mul(x, half) g = Mul(h, p)", "m = Mul(x, p) g = Mul(m, half)", "m = Mul(p, half) g = Mul(x, m)")
ARGUMENTS = {
    "pow": "c = Pow(x, three) k = Mul(c, cubic) s = Add(x, k) a = Mul(s, slope)",
    "cube": "q = Mul(x, x) c = Mul(q, x) k = Mul(cubic, c) s = Add(k, x) a = Mul(slope, s)",
    "factored": "k = Mul(x, cubic) q = Mul(k, x) i = Add(q, one) s = Mul(x, slope) a = Mul(s, i)",
    "square": "q = Pow(x, two) k = Mul(q, cubic) i = Add(one, k) j = Mul(i, slope) a = Mul(x, j)",
}
TANH = {
    f"{name}, {index}": f"{argument} t = Tanh(a) p = Add(t, one) {end}"
    for name, argument in ARGUMENTS.items()
    for index, end in enumerate(ENDS)
}
KNOWN = {"div, half last", "div, half first", "pow, 0"}


def constants() -> Mapping[str, np.ndarray]:
    numbers = {
        "root": math.sqrt(2), "inverse": math.sqrt(0.5), "one": 1, "half": 0.5, "two": 2, "three": 3,
        "cubic": 0.044715, "slope": math.sqrt(2 / math.pi),
    }  # fmt: skip
    return {name: np.array(number, np.float32) for name, number in numbers.items()}


def spelled(body: str, opset: int) -> ModelProto:
    return model(f"g (float[2, N, 8] x) => (float[2, N, 8] y) {{ {body} y = Neg(g) }}", opset=opset, **constants())


@pytest.mark.parametrize("name", [*ERF, *TANH])
def test_becomes_one_node(name: str) -> None:
    made = spelled({**ERF, **TANH}[name], 20)
    graph = named_graph(made)
    apply_once(GELU, graph)
    assert ops(graph) == ["Gelu", "Neg"]
    assert graph.nodes[0].attrs == ({} if name in ERF else {"approximate": "tanh"})
    for seed in (0, 1):
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) < 1e-6


@pytest.mark.parametrize("name", [*ERF, *TANH])
def test_before_opset_20_becomes_what_onnxruntime_fuses(name: str, tmp_path: Path, running_graph: RunningGraph) -> None:
    made = spelled({**ERF, **TANH}[name], 14)
    graph = named_graph(made)
    changes = apply_once(GELU, graph)
    assert bool(changes) == (name not in KNOWN)
    assert [reason for _, reason in FuseGelu().apply(graph).skipped] == ["ONNX has Gelu from opset 20 on"]
    save(graph, tmp_path / "model.onnx")
    running = running_graph(tmp_path / "model.onnx")
    assert [node.op_type for node in running.node] == ["Gelu" if name in ERF else "FastGelu", "Neg"]
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 1e-6


@pytest.mark.parametrize(
    "body",
    [
        ERF["div, half last"].replace("Div(x, root)", "Div(x, two)"),
        ERF["div, half last"].replace("Add(e, one)", "Add(e, half)"),
        ERF["div, half last"].replace("Mul(x, p)", "Mul(e, p)"),
        TANH["pow, 0"].replace("Pow(x, three)", "Pow(x, two)"),
    ],
)
def test_leaves_what_only_looks_alike(body: str) -> None:
    graph = named_graph(spelled(body, 20))
    assert not FuseGelu().apply(graph)


def test_leaves_constants_that_widen_the_data() -> None:
    made = model(
        f"g (float[] x) => (float[1] g) {{ {ERF['div, half last']} }}",
        opset=20, **constants() | {"half": np.full(1, 0.5, np.float32)},
    )  # fmt: skip
    (left,) = FuseGelu().apply(named_graph(made)).skipped
    assert left[1] == "its constants may have more dimensions than its data"


def test_works_in_a_body() -> None:
    body = ERF["mul, half last"].replace("g =", "t =")
    made = model(
        f"""g (float[4] x, bool c) => (float[4] y) {{
            y = If (c) <then_branch = yes () => (float[4] t) {{ {body} }},
                        else_branch = no () => (float[4] n) {{ n = Neg(x) }}> }}""",
        opset=20, **constants(),
    )  # fmt: skip
    graph = named_graph(made)
    apply_once(GELU, graph)
    assert ops(graph) == ["If", "Gelu", "Neg"]
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 1e-6
