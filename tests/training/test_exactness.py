"""Given what onnxruntime gives them, quantizers of a module make the codes of the written model, bit for bit.

Outputs of deep models are further apart than those of their nodes: sums of floats in another order differ in their last
bits, and where these decide between two codes, what follows differs by a step. So each is fed onnxruntime's own inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from conftest import Build

from onnxq.calibration.instrument import add_outputs
from onnxq.ir import Variable, constants, save
from onnxq.runtime.sessions import Array, open_session, run
from onnxq.training.module import QATModule
from onnxq.training.program import Program, Subgraph
from training.modules import MODELS, NETWORK, WEIGHTS, images, module_of


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
        tapped = add_outputs(model, sorted(made - {one.name for one in model.graph.output}))
        names = [one.name for one in tapped.graph.output]
        found = run(open_session(tapped, optimize=False), sample, names)
        return cls(model, dict(zip(names, found, strict=True)) | sample)

    @property
    def roundings(self) -> list[tuple[str, str]]:
        """The tensors that become codes, and the codes."""
        found = (node for node in self.model.graph.node if node.op_type == "QuantizeLinear")
        return [(node.input[0], node.output[0]) for node in found]


def checked(module: QATModule, written: Written) -> int:
    """Compare codes, and what each node makes of onnxruntime's inputs; return how many tensors become codes."""
    quantizers = {one.tensor: module.quantizer_of(one.tensor) for one in module.plan.activations}
    with torch.no_grad():
        for tensor, codes in written.roundings:
            quantizer = quantizers[tensor]
            found = quantizer(torch.from_numpy(written.values[tensor]))
            decoded = torch.from_numpy(written.values[codes].astype(np.float32))
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
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.add_(0.03 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
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
    graph, fed = module.quantized(), {"image": torch.from_numpy(pixels[4:6])}
    held = {tensor: torch.from_numpy(np.array(tensor.values)) for tensor in constants(graph)}
    with torch.no_grad():
        # Sums are torch's and quantizers onnxruntime's, so that no sum in another order decides between two codes.
        found = Program(graph).run(fed, held, lambda node, index, value: value, lambda node, index, value: value)
        expected = module.outputs(fed)["logits"]
    assert float((found["logits"] - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
