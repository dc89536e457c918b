"""Cache of measured times, within a run or in a JSON file that the user names."""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from onnxq.errors import DataError
from onnxq.search.kernel_times import NodeTimes
from onnxq.system.publish import check_output, locked, write_text
from onnxq.system.resources import available_cores
from onnxq.version import VERSION

_FORMAT = "onnxq costs 1"
# About twenty searches fit, fewer for models with very many nodes; the oldest entries are dropped first.
_MOST_ENTRIES = 200
_MOST_BYTES = 1 << 26
_DIGEST_BYTES = 16


@dataclass(frozen=True, eq=False)
class CostCache:
    """Measured times by key.

    Attributes:
        path: the JSON file; None keeps the times in memory only.
        known: node times.
        added: node times measured since the file was read.
        speeds: speeds relative to the float model.
        added_speeds: speeds measured since the file was read.
    """

    path: Path | None = None
    known: dict[str, NodeTimes] = field(default_factory=dict)
    added: dict[str, NodeTimes] = field(default_factory=dict)
    speeds: dict[str, float] = field(default_factory=dict)
    added_speeds: dict[str, float] = field(default_factory=dict)

    @classmethod
    def opened(cls, path: Path | None) -> CostCache:
        """Open the cache in a file; a missing file means an empty cache.

        Raises:
            DataError: if the file cannot be read, or is not a cost cache.
            OutputError: if the file cannot be written.
        """
        if path is None:
            return cls()
        check_output(path, None)
        known, speeds = _read(path) if path.exists() else ({}, {})
        return cls(path, known, speeds=speeds)

    def times(self, key: str, measure: Callable[[], NodeTimes]) -> NodeTimes:
        """Return the known times of a key, or measure them now."""
        if key not in self.known:
            self.known[key] = self.added[key] = measure()
        return self.known[key]

    def speed(self, key: str, measured: float) -> float:
        """Return the speed that was measured first, so that repeated runs decide alike."""
        if key not in self.speeds:
            self.speeds[key] = self.added_speeds[key] = measured
        return self.speeds[key]

    def save(self) -> None:
        """Merge the new measurements into the file, which other runs may have changed meanwhile.

        Raises:
            DataError: if the file is no longer a cost cache.
            OutputError: if the file cannot be written.
        """
        if self.path is None or not (self.added or self.added_speeds):
            return
        with locked(self.path.parent):
            before, speeds = _read(self.path) if self.path.exists() else ({}, {})
            kept = {key: times for key, times in before.items() if key not in self.added}
            _write({**kept, **self.added}, {**speeds, **self.added_speeds}, self.path)
        self.added.clear()
        self.added_speeds.clear()


def cost_key(model: str, samples: Iterable[str], effect: object, engine: str) -> str:
    """Return the cache key of a measurement: what ran, and on which machine.

    Args:
        model: digest of the prepared model.
        samples: digests of its samples.
        effect: effect of the plan; None for the float model.
        engine: name, version and number of threads.
    """
    ran = (model, *samples, effect)
    place = (platform.machine(), _processor(), available_cores(), engine, VERSION)
    return hashlib.blake2b(repr((ran, place)).encode(), digest_size=_DIGEST_BYTES).hexdigest()


@cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "") or (
        platform.processor()
    )


def _read(path: Path) -> tuple[dict[str, NodeTimes], dict[str, float]]:
    try:
        return _parsed(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; give another file for node times") from error
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise DataError(
            f"{path} does not hold node times ({error}), expected a file of {_FORMAT}; give another one, or remove it"
        ) from error


def _parsed(document: Mapping[str, Any]) -> tuple[dict[str, NodeTimes], dict[str, float]]:
    if document["format"] != _FORMAT:
        raise ValueError(f"format {document['format']!r}")
    times = {
        key: NodeTimes(
            _numbers(entry["nodes"]),
            _numbers(entry["borders"]),
            _numbers(entry["elements"]),
            _numbers({"rest": entry["rest"]})["rest"],
        )
        for key, entry in document["times"].items()
    }
    # Files of earlier versions have no speeds, or 0 for models that could not be timed.
    speeds = _numbers(document.get("speeds", {}))
    return times, {key: speed for key, speed in speeds.items() if speed > 0}


def _numbers(found: Mapping[str, float]) -> dict[str, float]:
    for name, value in found.items():
        if not (type(value) in (int, float) and math.isfinite(value) and value >= 0):
            raise ValueError(f"{value!r} at {name!r}")
    return dict(found)


def _newest(known: Mapping[str, NodeTimes]) -> list[str]:
    """Return the newest entries as JSON, oldest first, within the size limits."""
    kept: list[str] = []
    size = 0
    for key, times in reversed(list(known.items())[-_MOST_ENTRIES:]):
        entry = f"{json.dumps(key)}: {json.dumps(asdict(times))}"
        size += len(entry)
        if kept and size > _MOST_BYTES:
            break
        kept.append(entry)
    return kept[::-1]


def _write(known: Mapping[str, NodeTimes], speeds: Mapping[str, float], path: Path) -> None:
    newest = json.dumps(dict(list(speeds.items())[-_MOST_ENTRIES:]))
    text = f'{{"format": {json.dumps(_FORMAT)}, "times": {{{", ".join(_newest(known))}}}, "speeds": {newest}}}'
    write_text(path, text, "file of node times")
