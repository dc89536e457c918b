"""Count how many faults certificates find, and verify certified models in many places.

    python benchmarks/certificates.py --models DIR --data DIR [--only NAME] [--node FOLDER]

DIR holds NAME.onnx, the other DIR NAME/calib; the project's own models/ are always among them. Each model is quantized
and certified. A fault counts if it changes an output on a real sample by more than the certificate tolerates for it.
Faults of the file have a forged digest, so that probes alone have to find them. A place is really wrong if its outputs
on real samples differ by as much, or if its worst sample loses more decibels than the certificate allows. FOLDER holds
node_modules with onnxruntime-node and -web: the checker in JavaScript then looks at the files too, and has to give the
verdict of the one in Python.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import numpy as np
import onnx
from onnx import numpy_helper
from same_bytes import cases

import onnxq
from onnxq.calibration.data import samples_of
from onnxq.certificate import onnxq_verify
from onnxq.certificate.certificate import Certificate, read_certificate, write_certificate
from onnxq.certificate.checkers import write_checkers
from onnxq.certificate.making import CLOSE, MARGIN
from onnxq.data.inputs import Sample
from onnxq.data.samples import evenly
from onnxq.errors import EngineError, OnnxqError
from onnxq.runtime.engine import Engine
from onnxq.runtime.engines import engine_names, open_engine
from onnxq.runtime.node import node_program
from onnxq.runtime.sessions import open_session, output_names, run
from onnxq.system.records import read_record, to_plain

Run = Callable[[dict[str, Any]], dict[str, Any]]
# Samples that a fault is measured on, and a place that is called wrong.
SAMPLES, MORE = 4, 64


@dataclass(frozen=True)
class Result:
    """One fault, or one place where the model runs as it is.

    Attributes:
        change: SQNR of the certified output beside the other one on the worst real sample, in decibels.
        tolerated: SQNR from which on the certificate tolerates a change of that output.
        found: whether the certificate says that it is wrong.
        lost: SQNR beside the float model that its worst real sample has less than the certified model's worst.
        sqnr: of the probes beside the float model, in decibels.
        agrees: whether the checker in JavaScript says the same; None if it did not look.
        fault: why nothing ran.
    """

    model: str
    kind: str
    change: float
    tolerated: float
    found: bool
    lost: float = 0.0
    sqnr: float = 0.0
    agrees: bool | None = None
    fault: str = ""

    @property
    def counts(self) -> bool:
        """Whether the certificate has to find it."""
        return self.change < self.tolerated or self.lost > MARGIN


def opened(model: Path, threads: int = 1, *, optimize: bool = True) -> Run:
    """Return a function that runs a model."""
    session = open_session(model, threads=threads, optimize=optimize)
    names = output_names(session)
    return lambda sample: dict(zip(names, run(session, sample), strict=True))


def installed_engines() -> Iterator[Engine]:
    """Start, one by one, the engines that are installed here and whose arithmetic is their own."""
    for name in set(engine_names()) - {"onnxruntime", "onnx-reference", "python", "ssh"}:
        try:
            engine = open_engine(name)
        except EngineError:
            continue
        yield engine


def flip_bit(proto: onnx.ModelProto, random: np.random.Generator) -> bool:
    """Flip a high bit of a quantized weight."""
    coded = [one for one in proto.graph.initializer if one.data_type in (2, 3) and np.prod(one.dims) > 64]
    if not coded:
        return False
    tensor = coded[int(random.integers(len(coded)))]
    values = numpy_helper.to_array(tensor).copy()
    place = int(random.integers(values.size))
    values.reshape(-1).view(np.uint8)[place] ^= np.uint8(1 << int(random.integers(5, 8)))
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    return True


def double_scale(proto: onnx.ModelProto, random: np.random.Generator) -> bool:
    """Double the scale of one DequantizeLinear."""
    known = {one.name: one for one in proto.graph.initializer}
    readers = [node for node in proto.graph.node if node.op_type == "DequantizeLinear" and node.input[1] in known]
    if not readers:
        return False
    tensor = known[readers[int(random.integers(len(readers)))].input[1]]
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(2), tensor.name))
    return True


def swapped(base: Run) -> Run:
    """Two inputs of one type and shape change places; a single one is turned around."""

    def other(sample: dict[str, Any]) -> dict[str, Any]:
        names = list(sample)
        for first, second in pairwise(names):
            one, two = sample[first], sample[second]
            if one.dtype == two.dtype and one.shape == two.shape and not np.array_equal(one, two):
                return base({**sample, first: two, second: one})
        largest = max(sample, key=lambda name: sample[name].size)
        return base({**sample, largest: np.ascontiguousarray(sample[largest][..., ::-1])})

    return other


def saturating(base: Run) -> Run:
    """Outputs stop at half of their largest magnitude."""

    def clipped(value: Any) -> Any:
        if not isinstance(value, np.ndarray) or value.dtype.kind != "f":
            return value
        most = np.nanmax(np.abs(value), initial=0) / 2
        return np.clip(value, -most, most)

    return lambda sample: {name: clipped(value) for name, value in base(sample).items()}


def stale(base: Run) -> Run:
    """Each run but the first returns the outputs of the run before."""
    kept: list[dict[str, Any]] = []

    def other(sample: dict[str, Any]) -> dict[str, Any]:
        kept.append(base(sample))
        return kept[max(len(kept) - 2, 0)]

    return other


FILES = {"weight bit": flip_bit, "scale": double_scale}
ENGINES = {"swapped input": swapped, "engine saturates": saturating, "old output": stale}


def changes(base: Run, other: Run, samples: Sequence[Sample], names: Sequence[str]) -> dict[str, float]:
    """Return the lowest SQNR of outputs over samples; minus infinite for other shapes."""
    worst = dict.fromkeys(names, np.inf)
    for sample in samples:
        wanted, found = base(dict(sample)), other(dict(sample))
        for name in names:
            same = wanted[name].shape == found[name].shape
            pair = (np.nan_to_num(one[name].astype(np.float64)) for one in (wanted, found))
            worst[name] = min(worst[name], onnxq_verify.decibels(*pair) if same else -np.inf)
    return worst


class Case:
    """A certified model with real samples."""

    def __init__(self, floating: Path, model: Path, samples: Sequence[Sample], node: Path | None) -> None:
        self.name, self.floating, self.model, self.samples, self.node = floating.stem, floating, model, samples, node
        certificate, _ = read_certificate(model)
        assert certificate is not None
        self.certificate: Certificate = certificate
        self.plain = to_plain(certificate)
        self.tolerated = {one.name: min(one.tolerances) for one in certificate.fingerprints if not one.spare}

    def result(self, kind: str, other: Run) -> Result:
        """Run the probes, and real samples beside the certified model: all of them in a place that is called wrong."""
        is_fault = kind in (*FILES, *ENGINES)
        try:
            found = onnxq_verify.judge(self.plain, other)
            samples = list(evenly(self.samples, SAMPLES)) if is_fault else self.samples[: len(found["wrong"]) and None]
            names = list(self.tolerated)
            by_output = changes(opened(self.model), other, samples, names)
            lost = 0.0 if is_fault else self.lost(other, samples)
        except OnnxqError as error:
            return Result(self.name, kind, np.inf, 0.0, found=True, fault=str(error))
        name = min(by_output, key=lambda one: by_output[one] - self.tolerated[one])
        return Result(self.name, kind, by_output[name], self.tolerated[name], not found["right"], lost, found["sqnr"])

    def lost(self, other: Run, samples: Sequence[Sample]) -> float:
        """Return the decibels beside the float model that the worst sample of any output loses."""
        floating, names = opened(self.floating), list(self.tolerated)
        certified, here = (changes(floating, one, samples, names) for one in (opened(self.model), other))
        return max(min(certified[name], CLOSE) - here[name] for name in names)

    def file_fault(self, kind: str, random: np.random.Generator, folder: Path) -> Result | None:
        """Inject a fault into the file, and give it a certificate with the new digest."""
        proto, path = onnx.load(self.model), folder / "faulty.onnx"
        if not FILES[kind](proto, random):
            return None
        onnx.save(proto, path)
        write_certificate(self.certificate, path)
        found = self.result(kind, opened(path))
        if self.node is None:
            return found
        return replace(found, agrees=found.found != self.in_javascript(path, "onnxruntime-node")["right"])

    def engine_fault(self, kind: str) -> Result:
        """Run on an engine that does something wrong."""
        base = opened(self.model)
        return self.result(kind, ENGINES[kind](base))

    def places(self) -> Iterator[Result]:
        """Run with 1 to 4 threads, with and without optimizations, and on every other engine."""
        for optimize in (True, False):
            for threads in (1, 2, 3, 4):
                place = f"onnxruntime, {'' if optimize else 'not '}optimized"
                yield self.result(place, opened(self.model, threads, optimize=optimize))
        for engine in installed_engines():
            with engine:
                try:
                    loaded = engine.load(self.model)
                except OnnxqError as error:
                    yield Result(self.name, engine.version, np.inf, 0.0, found=True, fault=str(error))
                    continue
                for _ in range(2):
                    # Engines are closed one after the other.
                    yield self.result(
                        engine.version,
                        lambda sample: dict(zip(loaded.outputs, loaded.run(sample), strict=True)),  # noqa: B023
                    )
        for package in ("onnxruntime-node", "onnxruntime-web") if self.node is not None else ():
            found = self.in_javascript(self.model, package)
            fault = "" if "sqnr" in found else found["reason"]
            sqnr = float(found.get("sqnr", 0.0))
            yield Result(self.name, package, np.inf, 0.0, not found["right"], sqnr=sqnr, fault=fault)

    def in_javascript(self, path: Path, package: str) -> dict[str, Any]:
        """Return what the checker in JavaScript says of a file."""
        assert self.node is not None
        with TemporaryDirectory() as folder:
            checker = write_checkers(Path(folder))[1]
            command = (str(node_program()), str(checker), str(path.resolve()), package)
            done = subprocess.run(command, cwd=self.node, capture_output=True, text=True, check=False)
        if not done.stdout:
            return {"right": False, "reason": done.stderr.strip().splitlines()[-1] if done.stderr else "it ended"}
        found: dict[str, Any] = json.loads(done.stdout)
        return found


def results(case: Case, faults: int, seed: int) -> Iterator[Result]:
    """Yield faults of all kinds in turn, then clean runs."""
    random = np.random.default_rng(seed)
    with TemporaryDirectory() as folder:
        kinds = list(islice(cycle((*FILES, *FILES, *ENGINES)), faults))
        for kind in (*(one for one in kinds if one in FILES), *(one for one in ENGINES if one in kinds)):
            found = case.file_fault(kind, random, Path(folder)) if kind in FILES else case.engine_fault(kind)
            if found is not None:
                yield found
    yield from case.places()


def print_tables(found: Sequence[Result]) -> None:
    """Print faults by kind, models by place, and what the checkers disagree about."""
    kinds = (*FILES, *ENGINES)
    print("| fault | injected | above the tolerance | found of these | called wrong in all |")
    print("|---|---|---|---|---|")
    for kind in (*kinds, "all"):
        some = [one for one in found if one.kind == kind or (kind == "all" and one.kind in kinds)]
        above = [one for one in some if one.counts]
        told = sum(one.found for one in above), sum(one.found for one in some)
        print(f"| {kind} | {len(some)} | {len(above)} | {told[0]} | {told[1]} |")
    clean = [one for one in found if one.kind not in kinds and not one.fault and not one.counts]
    print(f"\n{len(clean)} right runs, {sum(one.found for one in clean)} of them called wrong\n")
    places = list(dict.fromkeys(one.kind for one in found if one.kind not in kinds))
    print("\n".join((f"| model | {' | '.join(places)} |", "|---" * (len(places) + 1) + "|")))
    for model in dict.fromkeys(one.model for one in found):
        cells = (_cell([one for one in found if (one.model, one.kind) == (model, place)]) for place in places)
        print(f"| {model} | {' | '.join(cells)} |")
    looked = [one.agrees for one in found if one.agrees is not None]
    if looked:
        print(f"\nBoth checkers agree on {sum(looked)} of {len(looked)} faulty files")


def _cell(runs: Sequence[Result]) -> str:
    if not runs or runs[0].fault:
        return "does not run" if runs else ""
    worst = min(runs, key=lambda one: (not one.found, one.sqnr))
    return f"{'wrong' if worst.found else 'right'}, {worst.sqnr:.1f} dB"


@click.command()
@click.option("--models", type=click.Path(exists=True, path_type=Path))
@click.option("--data", type=click.Path(exists=True, path_type=Path))
@click.option("--only", multiple=True, help="Look at these models.")
@click.option("--faults", default=16, show_default=True, help="Faults of each model.")
@click.option("--node", type=click.Path(exists=True, path_type=Path), help="Folder with node_modules.")
@click.option("--save", type=click.Path(path_type=Path), help="Add the results to this file, a JSON object a line.")
def main(
    models: Path | None, data: Path | None, only: tuple[str, ...], faults: int, node: Path | None, save: Path | None
) -> None:
    """Certify models, inject faults, and print the tables; with --save of all results that the file has."""
    found: list[Result] = []
    if save is not None and save.exists():
        found = [read_record(Result, "a result", json.loads(line)) for line in save.read_text().splitlines()]
    budget = onnxq.Budget(search="off", accuracy="off", latency_seconds=0)
    for seed, (path, samples) in enumerate(cases(models, data)):
        if only and path.stem not in only:
            continue
        with TemporaryDirectory() as folder:
            output, given = Path(folder) / "out.onnx", onnxq.Data(samples, limit=16)
            try:
                onnxq.quantize(path, given, output, goal=onnxq.Goal(force=True), budget=budget)
            except onnxq.OnnxqError as error:
                print(f"{path.stem}: {error}")
                continue
            real = list(evenly(samples_of(path, onnxq.Data(samples, limit=MORE)), MORE))
            case = Case(path, output, real, node)
            if not case.tolerated:
                print(f"{path.stem}: {case.certificate.without_probes or 'only labels are compared'}")
                continue
            new = list(results(case, faults, seed))
        for one in new:
            if one.fault or (one.found != one.counts and one.found != (one.kind in (*FILES, *ENGINES))):
                print(one)
        found += new
        if save is not None:
            with save.open("a") as file:
                file.writelines(json.dumps(to_plain(one)) + "\n" for one in new)
    print_tables(found)


if __name__ == "__main__":
    main()
