"""Outputs that are joined of parts: which, and what one hides of another."""

from __future__ import annotations

import math

import numpy as np
import pytest
from conftest import Build

from onnxq.evaluation.agreement import OutputAgreement, agreement_of
from onnxq.evaluation.outputs import OutputPart, joins, parts_of
from onnxq.evaluation.warnings import warn_weak_slices
from onnxq.ir import Graph, read_model
from onnxq.onnx_api import infer_shapes


def found(model: object) -> dict[str, list[tuple[int, int, int]]]:
    graph: Graph = read_model(model)
    infer_shapes(graph)
    return {name: [(one.axis, one.start, one.stop) for one in parts] for name, parts in parts_of(graph).items()}


CASES = [
    ("y = Concat<axis = 1>(a, b)", [(1, 0, 4), (1, 4, 7)]),
    ("y = Concat<axis = -2>(a, b)", [(1, 0, 4), (1, 4, 7)]),
    ("j = Concat<axis = 1>(a, b) y = Transpose<perm = [0, 2, 1]>(j)", [(2, 0, 4), (2, 4, 7)]),
    ("j = Concat<axis = 1>(a, b) y = Reshape(j, apart)", [(1, 0, 4), (1, 4, 7)]),
    # Heads of different sizes of image, each of which joins boxes and scores.
    ("j = Concat<axis = 1>(a, b) k = Concat<axis = 1>(a, b) y = Concat<axis = 2>(j, k)", [(1, 0, 4), (1, 4, 7)]),
    ("j = Concat<axis = 1>(a, b) k = Concat<axis = 1>(b, a) y = Concat<axis = 2>(j, k)", [(2, 0, 8), (2, 8, 16)]),
    ("j = Concat<axis = 1>(a, b) y = Relu(j)", None),
    ("y = Add(a, a)", None),
]


@pytest.mark.parametrize(("nodes", "parts"), CASES)
def test_parts_are_followed_to_the_output(nodes: str, parts: list[tuple[int, int, int]] | None, build: Build) -> None:
    model = build(
        f"(float[1,4,8] x, float[1,3,8] z) => (y) {{ a = Relu(x) b = Sigmoid(z) {nodes} }}",
        apart=np.array([1, 7, 2, 4]),
    )
    assert found(model) == ({} if parts is None else {"y": parts})
    assert joins(model.graph) or parts is None


def test_noise_of_a_part_shows_beside_that_of_all() -> None:
    expected = np.concatenate([np.full((1, 4, 8), 100.0), np.full((1, 3, 8), 0.5)], axis=1).astype(np.float32)
    noisy = expected.copy()
    noisy[:, 4:] += 0.25
    parts = {"y": (OutputPart(1, 0, 4, "Mul boxes"), OutputPart(1, 4, 7, "Sigmoid scores"))}
    (output,) = agreement_of(["y"], [([expected], [noisy])], parts=parts).outputs
    assert [part.sqnr for part in output.parts] == [pytest.approx(float("inf")), pytest.approx(6.02, abs=0.01)]
    (sentence,) = warn_weak_slices([output], 20.0)
    assert sentence.startswith("entries 4 to 6 of axis 1 of output y, which Sigmoid scores makes, have 6.0 dB, which")
    assert sentence.endswith("or ask for --min-sqnr 68")


def test_what_is_faithful_or_refused_anyway_hides_nothing() -> None:
    part = OutputPart(1, 0, 4, "Mul boxes", 15.0)
    for whole, wanted in ((30.0, 10.0), (16.0, 20.0)):
        output = OutputAgreement("y", whole, None, 0.0, same_shapes=True, finite=True, compared=0, parts=(part,))
        assert not warn_weak_slices([output], wanted)


def test_a_part_that_is_silent_in_float_is_told_without_a_goal_that_would_help() -> None:
    part = OutputPart(0, 2, 4, "head", -math.inf)
    output = OutputAgreement("y", 66.0, None, 0.0, same_shapes=True, finite=True, compared=0, parts=(part,))
    (sentence,) = warn_weak_slices([output], 20.0)
    assert sentence.endswith("which the 66.0 dB of all do not show; evaluate with --metric")
