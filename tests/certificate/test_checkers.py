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
from onnxq.certificate.checkers import write_checkers
from onnxq.certificate.recipes import packed
from onnxq.runtime.node import node_program

NODE = node_program()


def recipe(values: Any, shape: list[int], grain: list[int], rows: int = 1, stride: int = 1) -> dict[str, Any]:
    tables = [packed(one) for one in values]
    kind = values[0].dtype.name
    return {"type": kind, "shape": shape, "grain": grain, "tables": tables, "rows": rows, "stride": stride}


FLOATS = np.array([-3.5, 0, 1e-8, 2e30], np.float32)
RECIPES = [
    recipe([FLOATS, FLOATS * 2], [1, 3, 9, 7], [1, 1, 4, 2]),
    recipe([np.array([0, 5, -9, 100], np.float32)], [3, 2], [1, 1], rows=2),
    recipe([np.arange(6.0)], [2, 3, 5], [1, 1, 2], rows=3, stride=5),
    recipe([np.array([1.5, 2])], [], []),
    recipe([np.array([0, 101, -7, 2**52])], [2, 40], [1, 8]),
    recipe([np.array([0, 255], np.uint8)], [33], [2]),
    recipe([np.array([0, 1], bool)], [33], [1]),
    recipe([np.array([0, 1, -0.3, np.inf], np.float16)], [20], [1]),
    recipe([np.array([0, 2**63], np.uint64)], [0, 4], [1, 1]),
]
OUTPUTS = [np.array([1.5, -2, 1e35]), np.arange(-20, 20), np.array([True, False, True]), np.array([2**63], np.uint64)]
SCRIPT = """
import { makeInput, sketch } from "./onnxq-verify.mjs";
const [cases, outputs] = JSON.parse(process.argv[1]);
const found = cases.map(([recipe, seed, stream]) => {
  const values = makeInput(recipe, seed, stream);
  return [Array.from(new Uint8Array(values.buffer)), sketch({ type: recipe.type, data: values }, 16, seed)];
});
const arrays = { float64: Float64Array, int64: BigInt64Array, bool: Uint8Array, uint64: BigUint64Array, string: Array };
const sketches = outputs.map(([type, values]) => {
  const big = type.endsWith("int64");
  return sketch({ type, data: arrays[type].from(values, (one) => (big ? BigInt(one) : one)) }, 8, 1);
});
console.log(JSON.stringify([found, sketches]));
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
    found = onnxq_verify.make_input(RECIPES[0], 3, 0)
    assert found.shape == (1, 3, 9, 7)
    assert [round(float(one), 9) for one in found.reshape(-1)[2:6]] == [0, 0, 2e-8, 2e-8]
    sums, finite = onnxq_verify.sketch(found, 8, 3)
    assert finite == np.count_nonzero(found < 1e30) == 158
    assert [round(float(one), 6) for one in sums[:3]] == [-14, 0, 7]


@pytest.mark.skipif(NODE is None, reason="there is no Node")
def test_javascript_makes_the_same_bits(folder: Path) -> None:
    cases = [[one, seed, stream] for one in RECIPES for seed, stream in ((0, 0), (5, 2), (7, 1))]
    texts = [
        [one.dtype.name, [str(value) if one.dtype.kind in "iu" else float(value) for value in one]] for one in OUTPUTS
    ]
    given = json.dumps([cases, [*texts, ["string", ["red", "grün"]]]])
    result = run(NODE, "--input-type=module", "-e", SCRIPT, given, folder=folder)
    assert result.stderr == ""
    made, sketches = json.loads(result.stdout)
    for case, (found, there) in zip(cases, made, strict=True):
        values = onnxq_verify.make_input(*case)
        assert bytes(found) == values.tobytes()
        assert is_same(onnxq_verify.sketch(values, 16, case[1]), there)
    for value, there in zip((*OUTPUTS, np.array(["red", "grün"], object)), sketches, strict=True):
        assert is_same(onnxq_verify.sketch(value, 8, 1), there)


def is_same(here: tuple[Any, int], there: tuple[list[float], int]) -> bool:
    return here[1] == there[1] and np.allclose(here[0], there[0], rtol=1e-12)


@pytest.mark.skipif(NODE is None, reason="there is no Node")
@pytest.mark.parametrize("zero_point", [128, 100])
def test_both_judge_quantized_values_as_floats(folder: Path, zero_point: int) -> None:
    values = onnxq_verify.make_input(RECIPES[5], 2, 0)
    sums, finite = onnxq_verify.sketch((values.astype(np.float64) - 128) / 2, 4, 2)
    certificate = {
        "inputs": [{**RECIPES[5], "name": "x"}],
        "seeds": [2],
        "quantized": {"y": [0.5, zero_point]},
        "fingerprints": [
            {
                "name": "y",
                "scale": 0.5,
                **dict.fromkeys(("floats", "quantized"), packed(np.rint(sums / 0.5).astype("<i2"))),
                "finite": [finite],
                "tolerances": [30.0],
                "spare": 0,
            }
        ],
    }
    wanted = onnxq_verify.judge(certificate, lambda sample: {"y": sample["x"]})
    assert wanted["wrong"] == ({} if zero_point == 128 else {"y": 1})
    # Certificates of models with float outputs may say nothing of quantized ones.
    del certificate["quantized"]
    assert onnxq_verify.judge(certificate, lambda sample: {"y": (sample["x"].astype(np.float64) - 128) / 2})["right"]
    certificate["quantized"] = {"y": [0.5, zero_point]}
    script = """
