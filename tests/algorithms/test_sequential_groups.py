"""Transposed convolutions in groups are corrected layer by layer as those of one group are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from rounded_parts import both_outputs

from onnxq.algorithms.codes import encode
from onnxq.algorithms.recipe import Recipe
from onnxq.algorithms.sequential_bias import Layer, layers_of, with_sequential_biases
from onnxq.calibration.methods import Percentile
from onnxq.config.presets import PRESETS
from onnxq.ir import read_model
from onnxq.runtime.targets import TARGETS
from onnxq.search.workbench import open_workbench
from onnxq.system.resources import silent
from tests.conftest import Build

GENERATOR = np.random.default_rng(5)
SAMPLES = [{"x": GENERATOR.random((1, 3, 6, 6), np.float32)} for _ in range(12)]


@pytest.fixture(scope="module")
def network(build: Build) -> onnx.ModelProto:
    """Return transposed convolutions in groups, without a bias and with one."""
    return build(
        """(float[1,3,6,6] x) => (float[1,4,12,12] y) {
        [wide] a = ConvTranspose <group = 3, strides = [2,2]> (x, w0)
        b = Relu(a)
        [grouped] c = ConvTranspose <group = 2> (b, w1, b1)
        [last] y = Conv (c, w2, b2)
        }""",
        w0=(3, 96, 2, 2),
        w1=(288, 16, 1, 1),
        b1=(32,),
        w2=(4, 32, 1, 1),
        b2=(4,),
    )


@pytest.mark.parametrize("target", ["onnxruntime-cpu", "openvino"])
def test_what_codes_make_of_groups_is_what_the_quantized_model_computes(
    network: onnx.ModelProto, target: str, tmp_path: Path
) -> None:
    bench = open_workbench(read_model(network), PRESETS["int8"], TARGETS[target], tmp_path)
    plan = bench.plan({})
    assert layers_of(bench.graph, plan) == {"grouped": Layer("c", 1, "b1"), "last": Layer("y", 1, "b2")}
    evidence = bench.calibrate(plan, SAMPLES, silent)
    narrow = Recipe(Percentile(90.0))
    codes = encode(plan, bench.graph, evidence, narrow)
    assert {name: bias.values.size for name, bias in codes.biases.items() if bias.values is not None} == {
        "wide": 288,
        "grouped": 32,
        "last": 4,
    }
    recipe = with_sequential_biases(narrow, plan, bench.graph, codes, bench.prepared, SAMPLES)
    assert recipe.biases.keys() == {"grouped", "last"}
    for exact, found in both_outputs(bench, plan, evidence, recipe, SAMPLES[:4], tmp_path):
        # Where sums are rounded otherwise, a value may fall to the next code.
        assert np.abs(found - exact).mean() < 0.01 * np.abs(exact).mean()
