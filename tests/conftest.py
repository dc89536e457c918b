"""Small models in ONNX's text form, and what most tests do with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx
import pytest
from hypothesis import settings
from model_texts import Stored
from model_texts import model as build_model
from numpy.typing import NDArray
from onnx import ModelProto, helper

from onnxq.calibration.methods import MinMax
from onnxq.config.presets import PRESETS
from onnxq.config.scheme import Scheme
from onnxq.evaluation.goal import Goal
from onnxq.ir import Graph, read_model
from onnxq.passes.preparing.preparation import prepare
from onnxq.pipeline.quantization import Quantized, quantize
from onnxq.pipeline.request import Budget
from onnxq.planning.plan import Demotion, Plan
from onnxq.planning.planner import make_plan
from onnxq.runtime.sessions import open_session
from onnxq.runtime.targets import TARGETS

# How long an example takes says how busy the machine is.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

MODELS = Path(__file__).parents[1] / "models"

# Sizes of models this small are compared without certificates.
_PLAIN = Budget(search="off", accuracy="off", latency_seconds=0, certificate=False)
_NUMBERS = count()
Samples = list[dict[str, NDArray[Any]]]
RunningGraph = Callable[[Path], onnx.GraphProto]


class Build(Protocol):
    def __call__(self, text: str, *, opset: int = 17, **weights: Stored) -> ModelProto: ...


class PlanOf(Protocol):
    def __call__(
        self, model: ModelProto, *, scheme: Scheme | str = "int8", demotions: Mapping[str, Demotion] | None = None
    ) -> Plan: ...


class QuantizeTo(Protocol):
    def __call__(self, model: ModelProto, path: Path, **options: Any) -> Quantized: ...


def _samples_for(model: ModelProto, count: int = 4) -> Samples:
    generator = np.random.default_rng(1)
    stored = {tensor.name for tensor in model.graph.initializer}
    samples: Samples = []
    for _ in range(count):
        sample = {}
        for value in model.graph.input:
            if value.name not in stored:
                tensor = value.type.tensor_type
                shape = [dim.dim_value or 2 for dim in tensor.shape.dim]
                dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
                sample[value.name] = generator.standard_normal(shape).astype(dtype)
        samples.append(sample)
    return samples


@pytest.fixture(scope="session", autouse=True)
def _caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep the times that fixtures measure out of the user's cache folder."""
    folder = tmp_path_factory.mktemp("caches")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def _own_cache(_caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test a cache folder of its own, so that none decides by the times of another.

    Whatever writes there makes the folder. One by ``mktemp`` would look at the folders of all tests before it, which
    takes longer with each of thousands.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(_caches / str(next(_NUMBERS))))


@pytest.fixture(scope="session")
def build() -> Build:
    """Return a function: a graph in text form and its weights, as arrays or as shapes of random ones, to a model."""
    return build_model


@pytest.fixture(scope="session")
def samples_for() -> Callable[..., Samples]:
    """Return a function: a model to a few samples of standard normal values."""
    return _samples_for


@pytest.fixture(scope="session")
def plan_of() -> PlanOf:
    """Return a function: a float model to the plan of its prepared graph."""

    def plan_of(
        model: ModelProto, *, scheme: Scheme | str = "int8", demotions: Mapping[str, Demotion] | None = None
    ) -> Plan:
        rules = PRESETS[scheme] if isinstance(scheme, str) else scheme
        return make_plan(prepare(read_model(model)), rules, TARGETS["onnxruntime-cpu"], demotions)

    return plan_of


@pytest.fixture(scope="session")
def quantize_to() -> QuantizeTo:
    """Return a function that quantizes a model on random samples as its first plan says, and writes it.

    Besides what quantize() takes it takes ``samples``, and ``ranges`` and ``emit`` of the scheme.
    """

    def quantize_to(model: ModelProto, path: Path, **options: Any) -> Quantized:
        scheme, ranges, emit = (options.pop(name, None) for name in ("scheme", "ranges", "emit"))
        if not isinstance(scheme, Plan):
            scheme = PRESETS[scheme or "int8"] if isinstance(scheme, str | None) else scheme
            scheme = replace(scheme, ranges=ranges or scheme.ranges or MinMax(), emit=emit or scheme.emit)
        given = {"goal": Goal(force=True), "budget": _PLAIN, **options}
        return quantize(model, given.pop("samples", None) or _samples_for(model), path, scheme=scheme, **given)

    return quantize_to


