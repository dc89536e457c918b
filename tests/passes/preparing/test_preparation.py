"""Which passes follow the canonical form is decided by the scheme and the runtime, and read back by their names."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import MODELS

import onnxq
from onnxq.calibration.data import Data
from onnxq.config.presets import PRESETS
from onnxq.errors import ModelError, SchemeError
from onnxq.ir import load, to_model
from onnxq.passes.preparing.preparation import check_float_model, integer_steps, prepare, steps_named
from onnxq.runtime.targets import TARGETS, target_named

CALIB = MODELS / "data" / "calib.npz"
NAMES = ("gru", "mobilenet", "resnet", "vit")


def test_prepare_leaves_the_outputs_as_they_were(tmp_path: Path) -> None:
    from onnxq.evaluation.agreement import compare_files

    for name in NAMES:
        onnxq.save(prepare(onnxq.load(MODELS / f"{name}.onnx")), tmp_path / "prepared.onnx")
        agreement = compare_files(MODELS / f"{name}.onnx", tmp_path / "prepared.onnx", Data(CALIB, limit=8))
        assert agreement.worst_sqnr > 100, name
        ops = {node.op for node in onnxq.load(tmp_path / "prepared.onnx").nodes}
        assert not ops & {"BatchNormalization", "Constant", "Identity", "Dropout"}, name


def test_preparing_a_prepared_graph_changes_nothing() -> None:
    graph = prepare(load(MODELS / "vit.onnx"))
    before = to_model(graph)
    assert to_model(prepare(graph)) == before


@pytest.mark.parametrize(("op", "domain"), [("QuantizeLinear", ""), ("DynamicQuantizeLSTM", "com.microsoft")])
def test_a_float_model_is_not_refused_and_a_quantized_one_is(op: str, domain: str) -> None:
    graph = load(MODELS / "gru.onnx")
    check_float_model(graph)
    graph.nodes[0].op, graph.nodes[0].domain = op, domain
    with pytest.raises(ModelError, match=rf"is quantized already: node .* is {op}"):
        check_float_model(graph)


def test_a_model_that_gives_nothing_is_refused() -> None:
    graph = load(MODELS / "gru.onnx")
    graph.outputs.clear()
    with pytest.raises(ModelError, match=r"^the model has no outputs"):
        check_float_model(graph)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("preset", ["int8", "int4-block32", "int8-storage"])
def test_the_names_of_steps_tell_them(preset: str, target: str) -> None:
    steps = integer_steps(PRESETS[preset], target_named(target))
    assert [type(step) for step in steps_named([type(step).__name__ for step in steps])] == [type(one) for one in steps]


def test_kernels_of_integers_want_forms_of_their_own() -> None:
    def names(preset: str) -> set[str]:
        return {type(step).__name__ for step in integer_steps(PRESETS[preset], target_named("openvino"))}

    assert names("int8") - names("int8-storage") == {"ConvolvePooled", "ConvolveTransposed"}


def test_other_names_are_refused() -> None:
    with pytest.raises(SchemeError, match="the plan has step 'SplitPRelu', expected any of UnfuseProducts"):
        steps_named(["SplitPRelu"])
    with pytest.raises(SchemeError, match="'ScanCells', which is no longer part of onnxq: a GRU stays one node"):
        steps_named(["ScanCells"])
