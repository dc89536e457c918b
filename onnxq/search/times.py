"""Times that were measured on this machine, kept in the user's cache folder, so that the same command decides alike."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from onnxq.errors import OnnxqError
from onnxq.evaluation.latency import processor_name
from onnxq.runtime.engine import Engine
from onnxq.search.kernel_times import NodeTimes
from onnxq.system.publish import locked, write_text
from onnxq.system.resources import available_cores
from onnxq.version import VERSION

_LOG = logging.getLogger(__name__)
_FORMAT = "onnxq times 1"
# About a hundred searches fit, fewer for models with very many nodes; the oldest entries are dropped first.
_MOST_ENTRIES, _MOST_BYTES = 1000, 1 << 26
_DIGEST_BYTES = 16


@dataclass(frozen=True, eq=False)
class MeasuredTimes:
    """Times of nodes, and speeds beside the float model, by what ran where.

    What was measured first counts, so that a rerun decides alike. A file that cannot be read or written costs only
    time, and is warned of.

    Attributes:
        path: the JSON file; None keeps the times for as long as the process.
        nodes: times of the nodes of a model.
        speeds: how many times as fast as the float model others ran.
        added: keys that the file does not have.
    """

    path: Path | None = None
    nodes: dict[str, NodeTimes] = field(default_factory=dict)
    speeds: dict[str, float] = field(default_factory=dict)
    added: set[str] = field(default_factory=set)

    @classmethod
    def opened(cls, path: Path | None) -> MeasuredTimes:
        """Return the times of a file; none if it is missing, damaged or of another version."""
        return cls(path, *_read(path)) if path is not None else cls()

    def of_nodes(self, key: str, measure: Callable[[], NodeTimes]) -> NodeTimes:
        """Return the known times of a model's nodes, or measure them now."""
        if key not in self.nodes:
            self.nodes[key] = measure()
            self.added.add(key)
        return self.nodes[key]

    def speed(self, key: str, measured: float) -> float:
        """Return the speed that was measured first."""
        if key not in self.speeds:
            self.speeds[key] = measured
            self.added.add(key)
        return self.speeds[key]

    def save(self) -> None:
        """Merge new times into the file, which other processes may have changed meanwhile."""
        if self.path is None or not self.added:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with locked(self.path.parent):
                # What is wrong with the file was told when it was opened.
                nodes, speeds = _read(self.path, warns=False)
                nodes |= {key: value for key, value in self.nodes.items() if key in self.added}
                speeds |= {key: value for key, value in self.speeds.items() if key in self.added}
                _write(nodes, speeds, self.path)
        except (OSError, OnnxqError) as error:
            _LOG.warning("times cannot be kept in %s, the next run measures again: %s", self.path, error)
        self.added.clear()


def default_path() -> Path | None:
    """Return the file of times in the user's cache folder; None if there is no such folder.

    >>> default_path().name
    'times.json'
    """
    chosen = os.environ.get("XDG_CACHE_HOME") or (os.environ.get("LOCALAPPDATA") if sys.platform == "win32" else None)
    try:
        home = Path.home()
    except RuntimeError:
        return Path(chosen) / "onnxq" / "times.json" if chosen else None
    folders = {"win32": home / "AppData" / "Local", "darwin": home / "Library" / "Caches"}
    return Path(chosen or folders.get(sys.platform, home / ".cache")) / "onnxq" / "times.json"


def times_key(model: str, samples: Iterable[str], what: str, engine: Engine) -> str:
    """Return the key of a measurement: what ran, by what, and on which machine.

    Args:
        model: digest of its structure.
        samples: what times depend on of each of its samples.
        what: was measured.
        engine: runs it.
    """
    ran = (model, *samples, what, engine.name, engine.version, engine.threads_given)
    place = (platform.machine(), processor_name(), available_cores(), VERSION)
    return hashlib.blake2b(repr((ran, place)).encode(), digest_size=_DIGEST_BYTES).hexdigest()


def _read(path: Path, *, warns: bool = True) -> tuple[dict[str, NodeTimes], dict[str, float]]:
    try:
        return _parsed(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}, {}
    except (OSError, AttributeError, LookupError, TypeError, ValueError, OverflowError, RecursionError) as error:
        if warns:
            _LOG.warning("%s does not hold times (%s), so all is measured again", path, error)
        return {}, {}


def _parsed(document: Mapping[str, Any]) -> tuple[dict[str, NodeTimes], dict[str, float]]:
    if document["format"] != _FORMAT:
        raise ValueError(f"its format is {document['format']!r}, expected {_FORMAT!r}")
    nodes = {
        key: NodeTimes(
            _numbers(entry["nodes"]),
            _numbers(entry["borders"]),
            _numbers(entry["elements"]),
            _numbers({"rest": entry["rest"]})["rest"],
        )
        for key, entry in document["nodes"].items()
    }
    return nodes, _numbers(document["speeds"])


def _numbers(entries: Mapping[str, float]) -> dict[str, float]:
    for name, value in entries.items():
        if not (type(value) in (int, float) and math.isfinite(value) and value >= 0):
            raise ValueError(f"{value!r} at {name!r}")
    return dict(entries)


def _write(nodes: Mapping[str, NodeTimes], speeds: Mapping[str, float], path: Path) -> None:
    kept: list[str] = []
    size = 0
    for key, times in reversed(list(nodes.items())[-_MOST_ENTRIES:]):
        entry = f"{json.dumps(key)}: {json.dumps(asdict(times))}"
        size += len(entry)
        if kept and size > _MOST_BYTES:
            break
        kept.append(entry)
    newest = json.dumps(dict(list(speeds.items())[-_MOST_ENTRIES:]))
    text = f'{{"format": {json.dumps(_FORMAT)}, "nodes": {{{", ".join(kept[::-1])}}}, "speeds": {newest}}}'
    write_text(path, text, "file of times")
