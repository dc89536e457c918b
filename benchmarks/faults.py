"""Kill, starve and lock out `onnxq quantize`, and look at what is left.

    python benchmarks/faults.py [--kills N] [--seed S] [--output FILE]

A small trained model is quantized over an old output again and again. Each run is killed by SIGKILL at a random moment
between its start and its usual end, half of them with weights as external data. Afterwards the output has to be the
old model or the new one, whole, with the external data that belongs to it; a next run has to succeed and to leave
nothing else. Then the command is run with outputs that cannot be written: each has to end with one sentence and exit
code 2, the old output untouched and nothing beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

from onnxq.system.publish import remove_abandoned

MODELS = Path(__file__).parents[1] / "models"
SAMPLES = 8
# Each gives the same model every time: with a search, latency may not decide. Together they pass through every phase.
PRESETS = {
    "int8-per-tensor": ("--preset", "int8-per-tensor", "--latency-seconds", "0"),
    "int8": ("--preset", "int8", "--latency-seconds", "0.5", "--search", "off"),
}
# Root may write anywhere unless it gives this up.
UNPRIVILEGED = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")
FULL_FOLDERS = (8 << 10, 16 << 10)
FULL_DISKS = (4 << 10, 300 << 10, 500 << 10, 600 << 10)


@dataclass(frozen=True)
class Place:
    """A folder with a float model, samples, and the folder of the output.

    Attributes:
        root: the folder.
        external: whether weights lie beside the models.
    """

    root: Path
    external: bool

    @property
    def output(self) -> Path:
        return self.root / "output" / "model.onnx"

    def command(self, *options: str, output: Path | None = None) -> list[str]:
        files = [
            str(self.root / "float.onnx"),
            "--calib",
            str(self.root / "samples.npz"),
            "-o",
            str(output or self.output),
        ]
        return [sys.executable, "-m", "onnxq", "quantize", *files, "--force", *options]

    def environment(self) -> dict[str, str]:
        return {**os.environ, "TMPDIR": str(self.root / "temporary")}

    def content(self) -> tuple[bytes, ...] | None:
        """Return the bytes of the output and of its external data; None while there is no output."""
        files = [path for path in (self.output, self.output.with_name("model.onnx.data")) if path.exists()]
        return tuple(path.read_bytes() for path in files) if self.output.exists() else None

    def left_over(self) -> list[str]:
        expected = {"model.onnx", "model.onnx.data"}
        return sorted(path.name for path in self.output.parent.iterdir() if path.name not in expected)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    options = parser.parse_args()
    figures: dict[str, object] = {"kills": 0}
    for external in (False, True):
        with prepared(external) as place:
            found = kill_often(place, options.kills // 2, random.Random(options.seed + external))
            figures["external data" if external else "one file"] = found
            figures["kills"] = int(str(figures["kills"])) + options.kills // 2
            print(
                f"killed {options.kills // 2} times, {'external data' if external else 'one file'}: {found}", flush=True
            )
    with prepared(True) as place:
        figures["two at once"] = run_two_at_once(place)
        print(f"two at once: {figures['two at once']}", flush=True)
    with prepared(False) as place:
        figures["refusals"] = refusals = refuse_all(place)
        for case, sentence in refusals.items():
            print(f"{case}: {sentence}", flush=True)
    if options.output is not None:
        options.output.write_text(json.dumps(figures, indent=2) + "\n")


@contextmanager
def prepared(external: bool) -> Iterator[Place]:
    with tempfile.TemporaryDirectory(prefix="onnxq-faults-") as name:
        place = Place(Path(name), external)
        for folder in (place.output.parent, place.root / "temporary"):
            folder.mkdir()
        model = onnx.load(MODELS / "mobilenet.onnx")
        onnx.save(
            model, place.root / "float.onnx", save_as_external_data=external, location="float.data", size_threshold=0
        )
        with np.load(MODELS / "data" / "calib.npz") as samples:
            np.savez(place.root / "samples.npz", **{name: values[:SAMPLES] for name, values in samples.items()})
        yield place


# --- kills --------------------------------------------------------------------------------------------------------


def kill_often(place: Place, kills: int, chance: random.Random) -> dict[str, int]:
    """Kill runs over an old output, by turns of two presets so that old and new differ, and count what is left."""
    whole: dict[str, tuple[bytes, ...]] = {}
    seconds: dict[str, float] = {}
    for preset, options in PRESETS.items():
        start = time.perf_counter()
        check(subprocess.run(place.command(*options), capture_output=True, env=place.environment(), check=False))
        seconds[preset] = time.perf_counter() - start
        whole[preset] = expect(place.content())
    counts: Counter[str] = Counter()
    killed = 0
    while killed < kills:
        remove_abandoned(place.output.parent)
        old = place.content()
        preset = next(name for name, content in whole.items() if content != old)
        # In a session of its own, so that both of its processes are killed.
        process = subprocess.Popen(
            place.command(*PRESETS[preset]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=place.environment(),
            start_new_session=True,
        )
        time.sleep(chance.uniform(0, 1.2 * seconds[preset]))
        ended = process.poll() is not None
        if not ended:
            os.killpg(process.pid, signal.SIGKILL)
            killed += 1
        process.wait()
        counts["killed " + ("too late, not counted" if ended else phase(place))] += 1
        found = place.content()
        counts[verifier(found, old, whole[preset])] += 1
        if found is not None:
            onnxruntime.InferenceSession(place.output, providers=["CPUExecutionProvider"])
    check(subprocess.run(place.command(), capture_output=True, env=place.environment(), check=False))
    counts["files left after the next run"] = len(place.left_over())
    counts["temporary files left after the next run"] = 0
    for name in temporaries(place):
        counts["temporary files left after the next run"] += 1
        counts[f"left: {name}"] += 1
    return dict(counts)


def phase(place: Place) -> str:
    """Say how far a killed run was, from the files in its staging folder."""
    files = {path.name for path in place.output.parent.glob(".onnxq-*/*")}
    if not files:
        return "before the first file"
    if "prepared.onnx" not in files:
        return "in preparation"
    if "model.onnx" in files:
        return "in verification"
    return "in search" if "candidate.onnx" in files else "in calibration"


def verifier(found: tuple[bytes, ...] | None, old: tuple[bytes, ...] | None, new: tuple[bytes, ...]) -> str:
    if found is None:
        return "no output"
    if found in (old, new):
        return "the old output" if found == old else "the new output"
    known = {part for content in (old or (), new) for part in content}
    return "A MIXTURE" if known.issuperset(found) else "ANOTHER MODEL"


def temporaries(place: Place) -> list[str]:
    # onnxruntime leaves the name of its session in .ses as soon as it is imported.
    return [path.name for path in (place.root / "temporary").iterdir() if path.name != ".ses"]


def run_two_at_once(place: Place, rounds: int = 6) -> dict[str, int]:
    """Write two models to one output at the same time; the pair that is left has to be one of them."""
    whole = []
    for options in PRESETS.values():
        check(subprocess.run(place.command(*options), capture_output=True, env=place.environment(), check=False))
        whole.append(expect(place.content()))
    counts: Counter[str] = Counter()
    for _ in range(rounds):
        both = [
            subprocess.Popen(
                place.command(*options),
                stderr=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=place.environment(),
            )
            for options in PRESETS.values()
        ]
        quantized = [process.wait() for process in both]
        counts["both ended well" if quantized == [0, 0] else f"ended with {quantized}"] += 1
        found = verifier(place.content(), *whole)
        counts[{"the old output": "the first's model", "the new output": "the second's model"}.get(found, found)] += 1
        counts["files left"] += len(place.left_over())
    return dict(counts)


def expect(content: tuple[bytes, ...] | None) -> tuple[bytes, ...]:
    assert content is not None, "the run before has written it"
    return content


def check(done: subprocess.CompletedProcess[bytes]) -> None:
    if done.returncode:
        sys.exit(f"{' '.join(done.args)} ended with {done.returncode}:\n{done.stderr.decode()}")


# --- places that cannot be written --------------------------------------------------------------------------------


def refuse_all(place: Place) -> dict[str, str]:
    """Run the command where it cannot write, and return the sentence of each case."""
    place.output.write_bytes(b"old")
    cases: dict[str, Callable[[Place], str]] = {
        "files above 100 KiB refused": lambda place: refused(place, limit=100 << 10),
        "the output is a folder": lambda place: refused(place, output=place.output.parent),
        "the folder is missing": lambda place: refused(place, output=place.root / "missing" / "model.onnx"),
        "the output is a device": lambda place: refused(place, output=Path("/dev/null")),
        "permission denied": locked_out,
    }
    if os.geteuid() == 0:
        cases |= {"read-only file system": read_only}
        cases |= {f"a disk of {size >> 10} KiB": partial(full_disk, size=size) for size in FULL_DISKS}
        cases |= {
            f"a temporary folder of {size >> 10} KiB": partial(full_temporary, size=size) for size in FULL_FOLDERS
        }
    return {case: run(place) for case, run in cases.items()}


def refused(
    place: Place,
    *,
    output: Path | None = None,
    limit: int | None = None,
    before: tuple[str, ...] = (),
    temporary: Path | None = None,
) -> str:
    """Run the command, check that it ends as bad input does and leaves nothing, and return its sentence."""

    def bound() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    target = output or place.output
    there = listing(target.parent)
    done = subprocess.run(
        [*before, *place.command(output=output)],
        capture_output=True,
        text=True,
        env={**place.environment(), **({} if temporary is None else {"TMPDIR": str(temporary)})},
        check=False,
        preexec_fn=bound,
    )
    lines = done.stderr.strip().splitlines()
    if done.returncode != 2 or not lines or not lines[-1].startswith("onnxq: "):
        sys.exit(f"ended with {done.returncode} instead of 2:\n{done.stderr}")
    if listing(target.parent) != there:
        sys.exit(f"{target.parent} held {there} before and {listing(target.parent)} afterwards")
    return lines[-1].replace(str(place.root), "")


def listing(folder: Path) -> dict[str, int]:
    if not folder.is_dir() or folder == Path("/dev"):
        return {}
    return {path.name: path.stat().st_size for path in folder.iterdir()}


def locked_out(place: Place) -> str:
    place.output.parent.chmod(0o555)
    try:
        return refused(place, before=() if os.geteuid() else UNPRIVILEGED)
    finally:
        place.output.parent.chmod(0o755)


def read_only(place: Place) -> str:
    with mounted(place, "size=4m") as folder:
        subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
        return refused(place, output=folder / "model.onnx")


def full_disk(place: Place, size: int) -> str:
    with mounted(place, f"size={size}") as folder:
        return refused(place, output=folder / "model.onnx")


def full_temporary(place: Place, size: int) -> str:
    with mounted(place, f"size={size}") as folder:
        return refused(place, temporary=folder)


@contextmanager
def mounted(place: Place, options: str) -> Iterator[Path]:
    folder = place.root / "mounted"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
