"""A module computes what the written model computes, and its codes are those that are written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Build

from onnxq.errors import ModelError
from onnxq.ir import save
from onnxq.runtime.sessions import open_session, run
from onnxq.training.module import FakeQuantizedModel, QATModule
from training.modules import MODELS, NETWORK, WEIGHTS, images, module_of

PRESETS = [
    "int8",
    "int8-per-tensor",
    "int4-int8-data",
    "int8-dynamic",
    "int8-storage",
    "int8-block32",
    "int4-block32",
    "uint4-block32",
    "uint4-hqq",
    "int2-block16",
    "float8-e4m3",
    "mxfp4",
    "mxint8",
    "nvfp4",
    "nf4-block64",
    "int4-words",
    "burn-q4s",
    "torch-fbgemm",
    "torch-qnnpack",
]


def apart(module: QATModule, path: Path, name: str, x: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> float:
    """Return how far a module is from the model that it writes, in units of the largest value."""
    save(module.quantized(), path)
    (expected,) = run(open_session(path, optimize=False), {name: x})
    with torch.no_grad():
        found = module(torch.from_numpy(x))
    return float(np.abs(found.numpy() - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("preset", PRESETS)
def test_a_module_is_the_written_model(preset: str, build: Build, tmp_path: Path) -> None:
    module = module_of(build(NETWORK, **WEIGHTS), images(4), preset)
    x = images(1, seed=7)[0]["x"]
    assert apart(module, tmp_path / "q.onnx", "x", x) < 1e-5
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.add_(0.03 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    assert apart(module, tmp_path / "moved.onnx", "x", x) < 1e-5


@pytest.mark.parametrize("name", ["mobilenet", "gru"])
def test_so_it_is_of_models_that_people_have(name: str, tmp_path: Path) -> None:
    pixels = np.load(MODELS / "data" / "calib.npz")["image"]
    module = module_of(MODELS / f"{name}.onnx", [{"image": one[None]} for one in pixels[:4]], "torch-qnnpack")
    # Sums of floats in another order decide ties between codes otherwise.
    assert apart(module, tmp_path / "q.onnx", "image", pixels[4:6]) < 1e-3


def test_codes_of_a_module_that_learned_nothing_are_those_of_post_training_quantization(build: Build) -> None:
    from onnxq.algorithms.encode import encode
    from onnxq.algorithms.encoding_config import config_from_plan

    module = module_of(build(NETWORK, **WEIGHTS), images(4))
    before, after = encode(module.plan, module.graph, recipe=config_from_plan(module.plan, 1)), module.codes()
    assert before.weights
    for key, codes in before.weights.items():
        assert np.array_equal(codes.codes, after.weights[key].codes)
    for tensor, parameters in before.activations.items():
        assert parameters.scale == after.activations[tensor].scale
        assert parameters.zero_point == after.activations[tensor].zero_point
    for node, bias in before.biases.items():
        found = after.biases[node].codes
        assert bias.codes is not None
        assert found is not None
        assert np.array_equal(bias.codes.codes, found.codes)


def test_whatever_learns_has_a_gradient(build: Build) -> None:
    module = module_of(build(NETWORK, **WEIGHTS), images(8))
    module(torch.from_numpy(images(1, (3, 3, 8, 8))[0]["x"])).square().sum().backward()
    named = {name: one for name, one in module.named_parameters() if one.requires_grad}
    assert {name.split(".")[0] for name in named} == {"activations", "weights", "biases"}
    assert [name for name, one in named.items() if one.grad is None] == []


def test_without_fake_quantization_it_is_the_float_model(build: Build) -> None:
    model = build(NETWORK, **WEIGHTS)
    module = module_of(model, images(4))
    for quantizer in module.quantizers:
        quantizer.fake_quant_enabled = False
    assert not module.fake_quant_enabled
    x = images(1, seed=3)[0]["x"]
    (expected,) = run(open_session(model), {"x": x})
    np.testing.assert_allclose(module(torch.from_numpy(x)).detach().numpy(), expected, atol=1e-5)


def test_its_state_goes_into_another_module(build: Build) -> None:
    model = build(NETWORK, **WEIGHTS)
    one, other = (module_of(model, images(4)) for _ in range(2))
    with torch.no_grad():
        next(iter(one.weights)).values.mul_(1.1)
    other.load_state_dict(one.state_dict())
    x = torch.from_numpy(images(1)[0]["x"])
    assert torch.equal(one(x=x), other(x))


def test_ranges_that_operators_give_do_not_learn_and_clamps_stay_in_their_range(build: Build) -> None:
    text = """(float[N,3,8,8] x) => (float[N,4,6,6] y) {
        h = Conv(x, w)  l = Constant<value = float {0}>()  m = Constant<value = float {6}>()
        c = Clip(h, l, m)  e = Conv(c, v)  s = Sigmoid(e)  y = Conv(s, u) }"""
    weights = {"w": (6, 3, 3, 3), "v": (5, 6, 1, 1), "u": (4, 5, 1, 1)}
    module = module_of(build(text, **weights), images(4))
    by_tensor = dict(zip([one.tensor for one in module.plan.activations], module.activations, strict=True))
    assert not by_tensor["s"].log_scale.requires_grad
    with torch.no_grad():
        by_tensor["c"].log_scale.add_(1)
        by_tensor["x"].log_scale.add_(1)
    assert by_tensor["c"].scale.equal(by_tensor["c"].base)
    assert bool(by_tensor["x"].scale > by_tensor["x"].base)
    assert not by_tensor["c"].zero_point.requires_grad


def test_half_floats_are_refused(build: Build) -> None:
    from onnxq.algorithms.encodings import Encodings
    from onnxq.ir import as_graph
    from onnxq.planning.plan import Plan

    graph = as_graph(build("(float16[2] x) => (float16[2] y) { y = Add(x, w) }", w=np.ones(2, np.float16)))
    with pytest.raises(ModelError, match="tensor 'w' is float16, expected float32 to train in"):
        FakeQuantizedModel(graph, Plan((), (), "s", "onnxruntime-cpu"), Encodings())
