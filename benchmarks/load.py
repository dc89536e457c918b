"""Whether a machine under full load makes the latency gate refuse a model that is faster, or accept one that is slower.

    python benchmarks/load.py [--model MODEL --data DATA] [--runs N] [--seconds SECONDS]

While as many processes as there are cores do nothing but work, the gate times the int8 model beside the float model,
and the float model beside the int8 model. Before the load begins, the int8 model has to be faster. Prints what each run
saw; any step back of the int8 model and any acceptance of the float model is wrong.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import click

import onnxq
from onnxq.data.samples import evenly, model_inputs, open_samples
from onnxq.evaluation.verification import Timer, verify
from onnxq.ir import load
from onnxq.onnx_api import weightless_model

MODELS = Path(__file__).parents[1] / "models"


def work() -> None:
    """Take a core for as long as the process lives."""
    while True:
        pass


@contextmanager
def full_load() -> Iterator[int]:
    """Keep every core busy, and yield how many there are."""
    cores = len(os.sched_getaffinity(0))
    workers = [multiprocessing.Process(target=work, daemon=True) for _ in range(cores)]
    for worker in workers:
        worker.start()
    try:
        yield cores
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


@click.command()
@click.option("--model", type=Path, default=MODELS / "mobilenet.onnx")
@click.option("--data", type=Path, default=MODELS / "data" / "calib.npz")
@click.option("--runs", default=10)
@click.option("--seconds", default=2.0)
def main(model: Path, data: Path, runs: int, seconds: float) -> None:
    """Time two quantized models of a model beside it, without load and with it."""
    samples = list(evenly(open_samples(data, model_inputs(weightless_model(load(model)))), 8))
    with TemporaryDirectory() as folder:
        quantized = Path(folder) / "int8.onnx"
        budget = onnxq.Budget(search="off", accuracy="off", latency_seconds=0)
        onnxq.quantize(model, samples, quantized, goal=onnxq.Goal(force=True), budget=budget)

        def is_accepted(candidate: Path, reference: Path) -> bool:
            found = verify(reference, candidate, samples, timer=Timer(seconds))
            assert found.latency is not None
            accepted = found.keeps_up and not found.latency.slower
            message = "accepted" if accepted else "stepped back"
            low, high = found.latency.interval
            click.echo(f"{candidate.name}: {found.latency.speed:.2f}x, {low:.2f} to {high:.2f}, {message}")
            return accepted

        if not is_accepted(quantized, model) or is_accepted(model, quantized):
            raise click.ClickException(f"the int8 model of {model} is slower without load too; give another")
        with full_load() as cores:
            click.echo(f"{cores} cores busy, {os.getloadavg()[0]:.1f} processes in the mean of the last minute")
            start = time.perf_counter()
            refused = sum(not is_accepted(quantized, model) for _ in range(runs))
            accepted = sum(is_accepted(model, quantized) for _ in range(runs))
            click.echo(
                f"{refused} wrong steps back and {accepted} wrong acceptances in {runs} runs each, "
                f"{time.perf_counter() - start:.0f} s"
            )


if __name__ == "__main__":
    main()
