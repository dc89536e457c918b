"""Calibrate on a Dask cluster whose workers simulate what they see, and measure what travels and what the client holds.

    python benchmarks/cluster.py [--samples 10000] [--tensors 3000] [--workers 2] [--seconds 300] [--lease 60]

The workers take their time for each sample and give it evidence of the size that real tensors have (a range and a
histogram of each); leases, merging, fetching and the client are those of every calibration. ``--seconds`` is how long
all samples take. Needs an otherwise idle machine; scheduler and workers are processes of their own.
"""

from __future__ import annotations

import argparse
import platform
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import distributed
import numpy as np
from distributed.deploy.subprocess import SubprocessCluster
from onnx import TensorProto, helper

from onnxq.calibration.collect import collect
from onnxq.calibration.dask_cluster import Cluster
from onnxq.calibration.kinds import Observers, default_request
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.data.inputs import Sample

SAMPLE_BYTES = 5 * 10**6
CLIENT_BYTES = 500 * 10**6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--tensors", type=int, default=3_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=300.0, help="that all samples take, on all workers")
    parser.add_argument("--lease", type=float, default=60.0)
    parser.add_argument("--results", type=Path, help="file to write the table to")
    options = parser.parse_args()
    cluster = SubprocessCluster(n_workers=options.workers, worker_kwargs={"nthreads": 1, "dashboard": False})
    connected: Any = distributed.Client
    with cluster, connected(cluster) as client:
        client.wait_for_workers(options.workers)
        pause = options.seconds * options.workers / options.samples
        client.run(simulate, options.tensors, pause)
        text = report(options, *measured(options, client))
    print(text)
    if options.results:
        options.results.write_text(text)


def measured(
    options: argparse.Namespace, client: Any
) -> tuple[CalibrationStatistics, float, dict[str, list[dict[str, Any]]]]:
    """Calibrate; return the evidence, how long it took, and what each worker has sent."""
    names = [f"t{number}" for number in range(options.tensors)]
    requests = [default_request(name, kind) for name in names for kind in ("range", "histogram")]
    start = time.perf_counter()
    workers = Cluster(client, lease=options.lease)
    statistics = collect(chain(names), Numbered(options.samples), requests, workers=workers)
    return statistics, time.perf_counter() - start, client.run(sent)


def chain(names: Sequence[str]) -> Any:
    """Return a model that gives all these tensors, one after the other."""
    nodes = [helper.make_node("Relu", [before], [name]) for before, name in zip(["x", *names], names, strict=False)]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", names[-1])]
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


class Numbered:
    """Samples that hold nothing but their number, which workers read themselves."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Sample]:
        return numbers(range(self.count))

    def read_samples(self, indices: Sequence[int]) -> Iterator[Sample]:
        return numbers(indices)


def numbers(positions: Sequence[int]) -> Iterator[Sample]:
    for number in positions:
        yield {"x": np.array([number], np.float32)}


def simulate(tensors: int, seconds: float) -> None:
    """Let this process take so long for each sample, and give all samples evidence of one size."""
    import onnxq.calibration.dask_cluster

    values = np.random.default_rng(0).normal(size=20_000).astype(np.float32)
    requests = [default_request("t0", kind) for kind in ("range", "histogram")]

    def observed(instrumented: Any, samples: Any, *, room: int) -> CalibrationStatistics:
        digests = []
        for _, sample in samples:
            digests.append(f"{int(sample['x'][0]):032x}")
            time.sleep(seconds)
        found = {}
        for number in range(tensors):
            for request, statistic in one.statistics.items():
                found[default_request(f"t{number}", request.kind)] = statistic
        return CalibrationStatistics(tuple(sorted(digests)), found)

    observers = Observers(requests)
    observers.add("t0", values)
    one = CalibrationStatistics((), observers.statistics())
    # The very name that workers look up.
    vars(onnxq.calibration.dask_cluster)["observe_samples"] = observed


def sent(dask_worker: Any) -> list[dict[str, Any]]:
    """Return what this worker has sent, to other workers and on the way to the client."""
    return [{"bytes": entry["compressed"], "keys": len(entry["keys"])} for entry in dask_worker.transfer_outgoing_log]


def report(
    options: argparse.Namespace,
    statistics: CalibrationStatistics,
    seconds: float,
    sent: dict[str, list[dict[str, Any]]],
) -> str:
    one = sum(array.nbytes for statistic in statistics.statistics.values() for array in statistic.arrays().values())
    # Answers to small questions are no statistics.
    traffic = [[entry["bytes"] for entry in entries if entry["bytes"] > one / 2] for entries in sent.values()]
    most = max(len(entries) for entries in traffic)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    leases = seconds / options.lease
    rows = [
        ("client: peak memory below 500 MB", f"{memory / 1e6:.0f} MB", memory < CLIENT_BYTES),
        (
            f"each worker sends its statistics at most once a lease of {options.lease:.0f} s (and once at the end)",
            f"{most} times at most, in {leases:.1f} leases",
            most <= leases + 1,
        ),
    ]
    total = sum(map(sum, traffic))
    shards = options.samples * one
    lines = [
        f"{options.samples} simulated samples, {options.tensors} tensors, {options.workers} Dask workers, leases of "
        f"{options.lease:.0f} s, {seconds:.0f} s in all, {platform.machine()}",
        "",
        "| bar | measured | met |",
        "|---|---|---|",
        *(f"| {bar} | {found} | {'yes' if met else 'no'} |" for bar, found, met in rows),
        "",
        f"Statistics are {one / 1e6:.0f} MB; the workers sent {total / 1e6:.0f} MB of them in "
        f"{sum(map(len, traffic))} transfers. Sent after each sample of {SAMPLE_BYTES / 1e6:.0f} MB they would be "
        f"{shards / 1e9:.0f} GB.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
