"""Sources by name with their options: audio and texts."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from onnxq.data.inputs import Input
from onnxq.data.samples import open_samples
from onnxq.data.sources import SOURCES, Audio, Source, find_source, has_suffix, library, source_for
from onnxq.data.stores import StorePath
from onnxq.errors import DataError, OnnxqError


def test_files_are_told_by_their_names_wherever_they_lie() -> None:
    assert [has_suffix(one, ".wav") for one in (Path("a.WAV"), StorePath("s3://b/a.wav"), "a.wav")] == [
        True,
        True,
        False,
    ]


def test_a_library_that_is_not_there_is_told_with_what_installs_it() -> None:
    with pytest.raises(
        DataError, match=r"a.x needs no_such, expected it to be installed; run pip install 'onnxq\[x\]'"
    ):
        library("no_such.part", "onnxq[x]", "a.x")


class Lines:
    """A package's: each line of a ``.lines`` file is two numbers."""

    def takes(self, given: object) -> bool:
        return isinstance(given, Path) and given.suffix == ".lines"

    def rows(self, given: Path, inputs: object, images: object) -> list[np.ndarray]:  # type: ignore[type-arg]
        return [np.array(line.split(), np.float32) for line in given.read_text().splitlines()]


def test_each_of_ours_is_made_from_its_name() -> None:
    for name, made in SOURCES.items():
        source = find_source(name)
        assert isinstance(source, made)
        assert isinstance(source, Source)
    assert find_source("audio:rate=8000:seconds=0.5") == Audio(8000, 0.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("adio", r"source 'adio' is not one of audio, .*did you mean 'audio'"),
        (
            "audio:rat=8",
            r"source 'audio' has no option 'rat=8', expected rate=VALUE, seconds=VALUE.*did you mean 'rate'",
        ),
        ("audio:rate=x", r"option 'rate' of source 'audio' is 'x', expected int"),
        ("data-reader:x=1", r"source 'data-reader' has no option 'x=1', expected none"),
    ],
)
def test_what_is_not_there_is_told(text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        find_source(text)


def test_a_package_adds_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("lines", f"{__name__}:Lines", "onnxq.sources")
    monkeypatch.setattr(
        "onnxq.system.plugins.entry_points", lambda **wanted: [entry] * (wanted["group"] == entry.group)
    )
    (tmp_path / "a.lines").write_text("0 1\n2 3\n")
    samples = open_samples(tmp_path, [Input("x", np.dtype(np.float32), ("N", 2))])
    assert [sample["x"].tolist() for sample in samples] == [[[0, 1]], [[2, 3]]]
    monkeypatch.undo()
    assert source_for(tmp_path / "a.lines") is None


@pytest.mark.parametrize(
    ("method", "given", "message"),
    [
        ("rows", lambda *given: 1 / 0, r"a\.lines: source Lines failed: ZeroDivisionError"),
        ("rows", lambda *given: (1 / 0 for _ in range(3)), r"a\.lines: source Lines failed: ZeroDivisionError"),
        ("rows", lambda *given: None, r"a\.lines: source Lines failed: TypeError: 'NoneType'"),
        ("takes", lambda *given: 1 / 0, "source Lines failed: ZeroDivisionError"),
        ("rows", lambda *given: [np.zeros(5)], r"a\.lines, sample 0: 'x' has shape \[1, 5\]"),
        ("__init__", lambda *given: 1 / 0, "source 'lines' failed: ZeroDivisionError"),
        ("__new__", lambda *given: None, "source 'lines' failed: TypeError: it is None, which has no takes and rows"),
    ],
)
def test_a_source_of_a_package_that_fails_is_told(
    method: str, given: Callable[..., Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = EntryPoint("lines", f"{__name__}:Lines", "onnxq.sources")
    monkeypatch.setattr(
        "onnxq.system.plugins.entry_points", lambda **wanted: [entry] * (wanted["group"] == entry.group)
    )
    monkeypatch.setattr(Lines, method, given)
    (tmp_path / "a.lines").write_text("0 1\n2 3\n")
    with pytest.raises(OnnxqError, match=message):
        open_samples(tmp_path, [Input("x", np.dtype(np.float32), ("N", 2))], source="lines")


def test_a_source_that_fails_when_it_is_asked_for_any_samples_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = EntryPoint("lines", f"{__name__}:Lines", "onnxq.sources")
    monkeypatch.setattr(
        "onnxq.system.plugins.entry_points", lambda **wanted: [entry] * (wanted["group"] == entry.group)
    )
    monkeypatch.setattr(Lines, "takes", lambda *given: 1 / 0)
    with pytest.raises(DataError, match=r"source Lines failed: ZeroDivisionError: .*; correct it, or do without it"):
        source_for(tmp_path / "a.npz")


SIGNAL = Input("x", np.dtype(np.float32), ("N", 400))
RATE = Input("sr", np.dtype(np.int64), ())


def tone(path: Path, rate: int = 16_000, seconds: float = 0.1, channels: int = 1) -> Path:
    """Write a tone of 440 Hz, silent in every channel but the first."""
    times = np.arange(round(rate * seconds)) / rate
    wave = np.zeros((len(times), channels), np.float32)
    wave[:, 0] = 0.5 * np.sin(2 * np.pi * 440 * times)
    soundfile.write(path, wave, rate)
    return path


@pytest.mark.parametrize("suffix", [".wav", ".flac", ".ogg"])
def test_a_file_is_cut_into_windows_of_the_models_length(suffix: str, tmp_path: Path) -> None:
    samples = open_samples(tone(tmp_path / f"a{suffix}"), (SIGNAL, RATE))
    assert [(sample["x"].shape, int(sample["sr"])) for sample in samples] == [((1, 400), 16_000)] * 4
    assert max(float(np.abs(sample["x"]).max()) for sample in samples) == pytest.approx(0.5, abs=0.05)


def test_other_rates_are_resampled_and_channels_averaged(tmp_path: Path) -> None:
    (whole,) = open_samples(tone(tmp_path / "a.wav", 48_000, channels=2), [Input("x", SIGNAL.dtype, (1, None))])
    times = np.arange(1600) / 16_000
    expected = 0.25 * np.sin(2 * np.pi * 440 * times)
    assert whole["x"].shape == (1, 1600)
    assert np.abs(whole["x"][0, 200:-200] - expected[200:-200]).max() < 0.01


def test_a_short_file_is_filled_with_silence_and_options_say_the_window(tmp_path: Path) -> None:
    tone(tmp_path / "a.wav", seconds=0.01)
    (short,) = open_samples(tmp_path, [SIGNAL])
    assert not short["x"][0, 160:].any()
    free = Input("x", SIGNAL.dtype, (1, 1, None))
    found = open_samples(tmp_path, [free], source="audio:rate=8000:seconds=0.005")
    assert [sample["x"].shape for sample in found] == [(1, 1, 40)] * 2


def test_what_is_no_audio_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(b"RIFF no")
    with pytest.raises(DataError, match=r"a.wav cannot be read as audio"):
        open_samples(tmp_path, [SIGNAL])
    with pytest.raises(DataError, match="no input of the model takes floats"):
        open_samples(tone(tmp_path / "a.wav"), [Input("i", np.dtype(np.int64), (1, 4))])
    with pytest.raises(DataError, match="rate 0"):
        Audio(rate=0)


WHOLE = np.dtype(np.int64)
FREE = tuple(Input(name, WHOLE, ("N", "length")) for name in ("input_ids", "attention_mask"))


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0, "a": 1, "cat": 2, "sat": 3}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    # As most files of sentence encoders.
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "padding.json"))
    (tmp_path / "texts.txt").write_text("a cat sat\n\na dog\n", encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("tokenizer", ["tokenizer.json", "padding.json"])
def test_each_line_is_a_sample_of_its_own_length(tokenizer: str, texts: Path) -> None:
    samples = open_samples(texts, FREE, source=f"text:tokenizer={texts / tokenizer}")
    assert [sample["input_ids"].tolist() for sample in samples] == [[[1, 2, 3]], [[1, 0]]]
    assert all(sample["attention_mask"].all() for sample in samples)


@pytest.mark.parametrize(("shape", "option"), [((1, 4), ""), (("N", "length"), ":length=4")])
def test_texts_are_cut_or_filled_up(shape: tuple[int | str, ...], option: str, texts: Path) -> None:
    inputs = [Input(entry.name, WHOLE, shape) for entry in FREE]
    (texts / "texts.txt").write_text("a cat sat a cat\na\n", encoding="utf-8")
    first, second = open_samples(texts, inputs, source=f"text:tokenizer={texts / 'tokenizer.json'}{option}")
    assert first["input_ids"].tolist() == [[1, 2, 3, 1]]
    assert second["attention_mask"].tolist() == [[1, 0, 0, 0]]


def test_without_a_tokenizer_texts_are_no_samples(texts: Path) -> None:
    with pytest.raises(DataError, match=r"has suffix '.txt', expected"):
        open_samples(texts / "texts.txt", FREE)
    with pytest.raises(DataError, match=r"as in --source text:tokenizer=tokenizer.json"):
        open_samples(texts, FREE)
    with pytest.raises(DataError, match=r"missing.json cannot be read as a tokenizer"):
        open_samples(texts, FREE, source="text:tokenizer=missing.json")
