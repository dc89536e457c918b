"""Rewrite random float graphs, run what comes out beside what went in, and count the faults by rule.

    python benchmarks/differential.py [--graphs N] [--seed S] [--pass NAME ...] [--minutes M] [--jobs J] [--save DIR]

The generator and the checks are those of `tests/fuzzing`. A seed makes a graph and what it is fed again: a graph that
is named below runs alone with ``--graphs 1 --seed S``. Graphs that onnxruntime does not run as they are do not count.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from itertools import count, islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from fuzzing.generator import seeds_for  # type: ignore[import-not-found, unused-ignore]
from fuzzing.running import Summary, run_cases, save, text_of  # type: ignore[import-not-found, unused-ignore]

from onnxq.passes import GROUPS, passes_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=int, default=2000, help="how many graphs")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first graph; the others follow")
    parser.add_argument(
        "--pass", dest="passes", action="append", default=[], metavar="NAME", help="idioms for it alone"
    )
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--save", type=Path, metavar="DIR", help="folder for the models that show faults")
    options = parser.parse_args()
    start = time.perf_counter()
    seeds = islice(seeds_for(count(options.seed), options.passes), options.graphs)
    summary = run_cases(seeds, options.jobs, options.minutes * 60, progress)
    print(report(summary, time.perf_counter() - start))
    for examples in summary.examples.values():
        for example in examples:
            if options.save is not None:
                save(example, options.save)
        print(f"\n{text_of(min(examples, key=lambda one: len(one.model)))}")
    sys.exit(1 if summary.faults else 0)


def progress(summary: Summary) -> None:
    """Say now and then how far a run is."""
    if (done := summary.counts["graphs"]) and done % 200 == 0:
        faults = {" ".join(key): len(found) for key, found in summary.faults.items()}
        print(f"{done} graphs: {faults}", file=sys.stderr, flush=True)


def report(summary: Summary, seconds: float) -> str:
    """Return the counts, the faults by rule, and how often each pass and rule changed something."""
    lines = [f"{seconds:.0f} s", *(f"{number} {name}" for name, number in sorted(summary.counts.items()))]
    lines += [f"{number} differences of kind {kind!r}, which are accepted" for kind, number in summary.accepted.items()]
    lines += ["", "| rule | fault | graphs | seeds |", "|---|---|---|---|"]
    for (rule, kind), found in sorted(summary.faults.items(), key=lambda pair: -len(pair[1])):
        lines.append(f"| {rule} | {kind} | {len(found)} | {', '.join(str(seed) for seed, _ in found[:5])} |")
    for group in GROUPS:
        counts = ", ".join(f"{name} {summary.fired[name]}" for name in passes_of(group))
        lines += ["", f"fired of {group}: {counts}"]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