@pytest.fixture(scope="session")
def running_graph(tmp_path_factory: pytest.TempPathFactory) -> RunningGraph:
    """Return a function: a model file to the graph that runs after onnxruntime's optimisations."""
    folder = tmp_path_factory.mktemp("optimized")

    def running_graph(path: Path) -> onnx.GraphProto:
        copy = folder / "optimized.onnx"
        open_session(path, optimized_copy=copy)
        return onnx.load(copy).graph

    return running_graph


@pytest.fixture(scope="session")
def lonely_pairs(running_graph: RunningGraph) -> Callable[[Path], list[str]]:
    """Return a function: a model file to the QuantizeLinear nodes that only a DequantizeLinear reads when it runs."""

    def lonely_pairs(path: Path) -> list[str]:
        graph = running_graph(path)
        decoded = {node.input[0] for node in graph.node if node.op_type == "DequantizeLinear"}
        return [node.name for node in graph.node if node.op_type == "QuantizeLinear" and node.output[0] in decoded]

    return lonely_pairs


RESIDUAL = """(float[1,8,8,8] x) => (float[1,8,8,8] y) {
    [stem] a = Conv <pads = [1,1,1,1]> (x, w0, b0)
    [stem_relu] b = Relu(a)
    [left] c = Conv <pads = [1,1,1,1]> (b, w1, b1)
    [left_relu] d = Relu(c)
    [right] e = Conv <pads = [1,1,1,1]> (d, w2)
    [sum] f = Add(e, b)
    [sum_relu] g = Relu(f)
    [last] y = Conv <pads = [1,1,1,1]> (g, w3)
}"""


@pytest.fixture(scope="session")
def residual() -> ModelProto:
    """Return a stem, a residual block and a last convolution."""
    kernel = (8, 8, 3, 3)
    return build_model(RESIDUAL, w0=kernel, b0=(8,), w1=kernel, b1=(8,), w2=kernel, w3=kernel)


@pytest.fixture(scope="session")
def perceptron() -> ModelProto:
    """Return two matrix products with a Relu between them."""
    return build_model(
        """(float[4,32] x) => (float[4,16] y) {
        [first] a = MatMul(x, w0)
        [relu] b = Relu(a)
        [second] y = Gemm(b, w1, bias)
        }""",
        w0=(32, 32),
        w1=(32, 16),
        bias=(16,),
    )


@pytest.fixture
def prepared(residual: ModelProto) -> Graph:
    """Return the prepared graph of a small residual network."""
    return prepare(read_model(residual))


@pytest.fixture
def plan(prepared: Graph) -> Plan:
    """Return what the default preset plans for it."""
    return make_plan(prepared, PRESETS["int8"], TARGETS["onnxruntime-cpu"])


@pytest.fixture
def looping(build: Callable[..., ModelProto]) -> ModelProto:
    """Return a product in front of a loop of products, as many as an input says."""
    return build(
        """(float[1,8] x, int64 n) => (float[1,8] y) {
            yes = Constant <value = bool {1}> ()
            [first] h = MatMul(x, w0)
            [loop] y = Loop (n, yes, h) <
                body = turn (int64 i, bool going, float[1,8] s) => (bool on, float[1,8] t) {
                    on = Identity(going)
                    [inner] u = MatMul(s, w1)
                    [scale] t = Mul(u, h)
                }>
        }""",
        w0=(8, 8),
        w1=(8, 8),
    )


@pytest.fixture
def large(perceptron: ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a model whose external data counts as large."""
    monkeypatch.setattr("onnxq.ir.stored_tensors._LARGE_BYTES", 2000)
    copy = onnx.ModelProto()
    copy.CopyFrom(perceptron)
    onnx.save(copy, tmp_path / "model.onnx", save_as_external_data=True, location="model.data", size_threshold=0)
    return tmp_path / "model.onnx"
