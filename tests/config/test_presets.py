"""Presets: what each name stands for, and that each makes a model that runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto

from onnxq.config.presets import DESCRIPTIONS, PRESETS, preset_named
from onnxq.config.scheme import Granularity, Mode
from onnxq.errors import SchemeError
from onnxq.numerics.formats import format_named

WEIGHTS = [name for name, scheme in PRESETS.items() if scheme.rules[0].mode is Mode.WEIGHT_ONLY]


@pytest.mark.parametrize(
    ("name", "mode", "per"),
    [
        ("int8", Mode.STATIC, Granularity.CHANNEL),
        ("int8-per-tensor", Mode.STATIC, Granularity.TENSOR),
        ("int8-storage", Mode.STORAGE, Granularity.CHANNEL),
        ("int8-block32", Mode.WEIGHT_ONLY, (32,)),
    ],
)
def test_a_preset_is_one_rule_for_all_nodes(name: str, mode: Mode, per: Granularity | tuple[int, ...]) -> None:
    rule = preset_named(name).rule_for("Conv", "any", ())
    assert rule.mode is mode
    assert rule.weight is not None
    assert (rule.weight.format, rule.weight.per, rule.weight.symmetric) == ("int8-narrow", per, True)


def test_presets_are_listed_by_their_names_with_a_line_each() -> None:
    assert [scheme.name for scheme in PRESETS.values()] == list(PRESETS) == list(DESCRIPTIONS)
    assert all(0 < len(line) <= 80 and not line.endswith(".") for line in DESCRIPTIONS.values())


def test_no_two_presets_are_the_same() -> None:
    assert len({scheme.rules for scheme in PRESETS.values()}) == len(PRESETS)


# Decibels by bits: of two random layers, whose noise nothing averages out.
LOWEST_SQNR = {2: 1, 4: 14, 6: 20, 8: 20}


@pytest.mark.parametrize("name", WEIGHTS)
def test_every_preset_of_weights_makes_a_smaller_model_that_runs(
    name: str, build, quantize_to, running_graph, tmp_path: Path
) -> None:
    model: ModelProto = build(
        """(int64[2,3] i) => (float[2,3,32] y) {
        e = Gather(table, i) a = MatMul(e, w0) b = Relu(a) y = MatMul(b, w1)
        }""",
        table=(200, 64),
        w0=(64, 96),
        w1=(96, 32),
    )
    samples = [{"i": np.random.default_rng(seed).integers(0, 200, (2, 3))} for seed in range(4)]
    done = quantize_to(model, tmp_path / "q.onnx", scheme=name, samples=samples)
    assert done.report.files.bytes < done.report.files.float_bytes * 0.4
    format = format_named(preset_named(name).rules[0].weight.format)
    assert done.report.agreement.worst_sqnr > LOWEST_SQNR[format.bits]
    left = {node.op_type for node in running_graph(tmp_path / "q.onnx").node}
    assert "DequantizeLinear" not in left
    assert ("MatMulNBits" in left) == (not format.is_float)


def test_the_per_tensor_preset_has_one_scale_for_each_weight(perceptron, plan_of) -> None:
    pers = {
        weight.spec.per for one in plan_of(perceptron, scheme="int8-per-tensor").decisions for weight in one.weights
    }
    assert pers == {Granularity.TENSOR}


def test_an_unknown_preset_is_told_with_the_nearest() -> None:
    with pytest.raises(SchemeError, match=r"^preset 'int8_storage' is not one of .*; did you mean 'int8-storage'\?$"):
        preset_named("int8_storage")
