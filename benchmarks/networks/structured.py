"""Made-up samples with structure: images, sounds, words and clouds whose values depend on their neighbours."""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Sampler = Callable[[np.random.Generator], Array]
SUCCESSORS = 12
LARGEST = 2.2


def photograph(channels: int, size: int, low: float | None = None) -> Sampler:
    """Draw a smooth background with two soft-edged ellipses on it, its values bounded as those of a camera are.

    Args:
        channels: of the image.
        size: height and width.
        low: lower end of the values, whose upper end is 1; None for a mean of about zero and 2.2 as the largest.
    """

    def draw(random: np.random.Generator) -> Array:
        picture = _scene(random, channels, size, 1)[:, 0]
        if low is not None:
            picture = low + (1 - low) * (picture + LARGEST) / (2 * LARGEST)
        return picture[None].astype(np.float32)

    return draw


def film(channels: int, frames: int, size: int) -> Sampler:
    """Draw a scene whose background and objects move."""
    return lambda random: _scene(random, channels, size, frames)[None].astype(np.float32)


def pair_of_frames(channels: int, size: int) -> Sampler:
    """Draw two frames of a film, one behind the other along the channels."""

    def draw(random: np.random.Generator) -> Array:
        moving = _scene(random, channels, size, 4)[:, [0, 3]]
        return moving.transpose(1, 0, 2, 3).reshape(1, 2 * channels, size, size).astype(np.float32)

    return draw


def _scene(random: np.random.Generator, channels: int, size: int, frames: int) -> Array:
    """Return values as (channels, frames, size, size)."""
    y, x = np.meshgrid(*[np.linspace(0, 1, size)] * 2, indexing="ij")
    when = np.arange(frames)[:, None, None] / 16
    scene = np.zeros((channels, frames, size, size))
    for _ in range(10):
        down, across = random.integers(0, 6, 2)
        phase, drift = random.uniform(0, 2 * np.pi), random.normal(0, 2)
        wave = np.cos(2 * np.pi * (down * y + across * x)[None] + phase + drift * when)
        scene += random.normal(size=(channels, 1, 1, 1)) * wave[None] / (1 + np.hypot(down, across))
    for _ in range(2):
        (top, left), (high, wide), (fall, slide) = (
            random.uniform(*ends, 2) for ends in ((0.2, 0.8), (0.1, 0.3), (-0.5, 0.5))
        )
        distance = ((y - top - fall * when) / high) ** 2 + ((x - left - slide * when) / wide) ** 2
        inside = 1 / (1 + np.exp(np.clip(12 * (distance - 1), -50, 50)))
        scene = scene * (1 - inside) + random.normal(0, 1.2, (channels, 1, 1, 1)) * inside
    return LARGEST * np.tanh((scene + 0.03 * random.normal(size=scene.shape)) / LARGEST)


def sound(length: int, rate: int = 16000) -> Sampler:
    """Draw harmonics of a gliding tone, in syllables, with a little hiss, as (1, length)."""

    def draw(random: np.random.Generator) -> Array:
        seconds = np.arange(length) / rate
        pitch = random.uniform(90, 280) * (1 + 0.1 * np.sin(2 * np.pi * random.uniform(1, 5) * seconds))
        phase = 2 * np.pi * np.cumsum(pitch) / rate
        formants = random.uniform(300, 3000, 3)
        voice = np.zeros(length)
        for harmonic in range(1, 20):
            loudness = np.exp(-(((harmonic * pitch.mean() - formants) / 300) ** 2)).sum() + 0.05
            voice += loudness / harmonic**0.5 * np.sin(harmonic * phase + random.uniform(0, 6.28))
        envelope = np.clip(np.sin(2 * np.pi * random.uniform(2, 6) * seconds + random.uniform(0, 6.28)), 0, None)
        loud = 0.25 * voice * envelope + 0.004 * random.normal(size=length)
        return np.clip(loud, -1, 1)[None].astype(np.float32)

    return draw


def spectrogram(bands: int, frames: int) -> Sampler:
    """Draw log energies with gliding formants, in syllables, as (1, bands, frames)."""

    def draw(random: np.random.Generator) -> Array:
        band, frame = np.arange(bands)[:, None], np.arange(frames)[None]
        levels = np.full((bands, frames), 0.05)
        for _ in range(3):
            centre = random.uniform(0, bands) + random.uniform(2, 12) * np.sin(frame / random.uniform(8, 30))
            levels += np.exp(-(((band - centre) / random.uniform(1.5, 5)) ** 2))
        syllables = 0.05 + np.clip(np.sin(frame / random.uniform(4, 12) + random.uniform(0, 6.28)), 0, None)
        values = np.log(levels * syllables) - 0.02 * band + 0.1 * random.normal(size=levels.shape)
        return ((values + 4) / 2)[None].astype(np.float32)

    return draw


def words(vocabulary: int, length: int, batch: int = 1) -> Sampler:
    """Draw a Markov chain in which each word has a few successors, some of them frequent."""
    language = np.random.default_rng(vocabulary)
    successors = (vocabulary * language.random((vocabulary, SUCCESSORS)) ** 3).astype(np.int64)
    chances = 1 / np.arange(1, SUCCESSORS + 1)

    def draw(random: np.random.Generator) -> Array:
        text = np.empty((batch, length), np.int64)
        for row in text:
            word = int(random.integers(vocabulary))
            for place, choice in enumerate(random.choice(SUCCESSORS, length, p=chances / chances.sum())):
                row[place] = word
                word = int(successors[word, choice])
        return text

    return draw


