"""Random models and what to feed them, from a seed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import ModelProto

from fuzzing.builder import Builder, RefusedError, edges, filled
from fuzzing.idioms import IDIOMS, Idiom

_OPSETS = (7, 8, 9, 10, 11, 12, 13, 13, 14, 15, 16, 17, 17, 18, 19, 20, 21, 22, 23, 23)
_LENGTHS = (0, 1, 2, 5)


@dataclass
class Case:
    """A model, what it is fed, and for which rules it was made.

    Attributes:
        seed: makes it again.
        model: the model.
        feeds: by what is special about them; the first is ordinary.
        rules: passes and rules that the idioms in it are for.
    """

    seed: int
    model: ModelProto
    feeds: dict[str, dict[str, Any]]
    rules: tuple[str, ...]


def kind_of(seed: int) -> str:
    """Return what the case of a seed is about: ``rewriting``, ``quantized`` models or ``quantizers``."""
    if seed % 8 < 7:
        return "rewriting"
    return "quantizers" if seed % 64 == 63 else "quantized"


def first_of(seed: int) -> Idiom:
    """Return the idiom that the case of a seed is sure to try; they take turns."""
    names = [name for name in sorted(IDIOMS) for _ in range(IDIOMS[name].turns)]
    return IDIOMS[names[(seed // 8 * 7 + seed % 8) % len(names)]]


def made(seed: int) -> Case:
    """Return the case of a seed; idioms are taken in turn, so that each comes as often.

    Raises:
        RefusedError: onnxruntime computes none of what was drawn.
    """
    random = np.random.default_rng([seed, 20])
    first = first_of(seed)
    opsets = [opset for opset in (*_OPSETS, 24) if first.opsets[0] <= opset <= first.opsets[1]]
    opset = int(opsets[int(random.integers(len(opsets)))])
    dtype = first.dtypes[int(random.integers(len(first.dtypes)))]
    builder = Builder(random, opset, dtype)
    wanted = [first]
    if random.random() < 0.8:
        others = [one for one in IDIOMS.values() if one.opsets[0] <= opset <= one.opsets[1] and dtype in one.dtypes]
        wanted += [others[int(random.integers(len(others)))] for _ in range(int(random.integers(1, 4)))]
        random.shuffle(wanted)
    rules: dict[str, None] = {}
    for one in wanted:
        with suppress(RefusedError):
            one.write(builder)
            rules.update(dict.fromkeys(one.rules))
    model = builder.model()
    return Case(seed, model, dict(_feeds(builder)), tuple(rules))


def _feeds(b: Builder) -> Iterator[tuple[str, dict[str, Any]]]:
    given = {name: b.values[name] for name in b.inputs}
    yield "ordinary", given
    for kind in ("huge", "tiny", "special", "grid"):
        yield kind, {name: _with_edges(b, values, kind) for name, values in given.items()}
    if b.fed and len(b.overridable) == 1:
        yield "overridden", {**given, b.fed: filled(b.random, b.stored[b.fed].shape, b.stored[b.fed].dtype)}
    dynamic = any(not isinstance(dim, int) for dims in b.inputs.values() for dim in dims)
    for index in range(2 if dynamic else 0):
        lengths = {name: int(b.pick(_LENGTHS)) for name in b.lengths}
        feed = {}
        for name, values in given.items():
            shape = [
                dim if isinstance(dim, int) else lengths.get(dim, known if b.chance(0.5) else int(b.pick(_LENGTHS)))
                for dim, known in zip(b.inputs[name], values.shape, strict=True)
            ]
            feed[name] = values if shape == list(values.shape) else filled(b.random, shape, values.dtype)
        yield f"lengths {index}", feed


def _with_edges(b: Builder, values: Any, kind: str) -> Any:
    if values.dtype.kind != "f" or not values.size:
        return values
    chosen = b.random.choice(edges(kind, values.dtype), values.shape)
    with np.errstate(over="ignore"):
        mixed = np.where(b.random.random(values.shape) < 0.5, chosen, values.astype(np.float64))
        return mixed.astype(values.dtype)


def seeds_for(seeds: Iterable[int], passes: Collection[str] = ()) -> Iterator[int]:
    """Yield the seeds whose first idiom is for one of some passes; all of them where none is named.

    Raises:
        ValueError: no idiom is for a pass that is named.
    """
    known = {rule for one in IDIOMS.values() for rule in one.rules}
    if unknown := set(passes) - known:
        raise ValueError(f"there are no idioms for {', '.join(sorted(unknown))}, only for {', '.join(sorted(known))}")
    for seed in seeds:
        if not passes or (kind_of(seed) == "rewriting" and set(passes) & set(first_of(seed).rules)):
            yield seed
