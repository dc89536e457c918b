"""Commands that look inside tell bad input in one sentence."""

from __future__ import annotations

import pytest

from hostile.command_line import Place, Run, refused


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("sensitivity", "MODEL", "--calib", "none"), "none"),
        (("sensitivity", "none.onnx", "--calib", "CALIB"), "none.onnx"),
        (("sensitivity", "BROKEN", "--calib", "CALIB"), "broken.onnx"),
        (("sensitivity", "MODEL", "--calib", "CALIB", "--preset", "int9"), "did you mean 'int8'"),
        (("sensitivity", "MODEL", "--calib", "CALIB", "-o", "MODEL"), "model.onnx"),
        (("sensitivity", "MODEL", "--calib", "CALIB", "--search", "off"), "measures nothing"),
        (("explain", "none.onnx", "first"), "none.onnx"),
        (("explain", "BROKEN", "first"), "broken.onnx"),
        (("explain", "MODEL", "frist"), "did you mean 'first'"),
        (("explain", "MODEL", "frist", "--calib", "CALIB"), "did you mean 'first'"),
        (("explain", "MODEL", "first", "--report", "none.json"), "none.json"),
        (("explain", "MODEL", "first", "--report", "BROKEN"), "broken.onnx"),
        (("explain", "MODEL", "first", "--calib", "none"), "none"),
        (("compare", "MODEL", "none.onnx", "--data", "CALIB", "--layers"), "none.onnx"),
        (("compare", "MODEL", "BROKEN", "--data", "CALIB", "--layers"), "broken.onnx"),
        (("compare", "MODEL", "MODEL", "--data", "none", "--layers"), "none"),
        (("compare", "MODEL", "MODEL", "--data", "CALIB", "--layers", "--report", "BROKEN"), "broken.onnx"),
    ],
)
def test_what_looks_inside_a_model_tells_bad_input_in_one_sentence(
    arguments: tuple[str, ...], told: str, place: Place, onnxq: Run
) -> None:
    broken = place.root / "broken.onnx"
    broken.write_bytes(b"\xff\x00 no model")
    before = place.files()
    names = {"MODEL": place.model, "CALIB": place.calib, "BROKEN": broken}
    assert told in refused(onnxq(*(names.get(one, one) for one in arguments)))
    assert place.files() == before
