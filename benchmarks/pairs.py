"""What 8-bit weights lose on a processor that adds products in 16 bits, and what pairs that fit keep.

    python benchmarks/pairs.py --models DIR --data DIR [--update docs/explanation/formats.md] [NAME ...]

MODELS/NAME.onnx is calibrated with DATA/NAME/calib and tested on DATA/NAME/eval, every node that can be static, without
search or methods for accuracy. The decibels of its worst output are those of onnxruntime's kernels on this processor,
and of floats between quantizers, which add no integers: where the two agree, no product saturates.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import onnxruntime

from onnxq import PRESETS, Budget, Goal, quantize
from onnxq.calibration.provenance import instruction_set
from onnxq.config.scheme import Granularity, QuantSpec, Scheme
from onnxq.data.inputs import model_inputs
from onnxq.data.samples import open_samples
from onnxq.evaluation.agreement import agreement_of
from onnxq.ir import load
from onnxq.numerics.pairs import Pairs
from onnxq.onnx_api import weightless_model
from onnxq.planning.plan import Plan
from onnxq.runtime.sessions import open_session, run

INT8 = PRESETS["int8"]
SEVEN = replace(
    INT8, rules=tuple(replace(one, weight=QuantSpec("int8-7bit", Granularity.CHANNEL)) for one in INT8.rules)
)
WAYS: tuple[tuple[str, Scheme, bool], ...] = (
    ("8 bits", INT8, False),
    ("7 bits", SEVEN, True),
    ("8 bits in pairs", INT8, True),
)
MARKERS = "<!-- benchmarks/pairs.py -->\n", "<!-- end -->\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--update", type=Path)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for model in sorted(options.models.glob("*.onnx")):
            known = [one for one in options.data.iterdir() if model.stem.startswith(one.name)]
            if known and (not options.names or model.stem in options.names):
                rows[model.stem] = row(model, max(known, key=lambda one: len(one.name)), Path(folder) / "made.onnx")
                print(model.stem, rows[model.stem], file=sys.stderr, flush=True)
    text = table(rows)
    print(text)
    if options.update:
        before, _, rest = options.update.read_text(encoding="utf-8").partition(MARKERS[0])
        options.update.write_text(f"{before}{MARKERS[0]}{text}{MARKERS[1]}{rest.partition(MARKERS[1])[2]}", "utf-8")


def row(model: Path, data: Path, made: Path) -> list[tuple[float, float]]:
    """Return the decibels of each way on this processor's kernels, and of floats."""
    found = []
    budget, goal = Budget(search="off", accuracy="off", latency_seconds=0.0), Goal(force=True)
    samples = list(open_samples(data / "eval", model_inputs(weightless_model(load(model)))))
    known = open_session(model)
    names = [one.name for one in known.get_outputs()]
    expected = [run(known, sample) for sample in samples]
    for _, scheme, in_pairs in WAYS:
        done = quantize(model, data / "calib", made, scheme=scheme, goal=goal, budget=budget)
        if not in_pairs:
            plain = without_pairs(done.report.plan)
            quantize(model, data / "calib", made, scheme=plain, goal=goal, budget=budget)
        sessions = [open_session(made, optimize=optimize) for optimize in (True, False)]
        given = ([run(session, sample) for sample in samples] for session in sessions)
        kernels, floats = (agreement_of(names, zip(expected, one, strict=True)).worst_sqnr for one in given)
        found.append((kernels, floats))
    return found


def without_pairs(plan: Plan) -> Plan:
    """Return a plan whose weights are what is nearest to the float ones."""
    decisions = (
        replace(one, weights=tuple(replace(own, pairs=Pairs.NONE) for own in one.weights)) for one in plan.decisions
    )
    return replace(plan, decisions=tuple(decisions))


def table(rows: dict[str, list[tuple[float, float]]]) -> str:
    """Return the table in Markdown, with medians."""
    lines = ["| dB, as kernels / as floats | " + " | ".join(name for name, _, _ in WAYS) + " |", "|---" * 4 + "|"]
    lines += [f"| {name} | " + " | ".join(f"{a:.1f} / {b:.1f}" for a, b in row) + " |" for name, row in rows.items()]
    medians = ([statistics.median(row[place][way] for row in rows.values()) for way in (0, 1)] for place in range(3))
    lines.append("| median | " + " | ".join(f"{a:.1f} / {b:.1f}" for a, b in medians) + " |")
    machine = f"{instruction_set()}, onnxruntime {onnxruntime.__version__}"
    note = f"By `python benchmarks/pairs.py --models DIR --data DIR --update docs/explanation/formats.md`, {machine}."
    return "\n".join([*lines, "", note]) + "\n"


if __name__ == "__main__":
    main()
