"""A module computes what the written model computes, and its parameters have gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from conftest import MODELS, Build
from observations import with_outputs

import onnxq
from onnxq.errors import DataError, ModelError, SchemeError
from onnxq.ir import Variable, save
from onnxq.runtime.sessions import Array, open_session, run
from onnxq.training import (
    convert,
    disable_fake_quant,
    disable_observer,
    enable_fake_quant,
    enable_observer,
    prepare,
)
from onnxq.training.module import FakeQuantizedModel, QATModule
from onnxq.training.program import Subgraph
from training.modules import NETWORK, WEIGHTS, images, learn_noise, module_of, run_float

PRESETS = [
    "int8",
    "int8-per-tensor",
    "int4-int8-data",
    "int8-int16-data",
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
    learn_noise(module)
    assert apart(module, tmp_path / "moved.onnx", "x", x) < 1e-5


@pytest.mark.parametrize("name", ["mobilenet", "gru"])
def test_so_it_is_of_models_that_people_have(name: str, tmp_path: Path) -> None:
    pixels = np.load(MODELS / "data" / "calib.npz")["image"]
    module = module_of(MODELS / f"{name}.onnx", [{"image": one[None]} for one in pixels[:4]], "torch-qnnpack")
    # Sums of floats in another order decide ties between quantized values otherwise.
    assert apart(module, tmp_path / "q.onnx", "image", pixels[4:6]) < 1e-3


def test_codes_of_a_module_that_learned_nothing_are_those_of_post_training_quantization(build: Build) -> None:
    from onnxq.algorithms.encode import encode
    from onnxq.algorithms.encoding_config import config_from_plan

    module = module_of(build(NETWORK, **WEIGHTS), images(4))
    before, after = encode(module.plan, module.graph, config=config_from_plan(module.plan, 1)), module.encodings()
    assert before.weights
    for key, quantized in before.weights.items():
        assert np.array_equal(quantized.values, after.weights[key].values)
    for tensor, parameters in before.activations.items():
        assert parameters.scale == after.activations[tensor].scale
        assert parameters.zero_point == after.activations[tensor].zero_point
    for node, bias in before.biases.items():
        found = after.biases[node].quantized
        assert bias.quantized is not None
        assert found is not None
        assert np.array_equal(bias.quantized.values, found.values)


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


@dataclass(frozen=True)
class Written:
    """What onnxruntime makes of the written model, without optimisation."""

    model: onnx.ModelProto
    values: dict[str, Array]

    @classmethod
    def of(cls, module: QATModule, path: Path, sample: dict[str, Array]) -> Written:
        save(module.quantized(), path)
        model = onnx.load(path)
        made = {name for node in model.graph.node for name in node.output if name}
        instrumented = with_outputs(model, sorted(made - {one.name for one in model.graph.output}))
        names = [one.name for one in instrumented.graph.output]
        found = run(open_session(instrumented, optimize=False), sample, names)
        return cls(model, dict(zip(names, found, strict=True)) | sample)

    @property
    def roundings(self) -> list[tuple[str, str]]:
        """The tensors that become quantized values, and the quantized values."""
        found = (node for node in self.model.graph.node if node.op_type == "QuantizeLinear")
        return [(node.input[0], node.output[0]) for node in found]


def checked(module: QATModule, written: Written) -> int:
    """Compare quantized values and nodes' outputs for the same inputs; return the number of quantized tensors."""
    quantizers = {one.tensor: module.quantizer_of(one.tensor) for one in module.plan.activations}
    with torch.no_grad():
        for tensor, quantized in written.roundings:
            quantizer = quantizers[tensor]
            found = quantizer(torch.from_numpy(written.values[tensor]))
            decoded = torch.from_numpy(written.values[quantized].astype(np.float32))
            assert found.equal((decoded - quantizer.whole_zero_point) * quantizer.scale), tensor
        for node in module.graph.nodes:
            read = tuple(one for one in node.inputs if isinstance(one, Variable) and one.name)
            made = tuple(one for one in node.outputs if one.name in written.values)
            if any(one.name not in written.values for one in read) or not made:
                continue
            fed = {one.name: torch.from_numpy(written.values[one.name]) for one in read}
            for name, found in module.outputs(fed, Subgraph((node,), read, made)).items():
                expected = np.asarray(written.values[name], np.float64)
                apart = np.abs(found.numpy() - expected).max() / max(np.abs(expected).max(), 1e-9)
                assert apart < 1e-5, (node.name, name)
    return len(written.roundings)


@pytest.mark.parametrize("preset", ["int8", "int8-per-tensor", "torch-qnnpack", "torch-fbgemm"])
def test_codes_are_equal_bit_for_bit(preset: str, build: Build, tmp_path: Path) -> None:
    module = module_of(build(NETWORK, **WEIGHTS), images(4), preset)
    learn_noise(module)
    assert checked(module, Written.of(module, tmp_path / "q.onnx", images(1, (8, 3, 8, 8), 7)[0])) > 2


