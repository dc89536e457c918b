"""Verifying a certified model: right as it is, and wrong after each fault that the file or an engine may have."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from cli.commands import invoke
from evaluation.wrong_engine import Faulty
from model_texts import model as model_of
from onnx import numpy_helper

from certificate.certified import CALIB, MODELS, PLAIN, certified_resnet
from onnxq import Data, certify, dequantize, quantize
from onnxq.certificate.certificate import read_certificate, write_certificate
from onnxq.certificate.onnxq_verify import KEY
from onnxq.certificate.verifying import verify
from onnxq.errors import ModelError
from onnxq.report.page import to_html
from onnxq.runtime.engine import Engine, OnnxRuntime


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certified_resnet(tmp_path_factory.mktemp("certified"))


@pytest.fixture
def own(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(model, tmp_path / "own.onnx"))


def edited(path: Path, edit: Callable[[onnx.ModelProto], None], *, forged: bool = False) -> Path:
    """Edit a model in its file; a forged one has a certificate with the digest of the edited file."""
    proto = onnx.load(path)
    edit(proto)
    onnx.save(proto, path)
    if forged:
        certificate, _ = read_certificate(path)
        assert certificate is not None
        write_certificate(certificate, path)
    return path


def change_weight(proto: onnx.ModelProto) -> None:
    largest = max(proto.graph.initializer, key=lambda one: len(one.raw_data))
    values = numpy_helper.to_array(largest).copy()
    values.reshape(-1)[::2] = -values.reshape(-1)[::2]
    largest.CopyFrom(numpy_helper.from_array(values, largest.name))


def change_node(proto: onnx.ModelProto) -> None:
    next(node for node in proto.graph.node if node.op_type == "Relu").op_type = "Neg"


def old_outputs() -> Engine:
    kept: list[list[Any]] = []

    def fault(outputs: list[Any]) -> list[Any]:
        kept.append(outputs)
        return kept[max(len(kept) - 2, 0)]

    return Faulty(fault)


def rename(proto: onnx.ModelProto) -> None:
    proto.graph.output[0].name = "renamed"
    proto.graph.node[-1].output[0] = "renamed"


def strip(proto: onnx.ModelProto) -> None:
    del proto.metadata_props[:]


@pytest.mark.parametrize(
    ("edit", "forged", "sentence"),
    [
        (lambda proto: None, False, "Right here: .* dB beside the certificate's"),
        (lambda proto: proto.metadata_props.add(key="author", value="somebody"), False, "Right here: "),
        *(
            (edit, forged, sentence)
            for edit in (change_weight, change_node)
            for forged, sentence in (
                (False, "Wrong here: the file was changed after it was certified$"),
                # A forged digest hides no wrong output.
                (True, "Wrong here: output logits has .*first at node"),
            )
        ),
        (rename, True, "Wrong here: the certificate's output logits does not exist"),
        (strip, False, "Not checked: the model has no certificate; "),
    ],
)
def test_a_file_is_right_as_it_was_written_and_wrong_after_a_change(
    edit: Callable[[onnx.ModelProto], None], forged: bool, sentence: str, own: Path
) -> None:
    found = verify(edited(own, edit, forged=forged), reference=MODELS / "resnet.onnx" if forged else None)
    assert re.match(sentence, found.sentences[0])
    assert found.right == sentence.startswith("Right")
    assert invoke("verify", own).exit_code == (0 if found.right else 3)


@pytest.mark.parametrize("value", ["{", "[]", '{"version":1}', '{"version":99}'])
def test_a_damaged_certificate_is_an_error(own: Path, value: str) -> None:
    def damage(proto: onnx.ModelProto) -> None:
        next(one for one in proto.metadata_props if one.key == KEY).value = value

    with pytest.raises(ModelError, match="certificate"):
        verify(edited(own, damage))


def test_what_is_no_model_is_an_error(model: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no model at all")
    for path, reference, sentence in (
        (tmp_path / "text", None, "not an ONNX model"),
        (tmp_path / "missing", None, "cannot be read"),
        (model, MODELS / "gru.onnx", "is not the float model of the certificate"),
    ):
        with pytest.raises(ModelError, match=sentence):
            verify(path, reference=reference)


@pytest.mark.parametrize(
    "engine",
    [
        old_outputs(),
        Faulty(lambda outputs: [np.clip(one, -1, 1) for one in outputs]),
        Faulty(lambda outputs: [np.full_like(one, np.nan) for one in outputs]),
        Faulty(lambda outputs: [one[..., ::-1] for one in outputs]),
        Faulty(lambda outputs: [one[..., :-1] for one in outputs]),
    ],
    ids=["old outputs", "saturates", "NaN", "other order", "other shape"],
)
def test_a_wrong_engine_is_found(model: Path, engine: Engine) -> None:
    found = verify(model, engines=[engine])
    assert not found.right
    assert "output logits has" in found.sentences[0]


def test_a_mistake_in_the_code_of_an_engine_is_its_verdict(model: Path) -> None:
    found = verify(model, engines=[Faulty(lambda outputs: [outputs["logits"]])])  # type: ignore[call-overload]
    assert not found.right
    assert "engine 'faulty' failed: TypeError: " in found.sentences[0]


def test_an_engine_with_other_rounding_is_right(model: Path) -> None:
    generator = np.random.default_rng(0)

    def round_otherwise(outputs: list[Any]) -> list[Any]:
        return [one + generator.standard_normal(one.shape) * 0.01 * np.std(one) for one in outputs]

    assert verify(model, engines=[Faulty(round_otherwise)]).right


def test_openvino_finds_the_model_right(model: Path) -> None:
    pytest.importorskip("openvino")
    assert verify(model, engines=["onnxruntime", "openvino"]).right


def test_dequantizing_and_a_request_leave_the_certificate_out(model: Path, tmp_path: Path) -> None:
    dequantize(model, tmp_path / "back.onnx")
    assert KEY not in {one.key for one in onnx.load(tmp_path / "back.onnx").metadata_props}
    found = quantize(
        MODELS / "gru.onnx", Data(CALIB, limit=8), tmp_path / "q.onnx", budget=replace(PLAIN, certificate=False)
    )
    assert found.report.certificate is None
    assert read_certificate(tmp_path / "q.onnx")[0] is None


def test_the_commands_certify_verify_and_write_checkers(own: Path, tmp_path: Path) -> None:
    data = ("--data", CALIB, "--limit", 8)
    result = invoke("certify", MODELS / "resnet.onnx", own, *data, "-o", tmp_path / "c.onnx")
    assert result.stdout == f"{tmp_path / 'c.onnx'}\n"
    shown = json.loads(invoke("verify", tmp_path / "c.onnx", "--json").stdout)
    assert shown["right"]
    assert shown["certificate"]["probes"] == 4
    written = invoke("verify", "--write-checker", tmp_path / "vendor").stdout.split()
    assert [Path(one).name for one in written] == ["onnxq_verify.py", "onnxq-verify.mjs"]
    assert "give a MODEL" in invoke("verify").output


def test_a_model_of_another_tool_is_certified_in_place(own: Path) -> None:
    edited(own, lambda proto: proto.ClearField("metadata_props"))
    made = certify(MODELS / "resnet.onnx", own, Data(CALIB, limit=8))
    assert made.plan == ""
    assert verify(own).right


def test_the_page_of_a_report_shows_the_certificate(tmp_path: Path) -> None:
    found = quantize(MODELS / "gru.onnx", Data(CALIB, limit=8), budget=PLAIN)
    page = to_html(found.report)
    assert "Is it right where it runs?" in page
    assert "No pair of products can saturate" in page


def test_a_model_without_a_certificate_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnx.save(model_of("(float[4] x) => (float[4] y) { y = Relu (x) }"), tmp_path / "model.onnx")
    monkeypatch.setattr(OnnxRuntime, "load", lambda *_: pytest.fail("it is loaded"))
    assert "has no certificate" in verify(tmp_path / "model.onnx").fault
