"""Pairs of 8-bit products on an emulated processor without VNNI: what a certificate says of them is so there.

Needs Debian's qemu-user-static or qemu-user; ``pytest -m slow`` runs it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from certificate.certified import certified_resnet, certified_text
from onnxq.calibration.provenance import instruction_set
from onnxq.certificate import onnxq_verify
from onnxq.certificate.certificate import read_certificate

QEMU = os.environ.get("ONNXQ_QEMU") or shutil.which("qemu-x86_64-static") or shutil.which("qemu-x86_64")
# An x86 processor with AVX2 and without VNNI.
PROCESSOR = "Haswell"
FLOAT = "(float[1,32,16,16] x) => (float[1,16,14,14] y) { y = Conv (x, w) }"
QUANTIZED = """(float[1,32,16,16] x) => (float[1,16,14,14] y) {
    q = QuantizeLinear (x, sx, zx) d = DequantizeLinear (q, sx, zx) f = DequantizeLinear (c, sw)
    v = Conv (d, f) o = QuantizeLinear (v, sy, zy) y = DequantizeLinear (o, sy, zy) }"""

pytestmark = [pytest.mark.slow, pytest.mark.skipif(QEMU is None, reason="there is no qemu-x86_64")]


def verdict_there(model: Path) -> int:
    command = (str(QEMU), "-cpu", PROCESSOR, sys.executable, onnxq_verify.__file__, str(model))
    return subprocess.run(command, capture_output=True, check=False).returncode


def test_a_model_whose_pairs_fit_is_right_there(tmp_path: Path) -> None:
    model = certified_resnet(tmp_path)
    certificate, _ = read_certificate(model)
    assert certificate is not None
    assert certificate.overflow.pairs == ()
    assert verdict_there(model) == 0


@pytest.mark.skipif("vnni" not in instruction_set(), reason="pairs saturate on this processor too")
def test_a_model_whose_pairs_saturate_is_wrong_there_and_was_said_to_be_at_risk(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    codes = generator.choice([-127, 120, 127], (16, 32, 3, 3)).astype(np.int8)
    weights = {"c": codes, "w": codes.astype(np.float32) * np.float32(0.01), "sw": np.float32(0.01)}
    scales = {"sx": np.float32(1 / 255), "zx": np.uint8(0), "sy": np.float32(2.0), "zy": np.uint8(128)}
    samples = [{"x": generator.random((1, 32, 16, 16)).astype(np.float32)} for _ in range(4)]
    made, model = certified_text(tmp_path, FLOAT, samples, quantized=QUANTIZED, **weights, **scales)
    assert made.overflow.pairs != ()
    assert not made.without_probes
    assert onnxq_verify.verify(model)["right"]
    assert verdict_there(model) == 3
