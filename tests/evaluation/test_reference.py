"""A float model runs once on a sample, whoever asks, and again when its file has changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from onnxq.data.inputs import Sample, model_inputs
from onnxq.data.samples import open_samples
from onnxq.errors import DataError, ModelError
from onnxq.evaluation import comparison as views
from onnxq.evaluation import reference as reference_module
from onnxq.evaluation.comparison import ComparisonSpec
from onnxq.evaluation.reference import OutputsCache, ReferenceModel, ReferenceOutputs, SampleOutputs
from onnxq.runtime.sessions import open_session

SAMPLES = [{"x": np.full((1, 4), value, np.float32)} for value in range(3)]


@pytest.fixture
def model(build: Callable[..., ModelProto], tmp_path: Path) -> Path:
    path = tmp_path / "float.onnx"
    onnx.save(build("(float[1,4] x) => (float[1,3] y, float[1,3] z) { y = MatMul(x, w) z = Relu(y) }", w=(4, 3)), path)
    return path


def count_runs(monkeypatch: pytest.MonkeyPatch) -> list[Sample]:
    ran: list[Sample] = []
    given = ReferenceModel._given
    monkeypatch.setattr(ReferenceModel, "_given", lambda self, sample: ran.append(sample) or given(self, sample))
    return ran


def test_a_sample_runs_once_whoever_asks(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran, answers = count_runs(monkeypatch), OutputsCache()
    first, second = (ReferenceModel(model, ComparisonSpec.whole(model), answers) for _ in range(2))
    early = first.run(SAMPLES[1])
    found = [answer.outputs for answer in first.answer_each(SAMPLES)]
    again = [second.run(dict(sample)) for sample in reversed(SAMPLES)][::-1]
    assert len(ran) == len(SAMPLES)
    assert "_view" not in vars(second)
    assert found[1] is early
    for one, other in zip(found, again, strict=True):
        assert all(a is b for a, b in zip(one, other, strict=True))
    assert found[1][0] != pytest.approx(found[2][0])
    answer = second.answer(SAMPLES[0])
    assert answer.seconds == first.answer(SAMPLES[0]).seconds > 0
    assert answer.nbytes == 2 * 3 * 4
    # An answer lies in memory of its own.
    assert all(output.flags.owndata for output in answer.outputs)


def test_a_model_that_is_kept_open_shares_the_session_of_another(model: Path) -> None:
    first, second = (ReferenceModel(model, ComparisonSpec.whole(model), OutputsCache()) for _ in range(2))
    assert "_view" not in vars(first.keep_open())
    first.run(SAMPLES[0])
    view = vars(first)["_view"]
    assert vars(second.keep_open())["_view"] is view
    del first
    assert second.outputs(SAMPLES[1])["y"].shape == (1, 3)


def test_other_outputs_and_other_files_are_asked_for_anew(
    model: Path, build: Callable[..., ModelProto], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, answers = count_runs(monkeypatch), OutputsCache()
    whole = ReferenceModel(model, ComparisonSpec.whole(model), answers).run(SAMPLES[1])
    [turned] = ReferenceModel(model, ComparisonSpec(("z", "y")), answers).run(SAMPLES[1])[1:]
    assert len(ran) == 2
    np.testing.assert_array_equal(turned, whole[0])
    onnx.save(build("(float[1,4] x) => (float[1,4] y) { y = Neg(x) }"), model)
    [changed] = ReferenceModel(model, ComparisonSpec.whole(model), answers).run(SAMPLES[1])
    np.testing.assert_array_equal(changed, -SAMPLES[1]["x"])


def test_answers_that_were_longest_not_asked_for_go_first() -> None:
    answers, given = OutputsCache(held=2000), []

    def ask(key: str) -> None:
        answers.find(key, lambda: given.append(key) or SampleOutputs([np.zeros(200, np.float32)], 0.0))

    for key in "abacbab":
        ask(key)
    assert "".join(given) == "abcba"


def test_fewer_samples_run_at_once_where_a_run_takes_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    resident = iter([0, 1 << 26, 0, 1 << 30])
    monkeypatch.setattr(views, "resident_bytes", lambda: next(resident))
    monkeypatch.setattr(views, "available_cores", lambda: 8)
    memory = views.RunMemory()
    assert memory.most_at_once(Path("small")) == 0
    memory.learn(Path("small"), list)
    memory.learn(Path("large"), list)
    assert [memory.most_at_once(Path(name)) for name in ("small", "large")] == [2, 1]


def test_a_model_that_was_made_is_blamed_and_not_the_sample(
    model: Path, build: Callable[..., ModelProto], tmp_path: Path
) -> None:
    made = tmp_path / "made.onnx"
    text = (
        "(float[n,4] x) => (float[n,3] y, float[n,3] z)"
        " { t = Reshape(x, s) u = Reshape(t, s2) y = MatMul(u, w) z = Relu(y) }"
    )
    shapes = {"s": np.array([-1, 8], np.int64), "s2": np.array([-1, 4], np.int64)}
    onnx.save(build(text, w=(4, 3), **shapes), made)
    seen = ComparisonSpec.whole(model)
    assert seen.open(model).run(SAMPLES[0])
    with pytest.raises(ModelError, match=r"made.onnx cannot run the sample on .*; the float model runs it"):
        seen.open(made).run(SAMPLES[0])
    with pytest.raises(DataError, match=r"the sample cannot be run by onnxruntime"):
        seen.open(model).run({"x": np.zeros((2, 2, 2), np.float32)})


MODEL = Path(__file__).parents[2] / "models" / "resnet.onnx"
IMAGES = np.load(MODEL.parent / "data" / "calib.npz")["image"]
SAMPLES_ANSWERED = [{"image": image[None]} for image in IMAGES[:8]]


def test_samples_keep_their_answers_and_files_in_parts(tmp_path: Path) -> None:
    for file in range(8):
        np.savez(tmp_path / f"{file}.npz", image=IMAGES[2 * file : 2 * file + 2])
    samples = open_samples(tmp_path, model_inputs(onnx.load(MODEL)), batch=1)
    whole, session = ReferenceOutputs.of(MODEL, MODEL, samples), open_session(MODEL)
    for sample, (expected,) in zip(whole.samples, whole.expected, strict=True):
        assert np.allclose(session.run(None, sample)[0], expected, atol=1e-5)
    assert whole.seconds > 0
    assert whole.files == tuple(str(tmp_path / f"{place // 2}.npz") for place in range(16))
    part = whole.part((1, 3, 5))
    assert (part.samples, part.expected, part.files) == (
        whole.samples[1:6:2],
        whole.expected[1:6:2],
        tuple(whole.files[place] for place in (1, 3, 5)),
    )
    assert ReferenceOutputs.of(MODEL, MODEL, SAMPLES_ANSWERED[:2]).files == ()


def test_of_models_with_large_outputs_fewer_samples_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    # Ten classes in float32.
    monkeypatch.setattr(reference_module, "_HELD_BYTES", 4 * 40)
    found = ReferenceOutputs.of(MODEL, MODEL, SAMPLES_ANSWERED)
    assert len(found.samples) == len(found.expected) == 4
    assert np.array_equal(found.samples[-1]["image"], SAMPLES_ANSWERED[-1]["image"])
