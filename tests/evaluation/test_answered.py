from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxq.data.inputs import model_inputs
from onnxq.data.samples import open_samples
from onnxq.evaluation import reference as reference_module
from onnxq.evaluation.reference import ReferenceOutputs
from onnxq.runtime.sessions import open_session

MODEL = Path(__file__).parents[2] / "models" / "resnet.onnx"
IMAGES = np.load(MODEL.parent / "data" / "calib.npz")["image"]
SAMPLES = [{"image": image[None]} for image in IMAGES[:8]]


def test_samples_keep_their_answers_and_numbers_in_parts_and_with_more() -> None:
    whole = ReferenceOutputs.of(MODEL, MODEL, SAMPLES[:6])
    session = open_session(MODEL)
    for sample, (expected,) in zip(SAMPLES, whole.expected, strict=False):
        assert np.allclose(session.run(None, sample)[0], expected, atol=1e-5)
    assert whole.seconds > 0
    part = whole.part((1, 3, 5))
    assert part.samples == whole.samples[1::2]
    assert part.numbers == whole.numbers[1::2]
    joined = whole.joined(SAMPLES[6:])
    assert joined.samples == tuple(SAMPLES)
    assert joined.expected[:6] == whole.expected
    assert len(joined.expected) == len(SAMPLES)
    assert len(set(joined.numbers)) == len(SAMPLES)


def test_samples_keep_the_files_that_they_share(tmp_path: Path) -> None:
    for file in range(8):
        np.savez(tmp_path / f"{file}.npz", image=IMAGES[2 * file : 2 * file + 2])
    samples = open_samples(tmp_path, model_inputs(onnx.load(MODEL)), batch=1)
    whole = ReferenceOutputs.of(MODEL, MODEL, samples)
    assert whole.files == tuple(str(tmp_path / f"{place // 2}.npz") for place in range(16))
    assert whole.part((0, 1, 5)).files == (*whole.files[:2], whole.files[5])
    alone = ReferenceOutputs.of(MODEL, MODEL, SAMPLES[:2])
    assert alone.files == ()
    assert whole.joined(SAMPLES[:2]).files == (*whole.files, "", "")
    assert alone.joined(samples).files == ("", "", *whole.files)


def test_of_models_with_large_outputs_fewer_samples_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    # Ten classes in float32.
    monkeypatch.setattr(reference_module, "_HELD_BYTES", 4 * 40)
    found = ReferenceOutputs.of(MODEL, MODEL, SAMPLES)
    assert len(found.samples) == len(found.expected) == len(found.numbers) == 4
    assert np.array_equal(found.samples[-1]["image"], SAMPLES[-1]["image"])
