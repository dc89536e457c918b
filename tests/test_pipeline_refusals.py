"""What quantize() refuses, in a sentence each."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from conftest import Build
from onnx import ModelProto, TensorProto, helper

from onnxq.calibration.data import Data
from onnxq.config.presets import PRESETS
from onnxq.config.scheme import Mode, Rule, Scheme
from onnxq.errors import DataError, ModelError, OutputError, SchemeError
from onnxq.evaluation.goal import Goal
from onnxq.pipeline import plan, quantize
from onnxq.report import FidelityError
from onnxq.search.prepared_model import PreparedModel
from onnxq.steps.request import Budget

MODELS = Path(__file__).parent.parent / "models"
CALIB = MODELS / "data" / "calib.npz"


def test_below_the_wanted_fidelity_nothing_is_written_unless_forced(tmp_path: Path) -> None:
    output = tmp_path / "out.onnx"
    output.write_bytes(b"old")
    with pytest.raises(FidelityError, match=r"output logits has .* dB, expected 200 dB or more; nothing was written"):
        quantize(
            MODELS / "gru.onnx", Data(CALIB, limit=4), output, goal=200, budget=Budget(latency_seconds=0, search="off")
        )
    assert output.read_bytes() == b"old"
    quantize(
        MODELS / "gru.onnx",
        Data(CALIB, limit=4),
        output,
        goal=Goal(min_sqnr=200, force=True),
        budget=Budget(latency_seconds=0, search="off"),
    )
    assert len(output.read_bytes()) > 1000
    assert [path.name for path in tmp_path.iterdir()] == ["out.onnx"]


def test_the_fidelity_error_names_the_nodes_that_hurt_most() -> None:
    with pytest.raises(FidelityError, match="the nodes that hurt most are ") as caught:
        quantize(
            MODELS / "resnet.onnx", Data(CALIB, limit=2), scheme=conv_only(), goal=500, budget=Budget(latency_seconds=0)
        )
    assert caught.value.report.search.sensitivities


@pytest.mark.parametrize("apart", [False, True])
def test_silent_samples_are_refused_before_anything_is_calibrated_also_where_it_is_forced(
    apart: bool, residual: ModelProto, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PreparedModel, "calibrate", lambda *arguments: pytest.fail("it was calibrated"))
    (entry,) = residual.graph.input
    shape = [dim.dim_value for dim in entry.type.tensor_type.shape.dim]
    silent = [{entry.name: np.zeros(shape, np.float32)} for _ in range(3)]
    real = [{entry.name: np.random.default_rng(0).standard_normal(shape).astype(np.float32)} for _ in range(3)]
    data = Data(real, silent) if apart else Data(silent)
    with pytest.raises(DataError, match="hold a single value in each input, as zeros do"):
        quantize(residual, data, goal=Goal(force=True), budget=Budget(latency_seconds=0, search="off"))


def conv_only() -> Scheme:
    """Static convolutions that the search may not store: what it demotes stays in integer storage, below 500 dB."""
    return Scheme((Rule(Mode.STATIC, op_types=("Gemm",)),))


def test_a_model_without_weights_is_refused() -> None:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy")
    model = helper.make_model(
        helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y]),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    with pytest.raises(ModelError, match="there is nothing to quantize in the model: "):
        plan(model)


@pytest.mark.parametrize(
    ("patterns", "told"),
    [(("*",), "every node is excluded$"), (("stem", "left", "right", "last"), "some nodes are excluded; .* integer")],
)
def test_a_model_whose_nodes_are_excluded_is_refused_for_that(
    patterns: tuple[str, ...], told: str, residual: ModelProto
) -> None:
    with pytest.raises(ModelError, match=f"there is nothing to quantize in the model: {told}"):
        plan(residual, scheme=PRESETS["int8"].excluding(*patterns))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"goal": math.nan}, "the wanted fidelity is NaN, expected decibels such as 20"),
        ({"goal": "20"}, "the wanted fidelity is '20' of type str, expected decibels such as 20"),
        ({"budget": "fest"}, "search 'fest' is not one of off, fast, full; did you mean 'fast'"),
        ({"budget": 3}, r"the budget is 3 of type int, expected one of off, fast, full, or Budget\(...\)"),
        ({"scheme": 8}, "the scheme is 8 of type int, expected the name of a preset or TOML file, a Scheme or a Plan"),
        ({"target": None}, "the target is None of type NoneType, expected the name of a runtime"),
        ({"output": 1}, "the output is 1 of type int, expected a path, or None to write nothing"),
        ({"prepare": "NameNodes"}, "the passes are 'NameNodes', expected a list of passes or of their names"),
    ],
)
def test_arguments_that_say_nothing_are_refused_in_a_sentence(given: dict[str, object], sentence: str) -> None:
    with pytest.raises(SchemeError, match=sentence):
        quantize(MODELS / "gru.onnx", CALIB, **given)


@pytest.mark.parametrize("name", ["q.onnx", "q.onnx.data"])
def test_node_times_are_not_kept_in_the_output(name: str, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"node times cannot be kept in the output .*q\.onnx; give another name"):
        quantize(MODELS / "gru.onnx", CALIB, tmp_path / "q.onnx", budget=Budget(profile_cache=tmp_path / name))
    assert list(tmp_path.iterdir()) == []


def test_what_keeps_a_large_model_out_of_reach_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PreparedModel, "is_large", True)
    with pytest.raises(FidelityError) as caught:
        quantize(MODELS / "gru.onnx", Data(CALIB, limit=2), goal=140, budget=Budget(latency_seconds=0))
    assert {one.node for one in caught.value.report.search.sensitivities} == {"/gru/GRU", "/gru/GRU_1", "/head/Gemm"}
    assert str(caught.value).startswith(
        "nothing can be quantized that keeps 140 dB at the worst output; nothing was written; the nodes that hurt most "
        "are /head/Gemm ("
    )


def test_a_search_that_gains_nothing_writes_nothing_unless_forced(build: Build, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    # Nearly all of the model are whole numbers, and the scales of its small weight take more than its codes save.
    model = build(
        """(float[16,8] x, int64[16] i) => (float[16,8] y, int64[16] z) {
            h = MatMul(x, w) y = Relu(h) z = Gather(t, i)
        }""",
        w=(8, 8),
        t=generator.integers(0, 9, 9000),
    )
    samples = [
        {"x": generator.standard_normal((16, 8)).astype(np.float32), "i": generator.integers(0, 9000, 16)}
        for _ in range(16)
    ]
    output, untimed = tmp_path / "out.onnx", Budget(latency_seconds=0)
    with pytest.raises(
        FidelityError, match=r"nothing is gained: the quantized model is 1.00 of the size and of a speed"
    ):
        quantize(model, samples, output, budget=untimed)
    assert list(tmp_path.iterdir()) == []
    found = quantize(model, samples, output, goal=Goal(force=True), budget=untimed).report
    assert found.output
    assert found.size_ratio >= 1
    # As it is, or by a plan that is given, it is wanted whatever it gains.
    assert quantize(model, samples, output, budget=Budget(latency_seconds=0, search="off")).report.output
    assert quantize(model, samples, output, scheme=found.plan, budget=untimed).report.output
