"""Check that plans are carried out again to the same bytes, and that a search with known times finds the same model.

    python benchmarks/replays.py --models DIR --data DIR [NAME ...] [-- further options of quantize]

MODELS/NAME.onnx is calibrated with DATA/NAME/calib; the project's own models/ are among them. Each model is quantized
as by default, once more with its node times (``--profile-cache``), and once more from the plan that the first
run wrote (``--plan``). Then without a search and with ranges of a package that is installed only while the plan is
made, and from that plan. Every run is a process of its own. The command fails where a byte differs.
"""

from __future__ import annotations

import argparse
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

PLUGIN = """
from onnxq.calibration.accumulators import Range


class Thirds:
    kinds = ("range",)

    def __call__(self, seen, spec):
        found = seen.need(Range)
        return found.minimum * 2 / 3, found.maximum * 2 / 3
"""
UNTIMED = ("--latency-seconds", "0", "--force")


def main() -> None:
    arguments = sys.argv[1:]
    further = arguments[arguments.index("--") + 1 :] if "--" in arguments else []
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args(arguments[: len(arguments) - len(further) - bool(further)])
    known = runpy.run_path(str(Path(__file__).with_name("same_bytes.py")))["cases"](options.models, options.data)
    wanted = [case for case in known if not options.names or case[0].stem in options.names]
    print("| model | known times | replayed | a plugin's ranges | seconds |\n|---|---|---|---|---|")
    same = True
    for model, samples in wanted:
        start = time.perf_counter()
        with TemporaryDirectory() as name:
            found = [*searched(model, samples, Path(name), further), with_plugin(model, samples, Path(name))]
        cells = [text or "same bytes" for text in found]
        print(f"| {model.stem} | {' | '.join(cells)} | {time.perf_counter() - start:.0f} |", flush=True)
        same &= not any(found)
    sys.exit(not same)


def searched(model: Path, samples: Path, folder: Path, further: Sequence[str]) -> list[str]:
    """Search twice with the same node times and carry out the first plan; return what is wrong with each."""
    costs = ("--profile-cache", str(folder / "costs.json"), "--force", *further)
    first, second, again = (folder / f"{name}.onnx" for name in ("first", "second", "again"))
    plan = ("--plan-out", str(folder / "plan.toml"))
    if sentence := quantized(model, samples, first, *costs, *plan):
        return [sentence, sentence]
    wrong = [quantized(model, samples, second, *costs)]
    wrong.append(quantized(model, samples, again, "--plan", str(folder / "plan.toml"), *UNTIMED))
    return [text or difference(first, made) for text, made in zip(wrong, (second, again), strict=True)]


def with_plugin(model: Path, samples: Path, folder: Path) -> str:
    """Make a plan with the ranges of a package, carry it out without the package; return what is wrong."""
    package = folder / "package"
    (package / "thirds-1.0.dist-info").mkdir(parents=True)
    (package / "thirds.py").write_text(PLUGIN)
    (package / "thirds-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: thirds\nVersion: 1.0\n")
    (package / "thirds-1.0.dist-info" / "entry_points.txt").write_text("[onnxq.ranges]\nthirds = thirds:Thirds\n")
    first, again, plan = folder / "plugin.onnx", folder / "unplugged.onnx", str(folder / "plugin.toml")
    made = ("--range", "thirds", "--search", "off", "--plan-out", plan, *UNTIMED)
    wrong = quantized(model, samples, first, *made, path=str(package))
    return wrong or quantized(model, samples, again, "--plan", plan, *UNTIMED) or difference(first, again)


def quantized(model: Path, samples: Path, output: Path, *options: str, path: str = "") -> str:
    """Run the command line with a folder of packages; return the last line of what it says where it fails."""
    command = [sys.executable, "-m", "onnxq", "quantize", str(model), "--calib", str(samples), "-o", str(output)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (path, os.environ.get("PYTHONPATH", ""))))}
    done = subprocess.run([*command, *options], capture_output=True, text=True, env=environment)
    return done.stderr.strip().splitlines()[-1] if done.returncode else ""


def difference(first: Path, again: Path) -> str:
    """Return how two files differ, nothing where they are the same bytes."""
    one, other = first.read_bytes(), again.read_bytes()
    return "" if one == other else f"DIFFERS ({len(one):,} and {len(other):,} bytes)"


if __name__ == "__main__":
    main()
