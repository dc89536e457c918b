"""Blocks share nothing that learns, and samples flow through them as through the whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import Build

from onnxq.calibration.activations import Activations
from onnxq.training.blocks import Flow, blocks
from onnxq.training.lessons import Batch
from onnxq.training.module import FakeQuantized
from training.modules import images, module_of

DEEP = """(float[N,8] x) => (float[N,8] y) {
    a = MatMul(x, s)  b = Relu(a)  c = MatMul(b, t)  d = MatMul(c, u)  e = MatMul(d, v)  f = Relu(e)
    g = MatMul(f, w)  h = Add(f, g)  y = MatMul(h, z)
}"""
WEIGHTS = dict.fromkeys("stuvwz", (8, 8))


@pytest.fixture
def module(build: Build) -> FakeQuantized:
    return module_of(build(DEEP, **WEIGHTS), images(8, (1, 8)))


def test_what_learns_does_so_in_one_block(module: FakeQuantized) -> None:
    names = {id(one): name for name, one in module.named_parameters()}
    found = [{names[id(one)] for one in block.parameters()} for block in blocks(module)]
    assert len(found) == 2
    assert set.union(*found) == set(names.values())
    assert sum(map(len, found)) == len(names)
    # Both blocks read this tensor with one scale, which the first one learns.
    assert all(found)


def test_samples_flow_through_blocks_as_through_the_whole(module: FakeQuantized) -> None:
    batches = [Batch({"x": torch.from_numpy(one["x"])}, {}, count=1) for one in images(3, (1, 8))]
    with Activations(0) as coded, Activations(0) as exact:
        flow = Flow(module, coded, exact)
        places = flow.enter(batches)
        found = blocks(module)
        for number, block in enumerate(found):
            flow.expect(block)
            if number + 1 == len(found):
                (lesson,) = flow.lessons(block, places[1:2]).single
            flow.advance(block, {name for later in found[number + 1 :] for name in later.inputs} | {"y"})
        outputs = [torch.from_numpy(coded.of(place)["y"]) for place in places]
    with torch.no_grad():
        for batch, output in zip(batches, outputs, strict=True):
            assert module.outputs(batch.inputs)["y"].equal(output)
    for quantizer in module.quantizers:
        quantizer.fake_quant_enabled = False
    np.testing.assert_allclose(lesson.expected["y"], module.outputs(batches[1].inputs)["y"].detach(), atol=1e-6)


def test_entries_are_read_when_they_are_asked_for(module: FakeQuantized) -> None:
    batches = [Batch({"x": torch.from_numpy(one["x"])}, {}, count=2) for one in images(3, (2, 8))]
    with Activations(0) as coded, Activations(0) as exact:
        flow = Flow(module, coded, exact)
        first, second = flow.enter(batches[:2]), flow.enter(batches[2:])
        block = blocks(module)[0]
        flow.expect(block)
        learned, judged = (flow.lessons(block, places).single for places in (first, second))
        assert (len(learned), len(judged), judged[0].count) == (2, 1, 2)
        assert judged[0].inputs["x"].equal(batches[2].inputs["x"])
        assert learned[0].expected.keys() == set(block.outcome)
        assert [one.inputs["x"].tolist() for one in learned[1:]] == [batches[1].inputs["x"].tolist()]
