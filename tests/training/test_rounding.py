"""Fake quantization rounds as codes are written, to the last bit, and has the gradients of LSQ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onnxq.numerics.affine import QuantParams, dequantize, quantize
from onnxq.numerics.formats import FORMATS, QuantDType
from onnxq.training.quantizers import dynamic_fake_quantize, fake_quantize, spread, straight_through

VECTORS: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "vectors.json").read_text(encoding="utf-8"))
SMALL = [name for name, one in FORMATS.items() if one.bits <= 16]


@pytest.mark.parametrize("name", SMALL)
def test_values_are_those_of_the_codes_that_are_written(name: str) -> None:
    format, generator = FORMATS[name], np.random.default_rng(0)
    scale = np.float32(0.37 / max(format.maximum, 1)) * generator.uniform(0.5, 2, (4, 1)).astype(np.float32)
    # Halves are ties.
    ties = (np.arange(-40, 40).reshape(4, 20) / 2).astype(np.float32) * scale
    values = np.concatenate([generator.standard_normal((4, 300)).astype(np.float32), ties], 1)
    middle = (format.minimum + format.maximum) // 2 + 1
    zero = None if format.is_float else np.full(scale.shape, middle, format.dtype)
    parameters = QuantParams(scale, zero)
    expected = dequantize(quantize(values, parameters, format).codes, parameters, format)
    shift = torch.zeros(4, 1) if zero is None else torch.from_numpy(zero.astype(np.float32))
    found = fake_quantize(torch.from_numpy(values), torch.from_numpy(scale), shift, format)
    assert np.array_equal(found.numpy(), expected)


def gradients(values: list[float], scale: float, zero: float, format: QuantDType) -> list[list[float]]:
    """Return those of values, of the scale and of the zero point for each value."""
    found = []
    x, s, z = (
        torch.tensor(one, requires_grad=True) for one in (values, [scale] * len(values), [float(zero)] * len(values))
    )
    fake_quantize(x, s, z, format).sum().backward()
    for one in (x, s, z):
        assert one.grad is not None
        found.append(one.grad.tolist())
    return found


def test_gradients_are_those_of_learned_step_sizes() -> None:
    one = VECTORS["torch_lsq_grads"]
    assert (one["qmin"], one["qmax"]) == (0, 15)
    found = gradients(one["x"], one["scale"], one["zp"], FORMATS["uint4"])
    for mine, theirs in zip(found, (one["dX"], one["dScale"], one["dZp"]), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-6)


def test_a_scale_of_many_values_has_the_sum_of_their_gradients() -> None:
    one = VECTORS["torch_lsq_grads"]
    scale = torch.tensor(one["scale"], requires_grad=True)
    fake_quantize(torch.tensor(one["x"]), scale, torch.tensor(float(one["zp"])), FORMATS["uint4"]).sum().backward()
    assert scale.grad is not None
    assert float(scale.grad) == pytest.approx(sum(one["dScale"]), abs=1e-5)


def test_a_minifloat_has_them_too() -> None:
    of_values, of_scale, _ = gradients([2.4, 9.0, -9.0], 1.0, 0.0, FORMATS["float4e2m1"])
    assert of_values == [1, 0, 0]
    np.testing.assert_allclose(of_scale, [2.0 - 2.4, 6, -6], atol=1e-6)


def test_blocks_spread_over_a_partial_last_one() -> None:
    grid = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    found = spread(grid, (2, 3), (4, 5))
    assert found[:, 0].tolist() == [1, 1, 3, 3]
    assert found[0].tolist() == [1, 1, 1, 2, 2]
    found.sum().backward()
    assert grid.grad is not None
    assert grid.grad.tolist() == [[6, 4], [6, 4]]


def test_dynamic_data_is_rounded_as_onnxruntime_does(build: Any) -> None:
    from onnxq.runtime.sessions import open_session, run

    text = """(float[7] x) => (float[7] y) {
        c, s, z = DynamicQuantizeLinear(x)
        y = DequantizeLinear(c, s, z) }"""
    x = np.array([-1.3, 0.0, 0.01, 0.4, 2.7, 1.1, -0.6], np.float32)
    (expected,) = run(open_session(build(text), optimize=False), {"x": x})
    values = torch.tensor(x, requires_grad=True)
    found = dynamic_fake_quantize(values)
    assert np.array_equal(found.detach().numpy(), expected)
    found.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [1] * 7


def test_what_needs_no_gradient_passes_as_it_was_rounded() -> None:
    exact, rounded = torch.tensor(0.1), torch.tensor(0.3)
    assert straight_through(exact, rounded) is rounded
