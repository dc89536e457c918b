"""Factors of batch normalization are found again in weights that it was folded into, and learn beside them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from conftest import Build

from onnxq.errors import SchemeError
from onnxq.evaluation.goal import Goal
from onnxq.ir import as_graph, to_model
from onnxq.pipeline import quantize
from onnxq.runtime.sessions import open_session, run
from onnxq.steps.budget import Budget
from onnxq.system.progress import silent
from onnxq.training.batch_norms import folded_factors
from onnxq.training.fitting import Fitted, fitted
from onnxq.training.preparing import Prepared, convert, prepare
from onnxq.training.settings import Training
from training.modules import NETWORK, WEIGHTS, images

NORMALIZED = """(float[N,3,8,8] x) => (float[N,16] y) {
    [c] h = Conv<pads = [1,1,1,1]>(x, w, b)
    [norm] n = BatchNormalization(h, scale, shift, mean, variance)
    r = Relu(n)
    p = GlobalAveragePool(r)
    f = Flatten(p)
    [g] y = MatMul(f, u)
}"""
SCALE = np.linspace(-2, 3, 16, dtype=np.float32)


@pytest.fixture
def model(build: Build) -> onnx.ModelProto:
    return build(
        NORMALIZED,
        w=(16, 3, 3, 3),
        b=(16,),
        u=(16, 16),
        scale=SCALE,
        shift=(16,),
        mean=(16,),
        variance=np.full(16, 0.25, np.float32),
    )


def frozen(model: onnx.ModelProto, batch_norm: str = "frozen") -> Prepared:
    budget = Budget("off", "off", latency=0)
    done = quantize(model, images(8), scheme="int8", goal=Goal(force=True), budget=budget)
    return prepare(model, done.report.plan, batch_norm=batch_norm)


def test_factors_are_scales_over_deviations_and_one_where_a_channel_is_zero(model: onnx.ModelProto) -> None:
    module = frozen(model)
    (factor,) = folded_factors(as_graph(model), module.graph, module.plan).values()
    assert factor.shape == (16, 1, 1, 1)
    expected = np.where(SCALE == 0, 1, SCALE / np.sqrt(0.25 + 1e-5))
    np.testing.assert_allclose(factor.reshape(-1), expected, rtol=1e-5)


def test_codes_begin_as_those_of_the_product_and_the_factor_learns(model: onnx.ModelProto) -> None:
    folded, apart = frozen(model, "folded"), frozen(model)
    sample = torch.from_numpy(images(1)[0]["x"])
    first = apart(sample)
    assert torch.allclose(first, folded(sample), atol=1e-5)
    first.square().sum().backward()
    (factor,) = (one.factor for one in apart.weights if one.factor is not None)
    assert factor.grad is not None
    assert factor.grad.abs().sum() > 0
    before = [one.codes().codes for one in apart.weights]
    with torch.no_grad():
        factor.mul_(0.5)
    assert not np.array_equal(before[0], apart.weights[0].codes().codes)
    output = run(open_session(to_model(convert(apart)), optimize=False), images(1)[0])[0]
    np.testing.assert_allclose(apart(sample).detach().numpy(), output, atol=1e-4)


def trained(model: onnx.ModelProto, folder: Path) -> Fitted:
    onnx.save(model, folder / "m.onnx")
    module, training = frozen(model), Training(batch_norm="frozen", epochs=2, blocks="no")
    codes = module.codes()
    return fitted(module.graph, module.plan, codes, folder / "m.onnx", images(16), training, None, silent)


def test_training_takes_factors_apart(model: onnx.ModelProto, tmp_path: Path) -> None:
    done = trained(model, tmp_path)
    assert done.doubts == ()
    assert done.gain.after > done.gain.before


def test_a_model_without_batch_normalization_is_told_of(build: Build, tmp_path: Path) -> None:
    done = trained(build(NETWORK, **WEIGHTS), tmp_path)
    assert done.doubts == ("no weight has a batch normalization folded into it, so none was frozen",)


def test_what_becomes_of_it_is_one_of_two(model: onnx.ModelProto) -> None:
    with pytest.raises(
        SchemeError, match="batch normalization 'frosen' is not one of folded, frozen; did you mean 'fr"
    ):
        frozen(model, "frosen")
