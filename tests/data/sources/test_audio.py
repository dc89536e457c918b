"""Audio files become windows of one channel."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile

from onnxq.data.inputs import Input
from onnxq.data.samples import open_samples
from onnxq.data.sources import Audio
from onnxq.errors import DataError

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