@pytest.mark.parametrize(("name", "tensors"), [("mobilenet", 20), ("resnet", 10), ("vit", 10)])
def test_so_they_are_in_deep_models(name: str, tensors: int, tmp_path: Path) -> None:
    pixels = np.load(MODELS / "data" / "calib.npz")["image"]
    module = module_of(MODELS / f"{name}.onnx", [{"image": one[None]} for one in pixels[:4]], "int8-per-tensor")
    assert checked(module, Written.of(module, tmp_path / "q.onnx", {"image": pixels[4:6]})) > tensors


@pytest.mark.parametrize(
    ("name", "preset"), [("mobilenet", "torch-qnnpack"), ("resnet", "int8"), ("vit", "int8"), ("gru", "int8")]
)
def test_in_the_same_arithmetic_whole_models_are_equal(name: str, preset: str) -> None:
    pixels = np.load(MODELS / "data" / "calib.npz")["image"]
    module = module_of(MODELS / f"{name}.onnx", [{"image": one[None]} for one in pixels[:4]], preset)
    fed = {"image": torch.from_numpy(pixels[4:6])}
    with torch.no_grad():
        # Sums are torch's and quantizers onnxruntime's, so that no sum in another order decides between two quantized
        # values.
        found, expected = run_float(module.quantized(), fed)["logits"], module.outputs(fed)["logits"]
    assert float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


def test_factors_of_channels_learn_with_all_else(build: Build, tmp_path: Path) -> None:
    model = build(NETWORK, **WEIGHTS)
    plan = module_of(model, images(4)).plan
    by_channels = {"x": 3, "r": 16}
    divided = [
        replace(one, factors=tuple(np.linspace(0.2, 1, by_channels[one.tensor])), channels=1)
        if one.tensor in by_channels
        else one
        for one in plan.activations
    ]
    module = prepare(model, replace(plan, activations=tuple(divided)))
    begun = module.encodings().factors
    assert begun.keys() == by_channels.keys()
    module(torch.from_numpy(images(1)[0]["x"])).sum().backward()
    assert all(one.log_channel_scales.grad.abs().sum() > 0 for one in module.channels.shared)
    learn_noise(module)
    learned = module.encodings().factors
    for name, factors in learned.items():
        assert not np.allclose(factors.values, begun[name].values, rtol=1e-3)
        assert factors.values.max() <= 1
    onnxq.save(convert(module), tmp_path / "q.onnx")
    sample = images(1, seed=5)[0]
    (written,) = run(open_session(tmp_path / "q.onnx", optimize=False), sample)
    found = module(torch.from_numpy(sample["x"])).detach().numpy()
    # Sums of what was divided round otherwise, and a value between two quantized values becomes the other one.
    assert np.abs(found - written).max() < 1e-2 * np.abs(written).max()


def test_a_loop_of_ones_own_learns_and_its_model_runs(build: Build, tmp_path: Path) -> None:
    model = build(NETWORK, **WEIGHTS)
    module = module_of(model, images(4), "int4-block32")
    x = torch.from_numpy(images(1, (16, 3, 8, 8))[0]["x"])
    (expected,) = (torch.from_numpy(one) for one in run(open_session(model), {"x": x.numpy()}))
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
    losses = []
    for _ in range(12):
        loss = torch.nn.functional.mse_loss(module(x), expected)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
    onnxq.save(convert(module), tmp_path / "q.onnx")
    (found,) = run(open_session(tmp_path / "q.onnx", optimize=False), {"x": x.numpy()})
    assert torch.allclose(torch.from_numpy(found), module(x).detach(), atol=1e-5)
    assert "int4-block32" in onnxq.load(tmp_path / "q.onnx").metadata.values()


def test_switches_work_as_those_of_torch(build: Build) -> None:
    module = module_of(build(NETWORK, **WEIGHTS), images(4))
    x = torch.from_numpy(images(1, seed=5)[0]["x"])
    quantized = module(x)
    module.apply(disable_fake_quant)
    assert not torch.equal(module(x), quantized)
    module.apply(enable_fake_quant)
    assert torch.equal(module(x), quantized)
    before = [one.base.clone() for one in module.quantizers]
    module.apply(enable_observer)
    module(10 * x)
    module.apply(disable_observer)
    after = [one.base.clone() for one in module.quantizers]
    module(20 * x)
    assert any(not one.equal(other) for one, other in zip(before, after, strict=True))
    assert all(one.base.equal(other) for one, other in zip(module.quantizers, after, strict=True))


def test_plans_and_modules_that_cannot_be_are_refused(build: Build) -> None:
    model = build(NETWORK, **WEIGHTS)
    with pytest.raises(DataError, match="calibrat"):
        prepare(model, onnxq.plan(model))
    with pytest.raises(SchemeError):
        prepare(build(NETWORK, **{**WEIGHTS, "v": (8, 16, 1, 1), "u": (8, 16)}), module_of(model, images(4)).plan)
    with pytest.raises(SchemeError, match="expected a Plan"):
        prepare(model, "int8")  # type: ignore[arg-type]
    with pytest.raises(SchemeError, match=r"the module is Linear, expected one of onnxq.training.prepare\(\)"):
        convert(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
