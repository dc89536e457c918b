"""Models are taken in from files and from memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnx_graphsurgeon as gs
import pytest
from onnx import ModelProto

from onnxq.calibration.data import Data
from onnxq.errors import ModelError, OutputError
from onnxq.steps.budget import Budget
from onnxq.steps.opening import checked_output, opened, rewritten
from onnxq.steps.wanted import Wanted

GRU = Path(__file__).parents[2] / "models" / "gru.onnx"


@pytest.mark.parametrize(
    "given",
    [lambda: GRU, lambda: str(GRU), lambda: onnx.load(GRU), lambda: gs.import_onnx(onnx.load(GRU))],  # noqa: TID251
    ids=["path", "text", "message", "surgeon"],
)
def test_a_model_may_be_a_file_or_in_memory(given: Callable[[], Any]) -> None:
    expected, found = rewritten(GRU, ()), rewritten(given(), ())
    assert [(node.op, node.name) for node in found.nodes] == [(node.op, node.name) for node in expected.nodes]


def test_passes_of_the_users_come_first(build: Callable[..., ModelProto]) -> None:
    model = build("(float[4] x) => (float[4] y) { unused = Neg(x) y = Relu(x) }")
    assert [node.op for node in rewritten(model, ()).nodes] == ["Neg", "Relu"]
    assert [node.op for node in rewritten(model, ("RemoveUnused",)).nodes] == ["Relu"]


def test_what_is_quantized_already_is_refused(build: Callable[..., ModelProto]) -> None:
    model = build("(float[4] x, float s) => (float[4] y) { q = QuantizeLinear(x, s) y = DequantizeLinear(q, s) }")
    with pytest.raises(ModelError, match="float"):
        rewritten(model, ())


def test_plans_are_made_on_the_bench_of_what_is_wanted(tmp_path: Path) -> None:
    bench = opened(rewritten(GRU, ()), Wanted.of("int4-block32", "onnxruntime-cpu", ()), tmp_path, measured=False)
    specs = {weight.spec.format for one in bench.plan({}).decisions for weight in one.weights}
    assert "int4" in specs


def test_an_output_is_neither_the_model_nor_the_file_of_node_times(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"")
    with pytest.raises(OutputError, match="is the model itself"):
        checked_output(tmp_path / "m.onnx", tmp_path / "m.onnx", Budget(), Data([]))
    with pytest.raises(OutputError, match="node times cannot be kept in the output"):
        checked_output(tmp_path / "q.onnx", tmp_path / "m.onnx", Budget(costs=tmp_path / "q.onnx.data"), Data([]))
    (tmp_path / "c.npz").write_bytes(b"")
    with pytest.raises(OutputError, match="is read as well"):
        checked_output(tmp_path / "c.npz", tmp_path / "m.onnx", Budget(), Data(tmp_path / "c.npz"))
    assert checked_output(None, tmp_path / "m.onnx", Budget(), Data([])) is None
