"""Fetch a model of the tutorials and make samples for it: ``python docs/examples.py NAME``.

Writes zoo/NAME.onnx, and samples in zoo/data/NAME (zoo/data/silero-vad for silero-vad-ifless). The samples are drawn
from a fixed seed: words as pictures, a voice of harmonics, sentences of token numbers. They are enough to follow a
page; only real inputs give figures of accuracy that mean something.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).parents[1]
WORDS = ("harbour", "train", "4711", "lemon", "B-52", "window", "2026", "north", "paper", "Q1 report")
RATE = 16_000  # of the recordings, in Hz
CONTEXT, WINDOW = 64, 512  # samples of sound that the speech detector keeps and takes

Sample = dict[str, npt.NDArray[np.generic]]


def words_in_a_picture(random: np.random.Generator) -> Sample:
    """A picture of [1, 3, 416, 416] with a few words of random places and colours, in 0..255."""
    from PIL import Image, ImageDraw, ImageFont

    noise = random.integers(120, 256, (26, 26, 3), np.uint8)
    picture = Image.fromarray(noise).resize((416, 416), Image.Resampling.BICUBIC)
    for word in random.choice(WORDS, 5):
        colour = tuple(int(part) for part in random.integers(0, 110, 3))
        x, y = (int(part) for part in random.integers(10, 320, 2))
        ImageDraw.Draw(picture).text((x, y), str(word), colour, ImageFont.load_default(int(random.integers(20, 50))))
    return {"images": np.asarray(picture, np.float32).transpose(2, 0, 1)[None]}


def line_of_text(random: np.random.Generator) -> Sample:
    """A line of text of [1, 3, 48, 320], in -1..1."""
    from PIL import Image, ImageDraw, ImageFont

    paper, ink = int(random.integers(180, 256)), int(random.integers(0, 90))
    picture = Image.new("RGB", (320, 48), (paper, paper, paper))
    text = " ".join(random.choice(WORDS, 3))
    ImageDraw.Draw(picture).text((6, 8), text, (ink, ink, ink), ImageFont.load_default(int(random.integers(22, 30))))
    pixels = np.asarray(picture, np.float32) + random.normal(0, 4, (48, 320, 3)).astype(np.float32)
    return {"x": (pixels.clip(0, 255).transpose(2, 0, 1)[None] / 127.5 - 1).astype(np.float32)}


def sentences(random: np.random.Generator) -> Sample:
    """Two sentences of token numbers between [CLS] and [SEP], frequent ones first as in a language."""
    length = int(random.integers(8, 24))
    tokens = 999 + np.minimum(random.zipf(1.3, (2, length)), 29_000)
    ids = np.concatenate([np.full((2, 1), 101), tokens, np.full((2, 1), 102)], axis=1)
    return {"input_ids": ids.astype(np.int64), "attention_mask": np.ones_like(ids, np.int64)}


def window_of_sound(random: np.random.Generator) -> Sample:
    """A window of sound: noise, in two of three windows with harmonics of a voice, at the start of a stream."""
    times = np.arange(CONTEXT + WINDOW) / RATE
    sound = random.normal(0, 10 ** random.uniform(-4, -2), times.size)
    if random.random() < 2 / 3:
        pitch, loudness = random.uniform(90, 260), random.uniform(0.02, 0.3)
        sound += sum(loudness / n * np.sin(2 * np.pi * n * pitch * times + n) for n in range(1, 16))
    return {
        "input": sound.astype(np.float32)[None],
        "state": np.zeros((2, 1, 128), np.float32),
        "sr": np.array(RATE, np.int64),
    }


SAMPLES: dict[str, tuple[int, Callable[[np.random.Generator], Sample]]] = {
    "ddddocr-det": (32, words_in_a_picture),
    "minilm-l3": (48, sentences),
    "ppocr-rec": (48, line_of_text),
    "silero-vad-ifless": (64, window_of_sound),
}


def samples_for(name: str, part: str) -> Iterator[Sample]:
    """The samples of a model; those of ``calib`` and ``eval`` differ."""
    count, draw = SAMPLES[name]
    random = np.random.default_rng((sorted(SAMPLES).index(name), ("calib", "eval").index(part)))
    return (draw(random) for _ in range(count))


def main() -> None:
    """Fetch the model, then make its samples."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(SAMPLES))
    parser.add_argument("--into", type=Path, default=Path("zoo"), help="folder to write (default zoo)")
    chosen = parser.parse_args()
    fetch = [sys.executable, str(ROOT / "models" / "zoo.py"), "fetch", str(chosen.into), chosen.name]
    if code := subprocess.run(fetch, check=False).returncode:
        sys.exit(code)
    for part in ("calib", "eval"):
        # Both exports of the speech detector take the same samples.
        folder = chosen.into / "data" / chosen.name.removesuffix("-ifless") / part
        folder.mkdir(parents=True, exist_ok=True)
        for index, sample in enumerate(samples_for(chosen.name, part)):
            np.savez(folder / f"{index:04}.npz", **sample)  # type: ignore[arg-type]
        sys.stdout.write(f"{folder}\t{SAMPLES[chosen.name][0]} samples\n")


if __name__ == "__main__":
    main()
