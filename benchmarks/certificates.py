"""Count how many faults certificates find, and how often a right run is called wrong.

    python benchmarks/certificates.py --models DIR --data DIR [--only NAME] [--node FOLDER]

DIR holds NAME.onnx, the other DIR NAME/calib; the project's own models/ are always among them. Each model is quantized
and certified. A fault counts if it changes an output on real samples by more than the certificate tolerates. Faults of
the file have a forged digest, so that probes alone have to find them. FOLDER holds node_modules with onnxruntime-node:
the checker in JavaScript then looks at the files too, and has to give the verdict of the one in Python.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from onnxq.certificate.badge import write_checkers
from onnxq.certificate.certificate import Certificate, read_certificate, write_certificate
from onnxq.data.samples import evenly
from onnxq.errors import OnnxqError
from onnxq.runtime.engines import installed_engines
from onnxq.runtime.node import node_program
from onnxq.runtime.sessions import open_session, output_names, run
from onnxq.system.records import read_record, to_plain

Sample = Mapping[str, Any]
Run = Callable[[dict[str, Any]], dict[str, Any]]
SAMPLES = 4


@dataclass(frozen=True)
class Result:
    """One fault or clean run.

    Attributes:
        change: SQNR of the certified output beside the faulty one on real samples; infinite for a clean run.
        tolerated: SQNR from which on the certificate tolerates a change.
        found: whether the certificate says that it is wrong.
        agrees: whether the checker in JavaScript says the same; None if it did not look.
    """

    model: str
    kind: str
    change: float
    tolerated: float
    found: bool
    agrees: bool | None = None


def opened(model: Path, threads: int = 1, *, optimize: bool = True) -> Run:
    """Return a function that runs a model."""
    session = open_session(model, threads=threads, optimize=optimize)
    names = output_names(session)
    return lambda sample: dict(zip(names, run(session, sample), strict=True))


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
    """Each run returns the outputs of the run before."""
    kept: list[dict[str, Any]] = []

    def other(sample: dict[str, Any]) -> dict[str, Any]:
        kept.append(base(sample))
        return kept[max(len(kept) - 2, 0)]

    return other


FILES = {"weight bit": flip_bit, "scale": double_scale}
ENGINES = {"swapped input": swapped, "engine saturates": saturating, "old output": stale}


def change_of(base: Run, other: Run, samples: Sequence[Sample], names: Sequence[str]) -> float:
    """Return the lowest SQNR of the compared outputs over samples; minus infinite for other shapes."""
    worst = np.inf
    for sample in samples:
        wanted, found = base(dict(sample)), other(dict(sample))
        for name in names:
            if not isinstance(wanted[name], np.ndarray) or wanted[name].dtype.kind != "f":
                continue
            same = wanted[name].shape == found[name].shape
            pair = (np.nan_to_num(one[name].astype(np.float64)) for one in (wanted, found))
            worst = min(worst, onnxq_verify.decibels(*pair) if same else -np.inf)
    return float(worst)


class Case:
    """A certified model with real samples."""

    def __init__(self, name: str, model: Path, samples: Sequence[Sample], node: Path | None) -> None:
        self.name, self.model, self.samples, self.node = name, model, samples, node
        certificate, _ = read_certificate(model)
        assert certificate is not None
        self.certificate: Certificate = certificate
        self.plain = to_plain(certificate)
        marks = [one for probe in certificate.probes for one in probe.outputs if not one.labels]
        self.names = sorted({one.name for one in marks})
        self.tolerated = min((one.tolerance for one in marks), default=-np.inf)

    def is_wrong(self, run_one: Run) -> bool:
        """Return the verdict on a function that runs the model."""
        try:
            return not onnxq_verify.judge(self.plain, run_one)["right"]
        except OnnxqError:
            return True

    def file_fault(self, kind: str, random: np.random.Generator, folder: Path) -> Result | None:
        """Inject a fault into the file, and give it a certificate with the new digest."""
        proto, path = onnx.load(self.model), folder / "faulty.onnx"
        if not FILES[kind](proto, random):
            return None
        onnx.save(proto, path)
        write_certificate(self.certificate, path)
        found = self.is_wrong(opened(path))
        agrees = None if self.node is None else found == self._wrong_in_javascript(path)
        change = change_of(opened(self.model), opened(path), self.samples, self.names)
        return Result(self.name, kind, change, self.tolerated, found, agrees)

    def engine_fault(self, kind: str) -> Result:
        """Run on an engine that does something wrong."""
        base, make = opened(self.model), ENGINES[kind]
        change = change_of(base, make(base), self.samples, self.names)
        return Result(self.name, kind, change, self.tolerated, self.is_wrong(make(base)))

    def clean(self) -> Iterator[Result]:
        """Run with 1 to 4 threads, with and without optimizations, and on every other engine."""
        for threads in (1, 2, 3, 4):
            for optimize in (True, False):
                wrong = self.is_wrong(opened(self.model, threads, optimize=optimize))
                yield Result(self.name, f"onnxruntime, optimizations {optimize}", np.inf, self.tolerated, wrong)
        for engine in installed_engines():
            if engine.name in ("onnxruntime", "onnx-reference"):
                continue
            with engine:
                try:
                    loaded = engine.load(self.model)
                except OnnxqError:
                    continue
                for _ in range(2):
                    wrong = self.is_wrong(lambda sample: dict(zip(loaded.outputs, loaded.run(sample), strict=True)))  # noqa: B023
                    yield Result(self.name, engine.version, np.inf, self.tolerated, wrong)

    def _wrong_in_javascript(self, path: Path) -> bool:
        assert self.node is not None
        checker = write_checkers(path.parent)[1]
        command = (str(node_program()), str(checker.resolve()), str(path.resolve()))
        done = subprocess.run(command, cwd=self.node, capture_output=True, text=True, check=False)
        return not json.loads(done.stdout)["right"]


def results(case: Case, faults: int, seed: int) -> Iterator[Result]:
    """Yield faults of all kinds in turn, then clean runs."""
    random = np.random.default_rng(seed)
    with TemporaryDirectory() as folder:
        kinds = list(islice(cycle((*FILES, *FILES, *ENGINES)), faults))
        for kind in (*(one for one in kinds if one in FILES), *(one for one in ENGINES if one in kinds)):
            found = case.file_fault(kind, random, Path(folder)) if kind in FILES else case.engine_fault(kind)
            if found is not None:
                yield found
    yield from case.clean()


def print_table(found: Sequence[Result]) -> None:
    """Print faults by kind and clean runs by place."""
    print("| fault or place | runs | above the tolerance | found of these | called wrong in all |")
    print("|---|---|---|---|---|")
    for kind in dict.fromkeys(one.kind for one in found):
        some = [one for one in found if one.kind == kind]
        above = [one for one in some if one.change < one.tolerated]
        told = sum(one.found for one in above), sum(one.found for one in some)
        print(f"| {kind} | {len(some)} | {len(above)} | {told[0]} | {told[1]} |")
    looked = [one.agrees for one in found if one.agrees is not None]
    if looked:
        print(f"\nBoth checkers agree on {sum(looked)} of {len(looked)} files")


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
    """Certify models, inject faults, and print the table; with --save of all results that the file has."""
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
            case = Case(path.stem, output, list(evenly(samples_of(path, given), SAMPLES)), node)
            if not case.names:
                print(f"{path.stem}: {case.certificate.without_probes or 'only labels are compared'}")
                continue
            new = list(results(case, faults, seed))
        wrong = [one for one in new if one.change == np.inf and one.found]
        missed = [one for one in new if one.change < one.tolerated and not one.found]
        for one in (*wrong, *missed):
            print(f"{'called wrong' if one in wrong else 'missed'}: {one}")
        found += new
        if save is not None:
            with save.open("a") as file:
                file.writelines(json.dumps(to_plain(one)) + "\n" for one in new)
    print_table(found)


if __name__ == "__main__":
    main()
