"""Many cases, in processes that are replaced when onnxruntime takes one down; what they found, grouped."""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.printer

from fuzzing.builder import RefusedError
from fuzzing.checking import Example, Fault, Outcome, check, check_quantized, check_quantizers, examine, rewrites
from fuzzing.comparing import Original
from fuzzing.generator import Case, kind_of, made
from fuzzing.runtime import checked
from fuzzing.shrinking import shrunk

_SHRUNK_OF_A_KIND = 2
_PATIENCE = 120.0
_LOOK_UP = 2.0


@dataclass
class Summary:
    """What a run found.

    Attributes:
        counts: cases that ran, that onnxruntime refused, and that it crashed on before anything was rewritten.
        fired: how often each pass and rule changed something.
        accepted: differences that no rewrite is blamed for.
        faults: seeds by rule and kind.
        examples: a few models for each.
    """

    counts: Counter[str] = field(default_factory=Counter)
    fired: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    faults: dict[tuple[str, str], list[tuple[int, Fault]]] = field(default_factory=lambda: defaultdict(list))
    examples: dict[tuple[str, str], list[Example]] = field(default_factory=lambda: defaultdict(list))

    def add(self, seed: int, outcome: Outcome | None) -> None:
        """Count an outcome; None is a case of which nothing could be made."""
        if outcome is None or not outcome.is_valid:
            self.counts["refused by onnxruntime"] += 1
            return
        self.counts["graphs"] += 1
        self.fired += outcome.fired
        self.accepted += outcome.accepted
        for fault in outcome.faults:
            self.faults[fault.rule, fault.kind].append((seed, fault))
        for example in outcome.examples:
            self.examples[example.fault.rule, example.fault.kind].append(example)


# One case


def shrink(case: Case, fault: Fault) -> Example:
    """Return the smallest model that shows a fault of the same rule and kind."""
    rewrite = dict(rewrites(case))[fault.rewrite]
    feed = case.feeds[fault.feed or next(iter(case.feeds))]

    def shows(model: onnx.ModelProto, given: Any) -> bool:
        original = Original.of(model, {fault.feed: given})
        if original is None:
            return False
        found, _ = examine(original, fault.rewrite, rewrite, is_sound=not checked(model))
        return found is not None and (found.rule, found.kind) == (fault.rule, fault.kind)

    if not shows(case.model, feed):
        return Example(case.seed, fault, case.model.SerializeToString(), dict(feed))
    model, given = shrunk(case.model, feed, shows)
    original = Original.of(model, {fault.feed: given})
    if original is not None:
        last, _ = examine(original, fault.rewrite, rewrite, is_sound=not checked(model))
        fault = last or fault
    return Example(case.seed, fault, model.SerializeToString(), dict(given))


def text_of(example: Example) -> str:
    """Return an example as a text that can be read and typed in again."""
    with np.printoptions(threshold=40, edgeitems=2, linewidth=160):
        feed = "\n".join(f"  {name} = {value!r}" for name, value in example.feed.items())
    model = onnx.printer.to_text(onnx.ModelProto.FromString(example.model))
    fault = example.fault
    return f"{fault.rule}: {fault.kind} ({fault.rewrite}, seed {example.seed})\n{fault.detail}\n{model}\n{feed}"


def save(example: Example, folder: Path) -> Path:
    """Write an example as a model and its feed, and return the folder."""
    place = folder / f"{example.fault.rule}-{example.fault.kind}-{example.seed}".replace(" ", "-")
    place.mkdir(parents=True, exist_ok=True)
    (place / "model.onnx").write_bytes(example.model)
    np.savez(place / "feed.npz", **example.feed)
    (place / "fault.txt").write_text(text_of(example) + "\n")
    return place


# Processes


