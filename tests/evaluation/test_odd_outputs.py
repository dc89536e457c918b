"""Outputs that are no plain floats of one shape: models are judged all the same, and the verdict says how."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Build

from onnxq.errors import ModelError
from onnxq.pipeline import quantize
from onnxq.steps.request import Budget

GENERATOR = np.random.default_rng(0)
ROWS = [{"x": GENERATOR.standard_normal((4, 64)).astype(np.float32)} for _ in range(16)]
LAYERS = "h = MatMul(x, w) r = Relu(h) a = MatMul(r, u)"
WEIGHTS = {"w": (64, 64), "u": (64, 10)}
ZERO, HALF = np.zeros(1, np.float32), np.float32([0.5])
NAMES = np.array([f"class {number}" for number in range(10)], object)


def divided(*zeros: Any) -> list[dict[str, np.ndarray]]:
    """Return samples with a divisor that is zero in these places."""
    samples = []
    for number, sample in enumerate(ROWS):
        divisor = np.ones((4, 10), np.float32)
        if number % 2:
            divisor[zeros] = 0
        samples.append({**sample, "d": divisor})
    return samples


def verdict(build: Build, text: str, samples: list[dict[str, np.ndarray]], folder: Path, **constants: Any) -> str:
    model = build(text.replace("LAYERS", LAYERS), **{**WEIGHTS, **constants})
    return quantize(model, samples, folder / "int8.onnx", budget=Budget(latency_seconds=0)).report.verdict


DIVIDED = "(float[4,64] x, float[4,10] d) => (float[4,10] y) {{ LAYERS {} }}"


@pytest.mark.parametrize(
    ("nodes", "places"),
    [
        ("t = Mul(a, d) y = Div(t, d)", (slice(None),)),
        ("t = Mul(a, d) y = Div(t, d)", (0, slice(3))),
        ("y = Div(a, d)", (0, slice(3))),
        ("t = Div(a, d) y = Softmax(t)", (0,)),
    ],
    ids=["NaN in whole samples", "NaN in places", "infinite in places", "NaN in rows of probabilities"],
)
def test_places_of_no_number_are_left_out(nodes: str, places: Any, build: Build, tmp_path: Path) -> None:
    found = verdict(build, DIVIDED.format(nodes), divided(*places), tmp_path)
    assert "dB on 4 samples it had not seen" in found
    assert found.endswith("; y is compared where the float model is finite")


@pytest.mark.parametrize(
    ("outputs", "nodes", "constants", "told"),
    [
        ("float[4,10] a, float[4,10] z", "n = Mul(a, zero) z = Div(n, zero)", {"zero": ZERO}, "; z is not compared"),
        (
            "string[4] s",
            "l = ArgMax<axis = 1, keepdims = 0>(a) s = Gather(names, l)",
            {"names": NAMES},
            "; s is judged",
        ),
        ("bool[4,10] b", "b = Greater(a, half)", {"half": HALF}, "equal outputs on 4 samples it had not seen"),
        ("int32[4,10] i", "t = Div(a, half) i = Cast<to = 6>(t)", {"half": HALF}, "equal labels on 4 samples"),
        ("seq(float[1,10]) s", "s = SplitToSequence(a, one)", {"one": np.array(1)}, "dB on 4 samples it had not seen"),
        ("optional(float[4,10]) o", "o = Optional(a)", {}, "dB on 4 samples it had not seen"),
        ("float[4,10] a, float[1] c", "c = Identity(half)", {"half": HALF}, "dB on 4 samples it had not seen"),
        (
            "float[4,10] c",
            "z = Mul(a, zero) c = Add(z, half)",
            {"zero": ZERO, "half": HALF},
            "dB on 4 samples it had not seen",
        ),
        (
            "float[M,10] y",
            "m = ReduceMax<axes = [1], keepdims = 0>(a) c = Greater(m, most) y = Compress<axis = 0>(a, c)",
            {"most": np.float32([1e9])},
            "; y is not compared, as the float model gives no finite number",
        ),
    ],
    ids=["one of NaN", "strings", "bools", "integers", "sequence", "optional", "constant", "all constant", "empty"],
)
def test_outputs_of_all_kinds_are_judged(
    outputs: str, nodes: str, constants: dict[str, Any], told: str, build: Build, tmp_path: Path
) -> None:
    text = f"(float[4,64] x) => ({outputs}) {{ LAYERS {nodes} }}"
    assert told in verdict(build, text, ROWS, tmp_path, **constants)


@pytest.mark.parametrize("lengths", [range(12, 52, 7), (2, 3)])
def test_the_number_of_classes_may_differ_from_sample_to_sample(lengths: range, build: Build, tmp_path: Path) -> None:
    text = """(float[1,N,64] x) => (float[1,N,N] p) {
        h = MatMul(x, w) t = Transpose<perm = [0, 2, 1]>(x) s = MatMul(h, t) p = Softmax<axis = -1>(s)
    }"""
    shapes = [(1, lengths[number % len(lengths)], 64) for number in range(16)]
    samples = [{"x": GENERATOR.standard_normal(shape).astype(np.float32) / 4} for shape in shapes]
    assert "dB on 4 samples it had not seen" in verdict(build, text, samples, tmp_path)


def test_a_model_without_any_finite_answer_is_refused(build: Build, tmp_path: Path) -> None:
    text = "(float[4,64] x) => (float[4,10] y) { LAYERS e = Exp(a) y = Div(e, zero) }"
    with pytest.raises(ModelError, match="every value of output y of the float model is NaN or infinite"):
        verdict(build, text, ROWS, tmp_path, zero=ZERO)
