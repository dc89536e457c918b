"""Charts are files that stand alone."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from reports import FULL, REPORT, changed

from onnxq.config.scheme import Mode
from onnxq.errors import OutputError
from onnxq.report.exports import save_figures
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
