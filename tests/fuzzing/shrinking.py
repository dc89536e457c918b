"""Make a model that shows a fault as small as it gets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from onnx import ModelProto

from fuzzing.parts import pruned
from fuzzing.runtime import Feed, value_info, values_of

_MOST_SECONDS = 20.0


def shrunk(model: ModelProto, feed: Feed, shows: Callable[[ModelProto, Feed], bool]) -> tuple[ModelProto, Feed]:
    """Return a smaller model, and what it is fed, that shows the same.

    Outputs go, nodes give way to inputs that hold what they made, and nodes that change nothing of importance to what
    they read.

    Args:
        model: shows a fault.
        feed: what it is fed.
        shows: whether another model does.
    """
    best, until = (model, dict(feed)), time.monotonic() + _MOST_SECONDS
    tried: set[bytes] = set()
    while time.monotonic() < until:
        smaller = (
            one for one in _smaller(*best) if (key := one[0].SerializeToString()) not in tried and not tried.add(key)
        )
        found = next((one for one in smaller if shows(*one) or time.monotonic() > until), None)
        if found is None or time.monotonic() > until:
            break
        best = found
    return best


def _smaller(model: ModelProto, feed: Feed) -> Iterator[tuple[ModelProto, dict[str, Any]]]:
    for index in range(len(model.graph.output)) if len(model.graph.output) > 1 else ():
        made = _copy(model)
        del made.graph.output[index]
        yield _pruned(made, feed)
    known = _values(model, feed)
    for index in reversed(range(len(model.graph.node))):
        node = model.graph.node[index]
        if all(name in known for name in node.output if name) and len(model.graph.node) > 1:
            made = _copy(model)
            del made.graph.node[index]
            returned = {entry.name for entry in made.graph.output}
            kept = [entry for entry in made.graph.output if entry.name not in node.output]
            given = {name: known[name] for name in node.output if name}
            if kept or not returned:
                del made.graph.output[:]
                made.graph.output.extend(kept)
                made.graph.input.extend(value_info(name, value.dtype, value.shape) for name, value in given.items())
                yield _pruned(made, {**feed, **given})
        if node.input and len(node.output) == 1 and _alike(known, node.input[0], node.output[0]):
            made = _copy(model)
            del made.graph.node[index]
            for other in made.graph.node:
                other.input[:] = [node.input[0] if name == node.output[0] else name for name in other.input]
            if node.output[0] not in {entry.name for entry in made.graph.output}:
                yield _pruned(made, feed)


def _copy(model: ModelProto) -> ModelProto:
    return ModelProto.FromString(model.SerializeToString())


def _alike(known: Mapping[str, Any], one: str, other: str) -> bool:
    if one not in known or other not in known:
        return False
    return bool(known[one].shape == known[other].shape and known[one].dtype == known[other].dtype)


def _values(model: ModelProto, feed: Feed) -> dict[str, Any]:
    """Return what each tensor of the main graph holds."""
    try:
        found = values_of(model, feed)
    # Some types do not come out; then no node is replaced.
    except Exception:  # noqa: BLE001
        found = {}
    values = {
        name: value for name, value in found.items() if isinstance(value, np.ndarray) and value.dtype.kind in "fiub"
    }
    return {**feed, **values}


def _pruned(model: ModelProto, feed: Feed) -> tuple[ModelProto, dict[str, Any]]:
    """Leave out what no output needs."""
    entries = {entry.name for entry in pruned(model).graph.input}
    return model, {name: value for name, value in feed.items() if name in entries}
