"""What a quantization did, as values and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from onnxq.errors import OutputError
from onnxq.evaluate import Agreement
from onnxq.plan import Plan
from onnxq.search import Sensitivity
from onnxq.verify import Kernels, Latency


@dataclass(frozen=True)
class Report:
    """Everything that was decided and measured.

    Attributes:
        model: where the float model came from.
        output: the file that was written, or None.
        float_bytes: size of the float model with its external data.
        bytes: size of the quantized model with its external data.
        plan: every node's decision with its reason.
        ranges: the range method that turned statistics into scales.
        agreement: with the float model, on samples of the calibration data.
        kernels: what runs in the optimised graph.
        latency: beside the float model; None when it was not asked for.
        sensitivities: the nodes that were measured alone, worst first.
        measured: how many candidate models were built and run.
        samples: how many samples were calibrated.
        seconds: time that everything took.
    """

    model: str
    output: str | None
    float_bytes: int
    bytes: int
    plan: Plan
    ranges: str
    agreement: Agreement
    kernels: Kernels
    latency: Latency | None
    sensitivities: tuple[Sensitivity, ...]
    measured: int
    samples: int
    seconds: float

    @property
    def size_ratio(self) -> float:
        """Size of the quantized model as a share of the float model's."""
        return self.bytes / self.float_bytes

    def to_json(self) -> str:
        """Return the report as JSON, figures of the closing table first.

        An infinite SQNR is ``null``, beside a largest error of 0 when equal.
        """
        summary = {
            "size_ratio": self.size_ratio,
            "worst_sqnr": self.agreement.worst_sqnr,
            "speed": self.latency.speed if self.latency is not None else None,
        }
        return json.dumps(_plain_fields({**summary, **asdict(self)}), indent=2)

    def save(self, path: str | Path) -> None:
        """Write the report as JSON.

        Raises:
            OutputError: the file cannot be written.
        """
        try:
            Path(path).write_text(self.to_json() + "\n", encoding="utf-8")
        except OSError as reason:
            raise OutputError(f"report {path} cannot be written: {reason.strerror}") from reason


def _plain_fields(fields: Mapping[str, object]) -> dict[str, object]:
    return {name: _plain(value) for name, value in fields.items()}


def _plain(value: object) -> object:
    """Turn what JSON has no word for into null."""
    if isinstance(value, dict):
        return _plain_fields(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
