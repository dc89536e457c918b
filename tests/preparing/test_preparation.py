from __future__ import annotations

from pathlib import Path

import pytest

import onnxq
from onnxq.calibration.data import Data
from onnxq.errors import ModelError
from onnxq.ir import load, to_model
from onnxq.preparing.preparation import check_float_model, prepare

MODELS = Path(__file__).parents[2] / "models"
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


def test_a_float_model_is_not_refused_and_a_quantized_one_is() -> None:
    graph = load(MODELS / "gru.onnx")
    check_float_model(graph)
    graph.nodes[0].op = "QuantizeLinear"
    with pytest.raises(ModelError, match=r"is quantized already: node .* is QuantizeLinear"):
        check_float_model(graph)


def test_a_model_that_gives_nothing_is_refused() -> None:
    graph = load(MODELS / "gru.onnx")
    graph.outputs.clear()
    with pytest.raises(ModelError, match=r"^the model has no outputs"):
        check_float_model(graph)


def test_a_model_with_recurrent_cells_of_integers_is_quantized_already() -> None:
    graph = load(MODELS / "gru.onnx")
    graph.nodes[0].op, graph.nodes[0].domain = "DynamicQuantizeLSTM", "com.microsoft"
    with pytest.raises(ModelError, match=r"is quantized already: node .* is DynamicQuantizeLSTM"):
        check_float_model(graph)
