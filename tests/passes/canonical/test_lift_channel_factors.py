"""LiftChannelFactors brings factors and shifts to the convolutions that can take them."""

from __future__ import annotations

import numpy as np
import pytest
from model_texts import batch_norm, difference, model, named_graph, ops, outputs, sample, values, variances

from onnxq.ir import Graph
from onnxq.passes import FuseBatchNorm, LiftChannelFactors
from onnxq.rewrite import Changes

WEIGHTS = {"w": values(4, 3, 3, 3), "v": values(5, 3, 3, 3), "u": values(3, 2, 3, 3), "half": np.array(0.5, np.float32)}
JOINED = "p = Conv(x, w) q = Conv(x, v) j = Concat<axis = 1>(p, q)"
NORM = "BatchNormalization(j, ns, nb, nm, nv)"


def lift(body: str, channels: int) -> tuple[Graph, Changes]:
    norm = batch_norm("n", channels) | {"ns": variances(channels)}
    more = {"each": values(channels, 1, 1), "last": values(6), **norm}
    used = {name: array for name, array in (WEIGHTS | more).items() if f", {name}" in body or f"({name}" in body}
    made = model(f"g (float[N, 3, 8, 8] x) => (float[N, C, H, W] y) {{ {body} }}", **used)
    graph = named_graph(made)
    changes = LiftChannelFactors().apply(graph)
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 2e-6
    assert not LiftChannelFactors().apply(graph)
    FuseBatchNorm().apply(graph)
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 5e-6
    return graph, changes


@pytest.mark.parametrize("behind", [NORM, "Mul(j, each)", "Add(each, j)", "Mul(j, half)"])
def test_the_joined_take_their_parts(behind: str) -> None:
    graph, _ = lift(f"{JOINED} y = {behind}", 9)
    assert ops(graph) == ["Conv", "Conv", "Concat"]
    assert [tensor.name for tensor in graph.outputs] == ["y"]


@pytest.mark.parametrize("behind", [NORM, "Mul(j, half)", "Add(j, each)"])
@pytest.mark.parametrize(
    "pool",
    [
        "MaxPool<kernel_shape = [2, 2], pads = [1, 0, 0, 0]>(p)",
        "AveragePool<kernel_shape = [2, 2], pads = [1, 0, 0, 0]>(p)",
        "GlobalAveragePool(p)",
        "GlobalMaxPool(p)",
    ],
)
def test_the_pooled_takes_all(pool: str, behind: str) -> None:
    graph, _ = lift(f"p = ConvTranspose(x, u) j = {pool} y = {behind}", 2)
    assert len(ops(graph)) == 2


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (f"r = Relu(x) q = Conv<pads = [1, 1, 1, 1]>(x, v) j = Concat<axis = 1>(r, q) y = {NORM}", "not all that"),
        (f"p = Conv(x, v) j = Concat<axis = 1>(p, p) k = {NORM} y = Add(k, j)", ""),
        (f"{JOINED} y = Mul(j, last)", "its constants do not vary along the channels alone"),
        (
            "p = Conv(x, v) j = MaxPool<kernel_shape = [2, 2]>(p) y = Mul(j, each)",
            "not all of its factors are positive",
        ),
        (
            "p = Conv(x, v) j = AveragePool<kernel_shape = [2, 2], count_include_pad = 1>(p) y = Add(j, each)",
            " counts padding",
        ),
    ],
)
def test_others_stay(body: str, reason: str) -> None:
    channels = 10 if "(p, p)" in body else 8 if "Relu" in body else 5
    _, changes = lift(body, channels)
    assert not changes.changed
    assert all(reason in why for _, why in changes.skipped)
    assert bool(changes.skipped) == bool(reason)
