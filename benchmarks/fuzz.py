"""Feed damaged models to the reader and to the whole of quantize, and count what comes out.

    pip install atheris
    python benchmarks/fuzz.py [--reader N] [--quantize N] [--seed S] [--output FILE]

The reader is driven by atheris, guided by the branches of the package that an input takes, from seeds that hold
a bit of everything. Whatever loads is written again as well. `quantize` gets models with changed bytes and models with
changed fields by turns, in processes bounded to 2 GiB of data and 30 seconds a model. A crash is anything but a result
or an error of onnxq in one line; inputs that crash are kept beside the figures.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

HOSTILE = Path(__file__).parents[1] / "tests" / "hostile"
SECONDS = 30
MEBIBYTES = 2048
MOST_CRASHES = 20
PACKAGES = ("onnxq", "onnx", "onnxruntime", "onnx-graphsurgeon", "numpy", "atheris")


def main() -> None:
    if sys.argv[1:2] == ["read"]:
        read_damaged(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reader", type=int, default=100_000, help="executions of the reader")
    parser.add_argument("--quantize", type=int, default=400, help="executions of quantize")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    options = parser.parse_args()
    kept = options.output.parent if options.output else Path.cwd()
    figures: dict[str, Any] = {
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "packages": {name: version(name) for name in PACKAGES},
        "seed": options.seed,
    }
    with tempfile.TemporaryDirectory(prefix="onnxq-fuzz-") as folder:
        figures["reader"] = fuzz_reader(Path(folder), kept, options.reader, options.seed)
    print(figures["reader"], flush=True)
    with tempfile.TemporaryDirectory(prefix="onnxq-fuzz-") as folder:
        figures["quantize"] = fuzz_quantize(Path(folder), kept, options.quantize, options.seed)
    print(figures["quantize"], flush=True)
    if options.output is not None:
        options.output.write_text(json.dumps(figures, indent=2) + "\n")


# --- the reader ---------------------------------------------------------------------------------------------------


def fuzz_reader(folder: Path, kept: Path, executions: int, seed: int) -> dict[str, Any]:
    """Run the reader in processes that are replaced when they die, and return the counts."""
    corpus = folder / "corpus"
    corpus.mkdir()
    for index, data in enumerate(seeds()):
        (corpus / str(index)).write_bytes(data)
    total: Counter[str] = Counter()
    start = time.perf_counter()
    deaths = 0
    while total["executions"] < executions and deaths < MOST_CRASHES:
        counts = folder / "counts.json"
        counts.unlink(missing_ok=True)
        command = [sys.executable, str(Path(__file__)), "read", str(folder), str(kept)]
        numbers = (executions - total["executions"], seed + deaths)
        done = subprocess.run([*command, *map(str, numbers)], capture_output=True, text=True, check=False)
        if not counts.exists():
            sys.exit(done.stderr)
        total += Counter(json.loads(counts.read_text()))
        if done.returncode:
            deaths += 1
            hung = "timeout" in done.stderr
            total["hangs" if hung else "native crashes"] += 1
            print(done.stderr[-2000:])
    outcomes = ("executions", "loaded and written again", "typed errors", "crashes", "native crashes", "hangs")
    found = {name: total[name] for name in outcomes}
    return {
        **found,
        "inputs that took a new way": len(list(corpus.iterdir())),
        "seconds": round(time.perf_counter() - start),
    }


def seeds() -> Iterator[bytes]:
    """Yield models to start from: a bit of everything, and those made to hurt that are small."""
    bad_models, damaged = hostile_models()
    yield damaged.victim().SerializeToString()
    for build in bad_models.MODELS.values():
        data = build().SerializeToString()
        if len(data) < 1 << 14:
            yield data


def read_damaged(folder: Path, kept: Path, executions: int, seed: int) -> None:
    """Run atheris in this process; it ends the process itself."""
    import atheris  # type: ignore[import-not-found, import-untyped, unused-ignore]
    import onnx
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped, unused-ignore]

    with atheris.instrument_imports(include=["onnxq"]):
        from onnxq.errors import OnnxqError
        from onnxq.ir import load, to_model

    counts: Counter[str] = Counter()
    path = folder / "model.onnx"

    def read(data: bytes) -> None:
        counts["executions"] += 1
        path.write_bytes(data)
        try:
            to_model(load(path))
            counts["loaded and written again"] += 1
        except OnnxqError as error:
            counts["typed errors"] += 1
            if "\n" in str(error):
                keep(data, "several lines")
        except Exception as error:  # noqa: BLE001 - finding them is what this is for
            keep(data, repr(error))
        # A process that dies cannot tell afterwards.
        if counts["executions"] % 500 == 0 or counts["executions"] == executions:
            (folder / "counts.json").write_text(json.dumps(counts))

    def keep(data: bytes, problem: str) -> None:
        counts["crashes"] += 1
        if counts["crashes"] <= MOST_CRASHES:
            (kept / f"fuzz-crash-{seed}-{counts['crashes']}.onnx").write_bytes(data)
            sys.stderr.write(f"{problem}\n")

    def mutate(data: bytes, largest: int, number: int) -> bytes:
        """Change bytes or fields by turns; hardly anything with changed bytes is still a message."""
        model = onnx.ModelProto()
        if number % 2:
            with suppress(DecodeError):
                model.ParseFromString(data)
                changed = with_changed_fields(model, random.Random(number))
                return changed if len(changed) <= largest else data
        mutated: bytes = atheris.Mutate(data, largest)
        return mutated

    bounds = [f"-timeout={SECONDS}", f"-rss_limit_mb={MEBIBYTES}", "-max_len=16384", f"-artifact_prefix={kept}/fuzz-"]
    atheris.Setup(
        [sys.argv[0], f"-runs={executions}", f"-seed={seed}", *bounds, str(folder / "corpus")],
        read,
        custom_mutator=mutate,
    )
    atheris.Fuzz()


# --- quantize -----------------------------------------------------------------------------------------------------


def fuzz_quantize(folder: Path, kept: Path, executions: int, seed: int) -> dict[str, Any]:
    """Quantize damaged models in processes that are replaced when they die, and return the counts."""
    _, damaged = hostile_models()
    victim = damaged.victim()
    data = victim.SerializeToString()
    chance = random.Random(seed)
    mutations = damaged.mutations(data, executions, seed)
    for index in range(executions):
        found = next(mutations) if index % 2 else with_changed_fields(victim, chance)
        (folder / f"{index}.onnx").write_bytes(found)
    start = time.perf_counter()
    waiting = [str(folder / f"{index}.onnx") for index in range(executions)]
    outcomes: dict[str, str] = {}
    while waiting:
        command = [sys.executable, str(HOSTILE / "quantize_each.py"), *waiting]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
        events = [json.loads(line) for line in done.stdout.splitlines()]
        outcomes |= {event["ends"]: event["outcome"] for event in events if "ends" in event}
        if done.returncode:
            died = [event["starts"] for event in events if "starts" in event][-1]
            outcomes[died] = "hang" if "Timeout" in done.stderr else f"native crash: {done.stderr[-500:]}"
        waiting = [path for path in waiting if path not in outcomes]
    total: Counter[str] = Counter({"executions": executions})
    for path, outcome in outcomes.items():
        total[kind := kind_of(outcome)] += 1
        if kind in ("crashes", "native crashes", "hangs"):
            print(outcome)
            (kept / f"fuzz-{seed}-{Path(path).name}").write_bytes(Path(path).read_bytes())
    names = ("executions", "quantized and verified", "typed errors", "crashes", "native crashes", "hangs")
    return {**{name: total[name] for name in names}, "seconds": round(time.perf_counter() - start)}


def kind_of(outcome: str) -> str:
    if outcome == "valid":
        return "quantized and verified"
    if outcome == "hang" or outcome.startswith("native crash"):
        return "hangs" if outcome == "hang" else "native crashes"
    return "typed errors" if re.fullmatch(r"\w+Error: .*", outcome) else "crashes"


def with_changed_fields(model: Any, chance: random.Random) -> bytes:
    """Return a copy with one to four changed fields: numbers, texts, repeated or lost entries, anywhere in it."""
    copy = type(model)()
    copy.CopyFrom(model)
    for _ in range(chance.randint(1, 4)):
        with suppress(ValueError, TypeError):
            change_field(chance.choice(list(messages(copy))), chance)
    return bytes(copy.SerializeToString())


def messages(message: Any) -> Iterator[Any]:
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in value if hasattr(value, "add") else (value,):
                yield from messages(part)


def change_field(message: Any, chance: random.Random) -> None:
    """Change one field of a message to a value that its type allows and its meaning may not."""
    present = message.ListFields()
    if not present:
        return
    field, value = chance.choice(present)
    if hasattr(value, "append") or hasattr(value, "add"):
        kind = chance.choice(("lose", "repeat", "swap", "number"))
        first, second = chance.randrange(len(value)), chance.randrange(len(value))
        if kind == "lose":
            del value[first]
        elif kind == "repeat":
            value.extend([value[first]])
        elif hasattr(value, "add"):
            entries = list(value)
            entries[first], entries[second] = entries[second], entries[first]
            del value[:]
            value.extend(entries)
        elif kind == "swap":
            value[first], value[second] = value[second], value[first]
        else:
            value[first] = changed(value[first], chance)
    elif field.message_type is not None:
        message.ClearField(field.name)
    else:
        setattr(message, field.name, changed(value, chance))


def changed(value: Any, chance: random.Random) -> Any:
    if isinstance(value, bool | int):
        return chance.choice(
            (0, 1, -1, 2, 3, 7, 10, 16, 255, 1 << 20, 1 << 31, 1 << 40, (1 << 63) - 1, -(1 << 63), value + 1)
        )
    if isinstance(value, float):
        return chance.choice((0.0, -1.0, float("nan"), float("inf"), 1e38, 1e-45))
    if isinstance(value, str):
        return chance.choice(("", "x", "w", "y", value + value, value[1:], "\N{SNOWMAN}", "x" * 5000))
    return chance.choice((b"", value[:-1], value + value, chance.randbytes(len(value))))


def hostile_models() -> Any:
    """Return the modules of models that were made to hurt, and of one that is damaged in many ways."""
    sys.path.insert(0, str(HOSTILE.parent))
    from hostile import bad_models, damaged  # type: ignore[import-not-found, unused-ignore]

    return bad_models, damaged


if __name__ == "__main__":
    main()
