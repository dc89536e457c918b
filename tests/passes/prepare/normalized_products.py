"""Products with a normalization behind them, and what is left of it."""

from __future__ import annotations

from model_texts import Array, batch_norm, difference, model, outputs, sample, values
from onnx import ModelProto

from onnxq.ir import Graph, as_graph
from onnxq.onnx_api import infer_shapes
from onnxq.passes import FuseBatchNorm
from onnxq.rewrite import Changes


def fuse(made: ModelProto) -> tuple[Graph, Changes]:
    """Apply the pass, and check that the outputs stay."""
    graph = as_graph(made)
    infer_shapes(graph)
    changes = FuseBatchNorm().apply(graph)
    inputs = sample(made)
    assert difference(outputs(graph, inputs), outputs(made, inputs)) <= 2e-6
    return graph, changes


def conv(rank: int, behind: str, groups: int = 1, bias: bool = True, **weights: Array) -> ModelProto:
    """A Conv of 4 to 6 channels over ``rank`` spatial axes with a node behind it."""
    space, terms = ", ".join(["5"] * rank), "x, w, b" if bias else "x, w"
    weights |= {"w": values(6, 4 // groups, *[3] * rank)} | ({"b": values(6)} if bias else {})
    return model(
        f"""g (float[N, 4, {space}] x) => (float[N, 6, {", ".join(["3"] * rank)}] y) {{
            [conv] a = Conv <group = {groups}> ({terms})  [next] y = {behind}
        }}""",
        **weights,
    )


def dot(product: str, behind: str, **weights: Array) -> ModelProto:
    return model(f"g (float[3, 4] x) => (float[3, 6] y) {{ [dot] a = {product} [next] y = {behind} }}", **weights)


BATCH_NORM = "BatchNormalization <epsilon = 0.01> (a, s, m, c, v)"
PARAMETERS = dict(zip("smcv", batch_norm("", 6).values(), strict=True))
