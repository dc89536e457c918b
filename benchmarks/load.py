"""Whether a machine under full load makes the latency gate take a model for slower that is not.

    python benchmarks/load.py [--model MODEL --data DATA] [--runs N] [--seconds SECONDS]

While as many processes as there are cores do nothing but work, the gate times two models beside the float model: a copy
of it, which is as fast, and its int8 model, which is taken to be faster if it is so before the load begins. Prints what
each run saw; any step back is wrong.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import click

import onnxq
from onnxq.judging.verify import verify
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
    """Time a copy of a model and its int8 model beside the model, without load and with it."""
    samples = list(evenly(open_samples(data, model_inputs(skeleton(load(model)))), 8))
    with TemporaryDirectory() as folder:
        copy, quantized = Path(folder) / "copy.onnx", Path(folder) / "int8.onnx"
        shutil.copy(model, copy)
        budget = onnxq.Budget(search="off", accuracy="off", latency=0)
        onnxq.quantize(model, samples, quantized, goal=onnxq.Goal(force=True), budget=budget)
        candidates = {"a copy": copy, "int8": quantized}
        for name, candidate in list(candidates.items()):
            latency = verify(model, candidate, samples, seconds=seconds).latency
            assert latency is not None
            click.echo(f"{name} before: {latency.speed:.2f}x, {latency.interval[0]:.2f} to {latency.interval[1]:.2f}")
            if name != "a copy" and latency.speed < 1:
                del candidates[name]
        with full_load() as cores:
            click.echo(f"{cores} cores busy, {os.getloadavg()[0]:.1f} processes in the mean of the last minute")
            for name, candidate in candidates.items():
                wrong, start = 0, time.perf_counter()
                for _ in range(runs):
                    found = verify(model, candidate, samples, seconds=seconds)
                    assert found.latency is not None
                    low, high = found.latency.interval
                    wrong += found.slower
                    told = "stepped back" if found.slower else ""
                    click.echo(f"{name}: {found.latency.speed:.2f}x, {low:.2f} to {high:.2f} {told}")
                taken = time.perf_counter() - start
                click.echo(f"{name}: {wrong} wrong steps back in {runs} runs, {taken:.0f} s")


if __name__ == "__main__":
    main()
