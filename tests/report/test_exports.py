"""Charts and overlays as files."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from conftest import QuantizeTo
from onnx import ModelProto
from reports import FULL, REPORT, changed

from onnxq.config.scheme import Mode
from onnxq.errors import OutputError
from onnxq.report.exports import overlays, save_figures, save_overlays
from onnxq.search.search import NodeSensitivity


def test_each_figure_is_a_drawing_of_its_own(tmp_path: Path) -> None:
    files = save_figures(FULL, tmp_path / "figures")
    assert [file.name for file in files] == ["frontier.svg", "sqnr.svg"]
    for file in files:
        assert ElementTree.parse(file).getroot().tag == "{http://www.w3.org/2000/svg}svg"


def test_names_are_escaped_in_figures(tmp_path: Path) -> None:
    noisy = (NodeSensitivity("a", Mode.STATIC, 20.0),)
    (file,) = save_figures(changed(FULL, search={"sensitivities": noisy, "frontier": ()}), tmp_path)
    assert "a: 20.0 dB alone" in "".join(ElementTree.parse(file).getroot().itertext())


def test_nothing_measured_is_no_figure_and_a_file_is_no_folder(tmp_path: Path) -> None:
    assert save_figures(changed(REPORT, search={"sensitivities": ()}), tmp_path) == ()
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="figures cannot be written to"):
        save_figures(FULL, tmp_path / "file")


# Node data is as Model Explorer documents it.

# Fields of GraphNodeData, NodeDataResult and GradientItem in model_explorer/node_data_builder.py.
GRAPH = {"results", "name", "thresholds", "gradient"}
RESULT = {"value", "bgColor", "textColor"}
GRADIENT = {"stop", "bgColor", "textColor"}


def test_every_measure_is_node_data_by_node() -> None:
    found = overlays(FULL)
    assert list(found) == ["mode", "time", "sqnr"]
    for graph in found.values():
        assert set(graph) <= GRAPH
        assert all(set(result) <= RESULT for result in graph["results"].values())
        assert [set(stop) <= GRADIENT and stop["stop"] for stop in graph.get("gradient", [])] in ([], [False, 1])
    assert found["mode"]["results"]["a"]["value"] == "static"
    assert found["time"]["results"] == {"a": {"value": 1.0}, "b": {"value": 0.5}}
    assert found["sqnr"]["results"]["a"] == {"value": 33.5}


def test_what_was_not_measured_has_no_file(tmp_path: Path) -> None:
    assert save_overlays(REPORT, tmp_path / "overlay.json") == (tmp_path / "overlay.mode.json",)
    assert json.loads((tmp_path / "overlay.mode.json").read_text())["results"]["b"]["value"] == "float"


def test_the_package_reads_them() -> None:
    builder = pytest.importorskip("model_explorer.node_data_builder")
    for graph in overlays(changed(FULL)).values():
        results = {name: builder.NodeDataResult(**one) for name, one in graph["results"].items()}
        gradient = [builder.GradientItem(**one) for one in graph.get("gradient", [])]
        built = builder.GraphNodeData(results=results, name=graph["name"], gradient=gradient)
        assert json.loads(built.to_json_string())["results"] == graph["results"]


def test_its_adapter_has_a_node_for_every_name(residual: ModelProto, quantize_to: QuantizeTo, tmp_path: Path) -> None:
    adapter = pytest.importorskip("model_explorer_onnx.main").ONNXAdapter()
    report = quantize_to(residual, tmp_path / "q.onnx").report
    shown = {node.id for graph in adapter.convert(str(tmp_path / "q.onnx"), {})["graphs"] for node in graph.nodes}
    names = overlays(report)["mode"]["results"].keys()
    assert report.plan.by_node.keys() == names
    assert names <= shown


def test_overlays_that_cannot_be_written_are_told(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"^overlay .* cannot be written: "):
        save_overlays(FULL, tmp_path / "no" / "overlay.json")