def frequent(size: int, *shape: int) -> Sampler:
    """Draw rows of a table, of which the first ones are frequent."""
    return lambda random: np.minimum(random.zipf(1.2, shape) - 1, size - 1).astype(np.int64)


def series(*shape: int) -> Sampler:
    """Draw values that follow the ones before them along the axis before the last."""

    def draw(random: np.random.Generator) -> Array:
        values = random.normal(size=shape)
        for place in range(1, shape[-2]):
            values[..., place, :] = 0.9 * values[..., place - 1, :] + 0.44 * values[..., place, :]
        return values.astype(np.float32)

    return draw


def seasons(length: int, channels: int) -> Sampler:
    """Draw a trend with two seasons and what follows the values before, as (1, length, channels)."""

    def draw(random: np.random.Generator) -> Array:
        when = np.arange(length)[:, None]
        level, slope = random.uniform(-2, 2, channels), random.normal(0, 0.01, channels)
        values = level + slope * when + series(length, channels)(random) * 0.3
        for period in (24, 7):
            values += random.uniform(0.2, 1, channels) * np.sin(2 * np.pi * when / period + random.uniform(0, 6.28))
        return values[None].astype(np.float32)

    return draw


def surface(points: int) -> Sampler:
    """Draw points on a sphere, a torus or a box, turned, stretched and moved, as (1, points, 3)."""

    def draw(random: np.random.Generator) -> Array:
        around, along = random.uniform(0, 2 * np.pi, (2, points))
        shape = random.integers(3)
        if shape == 0:
            found = random.normal(size=(points, 3))
            found /= np.linalg.norm(found, axis=1, keepdims=True)
        elif shape == 1:
            ring = 1 + 0.35 * np.cos(along)
            found = np.stack([ring * np.cos(around), ring * np.sin(around), 0.35 * np.sin(along)], 1)
        else:
            found = random.uniform(-1, 1, (points, 3))
            face = random.integers(3, size=points)
            found[np.arange(points), face] = np.sign(found[np.arange(points), face])
        turn = np.linalg.qr(random.normal(size=(3, 3)))[0]
        return (found * random.uniform(0.5, 1, 3) @ turn + random.normal(0, 0.1, 3))[None].astype(np.float32)

    return draw


def raster(side: int) -> Sampler:
    """Draw the coordinates of the pixels of a window, as (side * side, 2)."""

    def draw(random: np.random.Generator) -> Array:
        corner, zoom = random.uniform(-1, 0.4, 2), random.uniform(0.1, 0.6)
        y, x = np.meshgrid(*(start + zoom * np.linspace(0, 1, side) for start in corner), indexing="ij")
        return np.stack([y.ravel(), x.ravel()], 1).astype(np.float32)

    return draw


def rays(count: int, steps: int) -> Sampler:
    """Draw points along the rays of a camera that looks at the middle, each with the direction of its ray."""

    def draw(random: np.random.Generator) -> Array:
        camera = random.normal(size=3)
        camera *= 2 / np.linalg.norm(camera)
        direction = -camera / 2 + random.normal(0, 0.15, (count, 3))
        direction /= np.linalg.norm(direction, axis=1, keepdims=True)
        points = camera + np.linspace(1, 3, steps)[None, :, None] * direction[:, None]
        both = np.concatenate([points, np.broadcast_to(direction[:, None], points.shape)], -1)
        return both.reshape(-1, 6).astype(np.float32)

    return draw


def neighbours(nodes: int, near: int) -> Sampler:
    """Draw the matrix of a graph of nearby nodes, its diagonal included, as (1, nodes, nodes)."""

    def draw(random: np.random.Generator) -> Array:
        places = random.random((nodes, 2))
        distance = np.linalg.norm(places[:, None] - places[None], axis=-1)
        return (distance <= np.sort(distance, 1)[:, near : near + 1])[None].astype(np.float32)

    return draw


def edges(nodes: int, count: int) -> Sampler:
    """Draw sources and targets of edges, of which some nodes have many, as (2, count)."""

    def draw(random: np.random.Generator) -> Array:
        source = random.integers(nodes, size=count)
        target = (source + np.minimum(random.zipf(1.5, count), nodes)) % nodes
        return np.stack([source, target]).astype(np.int64)

    return draw


def orbits(count: int) -> Sampler:
    """Draw places on circles with their velocities, and six parameters, as float64 of (count, 12)."""

    def draw(random: np.random.Generator) -> Array:
        angle, radius = random.uniform(0, 2 * np.pi, count), random.uniform(0.7, 2, count)
        place = np.stack([radius * np.cos(angle), radius * np.sin(angle), 0.1 * random.normal(size=count)], 1)
        speed = np.stack([-np.sin(angle), np.cos(angle), np.zeros(count)], 1) / np.sqrt(radius)[:, None]
        return np.concatenate([place, speed, np.tile(random.normal(size=6), (count, 1))], 1)

    return draw
