"""Blocks share nothing that learns, and samples flow through them as through the whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import Build

from onnxq.calibration.activations import Activations
from onnxq.training.blocks import BlockActivations
from onnxq.training.module import FakeQuantizedModel, blocks_of
from onnxq.training.training_set import Batch
from training.modules import images, module_of

DEEP = """(float[N,8] x) => (float[N,8] y) {
    a = MatMul(x, s)  b = Relu(a)  c = MatMul(b, t)  d = MatMul(c, u)  e = MatMul(d, v)  f = Relu(e)
    g = MatMul(f, w)  h = Add(f, g)  y = MatMul(h, z)
}"""
WEIGHTS = dict.fromkeys("stuvwz", (8, 8))


@pytest.fixture
def module(build: Build) -> FakeQuantizedModel:
    return module_of(build(DEEP, **WEIGHTS), images(8, (1, 8)))


def test_what_learns_does_so_in_one_block(module: FakeQuantizedModel) -> None:
    names = {id(one): name for name, one in module.named_parameters()}
    found = [{names[id(one)] for one in block.parameters()} for block in blocks_of(module)]
    assert len(found) == 2
    assert set.union(*found) == set(names.values())
    assert sum(map(len, found)) == len(names)
    # Both blocks read this tensor with one scale, which the first one learns.
    assert all(found)


def test_samples_flow_through_blocks_as_through_the_whole(module: FakeQuantizedModel) -> None:
    batches = [Batch({"x": torch.from_numpy(one["x"])}, {}, count=1) for one in images(3, (1, 8))]
    with Activations(0) as coded, Activations(0) as exact:
        flow = BlockActivations(module, coded, exact)
        places = flow.add_samples(batches)
        found = blocks_of(module)
        for number, block in enumerate(found):
            flow.run_float(block)
            if number + 1 == len(found):
                (lesson,) = flow.training_set(block, places[1:2]).samples
            flow.run_quantized(block, {name for later in found[number + 1 :] for name in later.inputs} | {"y"})
        outputs = [torch.from_numpy(coded.of(place)["y"]) for place in places]
    with torch.no_grad():
        for batch, output in zip(batches, outputs, strict=True):
            assert module.outputs(batch.inputs)["y"].equal(output)
    for quantizer in module.quantizers:
        quantizer.fake_quant_enabled = False
    np.testing.assert_allclose(lesson.expected["y"], module.outputs(batches[1].inputs)["y"].detach(), atol=1e-6)


def test_entries_are_read_when_they_are_asked_for(module: FakeQuantizedModel) -> None:
    batches = [Batch({"x": torch.from_numpy(one["x"])}, {}, count=2) for one in images(3, (2, 8))]
    with Activations(0) as coded, Activations(0) as exact:
        flow = BlockActivations(module, coded, exact)
        first, second = flow.add_samples(batches[:2]), flow.add_samples(batches[2:])
        block = blocks_of(module)[0]
        flow.run_float(block)
        learned, judged = (flow.training_set(block, places).samples for places in (first, second))
        assert (len(learned), len(judged), judged[0].count) == (2, 1, 2)
        assert judged[0].inputs["x"].equal(batches[2].inputs["x"])
        assert learned[0].expected.keys() == set(block.output_names)
        assert [one.inputs["x"].tolist() for one in learned[1:]] == [batches[1].inputs["x"].tolist()]
