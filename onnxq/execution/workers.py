"""Where shards run: threads of this process, processes of this machine, or a Dask cluster."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, CancelledError, Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import onnx

from onnxq.errors import DataError, SchemeError
from onnxq.evidence.provenance import external_files
from onnxq.execution.shards import Pool, Tapped, Workers, carrying_weights, forget_session

_MOST_THREADS = 8
"""Each thread holds the taps of one sample in memory."""


def available_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class Threads:
    """Threads of this process, which share one session.

    Raises:
        SchemeError: `count` is below 1.
    """

    count: int | None = None

    def __post_init__(self) -> None:
        _check_count(self.count, "threads")

    @contextmanager
    def open(self, tapped: Tapped) -> Iterator[Pool]:
        """Start threads, and close the session at the end."""
        count = self.count or min(available_cores(), _MOST_THREADS)
        try:
            with _finishing(ThreadPoolExecutor(count)) as executor:
                yield Pool(executor, tapped, count)
        finally:
            forget_session()


@dataclass(frozen=True)
class Processes:
    """Worker processes of this machine, each with one thread and a session of its own.

    Raises:
        SchemeError: `count` is below 1.
    """

    count: int

    def __post_init__(self) -> None:
        _check_count(self.count, "jobs")

    @contextmanager
    def open(self, tapped: Tapped) -> Iterator[Pool]:
        """Start processes; they import onnxq anew, since a fork would copy the threads of onnxruntime half-alive."""
        with _finishing(ProcessPoolExecutor(self.count, multiprocessing.get_context("spawn"))) as executor:
            yield Pool(executor, tapped, self.count)


@dataclass(frozen=True)
class Cluster:
    """The workers of a Dask cluster, which need onnxq but no shared disk; Dask gives what they lose to others.

    Args:
        address: Of the scheduler, such as ``tcp://10.0.0.1:8786``.
        patience: Seconds to wait for its answer.

    Raises:
        SchemeError: Dask is not installed, or no scheduler answers.
    """

    address: str
    patience: float = 10.0

    @contextmanager
    def open(self, tapped: Tapped) -> Iterator[Pool]:
        """Connect, and hand the model to every worker once."""
        try:
            from distributed import Client, KilledWorker
            from distributed.comm.addressing import get_address_host_port, normalize_address
        except ImportError as error:
            raise SchemeError(
                "Dask is not installed, expected it for a cluster; run pip install 'onnxq[dask]'"
            ) from error
        try:
            # A client that cannot connect prints a traceback when it is collected, so a plain connection goes first.
            socket.create_connection(get_address_host_port(normalize_address(self.address)), self.patience).close()
            connect: Any = Client
            client = connect(self.address, timeout=self.patience, set_as_default=False)
        except (OSError, ValueError) as error:
            raise SchemeError(
                f"No Dask scheduler answers at {self.address}, expected one as in tcp://10.0.0.1:8786; start it first"
            ) from error
        with client:
            travelling = tapped
            if tapped.folder is not None:
                parts = [onnx.ModelProto.FromString(segment.model) for segment in tapped.segments]
                files = {path for part in parts for path in external_files(part, tapped.folder)}
                travelling = carrying_weights(tapped, sorted(files))
            client.wait_for_workers(1)
            shared = client.scatter(travelling, broadcast=True, hash=False)
            executor = client.get_executor(pure=False)
            try:
                yield Pool(executor, shared, max(1, sum(client.nthreads().values())), sees_files=False)
            except KilledWorker as error:
                raise DataError(
                    f"Workers of {self.address} died again and again, expected them to finish; they may lack memory"
                ) from error
            except CancelledError as error:
                raise BrokenExecutor("the workers that held the model are gone") from error
            finally:
                executor.shutdown(wait=False)


def workers_for(*, jobs: int | None = None, cluster: str | None = None) -> Workers:
    """Return the workers that a user asked for: threads of this process unless told otherwise.

    Raises:
        SchemeError: Both were asked for, or `jobs` is below 1.
    """
    if jobs is not None and cluster is not None:
        raise SchemeError("Jobs and a cluster are both given, expected one; the cluster decides on its own workers")
    if cluster is not None:
        return Cluster(cluster)
    return Threads() if jobs is None else Processes(jobs)


@contextmanager
def _finishing(executor: Executor) -> Iterator[Executor]:
    """Wait for what runs, and forget what has not begun, so that an error is not held up."""
    try:
        yield executor
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _check_count(count: int | None, what: str) -> None:
    if count is not None and count < 1:
        raise SchemeError(f"Number of {what} is {count}, expected at least 1")
