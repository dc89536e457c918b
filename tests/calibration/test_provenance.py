"""Digests of what times depend on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from model_texts import Stored, model, values

from onnxq.calibration.provenance import structure_digest

TEXT = "(float[N,4] x) => (float[M,K] y) { h = MatMul(x, w) y = Reshape( h , s) }"
STORED = {"w": values(4, 64), "s": np.int64([-1, 32])}
RESIZE = "(float[1,1,4,4] x) => (float[1,1,M,K] y) { y = Resize(x, , r) }"
BRANCHES = """(bool b, float[4] x) => (float[4] y) { y = If (b) <
    then_branch = yes () => (float[4] t) { t = Add(x, a) }, else_branch = no () => (float[4] f) { f = Pow(x, c) }
> }"""


def digest(folder: Path, text: str = TEXT, *, opset: int = 17, external: bool = False, **stored: Stored) -> str:
    path = folder / "model.onnx"
    path.unlink(missing_ok=True)
    # Weights of 1 KiB and more go into the file beside it.
    onnx.save(model(text, opset=opset, **(stored or STORED)), path, save_as_external_data=external)
    return structure_digest(path)


@pytest.mark.parametrize(
    ("text", "stored", "other", "same"),
    [
        (TEXT, STORED, STORED | {"w": values(4, 64, seed=1)}, True),
        (TEXT, STORED, STORED | {"w": values(4, 128)}, False),
        (TEXT, STORED, STORED | {"w": values(4, 64, dtype=np.float16)}, False),
        (TEXT, STORED, STORED | {"s": np.int64([-1, 16])}, False),
        (RESIZE, {"r": np.float32([1, 1, 2, 2])}, {"r": np.float32([1, 1, 4, 4])}, False),
        (BRANCHES, {"a": np.float32(1), "c": np.float32(2)}, {"a": np.float32(3), "c": np.float32(2)}, True),
        (BRANCHES, {"a": np.float32(1), "c": np.float32(2)}, {"a": np.float32(1), "c": np.float32(3)}, False),
    ],
)
def test_values_count_where_they_decide_sizes(
    text: str, stored: dict[str, Stored], other: dict[str, Stored], same: bool, tmp_path: Path
) -> None:
    assert (digest(tmp_path, text, **stored) == digest(tmp_path, text, **other)) is same


@pytest.mark.parametrize(
    ("old", "new"), [("", ""), (" h ", " k "), ("MatMul", "Gemm"), ("Reshape", "Reshape <allowzero = 1>")]
)
def test_nodes_names_and_the_opset_count(old: str, new: str, tmp_path: Path) -> None:
    text = TEXT.replace(old, new) if old else TEXT
    assert digest(tmp_path, text, opset=17 if old else 18) != digest(tmp_path)


def test_nodes_may_share_equal_weights(tmp_path: Path) -> None:
    apart = "(float[N,64] x) => (float[N,64] y) { h = Add(x, a) y = Add(h, b) }"
    two, one = {"a": np.float32(1), "b": np.float32(2)}, {"a": np.float32(1)}
    assert digest(tmp_path, apart, **two) == digest(tmp_path, apart.replace("b)", "a)"), **one)


def test_weights_in_a_file_beside_the_model_count_alike_wherever_it_lies(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    first, second = (
        digest(folder, external=True, w=values(4, 64, seed=seed), s=STORED["s"]) for seed, folder in enumerate(folders)
    )
    assert first == second
