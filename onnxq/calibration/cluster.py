"""A Dask cluster as the place where samples run."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import onnx

from onnxq.calibration.evidence import Evidence
from onnxq.calibration.leases import Job
from onnxq.calibration.shards import Tapped, carrying_weights
from onnxq.calibration.work import Work
from onnxq.errors import DataError, SchemeError
from onnxq.ir.stored_tensors import external_files


@dataclass(frozen=True)
class Cluster:
    """The workers of a Dask cluster, which need onnxq but no shared disk; they may join and leave at any time.

    Workers read samples themselves where they see the files, or were sent the object whose items these are, see
    `onnxq.calibration.parcels`, else they are sent. What a lost worker had not handed over is run again. Security is
    what Dask's configuration, or the client, says.

    Args:
        address: Of the scheduler, such as ``tcp://10.0.0.1:8786``, or a connected `distributed.Client`.
        patience: Seconds to wait for the scheduler's answer, and for a first worker.
        lease: Seconds for which a worker keeps its statistics to itself; what a lost worker costs, and how often
            statistics travel, are decided by it.

    Raises:
        SchemeError: Dask is not installed, or no scheduler answers.
    """

    address: Any
    patience: float = 10.0
    lease: float = 60.0

    def run(self, tapped: Tapped, work: Work) -> Iterator[Evidence]:
        """Yield statistics about once a lease, each of all that the workers have run in it.

        Raises:
            DataError: A sample cannot be read or does not run, or workers fail again and again.
            ModelError: The model does not load.
            SchemeError: The cluster is not there, or has no workers.
        """
        with self._connected() as client:
            self._check_workers(client)
            job = Job(client, _travelling(tapped), work, self.lease)
            try:
                yield from job.run()
            except OSError as error:
                raise DataError(
                    f"The scheduler at {client.scheduler.address} answers no more ({error}), expected it until the end "
                    "of calibration; start it and calibrate again, which goes on where it was"
                ) from error
            finally:
                job.close()

    def _check_workers(self, client: Any) -> None:
        try:
            client.wait_for_workers(1, timeout=self.patience)
        except TimeoutError as error:
            raise SchemeError(
                f"The cluster at {client.scheduler.address} has no workers, expected at least one; start some"
            ) from error

    @contextmanager
    def _connected(self) -> Iterator[Any]:
        try:
            from distributed import Client
            from distributed.comm.addressing import get_address_host_port, normalize_address, parse_address
        except ImportError as error:
            raise SchemeError(
                "Dask is not installed, expected it for a cluster; run pip install 'onnxq[dask]'"
            ) from error
        if isinstance(self.address, Client):
            yield self.address
            return
        connect: Any = Client
        try:
            if parse_address(normalize_address(self.address))[0] in ("tcp", "tls"):
                # A client that cannot connect prints a traceback when it is collected: a plain connection goes first.
                place = get_address_host_port(normalize_address(self.address))
                socket.create_connection(place, self.patience).close()
            client = connect(self.address, timeout=self.patience, set_as_default=False)
        except (OSError, ValueError, TypeError) as error:
            raise SchemeError(
                f"No Dask scheduler answers at {self.address}, expected one as in tcp://10.0.0.1:8786; start it first"
            ) from error
        with client:
            yield client


def _travelling(tapped: Tapped) -> Tapped:
    if tapped.folder is None:
        return tapped
    parts = [onnx.ModelProto.FromString(segment.model) for segment in tapped.segments]
    return carrying_weights(tapped, sorted({path for part in parts for path in external_files(part, tapped.folder)}))
