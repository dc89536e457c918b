"""Choose bits by SQNR, which is what onnxq does, and by KL divergence of the next token's probabilities, at equal size.

    python benchmarks/divergence.py --models DIR --data DIR [NAME ...] [--decoder]

Models, data and ``--decoder`` are those of mixed_precision.py. Each choice is made on three halves of the samples of
calib, and the others judge: KL divergence in nats, as the mean and the range of the three. Sizes are given from that of
int4 in blocks of 32 (0) to that of int8 (1). A ratio below 1 is in favor of KL divergence.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import mixed_precision as mixed
import numpy as np
import numpy.typing as npt

from onnxq import Budget, quantize
from onnxq.data.inputs import Sample, model_inputs
from onnxq.data.samples import evenly, open_samples
from onnxq.ir import load
from onnxq.onnx_api import weightless_model

SHARES = (-0.15, 0.0, 0.25, 0.5)
CHOICES = 3
MOST = 48
LEAST = 1e-30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--models", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--decoder", action="store_true", help="add decoders with random weights")
    options = parser.parse_args()
    print("| model | size | MB | chosen by SQNR | by KL divergence | ratio |\n|---|--:|--:|---|---|--:|")
    with tempfile.TemporaryDirectory(prefix="onnxq-divergence-") as name:
        folder = Path(name)
        given = [(options.models / f"{one}.onnx", *mixed.samples_of(options.data, one)) for one in options.names]
        if options.decoder:
            given += [mixed.random_decoder(folder), mixed.tied_decoder(folder)]
        for model, calibration, judging in given:
            compare(model, calibration, judging, folder)


def compare(model: Path, calibration: Path, judging: Path, folder: Path) -> None:
    """Print the rows of a model."""
    inputs, output = model_inputs(weightless_model(load(model))), folder / "quantized.onnx"
    choosing, others = (open_samples(one, inputs) for one in (calibration, judging))
    judges = list(evenly(others, MOST))
    budget = Budget("off", "off", latency_seconds=0, certificate=False)
    small, large = (
        quantize(model, None, output, scheme=scheme, goal=mixed.ALWAYS, budget=budget).report.files.bytes
        for scheme in ("int4-block32", "int8-block32")
    )
    for share in SHARES:
        goal = replace(mixed.ALWAYS, max_size=round(small + share * (large - small)))
        found: dict[bool, list[float]] = {False: [], True: []}
        for seed in range(CHOICES):
            order = np.random.default_rng(seed).permutation(len(choosing))[: len(choosing) // 2]
            samples: list[Sample] = [choosing[int(place)] for place in sorted(order)]
            for by_divergence, nats in found.items():
                with choosing_by_divergence() if by_divergence else nullcontext():
                    quantize(
                        model, samples, output, scheme="int4-block32", goal=goal, budget=replace(budget, search="fast")
                    )
                nats.append(mixed.divergence(model, output, judges) or 0.0)
        cells = " | ".join(f"{np.mean(nats):.2e} ({min(nats):.2e} to {max(nats):.2e})" for nats in found.values())
        ratio = np.mean(found[True]) / np.mean(found[False])
        print(f"| {model.stem} | {share:g} | {output.stat().st_size / 1e6:.2f} | {cells} | {ratio:.2f} |", flush=True)


def divergences(pairs: Sequence[tuple[Sequence[Any], Sequence[Any]]]) -> npt.NDArray[np.float64]:
    """Return each sample's part of the mean KL divergence, in the place of its noise-to-signal ratio."""
    found = []
    for expected, given in pairs:
        one, two = (mixed.log_softmax(np.asarray(outputs[0])) for outputs in (expected, given))
        found.append([max(float((np.exp(one) * (one - two)).sum(-1).mean()), 0.0) / len(pairs)])
    return np.array(found)


@contextmanager
def choosing_by_divergence() -> Iterator[None]:
    """Let the choice of bits measure divergences."""

    def decibels(evaluator: Any, plan: Any, config: Any) -> float:
        return -10 * math.log10(evaluator._cached(divergences, plan, config).sum() + LEAST)

    with (
        mock.patch("onnxq.search.sensitivity.nsr_by_sample", divergences),
        mock.patch("onnxq.search.evaluator.PlanEvaluator.sqnr", decibels),
    ):
        yield


if __name__ == "__main__":
    main()