import { judge } from "./onnxq-verify.mjs";
const ort = { Tensor: class { constructor(type, data) { Object.assign(this, { type, data }); } } };
const found = await judge(ort, JSON.parse(process.argv[1]), async ({ x }) => ({ y: x }));
console.log(JSON.stringify([found.wrong, String(found.sqnr)]));
"""
    result = run(NODE, "--input-type=module", "-e", script, json.dumps(certificate), folder=folder)
    wrong, sqnr = json.loads(result.stdout)
    assert wrong == wanted["wrong"]
    assert math.isclose(float(sqnr), wanted["sqnr"], abs_tol=1e-9)


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
    assert list(found) == list(json.loads(onnxq_verify.to_json(wanted)))
    result = run(NODE, folder / "onnxq-verify.mjs", folder / "changed.onnx", package, folder=Path(PLACE))
    assert result.returncode == 3


@pytest.mark.skipif(NODE is None, reason="there is no Node")
def test_both_checkers_print_the_same_json(folder: Path, tmp_path: Path) -> None:
    package = tmp_path / "node_modules" / "runtime"
    package.mkdir(parents=True)
    (package / "index.js").write_text("", encoding="utf-8")
    script = run(NODE, folder / "onnxq-verify.mjs", folder / "changed.onnx", "runtime", folder=tmp_path)
    python = run(sys.executable, "onnxq_verify.py", "changed.onnx", folder=folder)
    assert script.stdout == python.stdout == '{"right":false,"reason":"the file was changed after it was certified"}\n'


def test_results_are_json_of_numbers_and_booleans() -> None:
    result = {"right": True, "wrong": {}, "sqnr": math.inf, "outputs": {"y": (31.5, 2.0)}, "reason": ""}
    text = onnxq_verify.to_json(result)
    assert json.loads(text) == {**result, "sqnr": "inf", "outputs": {"y": [31.5, 2.0]}}


@pytest.mark.parametrize("checker", ["onnxq_verify.py", "onnxq-verify.mjs"])
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "name a model: "),
        (("none.onnx",), "none.onnx"),
        ((".",), "."),
        (("resnet.onnx", "none-js"), "run npm install none-js"),
    ],
)
def test_what_a_checker_lacks_is_one_sentence(
    checker: str, arguments: tuple[str, ...], sentence: str, folder: Path
) -> None:
    program = sys.executable if checker.endswith(".py") else NODE
    if program is None or (len(arguments) > 1 and program == sys.executable):
        pytest.skip("there is no Node, or this checker takes no package")
    result = run(program, checker, *arguments, folder=folder)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"{checker}: ")
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1


def test_no_certificate_of_this_version(folder: Path, tmp_path: Path) -> None:
    bare = onnx.load(folder / "resnet.onnx")
    del bare.metadata_props[:]
    onnx.save(bare, tmp_path / "bare.onnx")
    assert (
        onnxq_verify.verify(tmp_path / "bare.onnx")["reason"] == "the model has no certificate that this checker reads"
    )


def test_missing_weights_are_a_change(tmp_path: Path) -> None:
    (tmp_path / "w.data").write_bytes(b"other")
    assert onnxq_verify.changed_data({"data": {"w.data": "0", "x.data": "0"}}, tmp_path) == ["w.data", "x.data"]
