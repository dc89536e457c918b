"""Run chunks of samples on a Dask cluster, which runs those of a lost worker again."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from onnxq.calibration.instrumented import Chunk, InstrumentedModel, OpenedModel
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.errors import DataError, OnnxqError, SchemeError

_PATIENCE = 10.0
"""Seconds to wait for the scheduler, and for a first worker."""
_LONGEST_ABSENCE = 60.0
"""Seconds after which a cluster is given up that all workers have left."""


def observe_on_cluster(
    cluster: Any, instrumented: InstrumentedModel, chunks: Iterable[Chunk]
) -> Iterator[CalibrationStatistics]:
    """Yield the statistics of chunks in their order.

    Workers need onnxq but no shared disk: the model and the samples are sent to them. They may join and leave at any
    time. Security follows the configuration of Dask, or of the client.

    Args:
        cluster: Address of the scheduler, such as ``tcp://10.0.0.1:8786``, or a connected `distributed.Client`.
        instrumented: The model.
        chunks: The samples, in memory.

    Raises:
        DataError: A sample does not run, workers fail, all of them leave, or the scheduler is lost.
        ModelError: The model does not load.
        SchemeError: Dask is not installed, no scheduler answers, or the cluster has no workers.
    """
    with _connected(cluster) as client:
        import dask

        # Dask keeps the arguments of a task until it is done, and so can run it again without this process.
        with dask.config.set({"distributed.admin.large-graph-warning-threshold": "1 TiB"}):
            model = client.submit(_received, instrumented.with_weights(), pure=False)
            started: deque[Any] = deque()
            try:
                for chunk in chunks:
                    # The workers need not wait for this process, which holds no more than these samples.
                    while len(started) >= max(2, 2 * sum(client.nthreads().values())):
                        yield _result(client, started.popleft())
                    started.append(client.submit(_observed, model, chunk, pure=False))
                while started:
                    yield _result(client, started.popleft())
            finally:
                for future in started:
                    future.cancel()


def _result(client: Any, future: Any) -> CalibrationStatistics:
    """Wait for the statistics of a chunk as long as the cluster has workers."""
    from distributed import KilledWorker

    address = client.scheduler.address
    while True:
        try:
            answer: CalibrationStatistics | OnnxqError = future.result(timeout=_LONGEST_ABSENCE)
        except TimeoutError as error:
            if client.nthreads():
                continue
            raise DataError(
                f"All workers of {address} have left and none has come for {_LONGEST_ABSENCE:.0f} seconds, expected "
                "some; start them and calibrate again"
            ) from error
        except KilledWorker as error:
            raise DataError(
                f"Workers of {address} died again and again, expected them to finish; they may lack memory"
            ) from error
        except OSError as error:
            raise DataError(
                f"The scheduler at {address} no longer answers ({error}); start it and calibrate again"
            ) from error
        # A worker may lack a package, or have another version of one.
        except Exception as error:
            raise DataError(
                f"Workers of {address} failed ({type(error).__name__}: {error}), expected statistics; check that they "
                "have the same onnxq"
            ) from error
        if isinstance(answer, OnnxqError):
            raise answer
        return answer


@contextmanager
def _connected(cluster: Any) -> Iterator[Any]:
    """Yield a client of a cluster that has workers."""
    try:
        from distributed import Client
        from distributed.comm.addressing import get_address_host_port, normalize_address, parse_address
    except ImportError as error:
        raise SchemeError("Dask is not installed, expected it for a cluster; run pip install 'onnxq[dask]'") from error
    with ExitStack() as stack:
        if isinstance(cluster, Client):
            client: Any = cluster
        else:
            try:
                if parse_address(normalize_address(cluster))[0] in ("tcp", "tls"):
                    # A client that cannot connect prints a traceback when it is collected, so connect plainly first.
                    place = get_address_host_port(normalize_address(cluster))
                    socket.create_connection(place, _PATIENCE).close()
                connect: Any = Client
                client = stack.enter_context(connect(cluster, timeout=_PATIENCE, set_as_default=False))
            except (OSError, ValueError, TypeError) as error:
                raise SchemeError(
                    f"No Dask scheduler answers at {cluster}, expected one as in tcp://10.0.0.1:8786; start it first"
                ) from error
        try:
            client.wait_for_workers(1, timeout=_PATIENCE)
        except TimeoutError as error:
            raise SchemeError(
                f"The cluster at {client.scheduler.address} has no workers, expected at least one; start some"
            ) from error
        yield client


# What workers do.

_LOCK = threading.Lock()
_OPENED: WeakKeyDictionary[InstrumentedModel, OpenedModel] = WeakKeyDictionary()
"""The sessions of this worker; they close with the last reference to the model."""


def _received(instrumented: InstrumentedModel) -> InstrumentedModel:
    return instrumented


def _observed(instrumented: InstrumentedModel, chunk: Chunk) -> CalibrationStatistics | OnnxqError:
    try:
        with _LOCK:
            if instrumented not in _OPENED:
                _OPENED[instrumented] = OpenedModel(instrumented)
        return _OPENED[instrumented].observe(chunk)
    except OnnxqError as error:
        # Dask would keep the frames of a raised error, and the sessions with them.
        return error
