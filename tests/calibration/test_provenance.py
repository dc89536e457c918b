"""Digests of what times depend on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from model_texts import Stored, model, values

from onnxq.calibration.provenance import structure_digest

TEXT = "(float[N,4] x) => (float[M,K] y) { h = MatMul(x, w) y = Reshape(h, s) }"


def digest(folder: Path, text: str = TEXT, *, external: bool = False, **stored: Stored) -> str:
    path = folder / "model.onnx"
    path.unlink(missing_ok=True)
    # Weights of 1 KiB and more go into the file beside it.
    onnx.save(
        model(text, **{"w": values(4, 64), "s": np.int64([-1, 32]), **stored}), path, save_as_external_data=external
    )
    return structure_digest(path)


@pytest.mark.parametrize(
    ("text", "stored", "same"),
    [
        (TEXT, {}, True),
        (TEXT, {"w": values(4, 64, seed=1)}, True),
        (TEXT, {"w": values(4, 128)}, False),
        (TEXT, {"w": values(4, 64, dtype=np.float16)}, False),
        (TEXT, {"s": np.int64([-1, 16])}, False),
        (TEXT.replace("h", "k"), {}, False),
        (TEXT.replace("Reshape", "Reshape <allowzero = 1>"), {}, False),
    ],
)
def test_models_of_one_structure_differ_in_the_values_of_weights_alone(
    text: str, stored: dict[str, Stored], same: bool, tmp_path: Path
) -> None:
    assert (digest(tmp_path, text, **stored) == digest(tmp_path)) is same


def test_models_of_one_structure_may_share_equal_weights(tmp_path: Path) -> None:
    apart = "(float[N,64] x) => (float[N,64] y) { h = Add(x, a) y = Add(h, b) }"
    scalars = {"a": np.float32(1), "b": np.float32(2)}
    assert digest(tmp_path, apart, **scalars) == digest(tmp_path, apart.replace("b)", "a)"), a=np.float32(1))


def test_weights_in_a_file_beside_the_model_count_alike_wherever_it_lies(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    first, second = (digest(folder, external=True, w=values(4, 64, seed=seed)) for seed, folder in enumerate(folders))
    assert first == second
