"""Whether a machine under full load makes the latency gate take a model for slower that is not.

    python benchmarks/load.py [--model MODEL --data DATA] [--runs N] [--seconds SECONDS]

While as many processes as there are cores do nothing but work, the gate times the int8 model beside the float model,
which has to be slower before the load begins. Prints what each run saw; any step back is wrong.
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
from onnxq.judging.verify import Latency, Timer, verify
from onnxq.modelfile import load
from onnxq.onnx_tools import skeleton
from onnxq.samples.data import evenly, model_inputs, open_samples

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
    """Time the int8 model of a model beside it, without load and with it."""
    samples = list(evenly(open_samples(data, model_inputs(skeleton(load(model)))), 8))
    with TemporaryDirectory() as folder:
        quantized = Path(folder) / "int8.onnx"
        budget = onnxq.Budget(search="off", accuracy="off", latency=0)
        onnxq.quantize(model, samples, quantized, goal=onnxq.Goal(force=True), budget=budget)

        def seen() -> Latency:
            found = verify(model, quantized, samples, timer=Timer(seconds)).latency
            assert found is not None
            told = "stepped back" if found.slower else ""
            click.echo(f"{found.speed:.2f}x, {found.interval[0]:.2f} to {found.interval[1]:.2f} {told}")
            return found

        if seen().slower:
            raise click.ClickException(f"the int8 model of {model} is slower without load too; give another")
        with full_load() as cores:
            click.echo(f"{cores} cores busy, {os.getloadavg()[0]:.1f} processes in the mean of the last minute")
            start = time.perf_counter()
            wrong = sum(seen().slower for _ in range(runs))
            click.echo(f"{wrong} wrong steps back in {runs} runs, {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
