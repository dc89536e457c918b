"""Quantize every operator case and every small model that onnx ships, and count what comes out.

    python benchmarks/coverage.py [--json FILE] [--jobs N] [--scheme NAME] [--show OUTCOME] [NAME ...]

Each case is quantized with default options on data made from its inputs. The node cases take everything as an input, so
they run a second time with all inputs but the first as initializers, and a third time so and between two matrix
products, where integers reach the node. Whatever is written is judged here once more, by onnx's checker and by
onnxruntime beside the float model. A case runs in a process that may die without harm to others.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import re
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnxq.ir.versions import NEWEST_IR_VERSION, NEWEST_OPSET

# Anything that imports onnxruntime is imported in the children only: its threads do not survive a fork.

Values = Mapping[str, Any]
"""Arrays by input; a list for a sequence, None for an absent optional."""

GATE = 20.0
TIMEOUT = 120.0
# Seconds for comparing latency: little, but enough to make the search measure every case as it does by default.
TIMED = 0.01
LONGEST_SENTENCE = 700
GENERATED = 4


class Outcome(StrEnum):
    """What became of a case; the last five should never happen."""

    VALID = "valid"
    NOTHING = "left alone: nothing to quantize"
    REFUSED = "refused with a sentence"
    FLOAT_FAILS = "refused: onnxruntime does not run the float model"
    FIDELITY = "refused: below the required accuracy"
    RAMBLING = "refused with more than one sentence"
    CRASH = "crash"
    TIMEOUT = "no answer in time"
    INVALID = "written, but not a valid model"
    BREAKAGE = "written, but numerically broken"


BAD = (Outcome.RAMBLING, Outcome.CRASH, Outcome.TIMEOUT, Outcome.INVALID, Outcome.BREAKAGE)


@dataclass(frozen=True)
class Case:
    """A model with the samples to calibrate it on."""

    group: str
    name: str
    model: ModelProto
    samples: tuple[Values, ...]
    first_output: Any = None


@dataclass(frozen=True)
class Result:
    """What came out of a case."""

    group: str
    name: str
    outcome: Outcome
    detail: str = ""
    sqnr: float | None = None
    seconds: float = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--scheme", default="int8")
    parser.add_argument("--show", action="append", default=[], metavar="OUTCOME", help="also list cases that ended so")
    parser.add_argument("names", nargs="*", help="parts of the names of the cases to run")
    options = parser.parse_args()
    cases = [case for case in all_cases() if not options.names or any(name in case.name for name in options.names)]
    if not cases:
        sys.exit("there are no such cases")
    start = time.perf_counter()
    results = run_all(cases, options.scheme, options.jobs)
    print(f"onnxq {_versions()}, scheme {options.scheme}\n")
    print(table(results))
    print(f"\n{len(results)} cases in {time.perf_counter() - start:.0f} s")
    print("\n" + refusals(results))
    shown = {*BAD, *options.show}
    for result in results:
        if result.outcome in shown:
            print(f"\n- {result.group} {result.name}: {result.outcome}: {result.detail}")
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    if any(result.outcome in BAD for result in results):
        sys.exit(1)


# --- the cases ----------------------------------------------------------------------------------------------------


def all_cases() -> list[Case]:
    nodes = list(node_cases())
    constant = [with_constants(case) for case in nodes]
    return [*nodes, *constant, *(between_products(case) for case in constant), *shipped_cases()]


def node_cases() -> Iterator[Case]:
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = collect_testcases(None)
    for case in sorted(found, key=lambda case: case.name):
        assert case.model is not None, "node cases hold their model"
        assert case.data_sets is not None, "and their data"
        names = [info.name for info in case.model.graph.input]
        samples = tuple(dict(zip(names, map(_array, inputs), strict=False)) for inputs, _ in case.data_sets)
        first_output = case.data_sets[0][1][0] if case.data_sets[0][1] else None
        yield Case("node", case.name, case.model, samples, first_output)


def _array(value: Any) -> Any:
    """Return arrays where a case holds numbers, or tensors of types that numpy lacks."""
    if isinstance(value, TensorProto):
        return numpy_helper.to_array(value)
    return np.asarray(value) if isinstance(value, np.generic) else value


def with_constants(case: Case) -> Case:
    """Return the case with all inputs but the first as initializers, where they are tensors."""
    model = ModelProto()
    model.CopyFrom(case.model)
    first, others = model.graph.input[:1], model.graph.input[1:]
    values = case.samples[0]
    stored = [info.name for info in others if isinstance(values.get(info.name), np.ndarray)]
    model.graph.initializer.extend(numpy_helper.from_array(values[name], name) for name in stored)
    kept = [*first, *(info for info in others if info.name not in stored)]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    # Initializers that are no inputs came with 4; some cases bear versions that onnxruntime does not know yet.
    model.ir_version = min(max(model.ir_version, 4), NEWEST_IR_VERSION)
    for entry in model.opset_import:
        if entry.domain in ("", "ai.onnx"):
            entry.version = min(entry.version, NEWEST_OPSET)
    wanted = {info.name for info in kept}
    samples = tuple({name: value for name, value in sample.items() if name in wanted} for sample in case.samples)
    return Case("node, weights constant", case.name, model, samples, case.first_output)


def between_products(case: Case) -> Case:
    """Return the case with a matrix product before its first input and one behind its first output.

    Each is close to the identity, so that values stay where the node is defined. Where neither end takes one, a product
    on an input of its own stands beside the node.
    """
    model = ModelProto()
    model.CopyFrom(case.model)
    graph, samples = model.graph, case.samples
    first = graph.input[0].name if graph.input else ""
    before = bool(samples) and first in samples[0] and _multiplies(samples[0][first])
    if before:
        columns = samples[0][first].shape[-1]
        _rename_input(graph, first, "product.before")
        graph.node.insert(0, helper.make_node("MatMul", [first, "product.weight"], ["product.before"]))
        graph.initializer.append(_weight(columns, "product.weight"))
    if behind := _multiplies(case.first_output):
        name = graph.output[0].name
        graph.node.append(helper.make_node("MatMul", [name, "product.second_weight"], ["product.behind"]))
        graph.initializer.append(_weight(case.first_output.shape[-1], "product.second_weight"))
        graph.output.append(helper.make_tensor_value_info("product.behind", TensorProto.FLOAT, None))
    if not before and not behind:
        graph.input.append(helper.make_tensor_value_info("product.x", TensorProto.FLOAT, [4, 16]))
        graph.output.append(helper.make_tensor_value_info("product.y", TensorProto.FLOAT, [4, 16]))
        graph.node.append(helper.make_node("MatMul", ["product.x", "product.weight"], ["product.y"]))
        graph.initializer.append(_weight(16, "product.weight"))
        values = np.random.default_rng(0).standard_normal((4, 16), np.float32)
        samples = tuple({**sample, "product.x": values} for sample in samples)
    if not any(entry.domain in ("", "ai.onnx") for entry in model.opset_import):
        model.opset_import.add(domain="", version=17)
    return Case("node between products", case.name, model, samples)


def _multiplies(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == np.float32 and value.ndim > 1 and value.size > 0


def _rename_input(graph: onnx.GraphProto, old: str, new: str) -> None:
    """Let nodes and bodies read another tensor."""
    for node in graph.node:
        node.input[:] = [new if name == old else name for name in node.input]
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _rename_input(attribute.g, old, new)


def _weight(columns: int, name: str) -> TensorProto:
    nsr = np.random.default_rng(0).random((columns, columns), np.float32)
    return numpy_helper.from_array(np.eye(columns, dtype=np.float32) + nsr / (100 * columns), name)


def shipped_cases() -> Iterator[Case]:
    data = Path(onnx.__file__).parent / "backend" / "test" / "data"
    for folder in ("simple", "pytorch-converted", "pytorch-operator"):
        for path in sorted(data.glob(f"{folder}/*/model.onnx")):
            model = onnx.load(path)
            sets = sorted(path.parent.glob("test_data_set_*"))
            yield Case(folder, path.parent.name, model, tuple(_read_inputs(model, one) for one in sets))
    for path in sorted(data.glob("light/*.onnx")):
        model = onnx.load(path)
        yield Case("light", path.stem, model, tuple(_generated(model, seed) for seed in range(GENERATED)))


def _fed(model: ModelProto) -> list[onnx.ValueInfoProto]:
    stored = {tensor.name for tensor in model.graph.initializer}
    return [info for info in model.graph.input if info.name not in stored]


def _read_inputs(model: ModelProto, folder: Path) -> Values:
    values: dict[str, Any] = {}
    for index, info in enumerate(_fed(model)):
        data = (folder / f"input_{index}.pb").read_bytes()
        if info.type.WhichOneof("value") == "tensor_type":
            values[info.name] = numpy_helper.to_array(TensorProto.FromString(data))
        else:
            values[info.name] = numpy_helper.to_list(onnx.SequenceProto.FromString(data))
    return values


def _generated(model: ModelProto, seed: int) -> Values:
    generator = np.random.default_rng(seed)
    return {
        info.name: generator.standard_normal([dim.dim_value for dim in info.type.tensor_type.shape.dim]).astype("f")
        for info in _fed(model)
    }


# --- one case -----------------------------------------------------------------------------------------------------


def verifier(case: Case, scheme: str) -> Result:
    """Quantize a case and judge what was written."""
    import onnxq
    from onnxq.errors import ModelError, OnnxqError
    from onnxq.report import AccuracyError

    def ended(outcome: Outcome, detail: str = "", sqnr: float | None = None) -> Result:
        return Result(case.group, case.name, outcome, detail, sqnr)

    with tempfile.TemporaryDirectory(prefix="coverage-") as folder:
        source, output = Path(folder) / "float.onnx", Path(folder) / "quantized.onnx"
        source.write_bytes(case.model.SerializeToString())
        try:
            onnxq.quantize(
                source,
                [dict(sample) for sample in case.samples],
                output,
                scheme=scheme,
                budget=onnxq.Budget(latency_seconds=TIMED),
            )
        except OnnxqError as error:
            sentence = str(error).replace(folder, "")
            if "\n" in sentence or len(sentence) > LONGEST_SENTENCE or output.exists():
                return ended(Outcome.RAMBLING, sentence)
            if isinstance(error, ModelError) and ("nothing to quantize" in sentence or "worth quantizing" in sentence):
                return ended(Outcome.NOTHING, sentence)
            if isinstance(error, AccuracyError):
                return ended(Outcome.FIDELITY, sentence)
            return ended(Outcome.REFUSED if _outputs(source, case.samples) else Outcome.FLOAT_FAILS, sentence)
        except Exception:  # noqa: BLE001 - finding them is what this is for
            return ended(Outcome.CRASH, traceback.format_exc())
        try:
            onnx.checker.check_model(output, full_check=True)
        except Exception as error:  # noqa: BLE001 - whatever the checker says
            try:
                onnx.checker.check_model(source, full_check=True)
            except Exception:  # noqa: BLE001
                return ended(Outcome.VALID, "the checker refuses the float model, too")
            return ended(Outcome.INVALID, str(error))
        expected, found = _outputs(source, case.samples), _outputs(output, case.samples)
        if expected is None or found is None:
            return ended(Outcome.INVALID, "onnxruntime does not run it")
        sqnr = min((_sqnr(one, other) for one, other in zip(expected, found, strict=True)), default=math.inf)
        return ended(Outcome.VALID if sqnr >= GATE else Outcome.BREAKAGE, "", sqnr)


def _outputs(path: Path, samples: Sequence[Values]) -> list[Any] | None:
    """Return all outputs of all samples, sequences flattened, or None when onnxruntime refuses."""
    from onnxq.runtime.sessions import open_session, run

    try:
        session = open_session(path)
        return [value for sample in samples for output in run(session, sample) for value in _flat(output)]
    except Exception:  # noqa: BLE001 - its exceptions have no common base
        return None


def _flat(value: Any) -> list[Any]:
    return [one for item in value for one in _flat(item)] if isinstance(value, list) else [value]


def _sqnr(expected: Any, found: Any) -> float:
    """Return the decibels of one output; plus or minus infinity where there is nothing to measure."""
    if not isinstance(expected, np.ndarray) or expected.dtype.kind not in "fV":
        return math.inf if np.array_equal(expected, found) else -math.inf
    one, other = expected.astype(np.float64), found.astype(np.float64)
    if one.shape != other.shape:
        return -math.inf
    usable = np.isfinite(one)
    if not np.isfinite(other[usable]).all():
        return -math.inf
    nsr, signal = np.square(one[usable] - other[usable]).sum(), np.square(one[usable]).sum()
    return math.inf if nsr == 0 else float(10 * np.log10(signal / nsr)) if signal else -math.inf


# --- many cases ---------------------------------------------------------------------------------------------------


def run_all(cases: Sequence[Case], scheme: str, jobs: int) -> list[Result]:
    """Judge every case in one of ``jobs`` processes, which are replaced when they die or take too long."""
    waiting: SimpleQueue[int] = SimpleQueue()
    for index in range(len(cases)):
        waiting.put(index)
    results: dict[int, Result] = {}
    forking = threading.Lock()
    threads = [threading.Thread(target=_serve, args=(cases, scheme, waiting, results, forking)) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[index] for index in range(len(cases))]


def _serve(
    cases: Sequence[Case],
    scheme: str,
    waiting: SimpleQueue[int],
    results: dict[int, Result],
    forking: threading.Lock,
) -> None:
    fork = multiprocessing.get_context("fork")
    worker: Any = None
    pipe: Any = None
    while True:
        try:
            index = waiting.get_nowait()
        except Empty:
            break
        if worker is None:
            # A process forked meanwhile would hold this pipe open, and the end of this one would go unnoticed.
            with forking:
                pipe, theirs = fork.Pipe()
                worker = fork.Process(target=_work, args=(cases, scheme, theirs), daemon=True)
                worker.start()
                theirs.close()
        start = time.perf_counter()
        pipe.send(index)
        try:
            result = pipe.recv() if pipe.poll(TIMEOUT) else None
        except EOFError:
            worker.join()
            result = _ended(cases[index], Outcome.CRASH, f"the process died with exit code {worker.exitcode}")
            worker = None
        if result is None:
            worker.kill()
            worker.join()
            worker = None
            result = _ended(cases[index], Outcome.TIMEOUT, f"none in {TIMEOUT:g} s")
        results[index] = Result(**{**vars(result), "seconds": time.perf_counter() - start})
    if worker is not None:
        pipe.send(-1)
        worker.join()


def _ended(case: Case, outcome: Outcome, detail: str) -> Result:
    return Result(case.group, case.name, outcome, detail)


def _work(cases: Sequence[Case], scheme: str, pipe: Connection) -> None:
    while (index := pipe.recv()) >= 0:
        pipe.send(verifier(cases[index], scheme))


# --- what is printed ----------------------------------------------------------------------------------------------


def table(results: Sequence[Result]) -> str:
    groups = list(dict.fromkeys(result.group for result in results))
    counts = Counter((result.outcome, result.group) for result in results)
    lines = ["| outcome | " + " | ".join(groups) + " | all |", "|---|" + "---:|" * (len(groups) + 1)]
    for outcome in Outcome:
        row = [counts[outcome, group] for group in groups]
        lines.append(f"| {outcome} | " + " | ".join(map(str, [*row, sum(row)])) + " |")
    return "\n".join(lines)


def refusals(results: Sequence[Result]) -> str:
    """Return how often each refusal was given, names and numbers left out."""
    refused = (Outcome.REFUSED, Outcome.FLOAT_FAILS, Outcome.FIDELITY)
    counts = Counter(_kind(result.detail) for result in results if result.outcome in refused)
    return "\n".join(["| refusal | cases |", "|---|---:|", *(f"| {kind} | {n} |" for kind, n in counts.most_common())])


def _kind(sentence: str) -> str:
    sentence = re.sub(r"'[^']*'|\"[^\"]*\"|\[[^\]]*\]|/\S*\.onnx|-?\d+(\.\d+)?", "…", sentence)
    return sentence.replace("|", "/")[:110]


def _versions() -> str:
    from importlib.metadata import version

    return ", ".join([version("onnxq"), *(f"{name} {version(name)}" for name in ("onnx", "onnxruntime"))])


if __name__ == "__main__":
    main()