def _work(connection: Connection) -> None:
    """Check the seeds that come, until None does; say beforehand what might end the process."""
    logging.disable(logging.WARNING)
    seen: Counter[tuple[str, str]] = Counter()
    parent = os.getppid()
    while True:
        while not connection.poll(_LOOK_UP):
            # Siblings hold the other end as well, so that it does not close when the parent dies.
            if os.getppid() != parent:
                return
        seed = connection.recv()
        if seed is None:
            return
        try:
            outcome = _checked(seed, lambda name, seed=seed: connection.send(("at", seed, name)))
            connection.send(("found", seed, outcome))
            for fault in outcome.faults if not outcome.examples else ():
                seen[fault.rule, fault.kind] += 1
                if seen[fault.rule, fault.kind] <= _SHRUNK_OF_A_KIND:
                    outcome.examples.append(shrink(made(seed), fault))
            connection.send(("done", seed, outcome))
        except RefusedError:
            connection.send(("done", seed, None))
        # A fault of the fuzzer itself.
        except Exception:  # noqa: BLE001
            connection.send(("broken", seed, traceback.format_exc()))


def _checked(seed: int, note: Any) -> Outcome:
    kind = kind_of(seed)
    if kind == "quantized":
        return check_quantized(seed, note)
    return check_quantizers(seed, note) if kind == "quantizers" else check(made(seed), note)


class _Worker:
    def __init__(self) -> None:
        context = multiprocessing.get_context("fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.seed, self.at, self.outcome, self.since = -1, "", None, time.monotonic()

    def give(self, seed: int | None) -> None:
        self.seed, self.at, self.outcome, self.since = -1 if seed is None else seed, "", None, time.monotonic()
        self.connection.send(seed)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def run_cases(seeds: Iterable[int], jobs: int = 1, seconds: float = float("inf"), progress: Any = None) -> Summary:
    """Check the cases of seeds, until there are no more or time is up.

    Raises:
        RuntimeError: the fuzzer itself fails.
    """
    summary, until = Summary(), time.monotonic() + seconds
    left: Iterator[int] = iter(seeds)
    workers: list[_Worker] = []
    try:
        for seed in _first(left, jobs):
            workers.append(_Worker())
            workers[-1].give(seed)
        while workers:
            ready = wait([worker.connection for worker in workers], timeout=1.0)
            for worker in list(workers):
                hangs = time.monotonic() - worker.since > _PATIENCE
                if (worker.connection in ready and not _took(worker, summary)) or hangs:
                    _lost(worker, summary, "hang" if hangs else "crash")
                    workers[workers.index(worker)] = worker = _Worker()
                if worker.seed < 0:
                    seed = next(left, None) if time.monotonic() < until else None
                    if progress is not None:
                        progress(summary)
                    if seed is None:
                        workers.remove(worker)
                        worker.end()
                    else:
                        worker.give(seed)
    finally:
        for worker in workers:
            worker.end()
    return summary


def _first(left: Iterator[int], count: int) -> Sequence[int]:
    return [seed for _, seed in zip(range(count), left, strict=False)]


def _took(worker: _Worker, summary: Summary) -> bool:
    """Take what a worker says; return False where it has ended."""
    try:
        kind, seed, *said = worker.connection.recv()
    except (EOFError, OSError):
        return False
    if kind == "at":
        worker.at = said[0]
    elif kind == "found":
        worker.outcome = said[0]
    elif kind == "broken":
        raise RuntimeError(f"seed {seed}: {said[0]}")
    else:
        summary.add(seed, said[0])
        worker.seed = -1
    return True


def _lost(worker: _Worker, summary: Summary, how: str) -> None:
    """Count what a worker was at when it ended."""
    worker.end()
    if worker.outcome is not None:
        summary.add(worker.seed, worker.outcome)
    elif not worker.at:
        summary.counts[f"{how} of onnxruntime at the given model"] += 1
    else:
        fault = Fault(worker.at.removesuffix(" alone"), how, worker.at, f"onnxruntime: {how}")
        summary.counts["graphs"] += 1
        summary.faults[fault.rule, fault.kind].append((worker.seed, fault))
    worker.seed = -1
