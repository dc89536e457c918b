"""Bits of each weight beside one width for all, at equal size: SQNR, and KL divergence where outputs are logits.

    python benchmarks/mixed_precision.py --models DIR --data DIR NAME [NAME ...] [--decoder] [--samples N] [--way WAY]

DIR of models has NAME.onnx. DIR of data has NAME/calib and NAME/eval, as models/zoo.py and models/language.py write
them, or calib.npz and test.npz. The samples of calib choose, and the others judge. ``--decoder`` adds two decoders with
random weights. Those of the second are spread as trained ones are, and its logits come from its embedding. Rows of one
size: int4 in blocks of 32, the same with AWQ and with AWQ and GPTQ, and ``--max-size`` with the bytes of int4, with and
without samples and methods. Then int8, and ``--max-size`` half way to it. The KL divergence is that of the next token's
probabilities from the float model's, in nats, as a mean over all positions.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import size

from onnxq import Budget, Goal, quantize
from onnxq.data.inputs import Sample, model_inputs
from onnxq.data.samples import evenly, open_samples
from onnxq.evaluation.agreement import compare_files
from onnxq.ir import load
from onnxq.numerics.formats import format_named
from onnxq.onnx_api import weightless_model
from onnxq.runtime.sessions import open_session, run

# So that every accuracy method is tried, and every model written.
ALWAYS = Goal(100.0, force=True)
LOGITS = "logits"
DECODER, TIED = "random-decoder", "tied-decoder"
BOTH = "awq,gptq"
# Of the decoders with random weights. Weights of the tied one follow Student's distribution, with scales of their own.
HIDDEN, INNER, VOCABULARY, BLOCKS, TOKENS = 256, 704, 2048, 4, 16
FREEDOM, SPREAD = 6, 0.25


@dataclass(frozen=True)
class Row:
    """One way to quantize a model."""

    model: str
    way: str
    megabytes: float
    share: float
    sqnr: float
    divergence: float | None
    bits: str
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--models", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--decoder", action="store_true", help="add decoders with random weights")
    parser.add_argument("--samples", type=int, default=48, help="samples that judge, at most")
    parser.add_argument("--way", action="append", default=[], help="only rows of this name. Repeatable")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print("| model | way | MB | of float | SQNR, dB | KL, nats | weights of each number of bits | s |")
    print("|---|---|--:|--:|--:|--:|---|--:|")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="onnxq-mixed-") as name:
        folder = Path(name)
        given = [(options.models / f"{one}.onnx", *samples_of(options.data, one)) for one in options.names]
        if options.decoder:
            given += [random_decoder(folder), tied_decoder(folder)]
        for model, calibration, judging in given:
            for row in measured(model, calibration, judging, folder, options.samples, options.way):
                rows.append(row)
                print(line(row), flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


def samples_of(data: Path, name: str) -> tuple[Path, Path]:
    """Return the samples that choose and those that judge."""
    own = data / name
    return (own / "calib", own / "eval") if own.is_dir() else (data / "calib.npz", data / "test.npz")


@dataclass(frozen=True)
class Way:
    """A way to quantize.

    Attributes:
        at: share of the way from the size of int4 to that of int8, which is the largest size; None for no limit.
    """

    name: str
    scheme: str = "int4-block32"
    accuracy: str = "off"
    at: float | None = None
    has_samples: bool = True


WAYS = (
    Way("int4"),
    Way("int4, AWQ", accuracy="awq"),
    Way("int4, AWQ and GPTQ", accuracy=BOTH),
    Way("mixed, no samples", at=0.0, has_samples=False),
    Way("mixed", at=0.0),
    Way("mixed, AWQ and GPTQ", accuracy=BOTH, at=0.0),
    Way("int8", "int8-block32"),
    Way("mixed half way, AWQ and GPTQ", accuracy=BOTH, at=0.5),
)


def measured(
    model: Path, calibration: Path, judging: Path, folder: Path, most: int, ways: Sequence[str]
) -> Iterator[Row]:
    """Yield the rows of a model."""
    others = list(evenly(open_samples(judging, model_inputs(weightless_model(load(model)))), most))
    output, sizes = folder / "quantized.onnx", list[int]()
    for scheme in ("int4-block32", "int8-block32"):
        plain = Budget("off", "off", latency_seconds=0, certificate=False)
        sizes.append(quantize(model, None, output, scheme=scheme, goal=ALWAYS, budget=plain).report.files.bytes)
    for way in (one for one in WAYS if not ways or one.name in ways):
        start = time.perf_counter()
        limit = None if way.at is None else round(sizes[0] + way.at * (sizes[1] - sizes[0]))
        search = "off" if limit is None or not way.has_samples else "fast"
        # A certificate, for which a size keeps bytes free, is left out here.
        budget = Budget(search, way.accuracy, latency_seconds=0, certificate=False)
        goal, given = replace(ALWAYS, max_size=limit), calibration if way.has_samples else None
        report = quantize(model, given, output, scheme=way.scheme, goal=goal, budget=budget).report
        seconds = time.perf_counter() - start
        weights = (weight for one in report.plan.decisions for weight in one.weights)
        bits = Counter(format_named(weight.spec.format).bits for weight in weights)
        yield Row(
            model.stem,
            way.name,
            report.files.bytes / 1e6,
            report.size_ratio,
            compare_files(model, output, others).worst_sqnr,
            divergence(model, output, others),
            ", ".join(f"{count} of {width}" for width, count in sorted(bits.items())),
            seconds,
        )


def divergence(model: Path, other: Path, samples: Sequence[Sample]) -> float | None:
    """Return the mean KL divergence of the probabilities of logits; None if there are none."""
    sessions = [open_session(path) for path in (model, other)]
    names = [one.name for one in sessions[0].get_outputs()]
    if LOGITS not in names:
        return None
    found = []
    for sample in samples:
        one, two = (log_softmax(run(session, sample)[names.index(LOGITS)]) for session in sessions)
        found.append(float((np.exp(one) * (one - two)).sum(-1).mean()))
    return float(np.mean(found))


def log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def random_decoder(folder: Path) -> tuple[Path, Path, Path]:
    """Write a decoder with random weights and its samples."""
    size.HIDDEN, size.INNER, size.VOCABULARY = HIDDEN, INNER, VOCABULARY
    model = folder / f"{DECODER}.onnx"
    size.write_model(model, BLOCKS * size.BLOCK_BYTES, TOKENS)
    return model, *random_tokens(folder / DECODER)


def tied_decoder(folder: Path) -> tuple[Path, Path, Path]:
    """Write a decoder whose logits come from its embedding, with heavy tails and a scale for each weight and row."""
    path, generator = folder / f"{TIED}.onnx", np.random.default_rng(1)
    model = onnx.load(random_decoder(folder)[0])
    for tensor in model.graph.initializer:
        if len(tensor.dims) > 1:
            shape = tuple(tensor.dims)
            scales = np.exp(SPREAD * (generator.normal() + generator.normal(size=(shape[0], 1)))) / np.sqrt(HIDDEN)
            values = generator.standard_t(FREEDOM, shape) * scales
            tensor.CopyFrom(onnx.numpy_helper.from_array(values.astype(np.float32), tensor.name))
    turned = onnx.helper.make_node("Transpose", ["embedding"], ["turned"], "turn", perm=[1, 0])
    model.graph.node[-1].input[1] = turned.output[0]
    model.graph.node.insert(0, turned)
    kept = [tensor for tensor in model.graph.initializer if tensor.name != "head"]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    onnx.save(model, path)
    return path, *random_tokens(folder / TIED)


def random_tokens(data: Path) -> tuple[Path, Path]:
    """Write samples that choose and samples that judge."""
    generator = np.random.default_rng(0)
    for part in ("calib", "eval"):
        (data / part).mkdir(parents=True, exist_ok=True)
        tokens = generator.integers(0, VOCABULARY, (24, 1, TOKENS))
        for place, one in enumerate(tokens):
            np.savez(data / part / f"{place:03}.npz", tokens=one)
    return data / "calib", data / "eval"


def line(row: Row) -> str:
    nats = "" if row.divergence is None else f"{row.divergence:.2e}"
    figures = f"{row.megabytes:.2f} | {row.share:.3f} | {row.sqnr:.1f} | {nats} | {row.bits} | {row.seconds:.0f}"
    return f"| {row.model} | {row.way} | {figures} |"


if __name__ == "__main__":
    main()
