"""The checkers without onnxq: the same inputs and sketches in Python and JavaScript, and the same verdicts."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from node_packages import PLACE

from certificate.certified import certified_resnet
from onnxq.certificate import onnxq_verify
from onnxq.certificate.badge import write_checkers
from onnxq.runtime.node import node_program

NODE = node_program()
RECIPES: list[tuple[dict[str, Any], list[int]]] = [
    (
        {"type": "float32", "grain": [1, 1, 4, 2], "axis": 0, "tables": [[-30000, 0, 7, 32767]], "exponents": [-20]},
        [1, 3, 9, 7],
    ),
    ({"type": "float32", "grain": [1, 1], "axis": 1, "tables": [[0, 5], [-9, 100]], "exponents": [-3, 2]}, [3, 2]),
    ({"type": "float64", "grain": [], "axis": 0, "tables": [[1, 2]], "exponents": [4]}, []),
    ({"type": "int64", "grain": [1, 8], "axis": 0, "tables": [[0, 101, -7, 2**52]], "exponents": [0]}, [2, 40]),
    ({"type": "uint8", "grain": [2], "axis": 0, "tables": [[0, 255]], "exponents": [0]}, [33]),
    ({"type": "float16", "grain": [1], "axis": 0, "tables": [[0, 15360, 48128]], "exponents": [0]}, [20]),
]
SCRIPT = """
import { makeInput, sketch } from "./onnxq-verify.mjs";
const cases = JSON.parse(process.argv[1]);
const found = cases.map(([recipe, shape, seed, stream, scale]) => {
  const values = makeInput(recipe, shape, seed, stream, scale);
  const bytes = Array.from(new Uint8Array(values.buffer));
  return [bytes, Array.from(sketch(Float64Array.from(values, Number), 16, seed)[0])];
});
console.log(JSON.stringify(found));
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkers")
    write_checkers(folder)
    certified_resnet(folder)
    changed = onnx.load(folder / "resnet.onnx")
    changed.graph.doc_string = "changed"
    onnx.save(changed, folder / "changed.onnx")
    return folder


def run(*command: object, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(one) for one in command], cwd=folder, capture_output=True, text=True, check=False)


def test_inputs_are_those_of_earlier_versions() -> None:
    recipe, shape = RECIPES[0]
    found = onnxq_verify.make_input(recipe, shape, 3, 0)
    assert [float(one) for one in found.reshape(-1)[:4]] == [
        9.34600830078125e-05,
        9.34600830078125e-05,
        -5.092620849609375,
        -5.092620849609375,
    ]
    sums, lost = onnxq_verify.sketch(found, 8, 3)
    assert [round(float(one), 6) for one in sums[:3]] == [-9.033338, -25.125295, 6.600793]
    assert lost == 0


@pytest.mark.skipif(NODE is None, reason="there is no Node")
def test_javascript_makes_the_same_bits(folder: Path) -> None:
    cases = [
        [*one, seed, stream, scale] for one in RECIPES for seed, stream, scale in ((0, 0, 1), (5, 2, 4), (2**31, 1, 2))
    ]
    result = run(NODE, "--input-type=module", "-e", SCRIPT, json.dumps(cases), folder=folder)
    assert result.stderr == ""
    for case, (found, sums) in zip(cases, json.loads(result.stdout), strict=True):
        values = onnxq_verify.make_input(*case)
        bits = values.view(np.uint16) if values.dtype == np.float16 else values
        assert bytes(found) == bits.tobytes()
        wanted = onnxq_verify.sketch(bits.astype(np.float64), 16, case[2])[0]
        assert np.allclose(wanted, sums, rtol=1e-12)


def test_the_python_checker_needs_nothing_of_onnxq(folder: Path) -> None:
    blocked = "import sys; sys.modules['onnxq'] = sys.modules['onnx'] = None"
    code = f"{blocked}; import onnxq_verify as checker; print(checker.verify('resnet.onnx')['right'])"
    assert run(sys.executable, "-c", code, folder=folder).stdout == "True\n"
    assert run(sys.executable, "onnxq_verify.py", "resnet.onnx", folder=folder).returncode == 0
    found = run(sys.executable, "onnxq_verify.py", "changed.onnx", folder=folder)
    assert found.returncode == 3
    assert "was changed after it was certified" in found.stdout


@pytest.mark.skipif(NODE is None, reason="there is no Node")
@pytest.mark.parametrize("package", ["onnxruntime-node", "onnxruntime-web"])
def test_the_javascript_checker_gives_the_same_verdict(folder: Path, package: str) -> None:
    if not Path(PLACE, "node_modules", package).exists():
        pytest.skip(f"{package} is not installed")
    result = run(NODE, folder / "onnxq-verify.mjs", folder / "resnet.onnx", package, folder=Path(PLACE))
    found, wanted = json.loads(result.stdout), onnxq_verify.verify(folder / "resnet.onnx")
    assert result.returncode == 0
    assert found["right"] == wanted["right"]
    assert math.isclose(found["sqnr"], wanted["sqnr"], abs_tol=0.5)
    result = run(NODE, folder / "onnxq-verify.mjs", folder / "changed.onnx", package, folder=Path(PLACE))
    assert result.returncode == 3


def test_no_certificate_of_this_version(folder: Path, tmp_path: Path) -> None:
    bare = onnx.load(folder / "resnet.onnx")
    del bare.metadata_props[:]
    onnx.save(bare, tmp_path / "bare.onnx")
    assert onnxq_verify.verify(tmp_path / "bare.onnx")["reason"] == "there is no certificate of this version"


def test_missing_weights_are_a_change(tmp_path: Path) -> None:
    (tmp_path / "w.data").write_bytes(b"other")
    assert onnxq_verify.changed_data({"data": {"w.data": "0", "x.data": "0"}}, tmp_path) == ["w.data", "x.data"]
