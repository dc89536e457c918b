"""What most tests of training begin with: a model beside onnxruntime, and a module of a quantized one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import ModelProto

from onnxq.evaluation.goal import Goal
from onnxq.ir import Constant, Graph, as_graph, constants
from onnxq.pipeline.quantization import quantize
from onnxq.pipeline.request import Budget
from onnxq.planning.plan import Plan
from onnxq.runtime.sessions import open_session, run
from onnxq.training.losses import Distillation, Task
from onnxq.training.module import QATModule, prepare
from onnxq.training.program import Program, Subgraph
from onnxq.training.training_set import TrainingSet, run_float_model

NETWORK = """(float[N,3,8,8] x) => (float[N,16] y) {
    [c] h = Conv<pads = [1,1,1,1]>(x, w, b)
    r = Relu(h)
    [d] e = Conv(r, v)
    p = GlobalAveragePool(e)
    f = Flatten(p)
    [g] y = Gemm(f, u, a)
}"""
WEIGHTS = {"w": (16, 3, 3, 3), "b": (16,), "v": (32, 16, 1, 1), "u": (32, 16), "a": (16,)}
# Tensors of tests are small, and cores may be busy.
torch.set_num_threads(1)
_PLANS: dict[tuple[object, ...], Plan] = {}
Samples = list[dict[str, NDArray[Any]]]


def images(count: int, shape: tuple[int, ...] = (1, 3, 8, 8), seed: int = 0) -> Samples:
    generator = np.random.default_rng(seed)
    return [{"x": generator.standard_normal(shape).astype(np.float32)} for _ in range(count)]


def module_of(model: ModelProto | Path, samples: Iterable[Mapping[str, Any]], scheme: str = "int8") -> QATModule:
    """Return the module of a model that is quantized as a scheme says, without a search; plans are made once."""
    given = list(samples)
    stored = model if isinstance(model, Path) else model.SerializeToString()
    key = (stored, scheme, *(array.tobytes() for sample in given for array in sample.values()))
    if key not in _PLANS:
        budget = Budget("off", "off", latency_seconds=0)
        _PLANS[key] = quantize(model, given, scheme=scheme, goal=Goal(force=True), budget=budget).report.plan
    return prepare(model, _PLANS[key])


def task_of(model: ModelProto, path: Path) -> Task:
    """Write a float model, and return what a module learns of it from 24 images, compared by 8 others."""
    onnx.save(model, path)
    lessons = run_float_model(path, images(32))
    nsr = Distillation.of(lessons)
    return Task(nsr, TrainingSet(lessons[:24], True), TrainingSet(lessons[24:], True), nsr)


def run_float(graph: Graph, fed: Mapping[str, torch.Tensor], part: Subgraph | None = None) -> dict[str, torch.Tensor]:
    """Run a graph, or a part of it, in torch."""
    return Program(graph).run(fed, constants_of(graph), subgraph=part)


def constants_of(graph: Graph) -> dict[Constant, torch.Tensor]:
    """Return the constants of a graph as tensors."""
    return {tensor: torch.from_numpy(np.array(tensor.values)) for tensor in constants(graph)}


def learn_noise(module: QATModule) -> None:
    """Move all that learns by a little noise."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.add_(0.03 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))


def difference(model: ModelProto, sample: Mapping[str, NDArray[Any]]) -> float:
    """Return how far torch is from onnxruntime, in units of the largest value."""
    graph = as_graph(model)
    found = run_float(graph, {name: torch.from_numpy(array) for name, array in sample.items()})
    expected = run(open_session(model, optimize=False), sample)
    worst = 0.0
    for tensor, array in zip(found.values(), expected, strict=True):
        got = tensor.detach().numpy()
        assert got.shape == array.shape
        assert got.dtype == array.dtype
        wide, other = np.asarray(array, np.float64), np.asarray(got, np.float64)
        worst = max(worst, float(np.abs(wide - other).max(initial=0) / max(np.abs(wide).max(initial=0), 1e-9)))
    return worst
